"""Gives a whole new state the name of the state; what was there is moved aside, with its log."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from kueue import places

COMPANIONS = ("", "-wal", "-shm", "-journal")
"""SQLite's own files of one database; they belong together."""


def exchange(draft: Path, target: Path, aside: Path) -> Path | None:
    """Give the draft the target's name. Returns the new name of what was there; none if nothing was.

    Whatever it raises, all but the draft is as it was then. The caller holds the server's lock; `aside` is free.
    """
    names = [(target.with_name(target.name + suffix), aside.with_name(aside.name + suffix)) for suffix in COMPANIONS]
    there = [(old, new) for old, new in names if old.exists()]
    try:
        # Mostly there is no log beside a state that is whole: then no moment is without a state.
        if there != names[:1] or not _is_linked(*names[0]):
            for old, new in there:
                old.rename(new)
        draft.replace(target)
    except BaseException:
        # By what is there: a Ctrl-C may come between any two steps.
        for old, new in reversed(there):
            if new.exists():
                if old.exists() and old.samefile(new):
                    new.unlink()
                else:
                    new.rename(old)
        raise
    with contextlib.suppress(OSError):  # it has its name, if perhaps not yet after a loss of power
        places.sync_directory(target.parent)
    return aside if aside.exists() else None


def _is_linked(old: Path, new: Path) -> bool:
    try:
        os.link(old, new)
    except OSError:  # no hard links there (FAT, some file servers)
        return False
    return True
