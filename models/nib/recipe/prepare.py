#!/usr/bin/env python3
"""Makes the training data of the small model from the corpora and from qa.tsv.

    prepare.py CORPORA OUT

Writes to OUT: train-stories.txt and train-*.jsonl to train on, held-out.txt and held-out.jsonl to
measure on, tokenizer.txt to train the tokenizer on. The same corpora give the same bytes. Prints
what each file holds, whether a held-out question of the identity set got in, and whether a question
has two answers.
"""
import collections
import itertools
import json
import pathlib
import random
import re
import sys
import unicodedata

SEED = 20
END = "<|endoftext|>"
CJK = "[\u2010-\u206f\u3000-\u9fff\uff00-\uffef]"

# How often an answer of a source is written at least, and each wording of its question. The
# wordings vary from copy to copy.
COPIES = {"who": (0, 10), "contrast": (24, 6), "say": (10, 4), "qa": (10, 4), "table": (8, 2),
          "sums": (6, 2), "smalltalk": (2, 2)}

STORY_CHARS = 840        # stories up to this length become answers
ANY_STORY = 0.15         # share of them that are asked for without a topic
SAME_ANSWER = 60         # questions of the chit-chat with the same answer
JOINED = 7000            # conversations made of unrelated questions
ZH_JOINED = 0.35         # share of them that are in Chinese
CHARACTER_COUNT = 200    # how often a Chinese character is in the tokenizer's text at least
HELD_OUT_STORIES = 80
HOLD_OUT_EVERY = 40      # of the chit-chat

COMPANIES = re.compile(r"\b(siri|alexa|cortana|google|bixby|eliza|openai|chatgpt|microsoft|amazon|"
                       r"apple's|databricks|dolly|facebook|twitter|tay|hal|jarvis|wall-e)\b", re.I)
UNWANTED = re.compile(r"\b(fuck\w*|shit\w*|bitch\w*|bastard\w*|ass|asshole\w*|damn\w*|hell|crap\w*|"
                      r"sex\w*|porn\w*|nude\w*|naked|rape\w*|nazi\w*|slut\w*|whore\w*|dick|cock|"
                      r"penis|vagina|boob\w*|drug\w*|cocaine|heroin|pot|weed|drunk|racist|nigg\w*|"
                      r"gay|lesbian|trans\w*|fart\w*|piss\w*|murder\w*|terroris\w*|hitler|trump|"
                      r"enslave|suck\w*|hooker\w*|moron|idiot\w*|bomb\w*|virgin)\b", re.I)

MARKS = " .?!\u3002\uff1f\uff01"
# Marks by language, of questions and of other sentences.
ENDS = {("en", True): "?", ("en", False): ".!",
        ("zh", True): "\uff1f", ("zh", False): "\u3002\uff01"}


def letters(text):
    """Text as held-out questions are compared: lower case letters and digits."""
    return "".join(c for c in text.lower() if unicodedata.category(c)[0] in "LN")


def normal(text):
    """Text as questions are compared. Signs count where there are numbers."""
    kept = "LNS" if re.search("[0-9]", text) else "LN"
    return "".join(c for c in text.lower() if unicodedata.category(c)[0] in kept
                   or (c == "-" and kept == "LNS")) or text.strip()


def tidy(text):
    text = text.replace("\u2019", "'").replace("\u2018", "'").replace("\u2026", "...")
    return re.sub(r"\s+", " ", text).strip()


def wanted(*texts):
    return not any(UNWANTED.search(t) or COMPANIES.search(t) for t in texts)


def chat(*turns):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": t} for i, t in enumerate(turns)]


class Word(str):
    """A field of a table row: {0:C} begins with a capital, "-" has no text."""

    def __format__(self, spec):
        if self == "-":
            raise LookupError("empty field")
        return self[:1].upper() + self[1:] if spec == "C" else str(self)


Fact = collections.namedtuple("Fact", "source language kind prompts answer")


