"""An interactive program on a terminal of its own: keys go in, what stands on the screen comes out as plain text."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import termios
import time

_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # OSC
    r"|\x1b[P_^][^\x1b]*\x1b\\"  # DCS and their kin
    r"|\x1b[ -/]*[0-~]"  # short ones
    r"|[\x00-\x08\x0e-\x1a\x7f]"
)
_ERASE_LINE = "\x15"  # Ctrl-U


class Terminal:
    """One program that believes a person sits before it."""

    def __init__(self, argv: list[str], env: dict[str, str], cwd, *, columns: int = 120, lines: int = 60) -> None:
        self._outer, inner = os.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("4H", lines, columns, 0, 0))
        self.process = subprocess.Popen(
            argv,
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env=env,
            cwd=cwd,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - a system call alone
        )
        os.close(inner)
        self._raw = ""

    @property
    def text(self) -> str:
        """All that was shown so far, without colours and movements."""
        return _CONTROL.sub("", self._raw).replace("\r", "")

    def mark(self) -> int:
        """A place in `text`, for those who look only at what comes after it."""
        return len(self.text)

    def type(self, keys: str) -> None:
        os.write(self._outer, keys.encode())

    def until(self, *expected: str, since: int = 0, seconds: float = 30) -> str:
        """What was shown since the mark, as soon as it holds all of `expected`. Raises `AssertionError` if it does not."""
        deadline = time.monotonic() + seconds
        while True:
            shown = self.text[since:]
            if all(one in shown for one in expected):
                return shown
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not self._read(remaining):
                raise AssertionError(f"not shown within {seconds:g} s: {expected}\n--- shown:\n{self.text[since:]}")

    def press_tab(self, line: str, *expected: str, tabs: int = 1, tries: int = 10) -> str:
        """Types a line, presses TAB, and returns what is shown once that holds all of `expected`.

        A person whose machine is busy presses TAB again; so does this.
        """
        for left in range(tries - 1, -1, -1):
            since = self.mark()
            self.type(line + "\t" * tabs)
            try:
                return self.until(*expected, since=since, seconds=3)
            except AssertionError:
                if not left:
                    raise
                self.clear()
        raise AssertionError("no try was allowed")

    def clear(self) -> None:
        """Throws away the line that is being typed and gets a new prompt.

        Not by Ctrl-C: bash may notice it only when the next key comes, and then throws away that.
        """
        self.settle()
        self.type(_ERASE_LINE + "\n")
        self.settle()

    def settle(self, quiet_seconds: float = 0.2) -> None:
        """Reads until nothing comes for a moment."""
        while self._read(quiet_seconds):
            pass

    def _read(self, seconds: float) -> bool:
        if not select.select([self._outer], [], [], seconds)[0]:
            return False
        try:
            piece = os.read(self._outer, 65536)
        except OSError:  # EIO: the last process on the terminal has ended
            return False
        self._raw += piece.decode("utf-8", "replace")
        return bool(piece)

    def hang_up(self) -> None:
        """The window is closed; the kernel tells the program by SIGHUP."""
        os.close(self._outer)
        self._outer = -1

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGHUP)
            try:
                self.process.wait(2)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
        if self._outer >= 0:
            os.close(self._outer)
