"""What a keeper and its spawner share in memory: each can look at any time, and nobody is woken by it."""

from __future__ import annotations

import mmap

_DEADLINE, _LAPSED, _WRITTEN, _STOOD_IN, _NOTED = range(5)


class Shared:
    """One page, made before the fork: each process sees what the other wrote, also when that one is stopped or dead.

    Each number is eight bytes at a multiple of eight, which a processor writes in one piece, and has one writer. Who
    reads several may see some as they were before. Moments are boottime.
    """

    def __init__(self, now: float) -> None:
        """Raises `OSError` where there is no memory for it."""
        self._cells = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("d")
        self.write(now, float("-inf"), lapsed=True)

    def write(self, now: float, deadline: float, *, lapsed: bool) -> None:
        """By the keeper, at the end of each of its turns: where the lease ends, and what it has done about that."""
        self._cells[_WRITTEN] = now
        self._cells[_DEADLINE] = deadline
        self._cells[_LAPSED] = lapsed

    @property
    def deadline(self) -> float:
        return self._cells[_DEADLINE]

    @property
    def lapsed(self) -> bool:
        return bool(self._cells[_LAPSED])

    @property
    def written_at(self) -> float:
        """When the keeper was last at work."""
        return self._cells[_WRITTEN]

    @property
    def stood_in_since(self) -> float | None:
        """Since when the spawner does, or did, the keeper's work, see `stand_in`; None: the keeper has noted it."""
        since = self._cells[_STOOD_IN]
        return since if since != self._cells[_NOTED] else None

    def stands_in(self, since: float) -> None:
        """By the spawner, before it stops the first tree."""
        self._cells[_STOOD_IN] = since

    def noted(self, since: float) -> None:
        """By the keeper, when the spawner has said that it no longer does what it began then."""
        self._cells[_NOTED] = since