class Phrases:
    """qa.tsv: sections by language and kind, and tables."""

    def __init__(self, path):
        self.lines = collections.defaultdict(list)
        self.forms = collections.defaultdict(list)
        self.rows = collections.defaultdict(list)
        language = kind = None
        text = path.read_text(encoding="utf-8")
        for line in text.splitlines():
            if line.startswith("["):
                language, kind = line.strip("[]").split(" ")
            elif line and not line.startswith("#"):
                self.add(language, kind, line)
        small = set(re.findall(r"\b[a-z']+", text))
        self.proper = {w for w in re.findall(r"(?<=[a-z,] )[A-Z][\w']*", text)
                       if w.lower() not in small}

    def add(self, language, kind, line):
        prompts, _, answer = line.partition("\t")
        form = re.match("(en|zh): ", prompts)
        if form:
            self.forms[language, kind].append((form[1], prompts[4:].split(" | "), answer))
        elif language in ("table", "contrast"):
            self.rows[language, kind].append([Word(field) for field in line.split("|")])
        else:
            self.lines[language, kind].append((prompts.replace("_", " ").split(" | "), answer))

    def of(self, language, kind):
        return [p for prompts, _ in self.lines[language, kind] for p in prompts]

    def facts(self):
        """All questions of the file, those first that shall keep their answer."""
        for source, kind in (("who", "who"), ("contrast", "contrast"), ("say", "say"),
                             ("qa", "chat"), ("qa", "ask")):
            for language in ("en", "zh"):
                for prompts, answer in self.lines[language, kind]:
                    answer = answer or self.lines[language, "self"][0][1]
                    yield Fact(source, language, kind, prompts, answer)
        for table, rows in self.rows.items():
            for (language, prompts, answer), fields in itertools.product(self.forms[table], rows):
                try:
                    yield Fact(table[0], language, "ask", [p.format(*fields) for p in prompts],
                               answer.format(*fields))
                except LookupError:
                    pass
        yield from self.sums()

    def sums(self):
        facts = [("plus", a, b, a + b) for a in range(21) for b in range(21)]
        facts += [("minus", a, b, a - b) for a in range(21) for b in range(a + 1)]
        facts += [("times", a, b, a * b) for a in range(1, 11) for b in range(1, 11)]
        facts += [(kind, a, a + 1) for kind in ("next", "before") for a in range(1, 31)]
        facts += [("more", a, b) for a in range(1, 13) for b in range(a)]
        for language, (kind, *numbers) in itertools.product(("en", "zh"), facts):
            for prompts, answer in self.lines[language, kind]:
                yield Fact("sums", language, "ask", [p.format(*numbers) for p in prompts],
                           answer.format(*numbers))

    def vary(self, rng, fact, prompt):
        """The question as somebody else might put it."""
        if fact.kind == "say":
            bare = prompt.rstrip(MARKS) or prompt
            ends = ENDS[fact.language, prompt[-1] in "?\uff1f"]
            return rng.choice((prompt, bare, bare.lower(), bare + rng.choice(ends)))
        luck, language = rng.random(), fact.language
        if luck < 0.14:
            return prompt.rstrip(MARKS) or prompt
        if luck < 0.28:
            bare = prompt.lower().rstrip(MARKS) or prompt
            return bare.replace("'", "") if rng.random() < 0.3 else bare
        question = prompt[-1] in "?\uff1f"
        openers = self.of(language, "opener")
        closers = self.of(language, "closer") if prompt[-1] in MARKS else []
        if question:
            openers = openers + self.of(language, "asker")
            closers = closers and closers + self.of(language, "wonder")
        if luck < 0.85:
            opener = rng.choice(openers)
            first = re.match(r"[\w']*", prompt)[0]
            known = first in self.proper or first[:2] in ("I", "I'")
            if opener[-2:] in (", ", "t ") and not known:
                prompt = prompt[0].lower() + prompt[1:]
            prompt = opener + prompt
        if luck > 0.65 and closers and fact.kind != "chat":
            prompt += rng.choice(closers)
        return prompt


class Book:
    """Questions that have an answer already: the first one stays. Held-out ones never get in."""

    def __init__(self, held_out):
        self.held_out = [letters(q) for q in held_out]
        self.answers = {}
        self.refused = collections.Counter()

    def holds(self, question):
        text = letters(question)
        return any(h in text for h in self.held_out)

    def add(self, question, answer):
        """Whether the question is new."""
        key = normal(question)
        if self.holds(question):
            self.refused["held-out"] += 1
        elif key in self.answers:
            self.refused["same" if self.answers[key] == answer else "two answers"] += 1
        else:
            self.answers[key] = answer
            return True
        return False

    def agrees(self, question, answer):
        known = self.answers.setdefault(normal(question), answer)
        return known == answer and not self.holds(question)


