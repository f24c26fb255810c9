"""What every check uses: a scratch directory, the program under test, comparisons."""

import json
import os
import subprocess

import numpy as np


GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../golden")


class Failed(Exception):
    """A check found a difference; the text says where."""


class Skipped(Exception):
    """A check cannot run here; the text says why."""


class Box:
    """One check's scratch directory and the program."""

    def __init__(self, nibble, root, data):
        self.nibble, self.root, self.data = nibble, root, data
        os.makedirs(root)

    def path(self, name):
        return os.path.join(self.root, name)

    def data_path(self, name):
        """A file or directory of DATA; the check is skipped where there is none."""
        path = os.path.join(self.data, name)
        if not self.data or not os.path.exists(path):
            raise Skipped(f"no {name} in DATA")
        return path

    def call(self, *args):
        return subprocess.run([self.nibble, *map(str, args)], capture_output=True, text=True,
                              timeout=300, check=False)

    def run(self, *args):
        """Runs nibble, which must succeed; returns its standard output."""
        done = self.call(*args)
        if done.returncode != 0:
            raise Failed(f"nibble {' '.join(map(str, args))}: exit {done.returncode}: "
                         f"{done.stderr.strip()}")
        return done.stdout

    def refuse(self, *args):
        """Runs nibble, which must fail with exit code 1; returns its message."""
        done = self.call(*args)
        if done.returncode != 1 or not done.stderr.startswith("nibble: "):
            raise Failed(f"nibble {' '.join(map(str, args))}: expected a refusal, got exit "
                         f"{done.returncode}: {done.stderr.strip()}")
        return done.stderr

    def inspect(self, path, *args):
        """The rows of `inspect --json` by tensor name."""
        return {t["name"]: t for t in json.loads(self.run("inspect", path, "--json", *args))
                ["tensors"]}


def read_json(*parts):
    with open(os.path.join(*parts), encoding="utf-8") as f:
        return json.load(f)


def write_json(value, *parts):
    with open(os.path.join(*parts), "w", encoding="utf-8") as f:
        json.dump(value, f, ensure_ascii=False)


def expect(condition, text):
    if not condition:
        raise Failed(text)


def equal(what, got, want):
    """Two plain values, or containers of them, are the same."""
    if got != want:
        raise Failed(f"{what}: got {str(got)[:200]}, expected {str(want)[:200]}")


def same_keys(what, got, want):
    got, want = set(got), set(want)
    expect(got == want, f"{what}: missing {sorted(want - got)[:4]}, "
                        f"too many {sorted(got - want)[:4]}")


def same_bytes(what, got, want):
    """Two arrays have one type, one shape and the same bytes."""
    got, want = np.asarray(got), np.asarray(want)
    expect(got.dtype == want.dtype, f"{what}: type {got.dtype}, expected {want.dtype}")
    expect(got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}")
    if got.tobytes() == want.tobytes():
        return
    g, w = (np.frombuffer(a.tobytes(), f"V{a.dtype.itemsize}") for a in (got, want))
    bad = np.flatnonzero(g != w)
    raise Failed(f"{what}: {bad.size} of {got.size} elements differ, the first at {bad[0]}: "
                 f"{got.ravel()[bad[0]]!r}, expected {want.ravel()[bad[0]]!r}")


def same_f32(what, got, want):
    """Two f32 arrays are equal bit for bit, except that -0 may stand for 0."""
    expect(got.dtype == want.dtype == np.float32, f"{what}: types {got.dtype} and {want.dtype}")
    same_bytes(what, got + np.float32(0), want + np.float32(0))
