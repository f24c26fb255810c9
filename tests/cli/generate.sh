# Answers of a small random model: results, options, errors, and the benches of running a model.
# shellcheck shell=sh disable=SC2154 # $work, $failures and $nibble are lib.sh's
root=$(cd "$(dirname "$0")/../.." && pwd)
. "$(dirname "$0")/lib.sh"

fail() {
    echo "FAIL $name: $1"
    failures=$((failures + 1))
}

# same|differs FILE: standard output against a file.
same() {
    cmp -s "$1" "$work/out" || fail "not the same as before: $(head -c 300 "$work/out")"
}
differs() {
    cmp -s "$1" "$work/out" && fail "the same as before"
    :
}

# fields CONDITION...: Python expressions that hold for the JSON r on standard output.
fields() {
    python3 -B -c 'import json, sys
r = json.load(open(sys.argv[1], encoding="utf-8"))
for c in sys.argv[2:]:
    assert eval(c), c + ": " + json.dumps(r)[:300]' "$work/out" "$@" 2>"$work/py" ||
        fail "$(tail -n 1 "$work/py")"
}

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

# ---- the result ----

check "as JSON" 0 "$nibble" generate -q -m "$model" -p hello -n 12 --ignore-eos --json
fields 'set(r) >= {"text", "ids", "prompt_tokens", "completion_tokens", "finish_reason",
                   "timings"}' \
    'isinstance(r["text"], str)' 'len(r["ids"]) == r["completion_tokens"] == 12' \
    'r["prompt_tokens"] > 1' 'r["finish_reason"] == "length"' 'isinstance(r["timings"], dict)' \
    'all(isinstance(i, int) and 0 <= i < 672 for i in r["ids"])'
lines err 0
python3 -B -c 'import json, sys
r = json.load(open(sys.argv[1], encoding="utf-8"))
sys.stdout.buffer.write((r["text"] + "\n").encode())' "$work/out" >"$work/text"
check "as text" 0 "$nibble" generate -q -m "$model" -p hello -n 12 --ignore-eos
same "$work/text"
printf 'hello\n' >"$work/prompt"
check "prompt from a file" 0 "$nibble" generate -q -m "$model" --prompt-file "$work/prompt" -n 12 \
    --ignore-eos
same "$work/text"
check "prompt from standard input" 0 sh -c 'printf "hello\r\n" | "$@"' - \
    "$nibble" generate -q -m "$model" -p - -n 12 --ignore-eos
same "$work/text"
check "two prompts" 2 "$nibble" generate -m "$model" -p hello --prompt-file "$work/prompt"
says err "give -p or --prompt-file, not both"
check "no file for the prompt" 1 "$nibble" generate -m "$model" --prompt-file "$work/none"
says err "cannot open '$work/none': No such file or directory"
check "a prompt that is not UTF-8" 1 "$nibble" generate -m "$model" -p "$(printf 'caf\351 noir')"
says err "the prompt is not UTF-8: byte 4 of 9 is 0xE9; iconv(1) converts it"
check "a system message that is not UTF-8" 1 "$nibble" generate -m "$model" -p hello \
    --system "$(printf '\300')"
says err "the system message is not UTF-8: byte 1 of 1 is 0xC0"
check "to its end" 0 "$nibble" generate -q -m "$model" -p hello --ignore-eos --ctx 40 --json
fields 'r["finish_reason"] == "context"' 'r["prompt_tokens"] + r["completion_tokens"] == 41'
check "timing" 0 "$nibble" generate -q -m "$model" -p hello -n 3 --timing
says err "tok/s"

# ---- sampling ----

greedy="--temp 0 -n 16 --ignore-eos --raw -q"
# shellcheck disable=SC2086 # several words
set -- generate -m "$model" -p "the cat" $greedy
check "greedy" 0 "$nibble" "$@"
cp "$work/out" "$work/greedy"
check "greedy, once more" 0 "$nibble" "$@" --seed 9
same "$work/greedy"
check "top-k 1 is greedy" 0 "$nibble" "$@" --temp 1 --top-k 1
same "$work/greedy"
check "a seed" 0 "$nibble" "$@" --temp 1.5 --seed 1
cp "$work/out" "$work/seed1"
differs "$work/greedy"
check "the same seed" 0 "$nibble" "$@" --temp=1.5 --seed=1
same "$work/seed1"
check "another seed" 0 "$nibble" "$@" --temp 1.5 --seed 2
differs "$work/seed1"
check "an empty share" 0 "$nibble" "$@" --temp 1.5 --min-p 1
same "$work/greedy"
for option in "--top-p 0.9" "--min-p 0.1" "--repeat-penalty 1.3" "--presence-penalty 1" \
    "--frequency-penalty 0.5" "--top-k 5"; do
    # shellcheck disable=SC2086 # two words
    check "$option" 0 "$nibble" "$@" --temp 1 $option
