#!/usr/bin/env python3
"""Writes what the tokenizer's tests compare with, as other libraries have it, and README.md.

usage: make_tokenizers.py [DIR]    (DIR: this directory unless given; needs tokenizers 0.23.3)

qwen/, gpt2/, llama3/: small tokenizers and texts with the ids that the PyPI package tokenizers
gives them. train.jsonl: what its BpeTrainer learns. nfc.txt: its NFC. utf8.txt and json.txt:
Python's own reading of bytes and of JSON. The same files come out each time.
"""

import hashlib
import json
import os
import random
import sys
import unicodedata

import tokenizers
from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers,
                        pre_tokenizers, processors, trainers)

QWEN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
        r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
          r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")

# ---- texts ----

ENGLISH = """
The small tokenizer reads a line and cuts it into words; the words become numbers.
Nobody has to know these numbers by heart, but they must be the same on every machine.
We'll see what it's worth: you're counting, I'm checking, they've left and she'd stayed.
THEY'LL shout, IT'S loud, and the cat doesn't mind.  Two  spaces,   three   spaces.
    if (x == 10) {
        return x * 3.14159;  // a comment, 2 + 2 = 4
    }
for (int i = 0; i < 1024; i++) sum += table[i] & 0xFF;
\tA tab, then a word\tand another one.\r\nA line that ends the old way.\r\n
In 1999 there were 365 days, in 2000 there were 366; that makes 731 in all.
"""

SCRIPTS = [  # first and last code point, from which words are made up
    (0x61, 0x7A), (0x41, 0x5A), (0xC0, 0x17F), (0x3B1, 0x3C9), (0x430, 0x44F), (0x5D0, 0x5EA),
    (0x621, 0x64A), (0x904, 0x939), (0xE01, 0xE2E), (0x3041, 0x3093), (0x30A1, 0x30F6),
    (0x4E00, 0x4E80), (0xAC00, 0xAD00), (0x10400, 0x1044F), (0x1F600, 0x1F64F)]
SPACES = (" ", " ", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\r", "\t", "\v", "\f", "\x1c",
          "\x85", "\xa0", "\u1680", "\u180e", "\u2000", "\u2003", "\u200a", "\u200b", "\u2028",
          "\u2029", "\u202f", "\u205f", "\u3000", "\ufeff")
MARKS = [*range(0x300, 0x346), 0x5B0, 0x5BC, 0x64B, 0x651, 0x93C, 0x94D, 0x9BE, 0xE38, 0xE48,
         0xF71, 0xF72, 0xF74, 0x302A, 0x3099, 0x309A, 0x20D0, 0xFE20, 0x1D165, 0x1D16D, 0x1E8D0]
BASES = ("aeioucnsAEIOUCNS<>=\u00e5\u00c4\u00e7\u1e0d\u1ed9\u0391\u03c9\u0435\u30ab\u304b\u0915"
         "\u09c7\u0f40\u0340\u0344\u0374\u037e\u0958\u0f73\u1f71\u1fc1\u2126\u212a\u212b\u2adc"
         "\ufb1d\uf900\U0002f800\U0001d15e")
CONTRACTIONS = ("'s 't 're 've 'm 'll 'd 'S 'T 'RE 'Re 'rE 'VE 'vE 'M 'LL 'lL 'Ll 'D '\u017f "
                "'\u017fs 'l 'r 'v '' 's's 'x '1 ' \u2019s '\u212a 'llm 'tis 'ReD").split(" ")
NUMBERS = ("0 7 12 123 1234 12345 3.14 1e9 \u0663\u0664 \u0966\u0967 \u00bd \u00b2\u00b3 \u2163 "
           "\u3007 \u2460 \uff11\uff12 \U0001d7ce \U00010107 \u17f0").split(" ")
