"""Text: ids, decoding, other tokenizers, training a tokenizer, chat templates and speed, against
the tokenizers and jinja2 packages."""

import glob
import json
import os
import random
import statistics
import subprocess
import time

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers,
                        pre_tokenizers, processors, trainers)

import text_cases
from harness import GOLDEN, Failed, equal, expect, read_json, write_json
from out_checks import merge_pairs, tokenizer_model

OFFICIAL = "tokenizer"  # of DATA
CASES = 6000

# ---- both sides of a comparison ----


def pipe(box, args, data):
    """Runs nibble on bytes of standard input; returns its standard output."""
    try:
        done = subprocess.run([box.nibble, *map(str, args)], input=data, capture_output=True,
                              timeout=120, check=False)
    except subprocess.TimeoutExpired:
        raise Failed(f"nibble {' '.join(map(str, args))}: takes more than two minutes for "
                     f"{len(data) / 1e6:.1f} MB") from None
    if done.returncode != 0:
        raise Failed(f"nibble {' '.join(map(str, args))}: exit {done.returncode}: "
                     f"{done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def jsonl(box, args, lines):
    """Runs nibble on lines of JSON, given as text or as values; returns one value per line."""
    data = "".join((x if isinstance(x, str) else json.dumps(x, ensure_ascii=i % 2)) + "\n"
                   for i, x in enumerate(lines)).encode()
    rows = [json.loads(row) for row in pipe(box, [*args, "--jsonl"], data).splitlines()]
    equal(f"lines that {args[0]} --jsonl wrote", len(rows), len(lines))
    return rows


class Both:
    """One tokenizer, in nibble and in the package."""

    def __init__(self, box, directory, tokenizer=None):
        self.box, self.model = box, directory
        self.theirs = tokenizer or Tokenizer.from_file(os.path.join(directory, "tokenizer.json"))

    def encode(self, texts, *args):
        rows = jsonl(self.box, ["tokenize", "-m", self.model, *args],
                     [{"text": t} for t in texts])
        return [row["ids"] for row in rows]

    def encode_theirs(self, texts, *args):
        self.theirs.encode_special_tokens = "--no-special" in args
        return [e.ids for e in self.theirs.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, rows):
        return [row["text"] for row in jsonl(self.box, ["detokenize", "-m", self.model],
                                             [{"ids": ids} for ids in rows])]

    def decode_theirs(self, rows):
        return self.theirs.decode_batch(rows, skip_special_tokens=False)

    def compare(self, texts, *args):
        """Same ids for every text, and the same text for these ids."""
        ids = same_results("texts", texts, lambda t: self.encode(t, *args),
                           lambda t: self.encode_theirs(t, *args))
        same_results("id lists", ids, self.decode, self.decode_theirs)
        return ids


def same_results(what, inputs, ours, theirs):
    """Two functions from lists to lists agree; if not, says on what least inputs they do not."""
    got, want = ours(inputs), theirs(inputs)
    bad = [x for x, a, b in zip(inputs, got, want) if a != b]
    if not bad:
        return got
    found = {}
    for x in sorted(bad, key=len)[:3]:
        x = shrink(x, lambda x: ours([x]) != theirs([x]))
        found[str(x)] = f"{show(x)} gives {show(ours([x])[0])}, expected {show(theirs([x])[0])}"
    raise Failed(f"{len(bad)} of {len(inputs)} {what} differ: " + "; ".join(found.values()))


def show(x):
    text = ascii(x)
    return text if len(text) <= 160 else f"{text[:160]}... ({len(x)})"


def shrink(x, differs, tries=400):
    """Leaves out of a text or list what is not needed for the difference."""
    size = len(x)
    while size:
        at = 0
        while at < len(x) and tries:
            shorter, tries = x[:at] + x[at + size:], tries - 1
            if differs(shorter):
                x = shorter
            else:
                at += size
        size //= 2
    return x


def read_lines(path):
    """Lines end in a line feed, and in nothing else that Unicode has for that."""
    with open(path, encoding="utf-8", errors="replace", newline="\n") as f:
        return f.readlines()


def write_text(path, text):
    with open(path, "w", encoding="utf-8", newline="") as f:
        f.write(text)


def official(box):
    return Both(box, box.data_path(OFFICIAL))


# ---- Qwen's tokenizer ----


def given_cases(box):
    """The cases of DATA, which an older version of the package computed."""
    both = official(box)
    cases = list(map(json.loads, read_lines(
        box.data_path("tokenizer/cases.jsonl"))))
    for case, ids, text in zip(cases, both.encode([c["text"] for c in cases]),
                               both.decode([c["ids"] for c in cases])):
        equal(f"ids of {show(case['text'])}", ids, case["ids"])
        equal(f"text of {show(case['ids'])}", text, case["decoded"])
    return f"{len(cases)} cases"


def random_texts(box, *args):
    texts = ["", *text_cases.texts(11, CASES)]
    official(box).compare(texts, *args)
    return f"{len(texts)} texts"


def long_words(box):
    official(box).compare(text_cases.texts(12, 24, [text_cases.long_word]))


def every_character(box):
    """All planes that have characters, in several places; the others now and then."""
    both, rng, count = official(box), random.Random(24), 0
    for plane in range(17):
        share = 1 if plane in (0, 1, 2, 3, 14) else 0.02
        characters = [chr(c) for c in range(plane << 16, plane + 1 << 16)
                      if not 0xD800 <= c <= 0xDFFF and rng.random() < share]
        both.compare([f"a{c}b 1{c} \n{c}{c}'s.{c}" for c in characters])
        count += len(characters)
    return f"{count} characters"


def normal_form(box):
    """Whatever decomposes, taken apart, in order and out of order, with other marks between; and
    marks at random, also of blocks where the package knows no marks yet."""
    texts = text_cases.decomposed(25) + text_cases.texts(26, 50000, [text_cases.any_marks])
    official(box).compare(texts)
    return f"{len(texts)} texts"


def long_stretches(box):
    """A megabyte or so of one thing: the time does not grow with the square of it."""
    both, n = official(box), 1000000
    for text in ("a" * n, " " * n, "\n" * n, " " * n + "x", "的" * n, "!" * n + "\n" * n,
                 "\u0301" * n, "a" + "\u0301\u0327" * (n // 2), "\u1100\u1161\u11a8" * (n // 3),
                 "<|im_start" * (n // 10), "<|im_start|>" * (n // 10)):
        try:
            both.compare([text])
        except Failed as e:
            raise Failed(f"{show(text)}: {e}") from None


def random_ids(box):
    """Any ids in a row: what is no UTF-8 in them becomes U+FFFD in the same places, and ids
    without a token are left out."""
    both, rng = official(box), random.Random(13)
    size = both.theirs.get_vocab_size()
    odd = [i for i in range(size) if "\ufffd" in both.theirs.decode([i])]
    rows = [[rng.choice(odd) if rng.random() < 0.7 else rng.randrange(size + 1000)
             for _ in range(rng.randint(0, 24))] for _ in range(3000)]
    rows += [[i] for i in odd] + [list(range(size)), list(range(size - 1, -1, -1))]
    same_results("id lists", rows, both.decode, both.decode_theirs)
    return f"{len(rows)} lists"


def plain_output(box):
    """Without --jsonl: one line of ids, and bytes as they are, whether UTF-8 or not."""
    both, text = official(box), "I'm 你好<|im_end|>\n\0 é"
    ids = both.encode_theirs([text])[0]
    write_text(box.path("text"), text)
    for args in (["--text", text.replace("\0", "")], ["--file", box.path("text")]):
        want = ids if args[0] == "--file" else both.encode_theirs([args[1]])[0]
        lines = box.run("tokenize", "-m", both.model, *args).splitlines()
        equal(f"lines of tokenize {args[0]}", len(lines), 1)
        equal(f"tokenize {args[0]}", [int(i) for i in lines[0].replace(",", " ").split()], want)
    listed = ",".join(map(str, ids))
    equal("detokenize", pipe(box, ["detokenize", "-m", both.model, "--ids", listed], b""),
          text.encode())
    bytes_ = pre_tokenizers.ByteLevel.alphabet()
    vocab = both.theirs.get_vocab()
    first = vocab[next(c for c in bytes_ if both.theirs.decode([vocab[c]]) == "\ufffd")]
    got = pipe(box, ["detokenize", "-m", both.model, "--ids", f"{first},{first}"], b"")
    expect(len(got) == 2 and got[0] == got[1] >= 0x80, f"detokenize of two bytes: {got}")


def round_trip(box):
    """decode(encode(x)) is x in normal form C, as the package has it: its tables are those of
    Unicode 9, so later compositions stay apart. Chat tokens are taken out of a text before it is
    normalised, hence only texts without them."""
    both, nfc = official(box), normalizers.NFC()
    tokens = [t.content for t in both.theirs.get_added_tokens_decoder().values()]
    texts = [t for t in text_cases.texts(14, CASES) if not any(token in t for token in tokens)]
    same_results("texts", texts, lambda x: both.decode(both.encode(x)),
                 lambda x: list(map(nfc.normalize_str, x)))
    return f"{len(texts)} texts"


def from_gguf(box):
    """A GGUF file holds the whole tokenizer."""
    tokenizer_model(box)
    texts = text_cases.texts(15, 600)
    Both(box, box.path("m.gguf"), official(box).theirs).compare(texts)


# ---- corpora ----


def corpus_files(box):
    root = box.data_path("corpora")
    return sorted(p for p in glob.glob(os.path.join(root, "**"), recursive=True)
                  if os.path.isfile(p))


def corpora_in_lines(box):
    both, total = official(box), 0
    for path in corpus_files(box):
        lines = read_lines(path)
        same_results(f"lines of {os.path.basename(path)}", lines, both.encode, both.encode_theirs)
        total += sum(len(line.encode()) for line in lines)
    expect(total > 50e6, f"only {total / 1e6:.1f} MB in data/corpora")
    return f"{total / 1e6:.1f} MB"


def corpora_in_pieces(box):
    """Pieces of up to 1 MB that begin and end anywhere, and whole files."""
    both, rng, total = official(box), random.Random(16), 0
    for path in corpus_files(box):
        text = "".join(read_lines(path))
        pieces, start = [], 0
        while start < len(text):
            end = start + rng.randint(1, 1000000)
            pieces.append(text[start:end])
            start = end
        same_results(f"pieces of {os.path.basename(path)}", pieces, both.encode,
                     both.encode_theirs)
        total += len(text.encode())
        if len(text) < 2000000:
            same_file(both, path)
            total += len(text.encode())
    return f"{total / 1e6:.1f} MB"


def same_file(both, path):
    """tokenize --file, where the package gets Python's reading of the file."""
    with open(path, "rb") as f:
        data = f.read()

    def ours(parts):
        rows = []
        for part in parts:
            with open(both.box.path("part"), "wb") as f:
                f.write(part)
            out = both.box.run("tokenize", "-m", both.model, "--file", both.box.path("part"))
            rows.append([int(i) for i in out.replace(",", " ").split()])
        return rows
    same_results(os.path.basename(path), [data], ours, lambda parts: both.encode_theirs(
        [p.decode(errors="replace") for p in parts]))
    return len(data)


def damaged_files(box):
    both, rng, total = official(box), random.Random(17), 0
    blobs = [text_cases.damaged(rng, 300000) for _ in range(10)]
    blobs += [rng.randbytes(500000), b"", b"\xef\xbb\xbfbom", b"a\xf0\x9f\x98", b"\xe4"]
    for blob in blobs:
        with open(box.path("blob"), "wb") as f:
            f.write(blob)
        total += same_file(both, box.path("blob"))
    return f"{total / 1e6:.1f} MB"


# ---- other tokenizers ----

GPT4_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
              r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
DEEPSEEK_CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
DEEPSEEK_SPLIT = (r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"
                  r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
                  r"\s*[\r\n]+|\s+(?!\S)|\s+")


def split(pattern):
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def byte_level(use_regex=False, add_prefix_space=False):
    return pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=use_regex)


def learn(box, pre_tokenizer, corpus="dolly15k/databricks-dolly-15k.reassembled.jsonl",
          normalizer=None, vocab_size=3000, **model):
    """A byte-level BPE that the package trains on some lines of a corpus."""
    t = Tokenizer(models.BPE(**model))
    if normalizer:
        t.normalizer = normalizer
    t.pre_tokenizer, t.decoder = pre_tokenizer, decoders.ByteLevel()
    t.post_processor = processors.ByteLevel(trim_offsets=False)
    lines = read_lines(box.data_path(f"corpora/{corpus}"))
    t.train_from_iterator(lines[:1500], trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"], show_progress=False))
    return t


def save(box, tokenizer):
    """A directory with this tokenizer, given as the package's object or as JSON."""
    os.makedirs(box.path("t"), exist_ok=True)
    value = json.loads(tokenizer.to_str()) if isinstance(tokenizer, Tokenizer) else tokenizer
    write_json(value, box.path("t"), "tokenizer.json")
    return box.path("t")


def check_other(box, tokenizer, count=600):
    both = Both(box, save(box, tokenizer))
    texts = ["", *map(text_cases.old_text, text_cases.texts(18, count)
                      + text_cases.texts(28, 8, [text_cases.long_word]))]
    both.compare(texts)
    both.compare(texts[:200], "--no-special")


def gpt2(box):
    check_other(box, learn(box, byte_level(use_regex=True)))


def gpt2_prefix_space(box):
    check_other(box, learn(box, byte_level(use_regex=True, add_prefix_space=True)))


def llama3(box):
    """Words of the vocabulary are taken whole, whether merges lead there or not."""
    t = learn(box, pre_tokenizers.Sequence([split(GPT4_SPLIT), byte_level()]))
    value = json.loads(t.to_str())
    value["model"] |= {"ignore_merges": True, "merges": value["model"]["merges"][::2]}
    value["post_processor"] = json.loads(processors.Sequence([
        processors.ByteLevel(trim_offsets=False), processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])]).__getstate__())
    check_other(box, value)


def deepseek(box):
    check_other(box, learn(
        box, pre_tokenizers.Sequence([split(r"\p{N}{1,3}"), split(DEEPSEEK_CJK),
                                      split(DEEPSEEK_SPLIT), byte_level()]),
        normalizer=normalizers.Sequence([])))


def merges_as_strings(box):
    value = json.loads(learn(box, byte_level(use_regex=True)).to_str())
    value["model"]["merges"] = [" ".join(m) for m in value["model"]["merges"]]
    check_other(box, value)


def chinese(box):
    t = learn(box, pre_tokenizers.Sequence([split(GPT4_SPLIT), byte_level()]),
              "kdconv_zh/kdconv_devtest_dialogues.jsonl", normalizers.NFC(), 1200)
    check_other(box, t)
    lines = read_lines(box.data_path("corpora/chinese_poetry/poetry_subset.jsonl"))
    Both(box, box.path("t")).compare(lines[:300])


ADDED = [
    AddedToken("<l>", lstrip=True, normalized=False, special=True),
    AddedToken("<r>", rstrip=True, normalized=False, special=True),
    AddedToken("<lr>", lstrip=True, rstrip=True, normalized=True),
    AddedToken("word", single_word=True, normalized=False),
    AddedToken("SW", single_word=True, lstrip=True, rstrip=True, special=True, normalized=False),
    AddedToken("e\u0301x", normalized=True),  # normalised, so it is found as U+00E9 x
    AddedToken("e\u0301y", normalized=False),  # only as written
    AddedToken("\u00e9z", normalized=True, special=True),
    AddedToken("<in<l>side>", normalized=False), AddedToken("<l><r>", normalized=False),
    AddedToken("two words", normalized=True), AddedToken("中文", normalized=False, special=True),
    AddedToken("\u0301", normalized=True)]

# White space as tokens, as in GPT-NeoX and ModernBERT. Not together with rstrip: the package then
# gives the same characters twice, or gives up.
ADDED_SPACES = [AddedToken(" " * n, normalized=True) for n in (2, 3, 4, 8)] + [
    AddedToken("\t", normalized=False), AddedToken("[MASK]", lstrip=True, special=True)]

AROUND = ["", "", " ", "  ", "\n", "\t", "\u3000", "\u00a0", "a", "Z", "9", "_", ".", "-", "é",
          "e\u0301", "\u0301", "中", "的", "\U0001f600", "<", ">", "e", "\u0338", "'s"]


def added_tokens(box, normalizer, tokens):
    """Tokens that are recognised before or after normalisation, alone or with what is around."""
    t = learn(box, byte_level(use_regex=True), normalizer=normalizer, vocab_size=1000)
    for token in tokens:  # one at a time, for add_special_tokens puts its own first
        (t.add_special_tokens if token.special else t.add_tokens)([token])
    rng, names = random.Random(19), [a.content for a in tokens]
    texts = ["".join(rng.choice(AROUND) + rng.choice([*names, ""])
                     for _ in range(rng.randint(1, 5))) + rng.choice(AROUND)
             for _ in range(1500)]
    both = Both(box, save(box, t))
    both.compare(texts)
    both.compare(texts, "--no-special")


# ---- what is no byte-level BPE ----


def refused(box, change, *names):
    """A tokenizer that would give other ids here is refused, and the message names why."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    t = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    t.pre_tokenizer, t.decoder = byte_level(use_regex=True), decoders.ByteLevel()
    value = json.loads(t.to_str())
    Both(box, save(box, value)).compare(["a b"])
    change(value)
    Tokenizer.from_str(json.dumps(value))  # the package takes it
    message = box.refuse("tokenize", "-m", save(box, value), "--text", "a b")
    equal("lines of the message", message.count("\n"), 1)
    expect(any(n.lower() in message.lower() for n in names),
           f"the message does not name {' or '.join(names)}: {message.strip()}")


def replaced(key, theirs):
    """Replaces one part of a tokenizer by one of the package's."""
    def change(value):
        value[key] = json.loads(theirs.__getstate__())
    return change


def model_with(**values):
    def change(value):
        value["model"] |= values
    return change


def merged_with_next(value):
    value["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
        json.loads(pre_tokenizers.Split(Regex(GPT4_SPLIT), "merged_with_next").__getstate__()),
        value["pre_tokenizer"] | {"use_regex": False}]}


REFUSED = [
    ("model WordPiece", replaced("model", models.WordPiece({"[UNK]": 0, "a": 1})), "WordPiece"),
    ("model Unigram", replaced("model", models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0)),
     "Unigram"),
    ("normalizer Lowercase", replaced("normalizer", normalizers.Lowercase()), "Lowercase"),
    ("pre_tokenizer Metaspace", replaced("pre_tokenizer", pre_tokenizers.Metaspace()),
     "Metaspace"),
    ("decoder WordPiece", replaced("decoder", decoders.WordPiece()), "WordPiece"),
    ("dropout", model_with(dropout=0.1), "dropout"),
    ("Split of behaviour MergedWithNext", merged_with_next, "MergedWithNext"),
    ("end_of_word_suffix", model_with(end_of_word_suffix="</w>"), "end_of_word_suffix"),
]