done

# ---- the prompt ----

check "without the template" 0 "$nibble" generate -q -m "$model" -p "the cat" --raw --temp 0 -n 1 \
    --json
python3 -B -c 'import json, sys; print(json.load(open(sys.argv[1]))["prompt_tokens"])' \
    "$work/out" >"$work/raw"
check "its tokens" 0 "$nibble" tokenize -m "$model" --text "the cat"
[ "$(tr -cd , <"$work/out" | wc -c)" -eq "$(($(cat "$work/raw") - 1))" ] ||
    fail "$(cat "$work/raw") tokens in the prompt; they are $(cat "$work/out")"
check "with the template" 0 "$nibble" generate -q -m "$model" -p "the cat" --temp 0 -n 1 --json
fields "r['prompt_tokens'] > $(cat "$work/raw")"
cp "$work/out" "$work/plain"
check "a system message" 0 "$nibble" generate -q -m "$model" -p "the cat" --system "be brief" \
    --temp 0 -n 1 --json
fields "r['prompt_tokens'] > json.load(open('$work/plain'))['prompt_tokens']"

# ---- stop ----

python3 -B -c 'import sys
t = open(sys.argv[1], encoding="utf-8").read()[:-1]
i = next(i for i in range(2, len(t)) if t[i] not in "\0\ufffd" and ord(t[i]) > 31)
open(sys.argv[2], "w", encoding="utf-8").write(t[i])
open(sys.argv[3], "w", encoding="utf-8").write(t[:t.index(t[i])] + "\n")' \
    "$work/greedy" "$work/stop" "$work/wanted" || fail "no text to stop at"
check "stop" 0 "$nibble" "$@" --stop "nowhere to be seen" --stop "$(cat "$work/stop")"
same "$work/wanted"
check "stop, as JSON" 0 "$nibble" "$@" --stop "$(cat "$work/stop")" --json
fields 'r["finish_reason"] == "stop"' 'r["completion_tokens"] <= 16'

# ---- caches ----

check "exact" 0 "$nibble" "$@" --exact --kv-dtype f32
cp "$work/out" "$work/exact"
for mode in prompt token none; do
    check "mode $mode" 0 "$nibble" "$@" --exact --kv-dtype f32 --kv-mode "$mode"
    same "$work/exact"
    for dtype in f32 f16 bf16 f8; do
        check "$dtype in mode $mode" 0 "$nibble" "$@" --kv-dtype "$dtype" --kv-mode "$mode"
    done
done
check "four bits" 0 "$nibble" quantize -q "$model" "$work/four.dat"
check "four bits, with a directory" 0 "$nibble" "$@" -m "$work/four.dat" --model-dir "$model"
cp "$work/out" "$work/four"
for mode in token none; do
    check "four bits in mode $mode" 0 "$nibble" "$@" -m "$work/four.dat" --model-dir "$model" \
        --kv-mode "$mode"
    same "$work/four"
done
check "one thread" 0 "$nibble" "$@" -m "$work/four.dat" --model-dir "$model" --threads 1
same "$work/four"

# ---- errors ----

check "no model" 2 "$nibble" generate -p hello
says err "-m MODEL is missing"
check "no prompt" 2 "$nibble" generate -m "$model"
says err "-p PROMPT is missing"
check "no such option" 2 "$nibble" generate -m "$model" -p hello --tempp 1
says err "--temp"
for option in "--temp 101" "--temp hot" "--top-p 1.5" "--min-p 2" "--top-k x" "-n -1" "--seed -1" \
    "--kv-mode all" "--kv-dtype f4" "--ctx -1" "--presence-penalty 1000" "--temp" \
    "--temp -0.5" "--top-p 0" "--min-p -0.5" "--repeat-penalty 0" "--simd sse9"; do
    # shellcheck disable=SC2086 # two words
    check "out of range: $option" 2 "$nibble" generate -m "$model" -p hello -n 1 -q $option
