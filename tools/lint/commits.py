#!/usr/bin/env -S python3 -B
"""Checks the subject lines of commits: at most 72 characters, no full stop.

usage: commits.py ROOT

Checked are the newest commit and those that the upstream branch does not have yet, as they can
still be changed. So old history never fails, and a clone of a single commit is enough.
"""
import subprocess
import sys

import source

COLUMNS = 72
UPSTREAM = ("@{upstream}", "origin/HEAD", "origin/main")


def git(root, *arguments):
    """The lines that git prints, or None if it fails."""
    done = subprocess.run(["git", "-C", root, *arguments], stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, check=False)
    return None if done.returncode else done.stdout.decode(errors="replace").splitlines()


def subjects(root):
    """[(commit, subject)]; none where there is no history, as in an archive of the sources."""
    ranges = [["-1", "HEAD"]]
    for name in UPSTREAM:
        base = git(root, "merge-base", name, "HEAD")
        if base:
            ranges.append([f"{base[0]}..HEAD"])
            break
    lines = [line for r in ranges for line in git(root, "log", "--no-merges", "--format=%h %s", *r)
             or []]
    return [line.split(" ", 1) for line in dict.fromkeys(lines)]


def main():
    """Checks the repository that the first argument names."""
    failed = 0
    for commit, subject in subjects(source.root_argument(sys.argv[1:], "commits.py ROOT")):
        if len(subject) > COLUMNS:
            print(f"commit {commit}: a subject of {len(subject)} characters, at most {COLUMNS}")
            failed = 1
        if subject.endswith("."):
            print(f"commit {commit}: a subject has no full stop")
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