# ---- training a tokenizer ----


def train(box, out, vocab, files, *args):
    os.makedirs(box.path(out), exist_ok=True)
    box.run("tokenizer", "train", "--vocab", vocab, "-o", box.path(f"{out}/tokenizer.json"),
            *args, *files)
    with open(box.path(f"{out}/tokenizer.json"), "rb") as f:
        return f.read()


def compare_training(box, files, texts, vocab, min_count=2):
    """nibble learns from files what the package learns from texts with the same rules: the same
    merges in the same order, and the same ids."""
    got = json.loads(train(box, "t", vocab, files, "--min-count", min_count))
    whole, t = Tokenizer.from_str(json.dumps(got)), Tokenizer(models.BPE())
    t.normalizer, t.pre_tokenizer = whole.normalizer, whole.pre_tokenizer
    t.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab - len(got["added_tokens"]), min_frequency=min_count, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    want = json.loads(t.to_str())["model"]
    merges = merge_pairs(got)
    for i, (a, b) in enumerate(zip(merges, want["merges"])):
        equal(f"merge {i} of {len(want['merges'])}", a, list(b))
    equal("merges", len(merges), len(want["merges"]))
    expect(got["model"]["vocab"] == want["vocab"], "the merges agree, the vocabularies do not")
    return len(merges)


