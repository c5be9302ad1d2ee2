"""The loop around the engine: messages in, facts to the store, then answers out.

Rules
- All that waits is handled in one round and stored in one commit, in the store's thread; what arrives meanwhile waits
  for the next round. Nothing is said before it is stored.
- Heartbeats are answered the moment they are read, also during a commit and while the disk is full: they are no facts
  and their answers say nothing of the state.
- A commit that fails for want of space throws the round away; the state is rebuilt from the store and the server is
  read-only until the store takes writes again (`outage`).
- A session that the engine closes counts as closed from the moment of the decision: nothing is heard from it or
  answered to it while that decision is being stored.
- Any other failure of the store ends the program.

Theory of operation
    A round is: handle the mail, apply changes of our own tasks, let deadlines pass, place jobs, commit, send, serve
    looks and reads. The engine runs between two awaits, so there are no locks. Before deadlines pass, the readers of
    the sessions get a turn and what they bring is handled first: silence is judged only after listening, and only
    while our lock is where the runners of this host look for it (`claim`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import trio

from kueue import clock, log
from kueue.core.engine import Engine
from kueue.core.facts import FinishedJob
from kueue.core.settings import Settings
from kueue.errors import Bug, DiskFull, KueueError
from kueue.model import Now
from kueue.protocol import messages as m
from kueue.server import journal, outage
from kueue.server.batch import Pending
from kueue.server.desk import Change, Desk, Look, Read
from kueue.server.ledger import Broken, Ledger
from kueue.server.mailbox import Mailbox
from kueue.server.measures import Measures
from kueue.server.output import Outputs
from kueue.server.past import is_long, named, rows
from kueue.server.session import Session
from kueue.server.timekeeper import Timekeeper, slept
from kueue.server.upkeep import Upkeep
from kueue.server.worker_session import WorkerSession
from kueue.storage.store import Store

T = TypeVar("T")

ROUND = 2_000
"""Most messages of one round: the engine then keeps the loop for a tenth of a second at worst."""
MEND_SECONDS = 1.0
UNREAD_STEP_SECONDS = 15.0
WATCHED_PART = 0.75
"""Of the time-out before which a worker can count as silent: enough for three tries to come back after a stall."""
_log = log.logger("server")


class Driver:
    """Owns engine and store. `run` is the only task that touches the store."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        *,
        now: Callable[[], Now] = clock.now,
        slept: Callable[[], float] = slept,
        stands: Callable[[], bool] = lambda: True,
        trouble: Callable[[], str] = lambda: "",
    ) -> None:
        """`stands` and `trouble`: as those of `claim.Claim`."""
        self.started_wall = now().wall
        self.sessions: dict[int, Session] = {}
        self.mailbox = Mailbox(self.wake)
        self.outputs = Outputs(self)
        self.upkeep = Upkeep(self)
        self.measures = Measures()
        self.backing_up = trio.Lock()
        self.backup_threads = trio.CapacityLimiter(6)
        """Three at most for each backup that was given up, for as long as its file server hangs."""
        self.secrets: tuple[str, ...] = ()
        """Fingerprints of the secrets that count, the present one first."""
        self.idle_since = now().steady
        """Steady seconds of the last message or fact."""
        self._now = now
        self._stands = stands
        self._trouble = trouble
        self._timekeeper = Timekeeper(
            self._stalled,
            lambda: self.settings.margin_seconds / 4,
            lambda: self.settings.worker_timeout_seconds * WATCHED_PART,
            lambda: self.engine.next_deadline(self._now()),
            now,
            slept,
        )
        self._ledger = Ledger(store, settings, now, self._deafen)
        self._stopping = ""
        self._busy = False
        self._wake = trio.Event()
        self._left = trio.Event()
        self._desk = Desk()
        self._next_session = 1

    # --- what main asks ----------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        return self._ledger.engine

    @property
    def settings(self) -> Settings:
        return self._ledger.settings

    @property
    def read_only(self) -> str:
        """Why nothing is accepted at the moment; empty: it is."""
        return self._ledger.read_only

    @property
    def claim_trouble(self) -> str:
        """Why no job is given away at the moment, one sentence; empty: silence counts."""
        return self._trouble()

    @property
    def is_rebuilding(self) -> bool:
        """The state is being read from the store; what `engine` shows may be what could not be stored."""
        return self._ledger.is_rebuilding

    @property
    def is_stopping(self) -> bool:
        return bool(self._stopping)

    @property
    def queue_id(self) -> str:
        return self._ledger.store.queue_id

    async def load(self) -> None:
        """Rebuild the state from the store. Raises as `Ledger.rebuild`."""
        await self._ledger.rebuild()
        self.measures.began(self.engine)

    def opened(self) -> None:
        """The listeners stand open: from now on silence counts."""
        self._stands()
        self._ledger.opened()
        self.wake()

    def look_at_claim(self) -> None:
        """Without our lock in its place runners of this host may take us for gone, and lengthen what we wait for."""
        if not self._stands() and not self._ledger.is_rebuilding:
            self.engine.stalled(self._now())

    def stop(self, reason: str) -> None:
        """End `run` after a last commit; from now on nobody is declared silent and nothing is offered."""
        self._stopping = self._stopping or reason
        self.wake()

    def wake(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        """The loop, until `stop`. Raises `StorageError` when the store is beyond help."""
        failure: KueueError | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._timekeeper.run)
                nursery.start_soon(self.upkeep.run)
                nursery.start_soon(self._drop_unread)
                try:
                    while not self._stopping:
                        await self._until_work()
                        await self._round()
                    await self._last_round()
                except KueueError as error:
                    failure = error  # raised below, outside of the nursery, which would wrap it
                nursery.cancel_scope.cancel()
        finally:
            self._ledger.close()
        if failure is not None:
            raise failure

    # --- what sessions tell ------------------------------------------------------------------------------------------

    def enter(self, session: Session) -> int:
        """Take in a session whose hello was read; its number."""
        number = self._next_session
        self._next_session += 1
        self.sessions[number] = session
        return number

    def leave(self, session: Session) -> None:
        """The session is over: its connection is closed or was lost."""
        if self.sessions.pop(session.number, None) is None:
            return
        self.mailbox.drop(session.number)
        self.outputs.gone(session.number)
        self._left.set()
        self._left = trio.Event()
        if not self._ledger.is_rebuilding and not (self._stopping and session.is_worker):
            self._ledger.take(self.engine.session_closed(session.number, self._now()))
            self.wake()

    def post(self, session: Session, messages: Sequence[m.Message]) -> None:
        """What a session has read. Heartbeats are answered at once, the rest waits for the next round."""
        if session.is_ending:
            return
        if session.is_welcomed:
            beats = [message for message in messages if isinstance(message, m.Heartbeat)]
            if beats:
                messages = [message for message in messages if not isinstance(message, m.Heartbeat)]
                for beat in beats:
                    self._beat(session, beat)
        self.mailbox.put(session.number, messages)

    def _beat(self, session: Session, beat: m.Heartbeat) -> None:
        self.look_at_claim()
        if self._ledger.read_only or self._ledger.is_rebuilding:
            session.say(m.HeartbeatAnswer(number=beat.number, lease_seconds=self.settings.lease_seconds))
            return
        turn = self.engine.handle(session.number, beat, self._now(), {})
        if turn.facts or turn.closes:
            self._ledger.take(turn)
            self.wake()
        else:
            for number, message in turn.sends:
                self.send(number, message)

    # --- what tasks ask (see `desk.Desk`) ----------------------------------------------------------------------------

    async def look(self, look: Look[T]) -> T:
        """What `look`, a plain quick function, says of the stored state."""
        if not self._busy and not self._ledger.is_rebuilding and not self._ledger.pending.facts:
            return look(self.engine, self._now())
        waiting = self._desk.look(look)
        self.wake()
        return await waiting.result()

    async def read(self, read: Read[T]) -> T:
        """What `read` says of the store; it runs in the store's thread and may raise `KueueError`."""
        waiting = self._desk.read(read)
        self.wake()
        return await waiting.result()

    async def change(self, change: Change, *, although_full: bool = False) -> None:
        """Store what `change` decides. Raises `DiskFull`; `although_full`: tried even while the server is read-only."""
        waiting = self._desk.change(change, although_full=although_full)
        self.wake()
        await waiting.result()

    async def reload(self, settings: Settings) -> None:
        """New limits and times. Raises `DiskFull` when they would change what is stored and cannot."""
        await self.change(lambda engine, now: engine.reload(settings, now), although_full=True)
        self._ledger.settings = settings

    def renew_secrets(self, secrets: tuple[str, ...]) -> None:
        """From now on these count; whoever is here by one that does not is sent away."""
        self.secrets = secrets
        for session in self.sessions.values():
            if session.secret and session.secret not in secrets:
                session.end()

    def workers_with_old_secret(self) -> tuple[str, ...]:
        """Names of the workers that are here by another secret than the present one, sorted."""
        return tuple(
            sorted(
                session.name
                for session in self.sessions.values()
                if isinstance(session, WorkerSession) and session.secret and session.secret not in self.secrets[:1]
            )
        )

    async def empty(self) -> None:
        """Return when the last session has left."""
        while self.sessions:
            await self._left.wait()

    def clean(self, session: int, question: m.CleanJobs) -> None:
        """Carry out a request to clean, in portions, and answer it; goes on if its client is gone."""
        self.upkeep.ask(session, question)

    def send(self, session: int, *messages: m.Message) -> bool:
        found = self.sessions.get(session)
        return found is not None and found.say(*messages)

    # --- a round -----------------------------------------------------------------------------------------------------

    async def _until_work(self) -> None:
        """Return when there is something to do, or a deadline has come."""
        if self.mailbox or self._desk or not self._ledger.pending.is_empty:
            await trio.lowlevel.checkpoint()
        else:
            now = self._now()
            due = self._ledger.probe_at if self._ledger.read_only else self.engine.next_deadline(now)
            self._timekeeper.expects(due)
            # Not below 5 ms: a deadline that another message has to settle must not keep the processor busy.
            pause = float("inf") if due is None else max(0.005, due - now.steady)
            with trio.move_on_after(pause):
                await self._wake.wait()
        self._wake = trio.Event()

    async def _round(self) -> None:
        ledger = self._ledger
        if ledger.read_only and self._now().steady >= ledger.probe_at and await ledger.probe():
            self._begin_anew()
        self._busy = True
        try:
            await self._drain(ROUND)
            self._apply_changes()
            if not ledger.read_only:
                await self._pass_time()
                ledger.run(lambda: self.engine.settle(self._now()))
            await self._commit()
        except Broken as broken:
            await self._mend(broken.__cause__, broken.offender)
        except Bug as error:
            await self._mend(error, None)
        self._busy = False
        self._desk.serve_looks(self.engine, self._now)
        await self._desk.serve_reads(ledger.store, ledger.in_store)

    async def _drain(self, limit: int) -> None:
        """Handle waiting messages, at most `limit`."""
        mail = self.mailbox.take(limit)
        if not mail:
            return
        past = {row.id: row for row in self._ledger.pending.finished}
        ranges = named([message for _, message in mail], self.engine.state.jobs, self.engine.state.sums.next_job)
        if ranges:
            past.update(await self._ledger.in_store(partial(rows, self._ledger.store, ranges)))
        now = self._now()
        self.idle_since = now.steady
        for at, (number, message) in enumerate(mail):
            session = self.sessions.get(number)
            if session is None or session.is_ending:
                continue
            try:
                self._handle(session, message, now, past)
            except Broken:
                self.mailbox.put_back(mail[at + 1 :])
                raise

    def _handle(self, session: Session, message: m.Message, now: Now, past: dict[int, FinishedJob]) -> None:
        pending = self._ledger.pending
        if session.is_worker:
            if self._ledger.read_only:
                reply = outage.answer(message, self.engine, self.settings, self.queue_id)
                if reply is not None:
                    session.say(reply)
                if isinstance(reply, m.Sorry):
                    session.end()
                return
        elif isinstance(message, m.Submit | m.RemoveJobs | m.HoldJobs | m.ReleaseJobs | m.SetNode):
            is_whole = not isinstance(message, m.Submit) or message.last
            if self._ledger.read_only:
                if is_whole:
                    session.say(outage.refusal(message.seq))
                return
            session.unanswered.add(message.seq)
            if is_whole:
                pending.askers.append((session.number, message.seq))
        elif isinstance(message, m.WatchJobs):
            session.is_watching = True
            if is_long(message, self.engine.state.sums.next_job):
                pending.questions.append((session.number, message))
                return
        else:
            pending.questions.append((session.number, message))
            return
        turn = self._ledger.run(lambda: self.engine.handle(session.number, message, now, past), session.number)
        for row in turn.finished:
            # Later messages of this round may name jobs that it has just finished.
            past[row.id] = row

    async def _pass_time(self) -> None:
        """Let due deadlines act, after all was heard that has arrived."""
        due = self.engine.next_deadline(self._now())
        self._timekeeper.expects(due)
        if due is None or due > self._now().steady:
            return
        # One turn of the loop polls the sockets, one wakes their readers, one lets them post.
        for _ in range(3):
            await trio.lowlevel.checkpoint()
        await self._drain(10 * ROUND)
        self._timekeeper.check()
        self.look_at_claim()
        self._ledger.run(lambda: self.engine.tick(self._now()))

    def _apply_changes(self) -> None:
        while self._desk.changes:
            change, although_full, waiting = self._desk.changes.pop(0)
            if self._ledger.read_only and not although_full:
                waiting.fail(DiskFull(outage.NOTHING_ACCEPTED, hint=outage.HINT))
                continue
            self._ledger.pending.changes.append(waiting)
            self._ledger.run(partial(change, self.engine, self._now()))

    async def _commit(self) -> None:
        began = self._now().steady
        if self._ledger.pending.facts:
            self.idle_since = began
        try:
            stored = await self._ledger.commit()
        except DiskFull as error:
            self._ledger.became_full(error)
            await self._throw_away(DiskFull(outage.NOTHING_ACCEPTED, hint=outage.HINT))
        else:
            if stored.facts:
                self.measures.commit.observe(self._now().steady - began)
            self.measures.stored(stored, self.engine)
            self._tell(stored)

    def _tell(self, stored: Pending) -> None:
        journal.write(stored.facts, stored.remarks)
        by_session: dict[int, list[m.Message]] = {}
        for number, message in stored.sends:
            by_session.setdefault(number, []).append(message)
        for number, messages in by_session.items():
            self.send(number, *messages)
        for number in stored.closes:
            self._end(number)
        for number, question in stored.questions:
            self._ask(number, question)
        for waiting in stored.changes:
            waiting.give(None)

    def _ask(self, number: int, question: m.Message) -> None:
        session = self.sessions.get(number)
        if session is None:
            return
        try:
            session.ask(question)
        except Exception:  # noqa: BLE001  logged whole; what one peer asks must not end the others' server
            _log.exception("a bug: %s cannot be asked a %s", session.stream.name, type(question).__name__)
            session.end()

    # --- when the disk is full, or we have a bug ---------------------------------------------------------------------

    async def _throw_away(self, error: KueueError) -> None:
        """Forget what was decided and not stored, tell who asked for it, and rebuild the state."""
        lost = self._ledger.discard()
        self._ledger.pending.questions = lost.questions
        for number, seq in dict.fromkeys(lost.askers):
            self.send(number, m.Failed(seq=seq, error=str(error), hint=error.hint))
        for waiting in lost.changes:
            waiting.fail(error)
        for number in lost.closes:
            # Nothing more is heard from these already; they begin anew as well.
            self._end(number)
        for session in self.sessions.values():
            # Watches, half submissions and what else is half done live in the lost engine only. The client asks again.
            if not session.is_worker and (session.is_watching or session.unanswered):
                session.end()
        await self._ledger.rebuild()

    def _begin_anew(self) -> None:
        """After a rebuild: every worker is asked for a new hello, and all silence counts from now."""
        for session in self.sessions.values():
            if session.is_worker:
                session.end()
        self.opened()

    async def _mend(self, error: BaseException | None, offender: int | None) -> None:
        """A rule of our own was broken: nothing of this round is stored, and all goes on from what is."""
        _log.error("a bug: this round is thrown away and the state is rebuilt", exc_info=error)
        if offender is not None:
            self._end(offender)
        await self._throw_away(KueueError("The server met a bug of its own; nothing was accepted."))
        if not self._ledger.read_only:
            self._begin_anew()
        # Should it come again at once, the machine and the log shall bear it.
        await trio.sleep(MEND_SECONDS)

    def _deafen(self, number: int) -> None:
        """The engine has decided to close that session."""
        session = self.sessions.get(number)
        if session is not None:
            session.deafen()
            self.mailbox.drop(number)

    def _end(self, number: int) -> None:
        session = self.sessions.get(number)
        if session is not None:
            session.end()

    async def _drop_unread(self) -> None:
        while True:
            await trio.sleep(UNREAD_STEP_SECONDS)
            for session in self.sessions.values():
                session.drop_if_unread(trio.current_time())

    # --- the clock and the end ---------------------------------------------------------------------------------------

    def _stalled(self, why: str) -> None:
        _log.warning("%s: silence of workers counts anew", why)
        if not self._ledger.is_rebuilding:
            self.engine.stalled(self._now())

    async def _last_round(self) -> None:
        if not self._ledger.read_only:
            try:
                await self._drain(ROUND)
                self._apply_changes()
                await self._commit()
            except Broken as broken:
                _log.error("a bug: the last round is not stored", exc_info=broken.__cause__)
        for session in list(self.sessions.values()):
            session.say(m.Goodbye(reason=self._stopping))
            session.end()
        self._desk.close(KueueError(f"The server stops: {self._stopping}"))
