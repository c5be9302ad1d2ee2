"""Decides everything a worker decides: which offers it takes, what it says, when its lease is renewed.

Rules
- Pure: moments (`boottime`: ``CLOCK_BOOTTIME`` in seconds), messages, events and measurements come in by parameter;
  what shall happen goes out as a list of actions, to be performed in their order.
- What was offered but not handed to a runner belongs to the session and is forgotten with it; what was handed to a
  runner is told in every hello until the server has acknowledged its end.
- The lease is set by one thing only: the answer to a heartbeat, on the session that carried it, counted from the moment
  noted *before* that heartbeat was written.
- A number that the agent has seen is never started twice.

The life of a session::

    runners_stand, hello ──▶ (send it) ──▶ hears(WorkerWelcome)
      ──▶ hears(…), place_checked, measured, runner_event, tick, in any order ──▶ session_closed
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from kueue.model import MachineInfo, MachineLoad, MachineTotals, shown
from kueue.protocol.messages import (
    Acknowledge,
    AttemptChanged,
    AttemptEnded,
    AttemptGone,
    AttemptQueued,
    AttemptStarted,
    FetchedOutput,
    FetchOutput,
    ForgetOutput,
    FromWorker,
    Goodbye,
    HeartbeatAnswer,
    Offer,
    OfferDeferred,
    OfferRejected,
    OfferWithdrawn,
    Sorry,
    StopAttempt,
    ToWorker,
    WithdrawOffer,
    WorkerHello,
    WorkerWelcome,
)
from kueue.worker.actions import Action, CheckPlace, Close, DropOutput, Fetch, Instruct, Say
from kueue.worker.guard import LeaseGuard
from kueue.worker.heartbeats import Heartbeats
from kueue.worker.known import NO_SHARE, Attempt, Memo, how_it_stands, learn, report, why_not_behind, why_not_now
from kueue.worker.orders import (
    Attached,
    AttemptState,
    Changed,
    Ended,
    ForgetAttempts,
    Gone,
    News,
    PauseDone,
    Pong,
    ProvenStill,
    Queued,
    Refused,
    RunnerAnswers,
    RunnerMute,
    SetLease,
    Started,
    StopOrder,
    Unknown,
    Withdrawn,
    WithdrawOrder,
)
from kueue.worker.reports import Reports
from kueue.worker.start_order import StartOrders

WELCOME_SECONDS = 30.0
"""A server that loads a large state may be slow to welcome; longer than this nobody is there."""
PLACE_SECONDS = 5.0
"""A directory that cannot be looked at for so long is on a file server that does not answer."""
AFTER_DEFERRAL_SECONDS = 5.0
"""After a deferral the server waits for a newer load: the kernel's average moves every 5 s."""
RUNNER_MUTE = "its runner does not answer"
REFUSED_KEPT = 4096
"""Numbers of a session's offers that are over before they began; far more than can be under way."""


@dataclass(frozen=True)
class AgentSettings:
    """What the agent is told at its start; a changed configuration comes by `Agent.configure`."""

    identity: str
    name: str
    machine_id: str
    boot_id: str
    version: str = ""
    info: MachineInfo = field(default_factory=MachineInfo)
    base_environment: Mapping[str, str] = field(default_factory=dict)
    """What every job gets; see `kueue.worker.environment`."""
    job_nice: int = 0
    kill_grace_seconds: float = 10.0
    report_interval_seconds: float = 60.0


@dataclass
class _Candidate:
    """An offer that was not handed to a runner."""

    offer: Offer
    give_up_at: float
    is_place_good: bool = False


