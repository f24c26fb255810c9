"""What a terminal shows of progress and of answers. usage: terminal.py NIBBLE MODEL WORK PART

Progress takes one row, whatever the width of the window, and nothing else is printed into it.
Answers wrap between words."""
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import screen
import training

NIBBLE, MODEL, WORK, PART = sys.argv[1:]
WIDTHS = (40,) if training.sanitized(NIBBLE) else (40, 80, 200)
STORY = "Tell me a story about a dog."


def start(columns, *args, **options):
    """A command on a terminal."""
    return screen.Program([NIBBLE, *map(str, args)], rows=12, columns=columns,
                          XDG_STATE_HOME=WORK + "/state", HOME=WORK, **options)


# ---- progress ----

STEP = re.compile(r"(\[[#.]{20}\]  )?step \d+/\d+(  .*)?")
EVAL = r"eval  step \d+  loss [0-9.]+  perplexity [0-9.]+  with master weights [0-9.]+"
WARNING = r"nibble: warning: .*; training goes on without that checkpoint"
RESULT = r"nibble: warning: .*; the result has been written"
BEGIN = r"8\.4 M parameters .* of memory"
BAR = re.compile(r"iterations  (\[[#.]{20}\]  )?\d+%(  [\d/]+)?(  [\d.]+/s)?  [\d:s]+ left")
CUTS = r"nibble: warning: \d+ of \d+ samples of --data are longer than --seq-len and are cut"


def train_options(steps):
    """Slow enough steps that a terminal sees single ones, and large enough ones that there is
    nothing to warn of."""
    return ["train", "-m", MODEL, "-d", WORK + "/data.tsv", "--seq-len", 16, "--batch-size", 8,
            "--lr", "3e-3", "--steps", steps, "--threads", 1]


def check_lines(program, patterns):
    """The screen has these lines, in this order, and nothing is glued to one."""
    lines = program.screen.lines()
    if len(lines) != len(patterns) or not all(re.fullmatch(p, x) for p, x in zip(patterns, lines)):
        program.fail(f"the lines are not {patterns}")


def train():
    """Evaluations, warnings and a line that is left at the end; no row for a step."""
    for columns in WIDTHS:
        shutil.rmtree(WORK + "/ck", ignore_errors=True)
        p = start(columns, *train_options(9), "-o", WORK + "/out.dat", "--eval-data",
                  WORK + "/data.tsv", "--eval-every", 4, "--checkpoint-dir", WORK + "/ck",
                  "--save-every", 3)
        p.wait_for(lambda rows: any("step 1/" in row for row in rows), "first step")
        shutil.rmtree(WORK + "/ck")
        with open(WORK + "/ck", "wb"):  # no place for a checkpoint
            pass
        p.leave()
        os.remove(WORK + "/ck")
        check_lines(p, [CUTS, BEGIN, EVAL, WARNING, EVAL, EVAL, STEP, EVAL, RESULT, r"9 steps, loss .*"])


def resized():
    """A window that changes while the run is on. Of each change at most one row is left, which is
    as the terminal cut it."""
    p = start(80, *train_options(24))
    shown = []
    for number, columns in ((3, 40), (6, 200), (9, 30), (12, 80)):
        p.wait_for(lambda rows, n=number: any(f"step {n}/" in row for row in rows), f"step {number}")
        shown.append(p.screen.text()[p.screen.cursor_row()])
        p.resize(12, columns)
    rows = p.leave()
    steps = [row for row in rows if "step " in row]
    if len(steps) != 1 or not STEP.fullmatch(steps[0]):
        p.fail(f"the last step expected, not {steps}")
    for row, columns in zip(shown, (80, 40, 200, 30)):
        if not STEP.fullmatch(row) or len(row) > columns - 3:
            p.fail(f"not the line of a step that fits into {columns} columns: '{row}'")
    if "norm" not in shown[2] or "norm" in shown[1] or "left" not in shown[1]:
        p.fail(f"the line does not follow the width: {shown}")


def interrupted():
    """Ctrl-C in the middle: the message has a row of its own, and nothing of ^C is left."""
    for columns in WIDTHS:
        p = start(columns, *train_options(1000))
        p.wait_for(lambda rows: any("step 2/" in row for row in rows), "second step")
        p.type("\x03")
        p.leave(130)
        check_lines(p, [
            CUTS, BEGIN, "the step under way is finished; Ctrl-C again ends at once",
            r"nibble: interrupted after step \d+; without --checkpoint-dir nothing is kept"])


def failed():
    """An error comes after the line, not into it."""
    for columns in WIDTHS:
        p = start(columns, *train_options(1000), "--checkpoint-dir", WORK + f"/f{columns}")
        p.wait_for(lambda rows: any("step 2/" in row for row in rows), "second step")
        os.truncate(WORK + "/data.tsv", 100)
        p.leave(1)
        check_lines(p, [CUTS, BEGIN, r"nibble: saved a checkpoint of step \d+",
                        r"nibble: .*data\.tsv.*"])
        write_data()


def bars():
    """Other commands: a bar that goes away."""
    for columns in WIDTHS:
        p = start(columns, "stress", "kv", "-m", MODEL, "--iterations", 100000)
        p.wait_for(lambda rows: rows and rows[-1].startswith("iterations"), "bar")
        rows = p.screen.text()
        if not BAR.fullmatch(rows[0]) or len(rows[0]) > columns - 3 or len(rows) > 1:
            p.fail("not a bar")
        p.type("\x03")
        p.leave(130)
        lines = [x for x in p.screen.lines() if not x.startswith("iterations: done in ")]
        if lines != ["nibble: interrupted; nothing was changed"]:
            p.fail("the bar is left")


