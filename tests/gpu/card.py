"""card.py - what the parts of run.py share: the programs of a build, runs of them with a limit of
time, the memory that a device has in use, and lines that begin with commit and date."""
import datetime
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PART_SECONDS = 480


class Failure(Exception):
    """A command that failed, or a result that is not what it must be."""


def tail(text, lines=3):
    """The last lines of a text as one."""
    return " | ".join(line.strip() for line in text.strip().splitlines()[-lines:])


def find_cublaslt():
    """Adds the folders of cuBLASLt, of the toolkit and of Python's packages."""
    patterns = ["/usr/local/cuda*/lib64", "/usr/local/cuda*/targets/*/lib"]
    patterns += [f"{path}/nvidia/*/lib" for path in sys.path]
    found = [os.path.dirname(f) for p in patterns
             for f in sorted(glob.glob(p + "/libcublasLt.so*"))]
    if found:
        old = os.environ.get("LD_LIBRARY_PATH")
        os.environ["LD_LIBRARY_PATH"] = ":".join(([old] if old else []) +
                                                 list(dict.fromkeys(found)))


class Card:
    """A build on a machine with a card; `small` tries the parts with sizes for an emulated one."""

    def __init__(self, build):
        self.build = os.path.abspath(build)
        self.nibble = os.path.join(self.build, "nibble")
        if os.path.isfile(self.build):
            self.nibble, self.build = self.build, os.path.dirname(self.build)
        self.small = bool(os.environ.get("NB_GPU_SMALL"))
        self.device = os.environ.get("NB_GPU_DEVICE", "cuda")
        self.smi = os.environ.get("NVIDIA_SMI", "nvidia-smi")
        self.out = os.environ.get("OUT")
        find_cublaslt()
        self.work = tempfile.mkdtemp(prefix="nibble-gpu-")
        version = subprocess.run([self.nibble, "--version"], capture_output=True, text=True,
                                 check=True).stdout
        self.commit = re.search(r"\((.*?)\)", version).group(1)
        self.part, self.failures, self.deadline = "", 0, 0

    # ---- lines ----

    def say(self, kind, text):
        """A line."""
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        print(f"{self.commit} {now} {self.part}: {kind} {text}", flush=True)

    def info(self, text):
        """A figure that decides nothing."""
        self.say("    ", text)

    def judge(self, good, text):
        """A figure with what it must be."""
        self.say("ok  " if good else "FAIL", text)
        self.failures += not good

    def attempt(self, name, function, *args):
        """Calls a function; what it returns is the text of its line. A failure goes on."""
        begin = time.monotonic()
        try:
            text = function(*args)
        except (Failure, AssertionError, OSError, KeyError, ValueError, IndexError) as e:
            self.judge(False, f"{name}: {type(e).__name__ if not str(e) else e}")
            return False
        text = f": {text}" if text else ""
        self.judge(True, f"{name}{text} ({time.monotonic() - begin:.1f} s)")
        return True

    # ---- commands ----

    def pick(self, size, small):
        """A size, or the one for trying the parts without a card."""
        return small if self.small else size

    def left(self):
        """Seconds that the part has left."""
        left = self.deadline - time.monotonic()
        if left < 1:
            raise Failure(f"the part's {PART_SECONDS} s are over")
        return left

    def run(self, *args, codes=(0,), limit=1e9, env=None):
        """Runs a command; returns its output. Another exit code, or too much time, is a failure."""
        args = [str(a) for a in args]
        try:
            r = subprocess.run(args, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                               errors="replace", timeout=min(limit, self.left()), check=False,
                               env=dict(os.environ, **(env or {})))
        except subprocess.TimeoutExpired:
            raise Failure(f"{' '.join(args[:6])} ...: out of time") from None
        if r.returncode not in codes:
            said = tail(r.stderr or r.stdout)
            raise Failure(f"{' '.join(args)}: exit code {r.returncode}: {said}")
        self.code = r.returncode
        return r.stdout

    def do(self, command, *args, device=None, **more):
        """A command of nibble on the device."""
        return self.run(self.nibble, *command.split(), *args, "--device", device or self.device,
                        **more)

    def json(self, command, *args, **more):
        """The same with --json."""
        text = self.do(command, *args, "--json", **more)
        try:
            return json.loads(text)
        except ValueError:
            raise Failure(f"{command}: no JSON: {text[:200]}") from None

    def tool(self, name):
        """The path of a program that must be there."""
        path = shutil.which(name)
        if not path:
            raise Failure(f"there is no {name}")
        return path

    def path(self, *names):
        """A path among the files of this run."""
        return os.path.join(self.work, *names)

    def config(self, name, **changes):
        """Writes a config.json of a Qwen3; returns its path."""
        config = {
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 256, "intermediate_size": 544,
            "max_position_embeddings": 40960, "num_attention_heads": 8, "num_hidden_layers": 2,
            "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
            "tie_word_embeddings": True, "torch_dtype": "bfloat16", "eos_token_id": 602,
            "vocab_size": 672}
        os.makedirs(self.path(name + ".config"), exist_ok=True)
        path = self.path(name + ".config", "config.json")
        with open(path, "w", encoding="ascii") as f:
            json.dump(dict(config, **changes), f)
        return path

    # ---- device memory ----

    def used_mib(self):
        """MiB in use on the device, by all processes."""
        try:
            out = subprocess.run([self.smi, "--query-gpu=memory.used",
                                  "--format=csv,noheader,nounits"], capture_output=True, text=True,
                                 timeout=20, check=True).stdout
            return int(out.split()[0])
        except (OSError, subprocess.SubprocessError, ValueError, IndexError):
            raise Failure(f"{self.smi} says nothing of memory") from None

    def watch(self, *args, **more):
        """Runs a command; returns its output and a list of (seconds, MiB above what was in use)."""
        before, series, over = self.used_mib(), [], threading.Event()

        def look():
            begin = time.monotonic()
            while not over.wait(0.1):
                try:
                    series.append((time.monotonic() - begin, self.used_mib() - before))
                except Failure:
                    return

        thread = threading.Thread(target=look)
        thread.start()
        try:
            out = self.run(*args, **more)
        finally:
            over.set()
            thread.join()
        return out, series or [(0, 0)]


def log_lines(path):
    """The lines of a training log."""
    with open(path, encoding="utf-8") as f:
        return [json.loads(line) for line in f]


def losses(path):
    """The loss of each step of a log."""
    return [line["loss"] for line in log_lines(path) if "loss" in line]
