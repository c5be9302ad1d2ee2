"""Questions about what is over: finished jobs in pages, and the events."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from operator import itemgetter
from typing import get_args

import msgspec

from kueue.core.facts import FinishedJob, Kind
from kueue.storage import rows
from kueue.storage.blobs import Blobs
from kueue.storage.store import Event

KINDS: tuple[Kind, ...] = get_args(Kind)

TOP = 2**62
"""Above every number that we ever gave, and within what SQLite can hold; people may type any number."""

FINISHED_COLUMNS = "id, ended, run_seconds, payload, place, settings, body"


class History:
    """Reads finished jobs and events. Errors rise as SQLite raises them; `SqliteStore` gives them a sentence."""

    def __init__(self, connection: sqlite3.Connection, blobs: Blobs) -> None:
        self._connection = connection
        self._blobs = blobs

    def finished(
        self, kinds: Sequence[Kind], ids: Sequence[tuple[int, int]], below: int | None, limit: int
    ) -> list[FinishedJob]:
        chosen = [kind for kind in KINDS if kind in kinds]
        top = TOP if below is None else min(below - 1, TOP)
        found: list[FinishedJob] = []
        for first, last in _descending(ids or [(0, top)], top):
            if len(found) >= limit:
                break
            found += self._page(chosen, first, last, limit - len(found))
        return found

    def _page(self, kinds: list[Kind], first: int, last: int, limit: int) -> list[FinishedJob]:
        # One walk down an index for each kind: with IN, SQLite would sort the whole history for one page.
        walks: list[tuple[str, tuple[int | str, ...]]] = [("", ())]
        if kinds and len(kinds) < len(KINDS):
            walks = [("kind = ? AND", (kind,)) for kind in kinds]
        found = []
        for condition, values in walks:
            query = (
                f"SELECT {FINISHED_COLUMNS} FROM finished WHERE {condition} id BETWEEN ? AND ? ORDER BY id DESC LIMIT ?"  # noqa: S608  # only constants are put in
            )
            found += self._connection.execute(query, (*values, first, last, limit)).fetchall()
        found.sort(key=itemgetter(0), reverse=True)
        return [self._finished_job(row) for row in found[:limit]]

    def _finished_job(self, row: tuple[int, float, float, bytes, int, int, bytes]) -> FinishedJob:
        job, ended, run_seconds, payload, place, settings, body = row
        return rows.finished_job(
            (job, ended, run_seconds, payload),
            rows.decode_finished(body),
            self._blobs.place(place),
            self._blobs.settings(settings),
        )

    def finished_job(self, job: int) -> FinishedJob | None:
        if not 0 <= job <= TOP:
            return None
        query = f"SELECT {FINISHED_COLUMNS} FROM finished WHERE id = ?"  # noqa: S608  # only constants are put in
        row = self._connection.execute(query, (job,)).fetchone()
        if row is None:
            return None
        output = self._connection.execute("SELECT body FROM outputs WHERE id = ?", (job,)).fetchone()
        found = self._finished_job(row)
        return found if output is None else msgspec.structs.replace(found, end=rows.decode_end(output[0]))

    def cleanable(self, kinds: Sequence[Kind], ended_before: float | None, limit: int) -> list[FinishedJob]:
        # Infinity is above every time, so that one query serves both questions.
        before = float("inf") if ended_before is None else ended_before
        query = f"SELECT {FINISHED_COLUMNS} FROM finished WHERE kind = ? AND ended < ? ORDER BY ended, id LIMIT ?"  # noqa: S608  # only constants are put in
        found = []
        for kind in dict.fromkeys(kinds):
            found += self._connection.execute(query, (kind, before, limit)).fetchall()
        found.sort(key=itemgetter(1, 0))
        return [self._finished_job(row) for row in found[:limit]]

    def events(self, job: int | None, limit: int) -> list[Event]:
        columns = "SELECT seq, wall, job, last, who, what FROM events"
        if job is None:
            found = self._connection.execute(f"{columns} ORDER BY seq DESC LIMIT ?", (limit,)).fetchall()
        elif not 0 <= job <= TOP:
            found = []
        else:
            own = f"{columns} WHERE last IS NULL AND job = ? ORDER BY seq DESC LIMIT ?"
            found = self._connection.execute(own, (job, limit)).fetchall()
            # Only submissions tell of many jobs, and no two of them tell of the same one.
            shared = f"{columns} WHERE last IS NOT NULL AND job <= ? ORDER BY job DESC LIMIT 1"
            found += [row for row in self._connection.execute(shared, (job,)) if row[3] >= job]
        found.sort(key=itemgetter(0))
        return [
            Event(wall=wall, who=who, what=what, job=first, last=last)
            for _, wall, first, last, who, what in found[max(0, len(found) - limit) :]
        ]


def _descending(ids: Sequence[tuple[int, int]], top: int) -> list[tuple[int, int]]:
    """The ranges without overlap, highest first, none above `top`."""
    disjoint: list[tuple[int, int]] = []
    for first, last in sorted(ids, reverse=True, key=itemgetter(1, 0)):
        end = min(last, top)
        if disjoint and end >= disjoint[-1][0]:
            # Overlapping or inside: the lower range may only reach up to where the higher one begins.
            end = disjoint[-1][0] - 1
        if max(first, 0) <= end:
            disjoint.append((max(first, 0), end))
    return disjoint
