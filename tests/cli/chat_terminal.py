"""A chat on a pseudo-terminal: keys, signals, history. usage: chat_terminal.py NIBBLE MODEL WORK"""
import fcntl
import json
import os
import pty
import resource
import select
import signal
import stat
import struct
import sys
import termios
import time

NIBBLE, MODEL, WORK = sys.argv[1:]
HISTORY = os.path.join(WORK, "state", "nibble", "history")
LIMIT = 60  # seconds for anything
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run_in_shell(command, env):
    """What a shell does for a job that stops: takes the terminal, and gives it back for Enter."""
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    before = termios.tcgetattr(0)
    job = os.fork()
    if job == 0:
        os.setpgid(0, 0)
        os.tcsetpgrp(0, os.getpid())
        signal.signal(signal.SIGTTOU, signal.SIG_DFL)
        os.execve(command[0], command, env)
    while True:
        _, status = os.waitpid(job, os.WUNTRACED)
        os.tcsetpgrp(0, os.getpgrp())
        if not os.WIFSTOPPED(status):
            os._exit(os.waitstatus_to_exitcode(status))
        same = termios.tcgetattr(0) == before
        print("stopped", "as it was" if same else "with another mode", flush=True)
        sys.stdin.readline()
        os.tcsetpgrp(0, job)
        os.killpg(job, signal.SIGCONT)


class Chat:
    """A running chat; what it prints is kept."""

    def __init__(self, name, *options, shell=False, **environment):
        self.name, self.seen, self.at, self.running = name, b"", 0, True
        self.log = os.path.join(WORK, name + ".jsonl")
        env = dict(os.environ, TERM="xterm", XDG_STATE_HOME=os.path.join(WORK, "state"),
                   HOME=WORK, LC_ALL="C.UTF-8")
        env.pop("NO_COLOR", None)
        env.update(environment)
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            command = [NIBBLE, "chat", "-m", MODEL, "--log", self.log, *options]
            if shell:
                run_in_shell(command, env)
            os.execve(NIBBLE, command, env)
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))

    def fail(self, what):
        print(f"FAIL {self.name}: {what}\n    the terminal: {self.seen[-1500:]!r}")
        if self.running:
            os.kill(self.pid, signal.SIGKILL)
        sys.exit(1)

    def read(self, seconds):
        """More output; False at its end or when there is none for so long."""
        if not select.select([self.fd], [], [], seconds)[0]:
            return False
        try:
            piece = os.read(self.fd, 65536)
        except OSError:
            piece = b""
        self.seen += piece
        return bool(piece)

    def expect(self, text):
        """Waits for text after what was waited for before."""
        end = time.monotonic() + LIMIT
        while text.encode() not in self.seen[self.at:]:
            if time.monotonic() > end or not self.read(LIMIT):
                self.fail(f"no {text!r}")
        self.at = self.seen.index(text.encode(), self.at) + len(text.encode())

    def prompt(self, keys=True):
        """Waits for a new line's prompt, which is drawn again with each key, and until the terminal
        hands out single keys."""
        if keys:
            self.expect("\x1b[?2004h")  # bracketed paste, on while a line is edited
        self.expect(">>> ")
        end = time.monotonic() + LIMIT
        while keys and termios.tcgetattr(self.fd)[3] & termios.ICANON:
            self.check(time.monotonic() < end, "the terminal is not set up")
            time.sleep(0.001)

    def interrupt(self, note="", keys=True):
        """Ctrl-C, and the prompt that follows."""
        self.type("\x03")
        if note:
            self.expect(note)
        if keys:
            self.prompt()
        else:
            self.interrupt_plain()

    def interrupt_plain(self):
        """Without line editing the kernel signals first and throws away output after that, so that
        what comes at once may be lost: an empty line brings the prompt back."""
        end = time.monotonic() + LIMIT
        while b">>> " not in self.seen[self.at:]:
            if not self.read(2):
                self.type("\r")
            self.check(time.monotonic() < end, "no prompt")
        self.prompt(keys=False)
        time.sleep(0.3)  # input, too, may be thrown away for a moment

    def type(self, text):
        os.write(self.fd, text.encode())

    def leave(self, code=0):
        """Waits for the end."""
        end = time.monotonic() + LIMIT
        while self.read(LIMIT):
            self.check(time.monotonic() < end, "it does not end")
        pid = 0
        while pid == 0:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.check(time.monotonic() < end, "it does not end")
            time.sleep(0.01)
        status = os.waitstatus_to_exitcode(status)
        self.running = False
        self.check(termios.tcgetattr(self.fd)[3] & termios.ICANON, "the terminal is not as it was")
        os.close(self.fd)
        if status != code:
            self.fail(f"exit code {status}, {code} expected")

    def said(self, role="user"):
        with open(self.log, encoding="utf-8") as lines:
            return [m for m in map(json.loads, lines) if m.get("role") == role]

    def check(self, truth, what):
        if not truth:
            self.fail(what)


def test_keys():
    chat = Chat("keys", "-n", "4")
    chat.expect("/help lists commands")
    chat.prompt()
    chat.type("helo\x1b[Dl\r")  # the cursor to the left, and a letter
    chat.prompt()
    chat.type("caf\u00e9 \u00e0 la\x7f\x7f\x7f\r")
    chat.prompt()
    chat.type("\x1b[A\x1b[A\r")  # up, up: the first message
    chat.prompt()
    chat.type("typed\\\rin two\r")
    chat.expect("... ")
    chat.prompt()
    chat.type("/stts\r")
    chat.expect("did you mean '/stats'?")
    chat.prompt()
    chat.type("\x04")
    chat.leave()
    texts = [m["content"] for m in chat.said()]
    chat.check(texts == ["hello", "caf\u00e9 \u00e0", "hello", "typed\nin two"], texts)
    chat.check(chat.seen.endswith(b"\033[?2004l\r\n"), "the terminal is not as it was")
    mode = stat.S_IMODE(os.stat(HISTORY).st_mode)
    chat.check(mode == 0o600, f"the history has mode {mode:o}")


