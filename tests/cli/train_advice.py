"""train_advice.py - runs that cannot teach much are warned of, the warm-up that is chosen for a run,
and checkpoints by time.

usage: train_advice.py NIBBLE WORK PART
"""
import os
import subprocess
import sys
import time

import training as t

nibble, work, part = sys.argv[1:4]

LOSS = "the loss has not moved: "


def put_pairs(count):
    """Short conversations."""
    path = f"{work}/{count}.tsv"
    with open(path, "w", encoding="ascii") as f:
        f.writelines(f"the cat {i}\tsees the dog {i}\n" for i in range(count))
    return path


def run(data, *more):
    """A run's warnings, and the rates (floats, hence rounded) and losses of its log."""
    log = work + "/run.jsonl"
    said = t.run(nibble, "train", "-m", work + "/model", "-d", data, "--seq-len", 64, "--log", log,
                 "--threads", 1, *more)[1]
    warnings = [x.split("warning: ")[1] for x in said.splitlines() if "warning: " in x]
    lines = [x for x in t.log(log) if "loss" in x]
    return warnings, [round(float(x["lr"]), 8) for x in lines], [float(x["loss"]) for x in lines]


def few():
    """An epoch of a few steps: what is said, and when nothing is."""
    sixty, two = put_pairs(60), put_pairs(2)
    warnings, rates, _ = run(two, "--epochs", 2, "--lr", "1e-2")
    assert rates == [1e-2, 1e-3], rates  # no warm-up
    assert len(warnings) == 1 and warnings[0].startswith(
        "an epoch is 1 step (2 samples), and the run has 2: "), warnings
    for word in ("--batch-size", "--epochs", "--lr"):
        assert word in warnings[0], warnings
    lengths = {}
    for rows in (6, 10, 12, 15, 20, 30):
        size = ["--lr", "1e-2", "--batch-size", rows]
        warnings, rates, _ = run(sixty, "--epochs", 1, *size)
        epoch = lengths[rows] = len(rates)
        said = f"an epoch is {epoch} steps (60 samples), and the run has "
        assert any(x.startswith(f"{said}{epoch}: ") for x in warnings) == (epoch <= 5), warnings
        warnings = run(sixty, "--steps", 9, *size)[0]  # as many, if they are not counted in epochs
        assert any(x.startswith(said + "9: ") for x in warnings) == (epoch <= 5), warnings
    assert min(lengths.values()) < 5 < max(lengths.values()), lengths
    warnings = run(sixty, "--epochs", 1, "--lr", "1e-2", "--batch-size", 6, "--grad-accum", 3)[0]
    assert any(x.startswith(f"an epoch is {-(-lengths[6] // 3)} steps") for x in warnings), warnings
    assert not run(two, "--lr", "1e-2", "--steps", 100)[0]  # many, though each epoch has one
    said = t.run(nibble, "train", "-q", "-m", work + "/model", "-d", two, "--steps", 2,
                 "--seq-len", 64)[1]
    assert not said, said


def warmup():
    """The warm-up follows from the steps; a given one is obeyed, and warned of if it is long."""
    data = put_pairs(40)
    lr = ["--lr", "1e-2", "--batch-size", 1]
    for steps, length in ((19, 0), (40, 2), (100, 5)):
        warnings, rates, _ = run(data, "--steps", steps, *lr)
        assert not warnings and len(rates) == steps, (warnings, len(rates))
        assert rates[:length] == [1e-2 * (i + 1) / length for i in range(length)], rates
        assert rates[length] == 1e-2 > rates[length + 1], rates
    assert run(data, "--steps", 40, *lr, "--warmup", "auto")[1][:2] == [5e-3, 1e-2]
    assert set(run(data, "--steps", 40, *lr, "--schedule", "constant")[1]) == {1e-2}
    assert run(data, "--steps", 40, *lr, "--warmup", 0)[1][0] == 1e-2
    warnings, rates, _ = run(data, "--steps", 6, *lr, "--warmup", 3)
    assert rates[0] == 0.00333333 and not warnings, (rates, warnings)
    warnings, rates, _ = run(data, "--steps", 5, *lr, "--warmup", 3)
    assert len(warnings) == 1 and "3 of the run's 5 steps are warm-up, " in warnings[0], warnings
    assert " reaches 100 % of --lr;" in warnings[0] and "--warmup" in warnings[0], warnings
    warnings, rates, _ = run(data, "--steps", 2, *lr, "--warmup", 20)
    assert any("2 of the run's 2 steps are warm-up, and the learning rate reaches 10 %" in x for x in warnings), warnings
    assert rates[1] == 1e-3, rates


