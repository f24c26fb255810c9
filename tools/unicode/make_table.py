#!/usr/bin/env python3
"""Writes src/tokenizer/unicode_table.c: the character classes that tokenization depends on.

A tokenizer must cut text exactly where the one cut that made its vocabulary. The `tokenizers`
library is the reference, and two Unicode versions are frozen into it: one in its regular
expressions, an older one in its normalisation. So the classes are not taken from whatever Unicode
data this machine has, but asked of that library, character by character.

usage: make_table.py > src/tokenizer/unicode_table.c     (needs the PyPI package tokenizers)
"""
import sys
import unicodedata

import tokenizers
from tokenizers import Regex, normalizers
from tokenizers.pre_tokenizers import Split

ALL = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
LETTER, NUMBER, SPACE, ACTIVE, BASE = 1, 2, 3, 4, 8


def matching(pattern):
    """The code points that a one-character pattern matches."""
    remove, found = Split(Regex(pattern), "removed"), set()
    for i in range(0, len(ALL), 4096):
        part = ALL[i:i + 4096]
        left = set("".join(p for p, _ in remove.pre_tokenize_str("".join(map(chr, part)))))
        found |= {c for c in part if chr(c) not in left}
    return found


def nfc(text):
    return normalizers.NFC().normalize_str(text)


def moves(c):
    """Whether the reference gives c a combining class: then it changes places with a mark of class
    1 before it, or of class 232 behind it."""
    return nfc("a\u0315" + chr(c)) != "a\u0315" + chr(c) or \
        nfc("a" + chr(c) + "\u0334") != "a" + chr(c) + "\u0334"


def compositions():
    """(first, second) of every pair that the reference composes."""
    for c in ALL:
        parts = unicodedata.decomposition(chr(c)).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            a, b = (int(p, 16) for p in parts)
            if len(nfc(chr(a) + chr(b))) == 1:
                yield a, b
    for lead in range(0x1100, 0x1113):  # Hangul: lead + vowel, syllable + trail
        for vowel in range(0x1161, 0x1176):
            yield lead, vowel
            yield ord(nfc(chr(lead) + chr(vowel))), 0x11A8
    for trail in range(0x11A8, 0x11C3):
        yield 0xAC00, trail


def main():
    bits = [0] * 0x110000
    for pattern, value in ((r"\p{L}", LETTER), (r"\p{N}", NUMBER), (r"\s", SPACE)):
        for c in matching(pattern):
            bits[c] |= value
    first, second = (set(s) for s in zip(*compositions()))
    for c in ALL:
        if c in second or nfc(chr(c)) != chr(c) or moves(c):
            bits[c] |= ACTIVE
        if c in first or normalizers.NFD().normalize_str(chr(c)) != chr(c):
            bits[c] |= BASE
    ranges, start = [], 0
    for c in range(1, 0x110001):
        if c == 0x110000 or bits[c] != bits[start]:
            if bits[start]:
                ranges.append((start, c - 1, bits[start]))
            start = c
    print("/* unicode_table.c - written by tools/unicode/make_table.py from what tokenizers %s does;\n"
          " * first and last code point of a range, and its class (tokenizer/unicode.h). */\n"
          '#include "tokenizer/unicode.h"\n\n'
          "/* clang-format off */\n"
          "const struct nbi_char_range nbi_char_ranges[] = {" % tokenizers.__version__)
    line = ""
    for r in ranges:
        item = "{0x%X, 0x%X, %d}," % r
        if len(line) + len(item) > 95:
            print("    " + line.strip())
            line = ""
        line += item + " "
    print("    " + line.strip() + "\n};\n/* clang-format on */\n\n"
          "const int nbi_char_range_count = %d;" % len(ranges))
    print("%d ranges" % len(ranges), file=sys.stderr)


main()
