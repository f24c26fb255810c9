"""Seeded texts and conversations that are hard on tokenizers and chat templates."""

import json
import random
import string
import unicodedata

CHAT_TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|box_end|>",
    "<|vision_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_pad|>",
    "<|repo_name|>", "<tool_response>", "</tool_response>", "<think>", "</think>"]

SCRIPTS = [  # first and last code point
    (0x41, 0x5A), (0x61, 0x7A), (0xC0, 0x24F), (0x250, 0x2FF), (0x370, 0x3FF), (0x400, 0x52F),
    (0x531, 0x58F), (0x591, 0x5F4), (0x600, 0x6FF), (0x700, 0x74F), (0x780, 0x7B1),
    (0x7C0, 0x7FF), (0x900, 0x97F), (0x980, 0x9FF), (0xA00, 0xA7F), (0xB80, 0xBFF),
    (0xC00, 0xC7F), (0xD00, 0xD7F), (0xE00, 0xE7F), (0xE80, 0xEFF), (0xF00, 0xFFF),
    (0x1000, 0x109F), (0x10A0, 0x10FF), (0x1200, 0x137F), (0x13A0, 0x13FF), (0x1400, 0x167F),
    (0x1780, 0x17FF), (0x1800, 0x18AF), (0x1B00, 0x1B7F), (0x1E00, 0x1EFF), (0x1F00, 0x1FFF),
    (0x2000, 0x206F), (0x2070, 0x209F), (0x20A0, 0x20CF), (0x2100, 0x214F), (0x2150, 0x218F),
    (0x2190, 0x22FF), (0x2460, 0x24FF), (0x2500, 0x27BF), (0x2C80, 0x2CFF), (0x3000, 0x303F),
    (0x3040, 0x30FF), (0x3100, 0x312F), (0x3200, 0x33FF), (0x4E00, 0x9FFF), (0xA000, 0xA48C),
    (0xAC00, 0xD7A3), (0xF900, 0xFAFF), (0xFB00, 0xFDFF), (0xFE30, 0xFEFF), (0xFF00, 0xFFEF),
    (0x10000, 0x100FF), (0x10330, 0x1034F), (0x10400, 0x1044F), (0x12000, 0x123FF),
    (0x13000, 0x1342F), (0x1D100, 0x1D1FF), (0x1D400, 0x1D7FF), (0x1E900, 0x1E95F),
    (0x1F300, 0x1F64F), (0x20000, 0x2A6DF), (0x2F800, 0x2FA1D)]

SPACES = ["\t", "\n", "\v", "\f", "\r", "\r\n", " ", "  ", "\x1c", "\x1f", "\x85", "\xa0", "\u1680",
          "\u180e", "\u2000", "\u2003", "\u200a", "\u200b", "\u2028", "\u2029", "\u202f", "\u205f",
          "\u2060", "\u3000", "\ufeff"]

ZEROS = [0x30, 0x660, 0x6F0, 0x7C0, 0x966, 0x9E6, 0xBE6, 0xE50, 0xF20, 0x1040, 0x17E0, 0x1810,
         0xA620, 0xABF0, 0xFF10, 0x104A0, 0x11066, 0x1D7CE, 0x1E950]
NUMBERS = "½²³¹①⑳㈠㊱Ⅳⅿↂ〇〡〸৴௰፩፲𐄇𒐀𝍠🄁"  # \p{N} beyond digits

MARKS = ([*range(0x300, 0x370), *range(0x591, 0x5BE), *range(0x64B, 0x660), 0x93C, 0x94D, 0x9BC,
          0xE38, 0xE48, *range(0xF71, 0xF85), 0x1037, 0x1DC0, 0x1DCE, 0x20D0, 0x20E1, 0x302A,
          0x302E, 0x3099, 0x309A, 0xFE20, 0x1D165, 0x1D16D, 0x1E8D0])
MARK_BLOCKS = [(0x300, 0x36F), (0x591, 0x5C7), (0x64B, 0x65F), (0x6D6, 0x6ED), (0x7EB, 0x7FD),
               (0x890, 0x8FF), (0x93C, 0x94D), (0x1AB0, 0x1AFF), (0x1DC0, 0x1DFF), (0x20D0, 0x20F0),
               (0x3099, 0x309A), (0xFE20, 0xFE2F), (0x10D24, 0x10D6D), (0x10EAB, 0x10EFF),
               (0x11080, 0x1114F), (0x11340, 0x113FF), (0x11900, 0x1195F), (0x16100, 0x1612F),
               (0x16D63, 0x16D6A), (0x1D165, 0x1D18B), (0x1E000, 0x1E02A), (0x1E8D0, 0x1E94A)]