done
check "the option check-logits" 0 "$nibble" generate -q -m "$model" -p hello -n 2 --check-logits
check "no such model" 1 "$nibble" generate -m "$work/none" -p hello
says err "'$work/none'"
lines err 1
lines out 0
check "an empty prompt" 1 "$nibble" generate -q -m "$model" -p "" --raw
says err "the prompt is empty"
check "a context past the model's" 1 "$nibble" generate -q -m "$model" -p hello --ctx 257
says err "the model was made for 256"
check "a prompt past the context" 1 "$nibble" generate -q -m "$model" -p hello --ctx 3
says err "context of 3"
lines err 1
lines out 0
mkdir "$work/mute"
cp "$model/config.json" "$model/model.safetensors" "$work/mute"
check "no tokenizer" 1 "$nibble" generate -q -m "$work/mute" -p hello
says err "has no tokenizer"
check "output that cannot be written" 1 sh -c '"$0" generate -q -m "$1" -p hello -n 8 >/dev/full' \
    "$nibble" "$model"
lines err 1
check "JSON that cannot be written" 1 sh -c \
    '"$0" generate -q -m "$1" -p hello -n 8 --json >/dev/full' "$nibble" "$model"

# ---- benches ----

check "bench decode" 0 "$nibble" bench decode --synthetic tiny --json --threads 1 -n 8
fields 'set(r) >= {"tokens_per_s", "bytes_per_token", "gb_per_s", "read_gb_per_s", "share",
                   "context", "batch"}' 'r["tokens_per_s"] > 0 and r["bytes_per_token"] > 0' \
    'abs(r["share"] - r["gb_per_s"] / r["read_gb_per_s"]) < 1e-9' \
    'r["context"] == 16 and r["batch"] == 1'
check "bench decode of several" 0 "$nibble" bench decode --synthetic tiny --json --threads 1 \
    -n 8 --parallel 3 --depth 700
fields 'r["context"] == 700 and r["batch"] == 3 and r["tokens_per_s"] > 0' \
    'abs(r["tokens_per_s"] / r["tokens_per_s_per_sequence"] - 3) < 1e-9' \
    'abs(r["gb_per_s"] * 1e9 / r["tokens_per_s"] - r["bytes_per_token"] / 3
         - r["kv_bytes_per_token"]) < 1'
check "bench decode of several, in words" 0 "$nibble" bench decode --synthetic tiny --threads 1 \
    -n 8 --parallel 2
says out "for each of 2 sequences"
check "bench decode of too many" 2 "$nibble" bench decode --synthetic tiny --parallel 4097
check "bench prefill" 0 "$nibble" bench prefill --synthetic tiny --json --threads 1
fields 'r["tokens_per_s"] > 0 and r["gmac_per_s"] > 0' 'r["gmac_per_s_per_core"] > 0' \
    '"share" in r'
check "bench prefill, tokens" 0 "$nibble" bench prefill --synthetic tiny --threads 1 -n 32
check "bench train" 0 "$nibble" bench train --synthetic tiny --json --threads 1 --seq-len 32 \
    --batch-size 2 --steps 3
fields 'set(r) >= {"tokens_per_s", "tflops", "peak_tflops", "share", "peak_bytes", "step_ms"}' \
    'abs(r["step_ms"] * r["tokens_per_s"] / 1e3 - 64) < 1e-6' \
    'abs(r["share"] - r["tflops"] / r["peak_tflops"]) < 1e-9' '0 < r["share"] < 1'
check "bench train of a model" 0 "$nibble" bench train -m "$model" --threads 1 --seq-len 8 --steps 1
says out "tok/s"
check "bench train, impossible" 1 "$nibble" bench train --synthetic tiny --fused-step --grad-accum 2
check "bench without a model" 2 "$nibble" bench decode
check "bench of the shapes of a config.json" 0 "$nibble" bench decode -q -n 2 \
    --config "$root/models/nib/config.json"
says out "tok/s"
check "bench of no size" 2 "$nibble" bench decode --synthetic huge
says err "--synthetic takes none|tiny"
finish
