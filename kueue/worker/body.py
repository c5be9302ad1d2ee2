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
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import trio

from kueue import clock, log, notify, places, threads
from kueue.model import Place
from kueue.net import MessageStream
from kueue.protocol.messages import (
    AttemptEnded,
    AttemptQueued,
    AttemptStarted,
    FetchedOutput,
    FetchOutput,
    FromWorker,
    Heartbeat,
    HeartbeatAnswer,
    ToWorker,
)
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
from kueue.worker.agent import PLACE_SECONDS, Agent
from kueue.worker.chores import Chores
from kueue.worker.directories import Directories
from kueue.worker.known import Attempt
from kueue.worker.machine import MachineSettings
from kueue.worker.orders import Ended, Order
from kueue.worker.runner_link import RunnerSet
from kueue.worker.senses import Senses
from kueue.worker.spool import Paths, Spool, resolved

GOODBYE_SECONDS = 2.0
FETCH_SECONDS = 8.0
"""Below the server's own patience, so that it hears a reason."""
ENDS_AT_ONCE = 32
"""Ends whose excerpts are read together: at most 8 MiB of output in memory."""
GATHER_SECONDS = 0.01
"""How long ends are gathered while jobs wait in lines at the runner: a twentieth of what waits there."""
ORDERS_AT_ONCE = EVENTS_AT_ONCE = 256
LONGEST_NAP_SECONDS = 60.0
TICK_PAUSE_SECONDS = 0.02
"""Between something that happens and the look at what is due; far below the shortest patience that anybody has."""
LOCK_LOOK_SECONDS = 0.5
LOCK_LEASE_SECONDS = 8.0
"""The lease of the shortest time-out a server may have: whatever server starts next, it gives nothing away sooner."""

_log = log.logger("worker")

