"""The third guard of the lease: the spawner stops the trees when the keeper, which somebody has stopped, does not.

The worker is the second (`kueue.worker.guard`), and may be gone at that moment.

Rules
- Pure; moments are boottime. Keeper and stand-in know of each other by `shared` alone.
- While the keeper does nothing the trees are stopped again and again: the kernel continues a process group that becomes
  orphaned. The keeper does the same, about once a second; when it is not seen at work for longer, it does not.
- That it stands in is written down before the first tree is stopped, and said when the last has been: the keeper, or
  whoever follows it, lets go on what may by then. It may have got a new lease in the middle of it.
"""

from __future__ import annotations

from typing import Literal

from kueue.runner.shared import Shared

PATIENCE_SECONDS = 0.5  # a quarter of the smallest margin between lease and time-out, as of the worker's guard
LOOK_SECONDS = 1.0
SOON_SECONDS = 0.1  # some of a tree still ran
ABSENT_SECONDS = 2.5  # a keeper that has jobs paused is at work every second


class StandIn:
    """Says what a spawner is to do. Call `look` at `due`, and whenever it is awake."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self.is_new = False
        """The last `look` was the first of several that say ``stop``."""
        self.ended: float | None = None
        """Since when it stood in, of that which is over when `look` says ``say``."""
        self._since: float | None = None
        self._look_at = 0.0

    def due(self, *, is_needed: bool) -> float | None:
        """`is_needed`: there is something that must not run without a lease."""
        if self._since is not None:
            return self._look_at
        return self._called_at if is_needed else None

    @property
    def _called_at(self) -> float:
        shared = self._shared
        late = shared.deadline + PATIENCE_SECONDS
        return max(late, shared.written_at + ABSENT_SECONDS) if shared.lapsed else late

    def look(self, now: float, *, is_needed: bool) -> Literal["stop", "say"] | None:
        """``stop``: all that must not run without a lease; then call `stopped`. ``say``: the keeper is back."""
        if now < self._called_at:
            self.ended, self._since = self._since, None
            return "say" if self.ended is not None else None
        if now < self._look_at:
            return None
        if not is_needed:
            self._look_at = now + LOOK_SECONDS
            return None
        self.is_new = self._since is None
        if self._since is None:
            self._since = now
            self._shared.stands_in(now)
        return "stop"

    def stopped(self, now: float, running: int) -> None:
        """`running`: how many processes were not stopped yet."""
        self._look_at = now + (SOON_SECONDS if running else LOOK_SECONDS)
