"""Runs parts of what a GPU has to show, one after the other.

usage: run.py test|bench BUILD [list | PART...]

A part takes at most 8 minutes, and can be run alone. All tests together run six at a time, but for
those that measure time; measurements run one after the other. Each line begins with the commit of
the build and the date. A part that fails says FAIL, and the next one runs. Environment:
NB_GPU_SMALL=1 tries the parts with small sizes, on NB_GPU_DEVICE (default cuda); OUT is a folder for
logs and curves; BASELINE is an older nibble to compare speed with.
"""
import concurrent.futures
import os
import shutil
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import card as cards  # noqa: E402
import correctness  # noqa: E402
import figures  # noqa: E402
import learning  # noqa: E402
import training_runs  # noqa: E402

# group, name, function, minutes that it takes, what it decides
PARTS = [
    ("test", "kernels", correctness.kernels, 1, "each operation against the scalar reference"),
    ("test", "hf", correctness.hf, 1, "debug hf in f32: goldens of Hugging Face"),
    ("test", "bits", correctness.bits, 3, "the optimizer's bits on a million elements"),
    ("test", "gradients", correctness.gradients, 1, "gradients in bf16 against those of the CPU"),
    ("test", "resume", training_runs.resume, 4, "killed and resumed runs, byte for byte"),
    ("test", "overfit", training_runs.overfit, 2, "one batch learnt by heart, each state"),
    ("test", "learn", training_runs.learn, 3, "300 steps on CPU and GPU"),
    ("test", "whoami", training_runs.whoami, 2, "nib through all gates in 60 s"),
    ("test", "ops", correctness.ops, 4, "the unit tests that need a GPU"),
    ("test", "checks", correctness.checks, 3, "the command line, parity, stress"),
    ("test", "hf-shapes", correctness.hf_shapes, 2, "debug hf against transformers, other shapes"),
    ("test", "kills", training_runs.kills, 6, "100 random kill -9"),
    ("test", "whoami-4b", training_runs.whoami_4b, 5, "the whole way with random 4B shapes"),
    ("test", "long", correctness.long_row, 6, "gradients of a row of 32,768 tokens"),
    ("test", "sanitize", correctness.sanitize, 7, "compute-sanitizer on inference"),
    ("test", "sanitize-train", correctness.sanitize_train, 4, "memcheck and initcheck on a step"),
    ("test", "racecheck", correctness.racecheck, 7, "racecheck on each training kernel"),
    ("bench", "train", figures.train, 2, "tokens per second of 4B, beside the ceilings"),
    ("bench", "fit16", figures.fit16, 5, "4B in 15.5 GiB, 500 steps under guard"),
    ("bench", "inference", figures.inference, 2, "as fast as before, within 2 %"),
    ("bench", "plan", figures.plan, 5, "the plan of ten settings against nvidia-smi"),
    ("bench", "large", figures.large, 6, "8B in 31 GiB, 32B, a row of 32,768 tokens"),
    ("bench", "limits", figures.limits, 4, "first token, memory of long contexts"),
]
for setting in learning.SETTINGS:
    for seed in learning.SEEDS:
        PARTS.append(("scale", f"scale-{setting}-{seed}",
                      lambda card, s=setting, n=seed: learning.scale(card, s, n), 6,
                      f"a model of 125 M parameters learns, {setting}, seed {seed}"))

# Parts that measure time: no other runs meanwhile.
TIMED = {"kernels", "whoami", "whoami-4b"}
AT_ONCE = 6


def list_parts(group):
    """Prints them."""
    for g, name, _, minutes, what in PARTS:
        if g == group or (group == "bench" and g == "scale"):
            print(f"{name:18} {minutes:2} min  {what}")


def run_part(card, name, function):
    """One part, from whose failures the others do not suffer."""
    card.part, before = name, card.failures
    begin, all_parts = time.monotonic(), card.work
    card.work = os.path.join(all_parts, name)
    os.makedirs(card.work, exist_ok=True)
    card.deadline = begin + cards.PART_SECONDS
    try:
        function(card)
    except (cards.Failure, AssertionError, OSError, KeyError, ValueError, IndexError) as e:
        card.judge(False, f"{type(e).__name__}: {e}")
    finally:
        shutil.rmtree(card.work, ignore_errors=True)
        card.work = all_parts
    failed = card.failures - before
    card.info(f"{'FAILED, ' + str(failed) + ' of its lines' if failed else 'passed'}, "
              f"{time.monotonic() - begin:.0f} s")


def run_all(build):
    """All tests: those that measure time alone, then the others, each as a process of its own."""
    def one(name):
        return subprocess.run([sys.executable, "-B", __file__, "test", build, name],
                              check=False).returncode

    names = [p[1] for p in PARTS if p[0] == "test"]
    codes = [one(name) for name in names if name in TIMED]
    if 77 in codes:
        return 77
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        codes += pool.map(one, [name for name in names if name not in TIMED])
    return 1 if any(codes) else 0


def main():
    """Runs what is named."""
    if len(sys.argv) < 3 or sys.argv[1] not in ("test", "bench"):
        sys.exit(__doc__)
    group, wanted = sys.argv[1], sys.argv[3:]
    if wanted in (["list"], ["--dry-run"]):
        list_parts(group)
        return 0
    table = {p[1]: p[2] for p in PARTS if p[0] == group or (group == "bench" and p[0] == "scale")}
    unknown = [name for name in wanted if name not in table]
    if unknown:
        sys.exit(f"run.py: there is no part '{unknown[0]}'; 'list' names them")
    if group == "test" and not wanted:
        return run_all(sys.argv[2])
    card = cards.Card(sys.argv[2])
    try:
        card.part, card.deadline = "card", time.monotonic() + 60
        try:
            card.do("doctor")
        except cards.Failure as e:
            card.say("SKIP", f"no usable GPU: {e}")
            return 77
        for name in wanted or [p[1] for p in PARTS if p[0] == group]:
            run_part(card, name, table[name])
    finally:
        shutil.rmtree(card.work, ignore_errors=True)
    return 1 if card.failures else 0


if __name__ == "__main__":
    sys.exit(main())
