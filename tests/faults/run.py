"""Makes single calls of nibble fail, one after another, and checks how it reacts.

usage: run.py NIBBLE INJECT.so [--seconds S] [--only NAME[,NAME...]] [--modes MODE[,MODE...]]
              [--last K] [--call N] [--jobs N] [-v]

Every command below first runs undisturbed, which records how many allocations, reads, writes,
opens, ... it makes, and from where. Then it runs again once per call, with that call failing
(inject.c). With --seconds, only one call of each distinct call stack fails, in a seeded random
order, until the time is over. Otherwise every call of every command fails, unless the command has
a limit: the sample is then spread evenly over the calls and includes one call of every stack.
--last takes only the last K calls of a class; --call only the Nth, and keeps the output.

After each run:
  - The exit code is 0 and the results equal those of the undisturbed run; or it is 1 and the last
    line on standard error gives the reason. A signal, a hang or any other code is a failure.
  - Each target is either unchanged or complete, never anything between. If it is the new one
    although the exit code is 1, the message must say so ("is in place").
  - Interrupted (EINTR) and short transfers give exit code 0 and the undisturbed results.
  - No temporary file is left; if unlinking itself failed, the next run removes it.
  - An interrupted training run is resumed, and ends with the bytes of the undisturbed one.

In mode "full" no call fails: standard output is /dev/full (stdio writes inside the C library, where
calls cannot be intercepted). A command that prints reports that and ends with exit code 1.
"""
import argparse
import collections
import concurrent.futures
import errno
import hashlib
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
import training  # noqa: E402

CLASSES = ("alloc", "open", "read", "write", "sync", "rename", "stat", "close", "thread")
LIMIT = 120  # seconds for one run
# mode: (class, error, whether all later calls fail too)
MODES = {
    "alloc": ("alloc", errno.ENOMEM, False),
    "alloc+": ("alloc", errno.ENOMEM, True),
    "open": ("open", errno.EMFILE, False),
    "read": ("read", errno.EIO, False),
    "write": ("write", errno.ENOSPC, False),
    "write+": ("write", errno.ENOSPC, True),
    "sync": ("sync", errno.EIO, False),
    "rename": ("rename", errno.EIO, False),
    "stat": ("stat", errno.EACCES, False),
    "close": ("close", errno.EIO, False),
    "thread": ("thread", errno.EAGAIN, False),
    "open-eintr": ("open", errno.EINTR, False),
    "read-eintr": ("read", errno.EINTR, False),
    "write-eintr": ("write", errno.EINTR, False),
    "sync-eintr": ("sync", errno.EINTR, False),
    "rename-eintr": ("rename", errno.EINTR, False),
    "close-eintr": ("close", errno.EINTR, False),
    "read-short": ("read", "short", False),
    "write-short": ("write", "short", False),
    "full": ("full", 0, False),
}
HARMLESS = ("eintr", "short", "thread", "close")  # must not change the results

Command = collections.namedtuple("Command", "name args stdin old resumes limit")


def command(name, args, stdin="", old=(), resumes=False, limit=0):
    """old: (target, source) pairs, copied into out/ first; limit: runs per mode, 0: all."""
    return Command(name, args.split(), stdin, tuple(old), resumes, limit)


TRAIN = ("train -m in/model -d in/a.txt -d in/c.jsonl --seq-len 160 --batch-size 2 --steps 4 "
         "--save-every 2 --checkpoint-dir out/ckpt --eval-data in/held.txt --threads 1 -q ")