BASES = ("aeioucnsAEIOUCNSåÅÄöçéḍśộΑωι<>=カハかはकनডོĿ\u0340\u0344\u0958\u1f71\u2126\u212b\ufb1d"
         "\uf900\U0002f800\U0001d15e")

EMOJI = ["\U0001f600", "\U0001f44b", "\U0001f468", "\U0001f469", "\U0001f467", "\u2764",
         "\U0001f525", "\U0001f3f4", "\u2640", "\u2695", "\U0001f680", "\U0001f9d1", "\u00a9",
         "\u203c", "\U0001fae0"]
JOINERS = ["\u200d", "\ufe0f", "\ufe0e", "\U0001f3fb", "\U0001f3ff", "\u20e3", "\U000e0067",
           "\U000e007f"]

WORDS = ("the cat sat on mat hello World QWEN naïve Straße dž I you we they it can won ain isn "
         "ſ K İ ı ß ﬅ ﬆ O'Neil rock'n'roll l'été d’accord 你好 世界 我是谁 日本語 テスト 한국어 Привет "
         "שלום مرحبا नमस्ते สวัสดี").split()


def some(rng, low, high, pick):
    """A few picks in a row."""
    return "".join(pick() for _ in range(rng.randint(low, high)))


def scalar(rng, low=0, high=0x10FFFF):
    """Any code point but a surrogate."""
    while True:
        c = rng.randint(low, high)
        if not 0xD800 <= c <= 0xDFFF:
            return chr(c)


def any_plane(rng):
    """Assigned, unassigned, private and no characters at all; planes are equally likely."""
    def pick():
        plane = rng.randint(0, 16) << 16
        return scalar(rng, plane, plane + 0xFFFF)
    return some(rng, 1, 40, pick)


def low_planes(rng):
    """The planes that have characters, and their last two code points, which never have."""
    def pick():
        plane = rng.choice([0, 0, 0, 1, 1, 2, 3, 14]) << 16
        edge = chr(plane + rng.randint(0xFFFE, 0xFFFF))
        return rng.choice([scalar(rng, plane, plane + 0x3FFF), scalar(rng, plane, plane + 0xFFFF),
                           scalar(rng, plane, plane + 0xFFFF), edge])
    return some(rng, 1, 40, pick)


def latin(rng):
    return some(rng, 1, 80, lambda: chr(rng.randint(0, 0x17F)))


def marks(rng):
    return some(rng, 1, 12, lambda: rng.choice(BASES)
                + some(rng, 0, 5, lambda: chr(rng.choice(MARKS))))


def any_marks(rng):
    """Marks in any order, of all blocks that have some."""
    return rng.choice(BASES) + some(rng, 1, 5, lambda: chr(rng.randint(*rng.choice(MARK_BLOCKS))))


def decomposed(seed):
    """What has a canonical decomposition, and some marks in and around it."""
    rng, out = random.Random(seed), []
    for c in map(chr, [*range(0xC0, 0xAC00), *range(0xAC00, 0xD7A4, 50), *range(0xF900, 0x2FA20)]):
        parts = unicodedata.normalize("NFD", c)
        if parts != c:
            a, b = (chr(rng.choice(MARKS)) for _ in range(2))
            out += [parts, parts + a, parts[0] + a + parts[1:], parts[::-1], c + a + b,
                    a + b + parts]
    return out


def jamo(rng):
    def pick():
        return chr(rng.choice([
            rng.randint(0x1100, 0x1113), rng.randint(0x1160, 0x1176), rng.randint(0x11A6, 0x11C3),
            0xAC00 + 28 * rng.randint(0, 398), rng.randint(0xAC00, 0xD7A3),
            rng.randint(0xA960, 0xA97C), rng.randint(0xD7B0, 0xD7FB), rng.choice(MARKS)]))
    return some(rng, 1, 30, pick)


def scripts(rng):
    """Words of many scripts."""
    def word():
        low, high = rng.choice(SCRIPTS)
        return (some(rng, 1, 8, lambda: chr(rng.randint(low, high)))
                + rng.choice(["", " ", "-", ", "]))
    return some(rng, 1, 10, word)


