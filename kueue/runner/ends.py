"""The ends of attempts: written down first, told after, and what is left of them dropped."""

from __future__ import annotations

import errno
import os
import time
from typing import TYPE_CHECKING

from kueue.runner.actions import Finish
from kueue.runner.care import Care
from kueue.runner.spool import Record

if TYPE_CHECKING:
    from kueue.runner.keeper import Keeper


NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
PAGE_BYTES = 4096
FULL = "the disk of its worker was full when it ended: output may be missing"


class Ends:
    """Those of one keeper's attempts."""

    def __init__(self, keeper: Keeper) -> None:
        self.unwritten: dict[int, Record] = {}
        """Offer → the record of an end that did not fit on the disk yet: nobody is told of it."""
        self.undropped: set[int] = set()
        """Attempts that are forgotten and whose records the disk does not let go yet."""
        self._keeper = keeper
        self._dropped: set[int] = set()
        """Tags of trees that are over and whose cgroups are still there."""

    def finish(self, finish: Finish, now: float) -> None:
        care = self._keeper.cares[finish.offer]
        record = self.unwritten[care.offer] = care.conclude(finish, now, time.time())
        if self._is_full():
            _say_full(record)
        self.write(care)

    def write(self, care: Care) -> None:
        """Write the record down and tell of it; when it does not fit, it is tried once more later."""
        record = self.unwritten[care.offer]
        try:
            self._keeper.spool.write_exit(care.offer, record)
        except OSError as error:  # a full disk, most likely: nothing is told that is not written
            if error.errno in NO_ROOM:
                _say_full(record)
            self._keeper.log(f"the record of attempt {care.offer} cannot be written: {error}")
            self._keeper.once_more(care.offer)
            return
        del self.unwritten[care.offer]
        care.end = record
        self._keeper.mirror.changed.add(care.offer)
        self.drop_tree(care)
        self._keeper.clerk.tell_end(care)

    def _is_full(self) -> bool:
        """A program that could not write its last words seldom says so."""
        try:
            disk = os.statvfs(self._keeper.spool.root)
        except OSError:
            return False
        return disk.f_bavail * disk.f_frsize < PAGE_BYTES

    def vanish(self, offer: int) -> None:
        """It never ran: nothing of it is kept."""
        care = self._keeper.cares.pop(offer, None)
        if care is not None:
            self.drop_tree(care)
            self.drop_records(offer)

    def drop_records(self, offer: int) -> None:
        """Where the disk does not let them go it is tried once more later: nobody waits for that."""
        try:
            self._keeper.spool.forget(offer)
        except OSError as error:
            if offer not in self.undropped:
                self._keeper.log(f"the records of attempt {offer} cannot be dropped: {error}")
            self.undropped.add(offer)
            self._keeper.once_more(offer)
        else:
            self.undropped.discard(offer)

    def taken_back(self, care: Care) -> None:
        """Its records and its cgroup are in use again."""
        self.undropped.discard(care.offer)
        if care.cgroup:
            self._dropped.discard(care.tag)

    def drop_cgroups(self) -> None:
        """Remove those of trees that are over, as far as nothing lives in them."""
        self._dropped = {tag for tag in self._dropped if not self._keeper.scanner.drop(tag)}

    def drop_tree(self, care: Care) -> None:
        """What was allowed to stay behind keeps its cgroup for as long as it lives."""
        self._keeper.scanner.forget(care.tag)
        if care.cgroup:
            self._dropped.add(care.tag)


def _say_full(record: Record) -> None:
    """Once, and not of what never ran."""
    if record["started_wall"] is not None and FULL not in record["notes"]:
        record["notes"].append(FULL)