def training_texts(box):
    """English, Chinese, and words without any meaning that are all as frequent as each other."""
    rng, texts = random.Random(20), []
    for name in ("tinyshakespeare/input.txt", "kdconv_zh/kdconv_devtest_dialogues.jsonl"):
        texts.append("".join(read_lines(box.data_path(f"corpora/{name}")))[:600000])
    words = ["".join(rng.choices("abcdeé中", k=rng.randint(1, 9))) for _ in range(3000)]
    return [*texts, " ".join(words * 3)]


def write_texts(box, texts):
    """One file each. A document is without the line ends around it."""
    files = [box.path(f"{i}.txt") for i in range(len(texts))]
    for path, text in zip(files, texts):
        write_text(path, text)
    return files, [text.strip("\r\n") for text in texts]


def training_is_deterministic(box):
    files, _ = write_texts(box, training_texts(box))
    first = train(box, "a", 2000, files, "--threads", 1)
    for threads in (1, 2, 7):
        again = train(box, f"b{threads}", 2000, files[::-1], "--threads", threads)
        expect(again == first, f"other bytes with {threads} threads and files in other order")


def training_is_theirs(box, vocab, *numbers):
    files, texts = write_texts(box, [training_texts(box)[i] for i in numbers])
    return f"{compare_training(box, files, texts, vocab)} merges"


