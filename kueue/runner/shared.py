"""What a keeper and its spawner share in memory: each can look at any time, and nobody is woken by it."""

from __future__ import annotations

import mmap

_DEADLINE, _LAPSED, _PAUSE_TOLD, _WRITTEN, _STANDS_IN = range(5)


class Shared:
    """One page, made before the fork: each process sees what the other wrote, also when that one is stopped or dead.

    Each number is eight bytes at a multiple of eight, which a processor writes in one piece. Moments are boottime.
    """

    def __init__(self, now: float) -> None:
        """Raises `OSError` where there is no memory for it."""
        self._cells = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("d")
        self.write(now, float("-inf"), lapsed=True, pause_told=True)

    def write(self, now: float, deadline: float, *, lapsed: bool, pause_told: bool) -> None:
        """By the keeper, at the end of each of its turns: where the lease ends, and what it has done about that."""
        self._cells[_WRITTEN] = now
        self._cells[_DEADLINE] = deadline
        self._cells[_LAPSED] = lapsed
        self._cells[_PAUSE_TOLD] = pause_told

    @property
    def deadline(self) -> float:
        return self._cells[_DEADLINE]

    @property
    def lapsed(self) -> bool:
        return bool(self._cells[_LAPSED])

    @property
    def pause_told(self) -> bool:
        return bool(self._cells[_PAUSE_TOLD])

    @property
    def written_at(self) -> float:
        """When the keeper was last at work."""
        return self._cells[_WRITTEN]

    @property
    def stands_in_since(self) -> float:
        """Since when the spawner does the keeper's work, see `stand_in`; 0: it does not, and the keeper knows."""
        return self._cells[_STANDS_IN]

    @stands_in_since.setter
    def stands_in_since(self, moment: float) -> None:
        self._cells[_STANDS_IN] = moment
