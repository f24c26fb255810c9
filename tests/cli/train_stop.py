"""train_stop.py - --stop-if-ppl-rises: when a run ends, and which model is written.

usage: train_stop.py NIBBLE WORK PART
"""
import json
import math
import os
import shutil
import sys

import training as t

nibble, work, part = sys.argv[1:4]


def options(name, *more):
    """Options of a run that overfits: it repeats four examples."""
    return ["-m", work + "/model", "-d", work + "/few.txt", "--seq-len", 48, "--batch-size", 2,
            "--lr", "2e-2", "--schedule", "constant", "--precision", "nvfp4", "--steps", 60,
            "--eval-data", work + "/held.txt", "--eval-every", 2, "--stop-if-ppl-rises", 2,
            "--threads", 1, "-o", f"{work}/{name}.dat", "--log", f"{work}/{name}.jsonl", *more]


def evals(name):
    """Step and loss of each evaluation in a log."""
    return [(x["step"], float(x["eval"]["loss"])) for x in t.log(f"{work}/{name}.jsonl")
            if "eval" in x]


def loss_of(name):
    """The loss of the model that was written."""
    r = json.loads(t.run(nibble, "eval", "ppl", "-q", "--json", "-m", f"{work}/{name}.dat",
                         "--model-dir", work + "/model", "--text", work + "/held.txt", "--ctx", 48)
                   [0])
    return r["nll"]


def within(losses):
    """Whether the last loss is within two per cent of the best perplexity."""
    return math.exp(losses[-1] - min(losses)) <= 1.02


def rises():
    """The run ends with the first evaluation above the limit. With a checkpoint directory, the
    model of the evaluation before it is written."""
    ck = ["--checkpoint-dir", work + "/ck"]
    r = t.train(nibble, *options("kept", *ck))
    e = evals("kept")
    assert r["stopped"] and 4 <= r["steps"] < 60 and r["steps"] == e[-1][0], (r, e)
    assert [s for s, _ in e] == list(range(0, r["steps"] + 1, 2)), e
    losses = [x for _, x in e]
    assert all(within(losses[:i]) for i in range(1, len(losses))) and not within(losses), losses
    assert r["result_step"] == e[-2][0] and r["eval"]["step"] == r["steps"], r
    assert abs(loss_of("kept") / losses[-2] - 1) < 1e-6, (loss_of("kept"), losses)
    r = t.train(nibble, *options("plain"))
    assert evals("plain") == e and r["result_step"] == r["steps"], r
    assert abs(loss_of("plain") / losses[-1] - 1) < 1e-6, (loss_of("plain"), losses)
    shutil.rmtree(work + "/ck")
    out, _ = t.run(nibble, "train", "-q", *options("kept", *ck))
    assert out.startswith(f"stopped: perplexity has risen; '{work}/kept.dat' is the model of step "
                          f"{e[-2][0]}, the last before that\n"), out
    out, _ = t.run(nibble, "train", "-q", *options("plain"))
    assert out.startswith(f"stopped: perplexity has risen; '{work}/plain.dat' is the model of step "
                          f"{e[-1][0]}, in which it has (with --checkpoint-dir "), out
    # Options without which it cannot work are required.
    for gone in ("--eval-every", "--eval-data"):
        args = options("none")
        at = args.index(gone)
        _, said = t.run(nibble, "train", "-q", *args[:at], *args[at + 2:], code=2)
        assert said.count("\n") == 1 and gone in said, said


def same(name):
    """Compares model and log with those of the uninterrupted run."""
    assert t.read(f"{work}/{name}.dat") == t.read(work + "/straight.dat"), f"{name}: weights differ"
    assert t.log(f"{work}/{name}.jsonl") == t.log(work + "/straight.jsonl"), name


def resumed():
    """A stopped run stays stopped; one that was killed earlier stops at the same step."""
    often = ["--save-every", 1, "--keep", 2]
    r = t.train(nibble, *options("straight", "--checkpoint-dir", work + "/s.ck", *often))
    assert r["stopped"], r
    end = r["steps"]
    os.rename(work + "/straight.dat", work + "/first.dat")
    again = t.train(nibble, *options("straight", "--checkpoint-dir", work + "/s.ck", "--resume"))
    assert again["steps"] == end and again["stopped"], again
    assert again["result_step"] == r["result_step"] and again["eval"] == r["eval"], (again, r)
    assert t.read(work + "/straight.dat") == t.read(work + "/first.dat")
    assert t.steps(work + "/s.ck")[-1] == end
    for step in (1, 3, end - 1):
        shutil.rmtree(work + "/k.ck", ignore_errors=True)
        files = ["--checkpoint-dir", work + "/k.ck"]
        t.run(nibble, "train", "-q", *options("killed", *files, *often, "--steps", step))
        r = t.train(nibble, *options("killed", *files, "--resume"))
        assert r["stopped"] and r["steps"] == end, (step, r)
        assert t.read(work + "/killed.dat") == t.read(work + "/straight.dat"), step
    for step in (2, end - 2):
        shutil.rmtree(work + "/k.ck", ignore_errors=True)
        os.remove(work + "/killed.jsonl")
        files = ["--checkpoint-dir", work + "/k.ck", *often]
        t.kill_at(nibble, options("killed", *files), f"{work}/k.ck/step-{step:08}.ckpt")
        t.train(nibble, *options("killed", *files, "--resume"))
        same("killed")
    # Another limit is refused, and without good.ckpt there is no result.
    _, said = t.run(nibble, "train", "-q", *options("killed", *files, "--resume",
                                                    "--stop-if-ppl-rises", 5), code=1)
    assert "the run was begun with stop_if_ppl_rises 2" in said, said
    os.remove(work + "/killed.dat")
    os.remove(work + "/k.ck/good.ckpt")
    _, said = t.run(nibble, "train", "-q", *options("killed", *files, "--resume"), code=1)
    assert "good.ckpt" in said and not os.path.exists(work + "/killed.dat"), said