def emoji(rng):
    def pick():
        flag = some(rng, 1, 3, lambda: chr(rng.randint(0x1F1E6, 0x1F1FF)))
        return rng.choice([rng.choice(EMOJI) + some(rng, 0, 3, lambda: rng.choice(JOINERS)), flag,
                           rng.choice("1#*") + "\ufe0f\u20e3", " "])
    return some(rng, 1, 15, pick)


def spaces(rng):
    """White space of every kind, with a little between."""
    return some(rng, 1, 25, lambda: rng.choice(SPACES) if rng.random() < 0.75
                else rng.choice(["a", "Z9", ".", "!?", "中", "<", "'s"]))


def contractions(rng):
    def pick():
        tail = rng.choice(["s", "t", "re", "ve", "m", "ll", "d", "st", "l", "r", "v", "x"])
        tail = "".join(rng.choice([c, c.upper(), "ſ" if c == "s" else c]) for c in tail)
        word = rng.choice(WORDS if rng.random() < 0.7 else ["", " ", "1", "é", "\n", "!"])
        return (word + rng.choice(["'", "'", "'", "’", "''", "`", "ʼ", "＇"]) + tail
                + rng.choice(["", "", " ", "x", "'", "ﬅ", "\u0301"]))
    return some(rng, 1, 8, pick)


def digits(rng):
    def pick():
        zero = rng.choice(ZEROS)
        number = some(rng, 1, 7, lambda: chr(zero + rng.randint(0, 9)))
        return rng.choice([number, number, rng.choice(NUMBERS)]) + rng.choice(
            ["", "", " ", ".", ",", "e-5", "x", "\n", "%"])
    return some(rng, 1, 10, pick)


def special(rng):
    """Chat tokens: whole, cut, doubled, one inside of another, next to all sorts of things."""
    def pick():
        t = rng.choice(CHAT_TOKENS)
        k = rng.randint(0, len(t))
        return rng.choice([t, t, t + t, t[:k], t[k:], t[:k] + t + t[k:], t.upper(),
                           t[:k] + rng.choice([" ", "\u200b", "\0", "\u0301"]) + t[k:],
                           t + "\u0338", rng.choice(WORDS), rng.choice(SPACES), "<", "|", "</"])
    return some(rng, 1, 10, pick)


def name(rng):
    return some(rng, 1, 3, lambda: rng.choice(["get", "_", "Index", "x", "2", "foo", "BAR", "nb"]))


def python_code(rng):
    def line():
        indent = rng.choice(["", "    ", "        ", "\t", "\t\t"])
        return indent + rng.choice([
            f"def {name(rng)}({name(rng)}, *, k={rng.randint(0, 9999)}):",
            f"return [{name(rng)} for _ in range({rng.randint(0, 99)})]  # {rng.choice(WORDS)}",
            f"{name(rng)} = f\"{{{name(rng)}!r:>{rng.randint(1, 20)}}}\\n\"", "@property", "",
            f"if {name(rng)} != {rng.random()!r}: raise ValueError('{rng.choice(WORDS)}')",
        ]) + rng.choice(["", "", " ", "\t"]) + rng.choice(["\n", "\n", "\r\n", "\n\n\n"])
    return some(rng, 1, 8, line)


def c_code(rng):
    def line():
        return "    " * rng.randint(0, 3) + rng.choice([
            f"static const uint8_t {name(rng)}[] = {{0x{rng.getrandbits(16):04X}, '\\0', 1e-9f}};",
            f"for (int i = 0; i < {name(rng)}->n; i++) {name(rng)}[i] <<= {rng.randint(0, 31)};",
            f"#define {name(rng).upper()}(x) ((x) * (x)) /* {rng.choice(WORDS)} */ \\", "} else {",
            f"if (!{name(rng)} || *{name(rng)} != '\\'') goto {name(rng)};", "}\t\t// ----", "",
        ]) + "\n"
    return some(rng, 1, 8, line)


def json_text(rng):
    def value(depth):
        kind = rng.randint(0, 6 if depth else 4)
        if kind == 5:
            return [value(depth - 1) for _ in range(rng.randint(0, 4))]
        if kind == 6:
            return {name(rng): value(depth - 1) for _ in range(rng.randint(0, 4))}
        return [rng.randint(-10 ** 9, 10 ** 9), rng.random(), rng.choice(WORDS), None, True][kind]
    return json.dumps(value(3), indent=rng.choice([None, 1, 2, 4, "\t"]),
                      ensure_ascii=rng.random() < 0.5)