T = TypeVar("T")


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
    is_ours: Callable[[], bool] = lambda: True
    """May this worker go on, see `kueue.worker.claim`? If not, it is about to end, and its lease is not renewed."""
    was_welcome: bool = False
    """The present or last session was taken in."""
    sessions: int = 0
    """Sessions that were taken in."""
    _session: Session | None = None
    _nursery: trio.Nursery | None = None
    _lock_was_held: bool = False
    _lock_looked_at: float = -math.inf

    def __post_init__(self) -> None:
        self._wake = trio.Event()
        self._seen_off = trio.Event()
        self._orders_in, self._orders = trio.open_memory_channel[Order](math.inf)
        self._ends_in, self._ends = trio.open_memory_channel["tuple[Session, AttemptEnded]"](math.inf)
        self._directories = Directories(PLACE_SECONDS)
        self._fetches = trio.CapacityLimiter(8)
        self._senses = Senses(self.agent, self.settings, self.spool.root)
        self._chores = Chores(self.agent, self.spool)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """All tasks but the session, which `converse` is."""
        self._senses.measure()
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for task in (
                self._follow_runners,
                self._give_orders,
                self._send_ends,
                self._tick,
                self._senses.sample,
                *self._chores.tasks,
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
        if not self.is_ours():
            await trio.sleep_forever()  # what ends the program ends this
        self._senses.measure()
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

    def _hear(self, messages: Sequence[ToWorker]) -> None:
        now = clock.boottime()
        actions: list[Action] = []
        for message in messages:
            follows = self.agent.hears(message, now)
            actions += follows
            if any(isinstance(action, Close) for action in follows):
                break
        self.perform(actions, wakes=not all(isinstance(message, HeartbeatAnswer) for message in messages))
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

    def perform(self, actions: Iterable[Action], *, wakes: bool = True) -> None:
        """In their order, without waiting; what takes time is queued in the order of its kind.

        `wakes`: something may be due sooner now. The answer to a heartbeat only puts off what is.
        """
        says: list[FromWorker] = []
        session = self._session
        assert self._nursery is not None
        waiting = deque(actions)
        while waiting:
            match action := waiting.popleft():
                case Say(Heartbeat()) if not self.is_ours():
                    pass  # the lease must lapse where another worker may come
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
                case CheckPlace(offer, place) if self._directories.is_known_good(place):
                    self._senses.measure()
                    waiting += self.agent.place_checked(offer, None, clock.boottime())
                case CheckPlace(offer, place):
                    self._nursery.start_soon(self._check, session, offer, place)
                case PauseTrees(offers):
                    _log.warning("the runner did not pause in time: %s", log.keys(stopping=offers))
                    self._chores.hold(offers)
                case ContinueTrees(offers):
                    self._chores.release(offers)
                    self._nursery.start_soon(self._chores.let_go, offers)
                case Fetch(question):
                    self._nursery.start_soon(self._fetch, session, question)
                case DropOutput(offers):
                    self._nursery.start_soon(threads.patiently, self.spool.forget, offers)
                case Close():
                    if session is not None and session.close is None:
                        session.close = action
        if session is not None:
            # The end of a short job goes with its start: one frame there, and one commit.
            session.stream.put(says, can_wait=all(isinstance(one, AttemptStarted | AttemptQueued) for one in says))
            if session.close is not None:
                session.stream.drop()
        if wakes:
            self._wake.set()

    async def _check(self, session: Session | None, offer: int, place: Place) -> None:
        # The first for a directory may wait for ever: the agent does not, and the thread that hangs must stay known.
        problem = await self._directories.problem(place)
        if session is self._session:
            self._senses.measure()
            self.perform(self.agent.place_checked(offer, problem, clock.boottime()))

    async def _give_orders(self) -> None:
        while True:
            batch = await _all_that_wait(self._orders, ORDERS_AT_ONCE)
            for left, order in enumerate(batch, 1 - len(batch)):
                await self.runners.send(order, more=left < 0)

    async def _send_ends(self) -> None:
        """Ends with their excerpts, in their order; read in a thread, because the disk may be slow."""
        while True:
            batch = await _all_that_wait(self._ends, ENDS_AT_ONCE)
            if self.agent.has_more_in_lines and len(batch) < ENDS_AT_ONCE:
                # No work waits for the answer: those that end meanwhile cost no frame and no commit of their own.
                await trio.sleep(GATHER_SECONDS)
                batch += _that_wait(self._ends, ENDS_AT_ONCE - len(batch))
            current = [message for session, message in batch if session is self._session]
            if not current or self._session is None:
                continue
            stream = self._session.stream
            paths = [self._paths(self.agent.attempts.get(message.offer)) or Paths() for message in current]
            await stream.send(await threads.patiently(self._with_excerpts, current, paths))
            self._chores.tell_remark()

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
            answer = await threads.patiently(
                self.spool.fetch, question, paths, abandon_on_cancel=True, limiter=self._fetches
            )
        if session is not None and session is self._session:
            session.stream.put([answer])

    # --- senses ------------------------------------------------------------------------------------------------------

    def reconnect(self, why: str) -> None:
        """End the session, if there is one, for a new one to begin; jobs do not notice."""
        if self._session is not None:
            self._session.close = Close(why)
            self._session.stream.drop()

    def reconfigure(self, settings: MachineSettings) -> None:
        """New limits, from now on."""
        self._senses.reconfigure(settings)
        self._wake.set()

    async def _follow_runners(self) -> None:
        while True:
            actions: list[Action] = []
            try:
                events = await _all_that_wait(self.runners.events, EVENTS_AT_ONCE)
            except trio.EndOfChannel:
                return  # the runners are left to themselves
            for event in events:
                if isinstance(event, Ended):
                    self._senses.ended(event)
                self._senses.measure()
                actions += self.agent.runner_event(event, clock.boottime())
            self.perform(actions)
            self._stir()

    async def _tick(self) -> None:
        watchdog = notify.watchdog_seconds()
        while True:
            self._look_at_the_server_lock()
            self._senses.measure()
            self.perform(self.agent.tick(clock.boottime()))
            if watchdog is not None:
                notify.notify(notify.ALIVE)
            due = self.agent.next_wake()
            nap = LONGEST_NAP_SECONDS if due is None else min(LONGEST_NAP_SECONDS, max(0.0, due - clock.boottime()))
            if watchdog is not None:
                nap = min(nap, watchdog)
            self._wake = trio.Event()
            with trio.move_on_after(nap):
                await self._wake.wait()
                # What happens may bring a new moment, seldom one of now: a burst is looked through once.
                await trio.sleep(TICK_PAUSE_SECONDS)

    def _look_at_the_server_lock(self) -> None:
        """Only a lock that was seen held during a session is known to be that server's."""
        now = clock.steady()
        if not self.server_lock or (self._lock_was_held and now - self._lock_looked_at < LOCK_LOOK_SECONDS):
            return
        self._lock_looked_at = now
        try:
            Path(self.server_lock).stat()  # a lock that is away with its disk says nothing
            is_held = places.is_locked(self.server_lock)
        except OSError:
            return
        if is_held and self.agent.is_welcome:
            self._lock_was_held = True
        elif not is_held and self._lock_was_held:
            self.agent.no_server(clock.boottime() + LOCK_LEASE_SECONDS)

    def _stir(self) -> None:
        """Wakes what has something to do only while attempts live."""
        self._senses.stir()
        self._chores.stir()


async def _all_that_wait(channel: trio.MemoryReceiveChannel[T], limit: int) -> list[T]:
    """At least one, at most `limit`. Raises `trio.EndOfChannel`."""
    return [await channel.receive(), *_that_wait(channel, limit - 1)]


def _that_wait(channel: trio.MemoryReceiveChannel[T], limit: int) -> list[T]:
    found: list[T] = []
    with contextlib.suppress(trio.WouldBlock, trio.EndOfChannel):
        while len(found) < limit:
            found.append(channel.receive_nowait())
    return found
