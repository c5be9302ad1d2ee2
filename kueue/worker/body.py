"""Carries out what the agent decides: over the session, by the runners, on the disk; and tells it what happens.

Rules
- One place decides (`Agent`), and it is called from here only, one input at a time: nothing here waits between an input
  and the queuing of what follows from it.
- What can hang (a user's directory, a file on a dead server, a slow disk) runs in a bounded number of threads and never
  holds up heartbeats, leases or orders.
- Messages of a session are for that session: an answer that comes after its end is dropped, the next hello tells it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import trio

from kueue import clock, log, notify, places
from kueue.errors import KueueError
from kueue.model import Place
from kueue.net import MessageStream
from kueue.protocol.messages import AttemptEnded, FetchedOutput, FetchOutput, FromWorker, Heartbeat, ToWorker
from kueue.worker import machine
from kueue.worker.actions import (
    Action,
    CheckPlace,
    Close,
    ContinueTrees,
    DropOutput,
    Fetch,
    Instruct,
    PauseTrees,
    Say,
)
from kueue.worker.agent import Agent
from kueue.worker.directories import Directories
from kueue.worker.ghost import STEP_SECONDS, LoadOfJobs
from kueue.worker.known import Attempt
from kueue.worker.machine import MachineSettings, Ours
from kueue.worker.orders import Ended, Order, Refused, StartAttempt
from kueue.worker.processes import Trees
from kueue.worker.runner_link import RunnerSet
from kueue.worker.spool import Paths, Spool, resolved

FRESH_SECONDS = 0.1
"""A measurement so young is used again: a burst of offers must not become a burst of looks at the kernel."""
TRIM_SECONDS = 1.0
CLEAN_SECONDS = 600.0
HELD_SECONDS = 1.0
"""Between two looks at trees that the worker itself stopped: the kernel continues orphaned process groups."""
GOODBYE_SECONDS = 2.0
FETCH_SECONDS = 8.0
"""Below the server's own patience, so that it hears a reason."""
ENDS_AT_ONCE = 32
"""Ends whose excerpts are read together: at most 8 MiB of output in memory."""
LONGEST_NAP_SECONDS = 60.0
LOCK_LEASE_SECONDS = 8.0
"""The lease of the shortest time-out a server may have: whatever server starts next, it gives nothing away sooner."""

_log = log.logger("worker")


@dataclass
class Session:
    """One proven connection, while it lasts."""

    stream: MessageStream[ToWorker]
    close: Close | None = None
    """Why it ends, if the agent said so."""


