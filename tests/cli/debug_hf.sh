# Logits, loss, gradients, three steps of AdamW and greedy tokens against Hugging Face's, which were
# computed in float64 (tests/golden/hf); on each instruction set, and on a GPU where there is one.
# usage: debug_hf.sh NIBBLE [cuda]; cuda: on the GPU only
# shellcheck shell=sh disable=SC2154 # $work, $failures and $nibble are lib.sh's
root=$(cd "$(dirname "$0")/../.." && pwd)
golden=$root/tests/golden/hf
. "$(dirname "$0")/lib.sh"
levels=${2:-}

# safetensors without packages: tensors by name, as flat lists.
cat >"$work/st.py" <<'PY'
import array
import json
import struct

CODES = {"F32": "f", "I32": "i"}


def read(path):
    with open(path, "rb") as f:
        data = f.read()
    (size,) = struct.unpack("<Q", data[:8])
    tensors = {}
    for name, t in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__" and t["dtype"] in CODES:
            start, end = (8 + size + i for i in t["data_offsets"])
            tensors[name] = t["shape"], array.array(CODES[t["dtype"]], data[start:end])
    return tensors


def write(path, tensors):
    header, blob = {}, b""
    for name, (shape, values) in tensors.items():
        raw = array.array("i", values).tobytes()
        header[name] = {"dtype": "I32", "shape": shape,
                        "data_offsets": [len(blob), len(blob) + len(raw)]}
        blob += raw
    text = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + blob)
PY
cat >"$work/input.py" <<'PY'
import sys

sys.path.insert(0, sys.argv[1])
import st

golden = st.read(sys.argv[2])
st.write(sys.argv[3], {name: golden[name] for name in ("input_ids", "labels")})
PY
cat >"$work/compare.py" <<'PY'
import math
import sys

sys.path.insert(0, sys.argv[1])
import st

wanted, got = st.read(sys.argv[2]), st.read(sys.argv[3])


def error(name):
    """Relative, by Frobenius norm."""
    (shape, a), (mine, b) = wanted[name], got[name]
    assert (shape or [1]) == mine and len(a) == len(b), (name, shape, mine)
    assert all(map(math.isfinite, b)), f"'{name}' is not finite"
    return math.sqrt(math.fsum((x - y) ** 2 for x, y in zip(a, b)) / math.fsum(x * x for x in a))


LIMITS = (("logits", 1e-5), ("loss", 1e-6), ("grad.", 2e-5), ("adamw3.", 2e-4))
parameters = 0
for name in wanted:
    for start, limit in LIMITS:
        if name.startswith(start):
            assert name in got, f"'{name}' is missing"
            assert error(name) < limit, f"'{name}' is off by {error(name)}"
            parameters += start == "grad."
assert parameters >= 24 and "adamw3.losses" in wanted, "there is too little to compare with"
assert sum(name.startswith("adamw3.") for name in wanted) == parameters + 1
worst = {start: max((error(n), n) for n in wanted if n.startswith(start)) for start, _ in LIMITS}
print(", ".join(f"{n} {e:.2g}" for e, n in worst.values()))
assert wanted["greedy.ids"][0] == got["greedy.ids"][0], got["greedy.ids"][0]
assert wanted["greedy.ids"][1] == got["greedy.ids"][1], list(got["greedy.ids"][1])
PY
cat >"$work/cases.py" <<'PY'
import sys

sys.path.insert(0, sys.argv[1])
import st

ids = [[2, 4], [1, 2, 3, 4, 5, 6, 7, 8]]
st.write(sys.argv[1] + "/good", {"input_ids": ids, "labels": ids})
st.write(sys.argv[1] + "/none", {"input_ids": ids, "labels": [[2, 4], [-100] * 8]})
st.write(sys.argv[1] + "/missing", {"input_ids": ids})
st.write(sys.argv[1] + "/shapes", {"input_ids": ids, "labels": [[4, 2], ids[1]]})
st.write(sys.argv[1] + "/flat", {"input_ids": [[8], ids[1]], "labels": [[8], ids[1]]})
st.write(sys.argv[1] + "/outside", {"input_ids": [[1, 2], [1, 99999]], "labels": [[1, 2], [1, 2]]})
st.write(sys.argv[1] + "/label", {"input_ids": [[1, 2], [1, 2]], "labels": [[1, 2], [1, 99999]]})
st.write(sys.argv[1] + "/negative", {"input_ids": [[1, 2], [1, 2]], "labels": [[1, 2], [1, -5]]})
PY

