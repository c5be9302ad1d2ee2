"""The processes of an attempt: found by tag, cgroup and descent, signalled so that no stranger is ever hit.

The tag is the soft limit RLIMIT_LOCKS. Linux does not use it, children inherit it whatever they do to session, parent
or environment, and ``/proc/PID/limits`` shows it to everybody. 31 bits name the queue and the worker, 32 the offer.
Where the attempt has a cgroup, what is in there belongs to the tree as well, tagged or not; and so do the main process
and those it is certain to have brought about (`kin`), also when they have changed their limits.

Rules
- A process is signalled through a pidfd, and only if *after* the pidfd was opened it carries the tag, or is in the
  cgroup, or has the start time of the one that was found, and has not ended by then: a number that was given to
  somebody else in between cannot be hit.
- What is dead and not yet reaped does not count as living.
- One pass over ``/proc`` serves all attempts. The directory entry of a process has an inode number that the kernel
  gives to no other: what was read of it once need not be read again.
"""
# ruff: noqa: PTH123, PTH208 (a pass over /proc must cost microseconds)

from __future__ import annotations

import binascii
import errno
import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kueue.runner import cgroup
from kueue.runner.kin import TICKS, Kin
from kueue.runner.newborn import Newborn

RLIMIT_LOCKS = 10  # asm-generic/resource.h; the module `resource` has no name for it
INFINITY = -1
MAX_PASSES = 50  # a fork bomb is caught in a handful; more means that we lose, and the caller looks again soon
STOP_WAITS = 5
FREEZE_SECONDS = 0.1  # who waits for a disk or file server may never freeze; signals have to do then
STOP_WAIT_SECONDS = 0.0005  # a process stops when it is next scheduled; then the caller looks again later


def tag_base(queue_id: str, identity: str) -> int:
    """The upper half of the tags of all attempts a worker has from a queue: 31 bits, never 0, shifted left by 32."""
    # A cryptographic digest would load a library larger than the whole runner, and keep nobody out.
    checksum = binascii.crc32(f"{queue_id}\0{identity}".encode("utf-8", "surrogateescape"))
    return (checksum >> 1 or 1) << 32


def tag_of(queue_id: str, identity: str, offer: int) -> int:
    return tag_base(queue_id, identity) | (offer & 0xFFFF_FFFF)


@dataclass(frozen=True)
class Status:
    """A few fields of ``/proc/PID/stat`` (proc(5))."""

    state: str
    parent: int
    session: int
    threads: int
    start: int
    """Clock ticks after boot."""

    @property
    def lives(self) -> bool:
        # The first thread of a process may have ended while others run on: it is shown as a zombie, with threads.
        return self.state not in "ZX" or self.threads > 1

    @property
    def is_stopped(self) -> bool:
        return self.state in "Tt"


@dataclass
class Seen:
    """What a pass found of one attempt."""

    living: int = 0
    running: int = 0
    main_reached: bool = False
    note: str = ""
    pids: list[int] = field(default_factory=list)
    frozen: set[int] = field(default_factory=set)
    """Those of `pids` that do not run because their cgroup is frozen."""
    unmarked: dict[int, int] = field(default_factory=dict)
    """Those of `pids` that were found by descent alone → their start times."""


