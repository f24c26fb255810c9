# Losses, the KL anchor to the reference model, replay, resuming with them, errors.
# shellcheck shell=sh disable=SC2154 # $work, $failures and $nibble are lib.sh's
. "$(dirname "$0")/lib.sh"

# log FILE CONDITION...: Python expressions that must hold for the lines r of a log.
log() {
    python3 -B -c 'import json, sys
r = [json.loads(l) for l in open(sys.argv[1], encoding="utf-8")]
for c in sys.argv[2:]:
    assert eval(c), c + ": " + json.dumps(r)[:800]' "$@" 2>"$work/py" || {
        echo "FAIL $name: $(tail -n 1 "$work/py")"
        failures=$((failures + 1))
    }
}

same() {
    cmp -s "$1" "$2" || {
        echo "FAIL $name: '$1' and '$2' differ"
        failures=$((failures + 1))
    }
}

python3 -B - "$work" <<'PY'
import sys

words = "who are you what is this where do we go now and then they say it all again".split()
for name, count, more in (("main", 23, 3), ("other", 17, 7)):
    with open(f"{sys.argv[1]}/{name}.tsv", "w") as f:
        for i in range(count):
            take = [words[(i * more + k * k) % len(words)] for k in range(3 + i % 5)]
            f.write(" ".join(take) + f"?\t{i} {' '.join(reversed(take))}.\n")
with open(sys.argv[1] + "/text.txt", "w") as f:
    f.write("<|endoftext|>".join(" ".join(words[i:] + words[:i]) for i in range(9)))
PY
cat >"$work/config.json" <<'JSON'
{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16, "hidden_act": "silu",
 "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 256,
 "num_attention_heads": 2, "num_hidden_layers": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-6,
 "rope_theta": 10000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "vocab_size": 304}
JSON
model=$work/model main=$work/main.tsv other=$work/other.tsv
check "a tokenizer" 0 "$nibble" tokenizer train -q --vocab 300 -o "$work/tokenizer.json" \
    "$main" "$other"
check "a model" 0 "$nibble" synth -q --sigma 0.2 --config "$work/config.json" "$model"
cp "$work/tokenizer.json" "$work/tokenizer_config.json" "$model"

# train NAME EXIT-CODE OPTIONS...
train() {
    train_name=$1 train_code=$2
    shift 2
    check "$train_name" "$train_code" "$nibble" train -q -m "$model" -d "$main" --seq-len 64 \
        --batch-size 3 --schedule constant --lr 3e-3 --threads 2 "$@"
}

# ---- replay and the anchor, resumed ----
set -- --replay "$other:0.4" --kl-base 0.5
train "twelve steps" 0 --steps 12 "$@" -o "$work/a.dat" --log "$work/a.jsonl"
log "$work/a.jsonl" 'len(r) == 12' 'r[0]["kl"] > 1e-3' 'r[11]["kl"] > 2 * r[0]["kl"]' \
    'r[11]["loss"] < r[0]["loss"]'
train "seven steps" 0 --steps 7 "$@" --checkpoint-dir "$work/ckpt" --log "$work/b.jsonl"
train "another share" 1 --steps 12 --replay "$other:0.5" --kl-base 0.5 --resume \
    --checkpoint-dir "$work/ckpt"
says err "the run was begun with replay_share 0.4"
train "no replay" 1 --steps 12 --kl-base 0.5 --resume --checkpoint-dir "$work/ckpt"
says err "replay_"
train "another weight" 1 --steps 12 --replay "$other:0.4" --resume --checkpoint-dir "$work/ckpt"
says err "the run was begun with kl_base 0.5"
train "another loss" 1 --steps 12 --replay "$other:0.4" --loss scalar --resume \
    --checkpoint-dir "$work/ckpt"
says err "the run was begun with"
train "another model" 1 --steps 12 "$@" --resume --checkpoint-dir "$work/ckpt" -m "$work/a.dat" \
    --model-dir "$model"
says err "the model is not the one that the run began with"
lines err 1
train "five more" 0 --steps 12 "$@" --resume --checkpoint-dir "$work/ckpt" -o "$work/b.dat" \
    --log "$work/b.jsonl"
