"""What jobs wrote, for those who ask: from the worker that has it all, or from the excerpts in the record.

Rules
- Without ``follow`` a question gets one piece; the reader asks on from where it ended, until a piece is empty.
- A followed stream is looked at twice a second, once for all its followers. Who is behind reads on at its own pace;
  who reads more slowly than the job writes loses the middle, with a mark. Nobody waits for anybody else.
- A stream that is followed over the end of an attempt begins anew with the next one, with a note.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from kueue.core import queries
from kueue.core.engine import Engine
from kueue.core.facts import FinishedJob
from kueue.errors import KueueError, UserError
from kueue.model import Excerpt, JobState, kind_of, shown
from kueue.protocol import messages as m
from kueue.server.desk import Waiting

if TYPE_CHECKING:
    from kueue.server.driver import Driver
    from kueue.server.session import Session

PIECE = 256 * 1024
"""Bytes in one message, also asked of the worker."""
FETCH_SECONDS = 10.0
POLL_SECONDS = 0.5
SLOW_SECONDS = 2.0
"""A follower that took so long for one piece is slow; only slow ones lose something."""
LAG_MAX = 4 * 1024 * 1024
"""Bytes that a slow follower may be behind before it loses the middle."""


class NoAnswer(KueueError):
    """The worker is not connected, did not answer in time, or cannot read the stream; the sentence says which."""


@dataclass(frozen=True)
class _Where:
    """Where the newest output of a live job is."""

    state: m.JobFilter
    offer: int | None
    attempt: int
    session: int | None
    worker: str
    has_started: bool


@dataclass
class _Tap:
    """The newest piece of a stream that somebody follows."""

    piece: m.FetchedOutput | None
    at: float
    """Trio time of the fetch that brought it."""
    fetch: Waiting[m.FetchedOutput | None] | None = None
    """The fetch that is under way, for the other followers to wait for."""


class Outputs:
    """Serves `ReadOutput`; knows what was asked of which worker."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._next_token = 1
        self._asked: dict[int, tuple[int, Waiting[m.FetchedOutput]]] = {}
        """Token → (session of the worker, who waits)."""
        self._taps: dict[tuple[int, m.Stream, int], _Tap] = {}
        """(offer, stream, offset) → the piece there, while it is fresh."""

    # --- workers -----------------------------------------------------------------------------------------------------

    def fetched(self, session: int, message: m.FetchedOutput) -> None:
        """A worker's answer; late ones and those to others' questions are dropped."""
        asked = self._asked.get(message.token)
        if asked is not None and asked[0] == session:
            asked[1].give(message)

    def gone(self, session: int) -> None:
        """That session has ended: what was asked of it will not be answered."""
        for number, waiting in list(self._asked.values()):
            if number == session:
                waiting.fail(NoAnswer("the connection to the worker was lost"))

    async def fetch(self, session: int, offer: int, stream: m.Stream, offset: int) -> m.FetchedOutput:
        """One piece from the worker. Raises `NoAnswer`."""
        token = self._next_token
        self._next_token += 1
        waiting: Waiting[m.FetchedOutput] = Waiting()
        self._asked[token] = (session, waiting)
        try:
            question = m.FetchOutput(token=token, offer=offer, stream=stream, offset=offset, limit=PIECE)
            if not self._driver.send(session, question):
                raise NoAnswer("the worker is not connected")
            with trio.move_on_after(FETCH_SECONDS):
                answer = await waiting.result()
                if answer.error:
                    raise NoAnswer(answer.error)
                return answer
            raise NoAnswer(f"the worker did not answer within {FETCH_SECONDS:g} s")
        finally:
            del self._asked[token]

    async def _newest(self, where: _Where, stream: m.Stream, offset: int) -> m.FetchedOutput:
        """As `fetch`, but followers at the same place share one fetch in each half second."""
        assert where.offer is not None
        assert where.session is not None
        key = (where.offer, stream, offset)
        tap = self._taps.get(key)
        now = trio.current_time()
        if tap is not None and tap.fetch is not None:
            shared = await tap.fetch.result()
            if shared is not None:
                return shared
        elif tap is not None and tap.piece is not None and now - tap.at < POLL_SECONDS / 2:
            return tap.piece
        tap = self._taps[key] = _Tap(None, now, Waiting())
        fetch = tap.fetch
        assert fetch is not None
        try:
            tap.piece = await self.fetch(where.session, where.offer, stream, offset)
        finally:
            # Waiters of a fetch that failed try for themselves and hear why.
            tap.fetch = None
            fetch.give(tap.piece)
            tap.at = trio.current_time()
            self._drop_stale_taps(tap.at)
        return tap.piece

    def _drop_stale_taps(self, now: float) -> None:
        for key in [key for key, tap in self._taps.items() if tap.fetch is None and now - tap.at > POLL_SECONDS]:
            del self._taps[key]

    # --- readers -----------------------------------------------------------------------------------------------------

    async def read(self, session: Session, question: m.ReadOutput) -> None:
        """Answer one question. Raises `KueueError` for a job that is not there."""
        if question.follow:
            await _Follower(self, self._driver, session, question).run()
            return
        where = await self._driver.look(lambda engine, _: _where(engine, question.id))
        if where is not None:
            session.say(await self._live_piece(where, question))
            return
        row = await self.finished(question.id)
        session.say(await self.finished_piece(row, question.stream, question.offset, question.seq))

    async def finished(self, job: int) -> FinishedJob:
        row = await self._driver.read(lambda store: store.finished_job(job))
        if row is None:
            raise UserError("Job not found!", hint="It may have been cleaned up; `kueue list-jobs` shows the rest.")
        return row

    async def _live_piece(self, where: _Where, question: m.ReadOutput) -> m.Output:
        note, source, piece = "", "worker", None
        if where.offer is None or not where.has_started:
            note, source = f"the job is {where.state}: there is no output yet", "none"
        elif where.session is None:
            note, source = f"worker {where.worker} is not connected; its output can be read when it is back", "none"
        else:
            try:
                piece = await self.fetch(where.session, where.offer, question.stream, question.offset)
            except NoAnswer as error:
                note, source = f"worker {where.worker}: {error}", "none"
        return m.Output(
            seq=question.seq,
            offset=piece.offset if piece else question.offset,
            data=piece.data if piece else b"",
            source="worker" if source == "worker" else "none",
            note=piece.note if piece else note,
            attempt=where.attempt,
            end=piece is None or piece.offset + len(piece.data) >= piece.size,
            state=where.state,
        )

    async def finished_piece(self, row: FinishedJob, stream: m.Stream, offset: int, seq: int) -> m.Output:
        """A piece of a finished job's output, from the worker if it can give it, else from the record."""
        state = kind_of(row.outcome)
        attempt = len([past for past in row.attempts if past.number is not None])
        last = row.attempts[-1] if row.attempts else None
        excerpt = None if row.end is None else getattr(row.end, stream)
        assert excerpt is None or isinstance(excerpt, Excerpt)
        trouble = "the worker is not connected"
        if last is not None and last.number is not None and not (excerpt is not None and excerpt.discarded):
            node = last.node
            session = await self._driver.look(lambda engine, _: _session_of(engine, node))
            if session is not None:
                try:
                    piece = await self.fetch(session, last.offer, stream, offset)
                except NoAnswer as error:
                    trouble = str(error)
                else:
                    return m.Output(
                        seq=seq,
                        offset=piece.offset,
                        data=piece.data,
                        note=piece.note,
                        attempt=attempt,
                        end=piece.offset + len(piece.data) >= piece.size,
                        state=state,
                    )
        return _stored_piece(excerpt, offset, seq, attempt, state, trouble)


