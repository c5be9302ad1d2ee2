"""Notices when this program itself stood still, so that nobody is taken for silent who could not be heard."""

from __future__ import annotations

import math
from collections.abc import Callable

import trio

from kueue import clock
from kueue.model import Now

LEAST_STEP_SECONDS = 0.25


def slept() -> float:
    """Seconds that the machine has slept since it booted: only the boot clock counts them."""
    return clock.boottime() - clock.steady()


class Timekeeper:
    """Tells `stalled` (with the reason in words) whenever the loop was late by more than `tolerance` seconds.

    `run` looks twice within the tolerance, but only while the next deadline (steady seconds; None: there is none) is
    less than `horizon` seconds away: a stall that is over by then has left that time to whoever was not heard
    meanwhile, and an idle server sleeps. Who knows of a deadline that is new says so (`expects`).
    `check` is for moments before decisions about silence, since after a stall the decision may come up before the task
    that would have noticed.
    """

    def __init__(
        self,
        stalled: Callable[[str], None],
        tolerance: Callable[[], float],
        horizon: Callable[[], float],
        deadline: Callable[[], float | None],
        now: Callable[[], Now],
        slept: Callable[[], float] = slept,
    ) -> None:
        self._stalled = stalled
        self._tolerance = tolerance
        self._horizon = horizon
        self._deadline = deadline
        self._now = now
        self._slept = slept
        self._last = now().steady
        self._step = LEAST_STEP_SECONDS
        self._slept_before = slept()
        self._near: trio.Event | None = None
        """Ends the nap that `run` takes while no deadline is near."""

    def expects(self, deadline: float | None) -> None:
        """The next deadline is `deadline` now."""
        if self._near is not None and deadline is not None and deadline < self._last + self._step + self._horizon():
            self._near.set()
            self._near = None
            self._look_closely()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._look_closely()
            deadline = self._deadline()
            nap = (math.inf if deadline is None else deadline) - self._last - self._horizon()
            if nap > self._step:
                self._step = nap
                near = self._near = trio.Event()
                with trio.move_on_after(nap):
                    await near.wait()
                self._near = None
            else:
                await trio.sleep(self._step)
            self.check()

    def _look_closely(self) -> None:
        self._last = self._now().steady
        self._step = max(LEAST_STEP_SECONDS, self._tolerance() / 2)

    def check(self) -> None:
        late = self._now().steady - self._last - self._step
        asleep = self._slept() - self._slept_before
        self._slept_before += asleep
        # A stall may have begun just before the step was over: what is left of the tolerance then is the limit.
        unseen = min(self._step, self._tolerance() / 2) - LEAST_STEP_SECONDS
        if late > self._tolerance() - max(0.0, unseen):
            self._last = self._now().steady
            self._stalled(f"this program stood still for {late:.1f} s")
        elif abs(asleep) > self._tolerance():
            self._stalled(f"this machine slept for {asleep:.0f} s")
