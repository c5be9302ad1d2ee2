"""Chores: finished jobs that are old or unwanted leave the record in portions, the store is tidied in idle moments."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import trio

from kueue import log
from kueue.core.engine import Engine, repeated
from kueue.core.facts import FinishedJob, Kind
from kueue.errors import DiskFull, KueueError
from kueue.model import Now
from kueue.protocol import messages as m
from kueue.server.outage import NO_SPARE_HINT, NOTHING_ACCEPTED
from kueue.server.session import PRINCIPAL
from kueue.storage.limits import BALLAST_BYTES
from kueue.storage.store import PAGE

if TYPE_CHECKING:
    from kueue.server.driver import Driver

IDLE_SECONDS = 30.0
"""Quiet for so long counts as an idle moment."""
ALL_KINDS: tuple[Kind, ...] = ("succeeded", "failed", "canceled")

_log = log.logger("server.upkeep")


class Upkeep:
    """Owns the period; `Driver` runs it and hands clean requests to it."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.interval_seconds = 60.0
        self._cleaning = trio.Lock()
        self._asked_send, self._asked = trio.open_memory_channel[tuple[int, m.CleanJobs]](100)

    def ask(self, session: int, question: m.CleanJobs) -> None:
        """Carry out `CleanJobs` and answer it. Raises `KueueError` when a hundred of them wait already."""
        try:
            self._asked_send.send_nowait((session, question))
        except trio.WouldBlock:
            raise KueueError("The server is busy cleaning; try again in a moment.") from None

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._serve_questions)
            nursery.start_soon(self._look_for_spare)
            nursery.start_soon(self._tidy_when_idle)
            while True:
                await trio.sleep(self.interval_seconds)
                self._driver.look_at_claim()
                try:
                    await self.clean_old()
                except KueueError as error:
                    # A full disk, or the end: the next round, or the next start, does it.
                    _log.debug("clean-up waits: %s", error)

    async def _look_for_spare(self) -> None:
        """Say it while there is time to do something about it."""
        try:
            if not await self._driver.read(lambda store: store.restore_ballast()):
                _log.warning(
                    "the disk has no room for the %d MB that are kept aside; once it is full, there will be none to "
                    "forget jobs either",
                    BALLAST_BYTES // 2**20,
                )
        except KueueError as error:
            _log.debug("nothing could be kept aside: %s", error)

    async def clean_old(self) -> int:
        """Drop what ended longer ago than the settings allow; how many that were."""
        now = await self._driver.look(lambda _, now: now)
        before = now.wall - self._driver.settings.job_cleanup_after_seconds
        return await self._clean(ALL_KINDS, before, "server")

    async def _serve_questions(self) -> None:
        async for session, question in self._asked:
            kinds: tuple[Kind, ...] = ALL_KINDS if question.failed else ("succeeded", "canceled")
            try:
                stored = await self._driver.look(partial(_answered_before, question))
                if stored is not None:
                    self._driver.send(session, stored)
                    continue
                count = await self._clean(kinds, None, PRINCIPAL)
                done = m.Done(seq=question.seq, text="Removed finished and canceled jobs!", count=count)
                await self._driver.change(
                    lambda engine, now: engine.answer(session, question.request_id, done, now),  # noqa: B023  awaited here
                    although_full=True,
                )
            except KueueError as error:
                self._driver.send(session, m.Failed(seq=question.seq, error=str(error), hint=error.hint))

    async def _clean(self, kinds: tuple[Kind, ...], before: float | None, by: str) -> int:
        """Portions of one page, so that everybody else is served between two of them."""
        count = 0
        async with self._cleaning:
            while True:
                rows = await self._driver.read(
                    lambda store: store.cleanable(kinds=kinds, ended_before=before, limit=PAGE)
                )
                if not rows:
                    break
                await self._drop(rows, by)
                count += len(rows)
        if count:
            _log.info("%s", log.keys(cleaned=count, by=by))
        return count

    async def _drop(self, rows: list[FinishedJob], by: str) -> None:
        try:
            await self._driver.change(lambda engine, now: engine.clean(rows, by, now), although_full=True)
        except DiskFull:
            # Dropping rows takes room for a moment; the ballast gives it. It is put back when there is room again.
            await self._driver.read(lambda store: store.release_ballast())
            try:
                await self._driver.change(lambda engine, now: engine.clean(rows, by, now), although_full=True)
            except DiskFull as error:
                raise DiskFull(NOTHING_ACCEPTED, hint=NO_SPARE_HINT) from error

    async def _tidy_when_idle(self) -> None:
        tidied = -1.0
        while True:
            await trio.sleep(IDLE_SECONDS)
            since = self._driver.idle_since
            try:
                now = await self._driver.look(lambda _, now: now)
                if since == tidied or now.steady - since < IDLE_SECONDS or self._driver.read_only:
                    continue
                await self._driver.read(lambda store: store.tidy())
                await self._driver.read(lambda store: store.restore_ballast())
            except KueueError as error:
                _log.debug("upkeep of the store waits: %s", error)
            tidied = since


def _answered_before(question: m.CleanJobs, engine: Engine, _: Now) -> m.Message | None:
    stored = engine.state.answers.get(question.request_id)
    return None if stored is None else repeated(stored, question)
