"""The decisions of the server as one plain function of (who says what, when): facts to store, messages to send.

Rules
- No clock, no I/O, no logger, no `await`: the caller gives `now` and carries out the `Turn`.
- The caller stores the facts of a turn before it sends any of its messages. If that fails, it throws this engine away
  and replays the store into a new one.
- `settle` is called once after the messages of a batch; only it places jobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kueue.core import chaining, holding, reconcile, removal, silence, submission
from kueue.core import facts as f
from kueue.core.jobs import Job, payload_of
from kueue.core.placement import Pick, Room, Round
from kueue.core.queue import OPERATOR, Queue, Turn, expand, fold, job_ended
from kueue.core.settings import Settings
from kueue.core.state import Answer, State, Sums
from kueue.core.waiting import smallest
from kueue.core.workers import Worker
from kueue.model import Allocation, JobRange, JobState, Now, kind_of
from kueue.protocol import messages as m

OFFERS_PER_SETTLING = 2_000
"""Bound on one settling, so that heartbeats are not kept waiting; the rest follows at once in the next turn."""
REQUESTS_KEPT_SECONDS = 3600.0

_decode_answer: msgspec.json.Decoder[m.ToClient] = msgspec.json.Decoder(m.ToClient)

Past = Mapping[int, f.FinishedJob]
_NO_PAST: Past = {}


@dataclass
class _Parts:
    """A submission that has not come whole yet."""

    ranges: list[JobRange]
    jobs: int = 0
    number: int = 0
    """Of the part that comes next."""


class Engine:
    """See the module. One engine per loaded store."""

    def __init__(self, settings: Settings, *, queue_id: str, version: str = "") -> None:
        self.queue = Queue(settings, queue_id, version)
        self._parts: dict[tuple[int, str], _Parts] = {}

    @property
    def state(self) -> State:
        return self.queue.state

    @property
    def settings(self) -> Settings:
        return self.queue.settings

    # --- life of the engine ------------------------------------------------------------------------------------------

    def replay(self, aggregates: f.Aggregates, facts: Iterable[f.AnyFact]) -> None:
        """Bring back what the store holds. Call `opened` when the listeners stand open."""
        state = self.state
        for fact in facts:
            state.evolve(fact)
        state.finished.clear()
        state.sums = Sums(**msgspec.structs.asdict(aggregates))
        for node_id in state.nodes:
            self.queue.worker(node_id)

    def opened(self, now: Now) -> None:
        """The listeners stand open after the load: silence counts from here."""
        self.queue.opened = now.steady
        self.queue.answered_at = dict.fromkeys(self.state.answers, now.steady)
        silence.lower_timeout(self.queue, self.state.sums.timeout_seconds, now)
        self.queue.unsettled = True

    def stalled(self, now: Now) -> None:
        """The server stood still (or slept) and heard nobody, or could be taken for gone: silence counts anew."""
        self.queue.opened = now.steady
        for worker in self.queue.workers.values():
            worker.suspected = None

    def reload(self, settings: Settings, now: Now) -> Turn:
        """New limits and times. A lowered time-out counts for giving away only after the old one has passed."""
        old = self.settings.worker_timeout_seconds
        self.queue.settings = settings
        silence.lower_timeout(self.queue, old, now)
        self.queue.unsettled = True
        return self._end_turn(now)

    def aggregates(self) -> f.Aggregates:
        return self.state.sums.frozen()

    # --- messages ----------------------------------------------------------------------------------------------------

    def handle(self, session: int, message: m.Message, now: Now, past: Past = _NO_PAST) -> Turn:
        """One message of one session. `past`: finished rows of the ids it names that are not live."""
        if isinstance(message, m.WorkerHello):
            reconcile.hello(self.queue, session, message, now)
        elif isinstance(message, FROM_WORKER):
            node = self.queue.by_session.get(session)
            # A session that is no longer the worker's current one answers nothing: no lease may grow from it.
            if node is not None:
                self._from_worker(self.queue.workers[node], message, now)
        else:
            self._from_client(session, message, now, past)
        return self._end_turn(now)

    def session_closed(self, session: int, now: Now) -> Turn:
        """The connection of a client or worker is gone."""
        node = self.queue.by_session.pop(session, None)
        if node is not None:
            self.queue.workers[node].hung_up()
            # Where others were set aside it may have been the last one that takes jobs.
            self.queue.unsettled = True
        self.queue.stop_watching(session)
        # Nobody waits for the answer; whoever asks again sends it all again.
        self.queue.arrivals[:] = [one for one in self.queue.arrivals if one.session != session]
        for key in [key for key in self._parts if key[0] == session]:
            del self._parts[key]
        return self._end_turn(now)

    def answer(self, session: int, request_id: str, message: m.Message, now: Now) -> Turn:
        """Answer a state-changing request that the caller carried out in portions."""
        self.queue.answer(session, request_id, message, now)
        return self._end_turn(now)

    def clean(self, rows: Sequence[f.FinishedJob], by: str, now: Now) -> Turn:
        """Drop these finished jobs from the record and tell the workers that their kept output may go."""
        if rows:
            entries = tuple((row.id, kind_of(row.outcome), row.run_seconds) for row in rows)
            self.queue.decide(f.JobsCleaned(jobs=entries, by=by, wall=now.wall))
            by_node: dict[int, list[int]] = {}
            for row in rows:
                for attempt in row.attempts:
                    by_node.setdefault(attempt.node, []).append(attempt.offer)
            for node, offers in by_node.items():
                self.queue.tell_worker(node, m.ForgetOutput(offers=tuple(offers)))
        return self._end_turn(now)

    def tick(self, now: Now) -> Turn:
        """Do what is due: silence, overdue offers, pauses that end. The caller has read all mail before."""
        silence.look(self.queue, now)
        chaining.look(self.queue, now)
        submission.go_on(self.queue, now)
        removal.go_on(self.queue, now)
        holding.go_on(self.queue, now)
        for worker in self.queue.workers.values():
            self.queue.unsettled |= worker.retry(now.steady)
            if worker.set_aside_until is not None and now.steady >= worker.set_aside_until:
                worker.set_aside_until = None
                self.queue.unsettled = True
        self._drop_old_answers(now)
        return self._end_turn(now)

    def next_deadline(self, now: Now) -> float | None:
        """Steady time at which `tick` has something to do; None: nothing is due."""
        queue = self.queue
        if queue.unsettled or queue.arrivals or queue.holdings or any(one.todo for one in queue.removals):
            return now.steady
        return silence.next_deadline(queue, now)

    def settle(self, now: Now) -> Turn:
        """Offer waiting jobs until nothing more fits."""
        queue = self.queue
        if not queue.unsettled:
            return self._end_turn(now)
        self._forgive(now)
        placing = Round(queue.state, self._rooms(now), queue.counter_totals())
        queue.unsettled = False
        for _ in range(OFFERS_PER_SETTLING):
            pick = placing.next()
            if pick is None:
                self._chain(now)
                return self._end_turn(now)
            if self._offer(pick, now):
                placing.took(pick)
            else:
                placing.skipped()
        queue.unsettled = True
        return self._end_turn(now)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _end_turn(self, now: Now) -> Turn:
        removal.review(self.queue, now)
        turn, self.queue.turn = self.queue.turn, Turn()
        return turn

    def _chain(self, now: Now) -> None:
        """Nothing more fits: offer ahead what may wait behind short jobs."""
        queue = self.queue
        if not queue.open_lines or not queue.state.waiting.groups:
            return
        links = chaining.Links(queue, now)
        for _ in range(OFFERS_PER_SETTLING):
            link = links.next()
            if link is None:
                return
            job = queue.state.jobs[link.job]
            offer = self._send_offer(job, link.node, link.allocation, now, line=link.line)
            queue.chained[offer] = now.steady
        queue.unsettled = True

    def _offer(self, pick: Pick, now: Now) -> bool:
        """Returns whether the offer was made; a job that has used up its attempts ends instead."""
        queue = self.queue
        job = queue.state.jobs[pick.job]
        if job.state is JobState.UNREACHABLE:
            attempt = job.attempt
            assert attempt is not None
            name = queue.name_of(attempt.node)
            why = "was silent" if queue.worker(attempt.node).session is None else "could not tell of it"
            for one in list(queue.state.lines[attempt.line].values()) if pick.frees_line else [attempt]:
                reconcile.lose(queue, queue.state.jobs[one.job], one, f"{name} {why} and the job was given away", now)
            if pick.job not in queue.state.jobs:
                return False
        self._send_offer(job, pick.node, pick.allocation, now)
        return True

    def _send_offer(self, job: Job, node: int, allocation: Allocation, now: Now, line: int | None = None) -> int:
        """Returns its number."""
        queue = self.queue
        offer = queue.state.sums.next_offer
        queue.decide(f.JobOffered(job=job.id, offer=offer, node=node, allocation=allocation, wall=now.wall, line=line))
        queue.offered_at[offer] = now.steady
        queue.workers[node].offered(job.template.directory, offer)
        template = job.template
        queue.tell_worker(
            node,
            m.Offer(
                offer=offer,
                job=job.id,
                attempt=job.numbered + 1,
                payload=payload_of(job.payload),
                place=template.place,
                request=template.request,
                terms=template.terms,
                allocation=allocation,
                line=line,
            ),
        )
        return offer

    def _rooms(self, now: Now) -> list[Room]:
        """The rooms in which the least that is waited for may fit; full workers cost next to nothing."""
        queue = self.queue
        state = queue.state
        wanted = [smallest(group.probe) for group in state.waiting.groups.values()]
        wanted += [smallest(state.jobs[job].template.request) for job in state.revocable]
        if not wanted:
            return []
        least_slots = min(slots for slots, _ in wanted)
        least_cores = min(cores for _, cores in wanted)
        # What is given up may run again where nothing is known of it, however full that worker is.
        given_up = (state.jobs[job].attempt for job in state.revocable)
        own = {one.node for one in given_up if one is not None and one.offer in queue.worker(one.node).traceless}
        rooms: list[Room] = []
        for worker in queue.workers.values():
            node = state.nodes[worker.id]
            totals = node.record.totals
            if (
                worker.session is not None
                and (worker.id in own or totals.slots - node.slots >= least_slots)
                and (worker.id in own or totals.cores - node.cores >= least_cores)
            ):
                rooms.append(worker.room(node, now.steady))
        return rooms

    def _forgive(self, now: Now) -> None:
        """Where nobody else takes jobs, those that were set aside do again."""
        queue = self.queue
        aside = [w for w in queue.workers.values() if w.session is not None and w.is_set_aside(now.steady)]
        if not aside or any(not w.closed(queue.node(w.id), now.steady) for w in queue.workers.values()):
            return
        for worker in aside:
            worker.set_aside_until = None
            queue.remark(f"worker={queue.name_of(worker.id)} takes jobs again: no other worker does")

    def _drop_old_answers(self, now: Now) -> None:
        # By the steady clock, in which they stand in order: a wall clock that is set must not forget what was asked.
        answered_at = self.queue.answered_at
        while answered_at:
            request_id, since = next(iter(answered_at.items()))
            if now.steady - since <= REQUESTS_KEPT_SECONDS:
                return
            del answered_at[request_id]
            self.state.answers.pop(request_id, None)

    def _from_worker(self, worker: Worker, message: m.FromWorker, now: Now) -> None:
        queue = self.queue
        assert worker.session is not None
        silence.heard(worker, now)
        match message:
            case m.Heartbeat():
                answer = m.HeartbeatAnswer(number=message.number, lease_seconds=queue.settings.lease_seconds)
                queue.say(worker.session, answer)
            case m.Report():
                self._report(worker, message, now)
            case m.AttemptStarted():
                reconcile.started(queue, worker, message.offer, message.started_wall, now)
            case m.AttemptQueued():
                reconcile.queued(queue, worker, message.offer)
            case m.OfferDeferred():
                reconcile.deferred(queue, worker, message, now)
            case m.OfferRejected():
                reconcile.rejected(queue, worker, message, now)
            case m.OfferWithdrawn():
                reconcile.withdrawn(queue, worker, message.offer, now)
            case m.AttemptChanged():
                reconcile.changed(queue, worker, message)
            case m.AttemptEnded():
                reconcile.ended(queue, worker, message.offer, message.end, now)
            case m.AttemptGone():
                reconcile.gone(queue, worker, message.offer, message.reason, now)
            case m.Goodbye():
                worker.stopping = True
                queue.say(worker.session, m.Goodbye())
            case m.WorkerHello() | m.FetchedOutput():
                pass

    def _report(self, worker: Worker, message: m.Report, now: Now) -> None:
        worker.load = message.load
        worker.note = message.note
        worker.updated_wall = now.wall
        worker.deferred.clear()
        worker.unchained.clear()
        self.queue.unsettled = True
        record = self.queue.node(worker.id).record
        if message.totals is not None and message.totals != record.totals:
            self.queue.decide(f.NodeChanged(node=msgspec.structs.replace(record, totals=message.totals), wall=now.wall))

    def _from_client(self, session: int, message: m.Message, now: Now, past: Past) -> None:
        queue = self.queue
        request_id = getattr(message, "request_id", None)
        if isinstance(request_id, str):
            stored = self.state.answers.get(request_id)
            if stored is not None:
                if not isinstance(message, m.Submit) or message.last:
                    queue.say(session, repeated(stored, message))
                return
        match message:
            case m.Submit():
                self._submit(session, message, now)
            case m.RemoveJobs():
                removal.remove(queue, session, message, past, now)
            case m.HoldJobs() | m.ReleaseJobs():
                holding.ask(queue, session, message, past, now)
            case m.SetNode():
                self._set_node(session, message, now)
            case m.WatchJobs():
                self._watch(session, message, past)
            case _:
                raise TypeError(f"{type(message).__name__} is no message for the engine")

    def _submit(self, session: int, message: m.Submit, now: Now) -> None:
        # By session: what a broken connection still brings must not mix with the repetition on the next one.
        key = session, message.request_id
        if message.part == 0:
            self._parts[key] = _Parts([])
        parts = self._parts.get(key)
        if parts is None or parts.number != message.part:
            self._parts.pop(key, None)
            if message.last:
                error = "a part of the submission is missing: send it whole"
                self.queue.say(session, m.Failed(seq=message.seq, error=error))
            return
        parts.number += 1
        parts.jobs += submission.jobs_of(message.ranges)
        if parts.jobs > submission.MAX_JOBS_AT_ONCE:
            # It will be refused; what is still to come of it must not fill the memory.
            parts.ranges.clear()
        else:
            parts.ranges.extend(submission.portions(message.ranges))
        if message.last:
            del self._parts[key]
            submission.submit(self.queue, session, message, parts.ranges, parts.jobs, now)

    def _set_node(self, session: int, message: m.SetNode, now: Now) -> None:
        queue = self.queue
        matches = [
            node.record
            for node in self.state.nodes.values()
            if node.record.name == message.name or (message.name.isdecimal() and node.record.id == int(message.name))
        ]
        if len(matches) != 1:
            if matches:
                ids = ", ".join(str(record.id) for record in matches)
                error, hint = f"{len(matches)} workers are named {message.name}", f"name one by its id: {ids}"
            else:
                error, hint = f"Worker {message.name} not found!", "`kueue list-workers` shows them."
            queue.say(session, m.Failed(seq=message.seq, error=error, hint=hint))
            return
        record = matches[0]
        if message.state == "dead" and not message.force and silence.is_heard(queue.worker(record.id), now):
            error = f"Worker {record.name} was heard just now: it is not dead."
            hint = (
                f"To take it out while its jobs go on: kueue node offline {record.name}. "
                "To have them stopped and run elsewhere all the same: --force."
            )
            queue.say(session, m.Failed(seq=message.seq, error=error, hint=hint))
            return
        text = f"Worker {record.name} is {message.state}."
        if message.state == "dead":
            count = len(queue.node(record.id).attempts)
            silence.dead(queue, queue.worker(record.id), now)
            text = f"Worker {record.name} is taken for dead; {count} of its jobs go elsewhere or end."
        else:
            offline = message.state == "offline"
            if record.offline != offline:
                changed = msgspec.structs.replace(record, offline=offline)
                queue.decide(f.NodeChanged(node=changed, wall=now.wall, by=OPERATOR))
            if offline:
                chaining.take_back_all(queue, record.id, now)
        result = m.Result(id=record.id, ok=True, text=text)
        queue.answer(session, message.request_id, m.Results(seq=message.seq, results=(result,)), now)

    def _watch(self, session: int, message: m.WatchJobs, past: Past) -> None:
        queue = self.queue
        ids, never = expand(message.ids, self.state.sums.next_job)
        missing = fold(job for job in ids if job not in self.state.jobs and job not in past)
        queue.say(session, m.Watching(seq=message.seq, missing=(*missing, *never)))
        for job_id in ids:
            if job_id in self.state.jobs:
                queue.watch(session, message.seq, job_id)
            elif job_id in past:
                queue.say(session, job_ended(message.seq, job_id, past[job_id].outcome))


def repeated(stored: Answer, message: m.Message) -> m.ToClient:
    """What was answered to this request before, under the number of the repetition."""
    seq: int = getattr(message, "seq", 0)
    answer = _decode_answer.decode(stored.message)
    if not isinstance(answer, _ANSWERS.get(type(message), m.Results)):
        return m.Failed(seq=seq, error="The request id was used for another question before.")
    return msgspec.structs.replace(answer, seq=seq)


_ANSWERS: dict[type, type] = {m.Submit: m.Submitted, m.CleanJobs: m.Done}

FROM_WORKER = (
    m.WorkerHello,
    m.Heartbeat,
    m.Report,
    m.AttemptStarted,
    m.AttemptQueued,
    m.OfferDeferred,
    m.OfferRejected,
    m.OfferWithdrawn,
    m.AttemptChanged,
    m.AttemptEnded,
    m.AttemptGone,
    m.FetchedOutput,
    m.Goodbye,
)
