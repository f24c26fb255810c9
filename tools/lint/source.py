"""What the linters share: the files of a tree, C text without comments, functions, exceptions.

No parser: the code is formatted by clang-format, so a function body is what stands between a line
that is '{' and the next line that starts with '}'.
"""
import os
import re
import subprocess
import sys
from typing import NamedTuple

C_SUFFIXES = (".c", ".h", ".cu", ".cuh")
HEADER_SUFFIXES = (".h", ".cuh")
LINTERS = ("includes", "sizes", "rules")
BUILT = ("build", "demo/")  # what the Makefile makes in the root

# A comment, a string or a character, a raw newline in none of them.
TOKEN = re.compile(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.S)
DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\\\n]|\\\n|\\.)*", re.M)


class Function(NamedTuple):
    """A function definition; line is where its signature starts, lines counts to the last brace."""
    name: str
    line: int
    lines: int
    parameters: int
    signature: str

    def has(self, word):
        """Whether the signature holds this word, for example static."""
        return re.search(rf"\b{word}\b", self.signature) is not None


class Tree:
    """A source tree, the exceptions that its tools/lint/allow.txt grants, and what was found."""

    def __init__(self, root, linter):
        self.root, self.linter = root, linter
        self.problems = []
        self.allowed = {}
        self._files = None
        self._read_allow("tools/lint/allow.txt")

    def files(self, *folders, suffixes=C_SUFFIXES):
        """Paths relative to the root, sorted: what git knows or would add, else all there is."""
        if self._files is None:
            self._files = sorted(self._list())
        return [p for p in self._files if p.endswith(suffixes)
                and (not folders or p.startswith(tuple(f + "/" for f in folders)))]

    def _list(self):
        if os.path.exists(os.path.join(self.root, ".git")):
            tracked = self._git("--cached")
            if tracked:
                new = self._git("--others", "--exclude-standard")
                paths = tracked + [p for p in new if not p.startswith(BUILT)]
                return {p for p in paths if os.path.isfile(os.path.join(self.root, p))}
        found = []
        for folder, subfolders, names in os.walk(self.root):
            subfolders[:] = [d for d in subfolders if not d.startswith(".")]
            found += [os.path.relpath(os.path.join(folder, n), self.root) for n in names]
        return [p for p in found if not p.startswith(BUILT)]

    def _git(self, *options):
        done = subprocess.run(["git", "-C", self.root, "ls-files", "-z", *options],
                              stdout=subprocess.PIPE, check=False)
        return [p for p in os.fsdecode(done.stdout).split("\0") if p]

    def read(self, path):
        """The text of a file; bytes that are not UTF-8 come back as surrogates."""
        with open(os.path.join(self.root, path), encoding="utf-8", errors="surrogateescape",
                  newline="") as file:
            return file.read()

    def _read_allow(self, path):
        if not os.path.exists(os.path.join(self.root, path)):
            return
        for number, line in enumerate(self.read(path).splitlines(), 1):
            words = line.split(None, 2)
            if not words or words[0].startswith("#"):
                continue
            if len(words) < 3 or ":" not in words[1] or words[0] not in LINTERS:
                if self.linter == LINTERS[0]:  # one of them is enough to say it
                    self.problem(path, number, "want 'LINTER PATH:WHAT REASON'")
            elif words[0] == self.linter:
                self.allowed[words[1]] = number

    def problem(self, path, line, message, what=None):
        """Notes a problem, unless allow.txt has a line for path:what."""
        key = f"{path}:{what}"
        if key in self.allowed:
            self.allowed[key] = None
        else:
            self.problems.append((path, line, message))

    def finish(self):
        """Prints the problems and returns the exit status; an exception without use is one too."""
        for key, number in self.allowed.items():
            if number is not None:
                self.problem("tools/lint/allow.txt", number, f"nothing needs the exception {key}")
        for path, line, message in sorted(self.problems):
            print(f"{path}:{line}: {message}")
        return 1 if self.problems else 0


def blank(match):
    """Spaces in place of a match; its line breaks stay, so that line numbers do."""
    return re.sub(r"[^\n]", " ", match.group())


def strip_comments(text):
    """C text with comments blanked; strings stay."""
    return TOKEN.sub(lambda m: blank(m) if m.group()[0] == "/" else m.group(), text)


def strip(text):
    """C text with comments, strings and characters blanked."""
    return TOKEN.sub(blank, text)


def line_of(text, position):
    """The line, from 1, of a position in text."""
    return text.count("\n", 0, position) + 1


def functions(text):
    """All functions that are defined in C text."""
    code = DIRECTIVE.sub(blank, strip(text))
    found = []
    for match in re.finditer(r"^\{$.*?^\}", code, re.M | re.S):
        before = max(code.rfind(c, 0, match.start()) for c in ";}") + 1
        head = code[before:match.start()]
        # An opening 'extern "C" {' or namespace may stand in front of the first function.
        signature = head[head.rfind("{") + 1:]
        name, parameters = split_signature(signature)
        if name:
            start = match.start() - len(signature.lstrip())
            first = line_of(code, start)
            found.append(Function(name, first, line_of(code, match.end()) - first + 1, parameters,
                                  signature))
    return found


def split_signature(signature):
    """The name and the number of parameters; the last outer parentheses hold them."""
    depth = commas = 0
    name = inside = None
    for i, c in enumerate(signature):
        if c == "(":
            if depth == 0:
                word = re.search(r"(\w+)\s*$", signature[:i])
                name, commas, inside = word.group(1) if word else name, 0, i + 1
            depth += 1
        elif c == ")":
            depth -= 1
            if depth == 0:
                inside = signature[inside:i].strip()
        elif c == "," and depth == 1:
            commas += 1
    if not name:
        return None, 0
    return name, 0 if inside in ("", "void") else commas + 1


def root_argument(args, usage):
    """The root directory among the arguments; says how to call the script if there is none."""
    if not args or not os.path.isdir(args[0]):
        sys.exit(f"usage: {usage}")
    return args[0]
