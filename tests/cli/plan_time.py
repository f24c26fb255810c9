"""plan_time.py - how long a run takes, as 'nibble plan' estimates it. usage: plan_time.py NIBBLE WORK"""
import json
import sys

import training as t

nibble, work = sys.argv[1:]
slow = t.sanitized(nibble)
MODEL = work + "/model"
SIZES = ["--seq-len", 64, "--batch-size", 4]


def plan(*args, **options):
    """The plan as JSON."""
    return json.loads(t.run(nibble, "plan", "--json", *args, **options)[0])


def check(estimate, steps, tokens):
    """The numbers of an estimate go together."""
    assert set(estimate) == {"device", "steps", "seconds", "step_seconds", "tokens_per_s"}, estimate
    assert estimate["steps"] == steps and estimate["device"] == "cpu", (estimate, steps)
    assert abs(estimate["seconds"] / (steps * estimate["step_seconds"]) - 1) < 1e-9, estimate
    assert abs(estimate["tokens_per_s"] * estimate["step_seconds"] / tokens - 1) < 1e-9, estimate


def lengths():
    """By steps, by epochs, by whichever is less, or not at all."""
    check(plan("-m", MODEL, "--steps", 100, *SIZES)["estimate"], 100, 256)
    check(plan("-m", MODEL, "--steps", 9, *SIZES, "--grad-accum", 3)["estimate"], 9, 768)
    epochs = ["-m", MODEL, "-d", work + "/c.jsonl", "--epochs", 7, *SIZES]
    said = t.run(nibble, "train", *epochs)[1]
    steps = int(said.split("step 1/")[1].split()[0])
    check(plan(*epochs)["estimate"], steps, 256)
    check(plan(*epochs, "--steps", 3)["estimate"], 3, 256)
    check(plan("-m", MODEL, "--steps", 5, "--epochs", 3, *SIZES)["estimate"], 5, 256)
    check(plan("--synthetic", "tiny", "--steps", 5, "--epochs", 3, *SIZES)["estimate"], 5, 256)
    for more in ([], ["--epochs", 3], ["--steps", 5, "--device", "cuda"]):
        if "cuda" not in more or t.run(nibble, "doctor", "--json")[0].count('"gpus": []'):
            assert plan("-m", MODEL, *SIZES, *more)["estimate"] is None, more
    assert "estimated" not in t.run(nibble, "plan", "-m", MODEL, *SIZES)[0]
    shown = t.run(nibble, "plan", "-m", MODEL, "--steps", 100, *SIZES)[0].splitlines()[-1]
    assert shown.startswith("estimated time on cpu: ") and "for 100 steps of " in shown, shown
    said = t.run(nibble, "plan", "-m", MODEL, "-d", work + "/none.tsv", "--epochs", 1, *SIZES,
                 code=1)[1]
    assert "none.tsv" in said.splitlines()[-1], said


def settings():
    """With whatever settings a run may have."""
    kinds = (["--fused-step"], ["--recompute", "block"], ["--precision", "f32"],
             ["--train-last-layers", 1], ["--kl-base", 1, "-d", work + "/c.jsonl"],
             ["--fused-step", "--head-slices"], ["--optimizer-state-mode", "nvfp4"],
             ["--loss", "scalar"], ["--compute-dtype", "bf16", "--grad-dtype", "bf16"],
             ["--schedule", "constant"], ["--checkpoint-dir", work + "/nowhere"])
    for more in kinds[::4] if slow else kinds:
        check(plan("-m", MODEL, "--steps", 5, *SIZES, *more)["estimate"], 5, 256)


def near():
    """Within a factor of three of what a run takes, of a model that is measured as it is and of one
    of which a layer is; the best of a few, since the machine may be busy."""
    if slow:
        return print("the speed of a sanitizer is no model's")
    t.make_model(nibble, work + "/large", hidden_size=512, intermediate_size=1536,
                 num_hidden_layers=18)
    for model, sizes in ((MODEL, SIZES), (work + "/large", ["--seq-len", 128, "--batch-size", 8])):
        factors = []
        for _ in range(4):
            args = ["-m", model, *sizes, "--steps", 3]
            log = work + "/run.jsonl"
            t.run(nibble, "train", "-q", *args, "-d", work + "/a.txt", "--log", log)
            with open(log, encoding="ascii") as f:
                lines = [json.loads(line) for line in f]
            is_ = max(x["tokens_per_s"] for x in lines)
            factors.append(plan(*args)["estimate"]["tokens_per_s"] / is_)
            if 1 / 3 < factors[-1] < 3:
                break
        print(f"{model[-5:]}: estimated to be {factors[-1]:.2f} times as fast as it is")
        assert 1 / 3 < factors[-1] < 3, factors


t.make_model(nibble, MODEL)
t.make_data(work)
lengths()
settings()
near()
