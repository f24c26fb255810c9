"""What nibble writes, read by others: plain weights, GGUF metadata, tokenizers."""

import os
import shutil

import gguf
import numpy as np
import safetensors
from safetensors.numpy import load_file

import ref
from harness import (GOLDEN, equal, expect, read_json, same_bytes, same_f32, same_keys,
                     write_json)

U32, F32, STRING, BOOL, ARRAY = (gguf.GGUFValueType[n] for n in
                                 ("UINT32", "FLOAT32", "STRING", "BOOL", "ARRAY"))
GGUF_TYPES = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16",
              np.dtype(ref.BF16): "BF16"}


def synth(box, name, *args, **changes):
    """A model directory made by nibble from a config."""
    write_json(ref.config(**changes), box.path("config.json"))
    box.run("synth", "--config", box.path("config.json"), box.path(name), *args)
    return box.path(name)


GGUF_NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 8)


def gguf_name(name):
    """What llama.cpp calls a tensor of Hugging Face."""
    return GGUF_NAMES.get_name(name.removesuffix(".weight")) + ".weight"


def field(reader, key, kind):
    """A metadata value that must have a certain type."""
    expect(key in reader.fields, f"metadata '{key}' is missing")
    equal(f"type of '{key}'", reader.fields[key].types[0], kind)
    return reader.fields[key].contents()


# ---- safetensors ----


def safetensors_directory(box, tied, dtype):
    model = synth(box, "m", "--dtype", dtype, tie_word_embeddings=tied)
    path = os.path.join(model, "model.safetensors")
    ours, theirs = ref.read_st(path), load_file(path)
    want = ref.shapes(ref.config(tie_word_embeddings=tied))
    same_keys("tensors", theirs, want)
    for name, shape in want.items():
        equal(f"shape of {name}", theirs[name].shape, shape)
        equal(f"type of {name}", theirs[name].dtype.name,
              {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}[dtype])
        same_bytes(name, theirs[name], ours[name])
    with safetensors.safe_open(path, "np") as f:
        equal("metadata", f.metadata()["format"], "pt")
    equal("header padding", ref.st_header(path)[1] % 8, 0)


def safetensors_shards(box):
    model = synth(box, "m", vocab_size=8192)
    box.run("convert", model, box.path("s"), "--shard-mb", "1")
    index, whole = read_json(box.path("s"), "model.safetensors.index.json"), ref.read_model(model)
    same_keys("index", index["weight_map"], whole)
    files = sorted(set(index["weight_map"].values()))
    expect(len(files) > 1, f"only {files}")
    equal("shard names", files, [f"model-{i + 1:05}-of-{len(files):05}.safetensors"
                                 for i in range(len(files))])
    equal("total size", index["metadata"]["total_size"], sum(t.nbytes for t in whole.values()))
    for file in files:
        path = box.path(os.path.join("s", file))
        tensors = load_file(path)
        equal(file, set(tensors), {k for k, v in index["weight_map"].items() if v == file})
        expect(len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 1e6,
               f"{file} is larger than a shard may be")
        for name, tensor in tensors.items():
            same_bytes(name, tensor, whole[name])
    same_keys("files", os.listdir(box.path("s")),
              [*files, "config.json", "model.safetensors.index.json"])


# ---- GGUF ----