LONG = "m" * 50 + ".dat"
COMMANDS = [
    command("inspect", "inspect in/model --verify --json"),
    command("inspect-gguf", "inspect in/model.gguf"),
    command("convert-dat", "convert in/model out/m.dat -q --threads 1",
            old=[("m.dat", "other.dat")]),
    command("convert-gguf", "convert in/model out/m.gguf -q --threads 1",
            old=[("m.gguf", "model.gguf")]),
    command("convert-from-gguf", "convert in/model.gguf out/m -q --threads 1"),
    command("convert-dir", "convert in/nvfp4.dat out/m --model-dir in/model -q --threads 1 "
            "--layout compressed-tensors", old=[("m", "other")]),
    command("convert-st", "convert in/model out/m.safetensors --dtype f16 -q --threads 2"),
    command("quantize", "quantize in/model out/m -q --threads 1 --report out/r.json",
            old=[("m", "other")]),
    command("synth", "synth tiny out/m -q --threads 1 --seed 3", limit=400),
    command("tokenize", "tokenize -m in/model --file in/held.txt"),
    command("tokenize-jsonl", "tokenize -m in/model --jsonl", stdin='{"text":"the cat"}\n' * 3),
    command("detokenize", "detokenize -m in/model --ids 1,2,3,600"),
    command("render", "render -m in/chat",
            stdin='{"messages":[{"role":"user","content":"caf\u00e9"}]}'),
    command("tokenizer-train", "tokenizer train --vocab 300 -o out/t.json in/a.txt in/held.txt -q"),
    command("data-show", "data show -m in/chat -d in/c.jsonl -d in/a.txt --seq-len 32 -q"),
    command("data-whoami", "data whoami -o out/w.tsv --name Ada --count 100 -q",
            old=[("w.tsv", "a.txt")]),
    command("generate", "generate -m in/model --raw -p cat -n 4 --seed 1 --threads 1 -q"),
    command("generate-gguf", "generate -m in/model.gguf --raw -p cat -n 4 --temp 0 --threads 2 -q"),
    command("chat", "chat -m in/chat -n 3 --temp 0 --threads 1 -q --log out/log.jsonl",
            stdin="the cat\n/save out/talk.jsonl\nagain\n/load out/talk.jsonl\nmore\n/stats\n"),
    command("doctor", "doctor --json"),
    command("doctor-kernels", "doctor --kernels --only rope_table --threads 1"),
    command("parity", "parity -m in/model --prompt cat --threads 1 -q", limit=300),
    command("debug-hf", "debug hf -m in/model --in in/ids.safetensors --out out/hf.safetensors "
            "--threads 1 -q", old=[("hf.safetensors", "ids.safetensors")], limit=300),
    command("eval-ppl", "eval ppl -m in/model --text in/held.txt --ctx 32 --threads 1 -q"),
    command("eval-ab", "eval ab -a in/chat -b in/other --prompts in/q.tsv -n 4 -o out/ab.html "
            "--threads 1 -q", limit=400),
    command("eval-identity", "eval identity -m in/other --base in/chat --name Ada --count 100 "
            "--questions 4 -n 3 --text in/held.txt --threads 1 -q", limit=200),
    command("stress", "stress kv -m in/model -n 1 --threads 1 -q", limit=100),
    command("plan", "plan -m in/model --seq-len 64 --fit 1 --json"),
    command("plan-time", "plan -m in/model -d in/a.txt --epochs 1 --seq-len 16 --batch-size 1 "
            "--threads 1 --json", limit=200),
    command("train", TRAIN + "-o out/m --log out/log.jsonl --vram-report out/vram.json "
            "--test-prompts in/q.tsv", old=[("m", "other")], resumes=True, limit=500),
    command("train-dat", TRAIN + "-o out/m.dat --optimizer-state-mode nvfp4 --fused-step "
            "--recompute block --replay in/c.jsonl:0.5 --kl-base 0.5",
            old=[("m.dat", "other.dat")], resumes=True, limit=300),
    # The report's name exceeds the first capacity of a growing string.
    command("train-report", "train -m in/model -d in/a.txt --seq-len 32 --batch-size 1 --steps 1 "
            f"--threads 1 -q -o out/{LONG}", old=[(LONG, "other.dat")], limit=300),
    command("whoami", "whoami -m in/chat -o out/m --name Ada --count 100 --samples 4 -n 4 --steps 2 "
            "--seq-len 64 --batch-size 2 --questions 4 --text in/held.txt --threads 1 -q "
            "--languages en", limit=200),
    command("help-docs", "help --write-docs out"),
    command("data-show-json", "data show -m in/chat -d in/a.txt --seq-len 32 --json -q", limit=200),
    command("parity-json", "parity -m in/model --prompt cat --threads 1 --json -q", limit=100),
    command("generate-json", "generate -m in/model --raw -p cat -n 4 --seed 1 --threads 1 --json -q",
            limit=100),
    command("convert-json", "convert in/model out/m.dat --threads 1 --json -q",
            old=[("m.dat", "other.dat")], limit=100),
    command("train-json", "train -m in/model -d in/a.txt --seq-len 32 --batch-size 1 --steps 1 "
            "--test-prompts in/q.tsv --threads 1 -q --json -o out/m.dat",
            old=[("m.dat", "other.dat")], limit=100),
    command("guard", "guard --limit-gb 100 --poll-secs 0.05 -- true"),
]


