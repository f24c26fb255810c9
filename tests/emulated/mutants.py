#!/usr/bin/env -S python3 -B
"""Checks that the emulated tests find a missing barrier.

usage: mutants.py SOURCE PROGRAMS ARCH [COUNT]

Each line of mutants.txt names a file of SOURCE, a function, which of its __syncthreads is taken
out (by the environment variable NB_EMULATED_MUTANT), and the test program and case that must fail
then, in one of four orders of threads. COUNT tries the first ones only.
"""
import os
import re
import subprocess
import sys

ORDERS = ("forward", "reverse", "1", "2")


def barrier_line(path, function, number):
    """The line of a barrier in a function."""
    with open(path, encoding="utf-8") as f:
        lines = f.read().split("\n")
    inside = False
    for at, line in enumerate(lines, 1):
        if re.search(rf"\b{function}\(", line) and not line.startswith("    "):
            inside = True
        elif line.startswith("}"):
            inside = False
        if inside and "__syncthreads" in line:
            number -= 1
            if number == 0:
                return at
    sys.exit(f"{path}: {function} has fewer barriers")


def read_mutants():
    """The lines of mutants.txt: file, function, number of the barrier, program, case."""
    with open(os.path.join(os.path.dirname(__file__), "mutants.txt"), encoding="utf-8") as f:
        return [line.split() for line in f if line.strip()]


def passes(program, case, order, place=""):
    """Whether the case passes without the barrier at a place, or with all of them."""
    env = dict(os.environ, NB_EMULATED_ORDER=order, NB_EMULATED_MUTANT=place)
    env.pop("NB_EMULATED_KERNELS", None)
    return subprocess.run([program, case], env=env, stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL, check=False).returncode == 0


def finds(program, case, place):
    """The first order in which the case fails, or None."""
    if not passes(program, case, ORDERS[0]):
        sys.exit(f"{program} {case} fails with all barriers")
    return next((order for order in ORDERS if not passes(program, case, order, place)), None)


def main():
    """Tries the mutants."""
    if len(sys.argv) not in (4, 5):
        sys.exit("usage: mutants.py SOURCE PROGRAMS ARCH [COUNT]")
    source, programs, arch = sys.argv[1:4]
    mutants = read_mutants()
    missed = 0
    for file, function, number, program, case in mutants[:int(sys.argv[4]) if sys.argv[4:] else None]:
        place = f"{file}:{barrier_line(f'{source}/{file}', function, int(number))}"
        order = finds(f"{programs}/{program}_{arch}", case, place)
        missed += order is None
        print(f"without barrier {number} of {function} ({place}): "
              f"{'not found' if order is None else 'found in order ' + order}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
