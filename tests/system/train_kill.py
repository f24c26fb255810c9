"""train_kill.py - kill -9 at random moments of training runs that save every step.

After each kill a run must go on with --resume, having lost no more than the step under way; in the
end there must be the model, the states and the log of a run that nobody killed.
usage: train_kill.py NIBBLE WORK KILLS
"""
import os
import random
import shutil
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)) + "/../cli")
import training as t  # noqa: E402

nibble, work, kills = sys.argv[1], sys.argv[2], int(sys.argv[3])
STEPS = 12


def options(name):
    """The same run, into other files."""
    return ["-q", "-m", work + "/model", "-d", work + "/a.txt", "-d", work + "/c.jsonl",
            "--steps", STEPS, "--seq-len", 24, "--batch-size", 2, "--grad-accum", 2,
            "--lr", "2e-3", "--eval-data", work + "/held.txt", "--eval-every", 5,
            "--save-every", 1, "--threads", 1, "-o", f"{work}/{name}.dat",
            "--checkpoint-dir", f"{work}/{name}.ck", "--log", f"{work}/{name}.jsonl"]


def logged(path):
    """The last whole line of a log: its step."""
    if not os.path.exists(path):
        return 0
    lines = t.read(path).decode().split("\n")[:-1]
    return t.json.loads(lines[-1])["step"] if lines else 0


def compare():
    """Weights, states, losses."""
    assert t.read(work + "/straight.dat") == t.read(work + "/killed.dat"), "weights differ"
    last = f"step-{STEPS:08}.ckpt"
    t.same_checkpoint(f"{work}/straight.ck/{last}", f"{work}/killed.ck/{last}")
    a, b = t.log(work + "/straight.jsonl"), t.log(work + "/killed.jsonl")
    assert a == b, [(x, y) for x, y in zip(a, b) if x != y][:2] or (len(a), len(b))


def one(delay, seen):
    """Starts or resumes, and kills after a while. Returns whether the run was over before."""
    args = [nibble, "train", *map(str, options("killed")), "--resume"]
    with subprocess.Popen(args, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                          stderr=subprocess.PIPE) as p:
        try:
            p.wait(delay)
        except subprocess.TimeoutExpired:
            p.kill()
        said = p.stderr.read().decode()
    assert p.returncode in (0, -9), f"exit code {p.returncode}: {said}"
    have = t.steps(work + "/killed.ck")
    newest = have[-1] if have else 0
    assert newest >= seen, f"the checkpoint of step {seen} has gone: {have}"
    wrote = logged(work + "/killed.jsonl")
    assert wrote - 1 <= newest, f"step {wrote} was done, the newest checkpoint is of {newest}"
    for step in have:
        t.checkpoint(f"{work}/killed.ck/step-{step:08}.ckpt")
    return p.returncode == 0, newest


def main():
    """Runs until there were so many kills, and the last run is over."""
    rng = random.Random(int(os.environ.get("NB_SEED", "1")))
    t.make_model(nibble, work + "/model")
    t.make_data(work)
    begin = time.monotonic()
    t.train(nibble, *options("straight"))
    took = time.monotonic() - begin
    done = runs = seen = 0
    moments = {}
    while done < kills or seen > 0:
        over, seen = one(rng.uniform(0, 1.1 * took) if done < kills else 600, seen)
        if not over:
            done += 1
            moments[seen] = moments.get(seen, 0) + 1
            continue
        compare()
        runs += 1
        seen = 0
        shutil.rmtree(work + "/killed.ck")
        os.remove(work + "/killed.dat")
        os.remove(work + "/killed.jsonl")
    print(f"{done} kills in {runs} runs of {took:.2f} s; newest checkpoint when killed: "
          + ", ".join(f"step {k} {moments[k]} times" for k in sorted(moments)))


main()
