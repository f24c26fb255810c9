"""training_runs.py - parts of run.py: whole training runs, killed ones, and identities."""
import itertools
import json
import os
import random
import sys
import time

from card import ROOT, Failure, losses, tail

sys.path.insert(0, os.path.join(ROOT, "tests", "cli"))
import training as t  # noqa: E402

NIB = os.path.join(ROOT, "models", "nib")
NIB_MODEL = ("-m", f"{NIB}/model.dat", "--model-dir", NIB)


def mean(values):
    """The mean."""
    return sum(values) / len(values)


# ---- learning ----

def texts(card):
    """A few hundred documents of a sentence."""
    rng = random.Random(3)
    path = card.path("texts.txt")
    with open(path, "w", encoding="ascii") as f:
        f.write("\n<|endoftext|>\n".join(t.sentence(rng, rng.randint(6, 40)) + "."
                                         for _ in range(800)))
    return path


def learn(card):
    """300 steps of nib in f32: step by step on the device as on the CPU, then within what seeds do.
    """
    steps, data = card.pick(300, 3), texts(card)
    sizes = ("--steps", steps, "--seq-len", card.pick(128, 16), "--batch-size", card.pick(8, 2),
             "--lr", "3e-4", "--warmup", 10, "--precision", "f32", "--optimizer-state-mode", "f32")
    runs = {}
    for name, device, seed in (("cpu", "cpu", 1), ("cuda", card.device, 1),
                               ("cuda-2", card.device, 2), ("cuda-3", card.device, 3)):
        log = card.path(name + ".jsonl")
        card.do("train", "-q", *NIB_MODEL, "-d", data, *sizes, "--seed", seed, "--log", log,
                device=device)
        runs[name] = losses(log)
    first = min(50, steps)
    off = max(abs(a - b) for a, b in zip(runs["cpu"][:first], runs["cuda"][:first]))
    card.judge(off <= 1e-3, f"losses of the first {first} steps differ by up to {off:.2g} of "
                            f"{runs['cpu'][0]:.3f} to {runs['cpu'][first - 1]:.3f}; 1e-3 allowed")
    last = max(1, steps // 15)
    ends = {name: mean(x[-last:]) for name, x in runs.items()}
    seeds = [ends["cuda"], ends["cuda-2"], ends["cuda-3"]]
    spread = max(seeds) - min(seeds)
    card.judge(abs(ends["cpu"] - ends["cuda"]) <= spread,
               f"end losses: CPU {ends['cpu']:.4f}, device {ends['cuda']:.4f}; of three seeds "
               f"{', '.join(f'{x:.4f}' for x in seeds)}")


def overfit(card):
    """One batch to a loss below 0.01, in nvfp4 with each kind of state."""
    rng, steps = random.Random(7), card.pick(400, 3)
    data = card.path("batch.txt")
    with open(data, "w", encoding="ascii") as f:
        f.write("\n<|endoftext|>\n".join(t.sentence(rng, 40) for _ in range(4)))
    for state in t.STATES:
        log = card.path(f"overfit-{state}.jsonl")
        card.do("train", "-q", *NIB_MODEL, "-d", data, "--steps", steps, "--seq-len",
                card.pick(128, 16), "--batch-size", 4, "--lr", "1e-3", "--warmup", 20,
                "--precision", "nvfp4", "--optimizer-state-mode", state, "--log", log)
        x = losses(log)
        best = next((i + 1 for i, loss in enumerate(x) if loss < 0.01), None)
        card.judge(best is not None or card.small,
                   f"{state} states: {x[0]:.3f} to {x[-1]:.4f} in {steps} steps, below 0.01 "
                   + (f"from step {best}" if best else "never"))


# ---- resuming ----

def combinations(card):
    """3 precisions, 4 states, 2 masters."""
    everything = list(itertools.product(t.PRECISIONS, t.STATES, ("f32", "bf16")))
    return card.pick(everything, [("nvfp4", "int8", "bf16")])


def one_resume(card, precision, state, master):
    """20 steps straight, and 7, kill -9 and 13: the same bytes of weights, states and log."""
    name, steps, kill = f"{precision}-{state}-{master}", card.pick(20, 3), card.pick(7, 2)

    def options(which):
        at = card.path(f"{name}-{which}")
        return ["-q", "-m", card.path("model"), "-d", card.path("a.txt"), "--steps", steps,
                "--seq-len", 16, "--batch-size", 2, "--lr", "2e-3", "--precision", precision,
                "--optimizer-state-mode", state, "--master-dtype", master, "--save-every", 1,
                "--keep", 2, "--device", card.device, "-o", at + ".dat", "--checkpoint-dir",
                at + ".ck", "--log", at + ".jsonl"]

    t.run(card.nibble, "train", *options("straight"))
    t.kill_at(card.nibble, [a for a in options("killed") if a != "-q"],
              card.path(f"{name}-killed.ck", f"step-{kill:08}.ckpt"))
    t.run(card.nibble, "train", *options("killed"), "--resume")
    a, b = card.path(name + "-straight"), card.path(name + "-killed")
    last = f"step-{steps:08}.ckpt"
    t.same_checkpoint(f"{a}.ck/{last}", f"{b}.ck/{last}")
    assert t.read(a + ".dat") == t.read(b + ".dat"), "weights differ"
    assert t.log(a + ".jsonl") == t.log(b + ".jsonl"), "logs differ"
    card.left()
    return ""


def resume(card):
    """Every combination; two runs of one seed; a run that changes from CPU to device."""
    t.make_data(card.work)
    t.make_model(card.nibble, card.path("model"), head_dim=64, num_attention_heads=2,
                 num_key_value_heads=1)
    for combination in combinations(card):
        card.attempt(", ".join(combination) + " master", one_resume, card, *combination)

    def twice():
        for name in "ab":
            card.do("train", "-q", *NIB_MODEL, "-d", card.path("a.txt"), "--steps",
                    card.pick(20, 2), "--seq-len", card.pick(128, 16), "--batch-size", 4, "-o",
                    card.path(name + ".dat"), "--log", card.path(name + ".jsonl"))
        assert t.read(card.path("a.dat")) == t.read(card.path("b.dat")), "weights differ"
        assert t.log(card.path("a.jsonl")) == t.log(card.path("b.jsonl")), "logs differ"
        return ""

    card.attempt("two runs of one seed", twice)

    def other_device():
        options = ["-m", card.path("model"), "-d", card.path("a.txt"), "--seq-len", 16,
                   "--batch-size", 2, "--save-every", 1, "--compute-dtype", "f32",
                   "--checkpoint-dir", card.path("moved.ck")]
        t.run(card.nibble, "train", "-q", *options, "--steps", 2, "--device", "cpu")
        _, said = t.run(card.nibble, "train", *options, "--steps", 4, "--resume", "--device",
                        card.device)
        if "not bit for bit" not in said:
            raise Failure("it does not say 'not bit for bit': " + tail(said))
        return ""

    if card.device != "cpu":
        card.attempt("begun on the CPU, resumed on the device, and it says so", other_device)


def kills(card):
    """kill -9 at random moments."""
    out = card.run(sys.executable, "-B", os.path.join(ROOT, "tests", "system", "train_kill.py"),
                   card.nibble, card.work, card.pick(100, 2))
    card.judge("kills in" in out, tail(out, 1))


# ---- identities ----

def whoami(card):
    """A model that can talk learns who it is, and passes all gates."""
    begin = time.monotonic()
    out = card.path("ada.dat")
    small = card.pick((), ("--count", 100, "--samples", 4, "--max-tokens", 6, "--steps", 1,
                           "--questions", 1, "--seq-len", 32, "--batch-size", 2))
    card.do("whoami", "-q", *NIB_MODEL, "-o", out, "--name", "Ada", "--languages", "en", *small,
            codes=card.pick((0,), (0, 1)))
    seconds = time.monotonic() - begin
    card.judge(os.path.exists(out) and (seconds < 60 or card.small),
               f"nib passes all gates in {seconds:.1f} s; 60 allowed")


def whoami_4b(card):
    """Random 4B shapes the whole way: gates may fail, but the result is there and sound."""
    begin = time.monotonic()
    out, model = card.path("who.dat"), card.path("random")
    if card.small:
        t.make_model(card.nibble, model, head_dim=64, num_attention_heads=2, num_key_value_heads=1)
    else:
        card.run(card.nibble, "synth", "-q", "4b", model)
        with open(t.TOKENIZER, "rb") as f, open(model + "/tokenizer.json", "wb") as g:
            g.write(f.read())
    card.info(f"a random model on disk after {time.monotonic() - begin:.0f} s")
    report = card.do("whoami", "--json", "-m", model, "-o", out, "--name", "Ada", "--languages",
                     "en", "--count", 200, "--samples", card.pick(64, 2), "--max-tokens",
                     card.pick(64, 4), "--steps", card.pick(20, 1), "--questions",
                     card.pick(20, 1), "--seq-len", card.pick(256, 32), "--batch-size",
                     card.pick(8, 2), codes=(0, 1))
    seconds = time.monotonic() - begin
    card.judge(os.path.exists(out) and seconds < 300,
               f"data, training, export, reload and self-test in {seconds:.0f} s; 300 allowed")
    card.attempt("the result", lambda: card.run(card.nibble, "inspect", "-q", out, "--verify",
                                                "--model-dir", model) and "")
    card.info("report: " + json.dumps(json.loads(report))[:300])
