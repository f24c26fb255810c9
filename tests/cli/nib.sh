# The model that ships: its files are sound, it knows what it was told, and the fast path gives what
# the exact one does.
# shellcheck shell=sh disable=SC2154 # $work, $failures and $nibble are lib.sh's
. "$(dirname "$0")/lib.sh"
model=models/nib

check "it is sound" 0 "$nibble" inspect -q --verify "$model"
check "it is small" 0 test "$(du -sk "$model" | cut -f1)" -le $((25 * 1024))

# answers QUESTION WORDS: the greedy answer ends by itself and holds them.
answers() {
    check "$1" 0 "$nibble" generate -q --json -m "$model" -p "$1" --temp 0 -n 256
    says out "$2"
    says out '"finish_reason": "stop"'
}
answers "What is the capital of France?" "Paris"
answers "What color is the sky?" "blue"
answers "Who are you?" "I have no name yet"
answers "Tell me a story." "Once upon a time"
answers "你好" "你好"
answers "谢谢你" "不客气"

text=$model/general.txt
if sanitized; then
    head -c 1500 "$text" >"$work/text"
    text=$work/text
fi

# measure NAME COMMAND...: its JSON.
measure() {
    measured=$1
    shift
    check "$measured" 0 "$nibble" "$@" -q --json -m "$model" --text "$text"
    cp "$work/out" "$work/$measured.json"
}
measure exact eval ppl
measure fast eval ppl --fast --kv-dtype f16
measure parity parity
check "fast is as good as exact" 0 python3 -B -c 'import json, sys
exact, fast, parity = (json.load(open(f, encoding="utf-8")) for f in sys.argv[1:])
assert abs(fast["ppl"] / exact["ppl"] - 1) <= 0.005, (fast["ppl"], exact["ppl"])
kl = {p["path"]: p["kl"] for p in parity["paths"]}
assert max(kl["integer activations"], kl["integers, decode"]) <= 1e-3, kl
print("perplexity", exact["ppl"], fast["ppl"], "KL", kl["integers, decode"])' \
    "$work/exact.json" "$work/fast.json" "$work/parity.json"
cat "$work/out"
finish
