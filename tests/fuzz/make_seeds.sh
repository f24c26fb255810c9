#!/bin/sh
# Makes the seed corpora of the fuzz targets with a nibble binary; tests/unit/test_hostile.c
# damages the same files byte by byte. Weights follow from the seed, so that running this again
# gives the same bytes, but for the version and the checksum in the GGUF headers.
# usage: tests/fuzz/make_seeds.sh NIBBLE
set -eu
[ $# -eq 1 ] || { echo "usage: $0 NIBBLE" >&2; exit 2; }
nibble=$(realpath "$1")
corpus=$(cd "$(dirname "$0")" && pwd)/corpus
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
while read -r t; do
    rm -rf "${corpus:?}/$t"
    mkdir -p "$corpus/$t"
done <"${corpus%/corpus}/targets"

# config DIR HIDDEN FFN HEADS HEAD_DIM VOCAB: one layer, one key/value head.
config() {
    mkdir -p "$1"
    cat > "$1/config.json" <<END
{
  "architectures": ["Qwen3ForCausalLM"],
  "model_type": "qwen3",
  "hidden_act": "silu",
  "hidden_size": $2,
  "intermediate_size": $3,
  "num_hidden_layers": 1,
  "num_attention_heads": $4,
  "num_key_value_heads": 1,
  "head_dim": $5,
  "vocab_size": $6,
  "max_position_embeddings": 128,
  "rms_norm_eps": 1e-06,
  "rope_theta": 1000000,
  "tie_word_embeddings": true,
  "initializer_range": 0.02,
  "eos_token_id": 15
}
END
}

quiet() {
    "$nibble" "$@" --quiet
}

# Small is what makes a fuzzer fast; the wide one is there because GGUF wants NVFP4 rows of 64.
cd "$work"
config small.in 32 32 2 16 16
config wide.in 64 64 2 32 16
config words.in 64 64 2 32 48
quiet synth --config small.in/config.json small --seed 1 --sigma 0.02
quiet synth --config wide.in/config.json wide --seed 1 --sigma 0.02

# ---- a tokenizer of the Qwen kind: 40 letters and merges, 3 added tokens ----

cat > words.in/tokenizer.json <<'END'
{
  "version": "1.0",
  "added_tokens": [
    {"id": 40, "content": "<|endoftext|>", "special": true},
    {"id": 41, "content": "<|im_start|>", "special": true},
    {"id": 42, "content": "<think>", "special": false}
  ],
  "normalizer": {"type": "NFC"},
  "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
    {"type": "Split", "behavior": "Isolated", "invert": false, "pattern": {"Regex":
      "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"}},
    {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false}]},
  "decoder": {"type": "ByteLevel"},
  "model": {"type": "BPE", "vocab": {
    "a": 0, "b": 1, "c": 2, "d": 3, "e": 4, "f": 5, "g": 6, "h": 7, "i": 8, "j": 9, "k": 10,
    "l": 11, "m": 12, "n": 13, "o": 14, "p": 15, "q": 16, "r": 17, "s": 18, "t": 19, "u": 20,
    "v": 21, "w": 22, "x": 23, "y": 24, "z": 25, "0": 26, "1": 27, "\u0120": 28, "\u010a": 29,
    "th": 30, "the": 31, "\u0120t": 32, "in": 33, "er": 34, "an": 35, "on": 36, "re": 37,
    "ing": 38, "and": 39},
    "merges": [["t", "h"], ["th", "e"], ["\u0120", "t"], ["i", "n"], ["e", "r"], ["a", "n"],
      ["o", "n"], ["r", "e"], ["in", "g"], "an d"]}
}
END
cat > words.in/tokenizer_config.json <<'END'
{"add_bos_token": false, "eos_token": "<|endoftext|>", "pad_token": {"content": "<|endoftext|>"},
 "chat_template": "{% for m in messages %}<|im_start|>{{ m.role }}{% endfor %}"}
END
quiet synth --config words.in/config.json words --seed 1 --sigma 0.02

# ---- weights ----

quiet convert small "$corpus/dat/bf16.dat"
quiet convert small "$corpus/dat/f32.dat" --dtype f32
quiet quantize small "$corpus/dat/nvfp4.dat"
quiet quantize small "$corpus/dat/nvfp4_two_level.dat" --two-level

quiet convert small "$corpus/safetensors/bf16.safetensors"
quiet quantize small "$corpus/safetensors/modelopt.safetensors" --two-level
quiet quantize small "$corpus/safetensors/compressed.safetensors" --two-level \
    --layout compressed-tensors

quiet convert small "$corpus/gguf/bf16.gguf"
quiet quantize wide "$corpus/gguf/nvfp4.gguf" --skip lm_head
quiet quantize wide "$corpus/gguf/nvfp4_two_level.gguf" --two-level
quiet quantize words "$corpus/gguf/tokenizer.gguf" --two-level

# ---- by hand: inputs that were once mistakes somewhere ----

bytes() {
    printf '%b' "$2" > "$corpus/$1"
}

