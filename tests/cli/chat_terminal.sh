# A chat on a terminal: line editing, history, pasting, Ctrl-C. The keys are pressed by Python.
# shellcheck shell=sh disable=SC2154 # $work, $failures and $nibble are lib.sh's
root=$(cd "$(dirname "$0")/../.." && pwd)
. "$(dirname "$0")/lib.sh"

cat >"$work/config.json" <<'JSON'
{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32, "hidden_act": "silu",
 "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 65536,
 "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
 "rope_theta": 10000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
 "eos_token_id": 602, "vocab_size": 672}
JSON
check "a model" 0 "$nibble" synth -q --sigma 0.05 --config "$work/config.json" "$work/model"
cp "$root/tests/golden/tokenizer/qwen/tokenizer.json" "$work/model"
check "on a terminal" 0 python3 -B "$root/tests/cli/chat_terminal.py" "$nibble" "$work/model" "$work"
cat "$work/out"
finish
