"""The formats once more, in numpy: short readers and writers and the NVFP4 arithmetic.

Nothing here is shared with nibble, so an error must be made twice to go unnoticed. Rounding is
that of ml_dtypes, whose casts round to nearest, ties to even.
"""

import json
import os
import struct

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from harness import write_json

BF16, E4M3, E2M1 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn

# ---- .dat: count, then name, element code, dimensions and bytes; all lengths LEB128 ----

DAT_TYPES = {0: np.uint8, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.int64, 5: np.float16,
             6: np.float32, 7: np.float64, 11: np.bool_, 15: BF16, 101: E4M3}


def read_dat(path):
    """The tensors of a .dat, in file order."""
    with open(path, "rb") as f:
        data, at, tensors = f.read(), 0, {}

    def uleb():
        nonlocal at
        value = shift = 0
        while True:
            byte, at = data[at], at + 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    for _ in range(uleb()):
        length = uleb()
        name, at = data[at:at + length].decode(), at + length
        dtype = np.dtype(DAT_TYPES[uleb()])
        shape = [uleb() for _ in range(uleb())]
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        tensors[name] = np.frombuffer(data[at:at + size], dtype).reshape(shape)
        at += size
    assert at == len(data), f"{path}: {len(data) - at} bytes after the last tensor"
    return tensors


def write_dat(path, tensors):
    """Writes (name, code, array) rows; returns where each array's bytes start."""
    out, offsets = bytearray(), {}

    def uleb(value):
        while value >= 0x80:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        out.append(value)

    uleb(len(tensors))
    for name, code, array in tensors:
        uleb(len(name.encode()))
        out.extend(name.encode())
        for value in (code, array.ndim, *array.shape):
            uleb(value)
        offsets[name] = len(out)
        out.extend(array.tobytes())
    with open(path, "wb") as f:
        f.write(out)
    return offsets


# ---- safetensors ----

ST_TYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": BF16,
            "F8_E4M3": E4M3, "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
            "U8": np.uint8, "BOOL": np.bool_}


def st_header(path):
    """The JSON header of a safetensors file, and where the data starts."""
    with open(path, "rb") as f:
        size = struct.unpack("<Q", f.read(8))[0]
        return json.loads(f.read(size)), 8 + size


def read_st(path):
    """The tensors of one safetensors file."""
    header, start = st_header(path)
    with open(path, "rb") as f:
        data = f.read()
    tensors = {}
    for name, row in header.items():
        if name != "__metadata__":
            begin, end = row["data_offsets"]
            tensors[name] = np.frombuffer(data[start + begin:start + end],
                                          ST_TYPES[row["dtype"]]).reshape(row["shape"])
    return tensors


def read_model(path):
    """The tensors of a model directory, sharded or not."""
    index = os.path.join(path, "model.safetensors.index.json")
    if not os.path.exists(index):
        return read_st(os.path.join(path, "model.safetensors"))
    with open(index, encoding="utf-8") as f:
        files = set(json.load(f)["weight_map"].values())
    return {k: v for name in files for k, v in read_st(os.path.join(path, name)).items()}


# ---- models ----


def config(**changes):
    """A small Qwen3 whose rows fit GGUF's blocks of 64."""
    return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False,
            "hidden_act": "silu", "hidden_size": 128, "intermediate_size": 192,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 32, "vocab_size": 256, "tie_word_embeddings": True,
            "rope_theta": 1000000, "rope_scaling": None, "rms_norm_eps": 1e-6,
            "max_position_embeddings": 4096, "bos_token_id": 3, "eos_token_id": 5,
            "initializer_range": 0.02, "torch_dtype": "bfloat16"} | changes