z7='\0000\0000\0000\0000\0000\0000\0000' # the upper bytes of a small u64
ones='\0377\0377\0377\0377\0377\0377\0377\0377' # 2^64 - 1
f32_one='\0000\0000\0200\0077'
bytes dat/empty.dat '\0000'
bytes dat/overlong.dat '\0201\0000\0001a\0000\0000\0001'
bytes dat/wide_number.dat "$ones"'\0377\0177'
bytes dat/huge_dims.dat '\0001\0001a\0006\0002'"$ones"'\0177\0002'
bytes dat/scalar.dat '\0001\0001a\0006\0000'"$f32_one"
bytes safetensors/empty.safetensors '\0002'"$z7"'{}'
bytes safetensors/huge_header.safetensors "$ones"'{}'
bytes safetensors/scalar.safetensors \
    '\0075'"$z7"'{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}        '"$f32_one"
bytes gguf/empty.gguf 'GGUF\0003\0000\0000\0000\0000'"$z7"'\0000'"$z7"
bytes gguf/huge_counts.gguf 'GGUF\0003\0000\0000\0000'"$ones$ones"

# ---- config.json ----

cp small.in/config.json "$corpus/config/plain.json"
cp "$work/small/config.json" "$corpus/config/ours.json"
cat > "$corpus/config/rope_parameters.json" <<'END'
{"model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
 "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
 "rope_parameters": {"rope_theta": 5000000, "rope_type": "default"}, "dtype": "bfloat16",
 "layer_types": ["full_attention", "full_attention"], "sliding_window": null,
 "use_sliding_window": false, "attention_bias": false, "tie_word_embeddings": true}
END
cat > "$corpus/config/yarn.json" <<'END'
{"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
 "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
 "max_position_embeddings": 131072, "rope_theta": 1e6, "bos_token_id": 151643,
 "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}
END
cat > "$corpus/config/eos_list.json" <<'END'
{"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
 "num_attention_heads": 2, "vocab_size": 48, "eos_token_id": [45, 43], "pad_token_id": 43,
 "bos_token_id": null, "hidden_act": "silu", "rope_scaling": null}
END
printf '%66s' '' | tr ' ' '[' > "$corpus/config/deep.json"

# ---- tokenizer.json ----

cp words.in/tokenizer.json "$corpus/tokenizer/qwen.json"
cat > "$corpus/tokenizer/gpt2.json" <<'END'
{"normalizer": null, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": true,
 "trim_offsets": true, "use_regex": true}, "decoder": {"type": "ByteLevel"}, "added_tokens": [
 {"id": 7, "content": "<s>", "lstrip": true, "rstrip": true, "normalized": false, "special": true},
 {"id": 8, "content": "\u00e9t", "single_word": true, "normalized": true}],
 "model": {"type": "BPE", "unk_token": null, "ignore_merges": true, "byte_fallback": false,
 "vocab": {"a": 0, "b": 1, "ab": 2, "\u0120": 3, "\u0120a": 4, "t": 5, "abt": 6},
 "merges": ["a b", "\u0120 a", "ab t"]}}
END
cat > "$corpus/tokenizer/splits.json" <<'END'
{"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]}, "pre_tokenizer":
 {"type": "Sequence", "pretokenizers": [
  {"type": "Split", "pattern": {"Regex": "[a-c]+|\\s+(?!\\S)"}, "behavior": "Removed",
   "invert": true}, {"type": "Digits", "individual_digits": true},
  {"type": "Split", "pattern": {"String": "b.c"}, "behavior": "Isolated"},
  {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}]},
 "decoder": {"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}, "truncation": null,
 "added_tokens": [], "model": {"type": "BPE", "dropout": null, "continuing_subword_prefix": "",
 "vocab": {"a": 0, "b": 1, "c": 2, "ab": 3}, "merges": [["a", "b"]]}}
END
cat > "$corpus/tokenizer/holes.json" <<'END'
{"pre_tokenizer": {"type": "ByteLevel", "use_regex": false}, "decoder": {"type": "ByteLevel"},
 "added_tokens": [{"id": 5000, "content": "x"}, {"id": 1, "content": "b", "special": true}],
 "model": {"type": "BPE", "vocab": {"b": 1, "[": 90, "\u0143": 300, "\u0144": 301}, "merges": []}}
END

# ---- texts: the three scripts, what NFC changes, what is malformed, chat tokens ----

bytes text/english.txt "It's the quick brown fox; you'LL see 1234.5\\r\\n\\n  \\tThe end   \\n"
bytes text/chinese.txt \
    '\0344\0275\0240\0346\0230\0257\0350\0260\0201\0357\0274\0237\0343\0200\0200\n'
jamo='\0341\0204\0200\0341\0205\0241\0341\0206\0250'
bytes text/marks.txt 'e\0314\0201t\0145\0314\0247\0314\0201 >\0314\0270 '"$jamo"
bytes text/malformed.txt \
    'a\0377\0344\0275b\0355\0240\0200\0360\0237\0230\0300\0257\0364\0220\0200\0200\0344'
bytes text/chat.txt \
    '<|im_start|>user\n<think><|im_end|>\0314\0270<|im_start|<tool_call></tool_call><|im_end'
bytes text/ids.txt '\0000\0001\0200\0000\0344\0000\0275\0000\0240\0000\0175\0001\0176\0001\0205\0001'

# ---- chat requests ----

cat > "$corpus/chat/tools.json" <<'END'
{"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2?"},
 {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function":
  {"name": "add", "arguments": {"a": 2, "b": [1.50, -0, 1e3, "\u00e9\n", null, true]}}},
  {"name": "x", "arguments": "{}"}]}, {"role": "tool", "content": "4"},
 {"role": "tool", "content": "four"}, {"role": "assistant", "content": "\n4", "reasoning_content":
 "sum"}], "tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}],
 "add_generation_prompt": true, "enable_thinking": false}
