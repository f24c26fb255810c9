# stress kv on a small model: results, the table, errors.
# shellcheck shell=sh disable=SC2154 # $work, $failures and $nibble are lib.sh's
. "$(dirname "$0")/lib.sh"

check "a model" 0 "$nibble" synth -q tiny "$work/tiny"
check "four bits" 0 "$nibble" quantize -q "$work/tiny" "$work/four.dat"
set -- stress kv -q -m "$work/four.dat" --model-dir "$work/tiny" --threads 2
iterations=6
few=2
if sanitized; then
    iterations=1 few=1
fi
check "some iterations" 0 "$nibble" "$@" --iterations $iterations --json
python3 -B -c 'import json, sys
r = json.load(open(sys.argv[1]))
assert r["iterations"] == int(sys.argv[2]) and r["outputs_identical"] and r["memory_flat"], r
assert r["difference"] == "" and len(set(r["modes"])) == len(r["modes"]) >= 10, r
assert {"prompt", "token", "none"} <= set(r["modes"]), r
assert r["rss_first"] > 0 and r["rss_last"] > 0, r' "$work/out" $iterations || {
    echo "FAIL $name: $(cat "$work/out")"
    failures=$((failures + 1))
}
lines err 0
check "as a table, bf16 weights" 0 "$nibble" stress kv -q -m "$work/tiny" --iterations $few
says out "snapshot restored"
says out "$few iteration"
says out "outputs identical"
says out "not judged"
check "scalar code" 0 "$nibble" "$@" -n 1 --simd scalar
sed 's/"max_position_embeddings": [0-9]*/"max_position_embeddings": 63/' \
    "$work/tiny/config.json" >"$work/config.json"
check "a short model" 0 "$nibble" synth -q --config "$work/config.json" "$work/short"
check "too short a context" 1 "$nibble" stress kv -q -m "$work/short"
says err "63 tokens of context"
lines err 1
check "no iterations" 2 "$nibble" "$@" --iterations 0
check "no model" 2 "$nibble" stress kv
says err "-m MODEL is missing"
check "something else" 2 "$nibble" stress gpu -m "$work/tiny"
says err "there is no 'gpu'"
check "interrupted" 130 timeout -s INT --preserve-status 2 "$nibble" "$@" --iterations 100000
finish
