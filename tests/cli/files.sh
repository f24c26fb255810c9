# inspect, convert and quantize through the binary: what they print and what they leave behind.
. "$(dirname "$0")/lib.sh"
m=$work/model

check "synth" 0 "$nibble" synth tiny "$m" --seed 3
says out "wrote $m"
check "inspect a directory" 0 "$nibble" inspect "$m"
says out "safetensors, 46 tensors"
says out "model.layers.3.mlp.down_proj.weight"
check "inspect as JSON" 0 "$nibble" inspect "$m" --json
says out '"format": "safetensors"'
python3 - "$work/out" <<'PY' || failures=$((failures + 1))
import json, sys
j = json.load(open(sys.argv[1]))
assert len(j["tensors"]) == 46, len(j["tensors"])
t = {x["name"]: x for x in j["tensors"]}["model.embed_tokens.weight"]
assert t["dtype"] == "bf16" and t["shape"] == [2048, 128] and t["bytes"] == 2048 * 128 * 2, t
assert isinstance(t["offset"], int)
PY
check "verify" 0 "$nibble" inspect "$m" --verify --threads 1
says out "verified:"
mkdir "$work/cut"
cp "$m/model.safetensors" "$work/cut/"
head -c 100 "$m/config.json" >"$work/cut/config.json"
check "a directory with half a config" 1 "$nibble" inspect "$work/cut"
says err "invalid JSON"
lines err 1
check "-m names the model" 0 "$nibble" inspect -m "$m"
check "-m for convert, and the old name" 0 "$nibble" convert --weight "$m" "$work/w.dat" -q
check "capital ending" 0 "$nibble" convert "$work/w.dat" "$work/W.DAT" -q
cmp "$work/w.dat" "$work/W.DAT" || failures=$((failures + 1))
check "a pattern that matches nothing" 0 "$nibble" quantize "$m" "$work/s.dat" --skip lm_heed
says err "--skip 'lm_heed' matches no tensor"
check "verify" 0 "$nibble" inspect "$m" --verify
says out "verified:"

check "quantize" 0 "$nibble" quantize "$m" "$work/q.dat" --report "$work/r.json"
says out "SNR (dB)"
says out "lm_head"
check "report" 0 python3 -c "import json,sys; r=json.load(open(sys.argv[1])); assert r['total']['snr_db'] > 20.8 and len(r['families']) == 8" "$work/r.json"
check "an NVFP4 pair is one row" 0 "$nibble" inspect "$work/q.dat" --json
python3 - "$work/out" <<'PY' || failures=$((failures + 1))
import json, sys
j = json.load(open(sys.argv[1]))
t = {x["name"]: x for x in j["tensors"]}
q = t["model.layers.0.self_attn.q_proj.weight"]
assert q["dtype"] == "nvfp4" and q["shape"] == [256, 128], q
assert q["bytes"] == 256 * 128 // 2 + 256 * 128 // 16, q
assert "model.layers.0.self_attn.q_proj.weight.scale" not in t
assert t["lm_head.weight"]["dtype"] == "nvfp4"
PY
check "verify a bare .dat" 0 "$nibble" inspect "$work/q.dat" --verify
check "quiet" 0 "$nibble" convert "$work/q.dat" "$work/q.safetensors" -q
lines out 0
lines err 0

# A narrow model: rows of 32 values fit NVFP4 but not GGUF's blocks of 64.
cat >"$work/narrow.json" <<'JSON'
{"model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 1,
 "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": true}
JSON
check "synth from a config" 0 "$nibble" synth --config "$work/narrow.json" "$work/narrow"
check "quantize the narrow one" 0 "$nibble" quantize "$work/narrow" "$work/n.dat"
check "GGUF cannot hold it" 1 "$nibble" convert "$work/n.dat" "$work/n.gguf" --model-dir "$work/narrow"
says err "blocks of 64"
says err "--dtype bf16"
lines err 1
check "dequantised it can" 0 "$nibble" convert "$work/n.dat" "$work/n.gguf" --model-dir "$work/narrow" --dtype bf16 -q
[ ! -e "$work/.n.gguf.nibble-"* ] 2>/dev/null || { echo "FAIL temporary file left"; failures=$((failures + 1)); }

check "a target that is a home directory" 1 "$nibble" convert "$m" "$work"
says err "not a model directory"
check "same source and target" 1 "$nibble" convert "$work/q.dat" "$work/q.dat"
says err "both source and target"
check "no write permission" 1 "$nibble" convert "$m" /proc/x.dat
lines err 1
finish
