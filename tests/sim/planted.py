"""Faults planted on purpose, one at a time: each breaks one rule of the design, and the oracle has to find it.

Each is a small patch of the real classes (undone afterwards) or a quirk of the simulated shells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

from kueue.core import chaining, reconcile, removal, silence
from kueue.core import facts as f
from kueue.core.engine import Engine
from kueue.core.placement import Round
from kueue.core.queue import Queue
from kueue.core.state import JobState, State
from kueue.core.workers import Worker
from kueue.model import Allocation, Share
from kueue.protocol import messages as m
from kueue.runner.policy import Policy
from kueue.server import outage, restore
from kueue.storage.memory import MemoryStore
from kueue.worker import orders as o
from kueue.worker.actions import Instruct
from kueue.worker.agent import Agent
from kueue.worker.guard import LeaseGuard
from tests.sim.lab import Lab, Result, run_seed
from tests.sim.weather import FAULTS
from tests.sim.workstation import Quirks

Patch = Callable[[Callable[[object, str, object], None]], None]
"""Called with a function that sets an attribute and remembers what it was."""


@dataclass
class Fault:
    """One planted fault."""

    name: str
    rule: str
    """What it breaks."""
    found_by: tuple[str, ...]
    """Checks of the oracle, any of which may be the first."""
    patch: Patch = lambda _: None
    quirks: dict[str, bool] = field(default_factory=dict)
    weather: dict[str, int] = field(default_factory=dict)
    """Kinds of weather in which it shows; they come more often."""
    keeps_invariants: bool = False
    """The engine's own check is left out, so that the oracle must find it alone."""


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    undo: list[tuple[object, str, object]] = []

    def put(owner: object, name: str, value: object) -> None:
        undo.append((owner, name, vars(owner)[name]))
        setattr(owner, name, value)

    fault.patch(put)
    try:
        yield
    finally:
        for owner, name, value in reversed(undo):
            setattr(owner, name, value)


def hunt(fault: Fault, seeds: Iterable[int]) -> Result | None:
    """The first seed in whose world the oracle finds the fault."""
    weights = {kind: weight + fault.weather.get(kind, 0) for kind, weight in FAULTS.items()}

    def prepare(lab: Lab) -> None:
        lab.service.checks_invariants = not fault.keeps_invariants

    with planted(fault):
        for seed in seeds:
            result = run_seed(seed, weights=weights, quirks=Quirks(**fault.quirks), prepare=prepare)
            if result.violation is not None:
                return result
    return None


# --- patches ---------------------------------------------------------------------------------------------------------


def _leases_blindly(put) -> None:
    put(outage, "may_go_on_unrecorded", lambda _queue, _hello: True)


def _lease_from_receipt(put) -> None:
    real = Agent._heartbeat_answered

    def answered(self: Agent, answer: m.HeartbeatAnswer, boottime: float):
        if answer.number in self._heartbeats:
            self._heartbeats[answer.number] = boottime
        return real(self, answer, boottime)

    put(Agent, "_heartbeat_answered", answered)


def _answers_on_closed_sessions(put) -> None:
    real = Engine.handle

    def handle(self: Engine, session, message, now, past=None):
        if isinstance(message, m.Heartbeat) and session not in self.queue.by_session:
            self.queue.say(session, m.HeartbeatAnswer(number=message.number, lease_seconds=self.settings.lease_seconds))
            return self._end_turn(now)
        return real(self, session, message, now, past or {})

    put(Engine, "handle", handle)


def _forgets_withdrawn_offers(put) -> None:
    real = silence._overdue

    def overdue(queue: Queue, now) -> None:
        before = [attempt.offer for attempt in queue.state.attempts.values() if attempt.overdue]
        real(queue, now)
        for attempt in list(queue.state.attempts.values()):
            if attempt.overdue and attempt.offer not in before:
                job = queue.state.jobs[attempt.job]
                reconcile._returned(queue, job, attempt, "withdrawn", "taken for withdrawn", now)

    put(silence, "_overdue", overdue)


def _releases_before_proof(put) -> None:
    real = removal._remove_one

    def remove_one(queue: Queue, job, message, now):
        if message.kill and job.state is JobState.RUNNING:
            attempt, wish = job.attempt, removal.StopWish("operator", kill=True, wall=now.wall, request_ids=("x",))
            queue.tell_worker(attempt.node, m.StopAttempt(offer=attempt.offer))
            queue.finish(job, removal.Canceled(), now, stop=wish, decided=False)
            return removal._canceled(job.id)
        return real(queue, job, message, now)

    put(removal, "_remove_one", remove_one)