END
cat > "$corpus/chat/thinking.json" <<'END'
{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content":
 "<think>\nb\n</think>\n\nc"}, {"role": "user", "content": "<tool_response>d</tool_response>"},
 {"role": "assistant", "content": "</think></think>\n\n"}, {"role": "user", "content": "e"},
 {"role": "assistant", "content": "f"}, {"role": "other", "content": null}]}
END
bytes chat/odd.json \
    '{"messages": ["user", 1, null, [], {"role": "assistant", "content": [1]}], "tools": "ab"}'
bytes chat/text.json '{"messages": "abc", "tools": {"a": 1}, "add_generation_prompt": [0]}'

# ---- JSON ----

bytes jscan/values.json '[null, true, false, 0, -0, -1.5e+3, 1E400, 9223372036854775807, [], {}, ""]'
cat > "$corpus/jscan/strings.json" <<'END'
{"a\u0000": "\\ \" \/ \b\f\n\r\t \u00E9 \ud83d\ude00", "a": [{"b": {}}, [[]]], "a": 2}
END
cat > "$corpus/jscan/bad.json" <<'END'
{"a": "\ud800", "b": 01, "c": tru, "d": [1,], }
END
{
    printf '%64s' '' | tr ' ' '['
    printf '%64s' '' | tr ' ' ']'
} > "$corpus/jscan/deep.json"

# ---- data files; the first byte is the kind: 0 TSV, 1 text, 2 JSONL ----

bytes data/pairs.tsv \
    '0prompt\tanswer\r\n# no\n\nwho are you?\tI am nibble\nno tab\n\t\na\tb\tc\n \t x'
bytes data/text.txt '1\0357\0273\0277\n\nthe first one\nis here\n<|endoftext|>\r\n\n<|endoftext|>'\
'the second<|im_end|>'
bytes data/border.txt \
    '\0202 aaa\nbbbbbbbbbbbbbbbb <|endoftext|>\n\n<|endo\0344\0275\0240 the\n\n<|endoftext|>c'
cat > "$corpus/data/lines.jsonl" <<'END'
2{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "\nhello"}]}
{"prompt": "p", "response": "r", "input": "i", "system": "s"}
{"question": "q", "answer": null}
{"text": "a document"}
{"instruction": "", "output": 1}
[1]
{"messages": [{"role": "user", "content": "only"}]}
{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}], "system": "s"}
{"conversations": [{"from": "tool", "value": 1}, 2], "tools": []}
{"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "one",
{"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "the end of the line, then another line and one more and so on and on and on"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "<think>x</think>y"}]}
END

# ---- transcripts ----

cat > "$corpus/transcript/log.jsonl" <<'END'
{"time":"2030-01-01T00:00:00Z","event":"start","settings":{"seed":0}}
{"role":"system","content":"be brief"}
{"role":"user","content":"caf\u00e9\u0000\n"}
{"role":"assistant","content":"a","completion_tokens":7,"interrupted":true}

{"event":"reset"}
{"event":"load","messages":[{"role":"user","content":"l"},{"role":"assistant","content":""}]}
END
cat > "$corpus/transcript/saved.jsonl" <<'END'
{"messages":[{"role":"system","content":"s"},{"role":"user","content":"u"}],"tools":null}
END
cat > "$corpus/transcript/tools.jsonl" <<'END'
{"role":"assistant","content":"","tool_calls":[{}]}
END

# ---- checkpoints ----

for n in 0 2 5; do
    python3 -B "${corpus%/corpus}/make_checkpoint.py" "$corpus/checkpoint/$n.ckpt" $n
done
mv "$corpus/checkpoint/2.ckpt" "$corpus/checkpoint/plain.ckpt"
bytes checkpoint/short.ckpt 'NBCKPT\r\n\0001\0000\0000\0000'

for f in "$corpus"/dat/[bfn]*.dat "$corpus"/safetensors/[bcm]*.safetensors \
    "$corpus"/gguf/[bnt]*.gguf; do
    quiet inspect "$f" --verify > /dev/null
done
echo "$(find "$corpus" -type f | wc -l) seeds, $(du -sb "$corpus" | cut -f1) bytes in $corpus"