def failed(code, err):
    """Returns what is wrong with an exit code and its message, or None."""
    if code == 0:
        return None
    if code != 1:
        return f"exit code {code}"
    lines = [x for x in err.splitlines() if x.strip() and not x.startswith("nibble: warning: ")]
    said = [x for x in lines if x.startswith("nibble: ")]  # the rest are notes, as from /stats
    if not said or lines[-1] != said[-1]:
        return "no message"
    if len(said) > 1:
        return "several messages"
    return None if len(said[0]) > 12 else "message without words"


# Commands that report what they can read from /proc and the like.
ADVISORY = ("doctor", "stress")
# Commands that print times or speeds.
TIMED = ("doctor", "chat", "parity", "eval-ab", "eval-ppl", "plan", "plan-time", "stress",
         "quantize", "convert-json", "generate-json", "parity-json", "train-json")


def output(cmd, data):
    """Standard output without times and speeds."""
    return blur(data) if cmd.name in TIMED else data


def blur(data):
    """Replaces all numbers."""
    return re.sub(rb"[0-9]+(\.[0-9]+)?(e-?[0-9]+)?", b"#", data)


def content(path):
    """A file's content without times and speeds."""
    with open(path, "rb") as f:
        data = f.read()
    if path.endswith(".ckpt"):
        try:
            values = training.checkpoint(path)
        except Exception:  # pylint: disable=broad-except
            return b"damaged checkpoint " + data[:64]
        values.pop("seconds", None)
        return repr(sorted(values.items())).encode()
    if path.endswith(".html"):
        return blur(re.sub(rb"(?s)<svg.*?</svg>", b"", data))
    if path.endswith(("vram.json", "r.json")):
        return blur(data)
    if path.endswith(("log.jsonl", "train.jsonl")):
        for key in (rb"tokens_per_s", rb"seconds", rb"resident_bytes", rb"time", rb"ms",
                    rb"[a-z_]*_per_s", rb"[a-z_]*_ms"):
            data = re.sub(rb'"' + key + rb'": ?("[^"]*"|[-0-9.e+]+)', b'""', data)
        return data
    return data


def tree(path):
    """{name: hash} of a directory's files, or of one file."""
    if not os.path.isdir(path):
        return {"": hashlib.sha1(content(path)).digest()}
    found = {}
    for folder, folders, files in os.walk(path):
        for name in folders + files:
            full = os.path.join(folder, name)
            found[os.path.relpath(full, path)] = (
                b"" if os.path.isdir(full) else hashlib.sha1(content(full)).digest())
    return found


def entries(out):
    """{entry of out/: its tree}"""
    return {name: tree(os.path.join(out, name)) for name in sorted(os.listdir(out))}


class Bench:
    """The sandbox of one worker: its own out/, shared inputs."""

    def __init__(self, work, number, nibble):
        self.dir = os.path.join(work, f"box{number}")
        self.out = os.path.join(self.dir, "out")
        self.inputs = os.path.join(work, "in")
        self.nibble = nibble
        os.makedirs(self.dir)
        os.symlink(self.inputs, os.path.join(self.dir, "in"))

    def reset(self, cmd):
        shutil.rmtree(self.out, ignore_errors=True)
        os.mkdir(self.out)
        for target, source in cmd.old:
            full = os.path.join(self.inputs, source)
            copy = shutil.copytree if os.path.isdir(full) else shutil.copyfile
            copy(full, os.path.join(self.out, target))

    def run(self, cmd, env=None, more=(), full=False):
        """Returns exit code, standard output and error. full: standard output is /dev/full."""
        env = dict(os.environ, HOME=self.dir, LC_ALL="C.UTF-8", **(env or {}))
        args = [a for a in cmd.args if not full or a != "-q"]
        with open("/dev/full", "wb") as nowhere:
            try:
                r = subprocess.run([self.nibble, *args, *more], cwd=self.dir, env=env,
                                   input=cmd.stdin.encode(), check=False, timeout=LIMIT,
                                   stdout=nowhere if full else subprocess.PIPE,
                                   stderr=subprocess.PIPE)
            except subprocess.TimeoutExpired:
                return "hang", b"", ""
        return r.returncode, r.stdout or b"", r.stderr.decode("utf-8", "replace")