same "$work/a.dat" "$work/b.dat"
log "$work/b.jsonl" 'len(r) == 12'
train "another seed" 0 --steps 12 "$@" --seed 1 -o "$work/c.dat"
cmp -s "$work/a.dat" "$work/c.dat" && {
    echo "FAIL $name: the seed changes nothing"
    failures=$((failures + 1))
}
train "two passes a step" 0 --steps 9 "$@" --grad-accum 2 --batch-size 1 -o "$work/d.dat"
train "five of nine" 0 --steps 5 "$@" --grad-accum 2 --batch-size 1 --checkpoint-dir "$work/two/"
train "the other four" 0 --steps 9 "$@" --grad-accum 2 --batch-size 1 --checkpoint-dir "$work/two" \
    --resume -o "$work/e.dat"
same "$work/d.dat" "$work/e.dat"
train "layer by layer" 0 --steps 3 "$@" --fused-step --recompute block

# ---- the reference is the model as it was read, before rounding to the training precision ----
check "four bits" 0 "$nibble" quantize -q "$model" "$work/four"
train "from four bits" 0 --steps 1 --kl-base 1 -m "$work/four" --log "$work/four.jsonl"
log "$work/four.jsonl" 'abs(r[0]["kl"]) < 1e-6'
train "not rounded" 0 --steps 1 --kl-base 1 --precision f32 --log "$work/f32.jsonl"
log "$work/f32.jsonl" 'abs(r[0]["kl"]) < 1e-6'

# ---- the anchor keeps the model near the reference ----
train "free" 0 --steps 12 --kl-base 1e-9 --log "$work/free.jsonl"
train "held" 0 --steps 12 --kl-base 100 --log "$work/held.jsonl"
log "$work/held.jsonl" "r[11]['kl'] < 0.5 * $(tail -n 1 "$work/free.jsonl" |
    python3 -c 'import json; print(json.loads(input())["kl"])')"
train "long texts have no anchor" 1 --steps 1 --kl-base 1 --replay "$work/text.txt" --seq-len 16
says err "none has a label within 16 tokens"
lines err 1
set -- --steps 12 --replay "$work/text.txt" --precision f32
train "short texts, free" 0 "$@" --kl-base 1e-9 --log "$work/t0.jsonl"
train "short texts, held" 0 "$@" --kl-base 100 --log "$work/t1.jsonl"
log "$work/t1.jsonl" 'abs(r[0]["kl"]) < 1e-6' "r[11]['kl'] < 0.5 * $(tail -n 1 "$work/t0.jsonl" |
    python3 -c 'import json; print(json.loads(input())["kl"])')"
train "texts among conversations" 0 --steps 3 --kl-base 1 -d "$work/text.txt"

# ---- distance to embeddings ----
train "scalar" 0 --steps 12 --loss scalar --eval-data "$other" --log "$work/s.jsonl" --json
log "$work/s.jsonl" 'r[12]["loss"] < r[1]["loss"]' '"kl" not in r[1]' \
    'r[0]["step"] == 0 and r[0]["eval"]["ppl"] > 1' 'r[13]["eval"]["ppl"] > 1'
says out '"kl": null'

# ---- epochs count the main data ----
train "an epoch" 0 --epochs 1 --log "$work/e1.jsonl"
train "an epoch with replay" 0 --epochs 1 --replay "$other:0.5" --log "$work/e2.jsonl"
n=$(wc -l <"$work/e1.jsonl")
log "$work/e2.jsonl" "2 * $n - 1 <= len(r) <= 2 * $n + 1"

# ---- errors ----
for share in 0 1 1.5 -0.5 0.5x 1e-400; do
    train "a share of $share" 2 --steps 1 --replay "$other:$share"
    says err "the share of --replay must be more than 0 and less than 1, not '$share'"
    lines err 1
done
train "a colon in the name" 1 --steps 1 --replay "$work/no:where.tsv"
says err "no:where.tsv"
lines err 1
train "no such file" 1 --steps 1 --replay "$work/nowhere.tsv"
lines err 1
train "probabilities of a distance" 2 --steps 1 --loss scalar --kl-base 1
says err "--kl-base compares probabilities"
check "random tokens" 2 "$nibble" train -q --synthetic tiny --steps 1 --kl-base 1
says err "need data"
sed 's/"vocab_size": 304/"vocab_size": 272/' "$work/config.json" >"$work/small.json"
check "a small model" 0 "$nibble" synth -q --config "$work/small.json" "$work/small"
cp "$work/tokenizer.json" "$work/tokenizer_config.json" "$work/small"
check "ids past the vocabulary" 1 "$nibble" train -q -m "$work/small" -d "$main" --steps 1 \
    --seq-len 64
says err "outside the model's vocabulary of 272"
lines err 1
finish