def write_out(phrases, rng, book, facts, out):
    """Each fact in its wordings and their variants, as often as its source is copied."""
    for fact in facts:
        least, each = COPIES[fact.source]
        each = max(each, -(-least // len(fact.prompts)))
        for prompt in fact.prompts:
            seen = {prompt}
            out[fact.source].append(chat(prompt, fact.answer))
            for _ in range(each - 1):
                for _ in range(8):
                    variant = phrases.vary(rng, fact, prompt)
                    if variant not in seen and book.agrees(variant, fact.answer):
                        break
                else:
                    variant = prompt
                seen.add(variant)
                out[fact.source].append(chat(variant, fact.answer))


def joined(rng, facts):
    """Conversations of unrelated questions: each is answered as it is alone."""
    groups = {}
    for language in ("en", "zh"):
        mine = [f for f in facts if f.language == language]
        close = [f for f in mine if f.source in ("who", "contrast", "say")]
        groups[language] = (close, [f for f in mine if f.source not in ("who", "contrast", "say")])
    for _ in range(JOINED):
        close, other = groups["zh" if rng.random() < ZH_JOINED else "en"]
        turns = []
        for _ in range(rng.choice((2, 2, 3, 4))):
            fact = rng.choice(close if rng.random() < 0.4 else other)
            turns += [rng.choice(fact.prompts), fact.answer]
        yield chat(*turns)


def names(phrases, rng, facts, people):
    """Somebody tells a name and asks for it, perhaps after something else."""
    for language, copies in (("en", 1), ("zh", 3)):
        other = [f for f in facts if f.language == language and f.source in ("say", "qa", "who")]
        telling = [(p, a) for ps, a in phrases.lines[language, "name"] for p in ps]
        recalls = [(p, a) for ps, a in phrases.lines[language, "recall"] for p in ps]
        for (prompt, answer), person in itertools.product(telling, people[language] * copies):
            turns = [prompt.format(person), answer.format(person)]
            luck = rng.random()
            if luck < 0.2:
                fact = rng.choice(other)
                turns += [rng.choice(fact.prompts), fact.answer]
            if luck < 0.6:
                turns += [t.format(person) for t in rng.choice(recalls)]
            yield chat(*turns)


# ---- the corpora ----

def small_talk(corpora, rng, book, other):
    path = corpora / "ms_chitchat/qna_chitchat_friendly.tsv"
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    rng.shuffle(lines)
    count = collections.Counter()
    for line in lines:
        question, answer = map(tidy, line.split("\t")[:2])
        answer = other.get(answer, answer)
        full = answer == "-" or count[answer] == SAME_ANSWER
        if not full and wanted(question, answer) and book.add(question, answer):
            count[answer] += 1
            yield Fact("smalltalk", "en", "say", [question], answer)


def read_stories(corpora):
    text = (corpora / "tinystories/tinystories_subset_train.txt").read_text(encoding="utf-8")
    for sign, plain in zip("\u201c\u201d\u2018\u2019\u2013\u2014\u2026", "\"\"''--."):
        text = text.replace(sign, plain)
    found = (s.strip() for s in text.split(END))
    return [re.sub(r"\n\s*\n+", "\n", s) for s in found if len(s) > 200 and s.isascii()]


def story_request(phrases, rng, nouns, story):
    """A way to ask for this story: by what it is about, or for any. What it is about occurs at
    least twice, and early."""
    def thing(word):
        if word in ("sun", "moon", "sea", "snow", "rain", "wind"):
            return "the " + word
        return ("an " if word[0] in "aeiou" else "a ") + word

    words = collections.Counter(re.findall(r"\b[a-z]+\b", story))
    early = set(re.findall(r"\b[a-z]+\b", story[:len(story) // 2]))
    known = [n for n in nouns if words[n] > 1 and n in early]
    known.sort(key=lambda n: -words[n])
    people = collections.Counter(re.findall(r"(?<=[a-z,] )[A-Z][a-z]{2,}", story))
    people = [p for p, count in people.most_common(2) if count > 2]
    topics = [thing(n) for n in known[:1] * 3 + known[1:2]]
    if len(known) > 1:
        topics.append(" and ".join(map(thing, known[:2])))
    if people:
        topics.append(" and ".join(people))
        topics += [people[0] + " and " + thing(n) for n in known[:1]]
    if not topics or rng.random() < ANY_STORY:
        return rng.choice(phrases.of("en", "story"))
    return rng.choice(phrases.of("en", "topic")).format(rng.choice(topics))


def people_in(all_stories, zh_names):
    seen = collections.Counter(n for s in all_stories
                               for n in re.findall(r"(?<=named )[A-Z][a-z]{2,}", s))
    return {"en": [n for n, _ in seen.most_common(120)], "zh": zh_names}


# ---- putting it together ----

def report(out, facts, book):
    print(f"{'source':12} {'conversations':>13} {'answers':>8} {'wordings en':>12} {'zh':>6}")
    for source in sorted(out):
        mine = [f for f in facts if f.source == source]
        count = [sum(len(f.prompts) for f in mine if f.language == k) for k in ("en", "zh")]
        print(f"{source:12} {len(out[source]):13} {len({f.answer for f in mine}):8}"
              f" {count[0]:12} {count[1]:6}")
    answers, asked = collections.defaultdict(set), 0
    for samples in (v for k, v in out.items() if k != "story-chat"):
        for sample in samples:
            answers[normal(sample[0]["content"])].add(sample[1]["content"])
    for message in (m for v in out.values() for sample in v for m in sample[::2]):
        asked += book.holds(message["content"])
    double = sum(len(found) > 1 for found in answers.values())
    print("left out:", dict(sorted(book.refused.items())))
    print(f"held-out questions: {len(book.held_out)}, questions that hold one: {asked}")
    print(f"first questions without stories: {len(answers)}, with two answers: {double}")


def main():
    corpora, target = map(pathlib.Path, sys.argv[1:3])
    target.mkdir(parents=True, exist_ok=True)
    rng = random.Random(SEED)
    phrases = Phrases(pathlib.Path(__file__).with_name("qa.tsv"))
    book = Book(phrases.of("en", "held") + phrases.of("zh", "held"))
    out, held_out, facts = collections.defaultdict(list), [], []

    for fact in phrases.facts():
        prompts = [p for p in fact.prompts if book.add(p, fact.answer)]
        if prompts:
            facts.append(fact._replace(prompts=prompts))
    own = list(facts)
    other = {prompts[0]: answer for prompts, answer in phrases.lines["en", "answer"]}
    for i, fact in enumerate(small_talk(corpora, rng, book, other)):
        if i % HOLD_OUT_EVERY == 0:
            held_out.append(chat(fact.prompts[0], fact.answer))
        else:
            facts.append(fact)
    write_out(phrases, rng, book, facts, out)
    out["joined"] = list(joined(rng, facts))

    every = read_stories(corpora)
    held = set(rng.sample(range(len(every)), HELD_OUT_STORIES))
    nouns = " ".join(phrases.of("en", "noun")).split()
    plain = []
    for i, story in enumerate(every):
        if i in held:
            continue
        if len(story) <= STORY_CHARS and i % 5:
            request = story_request(phrases, rng, nouns, story)
            out["story-chat"].append(chat(request, story))
        else:
            plain.append(story)
    people = people_in(every, phrases.of("zh", "person")[0].split())
    out["names"] = list(names(phrases, rng, own, people))

    def write(name, lines):
        (target / name).write_text("".join(lines), encoding="utf-8", newline="\n")

    joint = "\n" + END + "\n"
    write("train-stories.txt", [joint.join(plain) + "\n"])
    write("held-out.txt", ["\n\n".join(every[i] for i in sorted(held)) + "\n"])
    conversations = {"train-" + source: samples for source, samples in out.items()}
    conversations["held-out"] = held_out
    for name, samples in conversations.items():
        write(name + ".jsonl",
              [json.dumps({"messages": m}, ensure_ascii=False) + "\n" for m in samples])
    # Each text once: what is repeated would become tokens of whole sentences. Of Chinese only
    # single characters become tokens, and all of them: digits keep them apart.
    texts = [t for fact in facts for t in fact.prompts + [fact.answer]]
    texts += [t for k in ("en", "zh") for kind in ("opener", "asker", "closer", "wonder", "person")
              for t in phrases.of(k, kind)]
    texts += [message["content"] for sample in out["story-chat"] for message in sample]
    texts = [re.sub(CJK, r"0\g<0>0", t) for t in dict.fromkeys(texts)]
    characters = sorted(set(re.findall(CJK, "".join(texts))))
    texts.append("".join((c + "0") * CHARACTER_COUNT for c in characters))
    write("tokenizer.txt", [joint.join(plain + texts) + "\n"])
    report(out, facts, book)
    print(f"stories as plain text: {len(plain)}, held out: {len(held)} stories,"
          f" {len(held_out)} conversations")


if __name__ == "__main__":
    main()
