"""What kueue's own jobs contribute to the load average, those that have ended and those that run.

Rules
- The kernel's one-minute load is ``load = load * e + active * (1 - e)`` every 5 s with ``e = exp(-5/60)``
  (kernel/sched/loadavg.c). The same average is kept here for each running job, of the cores it uses.
- When a job ends its average goes over to the *ghost*, which decays like the kernel's: it is the part of the measured
  load that nothing makes any more, and the only part that is subtracted from it.
- A job too short to have been sampled contributes what its end record says: cores * (1 - exp(-run/60)).

Why this way: after a 16-core job has ended the load average says 16 for a minute; without this the machine would stand
idle for that minute. Subtracting the running jobs as well would take cores to be free that the jobs really use.
"""

from __future__ import annotations

import math

STEP_SECONDS = 5.0
PERIOD_SECONDS = 60.0
DECAY = math.exp(-STEP_SECONDS / PERIOD_SECONDS)
FORGOTTEN = 0.005
"""Below the two digits that the kernel shows a contribution is none."""


class LoadOfJobs:
    """The averages, stepped every `STEP_SECONDS` by the caller."""

    def __init__(self) -> None:
        self._running: dict[int, float] = {}
        self._ghost = 0.0

    @property
    def ghost(self) -> float:
        """Load that ended jobs still contribute to the one-minute average."""
        return self._ghost

    @property
    def running(self) -> float:
        """Load that running jobs contribute to the one-minute average."""
        return sum(self._running.values())

    def step(self, cores_in_use: dict[int, float]) -> None:
        """One step of the kernel. `cores_in_use`: CPU seconds per second since the last step, by attempt."""
        self._ghost *= DECAY
        if self._ghost < FORGOTTEN:
            self._ghost = 0.0
        self._running = {
            offer: self._running.get(offer, 0.0) * DECAY + cores * (1.0 - DECAY)
            for offer, cores in cores_in_use.items()
        }

    def ended(self, offer: int, run_seconds: float, cpu_seconds: float) -> None:
        """An attempt is over, with the figures of its end record."""
        sampled = self._running.pop(offer, None)
        if sampled is not None:
            self._ghost += sampled
        elif run_seconds > 0.0 and cpu_seconds > 0.0:
            self._ghost += cpu_seconds / run_seconds * (1.0 - math.exp(-run_seconds / PERIOD_SECONDS))
