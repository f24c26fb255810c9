"""Chats on a pseudo-terminal whose window changes while somebody types.
usage: chat_resize.py NIBBLE MODEL WORK SESSIONS [FIRST-SEED]

A chat has to end by itself with exit code 0, whatever was typed, and no sanitizer may complain."""
import fcntl
import os
import pty
import random
import select
import signal
import struct
import sys
import termios
import time

NIBBLE, MODEL, WORK = sys.argv[1:4]
SESSIONS = int(sys.argv[4])
FIRST = int(sys.argv[5]) if len(sys.argv) > 5 else 1
LIMIT = 120  # seconds for the end of a chat
LEAVE = b"\x07\x1b[201~\x05\x15\x04"  # out of a search and a paste; an empty line; its end

WORDS = ["a", "word ", "two words ", "\u00e9", "\u4e16\u754c", "\U0001f600", "e\u0301", "x" * 50,
         "\\", '"""', "\t"]
KEYS = ["\x01", "\x02", "\x05", "\x06", "\x0b", "\x0c", "\x0e", "\x10", "\x12", "\x14", "\x15",
        "\x17", "\x19", "\x7f", "\x08", "\x1a", "\x1b", "\x1bb", "\x1bf", "\x1bd", "\x1b\x7f",
        "\x1b[A", "\x1b[B", "\x1b[C", "\x1b[D", "\x1b[H", "\x1b[F", "\x1b[3~", "\x1b[1;5C",
        "\x1b[1;5D", "\x1bOA", "\x1bOP", "\x1b[[A", "\x1b[", "\x07"]
RAW = [b"\xff\xfe", b"\xc3", b"\xe4\xb8", b"\x80", b"\xed\xa0\x80"]


class Chat:
    """A running chat; what it prints is kept."""

    def __init__(self, name, rows, columns):
        self.name, self.seen, self.status = name, b"", None
        env = dict(os.environ, TERM="xterm", XDG_STATE_HOME=os.path.join(WORK, "state"), HOME=WORK,
                   LC_ALL="C.UTF-8")
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execve(NIBBLE, [NIBBLE, "chat", "-q", "-m", MODEL, "-n", "1"], env)
        self.resize(rows, columns)
        self.wait_for(b"\x1b[?2004h")  # the prompt may be wrapped

    def fail(self, what):
        print(f"FAIL {self.name}: {what}\n    the terminal: {self.seen[-3000:]!r}")
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
        sys.exit(1)

    def ended(self):
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is not None

    def read(self, seconds):
        """All output that comes before it pauses for so long."""
        while select.select([self.fd], [], [], seconds)[0]:
            try:
                piece = os.read(self.fd, 65536)
            except OSError:
                piece = b""
            if not piece:
                break
            self.seen += piece

    def wait_for(self, text):
        end = time.monotonic() + LIMIT
        while text not in self.seen:
            self.read(0.01)
            if self.ended() or time.monotonic() > end:
                self.fail(f"no {text!r}, exit code {self.status}")

    def resize(self, rows, columns):
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys):
        keys = keys if isinstance(keys, bytes) else keys.encode()
        while keys and not self.ended():
            self.read(0)
            if select.select([], [self.fd], [], 0.1)[1]:
                try:
                    keys = keys[os.write(self.fd, keys[:512]):]
                except OSError:
                    break

    def leave(self):
        end = time.monotonic() + LIMIT
        while not self.ended():
            if time.monotonic() > end:
                self.fail("it does not end")
            self.type(LEAVE)
            self.read(0.2)
        self.read(0)
        os.close(self.fd)
        if self.status != 0:
            self.fail(f"exit code {self.status}")
        if b"Sanitizer" in self.seen or b"runtime error" in self.seen:
            self.fail("a sanitizer complains")


def shrink(count, rows, new_rows, columns=80, new_columns=80):
    """A line of so many characters, and a window that gets small and large again."""
    chat = Chat(f"{count} characters, {rows} x {columns} to {new_rows} x {new_columns}", rows,
                columns)
    chat.type("x" * count)
    chat.read(0.3)
    for size in ((new_rows, new_columns), (rows, columns)):
        chat.resize(*size)
        chat.read(0.3)
        chat.type("abc\x1b[D\x7f")
        chat.read(0.1)
    chat.leave()


def act(chat, rng):
    """Something that a user may do."""
    what = rng.random()
    if what < 0.40:
        chat.type("".join(rng.choices(WORDS, k=rng.randint(1, 30))))
    elif what < 0.60:
        chat.type("".join(rng.choices(KEYS, k=rng.randint(1, 5))))
    elif what < 0.68:
        text = "".join(rng.choices(WORDS + ["\r"], k=rng.randint(0, 200)))
        chat.type("\x1b[200~" + text + "\x1b[201~")
    elif what < 0.72:
        chat.type(rng.choice(RAW))
    elif what < 0.75:
        chat.type("\r")
    elif what < 0.76:
        chat.type("\x03")
    else:
        chat.resize(rng.choice([0, 1, 2, 3, 5, 10, 24, 50, 200, rng.randint(1, 100)]),
                    rng.choice([0, 1, 2, 3, 8, 20, 80, 132, 500, rng.randint(1, 200)]))


def session(seed):
    rng = random.Random(seed)
    chat = Chat(f"session {seed}", rng.randint(1, 60), rng.randint(1, 160))
    for _ in range(rng.randint(20, 60)):
        act(chat, rng)
        # The size is looked at ten times a second, and when a key comes.
        chat.read(rng.choice([0, 0, 0.001, 0.01, 0.12]))
        if chat.ended():  # Ctrl-D came where it ends the input
            break
    chat.leave()


shrink(300, 24, 2)
shrink(900, 50, 5)
shrink(900, 24, 24, 200, 3)
shrink(2000, 5, 1, 80, 1)
for number in range(FIRST, FIRST + SESSIONS):
    session(number)
print(f"{SESSIONS} sessions")
