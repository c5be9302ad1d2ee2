"""Notices when this program itself stood still, so that nobody is taken for silent who could not be heard."""

from __future__ import annotations

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

    `run` looks twice within the tolerance, so that a laboratory with long time-outs has a server that sleeps; `check`
    is for moments before decisions about silence, since after a stall the decision may come up before the task that
    would have noticed.
    """

    def __init__(
        self,
        stalled: Callable[[str], None],
        tolerance: Callable[[], float],
        now: Callable[[], Now],
        slept: Callable[[], float] = slept,
    ) -> None:
        self._stalled = stalled
        self._tolerance = tolerance
        self._now = now
        self._slept = slept
        self._last = now().steady
        self._step = LEAST_STEP_SECONDS
        self._slept_before = slept()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._step = max(LEAST_STEP_SECONDS, self._tolerance() / 2)
            await trio.sleep(self._step)
            self.check()
            self._last = self._now().steady

    def check(self) -> None:
        late = self._now().steady - self._last - self._step
        asleep = self._slept() - self._slept_before
        self._slept_before += asleep
        # A stall may have begun just before the step was over: what is left of the tolerance then is the limit.
        if late > self._tolerance() - (self._step - LEAST_STEP_SECONDS):
            self._last = self._now().steady
            self._stalled(f"this program stood still for {late:.1f} s")
        elif abs(asleep) > self._tolerance():
            self._stalled(f"this machine slept for {asleep:.0f} s")
