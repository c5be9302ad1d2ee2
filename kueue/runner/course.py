"""The course of main processes: ordered from a spawner, made, executed, ended."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from kueue.runner.care import Care
from kueue.runner.children import boottime
from kueue.runner.program import NOT_EXECUTED
from kueue.runner.spawners import Child
from kueue.runner.spool import NOT_STARTED, Record
from kueue.runner.wire import line_of

if TYPE_CHECKING:
    from kueue.runner.keeper import Keeper


class Course:
    """That of one keeper's attempts. Spawners tell of it here, and whoever takes over from one that died."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    def order(self, offer: int, not_after: float) -> None:
        """Have its process made. `not_after`: boottime; a spawner that comes to it later makes none."""
        care = self._keeper.cares[offer]
        head = {"do": "start", "offer": offer, "tag": care.tag, "cgroup": care.cgroup, "not_after": not_after}
        pid = self._keeper.spawners.start(offer, line_of(head) + care.line + b"\n")
        if pid is None:
            self._keeper.do(self._keeper.policy.start_refused(offer, "no spawner could be made", boottime()))
        else:
            care.spawner = pid

    def look_at_stand_in(self, child: Child) -> None:
        """To be called before anything is heard of a worker: what stood still without a lease did so before the next
        lease came.
        """
        since = child.shared.stood_in_since
        if since is not None:
            self._keeper.do(self._keeper.policy.stood_in(since, boottime()))

    def hear(self, child: Child, lines: list[bytes]) -> None:
        """What this spawner has said."""
        for line in lines:
            message = json.loads(line)
            if message["is"] == "stood_in":
                self._stood_in(child, message["since"])
                continue
            care = self._keeper.cares.get(message["offer"])
            if care is not None:
                self._hear_of(care, message)

    def _hear_of(self, care: Care, message: dict[str, Any]) -> None:
        now = boottime()
        self._keeper.mirror.changed.add(care.offer)
        match message["is"]:
            case "made":
                care.started_at, care.started_wall = message["at"], message["wall"]
                self.forked(care, message["pid"], message["start"])
                if message["executed"]:
                    care.executed = True
                    self._keeper.do(self._keeper.policy.started(care.offer, message["at"]))
            case "late":
                self._keeper.spawners.answered(care.offer)
                self._keeper.do(self._keeper.policy.start_refused(care.offer, message["reason"], now))
            case "executed":
                care.executed = True
                self._keeper.do(self._keeper.policy.started(care.offer, care.started_at or now))
            case "exited":
                self.exited(care, message)
            case other:
                self._keeper.log(f"a spawner said {other!r}, which is not understood")

    def _stood_in(self, child: Child, since: float) -> None:
        """It has stopped the last tree that it will, and may have done so after we had let it go on."""
        child.shared.noted(since)
        self._keeper.do(self._keeper.policy.stood_in(since, boottime()))

    def forked(self, care: Care, pid: int, start: int) -> None:
        """Its main process is this one. `start` in clock ticks after boot."""
        care.pid = pid
        care.start = start
        self._keeper.scanner.know_main(care.tag, pid, start)
        care.began(boottime(), time.time())
        care.line = b""
        self._keeper.spawners.answered(care.offer)

    def exited(self, care: Care, record: Record) -> None:
        care.exit = record
        if care.start and record.get("held"):
            self._keeper.scanner.know_main(care.tag, record["pid"], care.start, record["at"])
        now = boottime()
        # Whoever took over believes that it was executed, without having seen it.
        failure = record.get("not_started")
        if failure is None and record["code"] == NOT_EXECUTED:
            failure = self._keeper.spool.read(care.offer, NOT_STARTED)
        if failure is not None:
            if failure.get("is_ours") and not care.executed:
                self._keeper.do(self._keeper.policy.start_refused(care.offer, failure["reason"], now))
                return
            self._keeper.do(self._keeper.policy.not_started(care.offer, failure["cause"], failure["reason"], now))
            return
        if not care.executed:
            care.executed = True
            self._keeper.do(self._keeper.policy.started(care.offer, care.started_at or now))
        self._keeper.do(self._keeper.policy.exited(care.offer, record["code"], record["signal"], now))

    def lost_spawner(self, child: Child) -> None:
        """Its children are ours now; what it still had to say is read first."""
        self._keeper.log(f"spawner {child.pid} is gone: its jobs are ours now")
        self.hear(child, self._keeper.spawners.lost(child))
        since = child.shared.stood_in_since
        if since is not None:
            self._stood_in(child, since)
        for offer, attempt in list(self._keeper.policy.attempts.items()):
            care = self._keeper.cares.get(offer)
            if care is not None and care.spawner == child.pid and attempt.lives and not attempt.main_ended:
                self._keeper.orphans.find(care)
        if self._keeper.spawners.current is None:
            self._keeper.spawners.make()
