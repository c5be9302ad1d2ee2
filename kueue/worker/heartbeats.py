"""The heartbeats of one session: when the next is due, which are unanswered, and what an answer is worth. Pure.

Rules
- The moment of a heartbeat is noted before it is written; the lease that its answer grants counts from there.
- Moments are ``CLOCK_BOOTTIME`` seconds.
"""

from __future__ import annotations

from kueue.protocol.messages import Heartbeat, HeartbeatAnswer


class Heartbeats(dict[int, float]):
    """The unanswered ones: number → moment."""

    def __init__(self) -> None:
        super().__init__()
        self.lease_seconds = 0.0
        """As the server said last."""
        self.due = 0.0
        """The moment of the next one."""
        self._last = 0

    def begin(self, lease_seconds: float, boottime: float) -> None:
        """The server has welcomed us."""
        self.lease_seconds = lease_seconds
        self.due = boottime

    def next(self, boottime: float) -> Heartbeat:
        """To be written now."""
        self._last += 1
        self[self._last] = boottime
        self.due = boottime + self._pause_seconds
        return Heartbeat(number=self._last)

    def answered(self, answer: HeartbeatAnswer) -> float | None:
        """The moment until which the lease runs now; None: that one is not waited for."""
        sent = self.get(answer.number)
        if sent is None:
            return None
        for number in [number for number in self if number <= answer.number]:
            del self[number]
        self.lease_seconds = answer.lease_seconds
        return sent + answer.lease_seconds

    def next_moment(self) -> float:
        """When something is due, or the patience ends."""
        return min(self.due, min(self.values()) + self._patience_seconds) if self else self.due

    def silent_seconds(self, boottime: float) -> float:
        """How long an answer is overdue, from the heartbeat on; 0: none is."""
        waits = boottime - min(self.values(), default=boottime)
        return waits if waits >= self._patience_seconds else 0.0

    @property
    def _pause_seconds(self) -> float:
        return min(10.0, self.lease_seconds / 6.0)

    @property
    def _patience_seconds(self) -> float:
        """A heartbeat unanswered for so long: the connection is dead, though nobody has closed it."""
        return max(5.0, 2.0 * self._pause_seconds)