def makefile(rng):
    def line():
        return rng.choice([
            f"{name(rng)}: {name(rng)}.o $({name(rng)})\n", "\t@$(CC) -O2 -o $@ $^\n",
            f"{name(rng).upper()} ?= $(shell nproc)\t# {rng.choice(WORDS)}\n", "\t\n",
            ".PHONY: all\n\n", f"ifeq ($({name(rng)}),1)\n\t-rm -f *.{name(rng)} \\\n"])
    return some(rng, 1, 10, line)


def sentence(rng):
    return some(rng, 1, 25, lambda: rng.choice(WORDS)
                + rng.choice([" ", " ", " ", ", ", ". ", "!", ""]))


def nul(rng):
    odd = ["\0", "\0\0", "a", " \0", "\x01", "\x7f", "\x80", "中"]
    return some(rng, 1, 12, lambda: rng.choice(odd))


def long_word(rng):
    """Ten thousand characters that nothing splits."""
    few = ["a", "ab", "Qq", "é", "中", "=-", "!", " ", "\n", "\t ", "\U0001f600",
           "e\u0301", "\u0301"]
    return rng.choice([
        lambda: rng.choice(few) * 10000,
        lambda: some(rng, 9000, 10000, lambda: rng.choice(string.ascii_letters)),
        lambda: some(rng, 9000, 10000, lambda: chr(rng.randint(0x4E00, 0x9FFF))),
        lambda: some(rng, 9000, 10000, lambda: rng.choice(string.punctuation))])()


ALL_KINDS = [any_plane, low_planes, latin, marks, jamo, scripts, emoji, spaces, contractions,
             digits, special, python_code, c_code, json_text, makefile, sentence, nul]


def mixed(rng):
    """Pieces of the others without anything between."""
    return some(rng, 2, 5, lambda: rng.choice(ALL_KINDS)(rng)[:rng.randint(1, 12)])


def texts(seed, count, kinds=(*ALL_KINDS, mixed)):
    rng = random.Random(seed)
    return [kinds[i % len(kinds)](rng) for i in range(count)]


def old_text(text):
    """Only characters that Unicode has had since 3.2, and old emoji: every library's tables, of
    whatever version, agree about these."""
    return "".join(c for c in text if unicodedata.ucd_3_2_0.category(c) != "Cn"
                   or 0x1F300 <= ord(c) <= 0x1F5FF or 0x1F600 <= ord(c) <= 0x1F64F)


def damaged(rng, size):
    """About size bytes that are UTF-8 only in parts."""
    out = bytearray()
    while len(out) < size:
        kind = rng.randint(0, 5)
        if kind == 0:
            out += rng.randbytes(rng.randint(1, 200))
        elif kind == 1:  # sequences that are cut, overlong, of surrogates, or too high
            out += some_bytes(rng)
        elif kind == 2:
            out += bytes(rng.choice(range(0x80, 0x100)) for _ in range(rng.randint(1, 6)))
        else:
            piece = bytearray(rng.choice([scripts, sentence, emoji, mixed])(rng).encode())
            for _ in range(rng.randint(0, 3)):
                at = rng.randrange(len(piece) + 1)
                piece[at:at + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 2))
            out += piece
    return bytes(out)


def some_bytes(rng):
    return b"".join(rng.choice([
        b"\xc0\x80", b"\xc1\xbf", b"\xe0\x80\x80", b"\xe0\x9f\xbf", b"\xed\xa0\x80",
        b"\xed\xbf\xbf", b"\xf0\x80\x80\x80",
        b"\xf0\x8f\xbf\xbf", b"\xf4\x90\x80\x80", b"\xf5\x80\x80\x80",
        b"\xf8\x88\x80\x80\x80", b"\xff", b"\xfe", b"\x80", b"\xbf", b"\xe4", b"\xe4\xb8",
        b"\xf0\x9f", b"\xf0\x9f\x98", b"\xc3", b"a", b" ", b"\xef\xbf\xbd", b"\xef\xbb\xbf"])
        for _ in range(rng.randint(1, 12)))


# ---- conversations ----

