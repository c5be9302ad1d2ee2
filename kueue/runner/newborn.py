"""Which process numbers were given out after another one: what a short job left is among a few, not among all.

Linux gives numbers out in ascending order and begins anew at the end, see pid_max in proc(5); the last one given out is
the last word of ``/proc/loadavg``. Threads have numbers as well. Containers may show a file of their own there (lxcfs),
whose last word is seconds old: that one is not asked.
"""
# ruff: noqa: PTH116, PTH123 (this runs a thousand times a second)

from __future__ import annotations

import os
from collections.abc import Callable

STARTS_PER_SECOND = 100_000  # of processes and threads, per processor: more than any reaches
MOST_SECONDS = 1.0
MOST_NUMBERS = 64  # a pass over all processes is not dearer than a look at so many


class Newborn:
    """Looks at the numbers that are younger than a given one."""

    def __init__(self) -> None:
        self._most_seconds = 0.0
        if _is_the_kernels_own():
            self._most_seconds = min(MOST_SECONDS, _pid_max() / (STARTS_PER_SECOND * (os.cpu_count() or 1)))

    def is_nobody(self, pid: int, seconds: float, wanted: Callable[[int], bool]) -> bool:
        """Is it certain that of all who got a number after `pid`, given out so many seconds ago, nobody who lives is
        `wanted`? Holds also for children that are born meanwhile to those who are.
        """
        first, last = pid + 1, _last_number()
        if seconds >= self._most_seconds:
            return False  # the numbers may have begun anew
        while 0 <= last - pid <= MOST_NUMBERS:
            if any(wanted(number) for number in range(first, last + 1)):
                return False
            first, last = last + 1, _last_number()
            if last == first - 1:
                return True
        return False


def _is_the_kernels_own() -> bool:
    try:
        return os.stat("/proc/loadavg").st_dev == os.stat("/proc").st_dev
    except OSError:
        return False


def _pid_max() -> int:
    try:
        with open("/proc/sys/kernel/pid_max", "rb", buffering=0) as file:
            return int(file.read(32))
    except (OSError, ValueError):
        return 0


def _last_number() -> int:
    """-1: this system does not tell."""
    try:
        with open("/proc/loadavg", "rb", buffering=0) as file:
            return int(file.read(128).split()[4])
    except (OSError, ValueError, IndexError):
        return -1