NEWER = "\U00010d4a\U00010d50\ua7cb\u1c89\U0001e5d0\U000105c0\u0c5d\u1df6\U0001ccf0\u2ffc"
JAMO = [(0x1100, 0x1112), (0x1161, 0x1175), (0x11A7, 0x11C2), (0xAC00, 0xD7A3), (0x1176, 0x11FF)]
SYMBOLS = ". , ; : ! ? ... -- -> == != << >> <> ( ) [ ] { } @ # $ % & * / \\ | ~ ` _ __ \" ".split()
EMOJI = ("\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f \U0001f44b\U0001f3fd "
         "\U0001f1e9\U0001f1ea \u00a9 \u20ac \u2192").split(" ")


def pick_range(rng, ranges):
    return chr(rng.randint(*rng.choice(ranges)))


def any_character(rng):
    while True:
        c = rng.randrange(0x110000) if rng.random() < 0.5 else rng.randrange(0x3000)
        if not 0xD800 <= c <= 0xDFFF:
            return chr(c)


def word(rng):
    script = rng.choice(SCRIPTS)
    return "".join(chr(rng.randint(*script)) for _ in range(rng.randint(1, 6)))


def marked(rng):
    return rng.choice(BASES) + "".join(chr(rng.choice(MARKS)) for _ in range(rng.randint(0, 4)))


def hangul(rng):
    return "".join(pick_range(rng, JAMO) for _ in range(rng.randint(1, 5)))


def piece(rng, added):
    """A part of a hard text."""
    return rng.choice([
        lambda: rng.choice(ENGLISH.split(" ")), lambda: rng.choice(ENGLISH.split(" ")),
        lambda: word(rng), lambda: rng.choice(SPACES), lambda: rng.choice(SPACES),
        lambda: rng.choice(CONTRACTIONS), lambda: rng.choice(NUMBERS), lambda: rng.choice(SYMBOLS),
        lambda: marked(rng), lambda: hangul(rng), lambda: rng.choice(EMOJI),
        lambda: rng.choice(NEWER), lambda: any_character(rng), lambda: rng.choice(added),
        lambda: rng.choice(added)])()


def hard_text(rng, added):
    return "".join(piece(rng, added) for _ in range(rng.randint(1, 9)))


def training_text(rng):
    """Sentences, and words made up from each script, some of which come often."""
    known = [word(rng) for _ in range(110)]
    made_up = " ".join(rng.choice(known[:rng.randint(1, 150)]) for _ in range(1500))
    return [ENGLISH] * 3 + [made_up]


# ---- tokenizers ----