def _replay_without(kind: type[f.Fact]) -> Patch:
    def patch(put) -> None:
        real = MemoryStore.replay

        def replay(self: MemoryStore):
            facts = list(real(self))
            skipped = next((fact for fact in reversed(facts) if type(fact) is kind), None)
            later = {type(fact) for fact in facts if getattr(fact, "job", None) == getattr(skipped, "job", -1)}
            if skipped is not None and kind is f.JobOffered and f.JobStarted in later:
                job = skipped.job
                return iter([fact for fact in facts if getattr(fact, "job", None) != job])
            return iter([fact for fact in facts if fact is not skipped])

        put(MemoryStore, "replay", replay)

    return patch


def _offers_not_counted(put) -> None:
    real = Queue.counter_totals

    def counter_totals(self: Queue) -> dict[str, int]:
        totals = real(self)
        for attempt in self.state.attempts.values():
            if attempt.started_wall is None:
                for name, amount in attempt.allocation.counters:
                    totals[name] = totals.get(name, 0) + amount
        return totals

    put(Queue, "counter_totals", counter_totals)


def _continues_stale_attempts(put) -> None:
    put(reconcile, "_kill_stale", lambda queue, worker, offer: None)


def _silent_at_once(put) -> None:
    real = silence.timeout
    put(silence, "timeout", lambda queue, steady: real(queue, steady) * 0.75)


def _opened_before_load(put) -> None:
    real = Engine.opened

    def opened(self: Engine, now) -> None:
        real(self, now)
        self.queue.opened = now.steady - self.settings.worker_timeout_seconds

    put(Engine, "opened", opened)


def _stall_unnoticed(put) -> None:
    put(Engine, "stalled", lambda self, now: None)
    put(silence, "SECOND_LOOK_SECONDS", 0.0)


def _lowered_at_once(put) -> None:
    put(silence, "timeout", lambda queue, steady: queue.settings.worker_timeout_seconds)


def _no_pause(put) -> None:
    def lapse(self: Policy, attempt, now):
        del self, attempt, now
        return []

    put(Policy, "_lapse", lapse)
    put(LeaseGuard, "look", lambda self, boottime, attempts: [])


def _no_second_guard(put) -> None:
    put(LeaseGuard, "look", lambda self, boottime, attempts: [])


def _starts_without_lease(put) -> None:
    real = Policy._begin

    def begin(self: Policy, attempt, now):
        return [msgspec_free(action) for action in real(self, attempt, now)]

    def msgspec_free(action):
        return type(action)(action.offer, float("inf"))

    put(Policy, "_begin", begin)


def _forgets_ends(put) -> None:
    """The runner is told to forget an end as soon as it was said, not when it was acknowledged."""
    real = Agent._happened

    def happened(self: Agent, attempt, event, boottime):
        actions = real(self, attempt, event, boottime)
        if isinstance(event, o.Ended):
            del self.attempts[event.offer]
            actions = [*actions, Instruct(o.ForgetAttempts(offers=(event.offer,)))]
        return actions

    put(Agent, "_happened", happened)


def _missing_is_gone(put) -> None:
    """What a hello calls unknown is given away at once."""
    real = reconcile._compare

    def compare(queue: Queue, worker: Worker, job, attempt, report, now) -> None:
        if report.state == "unknown":
            reconcile.lose(queue, job, attempt, "it is unknown there", now)
        else:
            real(queue, worker, job, attempt, report, now)

    put(reconcile, "_compare", compare)


def _request_ids_forgotten(put) -> None:
    put(Queue, "answer", lambda self, session, request_id, message, now: self.say(session, message))


def _restores_what_waited(put) -> None:
    put(restore, "JobState", SimpleNamespace(PENDING=None))


def _restores_old_numbers(put) -> None:
    def raised(sums: f.Aggregates, given: f.Aggregates | None, wall: float) -> f.NumbersRaised:
        del given
        return f.NumbersRaised(next_job=sums.next_job, next_offer=sums.next_offer, wall=wall)

    put(restore, "_raised", raised)


def _leaves_missing_attempts_stopping(put) -> None:
    def not_started(queue: Queue, worker: Worker, offer: int, now):
        del now
        found = reconcile._live(queue, worker, offer)
        return None if found is None or found[1].started_wall is not None else found

    put(reconcile, "_not_started", not_started)


