"""What quantize writes: the same NVFP4 in every format, and the best that each method can do."""

import os

import gguf
import numpy as np

import ref
from harness import equal, expect, read_json, same_bytes, same_f32, same_keys
from out_checks import U32, check_keys, check_layout, field, gguf_name

METHODS = ("rtn", "4over6", "sweep")
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def quantized(box, method, two_level, dtype=ref.BF16, **changes):
    """A quantised model: its config, the weights before, and the .dat's tensors."""
    c = ref.config(**changes)
    source = ref.weights(c, dtype)
    ref.write_model(box.path("m"), c, source)
    options = ["--method", method, *(["--two-level"] if two_level else [])]
    box.run("quantize", box.path("m"), box.path("q.dat"), *options)
    return c, source, ref.read_dat(box.path("q.dat")), options


def parts(dat, name):
    """Codes, block scales and tensor scale of one weight in a .dat."""
    scale = dat.get(name + ".tscale", np.ones(1, np.float32))
    same_bytes(f"{name}.tscale is one f32", scale, scale.astype(np.float32).reshape(1))
    return dat[name + ".qdata"], dat[name + ".scale"], scale[0]


def check_dat(c, source, dat, two_level):
    suffixes = (".qdata", ".scale", ".tscale") if two_level else (".qdata", ".scale")
    made = ref.projections(c)
    same_keys(".dat", dat, [n + s for n in made for s in suffixes]
              + [n for n in source if n not in made])
    for name, (rows, columns) in made.items():
        q, s, _ = parts(dat, name)
        equal(f"{name}: shapes", (q.shape, s.shape), ((rows, columns // 2), (rows, columns // 16)))
        equal(f"{name}: types", (q.dtype, s.dtype), (np.uint8, ref.E4M3))
    for name in set(source) - set(made):
        same_bytes(name, dat[name], source[name])


def check_gguf(path, c, source, dat, two_level):
    reader = gguf.GGUFReader(path)
    check_layout(reader)
    check_keys(reader, c)
    equal("file_type", field(reader, gguf.Keys.General.FILE_TYPE, U32),
          gguf.LlamaFileType.MOSTLY_NVFP4)
    tensors, made = {t.name: t for t in reader.tensors}, ref.projections(c)
    names = [gguf_name(n) for n in set(source) | set(made)]
    if two_level:
        names += [gguf_name(n).removesuffix(".weight") + ".scale" for n in made]
    same_keys("GGUF", tensors, names)
    for name in made:
        t, (q, s, tensor_scale) = tensors[gguf_name(name)], parts(dat, name)
        equal(f"type of {t.name}", t.tensor_type, gguf.GGMLQuantizationType.NVFP4)
        values = gguf.quants.dequantize(t.data, t.tensor_type)
        same_f32(t.name, values, ref.dequantize(q, s))
        if two_level:
            second = tensors[t.name.removesuffix(".weight") + ".scale"]
            same_bytes(second.name, np.asarray(second.data), np.float32([tensor_scale]))
            same_f32(t.name, values * second.data, ref.dequantize(q, s, tensor_scale))
    embedding = tensors["token_embd.weight"]
    equal("the embedding is kept", embedding.data.tobytes(),
          source["model.embed_tokens.weight"].tobytes())


def check_directory(path, c, source, dat, compressed):
    tensors, made = ref.read_model(path), ref.projections(c)
    codes, second = ("_packed", "_global_scale") if compressed else ("", "_scale_2")
    same_keys(path, tensors, [n for n in source if n not in made]
              + [n + s for n in made for s in (codes, "_scale", second)])
    for name in made:
        q, s, tensor_scale = parts(dat, name)
        same_bytes(name + codes, tensors[name + codes], q)
        same_bytes(name + "_scale", tensors[name + "_scale"], s)
        want = np.float32(1) / tensor_scale if compressed else tensor_scale
        same_bytes(name + second, tensors[name + second],
                   np.full((1,) if compressed else (), want, np.float32))
    for name in set(source) - set(made):
        same_bytes(name, tensors[name], source[name])


def check_modelopt_config(path):
    """The keys that vLLM and llama.cpp's converter insist on."""
    config, sidecar = read_json(path, "config.json"), read_json(path, "hf_quant_config.json")
    equal("tied", config["tie_word_embeddings"], False)
    q = config["quantization_config"]
    equal("quant_method", q["quant_method"], "modelopt")
    equal("weights", q["config_groups"]["group_0"]["weights"],
          {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16})
    equal("ignore", q["ignore"], [])
    producer = sidecar.pop("producer")
    equal("producer", producer["name"], "modelopt")
    equal("hf_quant_config.json", sidecar, {"quantization": {
        "quant_algo": "W4A16_NVFP4", "kv_cache_quant_algo": None, "group_size": 16,
        "exclude_modules": []}})
    equal("quant_algo", q["quant_algo"], "W4A16_NVFP4")


def check_compressed_config(path):
    """The keys of compressed-tensors, whose schema allows no others."""
    config = read_json(path, "config.json")
    equal("tied", config["tie_word_embeddings"], False)
    equal("quantization_config", config["quantization_config"], {
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed", "global_compression_ratio": None, "ignore": [],
        "kv_cache_scheme": None, "config_groups": {"group_0": {
            "targets": ["Linear"], "input_activations": None, "output_activations": None,
            "weights": {"num_bits": 4, "type": "float", "symmetric": True,
                        "strategy": "tensor_group", "group_size": 16, "dynamic": False}}}})


def check_f32(path, c, source, dat):
    tensors, made = ref.read_st(path), ref.projections(c)
    same_keys("f32", tensors, set(source) | set(made))
    for name in tensors:
        want = (ref.dequantize(*parts(dat, name)) if name in made
                else source[name].astype(np.float32))
        same_bytes(name, tensors[name], want)


def every_format(box, method, two_level):
    # The head is larger than the pieces that nibble works in, and they end inside of rows.
    c, source, dat, options = quantized(box, method, two_level, hidden_size=192, vocab_size=6001)
    check_dat(c, source, dat, two_level)
    box.run("quantize", box.path("m"), box.path("q.gguf"), *options)
    check_gguf(box.path("q.gguf"), c, source, dat, two_level)
    for layout in ("modelopt", "compressed-tensors"):
        box.run("quantize", box.path("m"), box.path(layout), "--layout", layout, *options)
        check_directory(box.path(layout), c, source, dat, layout != "modelopt")
    check_modelopt_config(box.path("modelopt"))
    check_compressed_config(box.path("compressed-tensors"))
    for i, path in enumerate(["q.dat", "q.gguf", "modelopt", "compressed-tensors"]):
        out = box.path(f"f32-{i}.safetensors")
        model_dir = ["--model-dir", box.path("m")] if path == "q.dat" else []
        box.run("convert", box.path(path), out, "--dtype", "f32", *model_dir)
        check_f32(out, c, source, dat)


def skipped_head(box):
    """--skip lm_head keeps the head tied; readers are told what is not quantised."""
    c = ref.config()
    ref.write_model(box.path("m"), c, ref.weights(c, ref.BF16))
    skip = ["--skip", "lm_head", "--skip", "*.layers.0.*"]
    box.run("quantize", box.path("m"), box.path("q"), *skip)
    box.run("quantize", box.path("m"), box.path("q.gguf"), *skip)
    tensors = ref.read_model(box.path("q"))
    kept = [n for n in ref.shapes(c) if "layers.0." in n and ref.is_projection(n)]
    expect(all(tensors[n].dtype == ref.BF16 for n in kept), "a skipped tensor was quantised")
    expect(not any("lm_head" in n for n in tensors), "the head is not tied any more")
    config = read_json(box.path("q"), "config.json")
    equal("tied", config["tie_word_embeddings"], True)
    equal("ignored", sorted(config["quantization_config"]["ignore"]),
          sorted(["lm_head", *(n.removesuffix(".weight") for n in kept)]))
    names = {t.name for t in gguf.GGUFReader(box.path("q.gguf")).tensors}
    same_keys("GGUF", names, map(gguf_name, ref.shapes(c)))


def short_rows(box):
    """Rows of 80 values fit NVFP4 but not GGUF's blocks of 64: refused, nothing is written."""
    c, _, dat, _ = quantized(box, "sweep", True, hidden_size=80)
    message = box.refuse("convert", box.path("q.dat"), box.path("q.gguf"),
                         "--model-dir", box.path("m"))
    expect("64" in message and "--dtype" in message, f"unclear message: {message}")
    expect(not os.path.exists(box.path("q.gguf")), "a GGUF was written")
    box.run("convert", box.path("q.dat"), box.path("q"), "--model-dir", box.path("m"))
    check_directory(box.path("q"), c, ref.read_model(box.path("m")), dat, False)


def dequantized_directory(box):
    """A model that is dequantised into a directory keeps the head it had when quantised."""
    c, _, dat, _ = quantized(box, "sweep", False)
    box.run("convert", box.path("q.dat"), box.path("back"), "--dtype", "f32",
            "--model-dir", box.path("m"))
    tensors, config = ref.read_model(box.path("back")), read_json(box.path("back"), "config.json")
    same_bytes("head", tensors["lm_head.weight"], ref.dequantize(*parts(dat, "lm_head.weight")))
    expect("quantization_config" not in config, "config.json still says it is quantised")
    equal("the head differs from the embedding, but config.json says tie_word_embeddings",
          config["tie_word_embeddings"], False)


# ---- is each method what it says? ----


def scaled(source, dat, name):
    """The weight that the block scales belong to, in f32."""
    return source[name].astype(np.float32) / parts(dat, name)[2]


def check_tensor_scales(source, dat):
    """A tensor scale is a power of two, just large enough, one for weights that get fused."""
    amax = {n: np.abs(source[n].astype(np.float32)).max() for n in source if ref.is_projection(n)}
    for name in amax:
        family = next((f for f in FUSED if any(p in name for p in f)), ())
        own = next((p for p in family if p in name), "")
        together = max(amax[name.replace(own, p)] for p in family) if family else amax[name]
        want = np.float32(2.0 ** np.ceil(np.log2(np.float64(together) / 2688)))
        equal(f"tensor scale of {name}", parts(dat, name)[2], want)


def rtn_is_rtn(box, dtype, two_level):
    _, source, dat, _ = quantized(box, "rtn", two_level, dtype, tie_word_embeddings=False)
    if two_level:
        check_tensor_scales(source, dat)
    for name in filter(ref.is_projection, source):
        q, s, _ = parts(dat, name)
        w = scaled(source, dat, name)
        scale = ref.rtn_scale(w)
        same_bytes(f"scales of {name}", s.view(np.uint8), scale)
        same_bytes(f"codes of {name}", ref.unpack(q), ref.encode(w, scale))


def best_of(box, method, two_level):
    """The scale is one that the method may choose, none of the others is better, and the codes
    are the nearest under it."""
    _, source, dat, _ = quantized(box, method, two_level, tie_word_embeddings=False)
    moved = 0
    for name in filter(ref.is_projection, source):
        q, s, _ = parts(dat, name)
        w, s = scaled(source, dat, name), s.view(np.uint8)
        rtn = ref.rtn_scale(w)
        if method == "sweep":
            tried = [np.clip(rtn.astype(int) + d, 1, 0x7E).astype(np.uint8)
                     for d in range(-2, 7)]
        else:
            tried = [rtn, ref.scale_code(ref.amax_of_blocks(w) / np.float32(6) * np.float32(1.5))]
        zero = ref.amax_of_blocks(w) == 0
        expect((s[zero] == 0x38).all(), f"{name}: the scale of a block of zeros is not 1")
        expect((zero | np.any([s == t for t in tried], 0)).all(), f"{name}: a scale out of range")
        same_bytes(f"codes of {name}", ref.unpack(q), ref.encode(w, s))
        least = np.min([ref.block_error(w, t) for t in tried], 0)
        worse = ref.block_error(w, s) > least * (1 + 1e-5)
        expect(not worse[~zero].any(), f"{name}: {worse.sum()} blocks have a better scale")
        moved += (s != rtn).sum()
    expect(moved > 0, "no block moved away from round-to-nearest")


def label(two_level):
    return "two-level" if two_level else "single-level"


CHECKS = [
    *[(f"quantize: {m}, {label(two)}: .dat, GGUF, ModelOpt, compressed-tensors, f32",
       every_format, m, two) for m in METHODS for two in (False, True)],
    ("quantize: --skip lm_head keeps the head tied", skipped_head),
    ("quantize: rows of 80 values, which GGUF cannot hold", short_rows),
    ("quantize: dequantised again into a directory", dequantized_directory),
    *[(f"quantize: rtn is numpy's, {np.dtype(d).name}, {label(two)}", rtn_is_rtn, d, two)
      for d in (ref.BF16, np.float16, np.float32) for two in (False, True)],
    *[(f"quantize: {m} finds the least error, {label(two)}", best_of, m, two)
      for m in ("sweep", "4over6") for two in (False, True)],
]