def status(pid: int) -> Status | None:
    """None: there is no such process (any more)."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            text = file.read(1024)
    except OSError:
        return None
    # The name stands in parentheses and may hold spaces and parentheses itself.
    fields = text[text.rfind(b")") + 2 :].split()
    return Status(fields[0].decode("ascii"), int(fields[1]), int(fields[3]), int(fields[17]), int(fields[19]))


def is_same(pid: int, start: int) -> bool:
    """Is there, dead or alive, still the process of this number that started then?"""
    now = status(pid)
    return now is not None and now.start == start


def lives(pid: int, start: int) -> bool:
    """Is the process of this number that started then still there, and not dead?"""
    now = status(pid)
    return now is not None and now.start == start and now.lives


def read_tag(pid: int) -> int | None:
    """The tag of a process; None if it has none, is gone, or is not ours to see."""
    try:
        with open(f"/proc/{pid}/limits", "rb", buffering=0) as file:
            text = file.read(4096)
    except OSError:
        return None
    at = text.find(b"\nMax file locks ")
    if at < 0:
        return None
    word = text[at + 16 : at + 80].split(None, 1)[0]
    return None if word == b"unlimited" else int(word)


def _may_run(pid: int, now: Status) -> bool:
    """Could code of this process or thread still be executed, as things stand?"""
    if now.is_stopped:
        return False
    if now.state == "D":
        # In the kernel, waiting for a disk, a file server, or (vfork) for a child that may be stopped itself. It takes
        # the signal before it gets back to its own code.
        return not _stop_is_pending(pid)
    if now.state in "ZX":  # the first thread has ended and cannot tell about the others
        return any(_may_run(thread, seen) for thread, seen in _threads(pid) if seen.state not in "ZX")
    return True


def _threads(pid: int) -> list[tuple[int, Status]]:
    try:
        numbers = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []
    return [(number, now) for number in numbers if (now := status(number)) is not None]


def _stop_is_pending(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
            text = file.read(8192)
    except OSError:
        return False
    at = text.find(b"\nShdPnd:")
    return at >= 0 and bool(int(text[at + 8 :].split(None, 1)[0], 16) >> (signal.SIGSTOP - 1) & 1)


def signal_process(pid: int, tag: int, number: int, directory: str = "", start: int | None = None) -> str:
    """Send a signal to the process that has this number *and* this tag, or is in this cgroup, or has this start time.
    Returns what hindered it, or ``""``.
    """
    try:
        handle = os.pidfd_open(pid)
    except OSError as error:
        return "" if error.errno == errno.ESRCH else f"process {pid}: {error.strerror}"
    try:
        is_ours = read_tag(pid) == tag or (directory != "" and pid in cgroup.members(directory))
        if not (is_ours or (start is not None and is_same(pid, start))) or _has_ended(handle):
            return ""
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return ""
    except OSError as error:
        return f"process {pid} cannot be signalled: {error.strerror}"
    finally:
        os.close(handle)
    return ""


def _has_ended(handle: int) -> bool:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(0))


class Scanner:
    """Finds tagged processes. Remembers what it has read of each process by the inode number of its directory.

    `spared`: numbers of spawners. Each carries the tag of the child it makes for the moment of the fork, so that
    the child has it from birth.
    `cgroups`: tag → directory of the attempt's cgroup, for those that have one.
    `kin`: tag → those of its processes that were identified, for attempts whose main process is known.
    """

    def __init__(self) -> None:
        self.spared: set[int] = set()
        self.cgroups: dict[int, str] = {}
        self.kin: dict[int, Kin] = {}
        self._freezing: dict[int, float] = {}
        """Tag → since when its cgroup is asked to freeze and does not (monotonic)."""
        self._unfreezable: set[int] = set()
        self._known: dict[int, tuple[int, int | None, int]] = {}
        """Number → inode, tag, start time (-1: not looked at yet)."""
        self._newborn = Newborn()
        self._ended: set[int] = set()
        """Tags of attempts whose main process was reaped."""
        self._mains: dict[int, int] = {}
        """Number of a main process that was not reaped, as far as we know → tag."""

    def know_main(self, tag: int, pid: int, start: int, until: float = 0.0) -> None:
        """The main process has this number and start time. `until`: boottime at which it was not reaped yet."""
        self.kin.setdefault(tag, Kin()).learn(pid, start, until)
        if until:
            self._ended.add(tag)
            self._mains.pop(pid, None)
        else:
            self._mains[pid] = tag

    def forget(self, tag: int) -> None:
        """The attempt is over."""
        self.kin.pop(tag, None)
        self._ended.discard(tag)
        for pid in [pid for pid, other in self._mains.items() if other == tag]:
            del self._mains[pid]

    def pass_over(
        self, wanted: Callable[[int], bool] = bool, others: dict[int, Status] | None = None, eldest: int = 0
    ) -> dict[int, list[int]]:
        """Tag → numbers of the processes that carry it (zombies too), for the tags that are `wanted`.

        `others` gets the rest, without those that were born before `eldest` or carry the tag of another attempt known
        here.
        """
        found: dict[int, list[int]] = {}
        fresh: dict[int, tuple[int, int | None, int]] = {}
        known = self._known
        kin = self.kin
        with os.scandir("/proc") as entries:
            for entry in entries:
                name = entry.name
                if not name.isdecimal():
                    continue
                pid = int(name)
                if pid in self.spared:
                    continue
                inode = entry.inode()
                before = known.get(pid)
                if before is None or before[0] != inode:
                    before = (inode, read_tag(pid), -1)
                tag = before[1]
                if tag is not None and wanted(tag):
                    found.setdefault(tag, []).append(pid)
                elif others is not None and not 0 <= before[2] < eldest and tag not in kin:
                    now = status(pid)
                    if now is not None:
                        before = (inode, tag, now.start)
                        if now.start >= eldest:
                            others[pid] = now
                fresh[pid] = before
        self._known = fresh
        return found

    def look(self, tags: Iterable[int]) -> dict[int, Seen]:
        """What is left of each of these trees. Nothing left is believed only after a second pass: a process could fork
        and end during the first, and its child get a number that the pass had gone by.
        """
        asked = set(tags)
        begun = time.clock_gettime(time.CLOCK_BOOTTIME)
        gone = {tag for tag in asked if self._is_soon_gone(tag, begun)}
        result = {tag: Seen() for tag in gone}
        asked -= gone
        if not asked:
            return result
        result.update(self._look(asked))
        empty = {tag for tag, seen in result.items() if not seen.living}
        if empty:
            result.update(self._look(empty))
        return result

    def _is_soon_gone(self, tag: int, now: float) -> bool:
        """Has a short job ended with all it has started? Asks only those that were born since its main process."""
        main = self.kin[tag].only() if tag in self._ended else None
        if main is None or cgroup.members(self.cgroups.get(tag, "")):
            return False
        pid, start, _ = main

        def may_be_ours(number: int) -> bool:
            if number in self._mains or number in self.spared:
                return False
            if read_tag(number) == tag:
                return True
            found = status(number)
            return found is not None and found.session == pid

        return self._newborn.is_nobody(pid, now - start / TICKS, may_be_ours)

    def _look(self, asked: set[int]) -> dict[int, Seen]:
        begun = time.clock_gettime(time.CLOCK_BOOTTIME)
        eldest = min((self.kin[tag].eldest for tag in asked if tag in self.kin), default=None)
        others: dict[int, Status] = {}
        processes = self.pass_over(asked.__contains__, None if eldest is None else others, eldest or 0)
        result: dict[int, Seen] = {}
        for tag in asked:
            seen = result[tag] = Seen()
            directory = self.cgroups.get(tag, "")
            # Asked before the members: whoever comes in between is frozen as well.
            is_frozen = directory != "" and cgroup.is_frozen(directory)
            members = [pid for pid in cgroup.members(directory) if pid not in self.spared] if directory else []
            inside = set(members) if is_frozen else set()
            states: dict[int, Status] = {}
            for pid in dict.fromkeys([*processes.get(tag, ()), *members]):
                now = status(pid)
                if now is not None:
                    states[pid] = now
            if tag in self.kin:
                self._add_kin(tag, states, set(members), others, begun, seen)
            for pid, now in states.items():
                if now.lives:
                    seen.living += 1
                    seen.running += pid not in inside and _may_run(pid, now)
                    seen.pids.append(pid)
            seen.frozen = inside.intersection(seen.pids)
        return result

    def _add_kin(
        self,
        tag: int,
        states: dict[int, Status],
        members: set[int],
        others: dict[int, Status],
        begun: float,
        seen: Seen,
    ) -> None:
        """Complete the `states` of a tree by those that descend from it."""
        kin = self.kin[tag]
        # Its number may have been given away between the pass and our reading of its state: only who still has the tag
        # is remembered.
        sure = {
            pid: now
            for pid, now in states.items()
            if kin.knows(pid, now.start) or read_tag(pid) == tag or pid in members
        }
        rest = {pid: now for pid, now in others.items() if pid not in states}
        for pid in kin.gather(sure, rest, begun):
            states[pid] = rest[pid]
            seen.unmarked[pid] = rest[pid].start

    def signal_tree(self, tag: int, number: int, main: int | None = None) -> Seen:
        """Send a signal to every living process of the tree. SIGKILL and SIGSTOP go in passes until no process shows up
        that was not yet hit; what forks faster than that is left to the caller's next look. What is frozen needs no
        SIGSTOP.
        """
        directory = self.cgroups.get(tag, "")
        hit: set[int] = set()
        seen = Seen()
        main_reached = False
        notes: set[str] = set()
        waits = 0
        for _ in range(MAX_PASSES if number in (signal.SIGKILL, signal.SIGSTOP) else 1):
            seen = self.look([tag])[tag]
            if number == signal.SIGKILL and seen.unmarked and not hit:
                # Stopped first: whoever is born while its parent dies could not be told from a stranger.
                seen = self.signal_tree(tag, signal.SIGSTOP)
            if number == signal.SIGSTOP and seen.running == 0:
                break
            fresh = [pid for pid in seen.pids if pid not in hit]
            if number == signal.SIGSTOP:
                fresh = [pid for pid in fresh if pid not in seen.frozen]
            if not fresh:
                if number != signal.SIGSTOP or waits == STOP_WAITS:
                    break
                waits += 1
                time.sleep(STOP_WAIT_SECONDS)
            for pid in fresh:
                note = signal_process(pid, tag, number, directory, seen.unmarked.get(pid))
                if note:
                    notes.add(note)
                main_reached = main_reached or (pid == main and not note)
            hit.update(fresh)
            if number == signal.SIGKILL and directory and cgroup.kill(directory):
                notes.clear()  # it reaches also those that we may not signal; who is left is told at the next look
        seen.main_reached = main_reached
        seen.note = "; ".join(sorted(notes))
        return seen

    def pause_tree(self, tag: int) -> Seen:
        """Freeze the cgroup of the tree if it has one, and stop what is not in there, or all if it does not freeze."""
        directory = self.cgroups.get(tag, "")
        is_late = False
        if directory and tag not in self._unfreezable and not cgroup.freeze(directory):
            now = time.monotonic()
            is_late = now - self._freezing.setdefault(tag, now) >= FREEZE_SECONDS
        seen = self.signal_tree(tag, signal.SIGSTOP)
        if not is_late or not seen.running:
            return seen
        # Those that did freeze look as if they ran while one of them does not; each has its SIGSTOP to take first.
        self._unfreezable.add(tag)
        cgroup.thaw(directory)
        return self.signal_tree(tag, signal.SIGSTOP)

    def continue_tree(self, tag: int) -> None:
        """SIGCONT to children before their parents: a shell that wakes first would see its children still stopped. Who
        was only frozen does not get it, and goes on at the end.
        """
        directory = self.cgroups.get(tag, "")
        parents: dict[int, int] = {}
        seen = self.look([tag])[tag]
        for pid in seen.pids:
            now = status(pid)
            if now is not None and (pid not in seen.frozen or now.is_stopped or _stop_is_pending(pid)):
                parents[pid] = now.parent

        def depth(pid: int) -> int:
            steps = 0
            while pid in parents and steps < len(parents):
                pid = parents[pid]
                steps += 1
            return steps

        for pid in sorted(parents, key=depth, reverse=True):
            signal_process(pid, tag, signal.SIGCONT, directory, seen.unmarked.get(pid))
        if directory:
            cgroup.thaw(directory)
            self._forget_pause(tag)

    def _forget_pause(self, tag: int) -> None:
        self._freezing.pop(tag, None)
        self._unfreezable.discard(tag)

    def drop(self, tag: int) -> bool:
        """Nobody asks for this tree any more. False: its cgroup cannot be removed yet; then ask again later."""
        if not cgroup.remove(self.cgroups.get(tag, "")):
            return False
        self.cgroups.pop(tag, None)
        self._forget_pause(tag)
        return True
