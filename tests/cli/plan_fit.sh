# Settings that fit a given memory, against plans of every combination.
# shellcheck shell=sh disable=SC2154 # $work, $failures and $nibble are lib.sh's
. "$(dirname "$0")/lib.sh"

# compare.py NIBBLE: all combinations one by one; then what 'plan --fit' makes of some limits.
cat >"$work/compare.py" <<'PY'
import itertools
import json
import subprocess
import sys

nibble = sys.argv[1]
BATCH = 4
STATES = ["f32", "bf16", "int8", "nvfp4"]


def plan(*more):
    p = subprocess.run([nibble, "plan", "-q", "--synthetic", "tiny", "--seq-len", "64", "--json",
                        *more], capture_output=True)
    return p.returncode, json.loads(p.stdout)


def total(recompute, batch, state, master, fused):
    code, p = plan("--recompute", ["none", "block"][recompute], "--batch-size", str(batch),
                   "--grad-accum", str(1 if fused else BATCH // batch), "--optimizer-state-mode",
                   STATES[state], "--master-dtype", ["f32", "bf16"][master],
                   *(["--fused-step"] if fused else []))
    assert code == 0
    return p["total"]


def key(f):
    return (int(f["recompute"] == "block"), f["batch_size"],
            STATES.index(f["optimizer_state_mode"]), int(f["master_dtype"] == "bf16"),
            int(f["fused_step"]))


def as_good(a, b):
    return a[0] <= b[0] and a[1] >= b[1] and a[2] <= b[2] and a[3] <= b[3] and a[4] <= b[4]


every = {k: total(*k) for k in itertools.product((0, 1), (4, 2, 1), range(4), (0, 1), (0, 1))}
sizes = sorted(every.values())
for limit in (sizes[0], sizes[10], sizes[30], sizes[-2], sizes[-1]):
    code, p = plan("--fit", repr(limit / 2**30))
    fits = {k for k, v in every.items() if v <= limit}
    best = {k for k in fits if not any(a != k and as_good(a, k) for a in fits)}
    got = [key(f) for f in p["fits"]]
    assert code == 0 and len(got) == min(10, len(best)) and set(got) <= best, (got, best)
    assert got == sorted(got, key=lambda k: (k[0], -k[1], k[2] + k[3], k[4], k[2])), got
    for f, k in zip(p["fits"], got):
        assert f["total"] == every[k] and f["grad_accum"] == (1 if k[4] else BATCH // k[1]), f
    assert p["smallest"]["total"] == sizes[0], p
code, p = plan("--fit", repr((sizes[0] - 1) / 2**30))
assert code == 1 and p["fits"] == [] and p["smallest"]["total"] == sizes[0], (code, p)
assert every[key(p["smallest"])] == sizes[0]
# A backward pass is twice a forward pass, and only of layers that are trained; those before them
# keep nothing.
everything, last = plan()[1], plan("--train-last-layers", "1")[1]
config = {"layers": 4, "head": 2048 * 128}
layers = everything["flops_per_token"] / 6 - config["head"]
want = 6 * config["head"] + layers * (2 + 4 / config["layers"])
assert abs(last["flops_per_token"] / want - 1) < 1e-9, (last, want)
assert last["activations"] < everything["activations"] / 1.5
code, p = plan("--fit", "100", "--grad-accum", "2")
assert code == 0 and p["fits"][0]["grad_accum"] == 2 and "fits" not in plan()[1]
PY
check "every combination" 0 python3 -B "$work/compare.py" "$nibble"

check "as text" 0 "$nibble" plan -q --synthetic tiny --fit 100
says out "what fits 100 GiB"
says out "--recompute none --optimizer-state-mode f32 --master-dtype f32 --batch-size 4"
check "nothing fits" 1 "$nibble" plan -q --synthetic tiny --fit 0.0001
says err "nothing fits 0.0001 GiB; the smallest takes"
says err "--recompute block"
lines err 1
"$nibble" plan -q --synthetic tiny --json >"$work/size.json"
"$nibble" synth -q tiny "$work/tiny"
check "the shapes of a config.json" 0 "$nibble" plan -q --config "$work/tiny/config.json" --json
cmp -s "$work/size.json" "$work/out" || check "the same plan" 0 false
check "a size and a config" 2 "$nibble" plan --synthetic tiny --config "$work/tiny/config.json"
says err "give one of -m MODEL, --synthetic SIZE and --config FILE"
check "for a GPU, which need not be there" 0 "$nibble" plan -q --synthetic 4b --device cuda
says out "context and libraries, as on an H200"
says out "on the GPU"
says out "on the host"
check "as JSON" 0 "$nibble" plan -q --synthetic 4b --device cuda:3 --json
cat >"$work/parts.py" <<'PY'
import json
import sys

p = json.load(open(sys.argv[1], encoding="ascii"))
parts = ("masters", "moments", "gradients", "weights", "activations", "scratch", "tables",
         "rounding", "context")
assert p["device"] == "cuda" and p["compute_dtype"] == "bf16", p
assert p["total"] == sum(p[k] for k in parts) and min(p[k] for k in parts) > 0, p
assert p["host"] > 0, p
PY
cp "$work/out" "$work/gpu.json"
check "its parts add up" 0 python3 -B "$work/parts.py" "$work/gpu.json"
check "no such device" 2 "$nibble" plan --synthetic tiny --device tpu
check "a config that is none" 1 "$nibble" plan --config "$0"
says err "reading"
lines err 1
check "what train refuses" 1 "$nibble" plan --synthetic tiny --fused-step --grad-accum 4
check "too large" 1 "$nibble" plan --synthetic 8b --seq-len 1048576 --batch-size 1048576
says err "is over 16777216 tokens"
check "more than there is" 1 "$nibble" train -q --synthetic 8b --steps 1 --batch-size 4096
says err "lists settings that fit"
check "not a number" 2 "$nibble" plan --synthetic tiny --fit much
check "taken by train" 0 "$nibble" train --synthetic tiny --steps 1 --seq-len 32 --fit 0.05
says err "nibble: --fit 0.05 takes"
says err "--recompute none --optimizer-state-mode f32 --master-dtype f32 --batch-size 4"
check "but for what is given" 0 "$nibble" train --synthetic tiny --steps 1 --seq-len 32 --fit 0.05 \
    --optimizer-state-mode bf16 --batch-size 2 --fused-step
says err "--optimizer-state-mode bf16 --master-dtype f32 --batch-size 2 --grad-accum 1 --fused-step"
check "by whoami, too" 1 "$nibble" whoami -m "$work/tiny" -o "$work/who" --name Ada --fit 0.001
says err "nothing fits 0.001 GiB; the smallest takes"
check "and by bench train" 0 "$nibble" bench train --synthetic tiny --steps 1 --seq-len 32 --fit 0.05
says err "nibble: --fit 0.05 takes"
check "nothing fits train" 1 "$nibble" train --synthetic tiny --steps 1 --fit 0.001
says err "nothing fits 0.001 GiB; the smallest takes"
lines err 1
finish
