"""Logging of the long-running programs: one line per happening, on stderr, plain under journald.

Rules
- The standard library's logging with the levels trace, debug, info, warn, error.
- A line is ``2026-03-03T12:00:00Z INFO server  job=17 worker=w1 offered``; under journald (`JOURNAL_STREAM`) time and
  level are the journal's own: the line begins with the priority in angle brackets (sd-daemon(3)).
- What others sent is shown escaped and cut: a peer can neither fake a line nor fill the disk with one.
- A secret is never given to a logger.
- A log file of ours is bounded: at `FILE_LIMIT` bytes it becomes ``<name>.1``, of which one is kept.
- A program that serves others waits for no terminal: `Ctrl-S`, or a pipe that nobody reads, would stop all of it.
"""

from __future__ import annotations

import atexit
import logging
import logging.handlers
import os
import re
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from io import TextIOWrapper
from typing import TextIO

from kueue.errors import ConfigError

TRACE = 5
LEVELS = {
    "trace": TRACE,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
}
_NAMES = {level: name.upper() for name, level in LEVELS.items()}
_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
FILE_LIMIT = 2**20
"""Bytes of a log file and of the one before it: a log must never fill the home directory."""
_file: list[logging.Handler] = []
"""The file that `to_file` named; it stays when `start` is called again for another level."""
WAITING_LINES = 10_000
"""That a stream which is not taken off us may keep waiting; what is said beyond that is counted and dropped."""
_PARTING_SECONDS = 0.5
_outlet: list[_Outlet] = []
"""What `unhurried` made; it stays when `start` is called again."""
_TAIL_BYTES = 4000
_PREFIX = re.compile(r"^\S+Z [A-Z]+ +\S+  ")
VALUE_LIMIT = 300
"""Characters of one value that are shown: a command line of 128 KiB is no log line."""


def level(name: str) -> int:
    """The number of a level given in any letter case; `ConfigError` naming the five if it is none of them."""
    try:
        return LEVELS[name.strip().lower()]
    except KeyError:
        raise ConfigError(f"log_level must be one of {', '.join(LEVELS)}, not '{name}'.") from None


def start(
    level_name: str = "info", *, stream: TextIO | None = None, environ: Mapping[str, str] = os.environ
) -> logging.Logger:
    """Send what the loggers below ``kueue`` say to `stream` (stderr). Called again it replaces what was set before."""
    chosen = level(level_name)
    out: TextIO | _Outlet = stream or (_outlet[0] if _outlet else sys.stderr)
    logging.addLevelName(TRACE, "TRACE")
    handler = logging.StreamHandler(out)
    handler.setFormatter(_Journal() if _is_journal(out, environ) else _Plain())
    root = logging.getLogger("kueue")
    # Started with its stderr in that very file, a program would write every line twice, and without a bound.
    is_there = any(_is_same(out, kept) for kept in _file)
    root.handlers[:] = [*_file, *([] if is_there else [handler])]
    root.setLevel(chosen)
    root.propagate = False
    # Neither caller nor thread nor process is shown; to find them out takes half the time of a line (logging HOWTO).
    logging._srcfile = None  # noqa: SLF001 - the documented way
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    # A log that cannot be written (closed terminal, full disk) must not stop the program that writes it.
    logging.raiseExceptions = False
    return root


def to_file(path: str, limit: int = FILE_LIMIT) -> None:
    """From now on log to that file (0600), too, also when `start` is called again. Raises `OSError` if it cannot."""
    handler = _Bounded(path, maxBytes=limit, backupCount=1, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(_Plain())
    for before in _file:
        before.close()
    _file[:] = [handler]


def unhurried() -> None:
    """From now on a thread of its own writes to stderr, also when `start` is called again: nobody else waits for it."""
    if _outlet or sys.stderr is None:
        return
    try:
        outlet = _Outlet(sys.stderr)
    except (OSError, ValueError, RuntimeError):
        return  # no descriptor, which keeps nobody waiting; or no thread to be had
    _outlet.append(outlet)
    atexit.register(written)
    for handler in logging.getLogger("kueue").handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr:
            handler.setStream(outlet)


def written(seconds: float = _PARTING_SECONDS) -> bool:
    """Whether all that was said until now has been written to stderr, waiting so long for that."""
    return not _outlet or _outlet[0].is_empty_within(seconds)


def terminal_is_lost() -> bool:
    """Was stderr a terminal, and is not any more: the window was closed, the session of screen ended?"""
    return bool(_outlet) and _outlet[0].was_terminal and not os.isatty(_outlet[0].fileno())


def outlive_terminal(program: str, path: str, end: str) -> None:
    """What a program does about SIGHUP before it reads its settings anew: say once if it lost its terminal by that.

    What it says goes to the file `path` from now on, unless it has a log file already; `end`: the command to end it.
    """
    if not terminal_is_lost():
        return
    _outlet[0].was_terminal = False
    where = ""
    if not _file:
        try:
            to_file(path)
        except OSError:
            return  # there is nobody left to tell
        logging.getLogger("kueue").handlers[:] = _file
        where = " What it says is in this file from now on."
    logger("log").warning("the terminal of %s is gone; it goes on without one.%s To end it: %s", program, where, end)


def close_file() -> None:
    """Undo `to_file`; what is logged after that goes where `start` says."""
    root = logging.getLogger("kueue")
    for handler in _file:
        root.removeHandler(handler)
        handler.close()
    _file.clear()


def last_words(path: str) -> str:
    """What a log file says last, without time, level and part; empty if there is no such file.

    Of an error that ended the program, which stands in several lines there, the sentence.
    """
    try:
        with open(path, "rb") as file:  # noqa: PTH123  as cheap as the rest of this module
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return ""
    last = max((number for number, line in enumerate(lines) if _PREFIX.match(line)), default=0)
    return complaint("\n".join(lines[last:]))


def complaint(text: str) -> str:
    """What a program of ours says went wrong: its last error without the hint; else its last line; empty if none."""
    # A traceback with several errors draws lines around them.
    lines = [line.strip(" |") for line in text.splitlines() if any(map(str.isalnum, line))]
    errors = [line.removeprefix("Error: ") for line in lines if line.startswith("Error: ")]
    return bare((errors or lines)[-1]) if lines else ""


def bare(line: str) -> str:
    """What a line of a log says, without time, level and part."""
    return safe(_PREFIX.sub("", line))


def logger(part: str) -> logging.Logger:
    """The logger of one part, for example ``server.sessions``."""
    return logging.getLogger(f"kueue.{part}")


def keys(**values: object) -> str:
    """``job=17 worker=w1 reason="no such directory"``; what is None is left out."""
    return " ".join(f"{key}={_value(value)}" for key, value in values.items() if value is not None)


def _value(value: object) -> str:
    text = safe(str(value))
    # Three searches in C: this runs for every value of every job.
    plain = text and " " not in text and '"' not in text and "=" not in text
    return text if plain else '"' + text.replace('"', '\\"') + '"'


def safe(text: str, limit: int = VALUE_LIMIT) -> str:
    """`text` in one line without control characters and undecodable bytes, cut to `limit` characters."""
    cut = text if len(text) <= limit else f"{text[:limit]}...({len(text) - limit} more)"
    doubled = cut.replace("\\", "\\\\")
    return doubled if doubled.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in doubled)


