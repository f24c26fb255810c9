#!/usr/bin/env -S python3 -B
"""Checks the sizes of functions, parameter lists, files and headers.

usage: sizes.py ROOT [-v]

-v also counts the functions above the soft limit. Exceptions, in tools/lint/allow.txt:
'sizes PATH:FUNCTION REASON', and 'sizes PATH:lines REASON' for a whole file.
"""
import sys

import source

FUNCTION_SOFT = 60
FUNCTION = 120
KERNEL = 200  # __global__ functions
PARAMETERS = 7
FILE = 1200
HEADER = 300
PUBLIC_HEADER = 450  # explains what it declares


def file_limit(path):
    """How many lines a file may have."""
    if path.startswith("include/"):
        return PUBLIC_HEADER
    return HEADER if path.endswith(source.HEADER_SUFFIXES) else FILE


def check_function(tree, path, function):
    """One function: its lines and its parameters."""
    limit = KERNEL if function.has("__global__") else FUNCTION
    if function.lines > limit:
        tree.problem(path, function.line, f"{function.name} has {function.lines} lines, "
                     f"at most {limit} are allowed", function.name)
    if function.parameters > PARAMETERS:
        tree.problem(path, function.line, f"{function.name} has {function.parameters} parameters, "
                     f"at most {PARAMETERS} are allowed", function.name)


def main():
    """Checks the tree that the first argument names."""
    tree = source.Tree(source.root_argument(sys.argv[1:], "sizes.py ROOT [-v]"), "sizes")
    total = long = 0
    for path in tree.files():
        text = tree.read(path)
        lines, limit = text.count("\n"), file_limit(path)
        if lines > limit:
            tree.problem(path, limit + 1, f"{lines} lines, at most {limit} are allowed", "lines")
        for function in source.functions(text):
            check_function(tree, path, function)
            total += 1
            long += function.lines > FUNCTION_SOFT
    if "-v" in sys.argv[2:]:
        print(f"sizes: {long} of {total} functions have more than {FUNCTION_SOFT} lines")
    return tree.finish()


if __name__ == "__main__":
    sys.exit(main())