class Agent:
    """One worker. Every input method returns the actions that follow from it, in the order they must be performed."""

    def __init__(self, settings: AgentSettings, totals: MachineTotals) -> None:
        self.settings = settings
        self.totals = totals
        self.load = MachineLoad()
        self.attempts: dict[int, Attempt] = {}
        self._guard = LeaseGuard()
        self._start_orders = StartOrders(settings.base_environment, settings.name)
        self._was_told = False
        self._note = ""
        self._is_stopping = False
        self.is_seen_off = False
        """The server has answered our goodbye: it offers nothing more, and all that it had offered is read."""
        self._forget_session()

    def _forget_session(self) -> None:
        self._state: str = "closed"
        self._welcome: WorkerWelcome | None = None
        self._welcome_until = 0.0
        self._greeted_at = 0.0
        self._backlog: list[tuple[str, FromWorker]] = []
        """What happened since the hello, each with the queue whose server is told; empty: whichever welcomes us."""
        self._candidates: dict[int, _Candidate] = {}
        self._refused: dict[int, None] = {}
        self._unknown_at_hello: set[int] = set()
        self._lease_of_session: float | None = None
        self._heartbeats = Heartbeats()
        self._reports = Reports()

    # --- the session -------------------------------------------------------------------------------------------------

    @property
    def is_welcome(self) -> bool:
        """The server has taken this session in."""
        return self._state == "open"

    @property
    def has_more_in_lines(self) -> bool:
        """The runner has more to start by itself when what runs has ended."""
        return any(attempt.state == "queued" and attempt.memo.line is not None for attempt in self.attempts.values())

    @property
    def timeout_seconds(self) -> float | None:
        """The server's ``worker_timeout_seconds``, also between sessions; None until a server has said it."""
        return self._guard.timeout_seconds if self._was_told else None

    @property
    def lease_until(self) -> float | None:
        """Boottime at which attempts that may be given away are paused if nothing comes; None: no server has said."""
        return self._guard.deadline

    @property
    def cleanup_after_seconds(self) -> float | None:
        """Age at which kept output of acknowledged attempts may be dropped; None until a server has said it."""
        return self._welcome.cleanup_after_seconds if self._welcome else None

    def hello(self, boottime: float) -> WorkerHello:
        """Begins a session: the first message of a fresh connection. The older connection must be closed already."""
        self._forget_session()
        self._state = "greeted"
        self._welcome_until = boottime + WELCOME_SECONDS
        self._greeted_at = boottime
        self._unknown_at_hello = {attempt.offer for attempt in self.attempts.values() if attempt.state == "unknown"}
        self._reports.told(self.totals)
        return WorkerHello(
            version=self.settings.version,
            identity=self.settings.identity,
            name=self.settings.name,
            machine_id=self.settings.machine_id,
            boot_id=self.settings.boot_id,
            made_boottime=boottime,
            info=self.settings.info,
            totals=self.totals,
            load=self.load,
            attempts=tuple(report(attempt) for attempt in sorted(self.attempts.values(), key=lambda one: one.offer)),
            lines=True,
        )

    def session_closed(self) -> None:
        """The connection is gone. Attempts go on; offers that were not handed over are forgotten."""
        self._forget_session()

    def stop(self) -> list[Action]:
        """An orderly stop begins: what was not handed over goes back, nothing more is taken, the server is told."""
        self._is_stopping = True
        actions = self._say_all(
            OfferDeferred(offer=offer, reason="the worker is stopping", load=self.load) for offer in self._candidates
        )
        self._candidates.clear()
        return [*actions, *self._say(Goodbye(reason="stopped"))]

    def hears(self, message: ToWorker, boottime: float) -> list[Action]:
        """A message of the server, on the session that `hello` began."""
        match message:
            case WorkerWelcome():
                return self._welcomed(message, boottime)
            case Sorry(reason=reason, hint=hint, lasting=lasting):
                return [Close(reason, hint, lasting)]
            case Goodbye() if self._is_stopping:
                self.is_seen_off = True
                return []
            case Goodbye(reason=reason):
                return [Close(f"the server says goodbye: {reason}" if reason else "the server says goodbye")]
            case HeartbeatAnswer():
                return self._heartbeat_answered(message, boottime)
            case Offer():
                return self._offered(message, boottime)
            case WithdrawOffer(offer=offer):
                return self._withdraw(offer)
            case StopAttempt(offer=offer, kill=kill):
                return self._stop_attempt(offer, kill=kill)
            case Acknowledge(offers=offers):
                return self._acknowledged(offers)
            case ForgetOutput(offers=offers):
                return [DropOutput(tuple(offer for offer in offers if not self._is_of_another_queue(offer)))]
            case FetchOutput(offer=offer, token=token, offset=offset) if self._is_of_another_queue(offer):
                return self._say(FetchedOutput(token=token, offset=offset, error="the output is not kept any more"))
            case FetchOutput():
                return [Fetch(message)]

    def _say(self, message: FromWorker, queue_id: str = "") -> list[Action]:
        """Before the welcome only the hello is sent: what happens meanwhile is told after it.

        `queue_id`: of the attempt of which it tells. The server of another queue may have one of the same number.
        """
        if self._state == "greeted":
            self._backlog.append((queue_id, message))
        is_heard = self._welcome is not None and queue_id in {"", self._welcome.queue_id}
        return [Say(message)] if self._state == "open" and is_heard else []

    def _say_all(self, messages: Iterable[FromWorker]) -> list[Action]:
        return [action for message in messages for action in self._say(message)]

    def _welcomed(self, welcome: WorkerWelcome, boottime: float) -> list[Action]:
        if self._state != "greeted":
            return [Close("the server welcomed this worker twice")]
        self._state = "open"
        self._welcome = welcome
        self._guard.timeout_seconds = welcome.worker_timeout_seconds
        self._was_told = True
        # A worker before us may have renewed them until just now; the server waits longer than that from the hello on.
        self._guard.assume(
            self._unknown_at_hello & self.attempts.keys(), self._greeted_at + welcome.lease_seconds, self.attempts
        )
        self._heartbeats.begin(welcome.lease_seconds, boottime)
        self._reports.begin(boottime)
        if self._note:
            self._reports.want(boottime)  # the hello does not say it
        told = self._backlog
        self._backlog = []
        ended = {message.offer for _, message in told if isinstance(message, AttemptEnded)}
        again = [
            (attempt.queue_id, AttemptEnded(offer=attempt.offer, end=attempt.end))
            for attempt in self.attempts.values()
            if attempt.end is not None and attempt.offer not in ended
        ]
        said = [action for queue_id, message in (*told, *again) for action in self._say(message, queue_id)]
        return [*said, *self.tick(boottime)]

    # --- the lease ---------------------------------------------------------------------------------------------------

    def _heartbeat_answered(self, answer: HeartbeatAnswer, boottime: float) -> list[Action]:
        deadline = self._heartbeats.answered(answer)
        if deadline is None:
            return []
        self._lease_of_session = deadline
        actions = self._lease(deadline, boottime)
        if deadline > boottime:
            for candidate in list(self._candidates.values()):
                if candidate.is_place_good:
                    actions += self._take(candidate.offer, boottime)
        return actions

    def no_server(self, until: float) -> None:
        """Proven on the server's own host: nobody holds its lock, so the runners' lease runs at least `until` then."""
        self._guard.prolonged(until, self.attempts)

    # --- offers ------------------------------------------------------------------------------------------------------

    def _offered(self, offer: Offer, boottime: float) -> list[Action]:
        number = offer.offer
        if self._welcome is None or number in self._candidates:
            return []
        if number in self._refused:
            return self._say(OfferWithdrawn(offer=number))
        known = self.attempts.get(number)
        if known is not None:
            if self._is_of_this_queue(known):
                return self._how_it_stands(known)
            return self._defer(number, f"offer number {number} is in use by an attempt of another queue", boottime)
        if self._is_stopping:
            return self._defer(number, "the worker is stopping", boottime)
        self._candidates[number] = _Candidate(offer, boottime + PLACE_SECONDS)
        return [CheckPlace(number, offer.place)]

    def place_checked(self, offer: int, problem: str | None, boottime: float) -> list[Action]:
        """The directory of this offer was looked at. `problem`: a sentence why it cannot be used, None if it can.

        `measured` comes first, so that the answer goes by fresh load.
        """
        candidate = self._candidates.get(offer)
        if candidate is None or candidate.is_place_good:
            return []
        if problem is not None:
            return self._reject(offer, problem)
        candidate.is_place_good = True
        if not self._guard.is_good(boottime):
            return []  # taken when the next heartbeat is answered
        return self._take(candidate.offer, boottime)

    def _reject(self, offer: int, reason: str) -> list[Action]:
        del self._candidates[offer]
        self._refuse(offer)
        return self._say(OfferRejected(offer=offer, reason=reason))

    def _defer(self, offer: int, reason: str, boottime: float, queue_id: str = "") -> list[Action]:
        """Not now. The job waits for a newer load, so a report of it has to follow. `queue_id`: as of `_say`."""
        self._refuse(offer)
        self._reports.want(boottime + AFTER_DEFERRAL_SECONDS)
        return self._say(OfferDeferred(offer=offer, reason=reason, load=self.load), queue_id)

    def _refuse(self, offer: int) -> None:
        """It is never started in this session."""
        self._refused[offer] = None
        if len(self._refused) > REFUSED_KEPT:
            del self._refused[next(iter(self._refused))]

    def _take(self, offer: Offer, boottime: float) -> list[Action]:
        """Room is there: into the hands of the runner. Else: not now.

        An offer ahead needs none: it has that of its line, and the runner starts it when that line is free.
        """
        assert self._welcome is not None
        del self._candidates[offer.offer]
        share = next((one for one in offer.allocation.shares if one.node == self._welcome.worker), NO_SHARE)
        line = offer.line if offer.line != offer.offer else None
        if line is None:
            reason = why_not_now(share, self.totals, self.load, self.attempts.values())
        else:
            reason = why_not_behind((self._welcome.queue_id, line), self.attempts.values())
        if reason:
            return self._defer(offer.offer, reason, boottime)
        memo = Memo(share, offer.terms.on_lost, offer.place.cwd, offer.payload.stdout, offer.payload.stderr, line)
        self.attempts[offer.offer] = Attempt(
            offer=offer.offer,
            job=offer.job,
            queue_id=self._welcome.queue_id,
            state="queued",
            memo=memo,
            lease_until=self._guard.deadline,
        )
        if self._start_orders.base is not self.settings.base_environment:
            self._start_orders = StartOrders(self.settings.base_environment, self.settings.name)
        order = self._start_orders.make(
            offer,
            self._welcome.queue_id,
            share,
            memo,
            grace_seconds=self.settings.kill_grace_seconds,
            nice=self.settings.job_nice,
        )
        return [Instruct(order)]

    def _withdraw(self, offer: int) -> list[Action]:
        attempt = self.attempts.get(offer)
        if attempt is None:
            self._candidates.pop(offer, None)
            self._refuse(offer)
            return self._say(OfferWithdrawn(offer=offer))
        if attempt.state in {"queued", "unknown"}:
            return [Instruct(WithdrawOrder(offer=offer))] if self._is_of_this_queue(attempt) else []
        return self._how_it_stands(attempt)

    def _stop_attempt(self, offer: int, *, kill: bool) -> list[Action]:
        attempt = self.attempts.get(offer)
        if attempt is None:
            return self._withdraw(offer)
        if attempt.is_over:
            return self._how_it_stands(attempt)
        if not self._is_of_this_queue(attempt):
            return []  # numbers of two queues may be equal: an order of one never reaches the other's attempt
        attempt.stop = True
        attempt.kill = attempt.kill or kill
        return [self._stop_order(attempt)]

    def _stop_order(self, attempt: Attempt) -> Action:
        grace = self.settings.kill_grace_seconds
        return Instruct(StopOrder(offer=attempt.offer, kill=attempt.kill, grace_seconds=grace))

    def _is_of_this_queue(self, attempt: Attempt) -> bool:
        return self._welcome is not None and attempt.queue_id == self._welcome.queue_id

    def _is_of_another_queue(self, offer: int) -> bool:
        return offer in self.attempts and not self._is_of_this_queue(self.attempts[offer])

    def _how_it_stands(self, attempt: Attempt) -> list[Action]:
        said = how_it_stands(attempt)
        return self._say(said, attempt.queue_id) if said is not None else []

    def _acknowledged(self, offers: tuple[int, ...]) -> list[Action]:
        done = []
        for offer in offers:
            attempt = self.attempts.get(offer)
            if attempt is None:
                done.append(offer)
            elif attempt.is_over and self._is_of_this_queue(attempt):
                del self.attempts[offer]
                done.append(offer)
        return [Instruct(ForgetAttempts(offers=tuple(done)))] if done else []

    # --- the runners -------------------------------------------------------------------------------------------------

    def runners_stand(self, states: Iterable[AttemptState]) -> None:
        """How all attempts of all runners stand, ``unknown`` where a runner does not answer. To be told before `hello`.

        What is not named keeps its state: it may be on its way to a runner, or a runner's word on it on its way here.
        """
        for state in states:
            learn(self.attempts, state)

    def begins(self, states: Iterable[AttemptState], boottime: float) -> None:
        """How the attempts stand that an earlier life of this worker left behind. To be told once, before all else.

        A runner that does not answer cannot tell how long its lease runs, and cannot be trusted to keep it: what it
        has in its care counts as lapsed until it answers, or the second guard would wait for a session that may never
        come.
        """
        self.runners_stand(states)
        unknown = [attempt for attempt in self.attempts.values() if attempt.state == "unknown"]
        self._guard.distrust(unknown, boottime)

    def _attached(self, attached: Attached, boottime: float) -> list[Action]:
        """A runner answered (again), with the whole truth of its attempts.

        If it brings attempts that the hello of this session could not tell, the session ends: the next hello can.
        """
        actions: list[Action] = []
        has_news = False
        for state in attached.attempts:
            known = self.attempts.get(state.offer)
            before = known.state if known is not None else "unknown"
            has_news = has_news or known is None or state.offer in self._unknown_at_hello
            fresh = learn(self.attempts, state)
            if attached.lease_deadline_boottime is not None:
                fresh.lease_until = attached.lease_deadline_boottime
            if before not in {fresh.state, "unknown"}:
                actions += self._how_it_stands(fresh)
            if fresh.stop and not fresh.is_over:
                actions.append(self._stop_order(fresh))
        if self._state == "closed":
            return actions
        if has_news:
            return [*actions, Close("a runner answered that was silent when this session began")]
        if self._state == "open" and self._lease_of_session is not None:
            actions += self._lease(self._lease_of_session, boottime)
        return actions

    def _lease(self, deadline: float, boottime: float) -> list[Action]:
        """To all runners that answered when this session began, and to those that came without attempts."""
        order = Instruct(SetLease(deadline_boottime=deadline))
        if deadline <= boottime:
            return [order]  # it has lapsed already: what the guard stopped stays stopped
        return [order, *self._guard.renewed(deadline, self.attempts, self._unknown_at_hello)]

    def runner_event(self, event: News, boottime: float) -> list[Action]:
        """Something happened to an attempt, as its runner tells it."""
        match event:
            case Attached():
                return self._attached(event, boottime)
            case ProvenStill(deadline_boottime=deadline, offers=offers):
                for offer in offers:
                    if offer in self.attempts:
                        self.attempts[offer].still_at = deadline
                return []
            case RunnerMute(offers=offers, note=note):
                self._notes(note, boottime)
                return self._remark(offers, lambda _: RUNNER_MUTE)
            case RunnerAnswers(offers=offers, note=note):
                self._notes(note, boottime)
                return self._remark(offers, lambda attempt: attempt.note)
            case PauseDone() | Pong():
                return []  # each attempt that is paused was told of by itself
            case Started() | Queued() | Refused() | Withdrawn() | Changed() | Ended() | Gone() | Unknown():
                attempt = self.attempts.get(event.offer)
                if attempt is None:
                    return self._say(OfferWithdrawn(offer=event.offer)) if isinstance(event, Withdrawn) else []
                return self._happened(attempt, event, boottime)

    def _notes(self, note: str, boottime: float) -> None:
        """What is said of the worker itself from now on."""
        self._note = note
        self._reports.want(boottime)

    def _remark(self, offers: Iterable[int], note: Callable[[Attempt], str]) -> list[Action]:
        """For people, of attempts that are in the care of a living runner.

        Not of those that the hello called unknown: this would count as a word on them, and the server would wait for
        more of it.
        """
        actions: list[Action] = []
        for offer in offers:
            attempt = self.attempts.get(offer)
            if attempt is not None and not attempt.is_over and offer not in self._unknown_at_hello:
                actions += self._say(AttemptChanged(offer=offer, note=note(attempt)), attempt.queue_id)
        return actions

    def _never_arrived(self, attempt: Attempt, boottime: float) -> list[Action]:
        """The runner does not have it: an order to start that was lost on the way, and cannot arrive any more."""
        if attempt.is_over or attempt.state not in {"queued", "unknown"}:
            return []
        if attempt.stop:
            return self._withdrawn(attempt)
        return self._put_off(attempt, "the runner was changed", boottime)

    def _withdrawn(self, attempt: Attempt) -> list[Action]:
        del self.attempts[attempt.offer]
        self._refuse(attempt.offer)
        return self._say(OfferWithdrawn(offer=attempt.offer), attempt.queue_id)

    def _put_off(self, attempt: Attempt, reason: str, boottime: float) -> list[Action]:
        del self.attempts[attempt.offer]
        return self._defer(attempt.offer, reason, boottime, attempt.queue_id)

    def _happened(
        self,
        attempt: Attempt,
        event: Started | Queued | Refused | Withdrawn | Changed | Ended | Gone | Unknown,
        boottime: float,
    ) -> list[Action]:
        offer, queue_id = attempt.offer, attempt.queue_id
        match event:
            case Started():
                if attempt.is_over:
                    return []
                if attempt.state in {"queued", "starting", "unknown"}:
                    attempt.state = "running"
                attempt.started_wall = event.started_wall
                self._reports.want(boottime)
                return self._say(AttemptStarted(offer=offer, started_wall=event.started_wall), queue_id)
            case Queued():
                return self._say(AttemptQueued(offer=offer), queue_id)
            case Changed():
                if attempt.is_over:
                    return []
                attempt.state, attempt.note = event.state, event.note
                return self._say(AttemptChanged(offer=offer, note=event.note), queue_id)
            case Ended():
                attempt.state, attempt.end = "ended", event.end
                if event.end.started_wall is not None:
                    attempt.started_wall = event.end.started_wall
                self._reports.want(boottime)
                return self._say(AttemptEnded(offer=offer, end=event.end), queue_id)
            case Gone():
                attempt.state, attempt.note = "gone", event.reason
                self._reports.want(boottime)
                return self._say(AttemptGone(offer=offer, reason=event.reason), queue_id)
            case Refused():
                return self._put_off(attempt, event.reason, boottime)
            case Withdrawn():
                return self._withdrawn(attempt)
            case Unknown():
                return self._never_arrived(attempt, boottime)

    # --- time and measurements ---------------------------------------------------------------------------------------

    def measured(self, load: MachineLoad, totals: MachineTotals | None = None) -> None:
        """The machine was measured; told at the next report."""
        self.load = load
        if totals is not None:
            self.totals = totals

    def configure(self, change: Callable[[AgentSettings], AgentSettings], boottime: float) -> None:
        """The configuration was read again. Identity and name stay; changed totals come by `measured`."""
        before = self.settings
        self.settings = replace(change(before), identity=before.identity, name=before.name)
        self._reports.want(boottime)

    def tick(self, boottime: float) -> list[Action]:
        """Whatever is due. To be called at `next_wake`; too often does no harm. `measured` comes first."""
        actions = self._guard.look(boottime, self.attempts)
        if self._state == "closed":
            return actions
        if self._state == "greeted":
            if boottime >= self._welcome_until:
                actions.append(Close(f"no welcome within {WELCOME_SECONDS:.0f} s"))
            return actions
        silent = self._heartbeats.silent_seconds(boottime)
        if silent:
            return [*actions, Close(f"no answer to a heartbeat for {silent:.0f} s")]
        if boottime >= self._heartbeats.due:
            actions += self._say(self._heartbeats.next(boottime))
        for candidate in list(self._candidates.values()):
            if not candidate.is_place_good and boottime >= candidate.give_up_at:
                cwd = candidate.offer.place.cwd
                actions += self._reject(candidate.offer.offer, f"the directory {shown(cwd)} does not answer")
        if boottime >= self._reports.due(self.settings.report_interval_seconds):
            actions += self._say(self._reports.make(self.load, self.totals, self._note, boottime))
        return actions

    def next_wake(self) -> float | None:
        """The boottime of the next `tick` that does something; None: nothing is due until something happens."""
        moments = [self._guard.next_look(self.attempts)]
        if self._state == "greeted":
            moments.append(self._welcome_until)
        if self._state == "open":
            moments += [self._heartbeats.next_moment(), self._reports.due(self.settings.report_interval_seconds)]
            moments += [one.give_up_at for one in self._candidates.values() if not one.is_place_good]
        return min((moment for moment in moments if moment is not None), default=None)