def _is_journal(stream: TextIO | _Outlet, environ: Mapping[str, str]) -> bool:
    """Is `stream` the very socket that systemd connected to the journal? A redirected one is not (sd-daemon(3))."""
    device, _, inode = environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        found = os.fstat(stream.fileno())
        return (found.st_dev, found.st_ino) == (int(device), int(inode))
    except (OSError, ValueError):
        return False


def _line(record: logging.LogRecord) -> str:
    text = record.getMessage()
    return text if text.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "replace").decode("ascii")


class _Outlet:
    """A text stream whose writes never wait: a thread takes what is written to the descriptor of another stream."""

    def __init__(self, stream: TextIO) -> None:
        self._descriptor = stream.fileno()
        self._encoding = stream.encoding or "utf-8"
        self.was_terminal = os.isatty(self._descriptor)
        self._lines: deque[str] = deque()
        self._dropped = 0
        self._is_writing = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def fileno(self) -> int:
        return self._descriptor

    def write(self, text: str) -> int:
        with self._changed:
            if len(self._lines) < WAITING_LINES:
                self._lines.append(text)
                self._changed.notify_all()
            else:
                self._dropped += 1
        return len(text)

    def flush(self) -> None:
        """Nothing: to wait for it is what nobody shall do."""

    def is_empty_within(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._lines and not self._is_writing, seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._lines)
                self._is_writing = True
                text = "".join(self._lines)
                self._lines.clear()
                if self._dropped:
                    text += f"({self._dropped} lines were dropped: nobody took them)\n"
                    self._dropped = 0
            left = memoryview(text.encode(self._encoding, "backslashreplace"))
            try:
                while left:
                    left = left[self._taken(left) :]
            except OSError:
                pass  # a terminal that is gone, a disk that is full: nobody is left to tell, and the program goes on

    def _taken(self, left: memoryview) -> int:
        """Bytes of it that were written."""
        try:
            return os.write(self._descriptor, left)
        except BlockingIOError:
            # Some program that shares the terminal has said that nobody waits for it; this thread is there to wait.
            select.select((), (self._descriptor,), ())
            return 0


class _Bounded(logging.handlers.RotatingFileHandler):
    """Private, and silent about a disk that is full: a log is no reason to stop."""

    def _open(self) -> TextIOWrapper:
        return open(  # type: ignore[return-value]  # a text mode gives no other
            self.baseFilename,
            self.mode,
            encoding=self.encoding,
            errors=self.errors,
            opener=lambda path, flags: os.open(path, flags | os.O_CLOEXEC, 0o600),
        )


def _is_same(stream: TextIO | _Outlet, handler: logging.Handler) -> bool:
    """Does the stream lead into the file of that handler?"""
    file = getattr(handler, "stream", None)
    try:
        return file is not None and os.path.sameopenfile(stream.fileno(), file.fileno())
    except (OSError, ValueError):
        return False


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        name = _NAMES.get(record.levelno, record.levelname)
        text = f"{moment}.{int(record.msecs):03}Z {name:5} {record.name.removeprefix('kueue.')}  {_line(record)}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class _Journal(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        priority = next((number for level, number in _PRIORITIES if record.levelno >= level), 7)
        text = f"{record.name.removeprefix('kueue.')}  {_line(record)}"
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        return "\n".join(f"<{priority}>{line}" for line in text.split("\n"))
