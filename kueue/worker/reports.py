"""When the worker reports its load, and whether it has to say its totals again. Pure; moments are boottime seconds."""

from __future__ import annotations

from kueue.model import MachineLoad, MachineTotals
from kueue.protocol.messages import Report

REPORT_PAUSE_SECONDS = 1.0
"""Between two reports after starts and ends: short jobs must not double the traffic."""


class Reports:
    """Of one session."""

    def __init__(self) -> None:
        self._made_at = 0.0
        self._wanted_at: float | None = None
        self._totals_told: MachineTotals | None = None

    def told(self, totals: MachineTotals) -> None:
        """The hello has said them."""
        self._totals_told = totals

    def begin(self, boottime: float) -> None:
        """The hello was the first report."""
        self._made_at = boottime

    def want(self, at: float) -> None:
        """Something has happened that the server should hear of, not later than `at` if the pause lets it."""
        at = max(at, self._made_at + REPORT_PAUSE_SECONDS)
        if self._wanted_at is None or at < self._wanted_at:
            self._wanted_at = at

    def due(self, interval_seconds: float) -> float:
        """The moment of the next one."""
        regular = self._made_at + interval_seconds
        return regular if self._wanted_at is None else min(regular, self._wanted_at)

    def make(self, load: MachineLoad, totals: MachineTotals, note: str, boottime: float) -> Report:
        """The report of this moment. `note`: what hinders the worker, for people."""
        self._made_at, self._wanted_at = boottime, None
        changed = totals if totals != self._totals_told else None
        self._totals_told = totals
        return Report(load=load, totals=changed, note=note)
