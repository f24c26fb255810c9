#!/usr/bin/env -S python3 -B
"""Training on the emulated GPU, against the same training on the CPU.

usage: train.py NIBBLE [full]

In f32 the losses of both are equal to 1e-4, in nvfp4 with each state kind to 1e-3: there a rounding
that falls the other way changes a weight by a whole step of its code, and the next steps differ the
more the higher the learning rate is. A run that is killed and resumed ends with the bytes of one
that was not. "full" takes 20 steps instead of a few."""
import os
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)) + "/../cli")
import training as t  # noqa: E402

STEPS_SHORT, STEPS_FULL = 4, 20


class Training:
    """A model and a text, on which a program trains."""

    def __init__(self, nibble, work, full):
        self.nibble, self.work, self.full = nibble, work, full
        self.steps = STEPS_FULL if full else STEPS_SHORT
        t.make_data(work)
        t.make_model(nibble, work + "/model", head_dim=64, num_attention_heads=2,
                     num_key_value_heads=1)

    def options(self, name, device, compute, *more):
        """A run whose log and checkpoints have this name."""
        return ["-q", "--json", "-m", self.work + "/model", "-d", self.work + "/a.txt",
                "--steps", self.steps, "--seq-len", 16, "--batch-size", 2, "--lr", "3e-4",
                "--warmup", 0,
                "--device", device, "--compute-dtype", compute,
                "--log", f"{self.work}/{name}.jsonl", *more]

    def losses(self, name, device, compute, *more):
        """Trains, and returns the loss of each step."""
        t.run(self.nibble, "train", *self.options(name, device, compute, *more))
        return [float(line["loss"]) for line in t.log(f"{self.work}/{name}.jsonl")
                if "loss" in line]

    def compare(self, precision, state, limits):
        """On the GPU with activations of each type, whose losses may be off by so much."""
        how = ("--precision", precision, "--optimizer-state-mode", state)
        want = self.losses("cpu", "cpu", "f32", *how)
        for compute, limit in limits:
            got = self.losses("cuda", "cuda", compute, *how)
            assert len(got) == len(want) == self.steps
            off = max(abs(a - b) for a, b in zip(got, want))
            print(f"{precision}, {state} states, {compute} activations: losses from "
                  f"{want[0]:.3f} to {want[-1]:.3f}, off by up to {off:.2g}", flush=True)
            assert off < limit, (want, got)

    def resume(self):
        """Killed after a checkpoint, then resumed."""
        more = ("--save-every", 1, "--checkpoint-dir")
        straight = self.options("straight", "cuda", "bf16", *more, self.work + "/straight.ck")
        killed = self.options("killed", "cuda", "bf16", *more, self.work + "/killed.ck")
        t.run(self.nibble, "train", *straight)
        t.kill_at(self.nibble, [a for a in killed if a != "-q"],
                  f"{self.work}/killed.ck/step-00000002.ckpt")
        t.run(self.nibble, "train", *killed, "--resume")
        last = f"step-{self.steps:08}.ckpt"
        t.same_checkpoint(f"{self.work}/straight.ck/{last}", f"{self.work}/killed.ck/{last}")
        assert t.log(self.work + "/straight.jsonl") == t.log(self.work + "/killed.jsonl")
        print("killed and resumed: the same bytes", flush=True)


def main():
    """All state kinds, or one."""
    if len(sys.argv) not in (2, 3) or sys.argv[2:] not in ([], ["full"]):
        sys.exit("usage: train.py NIBBLE [full]")
    full = sys.argv[2:] == ["full"]
    with tempfile.TemporaryDirectory() as work:
        training = Training(sys.argv[1], work, full)
        for state in t.STATES if full else ("int8",):
            training.compare("nvfp4", state, (("f32", 1e-3), ("bf16", 2e-2)))
        training.compare("f32", "f32", (("f32", 1e-4),))
        training.resume()


if __name__ == "__main__":
    main()
