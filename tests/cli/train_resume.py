"""train_resume.py - a run that was killed and resumed equals an uninterrupted one, bit for bit.

usage: train_resume.py NIBBLE WORK [all]
"""
import os
import shutil
import sys

import training as t

nibble, work, full = sys.argv[1], sys.argv[2], sys.argv[3:] == ["all"]


def settings(precision, state, master, compute="f32"):
    """Options: several files, packed and shuffled, two passes per step, with evaluations."""
    data = [x for name in ("a.txt", "b.txt", "c.jsonl") for x in ("-d", f"{work}/{name}")]
    return ["-m", work + "/model", *data, "--steps", 20, "--seq-len", 24, "--batch-size", 2,
            "--grad-accum", 2, "--lr", "2e-3", "--warmup", 3, "--weight-decay", "0.1",
            "--precision", precision, "--optimizer-state-mode", state, "--master-dtype", master,
            "--compute-dtype", compute,
            "--eval-data", work + "/held.txt", "--eval-every", 6, "--save-every", 7, "--seed", 3]


def files(name):
    """The paths that a run writes."""
    return ["-o", f"{work}/{name}.dat", "--checkpoint-dir", f"{work}/{name}.ck",
            "--log", f"{work}/{name}.jsonl"]


def compare(name, other):
    """Compares weights, optimizer states and losses."""
    assert t.read(f"{work}/{name}.dat") == t.read(f"{work}/{other}.dat"), "weights differ"
    t.same_checkpoint(f"{work}/{name}.ck/step-00000020.ckpt",
                      f"{work}/{other}.ck/step-00000020.ckpt")
    a, b = t.log(f"{work}/{name}.jsonl"), t.log(f"{work}/{other}.jsonl")
    assert a == b, [(x, y) for x, y in zip(a, b) if x != y][:2]
    assert [x["step"] for x in a if "loss" in x] == list(range(1, 21)), "steps are missing"
    assert [x["step"] for x in a if "eval" in x] == [0, 6, 12, 18, 20], "evaluations are missing"


def clean(name):
    """Removes everything that a run wrote."""
    shutil.rmtree(f"{work}/{name}.ck", ignore_errors=True)
    for end in (".dat", ".jsonl"):
        if os.path.exists(f"{work}/{name}{end}"):
            os.remove(f"{work}/{name}{end}")


def one(kind, threads, again):
    """Compares an uninterrupted run with one that was killed and resumed, on these threads."""
    opts = settings(*kind)
    clean("killed")
    t.kill_at(nibble, [*opts, *files("killed"), "--threads", threads],
              work + "/killed.ck/step-00000007.ckpt")
    assert t.steps(work + "/killed.ck") == [7], t.steps(work + "/killed.ck")
    assert not os.path.exists(work + "/killed.dat")
    # What is kept of the weights is no setting of the computation.
    r = t.train(nibble, *opts, *files("killed"), "--threads", again, "--resume",
                "--weight-store", "scales")
    assert r["steps"] == 20 and r["eval"]["step"] == 20, r
    compare("straight", "killed")


def damaged():
    """If the newest checkpoint is truncated or has a flipped bit, the one before it is used."""
    opts = [*settings("nvfp4", "int8", "bf16"), "--save-every", 4, "--epochs", 3]
    clean("straight")
    t.train(nibble, *opts, *files("straight"))
    for change in (lambda data: data[:-1], lambda data: data[:9999] + bytes([data[9999] ^ 16]) +
                   data[10000:]):
        clean("killed")
        t.kill_at(nibble, [*opts, *files("killed")], work + "/killed.ck/step-00000008.ckpt")
        path = work + "/killed.ck/step-00000008.ckpt"
        data = change(t.read(path))
        with open(path, "wb") as f:
            f.write(data)
        _, said = t.run(nibble, "train", *opts, *files("killed"), "--resume")
        assert "step-00000008.ckpt" in said and "trying the one before it" in said, said
        assert "step 5/20" in said and "step 4/20" not in said, said
        compare("straight", "killed")


def kinds():
    """All precisions, moment types and master types, some of them with activations in bf16; with a
    sanitizer fewer."""
    for precision in t.PRECISIONS:
        for i, state in enumerate(t.STATES):
            for k, master in enumerate(("bf16", "f32")):
                if not t.sanitized(nibble) or full or (i + k) % 4 == 0:
                    bf16 = precision != "f32" and i % 2 == k
                    yield precision, state, master, "bf16" if bf16 else "f32"


def main():
    """The uninterrupted run has one thread, the killed one two, the resumed one three; with `all`,
    every combination."""
    t.make_model(nibble, work + "/model")
    t.make_data(work)
    count = 0
    for kind in kinds():
        try:
            clean("straight")
            t.train(nibble, *settings(*kind), *files("straight"), "--threads", 1)
            for threads, again in [(1, 1), (2, 2), (3, 3), (2, 1)] if full else [(2, 3)]:
                one(kind, threads, again)
                count += 1
        except AssertionError as e:
            raise AssertionError(f"{kind}: {e}") from e
    damaged()
    print(f"{count} killed and resumed runs")


main()
