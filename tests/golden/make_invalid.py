#!/usr/bin/env python3
"""Writes model files that carry the mistakes behind known CVEs, one mistake each, and README.md.

usage: make_invalid.py [DIR]    (DIR: this directory unless given)

invalid/ holds .gguf, .safetensors and .dat files and directories that must be refused; beside each
NAME, NAME.expected has the words that the message must hold, then the commands that must give it,
one a line. harmless/ holds files with code in them, which must be carried as text or left alone,
and never run. The same files come out each time.

A wrong number is chosen, where it can be, so that a reader that makes the mistake finds a sound
file: sizes wrap around to what is really there.
"""

import json
import os
import struct
import sys
from typing import NamedTuple, Union

# Which commands must refuse a file: any, those that need the config, those that need all of it.
ALL = ("inspect", "inspect --verify", "convert")
CONFIG = ("inspect --verify", "convert")
CONVERT = ("convert",)


class Case(NamedTuple):
    """A file (bytes) or a directory (name -> bytes) and what must be said about it."""
    name: str
    source: str
    mistake: str
    words: str
    content: Union[bytes, dict]
    commands: tuple = ALL


# ---- GGUF ----

U8, U32, I32, F32, STRING, ARRAY, U64, I64 = 0, 4, 5, 6, 8, 9, 10, 11
TENSOR_F32 = 0
VECTOR = ("t", [8], 0)  # eight f32 values, the 32 bytes that one alignment holds


def u32(n):
    return struct.pack("<I", n)


def u64(n):
    return struct.pack("<Q", n % 2**64)


def string(text):
    return u64(len(text)) + text.encode()


def kv(key, kind, value):
    return string(key) + u32(kind) + value


def kv_u32(key, n):
    return kv(key, U32, u32(n))


def kv_string(key, text):
    return kv(key, STRING, string(text))


def kv_array(key, kind, count, items):
    return kv(key, ARRAY, u32(kind) + u64(count) + items)


def kv_strings(key, texts):
    return kv_array(key, STRING, len(texts), b"".join(map(string, texts)))


def row(name, dims, offset):
    """A row of the tensor table; the dimensions innermost first, as the file has them."""
    return string(name) + u32(len(dims)) + b"".join(map(u64, dims)) + u32(TENSOR_F32) + u64(offset)


def gguf(kvs, tensors, data=32, n_kv=None, n_tensors=None, alignment=32):
    """A file: metadata, rows of (name, dims, offset), padding, `data` zeros."""
    head = b"GGUF" + u32(3)
    head += u64(len(tensors) if n_tensors is None else n_tensors)
    head += u64(len(kvs) if n_kv is None else n_kv)
    head += b"".join(kvs) + b"".join(row(*t) for t in tensors)
    return head + bytes(-len(head) % alignment) + bytes(data)


def one_shape(*dims):
    """A tensor of a shape that lies, and 32 bytes."""
    return gguf([], [("t", dims, 0)])


