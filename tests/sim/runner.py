"""The runner of one machine: the real policy, around it what keeper and spawner do with processes and the spool.

Rules
- What a process has reaped or decided is on the disk before anyone is told. Losing power loses what is young there.
- The newest attachment counts; what an older one had sent and nobody has read is thrown away with it.
- While the keeper stands still at the end of the lease its spawner stops the trees (the real `StandIn`).
- If a spawner dies its keeper asks another one for what was not made, and reaps what was. If the keeper dies its spawner goes on from the policy's rows. If both die the next runner takes in what they left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kueue.model import Canceled, EndRecord, Exited, Lost, NotStarted, Signaled, TimedOut
from kueue.runner import actions as a
from kueue.runner.attempt import Terms
from kueue.runner.policy import Policy
from kueue.runner.revocable import must_stand
from kueue.runner.shared import Shared
from kueue.runner.stand_in import StandIn
from kueue.worker import orders as o
from kueue.worker.known import read_memo
from tests.sim.processes import Tree
from tests.sim.world import WAKE_SECONDS, Program

if TYPE_CHECKING:
    from tests.sim.workstation import Workstation

MUTE_SPAWNER_SECONDS = 10.0
YOUNG_SECONDS = 5.0
"""Records of this age may be lost with the power: nothing flushes them."""


@dataclass
class Record:
    """One attempt in the spool."""

    order: o.StartAttempt
    runner: str
    written_at: float
    main: tuple[int | None, int | None] | None = None
    end: EndRecord | None = None
    end_written_at: float = float("-inf")


@dataclass
class Care:
    """What the keeper knows beside the policy."""

    order: o.StartAttempt
    is_asked: bool = False
    """The spawner was asked to make its process."""
    executed_wall: float | None = None
    spawner: int | None = None
    """Which spawner was asked."""
    failure: str = ""
    """What the spawner said instead of making a process: ``late`` or ``cannot``."""


@dataclass
class Desk:
    """One attachment: ordered both ways, gone when either side is."""

    worker: Program
    runner: Runner
    is_open: bool = True
    inbox: deque[o.Order] = field(default_factory=deque)


class Runner:
    """One runner, over the deaths of its keeper."""

    def __init__(self, station: Workstation, name: str) -> None:
        self.station = station
        self.world = station.world
        self.machine = station.machine
        self.name = name
        self.policy = Policy()
        self.cares: dict[int, Care] = {}
        self.desk: Desk | None = None
        self.is_dead = False
        self._spawner = 0
        """The number of the present spawner."""
        self._has_no_spawner = False
        """It died, and the keeper has not noticed yet."""
        self._wake_turn = 0
        self._planned: tuple[float, Program] | None = None
        self.program = self._new_program()
        self.machine.on_wake.append(self._spawner_wakes)
        self._meet_spawner()
        self._inherit()

    def _new_program(self) -> Program:
        program = Program(self.machine, f"runner {self.name}")
        program.on_death.append(lambda _: self._lost_desk())
        return program

    def now(self) -> float:
        return self.machine.boottime()

    # --- death -------------------------------------------------------------------------------------------------------

    def die(self) -> None:
        """Keeper and spawner at once."""
        self.is_dead = True
        self.program.die()

    def spawner_dies(self) -> None:
        """What it was asked and has not made is never made; what it has made becomes the keeper's own."""
        if self._has_no_spawner:
            return
        self._has_no_spawner = True
        self._spawner += 1
        self.station.watch_guard()
        self.program.post(self._lost_spawner)

    def _lost_spawner(self) -> None:
        self._has_no_spawner = False
        self._notice_stand_in()
        self._meet_spawner()
        self.station.watch_guard()
        for offer, attempt in list(self.policy.attempts.items()):
            care = self.cares[offer]
            if care.spawner is None or care.spawner == self._spawner or not attempt.lives or attempt.main_ended:
                continue
            record, tree = self.station.spool[offer], self.station.trees.get(offer)
            if record.main is not None:
                self._exited(offer)
            elif tree is not None:
                if tree.is_executed or not tree.main_lives:
                    self._executed(offer)
            elif not care.failure and attempt.stop is None:
                self._ask_spawner(offer, self.policy.deadline)
            elif not care.failure:
                self._do(self.policy.start_refused(offer, "its spawner died before the process was made", self.now()))

    def keeper_dies(self) -> None:
        """The spawner takes over, with what it was told last."""
        if self._has_no_spawner:
            self.die()
            return
        rows = [self.policy.row(offer) for offer in self.policy.attempts]
        told = (self._shared.deadline, self.policy.lapsed, self.policy.pause_told)
        self.program.die()
        self.program = self._new_program()
        self.policy = Policy()
        self.policy.deadline, self.policy.lapsed, self.policy.pause_told = told
        for row in rows:
            assert row is not None
            care = self.cares[row["offer"]]
            if row["phase"] == "queued" and not care.is_asked:
                # Its order died with the keeper; nobody is attached, so nobody is told.
                del self.cares[row["offer"]], self.station.spool[row["offer"]]
            elif row["phase"] == "over":
                self.policy.over(row["offer"], row["gone"])
            else:
                self.policy.adopt(row)
        self.program.wake(0.005, self._taken_over)

    def _taken_over(self) -> None:
        self._notice_stand_in()
        self._meet_spawner()
        for offer, attempt in list(self.policy.attempts.items()):
            care = self.cares[offer]
            tree = self.station.trees.get(offer)
            record = self.station.spool[offer]
            if care.failure and attempt.phase == "starting":
                self._failed(offer)
            elif attempt.phase == "queued" or (tree is None and not care.is_asked):
                self._do(self.policy.start_refused(offer, "its keeper died before it was started", self.now()))
            elif attempt.lives and tree is not None:
                if attempt.phase == "starting" and (tree.is_executed or not tree.main_lives):
                    self._executed(offer)
                if record.main is not None:
                    self._do(self.policy.exited(offer, *record.main, self.now()))
        self._tick()

    def _inherit(self) -> None:
        for offer, record in list(self.station.spool.items()):
            self.cares[offer] = Care(record.order, is_asked=True)
            record.runner = self.name
            if record.end is not None:
                self.policy.over(offer, isinstance(record.end.outcome, Lost))
            else:
                self.cares[offer].executed_wall = self.world.wall()
                self._do(self.policy.inherit(offer, _terms(record.order), record.main, self.now()))
        self._plan_wake()

    # --- the worker --------------------------------------------------------------------------------------------------

    def attach(self, desk: Desk) -> None:
        if self.desk is not None:
            self.desk.is_open = False
            self.desk.inbox.clear()
        self.desk = desk
        self._describe_all()

    def _describe_all(self) -> None:
        self._tell(
            o.Attached(
                protocol=o.PROTOCOL,
                version="sim",
                runner=self.name,
                pid=1,
                lease_deadline_boottime=self.policy.deadline if self.policy.deadline > 0 else None,
                attempts=tuple(self._describe(offer) for offer in self.cares),
            )
        )

    def _describe(self, offer: int) -> o.AttemptState:
        return describe(self.station.spool[offer], self.cares[offer], self.policy.attempts[offer].state)

    def arrives(self, desk: Desk, order: o.Order) -> None:
        """A line on the socket of that desk. It is read when the program comes to it."""
        desk.inbox.append(order)
        self.program.post(lambda: self._read(desk))

    def _read(self, desk: Desk) -> None:
        # A worker that died has handed its starts to nobody: its successor does not know of them, so neither may we.
        self._notice_stand_in()
        while desk.inbox and desk is self.desk:
            order = desk.inbox.popleft()
            if desk.worker.is_alive or self.station.quirks.obeys_the_dead or not isinstance(order, o.StartAttempt):
                self._obey(order)

    def _lost_desk(self) -> None:
        if self.desk is not None:
            desk, self.desk = self.desk, None
            desk.is_open = False
            desk.inbox.clear()
            self.station.runner_hung_up(desk)

    def _tell(self, event: o.Event) -> None:
        desk = self.desk
        if desk is not None and desk.is_open:
            self.station.to_worker(desk, event)

    def _obey(self, order: o.Order) -> None:
        now = self.now()
        match order:
            case o.StartAttempt():
                self._start(order, now)
            case o.SetLease(deadline_boottime=deadline):
                self._do(self.policy.set_lease(deadline, now))
            case o.StopOrder(offer=offer, kill=kill, grace_seconds=grace):
                self._do(self.policy.stop(offer, kill, grace, now), answers=True)
            case o.WithdrawOrder(offer=offer):
                self._do(self.policy.withdraw(offer, now), answers=True)
            case o.ForgetAttempts(offers=offers):
                for offer in offers:
                    if self.policy.forget(offer):
                        self.cares.pop(offer, None)
                        self.station.spool.pop(offer, None)
            case o.Ping(number=number):
                self._tell(o.Pong(number=number))
            case o.Inherit():
                self._describe_all()
            case _:
                raise AssertionError(order)
        self._plan_wake()

    def _start(self, order: o.StartAttempt, now: float) -> None:
        is_new = order.offer not in self.policy.attempts
        actions = self.policy.start(order.offer, _terms(order), now)
        if is_new and order.offer in self.policy.attempts:
            self.cares[order.offer] = Care(order)
            self.station.spool[order.offer] = Record(order, self.name, self.world.now)
        self._do(actions, answers=True)

    # --- what the policy decides -------------------------------------------------------------------------------------

    def _do(self, actions: Iterable[a.Action], *, answers: bool = False) -> None:
        todo = deque(actions)
        while todo:
            action = todo.popleft()
            now = self.now()
            match action:
                case a.Start(offer, not_after):
                    self._ask_spawner(offer, not_after)
                case a.Terminate(offer):
                    todo += self._signal(offer, kill=False)
                case a.Kill(offer):
                    todo += self._signal(offer, kill=True)
                case a.Pause(offer):
                    tree = self.station.trees.get(offer)
                    if tree is not None:
                        tree.stop()
                    todo += self.policy.seen(offer, *_count(tree), now)
                case a.Look(offer):
                    todo += self.policy.seen(offer, *_count(self.station.trees.get(offer)), now)
                case a.Continue(offer):
                    tree = self.station.trees.get(offer)
                    if tree is not None:
                        tree.go_on()
                case a.Finish():
                    self._finish(action)
                case a.Tell():
                    self._say(action, answers)
                case a.PauseDone(deadline):
                    self._tell(o.PauseDone(deadline_boottime=deadline))
        self._plan_wake()

    def _signal(self, offer: int, *, kill: bool) -> list[a.Action]:
        tree = self.station.trees.get(offer)
        reached = tree is None or tree.main_lives
        if tree is not None:
            if kill:
                tree.kill()
            else:
                tree.terminate()
        actions = self.policy.signalled(offer, reached, self.now())
        return actions + self.policy.seen(offer, *_count(tree), self.now())

    def _say(self, tell: a.Tell, answers: bool) -> None:
        offer = tell.offer
        care = self.cares.get(offer)
        match tell.word:
            case "refused" | "withdrawn":
                self.cares.pop(offer, None)
                self.station.spool.pop(offer, None)
                self._tell(
                    o.Refused(offer=offer, reason=tell.note) if tell.word == "refused" else o.Withdrawn(offer=offer)
                )
            case "unknown":
                self._tell(o.Unknown(offer=offer))
            case "queued":
                self._tell(o.Queued(offer=offer))
            case "ended" | "gone" if care is not None:
                self._tell_end(offer)
            case state if care is not None:
                if care.executed_wall is not None and (answers or (state == "running" and not tell.note)):
                    self._tell(o.Started(offer=offer, job=care.order.job, started_wall=care.executed_wall))
                if state != "running" or tell.note:
                    self._tell(o.Changed(offer=offer, state=state, note=tell.note))

    def _finish(self, finish: a.Finish) -> None:
        record = self.station.spool[finish.offer]
        started = self.cares[finish.offer].executed_wall if finish.kind != "not_started" else None
        tree = self.station.trees.get(finish.offer)
        record.end = EndRecord(
            outcome=_outcome(finish),
            started_wall=started,
            ended_wall=self.world.wall(),
            run_seconds=tree.ran_seconds if tree is not None else 0.0,
        )
        record.end_written_at = self.world.now
        self.world.tell(f"runner {self.name} wrote: offer {finish.offer} {finish.kind}", record.order.job)
        self._tell_end(finish.offer)

    def _tell_end(self, offer: int) -> None:
        record = self.station.spool[offer]
        if record.end is None:
            return
        order = record.order
        if isinstance(record.end.outcome, Lost):
            reason = record.end.outcome.reason
            self._tell(o.Gone(offer=offer, job=order.job, queue_id=order.queue_id, reason=reason))
        else:
            self._tell(o.Ended(offer=offer, job=order.job, end=record.end))

    # --- the spawner stands in for the keeper ------------------------------------------------------------------------

    @property
    def has_spawner(self) -> bool:
        return not (self.is_dead or self._has_no_spawner)

    def _meet_spawner(self) -> None:
        self._shared = Shared(self.now())
        self._stand_in = StandIn(self._shared)
        self._stand_in_at: float | None = None
        self._share_lease()

    def _share_lease(self) -> None:
        policy = self.policy
        self._shared.write(self.now(), policy.deadline, lapsed=policy.lapsed)
        self._plan_stand_in()

    def _notice_stand_in(self) -> None:
        since = self._shared.stood_in_since
        if since is not None:
            self._do(self.policy.stood_in(since, self.now()))

    def _stood_in(self, shared: Shared, since: float) -> None:
        if shared is self._shared:
            shared.noted(since)
            self._do(self.policy.stood_in(since, self.now()))

    def _bound(self) -> list[int]:
        rows = ((offer, self.policy.row(offer)) for offer in self.policy.open)
        return [offer for offer, row in rows if row is not None and must_stand(row)]

    def _plan_stand_in(self) -> None:
        at = self._stand_in.due(is_needed=bool(self._bound()))
        if at is None or (self._stand_in_at is not None and at >= self._stand_in_at):
            return
        self._stand_in_at = at
        shared = self._shared
        wait = self.machine.real_seconds(max(0.001, at - self.now()))
        self.world.after(wait, lambda: self._look_after_lease(shared))

    def _spawner_wakes(self) -> None:
        """Its alarm counts the time in which the machine slept."""
        shared = self._shared
        self.world.after(WAKE_SECONDS, lambda: self._look_after_lease(shared))

    def _look_after_lease(self, shared: Shared) -> None:
        """As the spawner: also while the keeper stands still."""
        if (
            shared is not self._shared
            or not self.has_spawner
            or not self.machine.is_up
            or self.station.quirks.no_stand_in
        ):
            return
        self._stand_in_at = None
        if not self.machine.is_awake:
            return
        bound = self._bound()
        match self._stand_in.look(self.now(), is_needed=bool(bound)):
            case "stop":
                for offer in bound:
                    if offer in self.station.trees:
                        self.world.tell(f"spawner of {self.name} stops offer {offer}", self.cares[offer].order.job)
                        self.station.trees[offer].stop()
                self._stand_in.stopped(self.now(), running=0)
            case "say":
                since = self._stand_in.ended
                assert since is not None
                self.program.post(lambda: self._stood_in(shared, since))
        self._plan_stand_in()

    # --- the spawner -------------------------------------------------------------------------------------------------

    def _ask_spawner(self, offer: int, not_after: float) -> None:
        care = self.cares[offer]
        care.is_asked = True
        # The spawner is a process of its own: it works while the keeper stands still, and dies with the pair only.
        care.spawner = spawner = self._spawner
        self.world.after(self.station.spawn_seconds(), lambda: self._spawn(offer, not_after, spawner))

    def _spawn(self, offer: int, not_after: float, spawner: int) -> None:
        station = self.station
        care = self.cares.get(offer)
        if self.is_dead or care is None or not self.machine.is_up:
            return
        if spawner != self._spawner and not station.quirks.dead_spawners_start:
            return
        if not self.machine.is_awake:
            self.world.after(0.5, lambda: self._spawn(offer, not_after, spawner))
            return
        if self.now() >= not_after:
            care.failure = "late"
            self.program.post(lambda: self._failed(offer))
            return
        plan = station.plan_of(care.order)
        if plan.cannot_start:
            care.failure = "cannot"
            self.program.post(lambda: self._failed(offer))
            return
        share = read_memo(care.order.memo).share
        tree = Tree(self.machine, offer, care.order.job, plan, share, care.order.keep_background, station.watcher)
        station.trees[offer] = tree
        tree.on_main_end = lambda: self._reap(offer)
        tree.on_executed = lambda: self.program.post(lambda: self._executed(offer))

    def _failed(self, offer: int) -> None:
        care = self.cares.get(offer)
        if care is None:
            return
        if care.failure == "late":
            self._do(self.policy.start_refused(offer, "the lease ended before the process was made", self.now()))
        else:
            self._do(self.policy.not_started(offer, "not_found", "no such program", self.now()))

    def _executed(self, offer: int) -> None:
        care = self.cares.get(offer)
        if care is not None and care.executed_wall is None:
            care.executed_wall = self.world.wall()
            self._do(self.policy.started(offer, self.now()))

    def _reap(self, offer: int) -> None:
        """By the spawner, or the keeper in its place; nobody if both are dead."""
        if self.is_dead:
            return
        tree = self.station.trees[offer]
        record = self.station.spool.get(offer)
        if record is not None:
            record.main = tree.main_end
        self.program.post(lambda: self._exited(offer))

    def _exited(self, offer: int) -> None:
        record = self.station.spool.get(offer)
        if record is not None and record.main is not None:
            self._executed(offer)
            self._do(self.policy.exited(offer, *record.main, self.now()))

    # --- time --------------------------------------------------------------------------------------------------------

    def _plan_wake(self) -> None:
        self._share_lease()
        at = self.policy.next_wake(self.now())
        if at is None or (at, self.program) == self._planned:
            return
        self._planned = (at, self.program)
        self._wake_turn += 1
        turn = self._wake_turn
        program = self.program
        program.wake(max(0.001, at - self.now()), lambda: self._tick() if turn == self._wake_turn else None)

    def _tick(self) -> None:
        self._planned = None
        self._notice_stand_in()
        self._do(self.policy.tick(self.now()))


