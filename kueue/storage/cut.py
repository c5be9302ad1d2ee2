"""What the next start must know of a state or a log that was cut while the server ran: a note beside the state.

It is written before anything is done about the cut, and goes when nothing is lost, or when the loss was dealt with.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TypeAlias

import msgspec
from msgspec import Struct

from kueue import places, whole_file
from kueue.core.facts import Aggregates
from kueue.places import CUT_SUFFIX

Mark: TypeAlias = tuple[int, int]
"""(inode, UTC nanoseconds of its last change): a file that nobody has written to since, under whatever name."""


class Note(Struct, frozen=True):
    """All defaults: there was a note, and it cannot be read."""

    queue_id: str = ""
    is_log: bool = False
    """The state is whole and as of the last checkpoint, and what stands in the log is not; else it is the other way."""
    sums: Aggregates | None = None
    """As of the last commit: the numbers that were given."""
    since_wall: float = 0.0
    """UTC seconds of what the state was last as of; 0: not known."""
    cut_wall: float = 0.0
    """UTC seconds of when it was seen."""
    anew: Mark | None = None
    """Of the file that all there was is in: if that is the state, nothing is lost, and the log beside it is void."""


_decode = msgspec.json.Decoder(Note).decode


def write(state: Path, note: Note) -> None:
    """Flushed: what is done next must not come before it after a loss of power. Raises `OSError`."""
    whole_file.write(_beside(state), msgspec.json.encode(note), is_flushed=True)
    places.sync_directory(state.parent)


def read(state: Path) -> Note | None:
    """None: nothing was cut."""
    try:
        return _decode(_beside(state).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return Note()


def recovered(state: Path) -> bool:
    """What could be read of the state is the state now; only the numbers are still to be dealt with.

    False if it was not cut.
    """
    note = read(state)
    if note is None or note.is_log:
        return False
    with contextlib.suppress(OSError):
        write(state, msgspec.structs.replace(note, is_log=True))
    return True


def remove(state: Path) -> None:
    """Before anything is acknowledged: a later start would empty a sound log by it. Raises `OSError`."""
    with contextlib.suppress(FileNotFoundError):
        _beside(state).unlink()
        places.sync_directory(state.parent)


def mark(file: Path) -> Mark:
    """Raises `OSError`."""
    about = file.stat()
    return about.st_ino, about.st_mtime_ns


def is_anew(state: Path) -> bool:
    """It was written anew as a whole, and the server was killed before it could remove the note."""
    note = read(state)
    with contextlib.suppress(OSError):
        return note is not None and note.anew == mark(state)
    return False


def is_log_void(state: Path) -> bool:
    """A part of a log may be older than the state; to bring it in would damage that."""
    note = read(state)
    return note is not None and (note.is_log or is_anew(state))


def empty_log(state: Path) -> None:
    """Before the state is opened: a server that was killed may have left a log that is void. Raises `OSError`."""
    log = state.with_name(f"{state.name}-wal")
    if is_log_void(state) and log.is_file():
        with log.open("r+b") as file:
            file.truncate(0)
            os.fsync(file.fileno())


def _beside(state: Path) -> Path:
    return state.with_name(f"{state.name}{CUT_SUFFIX}")
