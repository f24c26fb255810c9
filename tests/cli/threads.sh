# What the program gives with several threads is what it gives with one. With ThreadSanitizer
# (make tsan) this is also where races of the program itself are found.
# shellcheck shell=sh disable=SC2154 # $work, $failures and $nibble are lib.sh's
root=$(cd "$(dirname "$0")/../.." && pwd)
. "$(dirname "$0")/lib.sh"

cat >"$work/config.json" <<'JSON'
{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32, "hidden_act": "silu",
 "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 256,
 "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
 "rope_theta": 10000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
 "eos_token_id": 602, "vocab_size": 672}
JSON
i=0
while [ $i -lt 40 ]; do
    echo "the cat sees $i dogs over the hill, and rain falls gently on all of them."
    i=$((i + 1))
done >"$work/text.txt"

# same A B: two files with the same bytes.
same() {
    cmp "$work/$1" "$work/$2" || failures=$((failures + 1))
}

for n in 1 4; do
    model=$work/model$n
    check "synth, $n threads" 0 "$nibble" synth -q --threads $n --sigma 0.05 \
        --config "$work/config.json" "$model"
    cp "$root/tests/golden/tokenizer/qwen/tokenizer.json" "$model"
    check "quantize, $n threads" 0 "$nibble" quantize -q --threads $n "$model" "$work/four$n.dat"
    check "verify, $n threads" 0 "$nibble" inspect -q --threads $n --verify --model-dir "$model" \
        "$work/four$n.dat"
    check "generate, $n threads" 0 "$nibble" generate -q --threads $n -m "$work/four$n.dat" \
        --model-dir "$model" -p "$(head -n 3 "$work/text.txt")" -n 8 --ignore-eos --seed 1
    mv "$work/out" "$work/answer$n"
    for way in "" "--fused-step --recompute block"; do
        # shellcheck disable=SC2086 # several words
        check "train $way, $n threads" 0 "$nibble" train -q --threads $n -m "$model" --steps 3 \
            -d "$work/text.txt" --eval-data "$work/text.txt" --seq-len 64 --lr 1e-3 $way \
            --checkpoint-dir "$work/ck$n" -o "$work/tuned$n.dat"
        [ -n "$way" ] || mv "$work/tuned$n.dat" "$work/plain$n.dat"
        rm -rf "$work/ck$n"
    done
done
same model1/model.safetensors model4/model.safetensors
same four1.dat four4.dat
same answer1 answer4
same plain1.dat plain4.dat
same tuned1.dat tuned4.dat
finish
