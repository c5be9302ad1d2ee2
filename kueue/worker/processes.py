"""The processes of this worker's attempts, as ``/proc`` shows them: what they use, and how to stop them.

Rules
- A process belongs to an attempt by its *tag*, the soft limit of ``Max file locks`` that the runner gave it and that
  every descendant inherits; by the attempt's cgroup; and, whatever a job did to its own limits, by descent from those
  and from the main process, and by a session that one of them made. The start record of the attempt and what its
  spawners noted say which; who was once found to belong does so for good.
- A number alone names nobody: the start time goes with it.
- Of processes only ``stat`` and ``limits`` are read: both answer at once whatever the process waits for.
- A signal goes through a pidfd, to a process that was recognized after the pidfd was opened.
- The runner's own processes are never touched: a spawner carries the tag of the child that it is about to make.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from kueue.worker.machine import boot_id

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
    """Of proc(5), fields 3, 4, 6, 14…17, 22 and 24."""

    state: str
    parent: int
    session: int
    ticks: int
    start: int
    pages: int


@dataclass
class _Attempt:
    """What identifies the processes of one attempt."""

    tag: int
    cgroup: str
    runner: str
    main: tuple[int, int] | None
    """Number and start time of its main process."""
    known: dict[int, int] = field(default_factory=dict)
    """Number → start time of those that were found to belong."""


@dataclass
class _Table:
    """All processes at one moment."""

    stats: dict[int, _Stat] = field(default_factory=dict)
    tagged: dict[int, list[int]] = field(default_factory=dict)
    children: dict[int, list[int]] = field(default_factory=dict)
    sessions: dict[int, list[int]] = field(default_factory=dict)


class Trees:
    """Finds the processes of attempts. `spool`: the directory with one folder per attempt, beside that of runners."""

    def __init__(self, spool: str) -> None:
        self._spool = spool
        self._runners = f"{Path(spool).parent}/runners"
        self._attempts: dict[int, _Attempt] = {}
        self._untagged: dict[int, int] = {}
        self._runner_pids: dict[str, dict[int, int]] = {}
        """Runner → number → start time."""

    def use(self, offers: Collection[int]) -> dict[int, Use]:
        """What each of these attempts uses; one pass over ``/proc``. Attempts without a process have an empty entry."""
        attempts = self._known(offers)
        found = {offer: Use() for offer in attempts}
        if not found:
            return found
        table = self._table()
        for offer, attempt in attempts.items():
            entry = found[offer]
            for pid in self._members(attempt, table):
                stat = table.stats[pid]
                if stat.state not in "ZX":
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
        attempts = self._known(offers)
        sent = 0
        for _ in range(passes if attempts else 0):
            hit = 0
            table = self._table()
            for attempt in attempts.values():
                for pid in self._members(attempt, table):
                    if wanted(table.stats[pid]):
                        hit += _send(pid, attempt, number)
            sent += hit
            if not hit:
                break
        return sent

    # -- what identifies them

    def _known(self, offers: Collection[int]) -> dict[int, _Attempt]:
        for offer in [offer for offer in self._attempts if offer not in offers]:
            del self._attempts[offer]
        for offer in offers:
            if offer not in self._attempts:
                attempt = self._recorded(offer)
                if attempt is not None:
                    self._attempts[offer] = attempt
        noted: dict[str, dict[int, tuple[int, int]]] = {}
        for offer, attempt in self._attempts.items():
            if attempt.main is None:
                if attempt.runner not in noted:
                    noted[attempt.runner] = _noted_mains(f"{self._runners}/{attempt.runner}")
                attempt.main = noted[attempt.runner].get(offer)
                if attempt.main is not None:
                    attempt.known[attempt.main[0]] = attempt.main[1]
        return dict(self._attempts)

    def _recorded(self, offer: int) -> _Attempt | None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(Path(f"{self._spool}/{offer}/start.json").read_bytes())
            pid, start = record.get("main") or (0, 0)
            attempt = _Attempt(
                tag=int(record["tag"]),
                cgroup=str(record.get("cgroup", "")),
                runner=str(record.get("runner", "")),
                main=(pid, start) if start else None,
            )
            if start:
                attempt.known[pid] = start
            return attempt
        return None

    def _members(self, attempt: _Attempt, table: _Table) -> list[int]:
        """Numbers of its processes, those that are dead and not reaped among them."""
        stats = table.stats
        found = dict.fromkeys(table.tagged.get(attempt.tag, ()))
        found.update((pid, None) for pid in _inside(attempt.cgroup) if pid in stats)
        found.update((pid, None) for pid, start in attempt.known.items() if pid in stats and stats[pid].start == start)
        todo = list(found)
        while todo:
            pid = todo.pop()
            session = stats[pid].session
            # A session that none of ours has made is the runner's: we meet its child before it has its own.
            mates = table.sessions[session] if session in attempt.known or session in found else []
            for other in (*table.children.get(pid, ()), *mates):
                if other not in found:
                    found[other] = None
                    todo.append(other)
        attempt.known = {pid: stats[pid].start for pid in found} | (
            {attempt.main[0]: attempt.main[1]} if attempt.main else {}
        )
        return list(found)

    # -- the pass

    def _table(self) -> _Table:
        """That an older process has no tag is remembered: it will get none."""
        young = time.clock_gettime(time.CLOCK_BOOTTIME) * TICKS - YOUNG_SECONDS * TICKS
        untagged: dict[int, int] = {}
        table = _Table()
        spared = self._of_runners()
        for name in os.listdir("/proc"):  # noqa: PTH208  names are wanted, a thousand of them every few seconds
            if not name.isdecimal():
                continue
            pid = int(name)
            stat = read_stat(pid)
            if stat is None or spared.get(pid) == stat.start:
                continue
            table.stats[pid] = stat
            table.children.setdefault(stat.parent, []).append(pid)
            table.sessions.setdefault(stat.session, []).append(pid)
            tag = None if self._untagged.get(pid) == stat.start else read_tag(pid)
            if tag is not None:
                table.tagged.setdefault(tag, []).append(pid)
            elif stat.start < young:
                untagged[pid] = stat.start
        self._untagged = untagged
        return table

    def _of_runners(self) -> dict[int, int]:
        """Number → start time of keepers and spawners. While nobody lets us look, as they were seen last."""
        try:
            names = os.listdir(self._runners)  # noqa: PTH208
        except FileNotFoundError:
            names = []
        except OSError:
            names = [*self._runner_pids]
        before = self._runner_pids
        self._runner_pids = {name: of_runner(Path(self._runners, name)) or before.get(name, {}) for name in names}
        return {pid: start for noted in self._runner_pids.values() for pid, start in noted.items()}


def _noted_mains(folder: str) -> dict[int, tuple[int, int]]:
    """Offer → (number, start time) of main processes, as the spawners of a runner have noted since the boot."""
    found: dict[int, tuple[int, int]] = {}
    boot = boot_id()
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = [name for name in os.listdir(folder) if name.startswith("mains-")]  # noqa: PTH208
    for path in (Path(folder, name) for name in names):
        is_ours = False
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text("ascii").split("\n")[:-1]:
                words = line.split()
                if len(words) == 1:
                    is_ours = words[0] == boot
                elif len(words) == 3 and is_ours:
                    offer, pid, start = map(int, words)
                    if start >= found.get(offer, (0, 0))[1]:
                        found[offer] = (pid, start)
    return found


def _inside(directory: str) -> list[int]:
    """Numbers of the processes in a cgroup and all below it."""
    found: list[int] = []
    if directory:
        for folder, _, _ in os.walk(directory):
            with contextlib.suppress(OSError, ValueError):
                found += map(int, Path(f"{folder}/cgroup.procs").read_text("ascii").split())
    return found


def of_runner(folder: Path) -> dict[int, int]:
    """Number → start time of keeper and spawners, in this order, as the runner of that directory has noted them."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        info = json.loads((folder / "info.json").read_bytes())
        if info.get("boot", (here := boot_id())) == here:  # releases before do not note it
            return {int(pid): int(start) for pid, start in [info["keeper"], *info["spawners"]]}
    return {}


def lives(pid: int, start: int) -> bool:
    """Is that process there, and not dead?"""
    now = read_stat(pid) if pid > 0 else None
    return now is not None and now.start == start and now.state not in "ZX"


def read_stat(pid: int) -> _Stat | None:
    """None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = text[text.rfind(b")") + 2 :].split()
    return _Stat(
        state=fields[0].decode(),
        parent=int(fields[1]),
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


def _send(pid: int, attempt: _Attempt, number: signal.Signals) -> int:
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return 0
    try:
        stat = read_stat(pid)
        if stat is None or attempt.known.get(pid) != stat.start:
            return 0
        signal.pidfd_send_signal(handle, number)
    except OSError:
        return 0
    finally:
        os.close(handle)
    return 1
