"""What one worker does not take for now, why, and when it is asked again; no question walks it all."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TypeVar

K = TypeVar("K", int, str)

GONE_KEPT = 5_000
"""Of what left `Declines.gone` remembers so many at least; beginning anew costs each reader a look at everything."""


@dataclass
class Decline:
    """A directory or job that a worker does not take."""

    reason: str
    retry_at: float
    """Steady seconds; infinite while one job is out asking."""


class Declines(dict[K, Decline]):
    """Declined directories, or jobs. What is in changes by `add`, `drop` and `clear` alone."""

    def __init__(self) -> None:
        super().__init__()
        self._pauses: list[tuple[float, K]] = []
        """Heap of (retry_at, key); an entry is valid if the key still has that time."""
        self.gone: list[K] = []
        """What has left, the newest last. Who reads on here has to begin anew when this is another list."""

    def add(self, key: K, reason: str, retry_at: float) -> None:
        self[key] = Decline(reason, retry_at)
        if retry_at != float("inf"):
            heappush(self._pauses, (retry_at, key))

    def drop(self, key: K) -> Decline | None:
        """Take it out, if it is in; returns what it was."""
        found = self.pop(key, None)
        if found is not None:
            if len(self.gone) >= max(GONE_KEPT, len(self)):
                self.gone = []
            self.gone.append(key)
        return found

    def clear(self) -> None:
        super().clear()
        self._pauses.clear()
        self.gone = []

    def take_due(self, steady: float) -> list[tuple[K, Decline]]:
        """Take out those whose pause is over; returns them."""
        due: list[tuple[K, Decline]] = []
        while (retry_at := self.next_retry()) is not None and retry_at <= steady:
            _, key = heappop(self._pauses)
            found = self.drop(key)
            assert found is not None
            due.append((key, found))
        return due

    def next_retry(self) -> float | None:
        """Steady time at which the first pause is over."""
        pauses = self._pauses
        while pauses:
            retry_at, key = pauses[0]
            found = self.get(key)
            if found is not None and found.retry_at == retry_at:
                return retry_at
            heappop(pauses)
        return None
