#!/usr/bin/env -S python3 -B
"""Checks every #include in src/ against the table in ARCHITECTURE.md.

usage: includes.py ROOT

A file may include headers of its own folder, of base and of include/, and of the folders that the
row of its folder names, always written as a path from src/ or include/. A permission that no file
uses is a problem too. jansson is seen by base/json.h only, CUDA by backend/cuda only. Exceptions:
'includes FILE:HEADER REASON' in tools/lint/allow.txt.
"""
import os
import re
import sys

import source

TABLE = "ARCHITECTURE.md"
HEADING = "## Who may include whom"
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.M)
CUDA = re.compile(r"(cuda|cu[a-z]*\.h|cub/|cute/|cutlass|thrust/|cooperative_groups|mma\.h|nv)")


def read_table(tree):
    """{folder: (line, set of folders it may include)}"""
    rows, inside = {}, False
    for number, line in enumerate(tree.read(TABLE).splitlines(), 1):
        if line.startswith("#"):
            inside = line.strip() == HEADING
        elif inside and line.startswith("|"):
            folder, allowed = [cell.strip() for cell in line.strip("|\n").split("|")][:2]
            if folder != "folder" and not folder.startswith("---"):
                rows[folder] = (number, {a.strip() for a in allowed.split(",")} - {""})
    if not rows:
        tree.problem(TABLE, 1, f"no table under '{HEADING}'")
    return rows


def check_table(tree, rows):
    """Every folder has a row, and every name in the table is a folder."""
    folders = {os.path.dirname(p)[len("src/"):] for p in tree.files("src")}
    for folder in sorted(folders - set(rows)):
        tree.problem(TABLE, 1, f"the table has no row for src/{folder}")
    for folder, (number, allowed) in rows.items():
        for name in sorted({folder} | allowed):
            if name not in folders:
                tree.problem(TABLE, number, f"there is no folder src/{name}")


def check_system(tree, path, line, header):
    """An include in angle brackets."""
    if header == "jansson.h" and path != "src/base/json.h":
        tree.problem(path, line, "include base/json.h instead of <jansson.h>", header)
    if CUDA.match(header) and not path.startswith("src/backend/cuda/"):
        tree.problem(path, line, f"CUDA header <{header}> outside of backend/cuda", header)


def check_own(tree, rows, path, line, header):
    """An include in quotes."""
    folder, target = os.path.dirname(path)[len("src/"):], os.path.dirname(header)
    if "include/" + header in tree.files("include"):
        return
    if not header.endswith(source.HEADER_SUFFIXES):
        tree.problem(path, line, f'"{header}" is no header', header)
    elif "src/" + header not in tree.files("src"):
        tree.problem(path, line, f'no file src/{header}; includes are paths from src/ or include/',
                     header)
    elif target not in {folder, "base"} | rows.get(folder, (0, set()))[1]:
        tree.problem(path, line, f'{folder} may not include {target} ("{header}")', header)


def check_unused(tree, rows, used):
    """Every permission is used; used: pairs of a folder and what a file in it includes."""
    folders = {os.path.dirname(p)[len("src/"):] for p in tree.files("src")}
    for folder, (number, allowed) in rows.items():
        for name in sorted(allowed & folders):
            if folder in folders and (folder, name) not in used:
                tree.problem(TABLE, number, f"no file of src/{folder} includes {name}")


def main():
    """Checks the tree that the first argument names."""
    tree = source.Tree(source.root_argument(sys.argv[1:], "includes.py ROOT"), "includes")
    rows = read_table(tree)
    check_table(tree, rows)
    used = set()
    for path in tree.files("src"):
        text = source.strip_comments(tree.read(path))
        for match in INCLUDE.finditer(text):
            line, (quote, header) = source.line_of(text, match.start()), match.groups()
            if quote == "<":
                check_system(tree, path, line, header)
            else:
                check_own(tree, rows, path, line, header)
                used.add((os.path.dirname(path)[len("src/"):], os.path.dirname(header)))
    check_unused(tree, rows, used)
    return tree.finish()


if __name__ == "__main__":
    sys.exit(main())
