"""Where output goes: the width, colour and encoding of the terminal, results on stdout, remarks on stderr."""

from __future__ import annotations

import os
import sys

from kueue.console import Closed
from kueue.errors import KueueError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO

UNKNOWN_HEIGHT = 1000
"""Lines of an output that is no terminal."""

_STYLES = {
    "bold": "1",
    "dim": "2",
    "head": "1;4",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "blue": "34",
}


class Screen:
    """The two output streams of a command.

    `columns` is none when stdout is no terminal: then nothing is shortened.
    """

    def __init__(self, stdout: TextIO | None = None, stderr: TextIO | None = None) -> None:
        self.out: TextIO = stdout if stdout is not None else sys.stdout
        self.is_closed = isinstance(self.out, Closed)
        """Whoever started us has closed stdout: results reach nobody."""
        self._err: TextIO | None = stderr if stderr is not None else sys.stderr
        for stream in (self.out, self._err):
            # A terminal of another encoding shows \xfc for what it does not have, and the listing goes on.
            if stream is not None and hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
        self.is_terminal = _is_terminal(self.out)
        self.columns: int | None = None
        self.lines = UNKNOWN_HEIGHT
        if self.is_terminal:
            self.columns, self.lines = _size(self.out)
        self.has_colour = (
            self.is_terminal
            and not os.environ.get("NO_COLOR")
            and os.environ.get("CLICOLOR") != "0"
            and os.environ.get("TERM") != "dumb"
        )
        self._status = ""
        self.is_broken = False
        """What was printed cannot be written out; trying again at exit would only fail again."""

    def print(self, text: str = "") -> None:
        """One line (or several) of results."""
        try:
            self.out.write(text + "\n")
        except OSError as error:
            raise self._unwritable(error) from error

    def remark(self, text: str) -> None:
        """A line for the person, beside the results."""
        if self._err is None:
            return
        self.clear_status()
        try:
            self._err.write(text + "\n")
            self._err.flush()
        except OSError:
            self._err = None  # nobody is left to hear of it

    def status(self, text: str) -> None:
        """Replaces the single line of progress on stderr; nothing when stderr is no terminal."""
        if self._err is None or not _is_terminal(self._err) or text == self._status:
            return
        self._status = text
        try:
            self._err.write(f"\r\x1b[K{text}")
            self._err.flush()
        except OSError:
            self._err = None  # the terminal is gone; the results may still have a reader

    def clear_status(self) -> None:
        if self._status:
            self.status("")

    def write_bytes(self, data: bytes) -> None:
        """Unchanged bytes on stdout, at once."""
        try:
            self.out.flush()
            self.out.buffer.write(data)
            self.out.buffer.flush()
        except OSError as error:
            raise self._unwritable(error) from error

    def write_error_bytes(self, data: bytes) -> None:
        """Unchanged bytes on stderr, at once."""
        if self._err is None:
            return
        self.clear_status()
        try:
            self._err.flush()
            self._err.buffer.write(data)
            self._err.buffer.flush()
        except OSError as error:
            # These are results too, so it is a failure, although the sentence may reach nobody.
            self._err = None
            if isinstance(error, BrokenPipeError):
                raise
            raise KueueError(f"The job's stderr cannot be written: {error.strerror}.") from error

    def flush(self) -> None:
        self.clear_status()
        try:
            self.out.flush()
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> Exception:
        """What the person is told; a reader that has left is no error and passes as it is."""
        self.is_broken = True
        if isinstance(error, BrokenPipeError):
            return error
        return KueueError(f"The results cannot be written: {error.strerror}.")

    def shown(self, text: str) -> str:
        """The text as it will stand there: what the terminal's encoding does not have takes several cells."""
        encoding = self.out.encoding or "utf-8"
        return text if text.isascii() else text.encode(encoding, "backslashreplace").decode(encoding)

    def styled(self, text: str, style: str) -> str:
        """The text in a style named in this module, if there is colour; `style` may be empty."""
        if not style or not self.has_colour:
            return text
        return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # it is closed
        return False


def _size(stream: TextIO) -> tuple[int | None, int]:
    """Columns (none: unlimited) and lines; COLUMNS and LINES overrule the terminal, senseless values do not count."""
    columns, lines = _number("COLUMNS"), _number("LINES")
    try:
        measured = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return columns or None, lines or UNKNOWN_HEIGHT
    return columns or measured.columns or None, lines or measured.lines or UNKNOWN_HEIGHT


def _number(variable: str) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0
