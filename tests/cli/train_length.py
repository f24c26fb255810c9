"""train_length.py - how many steps a run has, and what it says about its data at the start.

usage: train_length.py NIBBLE WORK PART
"""
import json
import sys

import training as t

nibble, work, part = sys.argv[1:4]


def put_pairs(name, count):
    """Questions and answers of increasing length."""
    with open(f"{work}/{name}", "w", encoding="ascii") as f:
        f.writelines(f"the cat {i}\t{'dog ' * (2 * i)}{i}\n" for i in range(count))


def run(name, *more):
    """Trains on six short examples; returns the log and the result."""
    log = f"{work}/{name}.jsonl"
    r = t.train(nibble, "-m", work + "/model", "-d", work + "/six.tsv", "--lr", "1e-3",
                "--log", log, *more)
    return r, [x for x in t.log(log) if "loss" in x]


def epochs():
    """Each epoch starts a new batch, and each example is seen once per epoch."""
    put_pairs("six.tsv", 6)
    put_pairs("other.tsv", 9)
    shape = ["--seq-len", 128, "--batch-size", 4]
    _, lines = run("one", *shape, "--epochs", 1)
    assert len(lines) == 1, lines
    tokens = lines[0]["tokens"]
    r, lines = run("ten", *shape, "--epochs", 10)
    assert r["steps"] == 10 and [x["tokens"] for x in lines] == \
        [tokens * i for i in range(1, 11)], lines
    rates = [float(x["lr"]) for x in lines]
    assert rates[0] == max(rates) and abs(rates[-1] - 1e-4) < 1e-9, rates
    said = t.run(nibble, "train", "-m", work + "/model", "-d", work + "/six.tsv", *shape,
                 "--epochs", 10)[1]
    assert "step 1/10 " in said and "step 10/10 " in said, said
    # An update may span epochs; the last update may have fewer passes.
    r, lines = run("accumulated", *shape, "--epochs", 10, "--grad-accum", 4)
    assert [x["tokens"] for x in lines] == [4 * tokens, 8 * tokens, 10 * tokens], lines
    # Rows hold one or two examples: in any order, no step is empty and none is missing.
    for seed in range(6):
        for more in ([], ["--replay", work + "/other.tsv:0.4"]):
            tight = ["--seq-len", 72, "--batch-size", 1, "--epochs", 3, "--seed", seed, *more]
            said = t.run(nibble, "train", "-m", work + "/model", "-d", work + "/six.tsv", *tight,
                         "--log", work + "/tight.jsonl")[1]
            lines = [x for x in t.log(work + "/tight.jsonl") if "loss" in x]
            assert f"step {len(lines)}/{len(lines)} " in said, (seed, more, said)
            assert more or lines[-1]["tokens"] == 3 * tokens, (seed, lines[-1], tokens)
    # With a limit of steps, and resumed.
    assert run("seven", *shape, "--epochs", 10, "--steps", 7)[0]["steps"] == 7
    ck = [*shape, "--epochs", 10, "--checkpoint-dir", work + "/ck", "--save-every", 4]
    t.kill_at(nibble, ["-m", work + "/model", "-d", work + "/six.tsv", "--lr", "1e-3", *ck],
              work + "/ck/step-00000004.ckpt")
    run("ten", *shape, "--epochs", 10, "-o", work + "/straight.dat")
    r, _ = run("resumed", *ck, "--resume", "-o", work + "/resumed.dat")
    assert r["steps"] == 10 and t.read(work + "/straight.dat") == t.read(work + "/resumed.dat")


def rows():
    """Rows longer than the model's positions, and examples longer than a row."""
    put_pairs("six.tsv", 6)
    args = ["-m", work + "/model", "-d", work + "/six.tsv", "--steps", 1, "--batch-size", 1]
    for command in (["train", "-q"], ["plan"]):
        said = t.run(nibble, *command, *args, "--seq-len", 257, code=1)[1]
        assert said == ("nibble: --seq-len 257 is more than the 256 positions that the model has "
                        "(max_position_embeddings)\n"), said
    assert "are cut" not in t.run(nibble, "train", *args, "--seq-len", 256)[1]
    lengths = [len(x["ids"]) for x in json.loads(t.run(
        nibble, "data", "show", "-m", work + "/model", "-d", work + "/six.tsv", "--json", "-n", 6)[0])
        ["shown"]]
    for n in (min(lengths) - 2, min(lengths) - 1, max(lengths) - 2):
        cut = sum(x > n + 1 for x in lengths)
        said = t.run(nibble, "train", *args, "--seq-len", n, "--replay", work + "/six.tsv")[1]
        for option in ("--data", "--replay"):
            assert said.count(f"nibble: warning: {cut} of 6 samples of {option} are longer than "
                              "--seq-len and are cut\n") == 1, (n, cut, said)
        assert t.run(nibble, "train", "-q", *args, "--seq-len", n)[1] == ""


def main():
    """Runs one part of the tests."""
    t.make_model(nibble, work + "/model")
    {"epochs": epochs, "rows": rows}[part]()


main()