def check_layout(reader):
    """What llama.cpp demands of the tensor table: aligned offsets without gaps, in order."""
    at = reader.data_offset
    for t in reader.tensors:
        expect(len(t.name) < 64, f"'{t.name}' is too long a name")
        equal(f"offset of {t.name}", t.data_offset, at)
        at += -(-t.n_bytes // reader.alignment) * reader.alignment


def check_keys(reader, c):
    """Every key that llama.cpp needs to load a Qwen3, with its type."""
    arch, keys = "qwen3", gguf.Keys
    equal("architecture", field(reader, keys.General.ARCHITECTURE, STRING), arch)
    for key, kind, want in [
            (keys.LLM.CONTEXT_LENGTH, U32, c["max_position_embeddings"]),
            (keys.LLM.EMBEDDING_LENGTH, U32, c["hidden_size"]),
            (keys.LLM.BLOCK_COUNT, U32, c["num_hidden_layers"]),
            (keys.LLM.FEED_FORWARD_LENGTH, U32, c["intermediate_size"]),
            (keys.Attention.HEAD_COUNT, U32, c["num_attention_heads"]),
            (keys.Attention.HEAD_COUNT_KV, U32, c["num_key_value_heads"]),
            (keys.Attention.KEY_LENGTH, U32, c["head_dim"]),
            (keys.Attention.VALUE_LENGTH, U32, c["head_dim"]),
            (keys.Attention.LAYERNORM_RMS_EPS, F32, np.float32(c["rms_norm_eps"])),
            (keys.Rope.FREQ_BASE, F32, np.float32(c["rope_theta"]))]:
        equal(key, field(reader, key.format(arch=arch), kind), want)
    equal("quantization_version", field(reader, keys.General.QUANTIZATION_VERSION, U32),
          gguf.GGML_QUANT_VERSION)


def gguf_plain(box, tied, dtype):
    c = ref.config(tie_word_embeddings=tied)
    model = synth(box, "m", "--dtype", dtype, tie_word_embeddings=tied)
    box.run("convert", model, box.path("m.gguf"))
    reader, source = gguf.GGUFReader(box.path("m.gguf")), ref.read_model(model)
    check_layout(reader)
    check_keys(reader, c)
    kind = {"bf16": "MOSTLY_BF16", "f16": "MOSTLY_F16", "f32": "ALL_F32"}[dtype]
    equal("file_type", field(reader, gguf.Keys.General.FILE_TYPE, U32), gguf.LlamaFileType[kind])
    tensors = {t.name: t for t in reader.tensors}
    same_keys("tensors", tensors, map(gguf_name, source))
    for name, want in source.items():
        t = tensors[gguf_name(name)]
        equal(f"shape of {t.name}", t.shape.tolist(), list(want.shape[::-1]))
        if want.ndim == 1:
            equal(f"type of {t.name}", t.tensor_type.name, "F32")
            same_f32(t.name, np.asarray(t.data), want.astype(np.float32))
        else:
            equal(f"type of {t.name}", t.tensor_type.name, GGUF_TYPES[want.dtype])
            equal(f"bytes of {t.name} are kept", t.data.tobytes() == want.tobytes(), True)


def gguf_cast(box):
    model = synth(box, "m", "--dtype", "f32")
    source = ref.read_model(model)
    for dtype, cast in (("f16", np.float16), ("bf16", ref.BF16), ("f32", np.float32)):
        box.run("convert", model, box.path("m.gguf"), "--dtype", dtype)
        tensors = {t.name: t for t in gguf.GGUFReader(box.path("m.gguf")).tensors}
        for name, t in source.items():
            want = t if t.ndim == 1 else t.astype(cast)
            expect(tensors[gguf_name(name)].data.tobytes() == want.tobytes(),
                   f"{dtype} {name} differs")


def tokenizer_model(box):
    """A thin model with the official tokenizer, made by nibble from a config directory."""
    source = box.path("source")
    official = box.data_path("configs/Qwen3-0.6B")
    os.makedirs(source)
    c = read_json(official, "config.json") | {
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    write_json(c, source, "config.json")
    shutil.copy(box.data_path("tokenizer/tokenizer.json"), source)
    shutil.copy(os.path.join(official, "tokenizer_config.json"), source)
    box.run("synth", "--config", os.path.join(source, "config.json"), box.path("m"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        equal(f"{name} went along", read_json(box.path("m"), name), read_json(source, name))
    box.run("convert", box.path("m"), box.path("m.gguf"))
    return c, read_json(source, "tokenizer.json"), read_json(source, "tokenizer_config.json")


def expected_tokens(c, tokenizer):
    """Text and llama.cpp's type of every id: normal, control, user-defined or unused."""
    size = c["vocab_size"]
    texts, types = [f"[PAD{i}]" for i in range(size)], [int(gguf.TokenType.UNUSED)] * size
    for text, i in tokenizer["model"]["vocab"].items():
        texts[i], types[i] = text, int(gguf.TokenType.NORMAL)
    for t in tokenizer["added_tokens"]:
        kind = gguf.TokenType.CONTROL if t["special"] else gguf.TokenType.USER_DEFINED
        texts[t["id"]], types[t["id"]] = t["content"], int(kind)
    return texts, types


def merge_pairs(tokenizer):
    return [m.split(" ") if isinstance(m, str) else m for m in tokenizer["model"]["merges"]]


def gguf_tokenizer(box):
    c, tokenizer, settings = tokenizer_model(box)
    reader, keys = gguf.GGUFReader(box.path("m.gguf")), gguf.Keys.Tokenizer
    check_layout(reader)
    check_keys(reader, c)
    texts, types = expected_tokens(c, tokenizer)
    added = {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    for key, kind, want in [
            (keys.MODEL, STRING, "gpt2"), (keys.PRE, STRING, "qwen2"),
            (keys.LIST, ARRAY, texts), (keys.TOKEN_TYPE, ARRAY, types),
            (keys.MERGES, ARRAY, [" ".join(m) for m in merge_pairs(tokenizer)]),
            (keys.EOS_ID, U32, added[settings["eos_token"]]),
            (keys.PAD_ID, U32, added[settings["pad_token"]]),
            (keys.BOS_ID, U32, c["bos_token_id"]),
            (keys.ADD_BOS, BOOL, False),
            (keys.CHAT_TEMPLATE, STRING, settings["chat_template"])]:
        got = field(reader, key, kind)
        expect(got == want, f"'{key}' differs: {str(got)[:80]}, expected {str(want)[:80]}")
    equal("type of merges", reader.fields[keys.MERGES].types[1], STRING)
    embedding = next(t for t in reader.tensors if t.name == "token_embd.weight")
    expect(embedding.data.tobytes() == ref.read_model(box.path("m"))
           ["model.embed_tokens.weight"].tobytes(), "the embedding differs")
    equal("type of token types", reader.fields[keys.TOKEN_TYPE].types[1],
          gguf.GGUFValueType.INT32)


def tokenizer_from_gguf(box):
    c, want, settings = tokenizer_model(box)
    box.run("convert", box.path("m.gguf"), box.path("back"))
    got = read_json(box.path("back"), "tokenizer.json")
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        equal(part, got[part], want[part])
    expect(got["model"]["vocab"] == want["model"]["vocab"], "model.vocab differs")
    expect(merge_pairs(got) == merge_pairs(want), "model.merges differs")
    same_keys("model", got["model"], want["model"])
    for key in set(want["model"]) - {"vocab", "merges"}:
        equal(f"model.{key}", got["model"][key], want["model"][key])
    by_id = [sorted(t["added_tokens"], key=lambda a: a["id"]) for t in (got, want)]
    equal("added tokens", by_id[0], by_id[1])
    back = read_json(box.path("back"), "tokenizer_config.json")
    for key in ("chat_template", "eos_token", "pad_token", "add_bos_token",
                "added_tokens_decoder"):
        equal(f"tokenizer_config.json: {key}", back[key], settings[key])
    made = read_json(box.path("back"), "config.json")
    for key in ("hidden_size", "head_dim", "vocab_size", "rope_theta", "rms_norm_eps",
                "tie_word_embeddings", "eos_token_id", "bos_token_id", "max_position_embeddings"):
        equal(f"config.json: {key}", made[key], c[key])


def small_tokenizer(box):
    """A model with a tokenizer as the tokenizers package trains it: special tokens come first and
    are part of the vocabulary. Its chat template is a file of its own, as transformers 5 saves
    it."""
    tokenizer = read_json(box.data_path("tokenizer/tokenizer.json"))
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bytes_ = [t for t in tokenizer["model"]["vocab"] if len(t) == 1]
    tokenizer["model"] |= {"vocab": {t: i for i, t in enumerate(special + bytes_)}, "merges": []}
    shape = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] = [shape | {"id": i, "content": t} for i, t in enumerate(special)]
    c = ref.config(vocab_size=320)
    ref.write_model(box.path("m"), c, ref.weights(c, ref.BF16))
    write_json(tokenizer, box.path("m"), "tokenizer.json")
    write_json({"eos_token": special[2], "pad_token": special[0]}, box.path("m"),
               "tokenizer_config.json")
    with open(box.path("m/chat_template.jinja"), "w", encoding="utf-8") as f:
        f.write("{{ messages }}\n{# é #}")
    box.run("convert", box.path("m"), box.path("m.gguf"))
    return c, tokenizer


def special_tokens(box):
    """Special ids and chat template are those that llama.cpp's converter finds."""
    c, tokenizer = small_tokenizer(box)
    reader, keys = gguf.GGUFReader(box.path("m.gguf")), gguf.Keys.Tokenizer
    theirs, (texts, types) = gguf.SpecialVocab(box.path("m")), expected_tokens(c, tokenizer)
    equal("tokens", field(reader, keys.LIST, ARRAY), texts)
    equal("token types", field(reader, keys.TOKEN_TYPE, ARRAY), types)
    for name, key in (("bos", keys.BOS_ID), ("eos", keys.EOS_ID), ("pad", keys.PAD_ID)):
        equal(key, field(reader, key, U32), theirs.special_token_ids[name])
    equal("chat template", field(reader, keys.CHAT_TEMPLATE, STRING), theirs.chat_template)


def special_tokens_keep_ids(box):
    """tokenizers gives an added token the id it has in model.vocab, or else the next free one,
    whatever the file says; so ids below the end of the vocabulary must be part of it."""
    _, want = small_tokenizer(box)
    box.run("convert", box.path("m.gguf"), box.path("back"))
    got = read_json(box.path("back"), "tokenizer.json")
    equal("added tokens", got["added_tokens"], want["added_tokens"])
    vocab = got["model"]["vocab"]
    free = len(vocab)
    for t in got["added_tokens"]:
        effective = vocab.get(t["content"], free)
        equal(f"id of {t['content']} in tokenizers", effective, t["id"])
        free += t["content"] not in vocab


# ---- circles ----


def lossless_circle(box, name):
    model = os.path.join(GOLDEN, "hf", name)
    box.run("convert", model, box.path("a.dat"))
    box.run("convert", box.path("a.dat"), box.path("b.gguf"), "--model-dir", model)
    box.run("convert", box.path("b.gguf"), box.path("c.safetensors"))
    box.run("inspect", box.path("b.gguf"), "--verify")
    source = ref.read_model(model)
    for back in (ref.read_dat(box.path("a.dat")), ref.read_st(box.path("c.safetensors"))):
        same_keys("tensors", back, source)
        for key, tensor in source.items():
            same_bytes(key, back[key], tensor)


def config_of_transformers_5(box, scaling):
    rope = {"rope_theta": 5000000.0, "rope_type": "default"} | scaling
    c = ref.config(rope_parameters=rope, dtype="bfloat16", layer_types=["full_attention"] * 2)
    for old in ("rope_theta", "rope_scaling", "torch_dtype"):
        del c[old]
    ref.write_model(box.path("m"), c, ref.weights(c, ref.BF16))
    box.run("convert", box.path("m"), box.path("m.gguf"))
    reader = gguf.GGUFReader(box.path("m.gguf"))
    check_keys(reader, c | {"rope_theta": 5000000})
    equal("scaled", "qwen3.rope.scaling.type" in reader.fields, bool(scaling))
    if scaling:
        equal("type", field(reader, "qwen3.rope.scaling.type", STRING), "yarn")
        equal("factor", field(reader, "qwen3.rope.scaling.factor", F32), scaling["factor"])
        equal("original", field(reader, "qwen3.rope.scaling.original_context_length", U32),
              scaling["original_max_position_embeddings"])
    box.run("convert", box.path("m.gguf"), box.path("old"))
    old = read_json(box.path("old"), "config.json")
    equal("rope_theta from GGUF", old["rope_theta"], 5000000)
    equal("yarn from GGUF", (old["rope_scaling"] or {}).get("factor"), scaling.get("factor"))
    box.run("convert", box.path("m"), box.path("new"), "--dtype", "f16")
    equal("config.json of the copy", read_json(box.path("new"), "config.json"),
          c | {"dtype": "float16"})


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}

CHECKS = [
    *[(f"safetensors: {dtype}, {'tied' if tied else 'untied'}, as the package reads it",
       safetensors_directory, tied, dtype)
      for tied, dtype in [(True, "bf16"), (False, "bf16"), (True, "f16"), (False, "f32")]],
    ("safetensors: shards and their index", safetensors_shards),
    *[(f"gguf: {dtype}, {'tied' if tied else 'untied'}: keys, names, values",
       gguf_plain, tied, dtype)
      for tied, dtype in [(True, "bf16"), (False, "bf16"), (True, "f16"), (False, "f32")]],
    ("gguf: tokens, types, merges, special ids, template", gguf_tokenizer),
    ("gguf: tokenizer and config back to a directory", tokenizer_from_gguf),
    ("gguf: special ids and template of chat_template.jinja", special_tokens),
    ("gguf: special tokens inside the vocabulary keep their ids", special_tokens_keep_ids),
    ("gguf: --dtype leaves norms in f32", gguf_cast),
    *[(f"circle: {name} -> .dat -> .gguf -> .safetensors", lossless_circle, name)
      for name in ("tied", "untied")],
    ("config.json: the form of transformers 5", config_of_transformers_5, {}),
    ("config.json: the form of transformers 5 with yarn", config_of_transformers_5, YARN),
]