def _no_room_in_its_own_place(put) -> None:
    put(Round, "_in_its_own_place", lambda self, job: None)


def _starts_out_of_turn(put) -> None:
    put(Policy, "_is_its_turn", lambda self, attempt: True)


def _frees_a_line_with_its_first_end(put) -> None:
    real = State._release

    def release(self: State, attempt) -> None:
        others = self.lines.pop(attempt.line)
        self.lines[attempt.line] = {attempt.offer: attempt}
        real(self, attempt)
        del others[attempt.offer]
        # The rest holds nothing any more.
        nothing = Allocation(shares=(Share(node=attempt.node, slots=0, cores=0, ram_mb=0),))
        for other in others.values():
            self.lines.setdefault(other.offer, {})[other.offer] = other
            other.line = other.offer
            other.allocation = nothing

    put(State, "_release", release)


def _keeps_a_line_for_ever(put) -> None:
    real = State._release

    def release(self: State, attempt) -> None:
        was_chained = attempt.is_chained and len(self.lines[attempt.line]) == 1
        real(self, attempt)
        if was_chained:
            for name, amount in attempt.allocation.counters:
                self.used[name] += amount

    put(State, "_release", release)


def _takes_late_ones_for_returned(put) -> None:
    real = chaining._take_back

    def take_back(queue: Queue, offer: int, now):
        attempt = real(queue, offer, now)
        if attempt is not None:
            job = queue.state.jobs[attempt.job]
            reconcile._returned(queue, job, attempt, "withdrawn", "taken for withdrawn", now)
        return attempt

    put(chaining, "_take_back", take_back)


DISRUPTION = {"cut": 20, "worker killed": 5, "half open": 10}
RESTORED = {"restored backup": 100}