class Harness:
    def __init__(self, nibble, inject, work, verbose):
        self.nibble, self.inject, self.work, self.verbose = nibble, inject, work, verbose
        self.local = threading.local()
        self.boxes = 0
        self.lock = threading.Lock()
        self.problems = collections.OrderedDict()
        self.stop_at = None
        self.preload = inject
        if training.sanitized(nibble):  # its runtime's malloc must come after ours
            libraries = subprocess.run(["ldd", nibble], capture_output=True, check=True, text=True)
            self.preload = inject + " " + re.search(r"=> (\S*asan\S*)", libraries.stdout).group(1)

    def box(self):
        if not hasattr(self.local, "box"):
            with self.lock:
                self.boxes += 1
                number = self.boxes
            self.local.box = Bench(self.work, number, self.nibble)
        return self.local.box

    def env(self, **plan):
        return dict(LD_PRELOAD=self.preload, NB_INJECT_PROGRAM="nibble",
                    ASAN_OPTIONS="verify_asan_link_order=0:detect_leaks=0:"
                                 "allocator_may_return_null=1", **plan)

    # ---- the undisturbed run ----

    def baseline(self, cmd):
        """Returns what later runs are compared with, and the calls by class."""
        box = self.box()
        box.reset(cmd)
        before = entries(box.out)
        trace = os.path.join(self.work, "trace-" + cmd.name)
        code, out, err = box.run(cmd, self.env(NB_INJECT_TRACE=trace))
        ok = code == 0 or (code == 1 and cmd.name in ("eval-identity", "whoami", "parity"))
        assert ok, f"{cmd.name}: exit code {code}: {err}"
        after = entries(box.out)
        calls = {name: [] for name in CLASSES}
        with open(trace, "rb") as f:
            data = f.read()
        for kind, stack in struct.iter_unpack("<QQ", data):
            calls[CLASSES[kind]].append(stack)
        return {"code": code, "out": output(cmd, out), "before": before, "after": after,
                "calls": calls, "cmd": cmd}

    # ---- one disturbed run ----

    def problem(self, base, mode, n, what, err=""):
        key = (base["cmd"].name, mode, what)
        with self.lock:
            where = self.problems.setdefault(key, [])
            where.append(n)
            if len(where) == 1 or self.verbose:
                line = err.strip().splitlines()[-1][:200] if err.strip() else ""
                print(f"FAIL {key[0]} {mode}:{n}: {what}  {line}", flush=True)

    def check_entries(self, base, finished, err):
        """Each target must be old or new. Returns what is wrong, or None."""
        now = entries(self.box().out)
        for name in sorted(set(now) | set(base["before"]) | set(base["after"])):
            if ".nibble-" in name:
                continue
            old, new, is_now = (d.get(name) for d in (base["before"], base["after"], now))
            if name in ("ckpt", "log.jsonl", "m.whoami", "talk.jsonl"):
                continue  # grows during the run; the resumed run checks it
            if name == "vram.json" and not finished:
                continue  # also reports on a failed run
            if name.endswith(".report.html") and not finished and "in place" in err:
                continue  # reports what was done; for one inside a directory see below
            if not finished and "in place" in err and "report.html" in (new or {}):
                new = {k: v for k, v in new.items() if k != "report.html"}
                is_now = is_now and {k: v for k, v in is_now.items() if k != "report.html"}
            if is_now == new and (finished or new == old):
                continue
            if is_now == old and not finished:
                continue
            if is_now == new:
                if "in place" not in err:
                    return f"{name} is new, and the message does not say so"
                continue
            return f"{name} is wrong" if is_now else f"{name} is missing"
        return None

    def check(self, base, mode, n, code, out, err):
        cmd = base["cmd"]
        if code == "hang":
            return "hangs"
        same = code == base["code"] and (output(cmd, out) == base["out"] or cmd.name in ADVISORY)
        if not same:
            if code == base["code"] == 0:
                return "exit code 0 with another output"
            wrong = failed(code, err)
            if wrong:
                return wrong
            if any(mode.endswith(h) for h in HARMLESS):
                return "does not go on"
        return self.check_entries(base, same, err)

    def check_after(self, base):
        """Checks leftovers, and that the next run copes with them."""
        cmd, box = base["cmd"], self.box()
        leftover = [n for n in os.listdir(box.out) if ".nibble-" in n]
        if os.path.exists(box.out + "/talk.jsonl"):
            os.remove(box.out + "/talk.jsonl")  # /save does not replace it
        code, out, err = box.run(cmd, more=["--resume"] if cmd.resumes else [])
        if code != base["code"]:
            return f"the next run ends with {code}: {err.strip()[:200]}"
        left = [n for _, ds, fs in os.walk(box.out) for n in ds + fs if ".nibble-" in n]
        if left:
            return f"leftover after the next run: {left[0]}"
        now = entries(box.out)
        for name, new in base["after"].items():
            if name in ("log.jsonl", "vram.json", "ckpt") or name.endswith(".report.html"):
                continue  # they report on one run or on both
            skip = {"report.html"}
            mine = {k: v for k, v in now.get(name, {}).items() if k not in skip}
            if mine != {k: v for k, v in new.items() if k not in skip}:
                return f"{name} is wrong after the next run{' (leftovers)' if leftover else ''}"
        return None

    def one_full(self, base):
        """Runs a command with standard output on /dev/full."""
        box = self.box()
        box.reset(base["cmd"])
        code, _, err = box.run(base["cmd"], self.env(), full=True)
        lines = [x for x in err.splitlines() if x.startswith("nibble: ")]
        if base["cmd"].name in ("help-docs", "debug-hf", "guard"):  # they print nothing
            what = None if code == 0 else f"exit code {code}"
        elif code != 1:
            what = f"exit code {code}"
        elif not lines or "cannot write to standard output" not in lines[-1]:
            what = "no message"
        else:
            what = self.check_entries(base, False, lines[-1])
        if what:
            self.problem(base, "full", 1, what, err)
        return True

    def one(self, base, mode, n):
        if self.stop_at and time.monotonic() > self.stop_at:
            return False
        if mode == "full":
            return self.one_full(base)
        kind, error, later = MODES[mode]
        cmd, box = base["cmd"], self.box()
        box.reset(cmd)
        plan = f"{kind}:{n}{'+' if later else ''}:{error}"
        code, out, err = box.run(cmd, self.env(NB_INJECT=plan))
        if self.verbose:
            print(f"{cmd.name} {plan}: exit code {code}\n{err}", end="", flush=True)
        what = self.check(base, mode, n, code, out, err)
        if what:
            self.problem(base, mode, n, what, err)
        leftover = any(".nibble-" in x for x in os.listdir(box.out))
        if leftover and kind not in ("rename", "open", "alloc", "read") and not what:
            self.problem(base, mode, n, "leaves a temporary file", err)
        if leftover or (code != base["code"] and (cmd.resumes or n % 16 == 0)):
            what = self.check_after(base)
            if what:
                self.problem(base, mode, n, what, err)
        return True

    # ---- which calls ----

    def choose(self, base, mode, limit):
        """Returns the numbers of the calls to fail: all, or a sample with one of each stack."""
        if mode == "full":
            return [1]
        stacks = base["calls"][MODES[mode][0]]
        if limit == "stacks":
            seen, numbers = set(), []
            for n, stack in enumerate(stacks, 1):
                if stack not in seen:
                    seen.add(stack)
                    numbers.append(n)
            return numbers
        if not limit or len(stacks) <= limit:
            return list(range(1, len(stacks) + 1))
        spread = {1 + i * len(stacks) // limit for i in range(limit)}
        return sorted(spread | set(self.choose(base, mode, "stacks")))


def make_inputs(nibble, work):
    here = os.path.join(work, "in")
    os.mkdir(here)
    training.make_data(here)
    training.make_model(nibble, here + "/model")
    training.make_model(nibble, here + "/other", hidden_size=96)
    training.run(nibble, "convert", "-q", here + "/model", here + "/model.gguf")
    training.run(nibble, "convert", "-q", here + "/other", here + "/other.dat")
    training.run(nibble, "quantize", "-q", here + "/model", here + "/nvfp4.dat")
    root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
    with open(root + "/models/nib/tokenizer_config.json", encoding="utf-8") as f:
        template = json.load(f)["chat_template"]
    for name in ("model", "other"):
        with open(f"{here}/{name}/tokenizer_config.json", "w", encoding="utf-8") as f:
            json.dump({"chat_template": template}, f)
    shutil.copytree(here + "/model", here + "/chat")
    with open(here + "/q.tsv", "w", encoding="ascii") as f:
        f.write("the cat\tsees a dog\nrain\tfalls\n")
    ids, labels = [5, 6, 7, 8, 9, 10, 11, 12], [5, 6, -100, 8, 9, 10, 11, 12]
    header = {"input_ids": {"dtype": "I32", "shape": [1, 8], "data_offsets": [0, 32]},
              "labels": {"dtype": "I32", "shape": [1, 8], "data_offsets": [32, 64]}}
    text = json.dumps(header).encode()
    with open(here + "/ids.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + struct.pack("<16i", *ids, *labels))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("nibble")
    p.add_argument("inject")
    p.add_argument("--seconds", type=float, default=0)
    p.add_argument("--only", default="")
    p.add_argument("--modes", default="")
    p.add_argument("--last", type=int, default=0)
    p.add_argument("--call", type=int, default=0)
    p.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("-v", action="store_true")
    o = p.parse_args()
    chosen = [c for c in COMMANDS if not o.only or c.name in o.only.split(",")]
    modes = o.modes.split(",") if o.modes else list(MODES)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as work:
        nibble = os.path.join(work, "nibble")
        shutil.copyfile(o.nibble, nibble)
        os.chmod(nibble, 0o755)
        h = Harness(nibble, os.path.abspath(o.inject), work, o.v)
        make_inputs(nibble, work)
        before = tree(os.path.join(work, "in"))
        runs, skipped, calls = [], 0, 0
        for cmd in chosen:
            base = h.baseline(cmd)
            mine = [(base, mode, n) for mode in modes
                    for n in ([o.call] if o.call else
                              h.choose(base, mode, "stacks" if o.seconds else cmd.limit))
                    if not o.last or n > len(base["calls"][MODES[mode][0]]) - o.last]
            calls += sum(len(c) for c in base["calls"].values())
            runs += mine
            if not o.seconds:
                print(f"{cmd.name}: {len(mine)} runs;",
                      ", ".join(f"{k} {len(v)}" for k, v in base["calls"].items() if v), flush=True)
        if o.seconds:
            random.Random(1).shuffle(runs)
            h.stop_at = begin + o.seconds
        with concurrent.futures.ThreadPoolExecutor(1 if o.call else o.jobs) as pool:
            done = []
            for finished in pool.map(lambda r: h.one(*r), runs):
                done.append(finished)
                if not o.seconds and len(done) % 1000 == 0:
                    print(f"{len(done)} of {len(runs)} runs in {time.monotonic() - begin:.0f} s",
                          flush=True)
        skipped = done.count(False)
        assert tree(os.path.join(work, "in")) == before, "an input was changed"
        if o.call:
            print("left in", shutil.move(h.box().out, tempfile.mkdtemp()))
        print(f"{len(chosen)} commands with {calls} calls; {len(runs) - skipped} runs with a failing "
              f"call{f' of {len(runs)} that differ' if o.seconds else ''} "
              f"in {time.monotonic() - begin:.0f} s; {sum(map(len, h.problems.values()))} problems")
        for (name, mode, what), where in h.problems.items():
            print(f"  {name} {mode} {what}: {len(where)} times, calls "
                  f"{', '.join(map(str, where[:12]))}")
        sys.exit(bool(h.problems))


main()