# As they stand in the request: a JSON reader that keeps less of them than Python shows.
NUMBERS_AS_WRITTEN = [
    "0", "-0", "7", "-12", "9007199254740993", "18446744073709551616", "-9223372036854775809",
    "123456789012345678901234567890", "0.0", "-0.0", "1.0", "1.50", "0.1", "1e5", "1E5", "1e+2",
    "1e-05", "0.00001", "0.0001", "1e15", "1e16", "1e22", "1e23", "123456789012345680.0",
    "2.5e-7", "1.7976931348623157e308", "5e-324", "3.141592653589793238462643", "100000.0e-5",
    "9999999999999998.0", "0.30000000000000004"]

PIECES = ["<think>", "</think>", "<think>\n", "\n</think>\n\n", "\n", "\n\n", " ", "hello", "Why?",
          "天气", "\U0001f642", "é", "e\u0301", "\"", "\\", "/", "\t", "\r\n", "\0", "\x1f", "\x7f",
          "\u2028", "<tool_response>", "</tool_response>", "<tool_call>", "<|im_end|>", "{{ x }}",
          "{%- if %}", "&<>'", "None", "\u00a0", "\x85", "\v"]


def content(rng):
    return some(rng, 0, 7, lambda: rng.choice(PIECES))


class Written(str):
    """A number as it stands in the request."""


def odd_value(rng, depth=3):
    """Any JSON value."""
    kind = rng.randint(0, 7 if depth else 5)
    if kind == 6:
        return [odd_value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    if kind == 7:
        return {content(rng): odd_value(rng, depth - 1) for _ in range(rng.randint(0, 3))}
    return rng.choice([None, True, False, content(rng), Written(rng.choice(NUMBERS_AS_WRITTEN)),
                       Written(repr(rng.uniform(-1, 1) * 10 ** rng.randint(-20, 20)))])


def tool(rng):
    return {"type": "function", "function": {
        "name": rng.choice(["get_weather", "search", "x"]), "description": content(rng),
        "parameters": {"type": "object", "properties": {
            content(rng): {"type": "string", "default": odd_value(rng)}},
            "required": ["x"], "extra": odd_value(rng)}}}


def tool_call(rng):
    arguments = rng.choice([{content(rng): odd_value(rng) for _ in range(rng.randint(0, 4))},
                            content(rng), odd_value(rng)])
    call = {"name": rng.choice(["get_weather", "天气", "a\"b", ""]), "arguments": arguments}
    return rng.choice([call, {"type": "function", "id": "c1", "function": call}])


def message(rng, role):
    m = {"role": role, "content": content(rng)}
    if role != "system" and rng.random() < 0.1:
        m["content"] = rng.choice([None, "", [{"type": "text", "text": "part"}]])
    if role != "system" and rng.random() < 0.03:
        del m["content"]
    if role == "user" and rng.random() < 0.15:
        m["content"] = f"<tool_response>{content(rng)}</tool_response>" + rng.choice(["", "\n"])
    if role == "assistant":
        if rng.random() < 0.35:
            m["reasoning_content"] = rng.choice([content(rng), content(rng), None, ""])
        if rng.random() < 0.35:
            m["tool_calls"] = [tool_call(rng) for _ in range(rng.randint(0, 3))]
        elif rng.random() < 0.1:
            m["tool_calls"] = None
    return m


def conversation(rng):
    """A request for render, as JSON text."""
    roles = rng.choices(["user", "assistant", "tool", "system", "developer"],
                        [8, 8, 4, 1, 0.3], k=rng.randint(1, 9))
    if rng.random() < 0.4:
        roles.insert(0, "system")
    case = {"messages": [message(rng, r) for r in roles]}
    if rng.random() < 0.5:
        case["tools"] = rng.choice([None, [], *[[tool(rng) for _ in range(rng.randint(1, 3))]] * 4])
    for key in ("add_generation_prompt", "enable_thinking"):
        if rng.random() < 0.7:
            case[key] = rng.random() < 0.5
    return write_request(case, rng.random() < 0.5)


def write_request(value, ascii_only):
    """JSON text, numbers as they are given."""
    if isinstance(value, Written):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{write_request(k, ascii_only)}: {write_request(v, ascii_only)}"
                               for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(write_request(v, ascii_only) for v in value) + "]"
    return json.dumps(value, ensure_ascii=ascii_only)


def conversations(seed, count):
    rng = random.Random(seed)
    return [conversation(rng) for _ in range(count)]
