# cuda.sh - commands on a GPU, compared with the CPU. Without a GPU, or without CUDA in the build,
# it only checks the error message of --device cuda, and the result is SKIP.
# shellcheck shell=sh disable=SC2154 # $work, $failures and $nibble are lib.sh's
root=$(cd "$(dirname "$0")/../.." && pwd)
. "$(dirname "$0")/lib.sh"

# says_not out|err TEXT: the output must not contain TEXT.
says_not() {
    if grep -qF -- "$2" "$work/$1"; then
        echo "FAIL $name: '$2' is in std$1"
        failures=$((failures + 1))
    fi
}

# The tokenizer has 647 entries; the config pads the vocabulary to 672.
cat >"$work/config.json" <<'JSON'
{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128,
 "hidden_act": "silu", "hidden_size": 128, "intermediate_size": 288,
 "max_position_embeddings": 1024, "num_attention_heads": 4, "num_hidden_layers": 2,
 "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
 "tie_word_embeddings": true, "torch_dtype": "bfloat16", "eos_token_id": 602, "vocab_size": 672}
JSON
model=$work/model
check "synth makes a model" 0 "$nibble" synth -q --sigma 0.05 --config "$work/config.json" "$model"
cp "$root/tests/golden/tokenizer/qwen/tokenizer.json" "$model"
check "quantize to NVFP4" 0 "$nibble" quantize -q "$model" "$work/nvfp4.dat"
seq 1 300 >"$work/text"

if ! "$nibble" doctor --device cuda >/dev/null 2>&1; then
    for command in "generate -p x" chat "eval ppl --text $work/text" parity "stress kv" \
        "bench decode" "bench prefill" "bench train"; do
        # shellcheck disable=SC2086 # words of a command
        check "$command without a GPU is refused" 1 "$nibble" $command -m "$model" --device cuda
        says err "GPU 0 is not usable: "
        lines err 1
        lines out 0
    done
    check "auto picks the CPU without a GPU" 0 "$nibble" parity -m "$model" -p hello --threads 1
    says_not err "nibble: on"
    check "doctor says that auto is the CPU" 0 "$nibble" doctor
    says out "auto picks the CPU"
    finish || exit 1
    echo "SKIP: no GPU"
    exit 77
fi

# ---- which device is chosen ----

check "doctor says that auto is the GPU" 0 "$nibble" doctor
says out "auto picks cuda:0"
says out "NVFP4 products, prompts, gpu 0"
check "doctor --json names the products" 0 "$nibble" doctor --json
says out '"nvfp4_products": "'
check "auto picks the GPU and says so" 0 "$nibble" generate -m "$model" --raw -p hello -n 4 --temp 0
says err "nibble: on cuda:0"
check "-q does not say it" 0 "$nibble" generate -q -m "$model" --raw -p hello -n 4 --temp 0
lines err 0
check "an explicit device is not announced" 0 "$nibble" generate -m "$model" --raw -p hello -n 4 \
    --temp 0 --device cuda
says_not err "nibble: on"
check "-v announces the CPU" 0 "$nibble" generate -v -m "$model" --raw -p hello -n 4 --temp 0 \
    --device cpu
says err "nibble: on cpu"
check "a GPU that does not exist is refused" 1 "$nibble" generate -m "$model" --raw -p hello \
    --device cuda:1023
says err "GPU 1023 is not usable"
check "train takes the GPU and says so" 0 "$nibble" train --synthetic tiny --steps 1 --seq-len 16
says err "on cuda:0"
check "bench train takes a GPU" 0 "$nibble" bench train --synthetic tiny --steps 1 --seq-len 16 \
    --device cuda
says out "large products in bf16 reach (cuda:0)"

# ---- results equal the CPU's ----

cat >"$work/check.py" <<'PY'
import json
import sys

r = json.load(open(sys.argv[1], encoding="utf-8"))
paths = {p["path"]: p for p in r["paths"]}
assert r["passed"] is True, r
for name in ("cuda, exact", "cuda, exact decode", "cuda", "cuda, decode"):
    p = paths[name]
    assert p["same_clear"] == p["clear"] > 0, (name, p["same_clear"], p["clear"])
    assert 0 < p["logits"]["relative"] <= (1e-4 if "exact" in name else 5e-2), (name, p["logits"])
PY
for file in "$model" "$work/nvfp4.dat"; do
    check "parity of $file" 0 "$nibble" parity -q -m "$file" --model-dir "$model" \
        --text "$work/text" --device cuda --json
    cp "$work/out" "$work/parity.json"
    check "error bounds of $file" 0 python3 -B "$work/check.py" "$work/parity.json"
    for device in cpu cuda; do
        check "answer on $device" 0 "$nibble" generate -q -m "$file" --model-dir "$model" --raw \
            -p "one two three" -n 12 --temp 0 --ignore-eos --exact --kv-dtype f32 --device $device
        cp "$work/out" "$work/$device"
    done
    check "CPU and GPU give the same answer" 0 cmp "$work/cpu" "$work/cuda"
    check "perplexity on a GPU" 0 "$nibble" eval ppl -q -m "$file" --model-dir "$model" \
        --text "$work/text" --device cuda --json
    says out '"ppl"'
done
for file in "$model" "$work/nvfp4.dat"; do
    check "stress of $file" 0 "$nibble" stress kv -q -m "$file" --model-dir "$model" \
        --iterations 4 --device cuda
done

# ---- speed ----

for what in decode prefill; do
    check "bench $what" 0 "$nibble" bench $what --synthetic tiny --device cuda --json
    says out '"device": "cuda:0"'
    check "bench $what as text" 0 "$nibble" bench $what --synthetic tiny --device cuda
    says out "cuda:0"
done
check "bench decode of 70 sequences" 0 "$nibble" bench decode --synthetic tiny --device cuda \
    --parallel 70 --depth 300
says out "for each of 70 sequences"
finish
