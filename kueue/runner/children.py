"""Reaping: the ends of child processes, those of attempts written down before they are taken from the kernel."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from kueue.runner.kernel import exit_status
from kueue.runner.spool import Record, Spool


def boottime() -> float:
    """Seconds that count suspend; the clock of every deadline here."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True)
class Exit:
    """How one child ended. `offer` is None if it was not the main process of an attempt."""

    pid: int
    offer: int | None
    record: Record
    """pid, code or signal, cpu_seconds, max_rss_mb, at (boottime), wall; held: `at` is before it was reaped."""


def ended_child() -> int | None:
    """The number of a child that has ended and is not reaped yet; None: there is none."""
    try:
        info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return info.si_pid if info else None


def has_ended(child: int) -> bool:
    """Has this child ended? It stays for `take`."""
    try:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def reap(mains: dict[int, int], spool: Spool) -> list[Exit]:
    """All children that have ended. `mains`: number of a main process → its offer; entries of the ended are removed."""
    exits: list[Exit] = []
    while (pid := ended_child()) is not None:
        exits.append(take(pid, mains.pop(pid, None), spool))
    return exits


def ended_elsewhere(pid: int, pidfd: int) -> Record | None:
    """How a process ended that was not our child, without what it used; None: nobody can say, or not yet."""
    status = exit_status(pidfd)
    if status is None:
        return None
    code = os.waitstatus_to_exitcode(status)
    record: Record = {"pid": pid, "code": None, "signal": None, "at": boottime(), "wall": time.time()}
    record["code" if code >= 0 else "signal"] = abs(code)
    return record


def take(pid: int, offer: int | None, spool: Spool) -> Exit:
    """Reap one child that has ended.

    The record is written before the kernel forgets the process: if we die between, a successor finds one or the other.
    """
    info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert info is not None
    record: Record = {
        "pid": pid,
        "code": None,
        "signal": None,
        "at": boottime(),
        "wall": time.time(),
        "held": True,
    }
    record["code" if info.si_code == os.CLD_EXITED else "signal"] = info.si_status
    if offer is not None:
        spool.write_main(offer, record)
    _pid, _status, usage = os.wait4(pid, 0)
    record["cpu_seconds"] = round(usage.ru_utime + usage.ru_stime, 6)
    record["max_rss_mb"] = usage.ru_maxrss // 1024
    return Exit(pid, offer, record)
