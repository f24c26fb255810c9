"""screen.py - a terminal for tests: what programs print on a pseudo-terminal, as rows of text.

It knows what a VT100 does with line ends, pending wraps, tabs, wide and combining characters, and
the escape sequences that nibble uses; any other sequence fails the test."""
import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
import unicodedata

SEQUENCE = re.compile(r"\x1b\[(\??)([0-9;]*)([@-~])")
LIMIT = 60  # seconds for anything


def width(char):
    """Columns of a character."""
    if unicodedata.combining(char) or unicodedata.category(char) in ("Cf", "Me", "Mn"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


class Row(list):
    """Cells; a wide character has an empty one after it."""

    wrapped = False  # the terminal went on in the next row, without a line end


class Screen:
    """The rows that have scrolled away, and those of the window."""

    def __init__(self, rows, columns):
        self.columns, self.rows = columns, rows
        self.gone, self.cells = [], [Row() for _ in range(rows)]
        self.y = self.x = 0
        self.wraps = False  # the last column is written; the next character goes to the next row
        self.pending, self.cut = "", b""  # of a sequence, and of a character

    def text(self):
        """All rows, without blanks at their ends and without empty rows at the end."""
        rows = ["".join(row).rstrip() for row in self.gone + self.cells]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    def lines(self):
        """The rows, those joined between which there was no line end."""
        lines, wrapped = [], False
        for row in self.gone + self.cells:
            text = "".join(row)
            if wrapped:
                lines[-1] += text
            else:
                lines.append(text)
            wrapped = row.wrapped
        while lines and not lines[-1].strip():
            lines.pop()
        return [line.rstrip() for line in lines]

    def cursor_row(self):
        """The row of the cursor, counted from the first that was written."""
        return len(self.gone) + self.y

    def resize(self, rows, columns):
        """As xterm does it: columns are cut off; the row of the cursor stays in the window."""
        while self.y >= rows:
            self.gone.append(self.cells.pop(0))
            self.y -= 1
        self.cells = (self.cells + [Row() for _ in range(rows)])[:rows]
        for row in self.cells:
            del row[columns:]
        self.rows, self.columns = rows, columns
        self.x, self.wraps = min(self.x, columns - 1), False

    def line_feed(self):
        self.y += 1
        if self.y == self.rows:
            self.gone.append(self.cells.pop(0))
            self.cells.append(Row())
            self.y -= 1

    def put(self, char):
        wide = width(char)
        row = self.cells[self.y]
        if wide == 0:
            at = self.x if self.wraps else self.x - 1
            while at > 0 and row[at] == "":
                at -= 1
            row[at] += char
            return
        if self.wraps or self.x + wide > self.columns:
            row.wrapped = True
            self.x = 0
            self.line_feed()
        row = self.cells[self.y]
        row.extend(" " * (self.x + wide - len(row)))
        row[self.x:self.x + wide] = [char] + [""] * (wide - 1)
        self.wraps = self.x + wide == self.columns
        self.x = min(self.x + wide, self.columns - 1)

    def sequence(self, private, numbers, last):
        n = int(numbers.split(";")[0] or 0)
        row = self.cells[self.y]
        if last in "ABCH":
            self.wraps = False
        if private:
            assert (numbers, last) in (("2004", "h"), ("2004", "l")), (numbers, last)
        elif last == "A":
            self.y = max(self.y - max(n, 1), 0)
        elif last == "B":
            self.y = min(self.y + max(n, 1), self.rows - 1)
        elif last == "C":
            self.x = min(self.x + max(n, 1), self.columns - 1)
        elif last == "H":
            assert not numbers
            self.y = self.x = 0
        elif last == "K":
            assert n == 0
            del row[self.x:]
        elif last == "J":
            assert n in (0, 2)
            if n == 0:
                del row[self.x:]
            for y in range(self.y + 1 if n == 0 else 0, self.rows):
                self.cells[y] = Row()
        else:
            assert last == "m", f"the terminal does not know {numbers}{last}"

    def decode(self, data):
        """UTF-8, of which the last character may be cut."""
        data = self.cut + data
        for keep in range(4):
            try:
                text = data[:len(data) - keep].decode()
            except UnicodeDecodeError:
                continue
            self.cut = data[len(data) - keep:]
            return text
        raise AssertionError(f"not UTF-8: {data!r}")

    def write(self, data):
        """Bytes that the program has printed."""
        text, self.pending = self.pending + self.decode(data), ""
        at = 0
        while at < len(text):
            char = text[at]
            if char == "\x1b":
                found = SEQUENCE.match(text, at)
                if not found:
                    assert len(text) - at < 16, f"no sequence: {text[at:at + 16]!r}"
                    self.pending = text[at:]
                    return
                self.sequence(*found.groups())
                at = found.end()
                continue
            at += 1
            if char == "\r":
                self.x, self.wraps = 0, False
            elif char == "\n":
                self.wraps = False
                self.line_feed()
            elif char == "\b":
                self.x, self.wraps = max(self.x - 1, 0), False
            elif char == "\t":
                to = min((self.x // 8 + 1) * 8, self.columns - 1)
                row = self.cells[self.y]
                row.extend(" " * (to - len(row)))
                self.x = to
            elif char != "\a":
                self.put(char)


class Program:
    """A program on a pseudo-terminal, with the screen that shows it."""

    def __init__(self, command, rows=24, columns=80, **environment):
        env = dict(os.environ, TERM="xterm", LC_ALL="C.UTF-8")
        env.pop("NO_COLOR", None)
        env.update(environment)
        self.screen, self.running = Screen(rows, columns), True
        ready, go = os.pipe()
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.read(ready, 1)  # until the window has its size
            os.execvpe(command[0], command, env)
        self.resize(rows, columns)
        os.write(go, b"x")
        os.close(ready)
        os.close(go)

    def resize(self, rows, columns):
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen.resize(rows, columns)

    def fail(self, what):
        if self.running:
            os.kill(self.pid, signal.SIGKILL)
        raise AssertionError(what + "\n" + "\n".join("    |" + row for row in self.screen.text()))

    def read(self, seconds):
        """More output; False at its end, or when there is none for so long."""
        if not select.select([self.fd], [], [], seconds)[0]:
            return False
        try:
            piece = os.read(self.fd, 65536)
        except OSError:
            piece = b""
        self.screen.write(piece)
        return bool(piece)

    def settle(self, seconds=0.3):
        """All output until there is none for so long."""
        while self.read(seconds):
            pass

    def wait_for(self, done, what):
        """Reads until done(rows)."""
        end = time.monotonic() + LIMIT
        while not done(self.screen.text()):
            if time.monotonic() > end or not self.read(LIMIT):
                self.fail(f"no {what}")

    def type(self, text):
        os.write(self.fd, text.encode())

    def leave(self, code=0):
        """Waits for the end, and checks the exit code."""
        end = time.monotonic() + LIMIT
        while self.read(LIMIT):
            if time.monotonic() > end:
                self.fail("it does not end")
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.running = False
        os.close(self.fd)
        if status != code:
            self.fail(f"exit code {status}, {code} expected")
        return self.screen.text()
