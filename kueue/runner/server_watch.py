"""One more evidence that there is no server: on its own host, nobody holds its state lock."""

from __future__ import annotations

from kueue.runner.kernel import is_locked
from kueue.runner.policy import Policy


class ServerWatch:
    """Looks at the lock before the lease ends; while it is free, each look prolongs the lease. Times are boottime."""

    def __init__(self, path: str = "", seconds: float = 0.0) -> None:
        self.path = path
        self.seconds = seconds
        self.due: float | None = None

    def plan(self, policy: Policy, now: float) -> None:
        """The lease has changed: look next when half of what a look gives is left."""
        self.due = max(now, policy.deadline - self.seconds / 2) if self.path and not policy.lapsed else None

    def look(self, policy: Policy, now: float) -> float | None:
        """The new end of the lease; None: it stays as it is. Only looks before its end count."""
        if self.due is None or now < self.due:
            return None
        if now >= policy.deadline or policy.lapsed:
            self.due = None
        elif is_locked(self.path) is False:
            return now + self.seconds
        else:
            self.due = now + self.seconds / 16  # it may go down any moment before the end
        return None