def describe(record: Record, care: Care | None, state: o.RunnerState) -> o.AttemptState:
    order = record.order
    is_gone = state == "gone"
    assert not is_gone or (record.end is not None and isinstance(record.end.outcome, Lost))
    return o.AttemptState(
        offer=order.offer,
        job=order.job,
        queue_id=order.queue_id,
        state=state,
        started_wall=care.executed_wall if care is not None else None,
        end=record.end if state == "ended" else None,
        note="its runner died with it" if is_gone else "",
        memo=order.memo,
    )


def _count(tree: Tree | None) -> tuple[int, int]:
    return (tree.living, tree.unstopped) if tree is not None else (0, 0)


def _terms(order: o.StartAttempt) -> Terms:
    return Terms(
        on_lost=order.on_lost,
        timeout_seconds=order.timeout_seconds,
        keep_background=order.keep_background,
        grace_seconds=order.grace_seconds,
        line=order.line,
    )


def _outcome(finish: a.Finish) -> Exited | Signaled | NotStarted | TimedOut | Canceled | Lost:
    match finish.kind:
        case "exited":
            return Exited(finish.number)
        case "signaled":
            return Signaled(finish.number)
        case "not_started":
            return NotStarted(finish.reason, "not_found")
        case "timed_out":
            return TimedOut(finish.after_seconds)
        case "canceled":
            return Canceled()
        case "gone":
            return Lost(finish.reason)
