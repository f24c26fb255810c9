#!/usr/bin/env -S python3 -B
"""Checks names, banned functions, retired words, the form of sources, paths of one machine, and
that the functions of core.h are tested.

usage: rules.py ROOT [NIBBLE]

With the program as second argument, also that every page in docs/cli is about one of its commands.
Exceptions: 'rules PATH:WHAT REASON' in tools/lint/allow.txt, WHAT being the word in the message.
"""
import fnmatch
import os
import re
import subprocess
import sys

import source

# json_dumps and json_dump_file lose what their buffer had no memory for, and do not tell.
BANNED = ("strcpy strcat sprintf vsprintf strtok atoi atol atoll atof gets alloca sscanf "
          "json_dumps json_dump_file").split()
PRINTS = ("printf vprintf fprintf vfprintf puts fputs putchar fputc putc perror "
          "exit _exit _Exit quick_exit abort assert").split()
COLUMNS = 100
PROMISE = re.compile(r"\b(TODO|FIXME|XXX)\b")
RETIRED = "tools/lint/retired.txt"
RETIRED_SUFFIXES = source.C_SUFFIXES + (".md", ".py", ".sh")
PLACE = re.compile(r"(?<![\w.)}*-])/(home|root|work|farm)/")


def calls(text, names):
    """(line, name) of every call of one of the functions; not of members with such a name."""
    code = source.strip(text)
    for match in re.finditer(rf"(?<![\w.>])({'|'.join(names)})\s*\(", code):
        yield source.line_of(code, match.start()), match.group(1)


def check_calls(tree):
    """What may not be called: anywhere, and below the command line."""
    for path in tree.files("src", "tests"):
        for line, name in calls(tree.read(path), BANNED):
            tree.problem(path, line, f"{name} is banned", name)
    for path in tree.files("src"):
        if path.startswith("src/cli/"):
            continue
        for line, name in calls(tree.read(path), PRINTS):
            tree.problem(path, line, f"{name}: the library neither prints nor exits", name)


def check_names(tree):
    """Visibility is readable from the name, and the headers in include/ declare what is public."""
    declared = {}
    for header in tree.files("include"):
        text = source.strip(tree.read(header))
        declared.update({m.group(1): (header, source.line_of(text, m.start()))
                         for m in re.finditer(r"\b(nb_\w+)\s*\((?!\*)", text)})
    defined = set()
    for path in tree.files("src"):
        for f in source.functions(tree.read(path)):
            if f.has("static"):
                if path.endswith((".c", ".cu")) and f.name.startswith(("nb_", "nbi_", "cli_")):
                    tree.problem(path, f.line, f"{f.name} is static, so it has no prefix", f.name)
                continue
            defined.add(f.name)
            if path.startswith("src/cli/"):
                if f.name != "main" and not f.name.startswith("cli_"):
                    tree.problem(path, f.line, f"{f.name} is not static, so name it cli_...",
                                 f.name)
            elif f.name.startswith("nb_"):
                if f.name not in declared:
                    tree.problem(path, f.line, f"{f.name} is in no public header", f.name)
            elif not f.name.startswith("nbi_"):
                tree.problem(path, f.line, f"{f.name} is not static, so name it nbi_...", f.name)
    for name in sorted(set(declared) - defined):
        header, line = declared[name]
        tree.problem(header, line, f"{name} is declared and not defined", name)


def check_core(tree):
    """The tests of core.h call each of its functions, and make each that returns a status fail."""
    header, tests = "include/nibble/core.h", "tests/unit/test_core_*.c"
    if header not in tree.files("include"):
        return
    text = source.strip(tree.read(header))
    code = "".join(source.strip(tree.read(path)) for path in tree.files("tests/unit")
                   if fnmatch.fnmatch(path, tests))
    called = set(re.findall(r"\b(nb_\w+)\s*\(", code))
    failed = set(re.findall(r"\bassert_fails\(\s*(nb_\w+)\s*\(", code))
    for match in re.finditer(r"(enum nb_status\s+)?\b(nb_\w+)\s*\((?!\*)", text):
        name, line = match.group(2), source.line_of(text, match.start(2))
        if name not in called:
            tree.problem(header, line, f"{name} is not called in {tests}", name)
        elif match.group(1) and name not in failed:
            tree.problem(header, line, f"{name} is in no assert_fails of {tests}", name)