def training_small(box):
    """Few letters in short texts, where every kind of tie and overlap comes up."""
    rng = random.Random(27)
    for _ in range(60):
        letters = rng.choice(["a", "ab", "abc", "abcdé", "abcdefgh中的", "ab \n"])
        words = ["".join(rng.choices(letters, k=rng.randint(1, 20))) for _ in range(60)]
        files, texts = write_texts(box, [" ".join(rng.choices(words, k=rng.randint(1, 500)))])
        compare_training(box, files, texts, rng.choice([282, 283, 400, 5000]),
                         rng.choice([1, 2, 3, 10]))


def training_documents(box):
    """Documents, chat tokens between texts, and JSONL."""
    lines = read_lines(box.data_path("corpora/gsm8k/train.jsonl"))[:600]
    texts = [json.loads(line)["question"] for line in lines]
    write_text(box.path("a.txt"), "\n<|endoftext|>\n\n".join(texts))
    write_text(box.path("b.txt"), "<|im_end|>".join(texts))
    write_text(box.path("c.jsonl"), "".join(json.dumps({"text": t}) + "\n" for t in texts))
    for name in ("a.txt", "b.txt", "c.jsonl"):
        compare_training(box, [box.path(name)], texts, 1500)


def trained_one_works(box):
    """The package reads it, with the same results; it has all of Qwen's chat tokens."""
    texts = training_texts(box)
    train(box, "t", 3000, write_texts(box, texts)[0])
    both = Both(box, box.path("t"))
    equal("entries", both.theirs.get_vocab_size(), 3000)
    both.compare(text_cases.texts(21, 1000) + texts)
    want, got = (read_json(d, "tokenizer.json")["added_tokens"]
                 for d in (box.data_path(OFFICIAL), box.path("t")))
    equal("chat tokens", [{k: v for k, v in t.items() if k != "id"} for t in got],
          [{k: v for k, v in t.items() if k != "id"} for t in want])


