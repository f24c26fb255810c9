"""What others write, read by nibble: safetensors, GGUF, NVFP4 checkpoints, old .dat files."""

import os

import gguf
import numpy as np
from safetensors.numpy import save_file

import ref
from harness import equal, expect, same_bytes, same_keys, write_json
from out_checks import gguf_name

NAMES = {np.uint8: "u8", np.int8: "i8", np.int16: "i16", np.int32: "i32", np.int64: "i64",
         np.float16: "f16", np.float32: "f32", np.float64: "f64", np.bool_: "bool",
         ref.BF16: "bf16", ref.E4M3: "e4m3"}
NAMES = {np.dtype(k): v for k, v in NAMES.items()}


def check_rows(box, path, tensors, offsets, *args):
    """inspect --json lists exactly these tensors."""
    rows = box.inspect(path, *args)
    same_keys("inspect", rows, tensors)
    for name, t in tensors.items():
        got = [rows[name][k] for k in ("dtype", "shape", "bytes", "offset")]
        equal(f"inspect: {name}", got, [NAMES[t.dtype], list(t.shape), t.nbytes, offsets[name]])


def st_offsets(path):
    header, start = ref.st_header(path)
    return {k: start + v["data_offsets"][0] for k, v in header.items() if k != "__metadata__"}


def any_tensors(seed=2):
    """Names, shapes and types that safetensors allows, models aside."""
    rng, tensors = np.random.default_rng(seed), {}
    for i, dtype in enumerate(NAMES):
        for shape in ((), (0, 3), (5,), (2, 3, 4)):
            x = rng.integers(0, 2 if dtype == np.bool_ else 100, shape)
            tensors[f"t{i}.{len(shape)}"] = np.asarray(x).astype(dtype)
    tensors['quote " backslash \\ é ☃'] = np.ones(3, np.float32)
    return tensors


def safetensors_any(box):
    tensors, path = any_tensors(), box.path("any.safetensors")
    save_file(tensors, path, metadata={"format": "np", "note": "é"})
    check_rows(box, path, tensors, st_offsets(path))
    box.run("convert", path, box.path("any.dat"))
    box.run("convert", box.path("any.dat"), box.path("back.safetensors"))
    for back in (ref.read_dat(box.path("any.dat")), ref.read_st(box.path("back.safetensors"))):
        same_keys("tensors", back, tensors)
        for name, t in tensors.items():
            same_bytes(name, back[name], t)


def mixed_weights(c, seed=3):
    """A model whose tensors have the three float types in turn."""
    types = (ref.BF16, np.float16, np.float32)
    return {n: t.astype(types[i % 3])
            for i, (n, t) in enumerate(ref.weights(c, np.float32, seed).items())}


def safetensors_mixed_model(box):
    c = ref.config(tie_word_embeddings=False)
    source, path = mixed_weights(c), box.path("m/model.safetensors")
    ref.write_model(box.path("m"), c, source)
    check_rows(box, path, source, st_offsets(path), "--verify")
    box.run("convert", box.path("m"), box.path("m.dat"))
    box.run("convert", box.path("m"), box.path("m.gguf"))
    box.run("convert", box.path("m.gguf"), box.path("back"))
    for back in (ref.read_dat(box.path("m.dat")), ref.read_model(box.path("back"))):
        same_keys("tensors", back, source)
        for name, t in source.items():
            same_bytes(name, back[name], t)
    for dtype, cast in (("f16", np.float16), ("bf16", ref.BF16), ("f32", np.float32)):
        out = box.path(f"{dtype}.safetensors")
        box.run("convert", box.path("m"), out, "--dtype", dtype)
        for name, t in ref.read_st(out).items():
            same_bytes(f"{dtype} {name}", t, source[name].astype(np.float32).astype(cast))


