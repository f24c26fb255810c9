#!/usr/bin/env -S python3 -B
"""Checkpoints that move: to a later process, another library, another GPU, and to the CPU and back.

usage: resume.py NIBBLE

The emulated cuBLASLt proposes, with NB_EMULATED_BACKWARDS, an algorithm that adds the other way
round. A run that is resumed keeps those that it began with, and says so if it cannot."""
import os
import shutil
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)) + "/../cli")
import training as t  # noqa: E402

HALF, ALL = 2, 4


class Resume:
    """A model, and runs on it of which some go half the way."""

    def __init__(self, nibble, work):
        self.nibble, self.work = nibble, work
        t.make_data(work)
        t.make_model(nibble, work + "/model", head_dim=64, num_attention_heads=2,
                     num_key_value_heads=1)

    def train(self, name, steps, *more, code=0, device="cuda", **environment):
        """What a run says whose checkpoints have this name."""
        before = dict(os.environ)
        os.environ.update(environment)
        try:
            return t.run(self.nibble, "train", "-m", self.work + "/model", "-d",
                         self.work + "/c.jsonl", "--steps", steps, "--seq-len", 48,
                         "--batch-size", 2, "--schedule", "constant", "--lr", "1e-3", "--device",
                         device, "--checkpoint-dir", f"{self.work}/{name}", *more, code=code)[1]
        finally:
            os.environ.clear()
            os.environ.update(before)

    def blobs(self, name, step=ALL):
        """Masters, moments and scales of a checkpoint, by name."""
        c = t.checkpoint(f"{self.work}/{name}/step-{step:08}.ckpt")
        return {k: v for k, v in c.items() if k.startswith("blob ") and k != "blob tuning"}

    def goes_on(self, reason, *more, device="cuda", **environment):
        """Resumes a copy of the half run; True if it ends with the bytes of the whole one."""
        shutil.rmtree(self.work + "/copy", ignore_errors=True)
        shutil.copytree(self.work + "/half", self.work + "/copy")
        said = self.train("copy", ALL, "--resume", *more, device=device, **environment)
        line = f"resumed from step {HALF} of '{self.work}/copy'"
        line += f", not bit for bit: {reason}\n" if reason else "\n"
        assert line in said, (line, said)
        return self.blobs("copy") == self.blobs("whole")

    def algorithms(self):
        """Those of the checkpoint are used, if library and GPU are the same."""
        other = {"NB_EMULATED_BACKWARDS": "1"}
        kl = ("--kl-base", "0.5")  # its reference is computed anew, before the first step
        self.train("whole", ALL, *kl)
        self.train("half", HALF, *kl)
        assert self.goes_on("", *kl)
        assert self.goes_on("", *kl, **other)
        assert not self.goes_on("it used cuBLASLt 1 before, and uses 2 now", *kl,
                                NB_EMULATED_CUBLASLT="2", **other)
        gpu = "it was on emulated (4 multiprocessors) before, and is on H9 (4) now"
        assert not self.goes_on(gpu, *kl, NB_EMULATED_GPU="H9", **other)
        print("algorithms are those of the checkpoint, or the run says that they are not")

    def devices(self):
        """Between CPU and GPU a run goes on, with the types that suit the device."""
        shutil.rmtree(self.work + "/whole")
        shutil.rmtree(self.work + "/half")
        f32 = ("--compute-dtype", "f32")
        self.train("whole", ALL, device="cpu")
        self.train("half", HALF, device="cpu")
        assert self.goes_on("", device="cpu")
        moved = "it was on the CPU before, and is on cuda:0 now"
        self.goes_on(moved, *f32)
        self.goes_on(moved)
        back = self.train("copy", ALL + 1, "--resume", device="cpu")
        assert "not bit for bit: it was on a GPU before, and is on the CPU now" in back, back
        assert self.blobs("copy", ALL + 1) != self.blobs("copy")
        # On one device the types stay.
        self.train("gpu", HALF)
        said = self.train("gpu", ALL, "--resume", *f32, code=1)
        assert 'the run was begun with compute_dtype "bf16", not "f32"' in said, said
        print("from the CPU to the GPU and back")


def main():
    """On a directory of its own."""
    if len(sys.argv) != 2:
        sys.exit("usage: resume.py NIBBLE")
    with tempfile.TemporaryDirectory() as work:
        resume = Resume(sys.argv[1], work)
        resume.algorithms()
        resume.devices()


if __name__ == "__main__":
    main()