def added_tokens():
    """All kinds of flags, overlaps, and texts that NFC changes."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im|>"]
    tokens = [AddedToken(t, special=True, normalized=False) for t in special]
    tokens += [AddedToken(t, special=False, normalized=False) for t in
               ("<think>", "</think>", "<think>x", "k>", "e\u0301+", "\u00e9-")]
    for bits in range(16):
        flags = {name: bool(bits >> i & 1) for i, name in
                 enumerate(("lstrip", "rstrip", "single_word", "normalized"))}
        tokens.append(AddedToken(f"[{bits:X}]", special=bits % 3 == 0, **flags))
        tokens.append(AddedToken(f"w{bits:X}w", special=bits % 3 == 1, **flags))
    tokens += [AddedToken("o\u0308o", special=False, normalized=True),
               AddedToken("\u2126hm", special=False, normalized=True),
               AddedToken(" gap ", special=False, normalized=False),
               AddedToken("\u00a0", special=False, normalized=False, rstrip=True),
               AddedToken("the", special=False, normalized=True, single_word=True),
               AddedToken("er", special=False, normalized=False,
               single_word=True)]  # is known
    return tokens


def train(rng, vocab, pre_tokenizer, normalizer=None, **options):
    """A byte-level tokenizer learnt from our own text."""
    t = Tokenizer(models.BPE(**options))
    t.normalizer = normalizer or t.normalizer
    t.pre_tokenizer = pre_tokenizer
    t.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab, show_progress=False, min_frequency=2,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    t.train_from_iterator(training_text(rng), trainer)
    return t


def split(pattern):
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def make_qwen(rng):
    t = train(rng, 600, split(QWEN), normalizers.NFC())
    t.post_processor = processors.ByteLevel(trim_offsets=False)
    t.add_tokens(added_tokens())
    return t


def make_gpt2(rng):
    t = train(rng, 450, pre_tokenizers.ByteLevel(add_prefix_space=True))
    t.add_tokens([AddedToken("<|endoftext|>", special=True, normalized=False),
                  AddedToken("<mask>", special=True, lstrip=True, normalized=True)])
    return t


def make_llama3(rng):
    t = train(rng, 450, split(LLAMA3), ignore_merges=True)
    # Words that are tokens although no merges lead to them: what ignore_merges is for.
    t = json.loads(t.to_str())
    for text in ("\u0120unreachable", "zqj", "\u0120777", "777", "\u00e4\u00b8\u0143"):
        t["model"]["vocab"][text] = len(t["model"]["vocab"])
    t = Tokenizer.from_str(json.dumps(t))
    t.add_tokens([AddedToken("<|begin_of_text|>", special=True, normalized=False),
                  AddedToken("<|eot_id|>", special=True, normalized=False)])
    return t


# ---- cases ----

FIXED = [
    "", " ", "  ", "   x", "x   ", "\n", "\n\n\n", " \n \n ", "a\n\n b", " \t \n x", "\r\n\r\n",
    "x \r\n y", "a\u00a0b", "\u3000\u3000x", "\u180ex", "a\u2028b", "\x00", "a\x00b", "\x7f\x80",
    "it's IT'S it'\u017f we'LL we'lL I'M you'Re they'vE can'T he'D 'tis ''s", "'s", "'\u017f",
    "e\u0301", "\u0301e", "e\u0301\u0301", "\u1100\u1161\u11a8", "\uac00\u11a8", "\u1100\u1161",
    "\u0041\u030a \u212b \u00c5", "\u1e9b\u0323", "a\u0315\u0300\u05ae\u0062", "\u0344 \u0f73",
    "\u0958 \u2adc \ufb1d", "<\u0338>", "=\u0338=", "123456789", "1 12 123 1234 12345",
    "\u00bd\u2163",
    "\U00010d4a\U00010d50 \u1c89x", "\ufffd", "\U0010ffff", "\ue000\uf8ff", "\ufdd0\uffff",
    "the the,the other the", "er er,her er", "the\u0301", "-the-", "_the_", "<think>x",
    "<think></think>",
    "<think>  x", "<|im_start|>user\nhi<|im_end|>\n", "<|im_start|", "<<|im_start|>>", "<|im|><|im",
    "  [1]  [2]  [3]  [0]  ", "x[4]x [4] x", "[5][5] [6] [7]", "a [8] [9] [A] [B] b",
    " [C] [D] [E] [F] ",
    "w0w w1w w2w w3w", "xw4w w4wx w4w", " w5w  w6w  w7w ", "o\u0308o \u00f6o", "\u2126hm \u03a9hm",
    "e\u0301+ \u00e9+ \u00e9- e\u0301-", "a gap b", "a  gap  b", "x\u00a0\u00a0 y", "k>k>",
    "unreachable zqj 777 1777 7777", " unreachable", "\u4e2d", "a <mask> b<mask>", "<mask>",
    "<|endoftext|>", "x<|endoftext|>y", " <|endoftext|> ", "<|begin_of_text|>x<|eot_id|>",
    "a" * 63, "a" * 64, "a" * 65, "the" * 40, " " * 100, "=" * 100, "\u0301" * 70]

MALFORMED = [
    b"\xff", b"a\x80b", b"\xc3", b"\xe4\xb8", b"\xe4\xb8x", b"\xf0\x9f\x98", b"\xf0\x9f\x98 x",
    b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe0\x80\x80", b"<|im_\xffstart|>",
    b"e\xcc\x81\xcc", b"\xfe\xfe\xff\xff", b"x\xe2\x82<|im_start|>\xe2", b"\xf8\x88\x80\x80\x80"]


def row(t, text, raw=None):
    """One case; what is as the text itself is left out."""
    case = {"hex": raw.hex()} if raw is not None else {"text": text}
    t.encode_special_tokens = True
    plain = t.encode(text, add_special_tokens=False).ids
    t.encode_special_tokens = False
    case["ids"] = t.encode(text, add_special_tokens=False).ids
    if plain != case["ids"]:
        case["plain"] = plain
    decoded = t.decode(case["ids"], skip_special_tokens=False)
    if decoded != text:
        case["decoded"] = decoded
    return case


def is_settled(text):
    """Whether all of it has long been in Unicode. Patterns other than Qwen's go through PCRE2,
    which may be older or newer than the library."""
    return all(unicodedata.category(c) != "Cn" for c in text)


def cases(t, rng, count):
    added = [token.content for token in t.get_added_tokens_decoder().values()]
    texts = FIXED + [hard_text(rng, added) for _ in range(count - len(FIXED))]
    if not t.normalizer:
        texts = [text for text in texts if is_settled(text)]
    else:  # tokens that take white space along, and all there is of that
        texts.append("".join(f"x{s}[1]{s}[2]{s}" for s in SPACES))
    rows = [row(t, text) for text in texts]
    rows += [row(t, raw.decode("utf-8", "replace"), raw) for raw in MALFORMED]
    size = t.get_vocab_size()
    for _ in range(20):  # ids in any order: characters in pieces
        ids = [rng.randrange(size) for _ in range(rng.randint(1, 12))]
        rows.append({"decode": ids, "decoded": t.decode(ids, skip_special_tokens=False)})
    return rows


# ---- training ----

def training_cases(rng):
    """Texts and what BpeTrainer learns from them, in the byte-level alphabet."""
    texts = [["aaaa aaa aa a aaaaa"], ["abab ababab ab", "abababab"], ["abcabc bcabc cabc abc bca"],
             [ENGLISH], ["the the the then", "them then"], ["12 123 1234 12 12"],
             ["e\u0301 \u00e9 e\u0301 \u00e9\u00e9"], ["\u4e2d\u6587 \u4e2d\u6587\u4e2d"], ["x"],
             [""],
             ["don't DON'T won't WON'T it's IT'S"]]
    for i in range(30):
        letters = "ab" if i % 3 == 0 else "abc" if i % 3 == 1 else "aAb\u00e9 "
        texts.append([" ".join("".join(rng.choice(letters) for _ in range(rng.randint(1, 12)))
                               for _ in range(rng.randint(1, 30))) for _ in range(2)])
    for i, group in enumerate(texts):
        merges = 200 if group == [ENGLISH] else rng.choice([0, 1, 5, 20, 60])
        least = rng.choice([1, 2, 2, 3])
        t = Tokenizer(models.BPE())
        t.normalizer = normalizers.NFC()
        t.pre_tokenizer = split(QWEN)
        t.train_from_iterator(group, trainers.BpeTrainer(
            vocab_size=256 + merges, min_frequency=least, show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
        model = json.loads(t.to_str())["model"]
        yield {"texts": group, "vocab": 256 + merges, "min_count": least,
               "tokens": sorted(model["vocab"], key=model["vocab"].get)[256:],
               "merges": [" ".join(pair) for pair in model["merges"]]}


# ---- tables ----

def points(text):
    return " ".join(f"{ord(c):04X}" for c in text)


def nfc_rows(rng):
    """Code points of a text, and of its NFC; a line for each."""
    texts = [marked(rng) + marked(rng) for _ in range(120)]
    texts += [hangul(rng) for _ in range(80)]
    texts += ["".join(rng.choice([marked, hangul, word, any_character])(rng) for _ in range(4))
              for _ in range(110)]
    texts += [base + chr(mark) for base in BASES for mark in (0x300, 0x301, 0x323, 0x338, 0x345)]
    texts += [a + b for a in NEWER for b in ("\u0301", "\u1dcd", "\u3099")]
    texts += ["\u0061\U00011f02\u0301", "\U00011935\U00011930", "\U000105d2\u0307",
              "\U000113c2\U000113c2",
              "\U00016d67\U00016d67", "\u09c7\u09be\u09d7", "\u0b47\u0b3e", "\U00011131\U00011127",
              "\u0cc6\u0cc2\u0cd5", "\u1025\u102e", "\u1b05\u1b35", "\u0cca\u0cd5",
              "\U0001e8d0\u0301a"]
    texts += ["a" + "".join(chr(rng.choice(MARKS)) for _ in range(n)) + "e"
              for n in (31, 32, 33, 70)]
    normal = normalizers.NFC().normalize_str
    return [f"{points(text)}\t{points(normal(text))}" for text in texts]


def class_rows(rng):
    """Code points and their class: L letter, N number, S white space, O other."""
    groups = [("L", r"\p{L}"), ("N", r"\p{N}"), ("S", r"\s")]
    rows = []
    chosen = {ord(c) for c in "".join(SPACES) + NEWER + BASES + "".join(NUMBERS)}
    chosen |= {*range(0x180), *MARKS, 0x24B6, 0x2160, 0x2188, 0x3400, 0x4DB5, 0x4DC0, 0x9FFF,
               0xA000, 0xAC00, 0xD7A3, 0xD7A4, 0xE000, 0xFB06, 0xFFFD, 0x1F100, 0x1F130, 0x2A6DF,
               0x2A6E0,
               0x2B739, 0x2EBF0, 0x31350, 0x323AF, 0x323B0, 0xE0041, 0x10FFFF}
    while len(chosen) < 1000:
        chosen.add(ord(any_character(rng)))
    for c in sorted(chosen):
        kind = [name for name, pattern in groups
                if not pre_tokenizers.Split(Regex(pattern), "removed").pre_tokenize_str(chr(c))]
        rows.append(f"{c:04X}\t{kind[0] if kind else 'O'}")
    return rows


def utf8_rows(rng):
    """Bytes, and what Python's errors="replace" makes of them."""
    edges = [0x00, 0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC2, 0xDF, 0xE0,
             0xE1, 0xEC, 0xED, 0xEE, 0xEF, 0xF0, 0xF1, 0xF3, 0xF4, 0xF5, 0xFF]
    rows = [bytes([a, b]) for a in edges for b in edges]
    rows += [bytes(rng.choice(edges) for _ in range(rng.randint(3, 9))) for _ in range(250)]
    for first, last in ((0x7F, 0x80), (0x7FF, 0x800), (0xD7FF, 0xE000), (0xFFFF, 0x10000),
                        (0x10FFFF, 0x20AC)):
        whole = chr(first).encode() + chr(last).encode()
        rows += [whole[i:j] for i in range(len(whole)) for j in range(i + 1, len(whole) + 1)]
    return [f"{raw.hex()}\t{raw.decode('utf-8', 'replace').encode().hex()}" for raw in rows]