def safetensors_their_shards(box):
    """Only the index says which files belong to a model, and what they are called."""
    c = ref.config()
    source = mixed_weights(c)
    ref.write_model(box.path("m"), c, source)
    os.remove(box.path("m/model.safetensors"))
    weight_map = {}
    for i in range(3):
        part = {n: t for k, (n, t) in enumerate(source.items()) if k % 3 == i}
        weight_map |= dict.fromkeys(part, f"part.{i}.safetensors")
        save_file(part, box.path(f"m/part.{i}.safetensors"))
    save_file({"stray": np.ones(3)}, box.path("m/stray.safetensors"))
    write_json({"metadata": {"total_size": sum(t.nbytes for t in source.values())},
                "weight_map": weight_map}, box.path("m/model.safetensors.index.json"))
    rows = box.inspect(box.path("m"), "--verify")
    equal("files", {n: r["file"] for n, r in rows.items()}, weight_map)
    box.run("convert", box.path("m"), box.path("m.dat"))
    back = ref.read_dat(box.path("m.dat"))
    same_keys("tensors", back, source)
    for name, t in source.items():
        same_bytes(name, back[name], t)


# ---- GGUF ----


def random_nvfp4(rng, shape):
    """Any codes under any finite positive scales."""
    rows, columns = shape
    q = rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
    return q, rng.integers(1, 0x7F, (rows, columns // 16), dtype=np.uint8).view(ref.E4M3)


def write_gguf(path, c, plain, nvfp4, scale_suffix, alignment):
    """A GGUF as the package writes it, with the least of metadata."""
    w = gguf.GGUFWriter(path, "qwen3")
    if alignment:
        w.add_custom_alignment(alignment)
    w.add_name("theirs")
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_block_count(c["num_hidden_layers"])
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(c["num_attention_heads"])
    w.add_head_count_kv(c["num_key_value_heads"])
    w.add_key_length(c["head_dim"])
    w.add_value_length(c["head_dim"])
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_rope_freq_base(c["rope_theta"])
    for name, t in plain.items():
        if t.dtype == ref.BF16:
            w.add_tensor(gguf_name(name), t.view(np.uint8),
                         raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            w.add_tensor(gguf_name(name), t)
    for name, (q, s, tensor_scale) in nvfp4.items():
        w.add_tensor(gguf_name(name), ref.gguf_blocks(q, s),
                     raw_dtype=gguf.GGMLQuantizationType.NVFP4)
        if tensor_scale != 1:
            w.add_tensor(gguf_name(name).removesuffix(".weight") + scale_suffix,
                         np.float32([tensor_scale]))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def gguf_theirs(box, scale_suffix, alignment):
    c, rng = ref.config(), np.random.default_rng(4)
    source = mixed_weights(c)
    plain = {n: t.astype(np.float32) if t.ndim == 1 else t for n, t in source.items()}
    quantized = {}
    for name, tensor_scale in (("mlp.up_proj", 1), ("mlp.down_proj", 0.00123)):
        name = f"model.layers.1.{name}.weight"
        quantized[name] = (*random_nvfp4(rng, plain.pop(name).shape), np.float32(tensor_scale))
    path = box.path("theirs.gguf")
    write_gguf(path, c, plain, quantized, scale_suffix, alignment)
    for t in gguf.GGUFReader(path).tensors:
        if t.tensor_type == gguf.GGMLQuantizationType.NVFP4:
            name = next(n for n in quantized if gguf_name(n) == t.name)
            same_bytes("the test's own blocks", gguf.quants.dequantize(t.data, t.tensor_type)
                       + np.float32(0), ref.dequantize(*quantized[name][:2]) + np.float32(0))
    box.run("inspect", path, "--verify")
    box.run("convert", path, box.path("keep.safetensors"))
    box.run("convert", path, box.path("f32.safetensors"), "--dtype", "f32")
    keep, f32 = ref.read_st(box.path("keep.safetensors")), ref.read_st(box.path("f32.safetensors"))
    same_keys("f32", f32, source)
    for name, t in plain.items():
        same_bytes(name, keep[name], t)
        same_bytes(name, f32[name], t.astype(np.float32))
    for name, (q, s, tensor_scale) in quantized.items():
        same_bytes(name, keep[name], q)
        same_bytes(name + "_scale", keep[name + "_scale"], s)
        same_bytes(name + "_scale_2", keep[name + "_scale_2"], tensor_scale)
        same_bytes(name, f32[name], ref.dequantize(q, s, tensor_scale))


# ---- NVFP4 checkpoints of other tools ----


def checkpoint(c, compressed, seed=5):
    """A checkpoint with calibrated activation scales and tensor scales that are no powers of
    two; returns the stored tensors, and the NVFP4 parts with tensor scales as multipliers."""
    rng, stored, nvfp4 = np.random.default_rng(seed), {}, {}
    for name, t in ref.weights(c, ref.BF16).items():
        if not ref.is_projection(name) or name == "lm_head.weight":
            stored[name] = t
            continue
        q, s = random_nvfp4(rng, t.shape)
        stem, scale = name.removesuffix(".weight"), np.float32(rng.uniform(1e-5, 1e-3))
        if compressed:
            divisor = np.float32(1) / scale
            stored |= {stem + ".weight_packed": q, stem + ".weight_scale": s,
                       stem + ".weight_global_scale": divisor.reshape(1),
                       stem + ".input_global_scale": np.float32([700])}
            scale = np.float32(1) / divisor
        else:
            stored |= {stem + ".weight": q, stem + ".weight_scale": s,
                       stem + ".weight_scale_2": np.array(scale),
                       stem + ".input_scale": np.array(np.float32(1 / 700))}
            for cache in ("k", "v"):  # of a checkpoint with an FP8 cache
                if stem.endswith(f".{cache}_proj"):
                    stored[f"{stem}.{cache}_scale"] = np.array(np.float32(0.5))
        nvfp4[name] = (q, s, scale)
    return stored, nvfp4


def checkpoint_values(box, compressed):
    c = ref.config(tie_word_embeddings=False)
    stored, nvfp4 = checkpoint(c, compressed)
    c["quantization_config"] = {"quant_method": "compressed-tensors" if compressed else "modelopt"}
    ref.write_model(box.path("m"), c, stored)
    box.run("inspect", box.path("m"), "--verify")
    box.run("convert", box.path("m"), box.path("f32"), "--dtype", "f32")
    values = ref.read_model(box.path("f32"))
    same_keys("f32", values, ref.shapes(c))
    for name, t in values.items():
        want = (ref.dequantize(*nvfp4[name]) if name in nvfp4
                else stored[name].astype(np.float32))
        same_bytes(name, t, want)
    if compressed:  # as compressed-tensors itself computes it: block scale / global scale first
        for name, (q, s, _) in nvfp4.items():
            divisor = stored[name.removesuffix(".weight") + ".weight_global_scale"]
            theirs = ref.dequantize(q, s.astype(np.float32) / divisor)
            expect(np.allclose(values[name], theirs, rtol=3e-7, atol=0), f"{name}: too far off")


def checkpoint_chain(box):
    c = ref.config(tie_word_embeddings=False)
    stored, nvfp4 = checkpoint(c, False)
    ref.write_model(box.path("m"), c, stored)
    box.run("convert", box.path("m"), box.path("a.dat"))
    box.run("convert", box.path("a.dat"), box.path("b.gguf"), "--model-dir", box.path("m"))
    box.run("convert", box.path("b.gguf"), box.path("c"), "--layout", "compressed-tensors")
    box.run("convert", box.path("c"), box.path("d"), "--layout", "modelopt")
    dat, back = ref.read_dat(box.path("a.dat")), ref.read_model(box.path("d"))
    gone = {n for n in stored if n.endswith((".input_scale", ".k_scale", ".v_scale"))}
    same_keys("tensors", back, set(stored) - gone)
    for name, (q, s, scale) in nvfp4.items():
        same_bytes(name, dat[name + ".qdata"], q)
        same_bytes(name, dat[name + ".scale"], s)
        same_bytes(name, dat[name + ".tscale"], scale.reshape(1))
        same_bytes(name, back[name], q)
        same_bytes(name, back[name + "_scale"], s)
        got = back[name + "_scale_2"]  # was inverted twice
        expect(abs(got / scale - 1) < 2.0 ** -22, f"{name}: tensor scale {got}, was {scale}")
    for name in set(stored) - gone:
        if stored[name].dtype == ref.BF16:
            same_bytes(name, back[name], stored[name])


# ---- .dat files of the predecessor ----


def dat_types(box):
    tensors = [(f"entry.{code}", code,
                np.arange(6).reshape(2, 3).astype(dtype)) for code, dtype in ref.DAT_TYPES.items()]
    tensors.append(("scalar", 6, np.array(1.5, np.float32)))
    tensors.append(("empty", 5, np.zeros((0, 7), np.float16)))
    offsets = ref.write_dat(box.path("a.dat"), tensors)
    check_rows(box, box.path("a.dat"), {n: t for n, _, t in tensors}, offsets)
    box.run("convert", box.path("a.dat"), box.path("a.safetensors"))
    back = ref.read_st(box.path("a.safetensors"))
    for name, _, t in tensors:
        same_bytes(name, back[name], t)


def legacy_dat(box, code, suffix, exact, codes=0):
    """Block scales in any type that old files used; names with and without '.weight'."""
    c, rng, rows, nvfp4 = ref.config(), np.random.default_rng(6), [], {}
    for name, t in ref.weights(c, np.float16).items():
        if not ref.is_projection(name):
            rows.append((name, 5, t))
            continue
        q, s = random_nvfp4(rng, t.shape)
        scale = s.view(np.uint8) if code == 0 else s.astype(ref.DAT_TYPES[code])
        if not exact:
            scale = (scale * 1.07).astype(scale.dtype)
        stem = name.removesuffix(".weight") + suffix
        rows += [(stem + ".qdata", codes, q), (stem + ".scale", code, scale)]
        nvfp4[name] = (q, s, scale)
    offsets = ref.write_dat(box.path("a.dat"), rows)
    os.makedirs(box.path("m"))
    write_json(c, box.path("m"), "config.json")
    listed = box.inspect(box.path("a.dat"), "--verify", "--model-dir", box.path("m"))
    same_keys("inspect", listed, ref.shapes(c))
    box.run("convert", box.path("a.dat"), box.path("f32.safetensors"), "--dtype", "f32")
    values = ref.read_st(box.path("f32.safetensors"))
    for name, (q, s, scale) in nvfp4.items():
        stem = name.removesuffix(".weight") + suffix
        equal(f"inspect: {name}", [listed[name][k] for k in (
            "dtype", "shape", "bytes", "offset", "scale_dtype", "tensor_scale")],
              ["nvfp4", [q.shape[0], 2 * q.shape[1]], q.nbytes + scale.nbytes,
               offsets[stem + ".qdata"], "e4m3" if code == 0 else NAMES[scale.dtype], 1.0])
        same_bytes(name, values[name], ref.dequantize(q, scale))
    if exact:
        box.run("convert", box.path("a.dat"), box.path("b.dat"))
        back = ref.read_dat(box.path("b.dat"))
        for name, (q, s, _) in nvfp4.items():
            same_bytes(name, back[name + ".qdata"], q)
            same_bytes(name, back[name + ".scale"], s)
    else:
        text = box.refuse("convert", box.path("a.dat"), box.path("b.dat"))
        expect("not an E4M3 value" in text, f"unclear message: {text}")


CHECKS = [
    ("safetensors: anything the package writes, listed and kept", safetensors_any),
    ("safetensors: a model of mixed types, listed, kept and cast", safetensors_mixed_model),
    ("safetensors: shards with names of their own", safetensors_their_shards),
    ("gguf: a file of the package", gguf_theirs, ".scale", None),
    ("gguf: a file of the package, aligned to 64, '.weight.scale'", gguf_theirs,
     ".weight.scale", 64),
    ("ModelOpt: any tensor scale", checkpoint_values, False),
    ("compressed-tensors: any tensor scale", checkpoint_values, True),
    ("chain: ModelOpt -> .dat -> GGUF -> compressed-tensors -> ModelOpt", checkpoint_chain),
    (".dat: every element code", dat_types),
    *[(f".dat: scales as code {code}, names {'with' if suffix else 'without'} '.weight'",
       legacy_dat, code, suffix, True)
      for code in (0, 5, 6, 15, 101) for suffix in ("", ".weight")],
    *[(f".dat: scales as code {code} that are no E4M3 values", legacy_dat, code, "", False)
      for code in (5, 6, 15)],
    (".dat: codes as element type 100", legacy_dat, 101, ".weight", True, 100),
]
