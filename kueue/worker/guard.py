"""The second guard of the lease: if an attempt is not proven paused in time, the worker stops its tree itself.

Rules
- Pure; moments are ``CLOCK_BOOTTIME`` seconds.
- Each attempt has the deadline that its runner was given. What no runner answered for when the session began is renewed
  by nothing (the server may give it away).
- Only attempts that the server may give away are stopped (`rerun`); the others may run without a lease.
- A runner tells `Changed(paused)` only when nothing of the attempt runs: that is the proof. Of one that waits in a line
  it is `ProvenStill`: without a lease nothing starts. `Queued` alone is none; the runner may have started it since.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from kueue.worker.actions import Action, ContinueTrees, PauseTrees
from kueue.worker.known import Attempt


class LeaseGuard:
    """Follows the deadlines of all attempts."""

    def __init__(self) -> None:
        self.timeout_seconds = 10.0
        """The server's ``worker_timeout_seconds``; until it is known the smallest allowed, which guards soonest."""
        self.deadline: float | None = None
        """The newest deadline that was ordered."""
        self._stopped: set[int] = set()

    @property
    def _patience_seconds(self) -> float:
        """A quarter of the margin between lease and time-out: the runner's own pause needs milliseconds."""
        return max(2.0, self.timeout_seconds / 10.0) / 4.0

    def is_good(self, boottime: float) -> bool:
        """Something may be started now."""
        return self.deadline is not None and boottime < self.deadline

    def renewed(self, deadline: float, attempts: Mapping[int, Attempt], but: Collection[int]) -> list[Action]:
        """A new deadline was ordered to all runners that answered when the session began; `but`: attempts of others."""
        self.deadline = deadline
        for attempt in attempts.values():
            if attempt.offer not in but:
                attempt.lease_until = deadline
        free = tuple(sorted(one for one in self._stopped if not self._stays_stopped(attempts.get(one), but)))
        self._stopped.difference_update(free)
        return [ContinueTrees(free)] if free else []

    @staticmethod
    def _stays_stopped(attempt: Attempt | None, but: Collection[int]) -> bool:
        """What is to be killed never runs again before that; what has no lease does not run."""
        return attempt is not None and (attempt.stop or attempt.state == "stopping" or attempt.offer in but)

    @staticmethod
    def assume(offers: Collection[int], deadline: float, attempts: Mapping[int, Attempt]) -> None:
        """The latest deadline that attempts can have whose runner has not said it."""
        for offer in offers:
            if attempts[offer].lease_until is None:
                attempts[offer].lease_until = deadline

    def distrust(self, attempts: Iterable[Attempt], boottime: float) -> None:
        """Their lease has lapsed, and they are stopped with the next `look`: nobody is there who would do it."""
        for attempt in attempts:
            attempt.lease_until = boottime - self._patience_seconds

    def prolonged(self, until: float, attempts: Mapping[int, Attempt]) -> None:
        """The runners prolong their lease by themselves, by the same evidence; what has lapsed stays lapsed."""
        for attempt in attempts.values():
            if attempt.lease_until is not None and attempt.offer not in self._stopped:
                attempt.lease_until = max(attempt.lease_until, until)

    def look(self, boottime: float, attempts: Mapping[int, Attempt]) -> list[Action]:
        """What must be stopped now because its runner does not do it; each lapse is answered once."""
        offers = [one.offer for one in self._guarded(attempts) if boottime >= self._limit(one)]
        self._stopped.update(offers)
        return [PauseTrees(tuple(sorted(offers)))] if offers else []

    def next_look(self, attempts: Mapping[int, Attempt]) -> float | None:
        """The moment at which `look` may have something to do."""
        return min((self._limit(one) for one in self._guarded(attempts)), default=None)

    def _limit(self, attempt: Attempt) -> float:
        assert attempt.lease_until is not None
        return attempt.lease_until + self._patience_seconds

    def _guarded(self, attempts: Mapping[int, Attempt]) -> list[Attempt]:
        return [
            one
            for one in attempts.values()
            if one.is_revocable
            and not one.is_proven_still
            and one.lease_until is not None
            and one.offer not in self._stopped
        ]
