"""The finished jobs that messages name: the engine knows only live ones, so they are looked up before it is asked."""

from __future__ import annotations

from collections.abc import Container, Sequence

from kueue.core.facts import FinishedJob
from kueue.core.queue import PORTION, is_too_much, told_of
from kueue.protocol import messages as m
from kueue.storage.store import PAGE, Store

RANGES = 200
"""Most id ranges in one read of the store."""


def named(mail: Sequence[m.Message], live: Container[int], above: int) -> list[tuple[int, int]]:
    """The id ranges in `mail` that may name finished jobs; `above`: the next id that will be given."""
    ranges: set[tuple[int, int]] = set()
    for message in mail:
        match message:
            case m.RemoveJobs() | m.HoldJobs() | m.ReleaseJobs() if is_too_much(message.ids, above):
                pass
            case m.WatchJobs() if is_long(message, above):
                pass
            case m.RemoveJobs() | m.HoldJobs() | m.ReleaseJobs() | m.WatchJobs():
                ranges.update((max(0, first), min(last, above - 1)) for first, last in message.ids if first < above)
            case m.WorkerHello():
                ranges.update((entry.job, entry.job) for entry in message.attempts)
            case _:
                pass
    return sorted((first, last) for first, last in ranges if first != last or first not in live)


def is_long(question: m.WatchJobs, above: int) -> bool:
    """Whether it names so many jobs that a task of its session looks them up, page by page."""
    return told_of(question.ids, above) > PORTION


def rows(store: Store, ranges: Sequence[tuple[int, int]]) -> dict[int, FinishedJob]:
    """All finished jobs in these ranges, without excerpts. Blocks."""
    found: dict[int, FinishedJob] = {}
    for start in range(0, len(ranges), RANGES):
        below: int | None = None
        while True:
            page = store.finished(ids=ranges[start : start + RANGES], below=below, limit=PAGE)
            found.update((row.id, row) for row in page)
            if len(page) < PAGE:
                break
            below = page[-1].id
    return found
