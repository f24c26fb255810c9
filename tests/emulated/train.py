"""Training on the emulated GPU, against the same training on the CPU.

usage: train.py NIBBLE WORK [full]

In nvfp4 with each state kind, the losses of both are equal to 1e-3; a run that is killed and
resumed ends with the bytes of one that was not. "full" takes 20 steps instead of a few."""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)) + "/../cli")
import training as t  # noqa: E402

nibble, work, full = sys.argv[1], sys.argv[2], sys.argv[3:] == ["full"]
STEPS = 20 if full else 4


def options(name, device, compute, *more):
    """A run whose log and checkpoints have this name."""
    return ["-q", "--json", "-m", work + "/model", "-d", work + "/a.txt", "--steps", STEPS,
            "--seq-len", 16, "--batch-size", 2, "--lr", "2e-3", "--device", device,
            "--compute-dtype", compute, "--log", f"{work}/{name}.jsonl", *more]


def losses(name, device, compute, *more):
    """Trains, and returns the loss of each step."""
    t.run(nibble, "train", *options(name, device, compute, *more))
    return [float(line["loss"]) for line in t.log(f"{work}/{name}.jsonl") if "loss" in line]


def compare(state):
    """f32 activations step by step; bf16 within what rounding does."""
    state = ("--optimizer-state-mode", state)
    want = losses("cpu", "cpu", "f32", *state)
    for compute, limit in (("f32", 1e-3), ("bf16", 3e-2)):
        got = losses("cuda", "cuda", compute, *state)
        assert len(got) == len(want) == STEPS
        off = max(abs(a - b) for a, b in zip(want, got))
        print(f"{state[1]} states, {compute} activations: losses differ by up to {off:.2g} "
              f"of {want[0]:.3f} to {want[-1]:.3f}", flush=True)
        assert off < limit, (want, got)


def resume():
    """Killed after a checkpoint, then resumed."""
    more = ("--save-every", 1, "--checkpoint-dir")
    straight = options("straight", "cuda", "bf16", *more, work + "/straight.ck")
    killed = options("killed", "cuda", "bf16", *more, work + "/killed.ck")
    t.run(nibble, "train", *straight)
    t.kill_at(nibble, [a for a in killed if a != "-q"], f"{work}/killed.ck/step-00000002.ckpt")
    t.run(nibble, "train", *killed, "--resume")
    last = f"step-{STEPS:08}.ckpt"
    t.same_checkpoint(f"{work}/straight.ck/{last}", f"{work}/killed.ck/{last}")
    assert t.log(work + "/straight.jsonl") == t.log(work + "/killed.jsonl")
    print("killed and resumed: the same bytes", flush=True)


t.make_data(work)
t.make_model(nibble, work + "/model", head_dim=64, num_attention_heads=2, num_key_value_heads=1)
for kind in t.STATES if full else ("int8",):
    compare(kind)
resume()
