"""The worker's side of its runners: finds them, starts the newest, carries orders to them and events back.

Rules
- A runner is found by its directory and told alive by its lock. One that is alive and does not answer makes its
  attempts ``unknown``; one whose lock is free is dead, and the newest runner buries what it left.
- Orders that a broken connection may have swallowed, and those for an attempt that a runner has still to take in, are
  repeated or answered (`Refused`) after its next `Attached`.
- New attempts go to a runner of this release; if there is none that answers, one is started. What needs it waits for it
  by itself: leases, and orders to other runners, do not.
- An attempt of a dead runner is gone only when the newest has said what it took in, does not name it, and there is no
  record of it: a runner whose start took too long may be there by now, and have taken it in itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import trio

from kueue import threads
from kueue.errors import KueueError
from kueue.model import to_os_text
from kueue.worker.attachment import Attachment, Mute, attach
from kueue.worker.handed_over import Handed, HandedOver
from kueue.worker.one_runner import Runner
from kueue.worker.orders import (
    Attach,
    Attached,
    AttemptState,
    Detach,
    Event,
    ForgetAttempts,
    Inherit,
    News,
    Order,
    PauseDone,
    Ping,
    ProvenStill,
    Refused,
    SetLease,
    StartAttempt,
    StopOrder,
    WithdrawOrder,
)
from kueue.worker.runner_disk import RunnerDisk, once_readable
from kueue.worker.runner_program import RunnerProgram
from kueue.worker.runner_watch import RunnerWatch
from kueue.worker.scope import Scopes

log = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0  # a runner that is well answers within milliseconds; a loaded machine may need seconds
RETRY_SECONDS = 0.05  # between tries to attach, while a spawner takes over for its keeper
LATER_SECONDS = 1.0  # between tries to attach to one that was mute, or to have another take in what is left
NOT_OURS = "this worker has lost its directory"
EVENT_BUFFER = 1000  # the reader of a runner waits for the worker beyond this


class RunnerSet:
    """All runners of one worker. `state_dir` is the worker's own directory on a local disk.

    `restart_command`, `restart_env`: how the runner brings a dead worker back; empty command: it does not.
    `scopes`: where a runner is to be put; None: a new session has to do. `is_local`: as of `RunnerProgram`.
    `is_ours`: may this worker have jobs started there, see `kueue.worker.claim`? `on_trouble`: see `RunnerWatch`.
    """

    def __init__(
        self,
        state_dir: Path,
        identity: str,
        *,
        restart_command: Sequence[str] = (),
        restart_env: Mapping[str, str] | None = None,
        server_lock_path: str | None = None,
        server_lock_seconds: float = 0.0,
        scopes: Scopes | None = None,
        is_local: bool = True,
        is_ours: Callable[[], bool] = lambda: True,
        on_trouble: Callable[[str], None] = lambda _: None,
        answer_seconds: float = ANSWER_SECONDS,
        linger_seconds: float = 10.0,
    ) -> None:
        self._disk = RunnerDisk(state_dir)
        self._program = RunnerProgram(
            state_dir, identity, scopes=scopes, linger_seconds=linger_seconds, is_local=is_local
        )
        self._attach = Attach(
            worker_pid=os.getpid(),
            restart_command=tuple(to_os_text(word) for word in restart_command),
            restart_env=tuple((to_os_text(name), to_os_text(value)) for name, value in (restart_env or {}).items()),
            server_lock_path=to_os_text(server_lock_path) if server_lock_path else None,
            server_lock_seconds=server_lock_seconds,
        )
        self._is_ours = is_ours
        self._answer_seconds = answer_seconds
        self._runners: dict[str, Runner] = {}
        self._handed = HandedOver()
        self._watch = RunnerWatch(self._handed, self._disk, answer_seconds, self._publish, on_trouble)
        self._waiting: deque[StartAttempt | StopOrder | WithdrawOrder] = deque()
        """Orders for the newest runner, while it is being started."""
        self._lease: SetLease | None = None
        self._mute: set[str] = set()
        """Runners that get no lease: the server may give away what they run, since the hello could not tell of it."""
        self._named: set[int] | None = None
        """Attempts of which the hello told how they stand, and those handed over since; None: no hello yet."""
        self._launching = trio.Lock()
        self._burying = trio.Lock()
        self._nursery: trio.Nursery | None = None
        self._closing = False
        self._events, self.events = trio.open_memory_channel[News](EVENT_BUFFER)
        """What the runners say, in the order of each."""

    # -- the worker's calls

    async def open(self, nursery: trio.Nursery) -> None:
        """Attach to all runners there are; returns when each has answered, was silent for too long, or is dead.

        What dead ones left is ``unknown`` while no runner can be started that would take it in.
        Their tasks live in `nursery` until `close` or its cancellation.
        """
        self._nursery = nursery
        try:
            await threads.patiently(self._program.prepare)
        except KueueError as error:
            log.warning("%s %s", error, error.hint)
        await once_readable(self._meet_all)
        records = await once_readable(self._disk.records)
        dead = self._handed.dead(self._disk.is_alive, records)
        for runner in dead:
            self._handed.learn(runner, records)
        await once_readable(self._meet_all)  # what was no more dead when we looked
        for number, runner in enumerate(dead):
            if not await self._has_passed_on(runner):
                for left in dead[number:]:
                    nursery.start_soon(self._pass_on, left, LATER_SECONDS)
                break

    async def send(self, order: Order, *, more: bool = False) -> None:
        """Hand an order to the runner it concerns; returns when it is on its way, or noted for when the runner answers
        again.

        `more`: others follow at once, and all are written with the last of them.
        A start for which a new runner is needed that cannot be started is `Refused`.
        """
        try:
            await self._assign(order)
        finally:
            if not more:
                self._flush()

    async def _assign(self, order: Order) -> None:
        match order:
            case StartAttempt() | StopOrder() | WithdrawOrder():
                if not self._hand_on(order):
                    await self._give_newest(order)
            case SetLease():
                self._lease = order
                for runner in self._runners.values():
                    if runner.id not in self._mute:
                        runner.put(order)
            case ForgetAttempts(offers=offers):
                by_runner: dict[str, list[int]] = {}
                for offer in offers:
                    known = self._handed.pop(offer, None)
                    if known is not None:
                        by_runner.setdefault(known.runner, []).append(offer)
                for name, mine in by_runner.items():
                    self._put(name, ForgetAttempts(offers=tuple(mine)))
                    self._dismiss_if_done(self._runners.get(name))
            case Attach() | Inherit() | Detach() | Ping():
                for runner in self._runners.values():
                    runner.put(order)

    def _hand_on(self, order: StartAttempt | StopOrder | WithdrawOrder) -> bool:
        """To the runner that has this attempt; False: none has. An orphan's new one is told when it has taken it in:
        until then it would answer that there is none.
        """
        known = self._handed.get(order.offer)
        if known is None:
            return False
        if isinstance(order, StopOrder):
            known.stop = order
        elif isinstance(order, WithdrawOrder):
            known.withdraw = order
        if not known.is_orphan:
            self._put(known.runner, order)
        return True

    async def _give_newest(self, order: StartAttempt | StopOrder | WithdrawOrder) -> None:
        """Also behind what waits already: an order to stop must not overtake the one to start. One to withdraw what
        nobody has: whoever starts it later must know.
        """
        runner = None if self._waiting else self._present()
        if runner is not None:
            await self._give(runner, order)
            return
        self._waiting.append(order)
        if len(self._waiting) == 1:
            assert self._nursery is not None
            self._nursery.start_soon(self._give_what_waits)

    async def _give_what_waits(self) -> None:
        """More may come meanwhile, and the runner may die: what a dead one is given after its burial nobody answers."""
        try:
            while self._waiting:
                runner = await self._newest()
                while self._waiting and not runner.is_dead:
                    await self._give(runner, self._waiting[0])
                    self._waiting.popleft()
        except KueueError as error:
            log.warning("%s %s", error, error.hint)
            waiting, self._waiting = self._waiting, deque()
            for order in waiting:
                if isinstance(order, StartAttempt):
                    await self._publish(Refused(offer=order.offer, reason=str(error)))
        self._flush()

    async def _give(self, runner: Runner, order: StartAttempt | StopOrder | WithdrawOrder) -> None:
        if self._hand_on(order):  # one to end what has waited with it
            return
        if isinstance(order, StartAttempt):
            offer, queue_id = order.offer, order.queue_id
            if not self._is_ours():
                await self._publish(Refused(offer=offer, reason=NOT_OURS))
                return
            line = (queue_id, order.line) if order.line is not None else None
            other = self._handed.elsewhere(line, runner.id) if line is not None else None
            if other is not None:
                # Two runners know nothing of each other: each would start its own.
                reason = f"attempt {other}, which it waits for, is with another runner"
                await self._publish(Refused(offer=offer, reason=reason))
                return
            state = AttemptState(offer=offer, job=order.job, queue_id=queue_id, state="queued", memo=order.memo)
            self._handed[offer] = Handed(state, runner.id, start=order, line=line)
            if self._named is not None:
                self._named.add(offer)
        runner.put(order)

    def _put(self, runner: str, order: Order) -> None:
        found = self._runners.get(runner)
        if found is not None:
            found.put(order)

    def _flush(self) -> None:
        for runner in self._runners.values():
            if runner.connection is not None:
                self._write(runner.connection)

    def _write(self, connection: Attachment) -> None:
        """Nobody waits for a runner that takes nothing for a while."""
        if not connection.write_some():
            assert self._nursery is not None
            self._nursery.start_soon(connection.flush)

    @property
    def up(self) -> int:
        """Runners that answer."""
        return sum(runner.is_well(self._answer_seconds) for runner in self._runners.values())

    def attempts(self) -> tuple[AttemptState, ...]:
        """How every attempt stands that no runner was told to forget; ``unknown`` where the runner does not answer.

        To be asked for each hello: a runner that does not answer now gets no lease before the next.
        """
        self._mute = {runner.id for runner in self._runners.values() if not runner.is_well(self._answer_seconds)}
        states = self._handed.states(lambda name: name in self._runners and name not in self._mute)
        self._named = {state.offer for state in states if state.state != "unknown"}
        return states

    async def close(self, *, orderly: bool = True) -> None:
        """Leave the runners to themselves. `orderly`: they shall not bring this worker back."""
        self._closing = True
        for runner in self._runners.values():
            connection = runner.connection
            if connection is not None:
                if orderly:
                    with trio.move_on_after(1.0):
                        await runner.tell(Detach())
                await connection.close()
        await self._events.aclose()

    # -- one runner

    async def _meet_all(self) -> None:
        """Attach to the living runners that we do not know: at the start all, later one whose start took too long.

        Raises `KueueError`.
        """
        fresh = [self._meet(path) for path in self._disk.living() if path.name not in self._runners]
        for runner in fresh:
            await runner.settled.wait()

    def _meet(self, path: Path) -> Runner:
        runner = self._runners.get(path.name)
        if runner is None:
            runner = self._runners[path.name] = Runner(path)
            assert self._nursery is not None
            self._nursery.start_soon(self._serve, runner)
            self._nursery.start_soon(self._watch.over, runner)
        return runner

    async def _serve(self, runner: Runner) -> None:
        """Stay attached to one runner until it is dead."""
        since = trio.current_time()
        while self._goes_on():
            try:
                await self._attachment(runner)
            except (Mute, OSError, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError) as problem:
                log.debug("runner %s: %s", runner.id, problem)
            if runner.connection is not None:  # it was heard until now
                since = trio.current_time()
            runner.answers = False
            runner.connection = None
            if runner.is_dismissed or not self._goes_on() or not self._disk.is_alive(runner.id):
                break
            late = trio.current_time() - since > self._answer_seconds
            if late:
                records = await once_readable(self._disk.records)
                self._handed.learn(runner.id, records)
                for event in self._handed.ended_since(runner.id, records):
                    await self._publish(event)
                runner.settled.set()
                await self._watch.is_mute(runner)
            await trio.sleep(LATER_SECONDS if late else RETRY_SECONDS)
        if self._goes_on() and not runner.is_dismissed:
            await self._bury(runner)
        runner.settled.set()

    def _goes_on(self) -> bool:
        """A second worker of this directory takes the runners over: they are not taken from it again."""
        return not self._closing and self._is_ours()

    async def _attachment(self, runner: Runner) -> None:
        """One connection from attach to its end. Raises `Mute` and the errors of sockets."""
        connection = await attach(runner.path, self._answer_seconds)
        try:
            async with contextlib.aclosing(connection.events()) as batches:
                is_newest = runner.version in ("", self._program.version)
                connection.put(self._attach if is_newest else msgspec.structs.replace(self._attach, restart_command=()))
                with trio.fail_after(self._answer_seconds):
                    await connection.flush()
                    first: list[Event] = await anext(batches, [])
                if not first or not isinstance(first[0], Attached):
                    raise Mute("it did not answer")
                runner.version = first[0].version
                runner.keeper = first[0].pid
                runner.connection = connection
                await self._watch.answers(runner)
                await self._apply_attached(runner, first[0], is_first=True)
                self._dismiss_if_done(runner)
                for event in first[1:]:
                    await self._hear(runner, event)
                async for batch in batches:
                    await self._watch.answers(runner)
                    for event in batch:
                        await self._hear(runner, event)
        finally:
            await connection.close()

    def _dismiss_if_done(self, runner: Runner | None) -> None:
        """A runner of an earlier release gets no new attempts: without any it is of no more use."""
        if runner is None or runner.connection is None or runner.version == self._program.version:
            return
        if self._handed.cares(runner.id):
            return
        runner.is_dismissed = True
        self._runners.pop(runner.id, None)
        runner.put(Detach())
        self._write(runner.connection)

    async def _apply_attached(self, runner: Runner, attached: Attached, *, is_first: bool) -> None:
        """Its word on all its attempts. What we had handed to it and it does not name it never got.

        `is_first`: nothing was sent on this connection before it; later ones answer an `Inherit` on it.
        """
        news = self._handed.counted(runner.id, attached, is_first=is_first)
        if not is_first:
            runner.buried.set()
        runner.is_leaving = attached.leaving
        runner.settled.set()
        runner.stir()
        for event in news:
            await self._publish(event)
        for order in self._handed.said_again(attached):
            await runner.tell(order)
        if not self._are_named(attached):
            # It was found after the hello, or has taken in what a dead one left: the next hello comes at once.
            self._mute.add(runner.id)
        if self._lease is not None and runner.id not in self._mute:
            await runner.tell(self._lease)
        await self._publish(attached)

    def _are_named(self, attached: Attached) -> bool:
        """Could the hello tell of all that lives there?"""
        named = self._named
        return named is None or all(one.offer in named or one.state in {"ended", "gone"} for one in attached.attempts)

    async def _hear(self, runner: Runner, event: Event) -> None:
        if isinstance(event, Attached):
            await self._apply_attached(runner, event, is_first=False)
            return
        if isinstance(event, PauseDone):
            still = self._handed.waiting(runner.id)
            await self._publish(ProvenStill(deadline_boottime=event.deadline_boottime, offers=still))
        if isinstance(event, Refused):
            runner.is_leaving = runner.is_leaving or event.leaving
        self._handed.heard(event)
        await self._publish(event)

    async def _publish(self, event: News) -> None:
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            try:
                self._events.send_nowait(event)
            except trio.WouldBlock:
                await self._events.send(event)

    # -- runners come and go

    async def _newest(self) -> Runner:
        """A runner of this release that answers; one is started if there is none. Raises `KueueError`."""
        async with self._launching:
            if not self._is_ours():
                raise KueueError(f"No runner is started: {NOT_OURS}.")
            if self._present() is None:
                await self._meet_all()
            found = self._present()
            return await self._program.launch(self._met) if found is None else found

    def _present(self) -> Runner | None:
        for runner in self._runners.values():
            if (
                runner.version == self._program.version
                and runner.connection is not None
                and runner.is_well(self._answer_seconds)
                and not runner.is_leaving
            ):
                return runner
        return None

    async def _met(self, folder: Path) -> Runner:
        runner = self._meet(folder)
        await runner.settled.wait()
        if runner.connection is None:
            raise KueueError("The new runner does not answer.", hint=f"{folder}/log may say why.")
        return runner

    async def _bury(self, runner: Runner) -> None:
        """The runner is dead. The newest takes in what it left; what has no record was never started."""
        runner.is_dead = True
        runner.stir()
        await self._watch.is_dead(runner)
        self._handed.learn(runner.id, await once_readable(self._disk.records))
        self._runners.pop(runner.id, None)
        runner.settled.set()
        await self._pass_on(runner.id)

    async def _pass_on(self, runner: str, begin_after: float = 0.0) -> None:
        """Until nothing is left of what that runner had in its care. It is dead."""
        delay = LATER_SECONDS
        await trio.sleep(begin_after)
        while self._goes_on() and not await self._has_passed_on(runner):
            await trio.sleep(delay)
            delay = min(60.0, delay * 2)

    async def _has_passed_on(self, runner: str) -> bool:
        """One try to have the newest take in what a dead one left. True: nothing is left."""
        async with self._burying:
            try:
                await self._meet_all()
                left = self._handed.of(runner)
                if not left or runner in self._runners:  # it lives after all, and looks after them itself
                    return True
                log.warning("runner %s is gone with %d attempts", runner, len(left))
                newest = await self._newest()
            except KueueError as error:
                log.warning("%s %s", error, error.hint)
                return False
            left = self._handed.of(runner)  # one that has just been started takes them in by itself
            for one in left:
                one.is_orphan = True
                one.runner = newest.id
            newest.buried = trio.Event()
            await newest.tell(Inherit(attempts=tuple(one.state for one in left if not one.is_over)))
            with trio.move_on_after(self._answer_seconds):
                await newest.buried.wait()
            if newest.buried.is_set():
                for event in self._handed.left_over(left, await once_readable(self._disk.records)):
                    await self._publish(event)
            for one in left:
                if one.is_orphan:
                    one.runner = runner
            return not self._handed.of(runner)