# ---- answers ----

def piped(*args):
    """What a command prints into a pipe."""
    return subprocess.run([NIBBLE, *map(str, args)], stdin=subprocess.DEVNULL, check=True,
                          stdout=subprocess.PIPE).stdout.decode()


def check_wrapped(program, rows, text):
    """Rows are the text, broken at blanks, and none could have had another word."""
    columns, want = program.screen.columns, []
    for line in text.split("\n"):
        row = ""
        for word in line.split(" "):
            if row and len(row) + 1 + len(word) > columns:
                want.append(row)
                row = word
            else:
                row = row + " " + word if row else word
        want.append(row)
    if rows != [row.rstrip() for row in want]:
        program.fail("the text is not wrapped so:\n" + "\n".join("    |" + row for row in want))


def chat():
    """An answer on a terminal, and the same through a pipe."""
    said = piped("chat", "-q", "-m", MODEL, "-n", 150, "-p", STORY, "--device", "cpu")
    for columns in WIDTHS:
        p = start(columns, "chat", "-q", "-m", MODEL, "-n", 150)
        p.wait_for(lambda rows: rows == [">>>"], "prompt")
        p.type(STORY + "\r")
        p.wait_for(lambda rows: len(rows) > 2 and rows[-1] == ">>>", "next prompt")
        p.type("\x04")
        rows = p.leave()
        check_wrapped(p, rows[1:-1], said.rstrip("\n"))


def chat_resized():
    """A window that gets narrower and wider in the middle of an answer breaks no word."""
    options = ["-p", STORY, "--kv-mode", "none", "--threads", 1]  # slow enough
    words = set(piped("chat", "-q", "-m", MODEL, *options).split())
    p = start(60, "chat", "-q", "-m", MODEL, *options)
    for columns in (30, 100, 45):
        count = len(p.screen.text())
        p.wait_for(lambda rows, n=count: len(rows) > n + 1, "more rows")
        p.resize(12, columns)
    p.wait_for(lambda rows: rows[-1] == ">>>", "next prompt")
    p.type("\x04")
    broken = [word for row in p.leave()[:-1] for word in row.split() if word not in words]
    if len(broken) > 4:  # the rows that the terminal has cut off or wrapped at once
        p.fail(f"broken words: {broken}")


def wide():
    """Characters of two columns and of none, from a file."""
    text = "\u4f60\u597d " * 20 + "caf\u0065\u0301s and na\u00efve " * 9 + "\u4e16\u754c" * 30
    with open(WORK + "/wide.jsonl", "w", encoding="utf-8") as f:
        f.write(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n")
    for columns in WIDTHS:
        p = start(columns, "chat", "-q", "-m", MODEL, "-n", 1, "--replay", WORK + "/wide.jsonl")
        rows = p.leave()
        if "".join("".join(rows[:-1]).split()) != "".join((">>> " + text).split()):
            p.fail("something is lost")
        for row, after in zip(rows[:-2], rows[1:-1]):
            used = sum(map(screen.width, row))
            first = after.split(" ")[0]
            fits = 2 if screen.width(first[0]) == 2 else sum(map(screen.width, first))
            if used > columns or used + 1 + fits <= columns:
                p.fail(f"a row of {used} columns before '{first}'")


def ctrl_c():
    """Ctrl-C clears a line that is edited, of however many rows, and ends an answer; neither leaves
    anything behind."""
    for columns in WIDTHS:
        p = start(columns, "chat", "-q", "-m", MODEL)
        p.wait_for(lambda rows: rows == [">>>"], "prompt")
        for keys in ("word " * 60, "word " * 60 + "\x01", "\u4e16" * 50 + "\x1b[D" * 30):
            p.type(keys)
            p.wait_for(lambda rows: len(rows[0]) > 5, "text")
            p.settle()
            p.type("\x03")
            p.wait_for(lambda rows: rows == [">>>"], "empty line")
        p.type(STORY + "\r")
        p.wait_for(lambda rows: len(" ".join(rows)) > 150, "answer")
        p.type("not to be seen\x03")
        p.wait_for(lambda rows: rows[-1] == ">>>", "next prompt")
        p.settle()
        rows = p.screen.text()
        if rows[0] != ">>> " + STORY or any("^C" in row or "seen" in row for row in rows):
            p.fail("Ctrl-C left something")
        said = " ".join(rows[1:-1])
        whole = piped("chat", "-q", "-m", MODEL, "-p", STORY)
        if not " ".join(whole.split()).startswith(said):
            p.fail("the answer has lost something")
        p.type("\x04")
        p.leave()


def type_ahead():
    """What is typed while an answer is printed is the next line."""
    p = start(80, "chat", "-q", "-m", MODEL, "-n", 60)
    p.wait_for(lambda rows: rows == [">>>"], "prompt")
    p.type(STORY + "\r")
    p.wait_for(lambda rows: len(rows) > 1, "answer")
    p.type("Thank you")
    p.wait_for(lambda rows: rows[-1] == ">>> Thank you", "what was typed")
    p.type("\x03\x04")
    p.settle()
    p.type("\x04")
    p.leave()


def write_data():
    """Conversations, some of which do not fit into a row."""
    with open(WORK + "/data.tsv", "w", encoding="ascii") as f:
        f.writelines(f"what is {i}?\tit is {i * i}{' or so' * (i % 7)}\n" for i in range(64))


write_data()
{f.__name__: f for f in (train, resized, interrupted, failed, bars, chat, chat_resized, wide, ctrl_c,
                         type_ahead)}[PART]()
