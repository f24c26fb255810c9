#!/usr/bin/env -S python3 -B
"""`doctor --kernels` on the emulated GPU: all agree, and every kernel of the backend is reached.

usage: doctor_kernels.py SOURCE NIBBLE...

SOURCE is src/backend/cuda; each NIBBLE has the backend of another architecture, which together
reach all. Kernels that the emulator cannot run stand in not_run.txt.
"""
import os
import re
import subprocess
import sys
import tempfile

import check_kernels

# Kernels that run only together with those of not_run.txt.
TOGETHER = {"k_to_f32": "reads the norms for a megakernel"}


def run(nibble, log):
    """Checks the kernels; returns whether all agree, and prints what does not."""
    r = subprocess.run([nibble, "doctor", "--kernels", "--device", "cuda"], text=True, check=False,
                       capture_output=True, env=dict(os.environ, NB_EMULATED_KERNELS=log))
    lines = r.stdout.splitlines()
    print(os.path.basename(nibble) + ":", lines[-1] if lines else r.stderr)
    for line in lines:
        if "  FAIL  " in line:
            print(line)
    return r.returncode == 0


def main():
    """Runs it, and compares the kernels that ran with those that there are."""
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as logs:
        agree = [run(nibble, f"{logs}/{i}") for i, nibble in enumerate(sys.argv[2:])]
        ran = {re.search(r"\bk_\w+", name).group() for name in check_kernels.run(logs)}
    with open(os.path.join(os.path.dirname(__file__), "not_run.txt"), encoding="utf-8") as f:
        excused = {line.split()[0] for line in f if line.strip()} | set(TOGETHER)
    missing = sorted(check_kernels.defined(sys.argv[1]) - ran - excused)
    for name in missing:
        print(f"{name} is not reached by doctor --kernels")
    return 0 if all(agree) and not missing else 1


if __name__ == "__main__":
    sys.exit(main())
