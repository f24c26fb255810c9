# Every path of the CPU through small models in every format, and on every instruction set; those of
# a GPU are in cuda.sh.
# shellcheck shell=sh disable=SC2154 # $work, $failures and $nibble are lib.sh's
. "$(dirname "$0")/lib.sh"

fail() {
    echo "FAIL $name: $1"
    failures=$((failures + 1))
}

# errors float|four: the JSON on standard output.
errors() {
    cp "$work/out" "$work/result.json"
    check "errors of $name" 0 python3 -B "$work/check.py" "$work/result.json" "$1"
}

cat >"$work/check.py" <<'PY'
import json
import sys

r = json.load(open(sys.argv[1], encoding="utf-8"))
paths = {p["path"]: p for p in r["paths"]}
assert r["passed"] is True, r
exact = ["whole prompt", "token by token", "no cache"]
assert set(exact) <= set(paths), list(paths)
for name, p in paths.items():
    assert len(p["layers"]) == 4 and p["positions"] == 19, (name, p["positions"])
    for e in [p["logits"]] + p["layers"]:
        assert 0 <= e["mean"] <= e["max"] and e["cosine"] <= 1 + 1e-12, (name, e)
    assert p["logits"]["cosine"] > 0.99, (name, p["logits"])
for name in exact:
    assert paths[name]["kl"] <= 1e-9, paths[name]["kl"]
    assert paths[name]["logits"]["relative"] <= 1e-5, paths[name]["logits"]
    assert paths[name]["same_top"] == 19, paths[name]["same_top"]
# NVFP4 weights meet integers there, floats do not.
integers = paths["integer activations"]["logits"]["relative"]
assert integers < 1e-2 and (integers > 0) == (sys.argv[2] == "four"), integers
assert 0 < paths["integers, decode"]["logits"]["relative"] < 1e-2
assert paths["integers, decode"]["kl"] < 1e-3, paths["integers, decode"]["kl"]
assert 0 < paths["cache in f16"]["logits"]["relative"] < 4 * 2**-11
assert 0 < paths["cache in bf16"]["logits"]["relative"] < 4 * 2**-8
assert 0 < paths["cache in f8"]["logits"]["relative"] < 4 * 2**-4
PY

model=$work/tiny
check "a model" 0 "$nibble" synth -q tiny "$model"
check "four bits" 0 "$nibble" quantize -q "$model" "$work/four.dat"
check "GGUF" 0 "$nibble" convert -q "$model" "$work/tiny.gguf"
check "four bits in GGUF" 0 "$nibble" convert -q "$work/four.dat" --model-dir "$model" \
    "$work/four.gguf"

levels="scalar"
for level in avx2 avx512; do
    "$nibble" parity -q --device cpu -m "$model" -p x --simd "$level" >/dev/null 2>&1 &&
        levels="$levels $level"
done
grep -q avx2 /proc/cpuinfo && case $levels in
*avx2*) ;;
*) fail "this CPU has AVX2, and parity fails on it" ;;
esac

! sanitized || levels=${levels##* } # the unit tests compare all of them

prompt="nineteen characters"
for level in $levels; do
    set -- parity -q --device cpu -p "$prompt" --simd "$level" --threads 1
    check "a directory, $level" 0 "$nibble" "$@" -m "$model" --json
    errors float
    check "four bits, $level" 0 "$nibble" "$@" -m "$work/four.dat" --model-dir "$model" --json
    errors four
    check "GGUF, $level" 0 "$nibble" "$@" -m "$work/tiny.gguf"
    says out "token by token"
    lines err 0
    check "four bits in GGUF, $level" 0 "$nibble" "$@" -m "$work/four.gguf" --json
    errors four
done
check "on two threads" 0 "$nibble" parity -q --device cpu -p "$prompt" -m "$model" --threads 2 --json
errors float
check "every layer" 0 "$nibble" parity -v -m "$model" --threads 1
says out "layer 3"
printf '%s' "$prompt" >"$work/text"
check "a text" 0 "$nibble" parity -q --device cpu -m "$model" --text "$work/text" --json
errors float
i=0
while [ $i -lt 70 ]; do
    printf '%s' "$prompt"
    i=$((i + 1))
done >"$work/long"
check "the beginning of a long one" 0 "$nibble" parity -q -m "$model" --text "$work/long"
says out "512 tokens"

# ---- errors ----

check "no model" 2 "$nibble" parity
says err "-m MODEL is missing"
check "no such model" 1 "$nibble" parity -m "$work/none"
says err "'$work/none'"
check "an empty prompt" 1 "$nibble" parity -q -m "$model" -p ""
says err "the prompt is empty"
check "an empty text" 1 "$nibble" parity -q -m "$model" --text /dev/null
says err "the text is empty"
check "output that cannot be written" 1 sh -c '"$0" parity -q -m "$1" -p hello >/dev/full' \
    "$nibble" "$model"
finish