def test_paste():
    chat = Chat("paste", "-n", "4")
    chat.prompt()
    chat.type("see: \x1b[200~/quit\rtwo \x1b[31m\u00e9\u4e16\r\r\tend\\\r\x1b[201~")
    chat.type("!\r")
    chat.prompt()
    chat.type('"""\rblock\r\r"""\r')
    chat.prompt()
    chat.type("\x1b[200~\x1b[201~plain\x1b[200~ and pasted\x1b[201~\r")
    chat.prompt()
    chat.type("\x1b[A\x1b[A\x1b[A\r")  # of the history, with all its lines
    chat.prompt()
    chat.type("/quit\r")
    chat.leave()
    texts = [m["content"] for m in chat.said()]
    pasted = "see: /quit\ntwo [31m\u00e9\u4e16\n\n\tend\\!"
    chat.check(texts == [pasted, "block\n", "plain and pasted", pasted], texts)


def test_interrupt():
    chat = Chat("interrupt", "--ctx", "60000", "--ignore-eos")
    chat.prompt()
    chat.type("an endless one\r")
    chat.expect("\r\n")
    while len(chat.seen) < chat.at + 50:
        chat.check(chat.read(LIMIT), "no answer")
    chat.interrupt("(stopped; what was said so far counts)")
    chat.type("never sent")
    chat.interrupt()
    chat.interrupt("(/quit or Ctrl-D leaves)")
    chat.type('"""\rneither this\r')
    chat.expect("neither this")
    chat.interrupt()
    chat.type("go on\r")
    chat.expect("\r\n")
    while len(chat.seen) < chat.at + 50:
        chat.check(chat.read(LIMIT), "no answer")
    chat.interrupt("(stopped; what was said so far counts)")
    chat.type("/stats\r")
    chat.expect("2 answers")
    chat.prompt()
    chat.type("\x04")
    chat.leave()
    texts = [m["content"] for m in chat.said()]
    chat.check(texts == ["an endless one", "go on"], texts)
    first, second = chat.said("assistant")
    chat.check(first["interrupted"] and first["finish_reason"] == "interrupted", first)
    reused = first["prompt_tokens"] + first["completion_tokens"] - 1
    chat.check(second["reused_tokens"] >= reused, f"{second['reused_tokens']} of {reused} reused")


def test_terminate():
    chat = Chat("terminate", "-n", "4")
    chat.prompt()
    os.kill(chat.pid, signal.SIGTERM)
    chat.leave(143)
    chat = Chat("terminate2", "--ctx", "60000", "--ignore-eos")
    chat.prompt()
    chat.type("an endless one\r")
    chat.expect("\r\n")
    chat.check(chat.read(LIMIT), "no answer")
    os.kill(chat.pid, signal.SIGTERM)
    chat.leave(143)


def test_suspend():
    chat = Chat("suspend", "-n", "4", shell=True)
    chat.prompt()
    chat.type("before" + "x" * 200 + "\x1a")
    chat.expect("stopped as it was")
    chat.type("\r")
    chat.prompt()
    chat.type("\x01after \r")
    chat.prompt()
    chat.type("\x04")
    chat.leave()
    texts = [m["content"] for m in chat.said()]
    chat.check(texts == ["after before" + "x" * 200], texts)


def test_quit():
    chat = Chat("quit", "-n", "4")
    chat.prompt()
    chat.type("never sent\x1c")
    chat.leave(-signal.SIGQUIT)


def test_history():
    """The file that earlier versions wrote is read, and becomes one of our own."""
    with open(HISTORY, "w", encoding="utf-8") as f:
        f.write("_HiStOrY_V2_\nfrom\\040libedit\\012two\n")
    chat = Chat("history", "-n", "4")
    chat.prompt()
    chat.type("new\r")
    chat.prompt()
    chat.type("\x12lib\r")
    chat.prompt()
    chat.type("\x04")
    chat.leave()
    texts = [m["content"] for m in chat.said()]
    chat.check(texts == ["new", "from libedit\ntwo"], texts)
    with open(HISTORY, encoding="utf-8") as f:
        lines = f.read()
    chat.check(lines == "new\nfrom libedit\\ntwo\n", lines)


def test_plain():
    """Terminals that can do nothing but print; and nowhere to keep a history."""
    for name, term in (("dumb", "dumb"), ("unset", "")):
        chat = Chat(name, "-n", "4", TERM=term, XDG_STATE_HOME="/proc/none", LC_ALL="C")
        chat.prompt(keys=False)
        chat.type("one \u00e9\r")
        chat.prompt(keys=False)
        chat.type("never sent")
        chat.interrupt(keys=False)
        chat.type("/exit\r")
        chat.leave()
        chat.check([m["content"] for m in chat.said()] == ["one \u00e9"], chat.said())
        chat.check(b"\x1b" not in chat.seen, "escapes")


for test in (test_keys, test_paste, test_interrupt, test_terminate, test_suspend, test_quit,
             test_history, test_plain):
    test()
