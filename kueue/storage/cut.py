"""What the next start must know of a state or a log that was cut while the server ran: a note beside the state.

It is written before anything is done about the cut, and goes when nothing is lost, or when the loss was dealt with.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
from msgspec import Struct

from kueue import whole_file
from kueue.core.facts import Aggregates

SUFFIX = ".cut"
"""Behind the name of the state."""


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


_decode = msgspec.json.Decoder(Note).decode


def write(state: Path, note: Note) -> None:
    """Raises `OSError`."""
    whole_file.write(_beside(state), msgspec.json.encode(note))


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
    """One that stays costs the next start some care and nothing else."""
    with contextlib.suppress(OSError):
        _beside(state).unlink()


def empty_log(state: Path) -> None:
    """Before the state is opened: a server that cut short its own end may have left a part of a cut log.

    A part of a log may be older than the state; to bring it in would damage that. Raises `OSError`.
    """
    note = read(state)
    log = state.with_name(f"{state.name}-wal")
    if note is not None and note.is_log and log.is_file():
        with log.open("r+b") as file:
            file.truncate(0)


def _beside(state: Path) -> Path:
    return state.with_name(f"{state.name}{SUFFIX}")