@dataclass
class Body:
    """The worker's hands and senses. `run` never returns by itself."""

    agent: Agent
    runners: RunnerSet
    spool: Spool
    settings: MachineSettings
    server_lock: str = ""
    """The state lock of the server, if that is on this host; empty: it is not."""
    on_welcome: Callable[[], None] = lambda: None
    was_welcome: bool = False
    """The present or last session was taken in."""
    sessions: int = 0
    """Sessions that were taken in."""
    _session: Session | None = None
    _nursery: trio.Nursery | None = None
    _load: LoadOfJobs = field(default_factory=LoadOfJobs)
    _ours: Ours = field(default_factory=Ours)
    _measured_at: float = -math.inf
    _held: set[int] = field(default_factory=set)
    _lock_was_held: bool = False

    def __post_init__(self) -> None:
        self._wake = trio.Event()
        self._busy = trio.Event()
        self._seen_off = trio.Event()
        self._orders_in, self._orders = trio.open_memory_channel[Order](math.inf)
        self._ends_in, self._ends = trio.open_memory_channel["tuple[Session, AttemptEnded]"](math.inf)
        self._directories = Directories()
        self._fetches = trio.CapacityLimiter(8)
        self._use = Trees(self.spool.root)
        self._guard = Trees(self.spool.root)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """All tasks but the session, which `converse` is."""
        self.measure()
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for task in (
                self._follow_runners,
                self._give_orders,
                self._send_ends,
                self._tick,
                self._sample,
                self._trim,
                self._clean,
                self._hold,
            ):
                nursery.start_soon(task)
            task_status.started()

    def begin(self) -> None:
        """Look after what an earlier worker left behind, also while no session can be made."""
        self.agent.begins(self.runners.attempts(), clock.boottime())
        self._wake.set()
        self._stir()

    # --- the session -------------------------------------------------------------------------------------------------

    async def converse(self, stream: MessageStream[ToWorker]) -> Close:
        """One session from hello to its end. The stream is closed by the caller. Errors as `MessageStream.receive`."""
        self.measure()
        self.agent.runners_stand(self.runners.attempts())
        session = self._session = Session(stream)
        try:
            stream.put([self.agent.hello(clock.boottime())])
            self._wake.set()
            while session.close is None:
                messages = await stream.receive()
                if not messages:
                    break
                self._hear(messages)
            return session.close or Close("the server closed the connection")
        finally:
            self._session = None
            self.agent.session_closed()
            self._wake.set()

    def _hear(self, messages: Iterable[ToWorker]) -> None:
        now = clock.boottime()
        actions: list[Action] = []
        for message in messages:
            actions += self.agent.hears(message, now)
            if any(isinstance(action, Close) for action in actions):
                break
        self.perform(actions)
        if self.agent.is_seen_off:
            self._seen_off.set()
        if self.agent.is_welcome and not self.was_welcome:
            self.was_welcome = True
            self.sessions += 1
            self.on_welcome()

    async def say_goodbye(self) -> None:
        """The orderly stop: what was not started goes back, then the server is told."""
        session = self._session
        is_heard = self.agent.is_welcome
        self.perform(self.agent.stop())
        if session is not None and is_heard:
            with trio.move_on_after(GOODBYE_SECONDS):
                # What is offered while we leave would otherwise wait, unanswered, until we are back or count as silent.
                await self._seen_off.wait()
                await session.stream.drained()

    # --- actions -----------------------------------------------------------------------------------------------------

    def perform(self, actions: Iterable[Action]) -> None:
        """In their order, without waiting; what takes time is queued in the order of its kind."""
        says: list[FromWorker] = []
        session = self._session
        assert self._nursery is not None
        for action in actions:
            match action:
                case Say(message):
                    if not isinstance(message, Heartbeat):
                        _log.debug("says %s offer=%s", type(message).__name__, getattr(message, "offer", "-"))
                    if isinstance(message, AttemptEnded):
                        if session is not None:
                            self._ends_in.send_nowait((session, message))
                    else:
                        says.append(message)
                case Instruct(order):
                    self._orders_in.send_nowait(order)
                case CheckPlace(offer, place):
                    self._nursery.start_soon(self._check, session, offer, place)
                case PauseTrees(offers):
                    _log.warning("the runner did not pause in time: %s", log.keys(stopping=offers))
                    self._held.update(offers)
                    self._stir()
                case ContinueTrees(offers):
                    self._held.difference_update(offers)
                    self._nursery.start_soon(self._let_go, offers)
                case Fetch(question):
                    self._nursery.start_soon(self._fetch, session, question)
                case DropOutput(offers):
                    self._nursery.start_soon(trio.to_thread.run_sync, self.spool.forget, offers)
                case Close():
                    if session is not None and session.close is None:
                        session.close = action
        if session is not None:
            session.stream.put(says)
            if session.close is not None:
                session.stream.drop()
        self._wake.set()

    async def _check(self, session: Session | None, offer: int, place: Place) -> None:
        # It may wait for ever: the agent does not, and the thread that hangs must stay known as the one that does.
        problem = await self._directories.problem(place)
        if session is self._session:
            self.measure()
            self.perform(self.agent.place_checked(offer, problem, clock.boottime()))

    async def _give_orders(self) -> None:
        async for order in self._orders:
            try:
                await self.runners.send(order)
            except KueueError as error:
                _log.warning("%s %s", error, error.hint)
                if isinstance(order, StartAttempt):
                    refused = Refused(offer=order.offer, reason=str(error))
                    self.perform(self.agent.runner_event(refused, clock.boottime()))

    async def _send_ends(self) -> None:
        """Ends with their excerpts, in their order; read in a thread, because the disk may be slow."""
        while True:
            batch = [await self._ends.receive()]
            with contextlib.suppress(trio.WouldBlock):
                while len(batch) < ENDS_AT_ONCE:
                    batch.append(self._ends.receive_nowait())
            current = [message for session, message in batch if session is self._session]
            if not current or self._session is None:
                continue
            stream = self._session.stream
            paths = [self._paths(self.agent.attempts.get(message.offer)) or Paths() for message in current]
            await stream.send(await trio.to_thread.run_sync(self._with_excerpts, current, paths))
            self._tell_remark()

    def _with_excerpts(self, ends: list[AttemptEnded], paths: list[Paths]) -> list[AttemptEnded]:
        return [
            AttemptEnded(offer=one.offer, end=self.spool.with_excerpts(one.offer, one.end, path))
            for one, path in zip(ends, paths, strict=True)
        ]

    def _paths(self, attempt: Attempt | None) -> Paths | None:
        if attempt is None:
            return None
        memo = attempt.memo
        return Paths(resolved(memo.stdout, memo.cwd), resolved(memo.stderr, memo.cwd))

    async def _fetch(self, session: Session | None, question: FetchOutput) -> None:
        paths = self._paths(self.agent.attempts.get(question.offer))
        answer = FetchedOutput(token=question.token, offset=question.offset, error="the file does not answer")
        with trio.move_on_after(FETCH_SECONDS):
            answer = await trio.to_thread.run_sync(
                self.spool.fetch, question, paths, abandon_on_cancel=True, limiter=self._fetches
            )
        if session is not None and session is self._session:
            session.stream.put([answer])

    # --- senses ------------------------------------------------------------------------------------------------------

    def measure(self) -> None:
        """Tell the agent how busy the machine is, unless it was told just now."""
        now = clock.steady()
        if now - self._measured_at < FRESH_SECONDS:
            return
        self._measured_at = now
        figures = machine.measure()
        self._ours = Ours(self._load.ghost, self._load.running, self._ours.ram_mb)
        self.agent.measured(machine.load(self.settings, figures, self._ours), machine.totals(self.settings, figures))

    def reconnect(self, why: str) -> None:
        """End the session, if there is one, for a new one to begin; jobs do not notice."""
        if self._session is not None:
            self._session.close = Close(why)
            self._session.stream.drop()

    def reconfigure(self, settings: MachineSettings) -> None:
        """New limits, from now on."""
        self.settings = settings
        self._measured_at = -math.inf
        self.measure()
        self._wake.set()

    async def _follow_runners(self) -> None:
        async for event in self.runners.events:
            if isinstance(event, Ended) and self._runs(event.offer):
                self._load.ended(event.offer, event.end.run_seconds, event.end.cpu_seconds)
            self.measure()
            self.perform(self.agent.runner_event(event, clock.boottime()))
            self._stir()

    async def _tick(self) -> None:
        watchdog = notify.watchdog_seconds()
        while True:
            self._look_at_the_server_lock()
            self.measure()
            self.perform(self.agent.tick(clock.boottime()))
            if watchdog is not None:
                notify.notify(notify.ALIVE)
            due = self.agent.next_wake()
            nap = LONGEST_NAP_SECONDS if due is None else min(LONGEST_NAP_SECONDS, max(0.0, due - clock.boottime()))
            self._wake = trio.Event()
            with trio.move_on_after(nap if watchdog is None else min(nap, watchdog)):
                await self._wake.wait()

    def _look_at_the_server_lock(self) -> None:
        """Only a lock that was seen held during a session is known to be that server's."""
        if not self.server_lock:
            return
        try:
            is_held = places.is_locked(self.server_lock)
        except OSError:
            return
        if is_held and self.agent.is_welcome:
            self._lock_was_held = True
        elif not is_held and self._lock_was_held:
            self.agent.no_server(clock.boottime() + LOCK_LEASE_SECONDS)

    def _runs(self, offer: int) -> bool:
        attempt = self.agent.attempts.get(offer)
        return attempt is not None and not attempt.is_over

    async def _sample(self) -> None:
        """The kernel's step, for our own jobs."""
        before: dict[int, float] = {}
        then = clock.steady()
        while True:
            if not self.agent.attempts and self._load.ghost == 0.0:
                await self._busy.wait()  # an idle worker sleeps
                then = clock.steady()
            await trio.sleep(STEP_SECONDS)
            offers = [one.offer for one in self.agent.attempts.values() if not one.is_over]
            use = await trio.to_thread.run_sync(self._use.use, offers) if offers else {}
            now = clock.steady()
            cores = {
                offer: max(0.0, one.cpu_seconds - before.get(offer, 0.0)) / max(now - then, 1e-3)
                for offer, one in use.items()
                if one.processes and self._runs(offer)
            }
            self._load.step(cores)
            self._ours = Ours(self._load.ghost, self._load.running, sum(one.ram_mb for one in use.values()))
            before, then = {offer: one.cpu_seconds for offer, one in use.items()}, now

    # --- chores ------------------------------------------------------------------------------------------------------

    async def _trim(self) -> None:
        while True:
            running = [one.offer for one in self.agent.attempts.values() if not one.is_over]
            if running:
                await trio.to_thread.run_sync(self.spool.trim, running)
                self._tell_remark()
                await trio.sleep(TRIM_SECONDS)
            else:
                await self._busy.wait()

    def _stir(self) -> None:
        """Wakes the chores that have something to do only while attempts live."""
        self._busy.set()
        self._busy = trio.Event()

    def _tell_remark(self) -> None:
        if self.spool.remark and self.spool.remark != getattr(self, "_told", ""):
            self._told = self.spool.remark
            _log.warning("%s", self.spool.remark)

    async def _clean(self) -> None:
        while True:
            age = self.agent.cleanup_after_seconds
            if age is not None:
                dropped = await trio.to_thread.run_sync(self.spool.clean, age, set(self.agent.attempts))
                if dropped:
                    _log.info("dropped the kept output of %d attempts by age", dropped)
            await trio.sleep(CLEAN_SECONDS if age is not None else HELD_SECONDS)

    async def _hold(self) -> None:
        """What the guard stopped stays stopped."""
        while True:
            if self._held:
                await trio.to_thread.run_sync(self._guard.stop, set(self._held))
                self._held &= {one.offer for one in self.agent.attempts.values() if not one.is_over}
                await trio.sleep(HELD_SECONDS)
            else:
                await self._busy.wait()

    async def _let_go(self, offers: tuple[int, ...]) -> None:
        await trio.to_thread.run_sync(self._guard.let_go, offers)
