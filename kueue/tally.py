"""Histograms that are kept while things happen and shown to Prometheus when it asks; cheap enough for every commit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0

JOB_SECONDS = (0.1, 1, 5, 15, MINUTE, 5 * MINUTE, 15 * MINUTE, HOUR, 4 * HOUR, 12 * HOUR, DAY, 3 * DAY, 7 * DAY)
"""Bounds for what jobs do: from a test of the queue to a simulation that runs over the holidays."""
SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
"""Bounds for what the program itself does."""


class Histogram:
    """How many values lie at or below each bound, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value; one below 0 (two clocks that disagree) counts as 0."""
        value = max(0.0, value)
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulated(self) -> list[tuple[str, float]]:
        """(bound, number of values up to it), the last one ``+Inf``: as an exposition wants it."""
        words = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(words, accumulate(self.counts), strict=True))