def sizes(*bytes_each):
    """Tensors that follow one another as they should, if sums may wrap; 32 bytes are there."""
    tensors, offset = [], 0
    for i, n in enumerate(bytes_each):
        tensors.append((f"t{i}", [n // 4], offset))
        offset += n
    return gguf([], tensors)


# ---- a whole model of one layer, two values wide ----

VOCAB, WIDTH = 4, 2
CONFIG_KEYS = {"qwen3.embedding_length": WIDTH, "qwen3.feed_forward_length": WIDTH,
               "qwen3.block_count": 1, "qwen3.attention.head_count": 1,
               "qwen3.attention.head_count_kv": 1, "qwen3.attention.key_length": WIDTH,
               "qwen3.context_length": 8}
CONFIG_JSON = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCAB,
               "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 1,
               "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": WIDTH,
               "max_position_embeddings": 8, "tie_word_embeddings": True}
LAYER = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj",
         "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
         "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
         "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm",
         "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}


def shape(name):
    return [WIDTH] if "norm" in name else [WIDTH, WIDTH]


def model_kvs(**changed):
    """Metadata of the model; block_count=2 and the like change a number."""
    kvs = [kv_string("general.architecture", "qwen3"), kv_u32("general.alignment", 8),
           kv("qwen3.attention.layer_norm_rms_epsilon", F32, struct.pack("<f", 1e-6))]
    for key, n in CONFIG_KEYS.items():
        kvs.append(kv_u32(key, changed.get(key.rsplit(".", 1)[1], n)))
    return kvs


def embedding_gguf(*more, **changed):
    """As much of the model as it takes to get to its config."""
    return gguf(model_kvs(**changed) + list(more), [("token_embd.weight", [WIDTH, VOCAB], 0)],
                alignment=8)


def model_gguf(*more):
    """The whole model; inspect --verify finds nothing wrong with it."""
    tensors, offset = [], 0
    dims = {"token_embd": [WIDTH, VOCAB]}
    dims.update((f"blk.0.{name}", shape(name)) for name in LAYER)
    dims["output_norm"] = [WIDTH]
    for name, d in dims.items():
        tensors.append((f"{name}.weight", d, offset))
        offset += 4 * d[0] * (d[1] if len(d) > 1 else 1)
    return gguf(model_kvs() + list(more), tensors, offset, alignment=8)


def tokenizer(tokens=None, types=None, merges=None, template=None):
    """Metadata of a tokenizer; an argument replaces a part, encoded as it will be."""
    kvs = [kv_string("tokenizer.ggml.model", "gpt2"), kv_string("tokenizer.ggml.pre", "qwen2"),
           tokens or kv_strings("tokenizer.ggml.tokens", ["a", "b", "ab"]),
           types or kv_array("tokenizer.ggml.token_type", I32, 3, 3 * u32(1)),
           merges or kv_strings("tokenizer.ggml.merges", ["a b"])]
    return kvs + ([kv_string("tokenizer.chat_template", template)] if template else [])


def tokens_of_length(length, text):
    """A vocabulary of which the last token claims a length."""
    return gguf([kv_array("tokenizer.ggml.tokens", STRING, 2, string("a") + u64(length) + text)],
                [], 0)


# ---- safetensors ----

ZIP = b"PK\5\6" + bytes(18)  # an empty archive; readers of ZIP look for it from the end


def compact(value):
    return json.dumps(value, separators=(",", ":")).encode()


def framed(header, data):
    return u64(len(header)) + header + data


def tensor(begin, end, dims, dtype="F32"):
    return {"dtype": dtype, "shape": dims, "data_offsets": [begin, end]}


def safetensors(tensors, data):
    return framed(compact(tensors), data)


def model_safetensors():
    tensors, at = {}, 0
    names = ["embed_tokens"] + [f"layers.0.{n}" for n in LAYER.values()] + ["norm"]
    for name in names:
        dims = [VOCAB, WIDTH] if name == "embed_tokens" else shape(name)
        end = at + 2 * dims[0] * (dims[1] if len(dims) > 1 else 1)
        tensors[f"model.{name}.weight"] = tensor(at, end, dims, "BF16")
        at = end
    return safetensors(tensors, bytes(at))


def index(*files):
    """A directory whose index says that tensor t0, t1, ... is in each of these files."""
    weight_map = {f"t{i}": name for i, name in enumerate(files)}
    return {"config.json": compact(CONFIG_JSON),
            "model.safetensors.index.json": compact({"weight_map": weight_map}),
            "model-1.safetensors": safetensors({"t0": tensor(0, 8, [2])}, bytes(8))}


# ---- .dat ----

DAT_F32 = 6


def uleb(n):
    out = b""
    while n > 0x7F:
        out += bytes([n & 0x7F | 0x80])
        n >>= 7
    return out + bytes([n])


def dat(dims, data, count=uleb(1), name_length=uleb(1)):
    """A file of one tensor 't'."""
    return (count + name_length + b"t" + uleb(DAT_F32) + uleb(len(dims)) +
            b"".join(map(uleb, dims)) + bytes(data))


# ---- what must be refused ----

TALOS = "CVE-2024-21802 and its family"

GGUF_CASES = [
    Case("n_kv_wraps.gguf", TALOS, "n_kv times 48 bytes wraps to one entry", "do not fit",
         gguf([kv_u32("general.file_type", 0)], [], 0, n_kv=2**60 + 1)),
    Case("n_tensors_wraps.gguf", TALOS, "n_tensors times 64 bytes wraps to one entry",
         "do not fit", gguf([], [VECTOR], n_tensors=2**58 + 1)),
    Case("array_count_wraps.gguf", TALOS, "array n times 4 bytes wraps to one value",
         "metadata 'k': an array of 4611686018427387905",
         gguf([kv_array("k", F32, 2**62 + 1, bytes(4))], [], 0)),
    Case("string_array_count_wraps.gguf", TALOS, "array n times 16 bytes wraps to one string",
         "metadata 'k': an array of 1152921504606846977",
         gguf([kv_array("k", STRING, 2**60 + 1, string("a"))], [], 0)),
    Case("string_length_wraps.gguf", TALOS, "the length of a string plus one is zero",
         "metadata 'k': file ends early", gguf([kv("k", STRING, u64(-1) + b"abc")], [], 0)),
    Case("dimensions_wrap.gguf", TALOS, "the product of ne wraps to 8 values",
         "too many elements", one_shape(2**61 + 1, 8)),
    Case("truncated_metadata.gguf", "CVE-2024-32878",
         "ends within the second of three values: the error path frees the third",
         "metadata 'general.name': file ends early",
         gguf([kv_u32("general.file_type", 0), kv("general.name", STRING, u64(16) + b"nibb")],
              [], 0, n_kv=3, alignment=1)),
    Case("token_length_past_int32.gguf", "CVE-2025-49847",
         "a token of 2^32 + 5 bytes is one of 5 as an int32",
         "metadata 'tokenizer.ggml.tokens': file ends early",
         tokens_of_length(2**32 + 5, b"hello")),
    Case("token_length_negative.gguf", "CVE-2025-52566 (class)",
         "a length of -8 passes a signed comparison with what is left",
         "metadata 'tokenizer.ggml.tokens': file ends early", tokens_of_length(-8, b"hello")),
    Case("dimensions_negative.gguf", "CVE-2025-52566 (class)",
         "-1 times -8 is 8 values where dimensions are signed",
         "a dimension of 18446744073709551608", one_shape(-8, -1)),
    Case("token_id_negative.gguf", "CVE-2025-52566 (class)", "the end token has id -1",
         "'tokenizer.ggml.eos_token_id' is -1, outside",
         embedding_gguf(kv("tokenizer.ggml.eos_token_id", I32, u32(2**32 - 1))), CONFIG),
    Case("sizes_wrap.gguf", "CVE-2025-53630", "17 tensors whose sizes add up to 2^64 + 32",
         "larger than any file", sizes(*[2**60] * 16, 32)),
    Case("sizes_wrap_with_overhead.gguf", "CVE-2026-27940",
         "sizes add up to 2^64 - 32; wraps only when the header, or any overhead, is added",
         "larger than any file", sizes(*[2**60] * 15, 2**60 - 32)),
    Case("type_size_wraps.gguf", "GHSA-96jg-mvhq-q7q7 (CVE-2026-33298)",
         "2^62 + 8 values times 4 bytes wraps to 32 bytes", "too many elements",
         one_shape(2**62 + 8)),
    Case("padding_wraps.gguf", "PR 24759",
         "2^64 - 4 bytes wrap to none when padded", "too many elements",
         gguf([], [("a", [2**62 - 1], 0), ("b", [8], 0)])),
    Case("alignment_wraps.gguf", "PR 26318",
         "padding to 2^63 bytes wraps", "'general.alignment' is 922337203685477580",
         gguf([kv("general.alignment", U64, u64(2**63))], [VECTOR])),
    Case("alignment_past_int32.gguf", "PR 26318",
         "an alignment of 2^31, negative as an int32",
         "'general.alignment' is 2147483648, outside",
         gguf([kv_u32("general.alignment", 2**31)], [VECTOR])),
    Case("alignment_zero.gguf", "PR 26318", "divides by an alignment of 0",
         "'general.alignment' is 0, outside", gguf([kv_u32("general.alignment", 0)], [VECTOR])),
    Case("alignment_not_a_number.gguf", "PR 26318", "reads an alignment without a look at its type",
         "'general.alignment' is not a single number",
         gguf([kv_string("general.alignment", " ")], [VECTOR])),
    Case("tokens_as_floats.gguf", "PR 26690", "tokens are an array of f32, used as strings",
         "'tokenizer.ggml.tokens' is not an array of strings",
         model_gguf(*tokenizer(tokens=kv_array("tokenizer.ggml.tokens", F32, 3, bytes(12)))),
         CONVERT),
    Case("token_of_type_byte.gguf", "PR 26511, PR 25969", "the text of a byte token is no number",
         "token 2 has type 6",
         model_gguf(*tokenizer(
             tokens=kv_strings("tokenizer.ggml.tokens", ["a", "b", "<0x-1>"]),
             types=kv_array("tokenizer.ggml.token_type", I32, 3, u32(1) * 2 + u32(6)))),
         CONVERT),
    Case("token_types_too_few.gguf", "PR 26690", "two types for three tokens", "has no type",
         model_gguf(*tokenizer(types=kv_array("tokenizer.ggml.token_type", I32, 2, 2 * u32(1)))),
         CONVERT),
    Case("token_types_as_bytes.gguf", "PR 26690",
         "token types are an array of u8, read as one of i32, past its end",
         "'tokenizer.ggml.token_type' is not an array of 32-bit numbers",
         model_gguf(*tokenizer(types=kv_array("tokenizer.ggml.token_type", U8, 3, b"\1\1\1"))),
         CONVERT),
    Case("merges_as_integers.gguf", "PR 26690", "merges are an array of i64, used as strings",
         "'tokenizer.ggml.merges' is not an array of strings",
         model_gguf(*tokenizer(merges=kv_array("tokenizer.ggml.merges", I64, 1, u64(1)))),
         CONVERT),
    Case("block_count_513.gguf", "PR 25821, PR 26051", "one layer more than a fixed array has",
         "'qwen3.block_count' is 513, outside", embedding_gguf(block_count=513), CONFIG),
    Case("tensor_offset_outside.gguf", "CVE-2026-7482", "data 1 MiB behind a file of 128 bytes",
         "data at offset 1048576, 0 expected", gguf([], [("t", [8], 2**20)])),
    Case("tensor_size_outside.gguf", "CVE-2026-7482", "data starts in the file and ends outside",
         "tensor 't' lies outside the file", one_shape(2**20)),
]

PAIR = {"a": tensor(0, 8, [2]), "b": tensor(8, 16, [2])}

SAFETENSORS_CASES = [
    Case("polyglot_behind.safetensors", "polyglots (Trail of Bits audit)", "is a ZIP file as well",
         "after the last tensor", safetensors(PAIR, bytes(16) + ZIP)),
    Case("polyglot_between.safetensors", "polyglots (Trail of Bits audit)",
         "a ZIP file hides between two tensors", "the data of 'b' does not follow",
         safetensors({**PAIR, "b": tensor(30, 38, [2])}, bytes(8) + ZIP + bytes(8))),
    Case("polyglot_header.safetensors", "polyglots (Trail of Bits audit)",
         "other bytes pad the header, where only spaces may", "the header does not start with '{'",
         framed(compact(PAIR) + ZIP, bytes(16))),
    Case("overlap.safetensors", "polyglots (class)", "two tensors share four bytes",
         "overlaps that of another tensor",
         safetensors({**PAIR, "b": tensor(4, 12, [2])}, bytes(12))),
    Case("gap_before.safetensors", "polyglots (class)", "the first tensor starts at byte 8",
         "the data of 'a' does not follow",
         safetensors({"a": tensor(8, 16, [2])}, bytes(16))),
    Case("bytes_behind.safetensors", "polyglots (class)", "one byte that no tensor has",
         "after the last tensor", safetensors(PAIR, bytes(17))),
    Case("duplicate_name.safetensors", "JSON",
         "one name for two tensors: readers differ in which one they take", "duplicate object key",
         framed(compact(PAIR).replace(b'"b"', b'"a"'), bytes(16))),
    Case("nested_deep.safetensors", "JSON", "a JSON parser that recurses",
         "nested deeper than", framed(b'{"a":' + b"[" * 100 + b"]" * 100 + b"}", b"")),
    Case("header_length_wraps.safetensors", "CVE-2024-21802 (class)",
         "8 + the length of the header is zero", "the header claims 18446744073709551608 bytes",
         u64(-8) + b"{}"),
    Case("shape_wraps.safetensors", "CVE-2024-21802 (class)",
         "the product of the shape wraps to 8 values", "too many elements",
         safetensors({"a": tensor(0, 32, [2**61 + 1, 8])}, bytes(32))),
    Case("shape_negative.safetensors", "CVE-2025-52566 (class)", "-1 times -2 is 2 values",
         "not a whole number >= 0", safetensors({"a": tensor(0, 8, [-1, -2])}, bytes(8))),
    Case("offset_negative.safetensors", "CVE-2025-52566 (class)",
         "the data starts before the buffer", "data at -8 to 0, but the buffer has",
         safetensors({"a": tensor(-8, 0, [2])}, b"")),
    Case("offset_outside.safetensors", "CVE-2026-7482 (class)", "the data ends behind the file",
         "data at 0 to 4194304, but the buffer has",
         safetensors({"a": tensor(0, 2**22, [2**20])}, bytes(16))),
    # Its path leads from there to a file that can be read.
    Case("index_traversal", "path traversal", "a shard in another directory",
         "not in a file of this directory",
         index("model-1.safetensors", "../../harmless/remote_code/model.safetensors")),
    Case("index_absolute", "path traversal", "a shard by its absolute path",
         "not in a file of this directory", index("/dev/null/x.safetensors")),
    Case("index_other_file", "path traversal", "a shard that is no weights file",
         "not in a file of this directory", index("config.json")),
    Case("layers_513", "PR 25821 (class)", "config.json asks for more layers than an array has",
         "'num_hidden_layers' is 513, outside 1 to 512",
         {"config.json": compact({**CONFIG_JSON, "num_hidden_layers": 513}),
          "model.safetensors": safetensors(PAIR, bytes(16))}, CONFIG),
]

DAT_CASES = [
    Case("number_overlong.dat", "LEB128", "1 in two bytes: one value must have one spelling",
         "needless last byte", dat([2], 8, count=b"\x81\0")),
    Case("number_past_64_bits.dat", "LEB128", "2^70 + 1 is 1 to who drops the high bits",
         "does not fit 64 bits", dat([2], 8, count=b"\x81" + b"\x80" * 9 + b"\1")),
    Case("number_unended.dat", "LEB128", "ends within a number", "file ends early", b"\x81\x80"),
    Case("name_length_past_int32.dat", "CVE-2025-49847 (class)",
         "a name of 2^32 + 1 bytes is one of 1 as an int32", "name length 4294967297",
         dat([2], 8, name_length=uleb(2**32 + 1))),
    Case("count_past_file.dat", "CVE-2024-21802 (class)", "2^62 + 1 tensors in a file of one",
         "tensors announced", dat([2], 8, count=uleb(2**62 + 1))),
    Case("shape_wraps.dat", "CVE-2024-21802 (class)", "the product of the shape wraps to 8 values",
         "too many elements", dat([2**61 + 1, 8], 32)),
    Case("payload_past_end.dat", "CVE-2026-7482 (class)", "8 of 64 bytes are there",
         "tensor 't': file ends early: 64 bytes wanted", dat([16], 8)),
    Case("bytes_behind.dat", "polyglots (class)", "a ZIP file behind the last tensor",
         "after the last tensor", dat([2], 8) + ZIP),
]

CASES = GGUF_CASES + SAFETENSORS_CASES + DAT_CASES

# ---- what must do no harm ----

# The escape of CVE-2024-34359 from a Jinja2 that is not in a sandbox.
TEMPLATE = "{{ cycler.__init__.__globals__.os.popen('touch ran').read() }}"
MODULE = b'''"""Comes with a model; whoever imports it leaves a file behind."""
import pathlib

pathlib.Path("ran").touch()
'''

HARMLESS = {
    # CVE-2024-34359: a template is text.
    "chat_template_code.gguf": model_gguf(*tokenizer(template=TEMPLATE)),
    # PR 26511, PR 25969: "<0x-1>" of type byte (6) was an index of -1. No tokenizer of the Qwen
    # family has such tokens: nibble takes no number from a token's text, and refuses the type
    # (token_of_type_byte.gguf).
    "vocab_byte_token.gguf": model_gguf(*tokenizer(
        tokens=kv_strings("tokenizer.ggml.tokens", ["a", "b", "<0x-1>"]))),
    # CVE-2026-90553: config.json names code, and the code is there.
    "remote_code": {
        "config.json": compact({**CONFIG_JSON, "auto_map": {
            "AutoConfig": "modeling_x.Config", "AutoModelForCausalLM": "modeling_x.Model"}}),
        "modeling_x.py": MODULE,
        "model.safetensors": model_safetensors()},
}

README = """# Model files that carry known mistakes

`make_invalid.py` writes everything here, including this page. Each file in `invalid/` contains one of
the mistakes behind CVEs about model files. The commands listed in `NAME.expected` must refuse it with
the words given there. The files in `harmless/` contain code that must not run.
`tests/cli/golden_invalid.sh` checks both.

PR numbers are llama.cpp's; "class" means the same mistake in another place. CVEs about servers and
RPC, not about files, have no file here: 2024-42477 to 42479, 2025-9141, 2025-48956, 2026-21869,
2026-34756.

| file | from | mistake | expected words |
|---|---|---|---|
%s

| harmless file | from | what must happen |
|---|---|---|
| `chat_template_code.gguf` | CVE-2024-34359 | the template is carried as text |
| `vocab_byte_token.gguf` | PR 26511, PR 25969 | the text of a token is never taken for a number |
| `remote_code/` | CVE-2026-90553 | `modeling_x.py` is neither run nor copied |
"""


def write(path, content):
    """A file, or a directory of them."""
    if isinstance(content, dict):
        for name, part in content.items():
            write(os.path.join(path, name), part)
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)


def readme():
    rows = []
    for case in CASES:
        slash = "/" if isinstance(case.content, dict) else ""
        rows.append(f"| `{case.name}{slash}` | {case.source} | {case.mistake} | `{case.words}` |")
    return (README % "\n".join(rows)).encode()


def main():
    """Writes everything into the directory that the argument names."""
    root = sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__))
    for case in CASES:
        write(os.path.join(root, "invalid", case.name), case.content)
        expected = "\n".join((case.words, *case.commands)) + "\n"
        write(os.path.join(root, "invalid", case.name + ".expected"), expected.encode())
    for name, content in HARMLESS.items():
        write(os.path.join(root, "harmless", name), content)
    write(os.path.join(root, "README.md"), readme())


if __name__ == "__main__":
    main()
