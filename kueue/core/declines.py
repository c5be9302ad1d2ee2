"""What one worker does not take for now, why, and when it is asked again; no question walks it all."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

GONE_KEPT = 5_000
"""Of what left `Declines.gone` remembers so many at least; beginning anew costs each reader a look at everything."""


@dataclass
class Decline:
    """Of a directory."""

    reason: str
    retry_at: float
    """Steady seconds; infinite while one job is out asking."""


class Declines(dict[str, Decline]):
    """Declined directories. What is in changes by `add`, `drop` and `clear` alone."""

    def __init__(self) -> None:
        super().__init__()
        self._pauses: list[tuple[float, str]] = []
        """Heap of (retry_at, directory); an entry is valid if that still has this time."""
        self.gone: list[str] = []
        """What has left, the newest last. Who reads on here has to begin anew when this is another list."""

    def add(self, directory: str, reason: str, retry_at: float) -> None:
        self[directory] = Decline(reason, retry_at)
        if retry_at != float("inf"):
            heappush(self._pauses, (retry_at, directory))

    def drop(self, directory: str) -> Decline | None:
        """Take it out, if it is in; returns what it was."""
        found = self.pop(directory, None)
        if found is not None:
            if len(self.gone) >= max(GONE_KEPT, len(self)):
                self.gone = []
            self.gone.append(directory)
        return found

    def clear(self) -> None:
        super().clear()
        self._pauses.clear()
        self.gone = []

    def take_due(self, steady: float) -> list[tuple[str, Decline]]:
        """Take out those whose pause is over; returns them."""
        due: list[tuple[str, Decline]] = []
        while (retry_at := self.next_retry()) is not None and retry_at <= steady:
            _, directory = heappop(self._pauses)
            found = self.drop(directory)
            assert found is not None
            due.append((directory, found))
        return due

    def next_retry(self) -> float | None:
        """Steady time at which the first pause is over."""
        pauses = self._pauses
        while pauses:
            retry_at, directory = pauses[0]
            found = self.get(directory)
            if found is not None and found.retry_at == retry_at:
                return retry_at
            heappop(pauses)
        return None
