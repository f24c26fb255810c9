#!/usr/bin/env -S python3 -B
"""Compares the kernels of the CUDA backend with those that the emulated tests ran.

usage: check_kernels.py SOURCE LOGS

SOURCE is src/backend/cuda, LOGS the folder in which tests with NB_EMULATED_KERNELS left files of
lines 'PROGRAM OFFSET'. Prints how many kernels ran. Fails if one neither ran nor stands in
not_run.txt, of lines 'KERNEL REASON', and if one that stands there did run or does not exist.
"""
import glob
import os
import re
import subprocess
import sys

KERNEL = re.compile(r"__global__[^;{]*?\b(k_\w+)\s*\(")
COMMENT = re.compile(r"/\*.*?\*/", re.S)


def defined(folder):
    """Names of all __global__ functions."""
    names = set()
    for path in glob.glob(f"{folder}/*.cu*"):
        with open(path, encoding="utf-8") as f:
            names |= set(KERNEL.findall(COMMENT.sub("", f.read())))
    return names


def symbols(program):
    """{offset: name} of the functions of a program."""
    table = subprocess.run(["nm", "-C", program], check=True, capture_output=True, text=True).stdout
    at = {name: int(address, 16) for address, _, name in
          (line.split(None, 2) for line in table.splitlines() if line[0] != " ")}
    return {address - at["__executable_start"]: name for name, address in at.items()}


def run(folder):
    """Kernels of all logs, with their template arguments."""
    found, tables = set(), {}
    for path in glob.glob(f"{folder}/*"):
        with open(path, encoding="utf-8") as f:
            for line in f:
                program, offset = line.rsplit(None, 1)
                if not os.path.exists(program) or (
                        os.path.getmtime(program) > os.path.getmtime(path)):
                    continue # of an older build
                if program not in tables:
                    tables[program] = symbols(program)
                name = tables[program].get(int(offset, 16), "")
                if re.search(r"\bk_\w+", name): # else of an older build of the same program
                    found.add(name)
    return found


def main():
    """Compares and reports."""
    if len(sys.argv) != 3:
        sys.exit("usage: check_kernels.py SOURCE LOGS")
    kernels, instances = defined(sys.argv[1]), run(sys.argv[2])
    ran = {re.search(r"\bk_\w+", name).group() for name in instances}
    with open(os.path.join(os.path.dirname(__file__), "not_run.txt"), encoding="utf-8") as f:
        excused = dict(line.strip().split(None, 1) for line in f if line.strip())
    print(f"emulated: {len(ran)} of {len(kernels)} kernels ran, in {len(instances)} instances; "
          f"{len(excused)} are left out")
    problems = [f"{k} did not run, and not_run.txt has no reason"
                for k in sorted(kernels - ran - set(excused))]
    problems += [f"{k} of not_run.txt did run" for k in sorted(ran & set(excused))]
    problems += [f"{k} of not_run.txt does not exist" for k in sorted(set(excused) - kernels)]
    for problem in problems:
        print(f"emulated: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