class Refused(Exception):
    """JSON that Python reads and nibble does not."""


def constant(name):
    raise Refused(name)


class Number(str):
    """A number as its text."""


def canonical(value, depth=0):
    """A value without white space, escapes only where they must be, pairs in their order."""
    if depth > 64:
        raise Refused("depth")
    if isinstance(value, Number):
        return str(value)
    if isinstance(value, str):
        value.encode()  # refuses lone surrogates
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple):
        return "{%s}" % ",".join(f"{canonical(k)}:{canonical(v, depth + 1)}" for k, v in value)
    if isinstance(value, list):
        return "[%s]" % ",".join(canonical(v, depth + 1) for v in value)
    return json.dumps(value)


def depth_of(value):
    if isinstance(value, tuple):
        return 1 + max((depth_of(v) for _, v in value), default=0)
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


def read_json(raw):
    """The canonical text of a document, or None."""
    try:
        value = json.loads(raw.decode(), parse_constant=constant, parse_int=Number,
                           parse_float=Number, object_pairs_hook=tuple)
        if depth_of(value) > 64:
            return None
        return canonical(value)
    except (ValueError, Refused, RecursionError):
        return None


DOCUMENTS = [
    b"", b" ", b"null", b"true", b"false", b"nul", b"nulll", b"True", b"tru", b"NaN", b"Infinity",
    b"-Infinity", b"0", b"-0", b"00", b"01", b"-01", b"1", b"-", b"+1", b"1.", b".5", b"1.5",
    b"-1.50",
    b"1e5", b"1E+5", b"1e-05", b"1e", b"1e+", b"1.e5", b"0x10", b"1_0", b"1 2", b"9" * 40, b"1.0.0",
    b'""', b'"', b'"a', b'"a"b', b"'a'", b'"\\""', b'"\\\\"', b'"\\/"', b'"\\b\\f\\n\\r\\t"',
    b'"\\a"',
    b'"\\', b'"\\"', b'"\\u"', b'"\\u00"', b'"\\u00e9"', b'"\\u00E9"', b'"\\u00g0"', b'"\\u0000"',
    b'"\\ud83d\\ude00"', b'"\\uD83D\\uDE00"', b'"\\ud83d"', b'"\\ude00"', b'"\\ud83d\\ud83d"',
    b'"\\ud83dx"', b'"\\ud83d\\n"', b'"\\ud83d\\u0041"', b'"\\udbff\\udfff"', b'"\\ud800\\udc00"',
    b'"\\uffff"', b'"\\U0041"', b'"\t"', b'"\n"', b'"\x00"', b'"\x1f"', b'"\x7f"', b'"a\\u0001b"',
    '"\u00e9\u4e2d\U0001f600"'.encode(), b'"\xff"', b'"\xc3"', b'"\xed\xa0\x80"',
    b'"\xf4\x90\x80\x80"',
    b'"\xc0\x80"', b'"\xe2\x82"', b"\xef\xbb\xbf1", b"[]", b"[ ]", b"[", b"]", b"[1]", b"[1,]",
    b"[,1]",
    b"[1 2]", b"[1,2,3]", b"[1,,2]", b"[[],[[]]]", b"[[]", b"[]]", b"[}", b"{]", b"{}", b"{ }",
    b"{",
    b"}", b'{"a":1}', b'{"a" : 1 , "b":2}', b'{"a":1,}', b'{,"a":1}', b'{"a"}', b'{"a":}', b'{a:1}',
    b'{1:1}', b'{"a":1 "b":2}', b'{"a":1,"a":2}', b'{"a":{"b":[{"c":null}]}}', b'{"":""}',
    b'{"a"1}',
    b'{"a"::1}', b'{null:1}', b'{"\\u0061":1,"a":2}', b"\t\n\r [\t1\n,\r2 ] \n", b"\x0c1",
    b"\xc2\xa01",
    b"1\x00", b"\x00", b"[1]x", b"[1]//", b"/**/1", b"#1", b"[true,false,null]", b"[tru e]", b"[-]",
    b'["a",{"b":"\\u005d}]"},"[{"]', b'{"k":"{\\"k\\":[]}"}', b"[" * 64 + b"]" * 64,
    b"[" * 65 + b"]" * 65, b'{"a":' * 64 + b"1" + b"}" * 64, b'{"a":' * 65 + b"1" + b"}" * 65,
    b"[" * 63 + b'{"x":[]' + b"}" + b"]" * 63, b"[" * 63 + b"{}" + b"]" * 63, b"[" * 100]