def _stored_piece(
    excerpt: Excerpt | None, offset: int, seq: int, attempt: int, state: m.JobFilter, trouble: str
) -> m.Output:
    """From the first and last bytes in the record."""
    note, data, source, at = "", b"", "none", offset
    if excerpt is None:
        note = "the job ended without output"
    elif excerpt.discarded:
        note = "the output was thrown away, as was asked for"
    elif excerpt.redirected is not None:
        note = f"the output went to {shown(excerpt.redirected)} ({trouble})"
    else:
        source = "stored"
        tail_at = excerpt.size - len(excerpt.tail)
        if offset < len(excerpt.head):
            data = excerpt.head[offset : offset + PIECE]
        elif offset < excerpt.size:
            if offset < tail_at:
                note = f"{tail_at - offset} bytes are left out here ({trouble})"
            at = max(offset, tail_at)
            data = excerpt.tail[at - tail_at : at - tail_at + PIECE]
    size = excerpt.size if excerpt is not None else 0
    return m.Output(
        seq=seq,
        offset=at,
        data=data,
        source="stored" if source == "stored" else "none",
        note=note,
        attempt=attempt,
        end=source == "none" or at + len(data) >= size,
        state=state,
    )


class _Follower:
    """One followed stream of one client."""

    def __init__(self, outputs: Outputs, driver: Driver, session: Session, question: m.ReadOutput) -> None:
        self._outputs = outputs
        self._driver = driver
        self._session = session
        self._question = question
        self._offset = question.offset
        self._offer: int | None = None
        self._attempt = 0
        self._told = ""
        """The last remark, so that it is said once and not twice a second."""

    async def run(self) -> None:
        question = self._question
        while True:
            where = await self._driver.look(lambda engine, _: _where(engine, question.id))
            if where is None:
                break
            if not await self._piece_of(where):
                await trio.sleep(POLL_SECONDS)
        row = await self._outputs.finished(question.id)
        if row.attempts:
            self._change_attempt(row.attempts[-1].offer, row.attempts[-1].number or 0)
        while True:
            piece = await self._outputs.finished_piece(row, question.stream, self._offset, question.seq)
            await self._say(piece)
            if piece.end:
                return

    async def _piece_of(self, where: _Where) -> bool:
        """Pass on what is new. False: nothing is, or it cannot be had now."""
        if where.offer is None or not where.has_started:
            self._remark(f"the job is {where.state}" if where.state != "offered" else "")
            return False
        self._change_attempt(where.offer, where.attempt)
        if where.session is None:
            self._remark(f"worker {where.worker} is not connected; waiting for it")
            return False
        try:
            piece = await self._outputs._newest(where, self._question.stream, self._offset)  # noqa: SLF001  same module
        except NoAnswer as error:
            self._remark(f"worker {where.worker}: {error}; still trying")
            return False
        self._told = ""
        if not piece.data and piece.offset <= self._offset:
            return False
        seconds = await self._say(
            m.Output(
                seq=self._question.seq,
                offset=piece.offset,
                data=piece.data,
                note=piece.note,
                attempt=where.attempt,
                state=where.state,
            )
        )
        behind = piece.size - self._offset
        if seconds > SLOW_SECONDS and behind > LAG_MAX:
            skipped = behind - PIECE
            self._offset += skipped
            self._remark(f"{skipped} bytes are left out: they are read more slowly than the job writes")
        return self._offset < piece.size

    def _change_attempt(self, offer: int, attempt: int) -> None:
        is_other = offer != self._offer
        if self._offer is None:
            # The reader may have read an earlier attempt over a connection that was lost.
            is_other = 0 < self._question.attempt != attempt
        if is_other:
            self._offset = 0
            self._remark(f"attempt {attempt} of the job: the output begins anew")
        self._offer, self._attempt = offer, attempt

    def _remark(self, sentence: str) -> None:
        if sentence and sentence != self._told:
            self._session.say(
                m.Output(
                    seq=self._question.seq, offset=self._offset, source="none", note=sentence, attempt=self._attempt
                )
            )
        self._told = sentence

    async def _say(self, piece: m.Output) -> float:
        """Say it and wait until most of it is on its way; the seconds that took."""
        began = trio.current_time()
        self._offset = piece.offset + len(piece.data)
        self._session.say(piece)
        await self._session.stream.drained(PIECE)
        return trio.current_time() - began


def _where(engine: Engine, job_id: int) -> _Where | None:
    job = engine.state.jobs.get(job_id)
    if job is None:
        return None
    attempt = job.attempt
    return _Where(
        state=queries.job_filter_of(job),
        offer=None if attempt is None else attempt.offer,
        attempt=job.numbered,
        session=None if attempt is None else _session_of(engine, attempt.node),
        worker="" if attempt is None else engine.state.nodes[attempt.node].record.name,
        has_started=attempt is not None and (attempt.started_wall is not None or job.state is JobState.RUNNING),
    )


def _session_of(engine: Engine, node: int) -> int | None:
    worker = engine.queue.workers.get(node)
    return None if worker is None else worker.session