FAULTS_PLANTED = (
    Fault(
        "send before store",
        "nothing is said before it is stored",
        ("lost", "unstored", "told", "canceled", "done twice"),
        quirks={"sends_before_storing": True},
        weather={"server killed": 40, "disk full": 20},
    ),
    Fault(
        "lease from receipt",
        "the lease counts from the moment noted before the heartbeat was written",
        ("revoked", "overlap"),
        _lease_from_receipt,
        weather={"slow, then cut": 60},
    ),
    Fault(
        "heartbeat answered on a closed session",
        "a closed session answers nothing",
        ("revoked", "overlap", "outcome", "liveness"),
        _answers_on_closed_sessions,
        {"hears_closed_sessions": True},
        {"cut": 40, "sleep": 20, "worker stopped": 20},
    ),
    Fault(
        "withdrawn offer forgotten",
        "an unanswered offer is a possibly running attempt",
        ("revoked", "overlap"),
        _forgets_withdrawn_offers,
        weather={"cut": 30, "slow": 20},
    ),
    Fault(
        "release before proof",
        "stopping keeps its resources until the exit is proven",
        ("counter", "room", "revoked", "outcome"),
        _releases_before_proof,
        weather={"cancel": 40},
        keeps_invariants=True,
    ),
    Fault(
        "replay that skips an offer",
        "replay is the same evolve as live",
        ("engine", "replay", "revoked", "overlap", "unstored", "outcome"),
        _replay_without(f.JobOffered),
        weather={"server killed": 40},
        keeps_invariants=True,
    ),
    Fault(
        "replay that skips a stop",
        "a stop is stored before anything is sent",
        ("engine", "replay", "canceled", "liveness", "outcome"),
        _replay_without(f.StopAsked),
        weather={"server killed": 40, "cancel": 40, "cut": 20},
    ),
    Fault(
        "offers not counted",
        "allocations of offers count like those of running attempts",
        ("counter", "room"),
        _offers_not_counted,
        keeps_invariants=True,
    ),
    Fault(
        "stale attempt continued",
        "one that returns after its job was given away is told to kill",
        ("revoked", "overlap"),
        _continues_stale_attempts,
        weather=DISRUPTION,
    ),
    Fault(
        "time-out too short",
        "a worker is declared silent after T, not before",
        ("revoked", "overlap"),
        _silent_at_once,
        weather={"cut": 40},
    ),
    Fault(
        "silence counted from before the start",
        "silence counts from the moment the listeners stood open",
        ("revoked", "overlap"),
        _opened_before_load,
        weather={"server killed": 40, "cut": 20},
    ),
    Fault(
        "lowered time-out at once",
        "a lowered T counts only when the old T has passed",
        ("revoked", "overlap"),
        _lowered_at_once,
        weather={"reload": 40, "cut": 30},
    ),
    Fault(
        "no pause when the lease ends",
        "at the deadline the runner pauses what may be given away",
        ("revoked", "overlap", "liveness"),
        _no_pause,
        weather={"cut": 20},
    ),
    Fault(
        "no second guard",
        "the worker stops the trees itself if the runner does not",
        ("revoked", "overlap"),
        _no_second_guard,
        weather={"runner stopped": 60, "cut": 60, "spawner killed": 60},
    ),
    Fault(
        "no third guard",
        "the spawner stops the trees when its keeper does not and the worker is gone",
        ("revoked", "overlap"),
        quirks={"no_stand_in": True},
    ),
    Fault(
        "ends forgotten before they are acknowledged",
        "every report is repeated until acknowledged",
        ("overlap", "liveness", "outcome", "lost", "revoked"),
        _forgets_ends,
        weather={"server killed": 30, "half open": 20, "cut": 20},
    ),
    Fault(
        "unknown taken for gone",
        "three things prove an attempt gone, the word unknown does not",
        ("revoked", "overlap"),
        _missing_is_gone,
        weather={"runner stopped": 60, "worker killed": 30, "half open": 30},
    ),
    Fault(
        "request ids forgotten",
        "a repeated request gets the first answer",
        ("liveness", "lost", "canceled", "told"),
        _request_ids_forgotten,
        weather={"server killed": 60, "slow disk": 60},
    ),
    Fault(
        "lease resent to a runner that was silent",
        "a runner that was silent at hello gets no lease in that session",
        ("revoked", "overlap"),
        quirks={"leases_at_attachment": True},
        weather={"runner stopped, session lost": 200},
    ),
    Fault(
        "lease granted blindly while the disk is full",
        "what was given away is told to stop before any lease",
        ("revoked", "overlap"),
        patch=_leases_blindly,
        weather={"disk full": 60, "sleep": 30, "cut": 30},
    ),
    Fault(
        "restored jobs not held",
        "what waited at the backup may run already: nothing runs twice by itself",
        ("overlap", "counter", "room"),
        _restores_what_waited,
        weather=RESTORED,
    ),
    Fault(
        "numbers not raised by a restore",
        "ids and offer numbers go on above all that were ever given",
        ("lost", "unstored", "overlap", "revoked"),
        _restores_old_numbers,
        weather=RESTORED,
    ),
    Fault(
        "missing attempt taken as answered",
        "of a started attempt the word that there is none proves nothing: the time-out decides",
        ("liveness",),
        _leaves_missing_attempts_stopping,
        weather={**RESTORED, "cancel": 60},
    ),
    Fault(
        "no room in its own place",
        "the room of an attempt that is given up is free for its own job",
        ("liveness",),
        _no_room_in_its_own_place,
        weather=RESTORED,
    ),
    Fault(
        "a dead spawner's orders carried out",
        "what a dead spawner was asked is made by the next one alone",
        ("unstored", "overlap", "revoked", "raised", "outcome"),
        quirks={"dead_spawners_start": True},
        weather={"spawner killed": 200, "slow spawner": 60},
    ),
    Fault(
        "a line's next one started before its turn",
        "one of a line runs at a time",
        ("line", "room", "counter"),
        _starts_out_of_turn,
    ),
    Fault(
        "a line's room freed with its first end",
        "an allocation counts while one of its line lives",
        ("room", "counter"),
        _frees_a_line_with_its_first_end,
        keeps_invariants=True,
    ),
    Fault(
        "a line's counters never freed",
        "an allocation is free when the last of its line has gone",
        ("liveness",),
        _keeps_a_line_for_ever,
        keeps_invariants=True,
    ),
    Fault(
        "a late one taken for given back",
        "an offer ahead may have started until its worker says that it has not",
        ("revoked", "overlap", "outcome"),
        _takes_late_ones_for_returned,
        weather={"slow": 40},
    ),
    Fault(
        "orders of a dead worker obeyed",
        "what a hello does not name was never handed to a runner and never will be",
        ("unstored", "revoked", "overlap", "canceled"),
        quirks={"obeys_the_dead": True},
        weather={"runner stopped": 60, "worker killed": 60},
    ),
)
