"""Lists the tests that skipped themselves in CTest's last run, and why.

usage: skipped.py BUILD

A test says so in lines 'SKIP: reason' (or 'SKIP what: reason') of its output, which cmocka follows
with the name of the case. One line for each test and reason.
"""
import re
import sys

START = re.compile(r"\d+/\d+ Test(?:ing)?: (\S+)")
SKIP = re.compile(r"SKIP(?: [^:]+)?: .*")
CASE = re.compile(r"\[  SKIPPED \] (\S+)$")


def main():
    """Reads the log that CTest keeps of its last run."""
    if len(sys.argv) != 2:
        sys.exit("usage: skipped.py BUILD")
    found, test, reason = {}, None, None
    with open(f"{sys.argv[1]}/Testing/Temporary/LastTest.log", encoding="utf-8",
              errors="replace") as log:
        for line in log:
            start = START.match(line)
            if start:
                test, reason = start.group(1), None
            elif SKIP.match(line):
                reason = line.strip()
                found.setdefault((test, reason), [])
            elif reason and CASE.match(line):
                found[test, reason].append(CASE.match(line).group(1))
                reason = None
    print(f"{len(found)} skipped" + (":" if found else ""))
    for (name, why), cases in found.items():
        what = f" ({cases[0] if len(cases) == 1 else f'{len(cases)} cases'})" if cases else ""
        print(f"  {name}{what}: {re.sub('^SKIP:? ', '', why)}")


if __name__ == "__main__":
    main()
