"""Calls a function for every host again and again, for ever, whatever happens to clocks, hosts and the function.

Rules
- One job of APScheduler for each host, of which only one call runs at a time. A missed time is made up for once,
  however late; a look that was asked for and comes due during a call, when that has ended. A call that exceeds its
  limit is abandoned, so that a hanging host has its next rounds like all others and delays none (see `lanes`).
- APScheduler computes with the wall clock and sleeps by a clock that stands still while the machine is suspended.
  `Rounds.tick` compares the clocks: after a jump or a suspend every host gets the time it has by ``CLOCK_BOOTTIME``.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

from apscheduler.events import EVENT_JOB_ERROR, JobExecutionEvent
from apscheduler.executors.base import BaseExecutor, run_job
from apscheduler.jobstores.base import JobLookupError
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.base import BaseTrigger

from kueue import clock, log
from kueue_ops.lanes import Lanes, Result, Ticket

LEAST_INTERVAL_SECONDS = 1.0
"""Also for an interval of 0: hosts are not to be flooded with logins."""
TICK_SECONDS = 10.0
JUMP_SECONDS = 2.0
"""Clocks that differ more than this from what they did at the last tick have been changed, or the machine slept."""
WAKING_SECONDS = 10.0
"""After a suspend the network needs a while."""
OVERDUE_SECONDS = 60.0
_JITTER_SHARE, _JITTER_MAX_SECONDS = 0.05, 30.0

Check = Callable[[str, Ticket], "float | None"]
"""Called with the name of the host; returns after how many seconds to look again if that is sooner than the round."""

_log = log.logger("restart.rounds")
_here = threading.local()
"""The ticket of the call that runs in this thread."""


class Rounds:
    """The endless rounds over the hosts.

    `check` runs in threads, at most `parallel` at once. `hung` is told the name of a host whose check exceeded
    `limit_seconds`; the check's `Ticket` is void from then on. `failed` is told what a check raised.
    """

    def __init__(
        self,
        check: Check,
        *,
        interval_seconds: float,
        parallel: int,
        limit_seconds: float,
        hung: Callable[[str], None],
        failed: Callable[[str, BaseException], None],
    ) -> None:
        self._check = check
        self._hung = hung
        self._failed = failed
        self.lanes = Lanes(parallel, limit_seconds)
        self.interval_seconds = 0.0
        self.set_pace(interval_seconds)
        self._due: dict[str, float] = {}
        self._active: set[str] = set()
        self._asked: dict[str, float] = {}
        """When a look at a host is due that was asked for since the last one began; APScheduler passes over it if that
        one still runs."""
        self.unfinished: tuple[str, ...] = ()
        """After `stop`: hosts whose check had not ended, or had not begun."""
        self._lock = threading.Lock()
        self._offsets = _offsets()
        # Its warnings are our own business: a call that is skipped because the last one still runs.
        quiet = logging.getLogger("apscheduler")
        quiet.handlers[:] = [logging.NullHandler()]
        quiet.propagate = False
        self._scheduler = BackgroundScheduler(timezone=timezone.utc, daemon=True)
        self._scheduler.add_executor(_LaneExecutor(self.lanes, self._began, self._ended), "default")

    # --- what runs ----------------------------------------------------------------------------------------------------

    def start(self, hosts: Iterable[str]) -> None:
        """Every host is looked at now, in the order given, and then in rounds until `stop`."""
        self.set_hosts(hosts)
        self._scheduler.start()

    def set_pace(self, interval_seconds: float) -> None:
        """The time between two looks at one host; counts from its next look on."""
        self.interval_seconds = max(LEAST_INTERVAL_SECONDS, interval_seconds)

    def set_hosts(self, hosts: Iterable[str]) -> None:
        """These hosts and no others, each due now."""
        wanted = list(dict.fromkeys(hosts))
        with self._lock:
            gone = [host for host in self._due if host not in wanted]
            for host in gone:
                del self._due[host]
                self._asked.pop(host, None)
        for host in gone:
            self._scheduler.remove_job(host)
        for host in wanted:
            if host in self._due:
                self.look_again(host, 0)
                continue
            with self._lock:
                self._due[host] = self._asked[host] = clock.boottime()
            self._scheduler.add_job(
                self._call,
                _Every(partial(self._pace, host)),
                args=(host,),
                id=host,
                next_run_time=datetime.now(timezone.utc),
                max_instances=1,
                coalesce=True,
                misfire_grace_time=None,
            )

    def look_again(self, host: str, seconds: float) -> None:
        """The next look at `host` is due in so many seconds; a host that is not known is ignored."""
        with self._lock:
            if host not in self._due:
                return
            due = clock.boottime() + seconds
            self._asked[host] = min(due, self._asked.get(host, due))
        try:
            self._scheduler.modify_job(host, next_run_time=datetime.now(timezone.utc) + timedelta(seconds=seconds))
        except JobLookupError:
            return  # taken out of the settings at this moment
        self._note_due(host, seconds)

    def due_in(self, host: str) -> float | None:
        """Seconds until the next look, negative when it is overdue; None for a host that is not known."""
        with self._lock:
            due = self._due.get(host)
        return None if due is None else due - clock.boottime()

    def stop(self, grace_seconds: float) -> bool:
        """Nothing more begins. Whether everything that ran has ended within `grace_seconds`; the rest is abandoned."""
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)
        is_idle = self.lanes.wait_idle(grace_seconds)
        self.unfinished = tuple(sorted(self._active))
        self.lanes.withdraw()
        return is_idle and not self.lanes.lingering

    # --- clocks -------------------------------------------------------------------------------------------------------

    def tick(self) -> bool:
        """To be called every `TICK_SECONDS`. Whether the rounds go on as they should."""
        wall, slept = _offsets()
        was_wall, was_slept = self._offsets
        self._offsets = (wall, slept)
        has_slept = slept - was_slept > JUMP_SECONDS
        if has_slept or abs(wall - was_wall) > JUMP_SECONDS:
            if has_slept:
                _log.info("the machine slept for %.0f s; hosts that are due are looked at now", slept - was_slept)
            else:
                _log.info("the clock was changed by %+.0f s; the rounds keep their pace", wall - was_wall)
            least = WAKING_SECONDS if has_slept else 0.0
            for host in list(self._due):
                left = self.due_in(host)
                if left is not None:
                    self.look_again(host, max(least, left))
            return True
        overdue = [
            host
            for host, due in list(self._due.items())
            if clock.boottime() - due > OVERDUE_SECONDS and host not in self._active
        ]
        if overdue:
            _log.error("%d hosts are overdue and are not looked at: the scheduler is woken", len(overdue))
            self._scheduler.wakeup()
        return not overdue

    def _note_due(self, host: str, seconds: float) -> None:
        with self._lock:
            # One that was taken out meanwhile would be overdue for ever.
            if host in self._due:
                self._due[host] = clock.boottime() + seconds

    def _pace(self, host: str) -> float:
        seconds = self.interval_seconds
        seconds += random.uniform(0, min(_JITTER_SHARE * seconds, _JITTER_MAX_SECONDS))  # noqa: S311  no secret
        self._note_due(host, seconds)
        return seconds

    def _began(self, host: str) -> None:
        with self._lock:
            self._active.add(host)
            self._asked.pop(host, None)

    def _ended(self, host: str, is_hung: bool) -> None:
        with self._lock:
            self._active.discard(host)
            is_due = self._asked.get(host, float("inf")) <= clock.boottime()
        if is_hung:
            self._hung(host)
        if is_due:
            self.look_again(host, 0)

    def _call(self, host: str) -> None:
        """Runs in a lane. Nothing that a check raises reaches APScheduler."""
        ticket: Ticket = _here.ticket
        try:
            again = self._check(host, ticket)
        except Exception as error:  # noqa: BLE001  one host must never end the rounds
            again = None
            if ticket.is_awaited:
                self._failed(host, error)
        due = self.due_in(host)
        if again is not None and due is not None and again < due and ticket.is_awaited:
            self.look_again(host, again)


class _Every(BaseTrigger):  # type: ignore[misc]  # APScheduler has no types
    """Some seconds after the moment of the last look, by whatever the clock says then: nothing piles up."""

    __slots__ = ("pace",)

    def __init__(self, pace: Callable[[], float]) -> None:
        self.pace = pace

    def get_next_fire_time(self, _previous: datetime | None, now: datetime) -> datetime:
        return now + timedelta(seconds=self.pace())


class _LaneExecutor(BaseExecutor):  # type: ignore[misc]  # as above
    """Runs the calls of APScheduler in lanes, and tells it when one that hangs is given up."""

    def __init__(self, lanes: Lanes, began: Callable[[str], None], ended: Callable[[str, bool], None]) -> None:
        super().__init__()
        self._lanes = lanes
        self._began = began
        self._ended = ended

    def _do_submit_job(self, job: Any, run_times: list[datetime]) -> None:
        store = job._jobstore_alias  # noqa: SLF001  as APScheduler's own executors do

        def work(ticket: Ticket) -> list[JobExecutionEvent]:
            _here.ticket = ticket
            events: list[JobExecutionEvent] = run_job(job, store, run_times, self._logger.name)
            return events

        def done(result: Result[list[JobExecutionEvent]]) -> None:
            events = result.value
            if events is None:
                events = [JobExecutionEvent(EVENT_JOB_ERROR, job.id, store, run_times[-1], exception=result.error)]
            self._run_job_success(job.id, events)
            self._ended(job.id, result.is_hung)

        self._began(job.id)
        self._lanes.submit(job.id, work, done)

    def shutdown(self, wait: bool = True) -> None:  # noqa: ARG002  the signature of APScheduler
        self._lanes.close()


def _offsets() -> tuple[float, float]:
    """How far the wall clock, and the clock that counts suspended time, are ahead of the others."""
    boottime = clock.boottime()
    return clock.wall() - boottime, boottime - clock.steady()
