"""What the keeper knows of an attempt beside the policy's decisions: who it is, its process, its record."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from kueue.runner.actions import Finish
from kueue.runner.attempt import Terms
from kueue.runner.kin import TICKS
from kueue.runner.spool import Record

IDENTITY = ("job", "queue_id", "tag", "memo", "cgroup", "ordered_wall")
MIRRORED = (*IDENTITY, "pid", "start", "executed", "started_wall", "started_at", "note", "exit", "end")


@dataclass
class Care:
    """One attempt in the keeper's care."""

    offer: int
    job: int
    queue_id: str
    tag: int
    memo: str = ""
    cgroup: str = ""
    """Directory of its cgroup; empty: it has none."""
    ordered_wall: float = 0.0
    pid: int | None = None
    start: int = 0
    """Start time of the main process, which tells it from a later one of that number; clock ticks after boot."""
    executed: bool = False
    started_wall: float | None = None
    started_at: float | None = None
    note: str = ""
    spawner: int | None = None
    """Which spawner was asked to start it."""
    line: bytes = b""
    """The order, until a process is made from it."""
    exit: Record | None = None
    """How the main process ended, as in `children.Exit`."""
    end: Record | None = None
    """The exit record, once the attempt is over."""

    @classmethod
    def from_start(cls, offer: int, record: Record) -> Care:
        """From ``start.json``."""
        return cls(
            offer,
            record["job"],
            record["queue_id"],
            record["tag"],
            record.get("memo", ""),
            record.get("cgroup", ""),
            record.get("ordered_wall") or 0.0,
        )

    def began(self, at: float, wall: float) -> None:
        """Fill in when its main process was made, if that is not known: the clocks of whoever takes over tell nothing,
        but the process itself has its start time. `at` and `wall`: one moment of its life by both clocks, boottime
        and wall. If its start time is not known either, the order's time has to do.
        """
        if self.started_at is None and self.start:
            self.started_at = min(at, self.start / TICKS)
            self.started_wall = wall - (at - self.started_at)
        elif self.started_wall is None:
            self.started_wall = self.ordered_wall or wall

    def start_record(self, terms: Terms, runner: str) -> Record:
        """``start.json``. `runner`: who looks after the attempt."""
        who = {name: getattr(self, name) for name in IDENTITY}
        return {"offer": self.offer, **who, **vars(terms), "runner": runner}

    def mirror(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in MIRRORED}

    def adopt(self, values: dict[str, Any]) -> None:
        for name in MIRRORED:
            setattr(self, name, values.get(name, getattr(self, name)))

    def describe(self, state: str) -> dict[str, Any]:
        """The attempt as `AttemptState` on the wire."""
        gone = state == "gone"
        return {
            "offer": self.offer,
            "job": self.job,
            "queue_id": self.queue_id,
            "state": state,
            "started_wall": self.started_wall if self.executed else None,
            "pid": self.pid,
            "end": None if gone else self.end,
            "note": self.gone_reason() if gone else self.note,
            "memo": self.memo,
        }

    def gone_reason(self) -> str:
        return str(self.end["outcome"]["reason"]) if self.end else "its runner died"

    def conclude(self, finish: Finish, now: float, wall: float) -> Record:
        """The exit record: `EndRecord` without the excerpts of the output."""
        ended = self.exit or {}
        started = self.executed and finish.kind != "not_started"
        notes = []
        if finish.paused_seconds >= 1:
            notes.append(f"paused for {finish.paused_seconds:.0f} s while the lease had lapsed")
        ended_wall = ended.get("wall", wall)
        run_seconds = 0.0
        if started and self.started_at is not None:
            run_seconds = max(0.0, ended.get("at", now) - self.started_at)
        elif started and self.started_wall is not None:
            run_seconds = max(0.0, ended_wall - self.started_wall)
        return {
            "outcome": _outcome(finish),
            "started_wall": self.started_wall if started else None,
            "ended_wall": ended_wall,
            "run_seconds": round(run_seconds, 6),
            "cpu_seconds": ended.get("cpu_seconds", 0.0),
            "max_rss_mb": ended.get("max_rss_mb", 0),
            "leftovers_stopped": finish.leftovers,
            "notes": notes,
        }


def _outcome(finish: Finish) -> dict[str, Any]:
    match finish.kind:
        case "exited":
            return {"type": "exited", "code": finish.number}
        case "signaled":
            return {"type": "signaled", "signal": finish.number}
        case "not_started":
            return {"type": "not_started", "reason": finish.reason, "cause": finish.cause}
        case "timed_out":
            return {"type": "timed_out", "after_seconds": finish.after_seconds}
        case "canceled":
            return {"type": "canceled"}
        case "gone":
            return {"type": "lost", "reason": finish.reason}


def terms_of(values: dict[str, Any]) -> Terms:
    """The terms in an order or a ``start.json``; what is not known to this release is skipped."""
    names = {item.name for item in fields(Terms)}
    return Terms(**{name: value for name, value in values.items() if name in names})
