#!/usr/bin/env -S python3 -B
"""Checks that ThreadSanitizer finds a missing barrier.

usage: races.py SOURCE PROGRAMS [FUNCTION...]

For lines of mutants.txt, those of the FUNCTIONs or all, the case runs without the barrier, with the
threads in forward order. The report must say that two lines of FILE, the one with the barrier, race.
"""
import os
import re
import subprocess
import sys

from mutants import barrier_line, read_mutants


def first_race(program, case, place):
    """The report of the first race without the barrier at a place, or an empty text."""
    env = dict(os.environ, NB_EMULATED_ORDER="forward", NB_EMULATED_MUTANT=place,
               TSAN_OPTIONS="halt_on_error=1")
    run = subprocess.run([program, case], env=env, stdout=subprocess.DEVNULL,
                         stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    _, title, report = run.stderr.partition("WARNING: ThreadSanitizer: data race")
    return title + report


def racing_lines(report, file):
    """The lines of a file at the top of the stacks of both accesses, where they are in it."""
    tops = re.findall(r"^  (?:Previous )?(?:[Aa]tomic )?(?:[Rr]ead|[Ww]rite) of size .*\n"
                      r"    #0 .*?([\w.]+):(\d+)", report, re.MULTILINE)
    return [int(line) for name, line in tops if name == file]


def main():
    """Tries the mutants."""
    if len(sys.argv) < 3:
        sys.exit("usage: races.py SOURCE PROGRAMS [FUNCTION...]")
    source, programs, functions = sys.argv[1], sys.argv[2], sys.argv[3:]
    tried = [m for m in read_mutants() if not functions or m[1] in functions]
    missed = 0 if tried else 1
    for file, function, number, program, case in tried:
        place = f"{file}:{barrier_line(f'{source}/{file}', function, int(number))}"
        lines = racing_lines(first_race(f"{programs}/{program}_sm80", case, place), file)
        missed += len(lines) != 2
        found = f"data race of {file}:{lines[0]} and {file}:{lines[1]}" if len(lines) == 2 \
            else "no data race found"
        print(f"without barrier {number} of {function} ({place}): {found}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
