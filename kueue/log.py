"""Logging of the long-running programs: one line per happening, on stderr, plain under journald.

Rules
- The standard library's logging with the levels trace, debug, info, warn, error.
- A line is ``2026-03-03T12:00:00Z INFO server  job=17 worker=w1 offered``; under journald (`JOURNAL_STREAM`) time and
  level are the journal's own: the line begins with the priority in angle brackets (sd-daemon(3)).
- What others sent is shown escaped and cut: a peer can neither fake a line nor fill the disk with one.
- A secret is never given to a logger.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
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
    out = stream or sys.stderr
    logging.addLevelName(TRACE, "TRACE")
    handler = logging.StreamHandler(out)
    handler.setFormatter(_Journal() if _is_journal(out, environ) else _Plain())
    root = logging.getLogger("kueue")
    root.handlers[:] = [handler]
    root.setLevel(chosen)
    root.propagate = False
    # Neither caller nor thread nor process is shown; to find them out takes half the time of a line (logging HOWTO).
    logging._srcfile = None  # noqa: SLF001 - the documented way
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    # A log that cannot be written (closed terminal, full disk) must not stop the program that writes it.
    logging.raiseExceptions = False
    return root


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


def _is_journal(stream: TextIO, environ: Mapping[str, str]) -> bool:
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