# ---- chat templates ----


def template(directory):
    """A model's chat template, set up as transformers does."""
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                        extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = lambda x: json.dumps(x, ensure_ascii=False)
    return env.from_string(read_json(directory, "tokenizer_config.json")["chat_template"])


def render_theirs(chat, request):
    case = json.loads(request)
    return chat.render(**({"tools": None, "add_generation_prompt": False} | case))


def config_of(model):
    return os.path.join(GOLDEN, "chat", model)


def render_given_cases(box):
    cases = list(map(json.loads, read_lines(os.path.join(GOLDEN, "chat/cases.jsonl"))))
    for model in sorted({c["model"] for c in cases}):
        mine = [c for c in cases if c["model"] == model]
        rows = jsonl(box, ["render", "-m", config_of(model)], [c["case"] for c in mine])
        for case, row in zip(mine, rows):
            equal(f"{model}: {show(json.dumps(case['case']))}", row["text"], case["text"])
    return f"{len(cases)} cases"


def render_random(box, model):
    chat, requests = template(config_of(model)), text_cases.conversations(22, 500)
    rows = jsonl(box, ["render", "-m", config_of(model)], requests)
    for request, row in zip(requests, rows):
        got, want = row["text"], render_theirs(chat, request)
        at = next((i for i, (a, b) in enumerate(zip(got, want)) if a != b),
                  min(len(got), len(want)))
        expect(got == want, f"character {at} of {request}: {show(got[at - 20:at + 60])}, "
                            f"expected {show(want[at - 20:at + 60])}")
    return f"{len(rows)} conversations"