def check_form(tree, path):
    """How a C source looks."""
    text, name = tree.read(path), os.path.basename(path)
    if not text.startswith(f"/* {name} - "):
        tree.problem(path, 1, f"does not open with '/* {name} - ' and a purpose", "opening")
    if path.endswith(source.HEADER_SUFFIXES) and "#pragma once\n" not in text:
        tree.problem(path, 1, "header without #pragma once", "pragma")
    if not text.endswith("\n"):
        tree.problem(path, text.count("\n") + 1, "no newline at the end", "newline")
    for number, line in enumerate(text.split("\n"), 1):
        if "\t" in line:
            tree.problem(path, number, "tab", "tab")
        if line != line.rstrip():
            tree.problem(path, number, "trailing blank", "blank")
        if len(line) > COLUMNS:
            tree.problem(path, number, f"{len(line)} columns, at most {COLUMNS}", "columns")
        if not line.isascii():
            tree.problem(path, number, "not ASCII", "ascii")
        promise = PROMISE.search(line)
        if promise:
            tree.problem(path, number, f"{promise.group()} does not belong here", "promise")


def read_retired(tree):
    """{identifier: replacement}, the same of beginnings of identifiers, and that of phrases."""
    sections = {"identifiers": {}, "beginnings": {}, "phrases": {}}
    section = None
    for number, line in enumerate(tree.read(RETIRED).splitlines(), 1):
        old, arrow, new = line.partition(" -> ")
        if line.startswith("[") and line.strip("[]") in sections:
            section = line.strip("[]")
        elif arrow and section == "identifiers" and old.endswith("*"):
            sections["beginnings"][old[:-1]] = new
        elif arrow and section:
            sections[section][old] = new
        elif line and not line.startswith("#"):
            tree.problem(RETIRED, number, "want 'OLD -> NEW' below [identifiers] or [phrases]")
    return sections.values()


def check_retired(tree):
    """No identifier and no phrase that retired.txt lists."""
    identifiers, beginnings, phrases = read_retired(tree)
    # A phrase may go over the end of a line, and over what starts the next line of a comment.
    finders = [(re.compile(r"\b" + r"[\s*#/]+".join(old.split()) + r"\b", re.I), new)
               for old, new in phrases.items()]

    def check(path):
        text = tree.read(path)
        found = [(match, identifiers.get(match.group())
                  or next((new for old, new in beginnings.items()
                           if match.group().startswith(old)), None))
                 for match in re.finditer(r"[A-Za-z_]\w*", text)]
        found += [(match, new) for finder, new in finders for match in finder.finditer(text)]
        for match, new in found:
            if new:
                old = " ".join(re.sub(r"[*#/]", " ", match.group()).split())
                tree.problem(path, source.line_of(text, match.start()),
                             f"'{old}' is retired, write: {new}", "retired")

    for path in tree.files("src", "include", "tests", "docs", suffixes=RETIRED_SUFFIXES):
        check(path)
    for path in tree.files(suffixes=(".md",)):
        if path in ("README.md", "ARCHITECTURE.md"):
            check(path)


def check_places(tree):
    """No directory of somebody's machine in any text file."""
    for path in tree.files(suffixes=""):
        text = tree.read(path)
        if "\0" in text:
            continue
        for match in PLACE.finditer(text):
            tree.problem(path, source.line_of(text, match.start()),
                         f"'{match.group()}...' exists on one machine only", "place")


def check_tests(tree):
    """What lies in tests/unit is built as a test, and no test includes a .c file."""
    for path in tree.files("tests/unit"):
        name = os.path.basename(path)
        if not name.endswith(".h") and not re.fullmatch(r"test_\w+\.c", name):
            tree.problem(path, 1, f"{name} is not named test_*.c", "name")
    for path in tree.files("tests"):
        for number, line in enumerate(tree.read(path).split("\n"), 1):
            if re.match(r'\s*#\s*include\s*"[^"]*\.c"', line):
                tree.problem(path, number, "a test includes headers, not .c files", "include")


def check_pages(tree, nibble):
    """Every page in docs/cli is about a command."""
    for path in tree.files("docs/cli", suffixes=""):
        command = os.path.splitext(os.path.basename(path))[0]
        shown = subprocess.run([nibble, "help", command], stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL, check=False)
        if shown.returncode != 0:
            tree.problem(path, 1, f"nibble has no command '{command}'", "page")


def main():
    """Checks the tree that the first argument names."""
    tree = source.Tree(source.root_argument(sys.argv[1:], "rules.py ROOT [NIBBLE]"), "rules")
    check_calls(tree)
    check_names(tree)
    check_core(tree)
    for path in tree.files():
        check_form(tree, path)
    check_retired(tree)
    check_places(tree)
    check_tests(tree)
    if len(sys.argv) > 2:
        check_pages(tree, sys.argv[2])
    return tree.finish()


if __name__ == "__main__":
    sys.exit(main())
