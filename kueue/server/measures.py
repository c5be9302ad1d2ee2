"""What has happened since this server was started, counted when it is stored: the figures that no state has.

Rules
- Told of every batch after its commit (`stored`), so nothing is counted that a crash or a full disk undoes.
- An attempt is counted once, however often its worker reports the start.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from kueue.core import facts as f
from kueue.core.engine import Engine
from kueue.protocol.messages import WorkerWelcome
from kueue.server.batch import Pending
from kueue.tally import JOB_SECONDS, SHORT_SECONDS, Histogram

SWEEP = 1_000
"""Most offers that are remembered beyond twice the live ones; jobs that were ended by force leave some behind."""

_Start: TypeAlias = tuple[int, int, float]
"""Job, offer, UTC seconds."""


class Measures:
    """Plain numbers; `kueue.server.metrics` shows them."""

    def __init__(self) -> None:
        self.sums = f.Aggregates()
        """As they are stored."""
        self.attempts_started = 0
        self.worker_connects = 0
        self.wait = Histogram(JOB_SECONDS)
        """Submission to the start of the first attempt."""
        self.run = Histogram(JOB_SECONDS)
        self.commit = Histogram(SHORT_SECONDS)
        self.lag = Histogram(SHORT_SECONDS)
        self._started: set[int] = set()
        """Live offers whose start is counted."""

    def began(self, engine: Engine) -> None:
        """The state is loaded; what runs by now was counted by an earlier server."""
        self.sums = engine.aggregates()
        self._started = {offer for offer, attempt in engine.state.attempts.items() if attempt.started_wall is not None}

    def stored(self, batch: Pending, engine: Engine) -> None:
        """A batch is on the disk. `engine`: as it stands after it; what else it may have met since moves no sum."""
        self.worker_connects += sum(isinstance(message, WorkerWelcome) for _, message in batch.sends)
        if not batch.facts:
            return
        self.sums = engine.aggregates()
        for row in batch.finished:
            if row.end is not None and row.started_wall is not None:
                self.run.observe(row.run_seconds)
        starts = self._starts(batch.facts)
        if starts:
            self._count_starts(starts, {row.id: row for row in batch.finished}, engine)
        if len(self._started) > SWEEP + 2 * len(engine.state.attempts):
            self._started.intersection_update(engine.state.attempts)

    def _starts(self, facts: Iterable[f.AnyFact]) -> list[_Start]:
        """The attempts of which these facts are the first to say that they run or ran."""
        starts: list[_Start] = []
        for fact in facts:
            if isinstance(fact, f.JobStarted | f.AttemptReturned):
                if fact.started_wall is not None and fact.offer not in self._started:
                    self._started.add(fact.offer)
                    starts.append((fact.job, fact.offer, fact.started_wall))
            elif isinstance(fact, f.JobDone):
                if fact.offer is None:
                    continue
                if fact.offer in self._started:
                    self._started.discard(fact.offer)
                elif fact.end is not None and fact.end.started_wall is not None:
                    starts.append((fact.job, fact.offer, fact.end.started_wall))
            elif isinstance(fact, f.AttemptLost | f.OfferReturned):
                self._started.discard(fact.offer)
        return starts

    def _count_starts(self, starts: Iterable[_Start], rows: dict[int, f.FinishedJob], engine: Engine) -> None:
        for number, offer, started_wall in starts:
            self.attempts_started += 1
            job = engine.state.jobs.get(number)
            if job is not None:
                earlier = any(past.started_wall is not None for past in job.past if past.offer != offer)
                issued_wall = job.template.issued_wall
            elif number in rows:
                row = rows[number]
                earlier = any(past.started_wall is not None for past in row.attempts if past.offer != offer)
                issued_wall = row.issued_wall
            else:
                continue
            if not earlier:
                self.wait.observe(started_wall - issued_wall)