def shapes(c):
    """Name and shape of every parameter, as Hugging Face has them."""
    hidden, ffn, d = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    out = {"model.embed_tokens.weight": (c["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        out |= {layer + name + ".weight": shape for name, shape in {
            "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, q),
            "self_attn.q_norm": (d,), "self_attn.k_norm": (d,),
            "mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}.items()}
    if not c["tie_word_embeddings"]:
        out["lm_head.weight"] = (c["vocab_size"], hidden)
    return out


def is_projection(name):
    return name.endswith("_proj.weight") or name == "lm_head.weight"


def projections(c):
    """Shapes of what quantize turns into NVFP4: the projections and a head."""
    out = {n: s for n, s in shapes(c).items() if is_projection(n)}
    return out | {"lm_head.weight": (c["vocab_size"], c["hidden_size"])}


def weights(c, dtype, seed=1):
    """Random weights with what real ones have now and then: outliers, and blocks of zeros, of
    tiny, large and repeated values."""
    rng, tensors = np.random.default_rng(seed), {}
    for name, shape in shapes(c).items():
        x = rng.normal(0, 0.02, shape)
        if len(shape) == 2:
            blocks = x.reshape(-1, 16)
            blocks[rng.random(len(blocks)) < 0.05] *= 1e-3
            blocks[rng.random(len(blocks)) < 0.05] *= 300
            blocks[rng.random(len(blocks)) < 0.02, 3] = 4000
            blocks[rng.random(len(blocks)) < 0.02] = 0
            blocks[rng.random(len(blocks)) < 0.02] = -0.0
            ties = rng.random(len(blocks)) < 0.2
            blocks[ties] = rng.integers(-24, 25, (ties.sum(), 16)) / 4 * 2.0 ** -5
            blocks[ties, 0] = 6 * 2.0 ** -5
        else:
            x += 1
        tensors[name] = x.astype(dtype)
    return tensors


def write_model(path, c, tensors):
    """A model directory, its weights written by the safetensors package."""
    os.makedirs(path)
    write_json(c, path, "config.json")
    save_file(tensors, os.path.join(path, "model.safetensors"), metadata={"format": "pt"})


# ---- NVFP4 ----


def unpack(q):
    """Codes, one per element: the low nibble of a byte comes first."""
    return np.stack([q & 15, q >> 4], -1).reshape(*q.shape[:-1], -1)


def pack(codes):
    return codes[..., 0::2] | codes[..., 1::2] << 4


def e4m3_values(scale):
    """Block scales as f32, whatever holds them: E4M3, its bits in bytes, or a float type."""
    return (scale.view(E4M3) if scale.dtype == np.uint8 else scale).astype(np.float32)


def dequantize(q, scale, tensor_scale=1):
    """E2M1 x block scale x tensor scale, rounded to f32 once (the first product is exact)."""
    values = unpack(q).view(E2M1).astype(np.float32)
    product = values * np.repeat(e4m3_values(scale), 16, -1)
    return product * np.float32(tensor_scale)


def encode(w, scale):
    """E2M1 codes of w under given block scales (bits of E4M3)."""
    ratio = w / np.repeat(e4m3_values(scale), 16, -1)
    return np.clip(ratio, -6, 6).astype(E2M1).view(np.uint8)


def amax_of_blocks(w):
    return np.abs(w).reshape(*w.shape[:-1], -1, 16).max(-1)


def scale_code(s):
    """The nearest E4M3 that is finite and positive, as bits."""
    return np.clip(s, np.float32(2.0 ** -9), np.float32(448)).astype(E4M3).view(np.uint8)


def rtn_scale(w):
    """Block scales of round-to-nearest: amax / 6; 1 for a block of zeros."""
    amax = amax_of_blocks(w)
    return np.where(amax == 0, np.uint8(0x38), scale_code(amax / np.float32(6)))


def block_error(w, scale):
    """Squared error of each block under given scales, in f64."""
    back = dequantize(pack(encode(w, scale)), scale)
    return ((w.astype(np.float64) - back) ** 2).reshape(*scale.shape, 16).sum(-1)


def gguf_blocks(q, scale):
    """ggml's block_nvfp4: 4 scales, then per 16 values 8 bytes that hold values j and j + 8."""
    codes = unpack(q).reshape(q.shape[0], -1, 4, 2, 8)
    nibbles = codes[..., 0, :] | codes[..., 1, :] << 4
    scales = scale.view(np.uint8).reshape(q.shape[0], -1, 4)
    blocks = np.concatenate([scales, nibbles.reshape(*nibbles.shape[:2], 32)], -1)
    return blocks.reshape(q.shape[0], -1)
