"""Gives a whole new state the name of the state; what was there is moved aside, with its log."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kueue import places
from kueue.storage.in_use import refuse_used

COMPANIONS = ("", "-wal", "-shm", "-journal")
"""SQLite's own files of one database; they belong together."""


def exchange(draft: Path, target: Path, aside: Path) -> Path | None:
    """Give the draft the target's name. Returns the new name of what was there; none if nothing was.

    Whatever it raises, all but the draft is as it was then: `StorageError` if another program has the target open. The
    caller holds the server's lock; `aside` is free.
    """
    refuse_used(target)
    names = [(target.with_name(target.name + suffix), aside.with_name(aside.name + suffix)) for suffix in COMPANIONS]
    there = [(old, new) for old, new in names if old.exists()]
    try:
        # Mostly there is no log beside a state that is whole: then no moment is without a state.
        if there != names[:1] or not _is_linked(*names[0]):
            for old, new in there:
                old.rename(new)
        draft.replace(target)
        with contextlib.suppress(OSError):  # it has its name, if perhaps not yet after a loss of power
            places.sync_directory(target.parent)
    except BaseException:
        # By what is there: a Ctrl-C may come between any two steps.
        if names[0] not in there and target.exists():
            target.rename(draft)  # a log that comes back belongs to no such file
        for old, new in reversed(there):
            if new.exists():
                if old.exists() and old.samefile(new):
                    new.unlink()
                else:
                    new.rename(old)
        raise
    return aside if aside.exists() else None


def free_stamp(names: Callable[[str], Sequence[Path]]) -> str:
    """The time, with a number behind it when there was another exchange in this very second, or an hour comes twice:
    nothing of it is replaced. `names`: those that would be used with a stamp.
    """
    now = time.strftime("%Y%m%d-%H%M%S")
    stamps = (now, *(f"{now}-{number}" for number in range(2, 1000)))
    return next(one for one in stamps if not any(path.exists() for path in names(one)))


def _is_linked(old: Path, new: Path) -> bool:
    try:
        os.link(old, new)
    except OSError:  # no hard links there (FAT, some file servers)
        return False
    return True