def render_plain(box, model):
    """Without --jsonl: the text itself."""
    chat, directory = template(config_of(model)), config_of(model)
    for request in text_cases.conversations(23, 10):
        got = pipe(box, ["render", "-m", directory], request.encode())
        equal(f"render of {request}", got, render_theirs(chat, request).encode())


def render_refused(box, model):
    """Where the template fails, render fails."""
    chat, directory = template(config_of(model)), config_of(model)
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}
    for messages in ([], [{"role": "system", "content": None}], [{"role": "system"}], [call]):
        request = json.dumps({"messages": messages})
        try:
            raise AssertionError(f"the template takes it: {render_theirs(chat, request)}")
        except (TemplateError, TypeError):
            done = subprocess.run([box.nibble, "render", "-m", directory], input=request,
                                  capture_output=True, text=True, timeout=60, check=False)
            equal(f"exit code for {request}", done.returncode, 1)
            equal(f"lines of the message for {request}", done.stderr.count("\n"), 1)


# ---- speed ----

RATE, LOAD = 3, 2  # nibble encodes and loads at least this many times as fast


def seconds(times, work):
    """The median of several runs."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def speed(box):
    """One thread each, warm, the same lines of a text."""
    both = official(box)
    rows = [speed_of(both, "dolly15k/databricks-dolly-15k.reassembled.jsonl", 4000000),
            speed_of(both, "chinese_poetry/poetry_subset.jsonl", 700000)]
    path = os.path.join(both.model, "tokenizer.json")
    load = 1000 * seconds(5, lambda: Tokenizer.from_file(path))
    ours = statistics.median(row["load_ms"] for row in rows)
    table = "\n".join(
        [f"      {'':28}{'nibble':>10}{'package':>10}{'times':>8}"]
        + [f"      {row['name'] + ', ' + k:28}{row[f'{k}_mb_per_s']:10.2f}{row[f'their_{k}']:10.2f}"
           f"{row[f'{k}_mb_per_s'] / row[f'their_{k}']:8.2f}"
           for row in rows for k in ("encode", "decode")]
        + [f"      {'load, ms':28}{ours:10.1f}{load:10.1f}{load / ours:8.2f}"])
    for row in rows:
        expect(row["encode_mb_per_s"] >= RATE * row["their_encode"],
               f"{row['name']}: encodes less than {RATE} times as fast\n{table}")
    expect(ours * LOAD <= load, f"loads less than {LOAD} times as fast\n{table}")
    return "MB/s\n" + table


def speed_of(both, name, characters):
    path = both.box.path("text")
    with open(both.box.data_path(f"corpora/{name}"), encoding="utf-8") as f:
        write_text(path, f.read(characters))
    lines, size = read_lines(path), os.path.getsize(path) / 1e6
    row = json.loads(both.box.run("bench", "tokenizer", "-m", both.model, "--file", path,
                                  "--threads", 1, "--json"))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # read at every call
    try:
        ids = both.encode_theirs(lines)
        equal("tokens", row["tokens"], sum(map(len, ids)))
        encode = seconds(3, lambda: both.theirs.encode_batch_fast(lines, add_special_tokens=False))
        decode = seconds(3, lambda: both.decode_theirs(ids))
    finally:
        del os.environ["TOKENIZERS_PARALLELISM"]
    return row | {"name": name.split("/", maxsplit=1)[0], "their_encode": size / encode,
                  "their_decode": size / decode}


TEMPLATES = ("Qwen3-4B", "Qwen3-4B-Instruct-2507")
CHECKS = [
    ("tokenize: the cases of DATA", given_cases),
    ("tokenize: random texts of every kind", random_texts),
    ("tokenize: random texts, --no-special", random_texts, "--no-special"),
    ("tokenize: words of 10,000 characters", long_words),
    ("tokenize: long stretches of one thing", long_stretches),
    ("tokenize: every character", every_character),
    ("tokenize: normal form C", normal_form),
    ("tokenize: then detokenize gives normal form C", round_trip),
    ("tokenize: --text, --file; detokenize: --ids", plain_output),
    ("tokenize: from a GGUF file", from_gguf),
    ("tokenize: corpora, line by line", corpora_in_lines),
    ("tokenize: corpora, in large pieces", corpora_in_pieces),
    ("tokenize: files that are no UTF-8", damaged_files),
    ("detokenize: random ids", random_ids),
    ("tokenizer.json: GPT-2", gpt2),
    ("tokenizer.json: GPT-2 with add_prefix_space", gpt2_prefix_space),
    ("tokenizer.json: Llama 3, ignore_merges", llama3),
    ("tokenizer.json: DeepSeek, splits in a row", deepseek),
    ("tokenizer.json: merges as strings", merges_as_strings),
    ("tokenizer.json: Chinese, a small vocabulary", chinese),
    ("tokenizer.json: added tokens", added_tokens, None, ADDED),
    ("tokenizer.json: added tokens, with a normalizer", added_tokens, normalizers.NFC(), ADDED),
    ("tokenizer.json: added tokens of white space", added_tokens, None, ADDED_SPACES),
    *[(f"tokenizer.json: refused: {what}", refused, change, *names)
      for what, change, *names in REFUSED],
    ("tokenizer train: the same bytes for any number of threads", training_is_deterministic),
    *[(f"tokenizer train: the package's merges, {what}", training_is_theirs, vocab, *numbers)
      for what, vocab, *numbers in (("English", 4000, 0), ("Chinese", 3000, 1), ("ties", 1500, 2),
                                    ("all", 6000, 0, 1, 2))],
    ("tokenizer train: the package's merges, small texts", training_small),
    ("tokenizer train: the package's merges, documents", training_documents),
    ("tokenizer train: the package reads the result", trained_one_works),
    ("render: the cases of tests/golden", render_given_cases),
    *[(f"render: random conversations, {model}", render_random, model) for model in TEMPLATES],
    *[(f"render: one conversation as text, {model}", render_plain, model) for model in TEMPLATES],
    *[(f"render: what the template refuses, {model}", render_refused, model)
      for model in TEMPLATES],
    ("tokenize: speed", speed),
]