def json_rows(rng):
    """The bytes of a document, and its canonical text if it is one."""
    def value(depth):
        if depth > 3 or rng.random() < 0.4:
            return rng.choice([None, True, 0, -7, 1.5, "", "x y", "\u00e9\"\\\n", "\U0001f600\x00",
                               "]}"])
        if rng.random() < 0.5:
            return [value(depth + 1) for _ in range(rng.randint(0, 4))]
        return {rng.choice("abcd\u00e9\n"): value(depth + 1) for _ in range(rng.randint(0, 4))}
    raws = list(DOCUMENTS)
    for i in range(60):
        raw = json.dumps([value(0)], ensure_ascii=bool(i % 2), indent=rng.choice([None, None, 1]))
        raws.append(raw.encode())
    for i in range(160):  # one byte changed, left out or doubled
        raw = bytearray(rng.choice(raws[len(DOCUMENTS):len(DOCUMENTS) + 60])[:80])
        at = rng.randrange(len(raw))
        raw[at:at + rng.randint(0, 1)] = rng.choice(
            [b"", b"", b'"', b"\\", b"[", b"}", b",", b":", b"0", b"\n", b"\x80", bytes([raw[at]])])
        raws.append(bytes(raw))
    rows = []
    for raw in raws:
        text = read_json(raw)
        rows.append(f"{raw.hex()}\t{'-' if text is None else text.encode().hex()}")
    return rows


