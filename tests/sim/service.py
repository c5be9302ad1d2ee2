"""The server of the simulation: the real engine and a real store, and around them the duties of the driver.

Rules
- All that waits is handled in one round and stored in one commit; nothing is said before it is stored. What comes
  during a commit waits, but for heartbeats: they are answered as they come.
- A session that the engine closes counts as closed from the decision on.
- Deadlines pass only after all that has arrived was handled; a standstill is noticed before.
- A commit that fails throws the round away; the state is rebuilt and the server is read-only until the disk has room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kueue.core import facts as f
from kueue.core import invariants
from kueue.core.engine import Engine, Turn
from kueue.core.settings import Settings
from kueue.errors import DiskFull
from kueue.model import Now
from kueue.protocol import messages as m
from kueue.server import outage, restore
from kueue.storage.memory import MemoryStore
from kueue.storage.store import Batch
from tests.sim.network import End, Network
from tests.sim.snapshot import snapshot
from tests.sim.world import Machine, Program, World

if TYPE_CHECKING:
    from tests.sim.oracle import Oracle, Seen
    from tests.sim.workstation import Quirks

PROBE_SECONDS = 1.0
ROUND_SECONDS = 0.001
"""From a message to its round, at most."""
FROM_CLIENTS = (m.Submit, m.RemoveJobs, m.HoldJobs, m.ReleaseJobs, m.SetNode, m.WatchJobs)


@dataclass
class Session:
    number: int
    end: End
    is_worker: bool
    is_welcomed: bool = False
    is_ending: bool = False
    unanswered: set[int] = field(default_factory=set)
    is_watching: bool = False

    def say(self, *messages: m.Message) -> None:
        for message in messages:
            if isinstance(message, m.WorkerWelcome):
                self.is_welcomed = True
            self.unanswered.discard(getattr(message, "seq", -1))
        self.end.send(*messages)


@dataclass
class Pending:
    facts: list[f.AnyFact] = field(default_factory=list)
    finished: list[f.FinishedJob] = field(default_factory=list)
    sends: list[tuple[int, m.Message]] = field(default_factory=list)
    closes: list[int] = field(default_factory=list)
    askers: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Backup:
    """A copy of the record, and what the world was like by then."""

    store: MemoryStore
    seen: Seen


class Service:
    """The server over all its lives: the disk (`store`) stays, the rest is made anew at each start."""

    def __init__(
        self, world: World, network: Network, machine: Machine, settings: Settings, oracle: Oracle, quirks: Quirks
    ) -> None:
        self.world = world
        self.network = network
        self.machine = machine
        self.settings = settings
        self.oracle = oracle
        self.quirks = quirks
        self.store = MemoryStore(queue_id="q" * 32, wall=world.wall)
        self.program: Program | None = None
        self.engine: Engine | None = None
        self.checks_invariants = True
        self.commit_seconds = (0.001, 0.01)
        self.rounds = 0
        self._is_listening = False
        network.server_machine = machine
        network.listener = lambda: self.program if self._is_listening else None
        network.accept = self._accept
        self._forget()

    def _forget(self) -> None:
        self.sessions: dict[int, Session] = {}
        self._next_session = 1
        self._mail: deque[tuple[int, m.Message]] = deque()
        self._pending = Pending()
        self._is_busy = False
        self._round_planned = False
        self._read_only = False
        self._due_turn = 0
        self._stood_still = False

    def now(self) -> Now:
        return Now(self.world.wall(), self.machine.monotonic())

    # --- life --------------------------------------------------------------------------------------------------------

    def start(self, settings: Settings | None = None) -> None:
        if self.program is not None and self.program.is_alive:
            return
        if not self.machine.is_up:
            self.machine.boot()
        self.settings = settings or self.settings
        self._forget()
        self.engine = None
        program = self.program = Program(self.machine, "server")
        program.on_death.append(lambda _: self._died())
        program.on_continue.append(self._continued)
        self.world.tell(f"server starts, T = {self.settings.worker_timeout_seconds:g}")
        program.wake(self.world.between(0.01, 0.5), self._load)

    def _load(self) -> None:
        try:
            self.engine = self._replayed()
        except Exception as error:  # noqa: BLE001 - whatever it is, the promise is broken
            self.oracle.fail("replay", f"the record cannot be replayed: {error}", cause=error)
        assert self.program is not None
        self.program.wake(self.world.between(0.0, 0.3), self._open)

    def _open(self) -> None:
        assert self.engine is not None
        self._is_listening = True
        self._opened()

    def _opened(self) -> None:
        assert self.engine is not None
        self.engine.opened(self.now())
        # What that decides leaves with the next turn; it has to be stored before the first lease.
        self._take(self._call(lambda engine: engine.settle(self.now())))
        self._plan_round()

    def _replayed(self) -> Engine:
        engine = Engine(self.settings, queue_id=self.store.queue_id, version="sim")
        engine.replay(self.store.aggregates(), self.store.replay())
        return engine

    def _died(self) -> None:
        self._is_listening = False
        if self.engine is not None and self.is_at_rest and self.checks_invariants:
            self.compare_replay()

    @property
    def is_at_rest(self) -> bool:
        """Nothing is decided that is not stored."""
        return not self._pending.facts and not self._is_busy

    def compare_replay(self) -> None:
        """The state that a restart would build is the state that is there."""
        assert self.engine is not None
        live, replayed = snapshot(self.engine), snapshot(self._replayed())
        for name, value in live.items():
            self.oracle.require(
                value == replayed[name], "replay", f"{name} is {value} live and {replayed[name]} after a replay"
            )

    def crash(self) -> None:
        if self.program is not None and self.program.is_alive:
            self.world.tell("server is killed")
            self.program.die()

    def restore(self, backup: Backup, *, is_readable: bool) -> None:
        """`kueue_server --restore` while the server is away. `is_readable`: so is the state that is replaced."""
        assert self.program is None or not self.program.is_alive
        self.world.tell(f"a backup is restored; the state before it can {'' if is_readable else 'not '}be read")
        given = self.store.aggregates() if is_readable else None
        store = backup.store.copy()
        engine = Engine(self.settings, queue_id=store.queue_id, version="sim")
        engine.replay(store.aggregates(), store.replay())
        self.oracle.restored(backup, {job.id for job in engine.state.jobs.values() if job.attempt is not None})
        facts = restore.decided(engine, given, self.world.wall())
        store.commit(Batch(facts=tuple(facts), aggregates=engine.aggregates(), wall=self.world.wall()))
        store.fail_with = self.store.fail_with
        self.store = store
        self.engine = None

    def backup(self) -> Backup:
        """Of what is stored at this moment."""
        self.world.tell("a backup is made")
        return Backup(self.store.copy(), self.oracle.seen())

    def stop_orderly(self) -> None:
        """SIGTERM: what is decided is stored, everybody is told."""
        program = self.program
        if program is None or not program.is_running:
            return
        self.world.tell("server stops orderly")
        if self._is_listening and not self._is_busy and not self._read_only and self.engine is not None:
            while self._mail:
                self._handle_next()
            pending, self._pending = self._pending, Pending()
            if self._store(pending):
                self._tell(pending)
        for session in list(self.sessions.values()):
            session.say(m.Goodbye(reason="stopped"))
            session.end.close()
        program.die()

    def reload(self, settings: Settings) -> None:
        """SIGHUP."""
        program = self.program
        if program is not None:
            program.post(lambda: self._reload(settings))

    def _reload(self, settings: Settings) -> None:
        self.settings = settings
        self.world.tell(f"server reloads, T = {settings.worker_timeout_seconds:g}")
        if self.engine is not None and self._is_listening:
            self._take(self.engine.reload(settings, self.now()))
            self._plan_round()

    def _continued(self) -> None:
        """After SIGCONT or the end of a sleep: the loop notices that its clock jumped, or that it slept."""
        assert self.program is not None
        if self.program.stopped_since is not None:
            still = self.machine.monotonic() - self.program.stopped_since
            self.program.stopped_since = None
            self._stood_still |= still > self.settings.margin_seconds / 4
        # It notices within a quarter of a second, and in any case before it lets deadlines pass.
        self._stood_still |= self.machine.woken_at >= self.world.now - 0.1

    # --- sessions ----------------------------------------------------------------------------------------------------

    def _accept(self, end: End) -> None:
        number = self._next_session
        self._next_session += 1
        end.on_messages = lambda messages: self._first(number, end, messages)
        end.on_closed = lambda: None

    def _first(self, number: int, end: End, messages: Sequence[m.Message]) -> None:
        session = Session(number, end, is_worker=isinstance(messages[0], m.WorkerHello))
        self.sessions[number] = session
        end.on_messages = lambda more: self._post(session, more)
        end.on_closed = lambda: self._left(session)
        self._post(session, messages if session.is_worker else messages[1:])

    def _left(self, session: Session) -> None:
        if self.sessions.pop(session.number, None) is None:
            return
        self._drop_mail(session.number)
        if self.engine is not None and not self._read_only:
            self._take(self.engine.session_closed(session.number, self.now()))
            self._plan_round()

    def _drop_mail(self, number: int) -> None:
        self._mail = deque(entry for entry in self._mail if entry[0] != number)

    def _post(self, session: Session, messages: Sequence[m.Message]) -> None:
        if session.is_ending:
            return
        for message in messages:
            if isinstance(message, m.Heartbeat) and session.is_welcomed:
                self._beat(session, message)
            else:
                self._mail.append((session.number, message))
                self._plan_round()

    def _beat(self, session: Session, beat: m.Heartbeat) -> None:
        assert self.engine is not None
        if self._read_only:
            session.say(m.HeartbeatAnswer(number=beat.number, lease_seconds=self.settings.lease_seconds))
            return
        turn = self._call(lambda engine: engine.handle(session.number, beat, self.now(), {}))
        if turn.facts or turn.closes:
            self._take(turn)
            self._plan_round()
        else:
            for number, message in turn.sends:
                self._send(number, message)

    def _send(self, number: int, *messages: m.Message) -> None:
        session = self.sessions.get(number)
        if session is not None:
            session.say(*messages)

    # --- rounds ------------------------------------------------------------------------------------------------------

    def _call(self, call) -> Turn:
        assert self.engine is not None
        try:
            return call(self.engine)
        except Exception as error:  # noqa: BLE001 - whatever it is, the promise is broken
            self.oracle.fail("engine", f"the engine raised {type(error).__name__}: {error}", cause=error)

    def _plan_round(self) -> None:
        if self._round_planned or self._is_busy or not self._is_listening:
            return
        self._round_planned = True
        assert self.program is not None
        self.program.wake(self.world.between(0.0, ROUND_SECONDS), self._round)

    def _round(self) -> None:
        self._round_planned = False
        if self._is_busy or self.engine is None:
            return
        self.rounds += 1
        while self._mail:
            self._handle_next()
        if not self._read_only:
            self._pass_time()
            self._take(self._call(lambda engine: engine.settle(self.now())))
        if self.checks_invariants:
            try:
                invariants.check(self.engine.state)
            except Exception as error:  # noqa: BLE001 - `Bug`, or worse
                self.oracle.fail("invariants", str(error), cause=error)
        self._commit()
        self._plan_due()

    def _handle_next(self) -> None:
        number, message = self._mail.popleft()
        session = self.sessions.get(number)
        assert self.engine is not None
        if session is None or session.is_ending:
            return
        if session.is_worker and self._read_only:
            reply = outage.answer(message, self.engine, self.settings, self.store.queue_id)
            if reply is not None:
                session.say(reply)
            if isinstance(reply, m.Sorry):
                self._end(session)
            return
        if not session.is_worker:
            if self._read_only:
                session.say(outage.refusal(message.seq))
                return
            if isinstance(message, m.WatchJobs):
                session.is_watching = True
            else:
                session.unanswered.add(message.seq)
                self._pending.askers.append((number, message.seq))
        past = self._past_of(message)
        turn = self._call(lambda engine: engine.handle(number, message, self.now(), past))
        self._take(turn)

    def _past_of(self, message: m.Message) -> dict[int, f.FinishedJob]:
        match message:
            case m.RemoveJobs(ids=ids) | m.HoldJobs(ids=ids) | m.ReleaseJobs(ids=ids) | m.WatchJobs(ids=ids):
                rows = {row.id: row for row in self.store.finished(ids=ids)}
                rows.update((row.id, row) for row in self._pending.finished)
                return rows
            case m.WorkerHello(attempts=attempts) if attempts:
                ids = [(entry.job, entry.job) for entry in attempts]
                rows = {row.id: row for row in self.store.finished(ids=ids)}
                rows.update((row.id, row) for row in self._pending.finished)
                return rows
            case _:
                return {}

    def _pass_time(self) -> None:
        assert self.engine is not None
        now = self.now()
        if self._stood_still:
            self._stood_still = False
            self.world.tell("server noticed that it stood still")
            self.engine.stalled(now)
        due = self.engine.next_deadline(now)
        if due is not None and due <= now.steady:
            self._take(self._call(lambda engine: engine.tick(now)))

    def _plan_due(self) -> None:
        assert self.engine is not None
        assert self.program is not None
        if self._read_only:
            return
        now = self.now()
        due = self.engine.next_deadline(now)
        if due is None:
            return
        self._due_turn += 1
        turn = self._due_turn
        # A round of its own, so that what arrived during a standstill is handled before deadlines pass.
        self.program.wake(max(0.005, due - now.steady), lambda: self._plan_round() if turn == self._due_turn else None)

    def _take(self, turn: Turn) -> None:
        pending = self._pending
        pending.facts += turn.facts
        pending.finished += turn.finished
        pending.sends += turn.sends
        pending.closes += turn.closes
        for fact in turn.facts:
            if not isinstance(fact, f.RequestAnswered):
                self.world.tell(f"decided {fact}"[:180], getattr(fact, "job", None))
        for line in turn.remarks:
            self.world.tell(f"server: {line}")
        for number in turn.closes:
            session = self.sessions.get(number)
            if session is not None and not self.quirks.hears_closed_sessions:
                session.is_ending = True
                self._drop_mail(number)

    # --- storing -----------------------------------------------------------------------------------------------------

    def _commit(self) -> None:
        pending, self._pending = self._pending, Pending()
        if not pending.facts:
            self._tell(pending)
            return
        if self.quirks.sends_before_storing:
            self._tell(pending)
            pending = replace(pending, sends=[], closes=[])
        self._is_busy = True
        assert self.program is not None
        assert self.engine is not None
        batch = self._batch(pending)
        program = self.program
        seconds = self.world.between(*self.commit_seconds)
        at_disk = seconds * self.world.rng.random()
        self.world.after(at_disk, lambda: self._write(program, batch, pending))
        self.world.after(seconds, lambda: program.post(lambda: self._committed(pending)))

    def _batch(self, pending: Pending) -> Batch:
        assert self.engine is not None
        return Batch(
            facts=tuple(pending.facts),
            finished=tuple(pending.finished),
            aggregates=self.engine.aggregates(),
            wall=self.world.wall(),
        )

    def _write(self, program: Program, batch: Batch, pending: Pending) -> None:
        if not program.is_alive:
            return
        try:
            self.store.commit(batch)
        except DiskFull:
            pending.facts.clear()
            return
        self.oracle.committed(batch)

    def _store(self, pending: Pending) -> bool:
        if not pending.facts:
            return True
        batch = self._batch(pending)
        try:
            self.store.commit(batch)
        except DiskFull:
            return False
        self.oracle.committed(batch)
        return True

    def _committed(self, pending: Pending) -> None:
        self._is_busy = False
        if not pending.facts:
            self._disk_is_full(pending)
            return
        self._tell(pending)
        if self.checks_invariants and not self._pending.facts and self.world.chance(0.02):
            self.compare_replay()
        if self._mail or self._pending.facts or self._pending.sends or self._pending.closes:
            self._plan_round()
        self._plan_due()

    def _tell(self, pending: Pending) -> None:
        by_session: dict[int, list[m.Message]] = {}
        for number, message in pending.sends:
            by_session.setdefault(number, []).append(message)
        for number, messages in by_session.items():
            self._send(number, *messages)
        for number in pending.closes:
            session = self.sessions.get(number)
            if session is not None:
                self._end(session)

    def _end(self, session: Session) -> None:
        if self.quirks.hears_closed_sessions and session.is_worker:
            return
        session.is_ending = True
        session.end.close()
        self._left(session)

    # --- a full disk -------------------------------------------------------------------------------------------------

    def _disk_is_full(self, pending: Pending) -> None:
        self.world.tell("server: the disk is full, read-only")
        self._read_only = True
        later, self._pending = self._pending, Pending()
        sorry = "disk full: nothing was accepted"
        for number, seq in pending.askers + later.askers:
            self._send(number, m.Failed(seq=seq, error=sorry))
        for number in pending.closes + later.closes:
            if number in self.sessions:
                self._end(self.sessions[number])
        for session in list(self.sessions.values()):
            if not session.is_worker and (session.is_watching or session.unanswered):
                self._end(session)
        self.engine = self._replayed()
        assert self.program is not None
        self.program.wake(PROBE_SECONDS, self._probe)
        if self._mail:
            self._plan_round()

    def _probe(self) -> None:
        assert self.program is not None
        assert self.engine is not None
        try:
            self.store.probe()
        except DiskFull:
            self.program.wake(PROBE_SECONDS, self._probe)
            return
        self.world.tell("server: the disk has room again")
        self._read_only = False
        for session in list(self.sessions.values()):
            if session.is_worker:
                self._end(session)
        self._opened()