def warmup_resumed():
    """A resumed run keeps the warm-up that it began with, though it has more steps now."""
    data = put_pairs(40)
    ck = ["--lr", "1e-2", "--batch-size", 1, "--checkpoint-dir", work + "/ck"]
    run(data, "--steps", 40, *ck, "--save-every", 1, "--keep", 99)
    for step in range(2, 41):  # as if it had ended after the first
        os.remove(f"{work}/ck/step-{step:08d}.ckpt")
    rates = run(data, "--steps", 100, *ck, "--resume")[1]
    assert rates[:2] == [5e-3, 1e-2], rates[:3]
    assert t.checkpoint(work + "/ck/step-00000100.ckpt")["settings"]["warmup"] == 2
    said = t.run(nibble, "train", "-q", "-m", work + "/model", "-d", data, "--seq-len", 64,
                 "--steps", 200, *ck, "--warmup", 5, "--resume", code=1)[1]
    assert "warmup 2, not 5" in said, said


def loss():
    """A loss that stays where it was is warned of; one that falls is not."""
    sixty, two = put_pairs(60), put_pairs(2)
    slow, fast = ["--lr", "1e-9"], ["--lr", "1e-2"]
    for data, more in ((two, ["--epochs", 2]), (two, ["--steps", 120]), (sixty, ["--epochs", 3]),
                       (sixty, ["--steps", 50, "--batch-size", 2])):
        warnings = [x for x in run(data, *slow, *more)[0] if x.startswith(LOSS)]
        assert len(warnings) == 1, (data, more, warnings)
        for word in ("--epochs", "--batch-size", "--lr"):
            assert word in warnings[0], warnings
        warnings, _, losses = run(data, *fast, *more)
        assert not any(x.startswith(LOSS) for x in warnings), (warnings, losses)
    warnings, _, losses = run(two, *slow, "--epochs", 2)
    numbers = [float(x) for x in warnings[1].replace(",", " ").split() if x[:2].isdigit() or "." in x]
    assert abs(numbers[0] - losses[0]) < 1e-4 and abs(numbers[1] - losses[1]) < 1e-4, warnings
    # What is known of a resumed run is its end, whose loss need not fall any more.
    ck = [*slow, "--batch-size", 2, "--schedule", "constant", "--checkpoint-dir", work + "/lck"]
    assert run(sixty, *ck, "--steps", 30)[0]
    assert not run(sixty, *ck, "--steps", 60, "--resume")[0]
    assert not t.run(nibble, "train", "--synthetic", "tiny", "--seq-len", 16, "--steps", 3, *slow,
                     )[1].count("warning")


OFTEN = ["--save-minutes", "0.0001"]


def by_time():
    """Checkpoints by time: a run that is killed goes on from one, and ends with the same bytes."""
    data, ck = put_pairs(40), work + "/tck"
    args = ["-m", work + "/model", "-d", data, "--seq-len", 64, "--batch-size", 2, "--lr", "1e-2",
            "--steps", 400]
    t.run(nibble, "train", "-q", *args, "-o", work + "/straight.dat")
    with subprocess.Popen([nibble, "train", "-q", *map(str, args), "--checkpoint-dir", ck,
                           "--save-every", "100000", *OFTEN], stdin=subprocess.DEVNULL) as p:
        while not t.steps(ck):
            assert p.poll() is None, "it has ended without a checkpoint"
            time.sleep(0.002)
        p.kill()
    step = t.steps(ck)[-1]
    assert step < 400, step
    said = t.run(nibble, "train", *args, "--checkpoint-dir", ck, *OFTEN, "--resume", "-o",
                 work + "/resumed.dat")[1]
    assert "resumed from step" in said, said
    assert t.read(work + "/straight.dat") == t.read(work + "/resumed.dat")


def by_time_options():
    """Never, by default not in a short run, and not without a directory."""
    data = put_pairs(40)
    args = ["-m", work + "/model", "-d", data, "--seq-len", 64, "--steps", 30, "--lr", "1e-2",
            "--keep", 99]
    for name, more in (("never", ["--save-minutes", 0]), ("default", [])):
        t.run(nibble, "train", "-q", *args, "--checkpoint-dir", f"{work}/{name}", *more)
        assert t.steps(f"{work}/{name}") == [30], t.steps(f"{work}/{name}")
    t.run(nibble, "train", "-q", *args, "--checkpoint-dir", work + "/often", "--save-every", 7, *OFTEN)
    steps = t.steps(work + "/often")
    assert set(range(7, 30, 7)) < set(steps) and len(steps) > 5, steps
    said = t.run(nibble, "train", *args, *OFTEN, code=2)[1]
    assert said == "nibble: --save-minutes needs --checkpoint-dir\n", said
    said = t.run(nibble, "train", *args, "--save-minutes", -1, code=2)[1]
    assert "--save-minutes" in said, said


t.make_model(nibble, work + "/model")
{f.__name__: f for f in (few, warmup, warmup_resumed, loss, by_time, by_time_options)}[part]()