# ---- writing ----

README = """# Reference data for the tokenizer

`make_tokenizers.py` wrote everything here, including this page, with Python {python} and the PyPI package
tokenizers {version}. All texts were written for it or are random.

| file | what | read by |
|---|---|---|
| `qwen/` | NFC, Qwen's pattern, added tokens | `test_bpe`, `test_vocab`, `tokenize.sh` |
| `gpt2/` | ByteLevel with its own pattern and `add_prefix_space` | `test_bpe` |
| `llama3/` | numbers in groups of three, `ignore_merges` | `test_bpe` |
| `train.jsonl` | texts, and what BpeTrainer learns from them | `test_bpe_train` |
| `nfc.txt` | code points, and those of their NFC | `test_unicode` |
| `classes.txt` | a code point, and L (letter), N (number), S (space) or O | `test_unicode` |
| `utf8.txt` | bytes, and what Python's `errors="replace"` makes of them | `test_utf8` |
| `json.txt` | bytes, and the value in canonical form; `-`: not JSON | `test_jscan` |

In `cases.jsonl`, `ids` are the ids of `text` (or of the bytes in `hex`), `plain` those without
special tokens if they differ, and `decoded` is the text of the ids if it is not `text`.
Rows with `decode` are ids in arbitrary order.

SHA-256 of each file:

```
{sums}
```
"""


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__))
    files = {}
    for name, make, count in (("qwen", make_qwen, 300), ("gpt2", make_gpt2, 150),
                              ("llama3", make_llama3, 170)):
        rng = random.Random(name)
        t = make(rng)
        files[f"{name}/tokenizer.json"] = t.to_str() + "\n"
        files[f"{name}/cases.jsonl"] = "".join(json.dumps(c) + "\n" for c in cases(t, rng, count))
    files["train.jsonl"] = "".join(json.dumps(c) + "\n" for c in training_cases(random.Random(1)))
    for name, rows in (("nfc.txt", nfc_rows), ("classes.txt", class_rows), ("utf8.txt", utf8_rows),
                       ("json.txt", json_rows)):
        files[name] = "".join(line + "\n" for line in rows(random.Random(name)))
    for name, text in files.items():
        path = os.path.join(root, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8", newline="") as f:
            f.write(text)
    sums = "\n".join(f"{hashlib.sha256(text.encode()).hexdigest()}  {name}"
                     for name, text in sorted(files.items()))
    with open(os.path.join(root, "README.md"), "w", encoding="utf-8", newline="") as f:
        f.write(README.format(python=sys.version.split()[0], version=tokenizers.__version__,
                              sums=sums))


if __name__ == "__main__":
    main()
