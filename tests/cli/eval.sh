# Perplexity of a text: against logits of the same tokens, window by window; options and errors.
# shellcheck shell=sh disable=SC2154 # $work, $failures and $nibble are lib.sh's
root=$(cd "$(dirname "$0")/../.." && pwd)
. "$(dirname "$0")/lib.sh"

# The tokenizer has 647 entries, and the config asks for a few more.
cat >"$work/config.json" <<'JSON'
{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32, "hidden_act": "silu",
 "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 256,
 "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
 "rope_theta": 10000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
 "eos_token_id": 602, "vocab_size": 672}
JSON
model=$work/model
check "a model" 0 "$nibble" synth -q --sigma 0.05 --config "$work/config.json" "$model"
cp "$root/tests/golden/tokenizer/qwen/tokenizer.json" "$model"
check "four bits" 0 "$nibble" quantize -q "$model" "$work/four.dat"

# A text with special tokens, which are plain text here, and with bytes that are not UTF-8.
python3 -B -c 'import sys
text = "".join(f"The {i}th line, <|im_end|>, sees {i * i} cats.\n" for i in range(12)).encode()
open(sys.argv[1], "wb").write(text + b"\xff\xfe bad \xc3 bytes \x00 and the end")' "$work/text"

# compare.py WORK NIBBLE MODEL TEXT CTX STRIDE: eval ppl against debug hf of each window. What
# follows STRIDE are options of both.
cat >"$work/compare.py" <<'PY'
import array
import json
import math
import struct
import subprocess
import sys

work, nibble, model, text, ctx, stride = sys.argv[1:7]
ctx, stride, more = int(ctx), int(stride), sys.argv[7:]


def run(*args):
    return subprocess.run([nibble, *args], check=True, capture_output=True).stdout


def logits(ids):
    raw = array.array("i", ids).tobytes()
    spot = {"dtype": "I32", "shape": [1, len(ids)], "data_offsets": [0, len(raw)]}
    labels = dict(spot, data_offsets=[len(raw), 2 * len(raw)])
    header = json.dumps({"input_ids": spot, "labels": labels}).encode()
    with open(work + "/in.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(header)) + header + raw + raw)
    run("debug", "hf", "-q", "-m", model, "--in", work + "/in.safetensors",
        "--out", work + "/out.safetensors", *more)
    with open(work + "/out.safetensors", "rb") as f:
        data = f.read()
    (size,) = struct.unpack("<Q", data[:8])
    t = json.loads(data[8 : 8 + size])["logits"]
    start, end = (8 + size + i for i in t["data_offsets"])
    return array.array("f", data[start:end]), t["shape"][2]


ids = [int(i) for i in run("tokenize", "-m", model, "--file", text, "--no-special",
                           *(more if "--model-dir" in more else [])).decode().split(",")]
total = count = seen = 0
for begin in range(0, len(ids), stride):
    end = min(begin + ctx, len(ids))
    if end - begin > 1:
        x, V = logits(ids[begin:end])
        for i in range(max(seen, begin + 1), end):
            row = x[(i - 1 - begin) * V : (i - begin) * V]
            top = max(row)
            total += math.log(math.fsum(math.exp(v - top) for v in row)) + top - row[ids[i]]
            count += 1
    seen = end
    if end == len(ids):
        break
r = json.loads(run("eval", "ppl", "-q", "-m", model, "--text", text, "--ctx", str(ctx),
                   "--stride", str(stride), "--json", *more))
assert r["tokens"] == count, (r, count)
assert abs(r["nll"] - total / count) < 1e-6 * r["nll"], (r, total / count)
assert abs(r["ppl"] - math.exp(total / count)) < 1e-6 * r["ppl"], r
assert r["context"] == ctx and r["stride"] == stride, r
size = len(open(text, "rb").read())
assert r["bytes"] == size, r
assert abs(r["bits_per_byte"] - total / math.log(2) / size) < 1e-6 * r["bits_per_byte"], r
PY
for windows in "256 256" "64 64" "17 17" "2 2" "64 24"; do
    if [ "$windows" = "2 2" ] && sanitized; then
        continue # a process for each
    fi
    # shellcheck disable=SC2086 # two words
    check "windows and stride $windows" 0 python3 -B "$work/compare.py" "$work" "$nibble" \
        "$model" "$work/text" $windows
done
check "four bits, windows of 64" 0 python3 -B "$work/compare.py" "$work" "$nibble" \
    "$work/four.dat" "$work/text" 64 64 --model-dir "$model"

# ---- the same, whatever the threads; text and JSON ----

set -- eval ppl -q -m "$work/four.dat" --model-dir "$model" --text "$work/text" --ctx 50
nll() { # to the last bit; JSON has as many digits as its longest number needs
    python3 -B -c 'import json, sys
print(json.load(open(sys.argv[1]))["nll"].hex())' "$work/out"
}
check "one thread" 0 "$nibble" "$@" --threads 1 --json
exact=$(nll)
lines err 0
for threads in 2 3; do
    check "$threads threads" 0 "$nibble" "$@" --threads "$threads" --json
    [ "$(nll)" = "$exact" ] || {
        echo "FAIL $name: $(nll), not $exact"
        failures=$((failures + 1))
    }
done
check "integers" 0 "$nibble" "$@" --fast --json
[ "$(nll)" != "$exact" ] || {
    echo "FAIL $name: the same as without"
    failures=$((failures + 1))
}
for dtype in f16 bf16 f8; do
    check "a cache in $dtype" 0 "$nibble" "$@" --kv-dtype "$dtype" --json
done
check "as text" 0 "$nibble" "$@"
says out "perplexity "
says out "windows of 50"
check "standard input" 0 sh -c '"$0" eval ppl -q -m "$1" --text - <"$2"' "$nibble" "$model" \
    "$work/text"

# ---- errors ----

: >"$work/empty"
printf a >"$work/one"
check "an empty text" 1 "$nibble" eval ppl -q -m "$model" --text "$work/empty"
says err "empty': a text of 0 tokens"
lines err 1
lines out 0
check "one token" 1 "$nibble" eval ppl -q -m "$model" --text "$work/one"
says err "a text of 1 tokens; the first is not predicted"
check "no such text" 1 "$nibble" eval ppl -q -m "$model" --text "$work/nowhere"
says err "cannot open '$work/nowhere'"
check "a window of one" 1 "$nibble" eval ppl -q -m "$model" --text "$work/text" --ctx 1
says err "windows of 1 tokens"
check "a window past the model's" 1 "$nibble" eval ppl -q -m "$model" --text "$work/text" --ctx 257
says err "2 to 256 are possible"
check "a stride past the window" 1 "$nibble" eval ppl -q -m "$model" --text "$work/text" --ctx 8 \
    --stride 9
says err "leaves some out"
check "no model" 2 "$nibble" eval ppl --text "$work/text"
says err "-m MODEL is missing"
check "no text" 2 "$nibble" eval ppl -m "$model"
says err "--text FILE is missing"
check "something else" 2 "$nibble" eval bleu -m "$model"
says err "there is no 'bleu'"
mkdir "$work/mute"
cp "$model/config.json" "$model/model.safetensors" "$work/mute"
check "no tokenizer" 1 "$nibble" eval ppl -q -m "$work/mute" --text "$work/text"
says err "has no tokenizer"
yes "many cats, and more" | head -c 8000000 >"$work/long"
check "interrupted" 130 timeout -s INT --preserve-status 2 "$nibble" eval ppl -q -m "$model" \
    --text "$work/long"
lines out 0
finish
