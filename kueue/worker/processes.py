"""The processes of this worker's attempts, as ``/proc`` shows them: what they use, and how to stop them.

Rules
- A process belongs to an attempt by its *tag*, the soft limit of ``Max file locks`` that the runner gave it and that
  every descendant inherits; the start record of the attempt says which.
- Only ``stat`` and ``limits`` are read: both answer at once whatever the process waits for.
- A signal goes through a pidfd, to a process whose tag was read after the pidfd was opened: never to a bare number.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MEGABYTE = 1 << 20
PASSES = 20
"""Over a tree that forks while it is stopped; what is left then is met at the next look."""


YOUNG_SECONDS = 5.0
"""A process may be seen before it has become what it is."""


@dataclass
class Use:
    """What the tree of one attempt uses now."""

    cpu_seconds: float = 0.0
    """Of all its processes so far, with those of their children that they have waited for."""
    ram_mb: int = 0
    """Sum of resident sizes; shared pages count in each."""
    processes: int = 0


@dataclass(frozen=True)
class _Stat:
    """Of proc(5), fields 3, 6, 14…17, 22 and 24."""

    state: str
    session: int
    ticks: int
    start: int
    pages: int


class Trees:
    """Finds the processes of attempts. `spool`: the directory with one folder per attempt."""

    def __init__(self, spool: str) -> None:
        self._spool = spool
        self._tags: dict[int, int] = {}
        self._untagged: dict[int, int] = {}

    def use(self, offers: Collection[int]) -> dict[int, Use]:
        """What each of these attempts uses; one pass over ``/proc``. Attempts without a process have an empty entry."""
        by_tag = self._by_tag(offers)
        found = {offer: Use() for offer in by_tag.values()}
        if not found:
            return found
        for _pid, tag, stat in self._processes():
            offer = by_tag.get(tag)
            if offer is not None and stat.state not in "ZX":
                entry = found[offer]
                entry.cpu_seconds += stat.ticks / TICKS
                entry.ram_mb += stat.pages * PAGE_BYTES // MEGABYTE
                entry.processes += 1
        return found

    def stop(self, offers: Collection[int]) -> int:
        """SIGSTOP to every process of these attempts, in passes until none runs. Returns how many it was sent to."""
        return self._signal(offers, signal.SIGSTOP, lambda stat: stat.state not in "TtZX")

    def let_go(self, offers: Collection[int]) -> int:
        """SIGCONT to every stopped process of these attempts. Returns how many it was sent to."""
        return self._signal(offers, signal.SIGCONT, lambda stat: stat.state in "Tt", passes=1)

    def _signal(
        self, offers: Collection[int], number: signal.Signals, wanted: Callable[[_Stat], bool], passes: int = PASSES
    ) -> int:
        by_tag = self._by_tag(offers)
        sent = 0
        for _ in range(passes if by_tag else 0):
            hit = 0
            for pid, tag, stat in self._processes():
                if tag in by_tag and wanted(stat) and not self._is_of_a_runner(stat.session):
                    hit += _send(pid, tag, number)
            sent += hit
            if not hit:
                break
        return sent

    def _is_of_a_runner(self, session: int) -> bool:
        """A spawner carries the tag of the child it is about to make; its session is led by a process without one."""
        if session == 0:
            return False
        leader = read_stat(session)
        return leader is not None and leader.state not in "ZX" and read_tag(session) is None

    def _by_tag(self, offers: Collection[int]) -> dict[int, int]:
        for offer in [offer for offer in self._tags if offer not in offers]:
            del self._tags[offer]
        for offer in offers:
            if offer not in self._tags:
                tag = self._recorded_tag(offer)
                if tag is not None:
                    self._tags[offer] = tag
        return {tag: offer for offer, tag in self._tags.items()}

    def _recorded_tag(self, offer: int) -> int | None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return int(json.loads(Path(f"{self._spool}/{offer}/start.json").read_bytes())["tag"])
        return None

    def _processes(self) -> Iterator[tuple[int, int, _Stat]]:
        """(pid, tag, stat) of every tagged process. That an older one has no tag is remembered: it will get none."""
        young = time.clock_gettime(time.CLOCK_BOOTTIME) * TICKS - YOUNG_SECONDS * TICKS
        untagged: dict[int, int] = {}
        for name in os.listdir("/proc"):  # noqa: PTH208  names are wanted, a thousand of them every few seconds
            if not name.isdecimal():
                continue
            pid = int(name)
            stat = read_stat(pid)
            if stat is None:
                continue
            tag = None if self._untagged.get(pid) == stat.start else read_tag(pid)
            if tag is not None:
                yield pid, tag, stat
            elif stat.start < young:
                untagged[pid] = stat.start
        self._untagged = untagged


def read_stat(pid: int) -> _Stat | None:
    """None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = text[text.rfind(b")") + 2 :].split()
    return _Stat(
        state=fields[0].decode(),
        session=int(fields[3]),
        ticks=sum(map(int, fields[11:15])),
        start=int(fields[19]),
        pages=int(fields[21]),
    )


def read_tag(pid: int) -> int | None:
    """The soft limit of file locks; None if there is none or the process is gone or another user's."""
    try:
        text = Path(f"/proc/{pid}/limits").read_bytes()
    except OSError:
        return None
    at = text.find(b"\nMax file locks")
    if at < 0:
        return None
    word = text[at + 15 :].split(None, 1)[0]
    return int(word) if word.isdigit() else None


def _send(pid: int, tag: int, number: signal.Signals) -> int:
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return 0
    try:
        if read_tag(pid) != tag:
            return 0
        signal.pidfd_send_signal(handle, number)
    except OSError:
        return 0
    finally:
        os.close(handle)
    return 1