# ---- errors, on a random model ----

refuses_what_is_wrong() {
    check "a model" 0 "$nibble" synth -q tiny "$work/tiny"
    check "inputs" 0 python3 -B "$work/cases.py" "$work"
    for case in good none missing shapes flat outside label negative; do
        mv "$work/$case" "$work/$case.safetensors"
    done
    set -- debug hf -q --threads 1 -m "$work/tiny" --out "$work/out.safetensors"
    check "two rows of four" 0 "$nibble" "$@" --in "$work/good.safetensors" --precision f32
    [ -s "$work/out.safetensors" ] || {
        echo "FAIL $name: nothing was written"
        failures=$((failures + 1))
    }
    check "no labels" 0 "$nibble" "$@" --in "$work/none.safetensors"
    rm "$work/out.safetensors"
    for case in missing flat; do
        check "$case" 1 "$nibble" "$@" --in "$work/$case.safetensors"
        says err "$case.safetensors': '"
        says err "must be there as int32 [B, T]"
    done
    check "shapes" 1 "$nibble" "$@" --in "$work/shapes.safetensors"
    says err "different shapes"
    check "an id outside" 1 "$nibble" "$@" --in "$work/outside.safetensors"
    says err "token id 99999"
    check "a label outside" 1 "$nibble" "$@" --in "$work/label.safetensors"
    says err "label 99999"
    check "a negative label" 1 "$nibble" "$@" --in "$work/negative.safetensors"
    says err "label -5"
    check "no such input" 1 "$nibble" "$@" --in "$work/nowhere.safetensors"
    says err "nowhere.safetensors'"
    [ -e "$work/out.safetensors" ] && {
        echo "FAIL a failed run left its output"
        failures=$((failures + 1))
    }
    check "no input" 2 "$nibble" "$@"
    says err "--in FILE is missing"
    check "no output" 2 "$nibble" debug hf -m "$work/tiny" --in "$work/good.safetensors"
    says err "--out FILE is missing"
    check "no model" 2 "$nibble" debug hf --in a --out b
    says err "-m MODEL is missing"
    check "something else" 2 "$nibble" debug jax -m "$work/tiny" --in a --out b
    says err "there is no 'jax'"
    check "another precision" 2 "$nibble" "$@" --in "$work/good.safetensors" --precision bf16
}

# ---- Hugging Face ----

find_levels() {
    levels="scalar"
    for level in avx2 avx512; do
        "$nibble" debug hf -q -m "$work/tiny" --in "$work/good.safetensors" --device cpu \
            --simd "$level" --out "$work/try.safetensors" >/dev/null 2>&1 && levels="$levels $level"
    done
    grep -q avx2 /proc/cpuinfo && case $levels in
    *avx2*) ;;
    *)
        echo "FAIL this CPU has AVX2, and debug hf fails on it"
        failures=$((failures + 1))
        ;;
    esac
    "$nibble" doctor --device cuda >/dev/null 2>&1 && levels="$levels cuda"
}

if [ -z "$levels" ]; then
    refuses_what_is_wrong
    find_levels
fi
for model in tied untied; do
    check "input of $model" 0 python3 -B "$work/input.py" "$work" \
        "$golden/$model.golden.safetensors" "$work/in.safetensors"
    for level in $levels; do
        set -- --device cpu --simd "$level"
        [ "$level" = cuda ] && set -- --device cuda --precision f32
        check "$model, $level" 0 "$nibble" debug hf -q -m "$golden/$model" \
            --in "$work/in.safetensors" --out "$work/$level.safetensors" "$@"
        check "$model as Hugging Face, $level" 0 python3 -B "$work/compare.py" "$work" \
            "$golden/$model.golden.safetensors" "$work/$level.safetensors"
        echo "$model, $level: $(cat "$work/out")"
    done
done
finish
