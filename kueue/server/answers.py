"""Answers to questions that change nothing, each a task of its session; what watches very many jobs is one, too.

Rules
- Live jobs come from the engine, finished ones from the store, in pages: nobody waits for somebody else's long list.
- What was live at the look and is finished at the read appears once, as finished.
- The next page is made when most of the last one is on its way: a slow reader costs one page of memory.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING

import msgspec

from kueue import __version__, clock
from kueue.core import queries
from kueue.core.engine import Engine
from kueue.core.facts import FinishedJob, Kind
from kueue.core.jobs import Job
from kueue.core.queue import job_ended
from kueue.errors import Bug, UserError
from kueue.model import Now, Outcome
from kueue.protocol import messages as m
from kueue.server import backup, outage
from kueue.storage.store import PAGE, Store
from kueue.units import merge_id_ranges

if TYPE_CHECKING:
    from kueue.server.driver import Driver
    from kueue.server.session import Session

Ranges = Sequence[tuple[int, int]]

PART_BYTES = 256 * 1024
"""Of one part of a long answer, so that it crosses also a slow line well within the time a reader has for it."""
DETAILS = 8
"""Jobs in one part of `JobDetails`: each may carry four excerpts of 64 KiB."""
DETAILS_AT_ONCE = 4 * DETAILS
"""Jobs of which all is read in one turn of the store: each turn costs more than most jobs."""
KINDS: tuple[Kind, ...] = ("succeeded", "failed", "canceled")
WATCHED_AT_ONCE = 16 * PAGE
"""Most ids that a watch looks at between two rounds."""
SPAN_MAX = 1 << 62
"""Above every id that can be given."""
EVERYTHING: Ranges = ((0, SPAN_MAX),)


async def answer(session: Session, question: m.Message) -> None:
    """Answer one question of a client. Raises `KueueError`, which becomes a `Failed`."""
    driver = session.driver
    outage.show_answering(driver)
    match question:
        case m.ListJobs():
            await _list_jobs(session, question)
        case m.ShowJobs():
            await _show_jobs(session, question)
        case m.ExplainJob():
            await _explain(session, question)
        case m.ListWorkers():
            await _list_workers(session, question)
        case m.ListResources(seq=seq):
            rows = await driver.look(lambda engine, _: queries.resource_rows(engine))
            session.say(m.ResourceList(seq=seq, resources=tuple(rows)))
        case m.WatchJobs():
            await _watch(session, question)
        case m.ReadOutput():
            await driver.outputs.read(session, question)
        case m.ServerInfo(seq=seq):
            session.say(
                m.Info(
                    seq=seq,
                    version=__version__,
                    protocol=m.PROTOCOL,
                    queue_id=driver.queue_id,
                    pid=os.getpid(),
                    started_wall=driver.started_wall,
                    read_only=driver.read_only,
                    lock_trouble=driver.claim_trouble,
                    now_wall=clock.wall(),
                    secrets=driver.secrets,
                    old_secret_workers=driver.workers_with_old_secret(),
                )
            )
        case m.Backup():
            await backup.answer(session, question)
        case _:
            raise Bug(f"nobody answers a {type(question).__name__}")


# --- lists -----------------------------------------------------------------------------------------------------------


async def _list_jobs(session: Session, question: m.ListJobs) -> None:
    driver = session.driver
    states = frozenset(question.states)
    kinds = [kind for kind in KINDS if not states or kind in states]
    ids: Ranges = question.ids or EVERYTHING
    limit = question.limit

    def summary(engine: Engine, now: Now) -> tuple[list[int], tuple[tuple[str, int], ...], tuple[int, int], int]:
        live = _live_ids(engine, ids, states, limit)
        return live, queries.counts(engine), queries.estimates(engine, now), engine.state.sums.next_job

    live, counts, (average, eta), above = await driver.look(summary)
    low = 0
    if limit is not None:
        low = await _lowest(driver, live, kinds, ids, limit)
        live = live[bisect_left(live, low) :]
    within = [(max(first, low), min(last, above - 1)) for first, last in ids if last >= low and first < above]
    rows: list[m.JobRow] = []
    size = 0
    async with aclosing(_pages(driver, live, kinds, within, states)) as pages:
        async for page in pages:
            for row in page:
                rows.append(row)
                size += _size(row)
                if size > PART_BYTES:
                    session.say(m.JobList(seq=question.seq, jobs=tuple(rows), end=False))
                    await session.stream.drained(PART_BYTES)
                    rows, size = [], 0
    session.say(m.JobList(seq=question.seq, jobs=tuple(rows), counts=counts, average_seconds=average, eta_seconds=eta))


def _live_ids(engine: Engine, ids: Ranges, states: frozenset[str], limit: int | None) -> list[int]:
    """The live jobs of these ids and states, ascending; at most the `limit` highest."""
    chosen = queries.live_ids(engine, states)
    chosen.sort()
    if tuple(ids) != EVERYTHING:
        slices = (chosen[bisect_left(chosen, first) : bisect_right(chosen, last)] for first, last in _disjoint(ids))
        chosen = list(chain.from_iterable(slices))
    return chosen if limit is None else chosen[max(0, len(chosen) - limit) :]


async def _lowest(driver: Driver, live: list[int], kinds: Sequence[Kind], ids: Ranges, limit: int) -> int:
    """The id at which the most recent `limit` jobs of those selected begin."""
    newest = live[-limit:] if limit else []
    below: int | None = None
    while kinds and limit:
        page = await driver.read(partial(_finished_ids, ids, kinds=kinds, below=below, limit=min(PAGE, limit)))
        newest = sorted({*newest, *page})[-limit:]
        if len(page) < min(PAGE, limit) or (len(newest) >= limit and page[-1] <= newest[0]):
            break
        below = page[-1]
    return newest[0] if newest else SPAN_MAX


async def _pages(
    driver: Driver, live: list[int], kinds: Sequence[Kind], ids: Ranges, states: Collection[str]
) -> AsyncGenerator[list[m.JobRow], None]:
    """Rows in ascending ids. `live`: ids that were live when the question was looked at."""
    for first, last in _disjoint(ids):
        start, width = first, PAGE
        while start <= last:
            end = min(last, start + width - 1)
            at = bisect_left(live, start)
            if at + PAGE < len(live):
                end = min(end, live[at + PAGE] - 1)
            mine = live[at : bisect_right(live, end)]
            rows = await driver.look(partial(_live_rows, mine, states)) if mine else {}
            found = await driver.read(partial(_finished, [(start, end)], kinds)) if kinds else []
            if len(found) == PAGE and end - start + 1 > PAGE:
                # There may be more than fit into one page: look at a smaller window.
                width = PAGE
                continue
            rows.update((row.id, queries.finished_row(row)) for row in found)
            if rows:
                yield [rows[job] for job in sorted(rows)]
            start = end + 1
            # Where most was cleaned away long ago the windows grow, so that a long history is crossed in a few reads.
            width = min(SPAN_MAX, width * 4) if len(rows) < PAGE // 8 else PAGE


def _finished(ids: Ranges, kinds: Sequence[Kind], store: Store) -> list[FinishedJob]:
    return store.finished(kinds=kinds, ids=ids, limit=PAGE)


def _finished_ids(
    ids: Ranges, store: Store, *, kinds: Sequence[Kind] = (), below: int | None = None, limit: int = PAGE
) -> list[int]:
    return [row.id for row in store.finished(kinds=kinds, ids=ids, below=below, limit=limit)]


def _live_rows(ids: Sequence[int], states: Collection[str], engine: Engine, now: Now) -> dict[int, m.JobRow]:
    jobs = (engine.state.jobs.get(job_id) for job_id in ids)
    chosen = (job for job in jobs if job is not None and (not states or queries.job_filter_of(job) in states))
    return {row.id: row for row in queries.live_rows(engine, chosen, now)}


def _disjoint(ids: Ranges) -> list[tuple[int, int]]:
    """Ascending, without those that are empty."""
    return merge_id_ranges((first, last) for first, last in ids if last >= first)


def _size(row: m.JobRow) -> int:
    """About the bytes of a row on the wire."""
    return 400 + sum(len(word) if isinstance(word, str) else len(word.b64) for word in row.payload.argv)


# --- one job ---------------------------------------------------------------------------------------------------------


async def _show_jobs(session: Session, question: m.ShowJobs) -> None:
    driver = session.driver
    above = await driver.look(lambda engine, _: engine.state.sums.next_job)
    missing: list[tuple[int, int]] = [(max(first, above), last) for first, last in question.ids if last >= above]
    details: list[m.JobDetail] = []
    # In the order of the question; ranges are walked in pages because most of a wide one may be gone.
    for first, last in [(max(0, first), min(last, above - 1)) for first, last in question.ids]:
        async with aclosing(_present(driver, first, last)) as windows:
            async for start, end, present in windows:
                missing += _gaps(start, end, present)
                for begin in range(0, len(present), DETAILS_AT_ONCE):
                    some = present[begin : begin + DETAILS_AT_ONCE]
                    found = await _details(driver, some)
                    missing += [(job, job) for job in some if job not in found]
                    for detail in found.values():
                        details.append(detail)
                        if len(details) >= DETAILS:
                            session.say(m.JobDetails(seq=question.seq, jobs=tuple(details), end=False))
                            await session.stream.drained(PART_BYTES)
                            details = []
    session.say(m.JobDetails(seq=question.seq, jobs=tuple(details), missing=tuple(_disjoint(missing))))


async def _present(driver: Driver, first: int, last: int) -> AsyncGenerator[tuple[int, int, list[int]], None]:
    """The windows of a range, each with the ids in it that are in the record."""
    width = PAGE
    while first <= last:
        end = min(last, first + width - 1)
        live = await driver.look(partial(_live_between, first, end))
        past = await driver.read(partial(_finished_ids, [(first, end)]))
        if len(past) == PAGE and width > PAGE:
            width = PAGE
            continue
        yield first, end, sorted({*live, *past})
        first = end + 1
        width = PAGE if live or past else width * 4


def _live_between(first: int, last: int, engine: Engine, _: Now) -> list[int]:
    jobs = engine.state.jobs
    if last - first < len(jobs):
        return [job for job in range(first, last + 1) if job in jobs]
    return [job for job in jobs if first <= job <= last]


def _gaps(first: int, last: int, present: Sequence[int]) -> list[tuple[int, int]]:
    """The ranges between `first` and `last` that `present` (ascending) leaves out."""
    gaps = []
    for job in (*present, last + 1):
        if job > first:
            gaps.append((first, job - 1))
        first = job + 1
    return gaps


async def _watch(session: Session, question: m.WatchJobs) -> None:
    """Of very many jobs: nothing is said before it is known which of them exist, though some may end meanwhile."""
    driver = session.driver
    watch = session.number, question.seq

    def is_here() -> bool:
        """What is noted for a session that has left nobody would take away. It leaves before its tasks end."""
        return session.number in driver.sessions

    def begin(engine: Engine, _: Now) -> int:
        if is_here():
            engine.queue.held_back[watch] = {}
        return engine.state.sums.next_job

    def between(first: int, last: int, engine: Engine, now: Now) -> list[int]:
        live = _live_between(first, last, engine, now)
        if is_here():
            for job in live:
                engine.queue.watch(*watch, job)
        return live

    def tell(engine: Engine, _: Now) -> dict[int, Outcome]:
        session.say(m.Watching(seq=question.seq, missing=tuple(_disjoint(missing))))
        return engine.queue.held_back.pop(watch, {})

    try:
        above = await driver.look(begin)
        missing = [(max(first, above), last) for first, last in question.ids if last >= above]
        over: dict[int, Outcome] = {}
        for first, last in _disjoint([(max(0, first), min(last, above - 1)) for first, last in question.ids]):
            begin_at, width = first, PAGE
            while begin_at <= last:
                end = min(last, begin_at + width - 1)
                live = await driver.look(partial(between, begin_at, end))
                # What was not live at the look has been stored by now.
                past = await driver.read(partial(_finished, [(begin_at, end)], ()))
                if len(past) == PAGE and width > PAGE:
                    width = PAGE
                    continue
                over.update((row.id, row.outcome) for row in past)
                missing += _gaps(begin_at, end, sorted({*live, *(row.id for row in past)}))
                begin_at = end + 1
                width = PAGE if past else min(WATCHED_AT_ONCE, width * 4)
        over.update(await driver.look(tell))
    finally:
        driver.engine.queue.held_back.pop(watch, None)
    ends = (job_ended(question.seq, job, outcome) for job, outcome in over.items())
    while part := tuple(islice(ends, PAGE)):
        session.say(*part)
        await session.stream.drained(PART_BYTES)


async def _details(driver: Driver, ids: Sequence[int]) -> dict[int, m.JobDetail]:
    """Those of the jobs (ascending) that are in the record, by one look and one read."""

    def live(engine: Engine, now: Now) -> dict[int, m.JobDetail]:
        jobs = (job for job_id in ids if (job := engine.state.jobs.get(job_id)) is not None)
        return {detail.row.id: detail for detail in queries.live_details(engine, jobs, now)}

    def record(store: Store) -> dict[int, tuple[FinishedJob | None, tuple[tuple[float, str, str], ...]]]:
        return {
            job_id: (store.finished_job(job_id), tuple((e.wall, e.who, e.what) for e in store.events(job=job_id)))
            for job_id in ids
        }

    details = await driver.look(live)
    for job_id, (row, events) in (await driver.read(record)).items():
        if row is not None:
            details[job_id] = queries.finished_detail(row, events)
        elif job_id in details:
            details[job_id] = msgspec.structs.replace(details[job_id], events=events)
    return dict(sorted(details.items()))


async def _explain(session: Session, question: m.ExplainJob) -> None:
    def live(engine: Engine, now: Now) -> m.Explanation | None:
        job: Job | None = engine.state.jobs.get(question.id)
        if job is None:
            return None
        verdict, workers, counters = queries.explain(engine, job, now)
        return m.Explanation(
            seq=question.seq, id=question.id, verdict=verdict, workers=tuple(workers), counters=tuple(counters)
        )

    explanation = await session.driver.look(live)
    if explanation is None:
        row = await session.driver.outputs.finished(question.id)
        state = queries.finished_row(row).state
        explanation = m.Explanation(
            seq=question.seq, id=question.id, verdict=f"it does not wait: it has {_ended(state)}"
        )
    session.say(explanation)


def _ended(state: m.JobFilter) -> str:
    return "been canceled" if state == "canceled" else state


# --- workers ---------------------------------------------------------------------------------------------------------


async def _list_workers(session: Session, question: m.ListWorkers) -> None:
    def rows(engine: Engine, now: Now) -> tuple[list[m.WorkerRow], list[tuple[int, int]]]:
        if not question.ids:
            return queries.worker_rows(engine, now), []
        nodes = sorted(engine.state.nodes)
        wanted = [node for node in nodes if any(first <= node <= last for first, last in question.ids)]
        missing: list[tuple[int, int]] = []
        for first, last in _disjoint(question.ids):
            missing += _gaps(first, last, [node for node in wanted if first <= node <= last])
        return queries.worker_rows(engine, now, wanted), missing

    found, missing = await session.driver.look(rows)
    if question.ids and not found and not missing:
        raise UserError("Worker not found!")
    session.say(m.WorkerList(seq=question.seq, workers=tuple(found), missing=tuple(missing)))