def last():
    """The evaluation at the end may stop the run even if it was not due, but a longer run that
    resumes does not remember it."""
    straight = ["--checkpoint-dir", work + "/s.ck"]
    end = t.train(nibble, *options("straight", *straight))["steps"]
    for steps in (end, end - 1):
        shutil.rmtree(work + "/ck", ignore_errors=True)
        files = ["--checkpoint-dir", work + "/ck"]
        r = t.train(nibble, *options("short", *files, "--steps", steps))
        losses = [x for _, x in evals("short")]
        assert r["steps"] == steps and r["stopped"] == (not within(losses)), (r, losses)
        assert r["result_step"] == (evals("short")[-2][0] if r["stopped"] else steps), r
        assert abs(loss_of("short") / losses[-2 if r["stopped"] else -1] - 1) < 1e-6, losses
        again = t.train(nibble, *options("short", *files, "--steps", steps, "--resume"))
        assert again["stopped"] == r["stopped"] and again["result_step"] == r["result_step"], again
        longer = t.train(nibble, *options("longer", *files, "--resume"))
        assert longer["steps"] == end and longer["stopped"], longer
        assert t.read(work + "/longer.dat") == t.read(work + "/straight.dat"), steps
    # After the first evaluation, there is only the one at the end.
    r = t.train(nibble, *options("once", "--eval-every", 1000, "--steps", end + 3,
                                 "--checkpoint-dir", work + "/o.ck"))
    assert [s for s, _ in evals("once")] == [0, end + 3], evals("once")
    assert r["stopped"] == (not within([x for _, x in evals("once")])), r


def nonsense():
    """A perplexity that is not a number stops the run. Weight decay is set so that weights
    double each step, and an embedding that only held-out text uses overflows."""
    path = t.make_model(nibble, work + "/huge", tie_word_embeddings=False) + "/model.safetensors"
    token = int(t.run(nibble, "tokenize", "-m", work + "/huge", "--no-special", "--text", "@")[0])

    def put(bits):
        data = bytearray(t.read(path))
        size = int.from_bytes(data[:8], "little")
        at = 8 + size + json.loads(data[8:8 + size])["model.embed_tokens.weight"]["data_offsets"][0]
        data[at + token * 128:at + token * 128 + 128] = bits * 64 # in bf16
        with open(path, "wb") as f:
            f.write(data)

    with open(work + "/held.txt", "a", encoding="ascii") as f:
        f.write("the cat sees @\n")
    wild = ["-m", work + "/huge", "--lr", "0.03", "--weight-decay", 100, "--precision", "f32",
            "--master-dtype", "f32", "--optimizer-state-mode", "f32", "--stop-if-ppl-rises", 1e6]
    put(b"\x00\x7f") # 2^127
    r = t.train(nibble, *options("wild", *wild, "--checkpoint-dir", work + "/ck"))
    e = [(x["step"], x["eval"]["loss"]) for x in t.log(work + "/wild.jsonl") if "eval" in x]
    assert r["stopped"] and r["steps"] < 60 and e[-1][1] is None, (r, e)
    assert all(x is not None for _, x in e[:-1]) and r["result_step"] == e[-2][0], (r, e)
    put(b"\x80\x7f") # infinite from the start: there is no perplexity to compare with
    _, said = t.run(nibble, "train", "-q", *options("wild", *wild), code=1)
    assert "the model as it is read is not finite" in said, said


def main():
    """Runs one part of the tests."""
    t.make_model(nibble, work + "/model")
    t.make_data(work)
    with open(work + "/few.txt", "w", encoding="ascii") as f:
        f.write("<|endoftext|>".join(t.read(work + "/a.txt").decode().split("\n")[:4]))
    {"rises": rises, "resumed": resumed, "last": last, "nonsense": nonsense}[part]()


main()
