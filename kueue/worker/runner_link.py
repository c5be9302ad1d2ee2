"""The worker's side of its runners: finds them, starts the newest, carries orders to them and events back.

Rules
- A runner is found by its directory and told alive by its lock. One that is alive and does not answer makes its
  attempts ``unknown``; one whose lock is free is dead, and the newest runner buries what it left.
- Orders that a broken connection may have swallowed are repeated or answered (`Refused`) after the next attachment.
- New attempts go to a runner of this release; if there is none that answers, one is started.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import trio

from kueue import places
from kueue.errors import KueueError
from kueue.model import to_os_text
from kueue.worker.attachment import Mute, attach
from kueue.worker.handed_over import Handed, HandedOver, StartRecord, start_records
from kueue.worker.one_runner import Runner
from kueue.worker.orders import (
    Attach,
    Attached,
    AttemptState,
    Detach,
    Event,
    ForgetAttempts,
    Inherit,
    Order,
    Ping,
    Refused,
    SetLease,
    StartAttempt,
    StopOrder,
    WithdrawOrder,
)
from kueue.worker.runner_program import RunnerProgram
from kueue.worker.scope import Scopes

log = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0  # a runner that is well answers within milliseconds; a loaded machine may need seconds
RETRY_SECONDS = 0.05  # between tries to attach, while a spawner takes over for its keeper
LATER_SECONDS = 1.0  # between tries to attach to one that was mute
EVENT_BUFFER = 1000  # the reader of a runner waits for the worker beyond this


class RunnerSet:
    """All runners of one worker. `state_dir` is the worker's own directory on a local disk.

    `restart_command`, `restart_env`: how the runner brings a dead worker back; empty command: it does not.
    `scopes`: where a runner is to be put; None: a new session has to do.
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
        answer_seconds: float = ANSWER_SECONDS,
        linger_seconds: float = 10.0,
    ) -> None:
        self._state = state_dir
        self._program = RunnerProgram(state_dir, identity, scopes=scopes, linger_seconds=linger_seconds)
        self._attach = Attach(
            worker_pid=os.getpid(),
            restart_command=tuple(to_os_text(word) for word in restart_command),
            restart_env=tuple((to_os_text(name), to_os_text(value)) for name, value in (restart_env or {}).items()),
            server_lock_path=to_os_text(server_lock_path) if server_lock_path else None,
            server_lock_seconds=server_lock_seconds,
        )
        self._answer_seconds = answer_seconds
        self._runners: dict[str, Runner] = {}
        self._handed = HandedOver()
        self._lease: SetLease | None = None
        self._mute: set[str] = set()
        """Runners that did not answer when the hello was made: the server may give away what they run."""
        self._launching = trio.Lock()
        self._burying = trio.Lock()
        self._nursery: trio.Nursery | None = None
        self._closing = False
        self._events, self.events = trio.open_memory_channel[Event](EVENT_BUFFER)
        """What the runners say, in the order of each."""

    # -- the worker's calls

    async def open(self, nursery: trio.Nursery) -> None:
        """Attach to all runners there are; returns when each has answered, was silent for too long, or is dead.

        Their tasks live in `nursery` until `close` or its cancellation.
        """
        self._nursery = nursery
        await trio.to_thread.run_sync(self._prepare)
        for path in self._directories():
            self._meet(path)
        runners = list(self._runners.values())
        for runner in runners:
            await runner.settled.wait()
        if self._handed.has_orphans(self._is_alive, await self._start_records()):
            await self._newest()

    async def send(self, order: Order, *, more: bool = False) -> None:
        """Hand an order to the runner it concerns; returns when it is sent, or noted for when the runner answers again.

        `more`: others follow at once, and all are written with the last of them.
        Raises `KueueError` if a new runner is needed and cannot be started.
        """
        try:
            await self._assign(order)
        finally:
            if not more:
                await self._flush()

    async def _assign(self, order: Order) -> None:
        match order:
            case StartAttempt(offer=offer, job=job, queue_id=queue_id, memo=memo):
                known = self._handed.get(offer)
                if known is not None:
                    self._put(known.runner, order)
                    return
                runner = await self._newest()
                line = (queue_id, order.line) if order.line is not None else None
                other = self._handed.elsewhere(line, runner.id) if line is not None else None
                if other is not None:
                    # Two runners know nothing of each other: each would start its own.
                    reason = f"attempt {other}, which it waits for, is with another runner"
                    await self._publish(Refused(offer=offer, reason=reason))
                    return
                state = AttemptState(offer=offer, job=job, queue_id=queue_id, state="queued", memo=memo)
                self._handed[offer] = Handed(state, runner.id, start=order, line=line)
                runner.put(order)
            case SetLease():
                self._lease = order
                for runner in self._runners.values():
                    if runner.id not in self._mute:
                        runner.put(order)
            case StopOrder(offer=offer) | WithdrawOrder(offer=offer):
                known = self._handed.get(offer)
                if known is None:
                    # Whoever starts it later must know that it was withdrawn; nobody has it now.
                    (await self._newest()).put(order)
                    return
                if isinstance(order, StopOrder):
                    known.stop = order
                else:
                    known.withdraw = order
                self._put(known.runner, order)
            case ForgetAttempts(offers=offers):
                by_runner: dict[str, list[int]] = {}
                for offer in offers:
                    known = self._handed.pop(offer, None)
                    if known is not None:
                        by_runner.setdefault(known.runner, []).append(offer)
                for name, mine in by_runner.items():
                    self._put(name, ForgetAttempts(offers=tuple(mine)))
                    await self._dismiss_if_done(self._runners.get(name))
            case Attach() | Inherit() | Detach() | Ping():
                for runner in self._runners.values():
                    runner.put(order)

    def _put(self, runner: str, order: Order) -> None:
        found = self._runners.get(runner)
        if found is not None:
            found.put(order)

    async def _flush(self) -> None:
        for runner in list(self._runners.values()):
            await runner.flush()

    @property
    def up(self) -> int:
        """Runners that answer."""
        return sum(runner.is_well(self._answer_seconds) for runner in self._runners.values())

    def attempts(self) -> tuple[AttemptState, ...]:
        """How every attempt stands that no runner was told to forget; ``unknown`` where the runner does not answer.

        To be asked for each hello: a runner that does not answer now gets no lease before the next.
        """
        self._mute = {runner.id for runner in self._runners.values() if not runner.is_well(self._answer_seconds)}
        return self._handed.states(lambda name: name in self._runners and name not in self._mute)

    async def guard(self) -> bool:
        """Stop, by ourselves, the processes of all attempts that may be given away. True: nothing of them runs."""
        return await self._program.guard()

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

    def _meet(self, path: Path) -> Runner:
        runner = self._runners.get(path.name)
        if runner is None:
            runner = self._runners[path.name] = Runner(path)
            assert self._nursery is not None
            self._nursery.start_soon(self._serve, runner)
            self._nursery.start_soon(self._ping, runner)
        return runner

    async def _serve(self, runner: Runner) -> None:
        """Stay attached to one runner until it is dead."""
        since = trio.current_time()
        while not self._closing:
            try:
                await self._attachment(runner)
                since = trio.current_time()
            except (Mute, OSError, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError) as problem:
                log.debug("runner %s: %s", runner.id, problem)
            runner.answers = False
            runner.connection = None
            if runner.is_dismissed or self._closing:
                return
            if not self._is_alive(runner.id):
                break
            late = trio.current_time() - since > self._answer_seconds
            if late:
                self._handed.learn(runner.id, await self._start_records())
                runner.settled.set()
            await trio.sleep(LATER_SECONDS if late else RETRY_SECONDS)
        if not self._closing:
            await self._bury(runner)

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
                runner.connection = connection
                runner.answers = True
                runner.asked_at = None
                await self._apply_attached(runner, first[0], is_first=True)
                await self._dismiss_if_done(runner)
                for event in first[1:]:
                    await self._hear(runner, event)
                async for batch in batches:
                    runner.asked_at = None
                    runner.answers = True
                    for event in batch:
                        await self._hear(runner, event)
        finally:
            await connection.close()

    async def _dismiss_if_done(self, runner: Runner | None) -> None:
        """A runner of an earlier release gets no new attempts: without any it is of no more use."""
        if runner is None or runner.connection is None or runner.version == self._program.version:
            return
        if self._handed.cares(runner.id):
            return
        runner.is_dismissed = True
        self._runners.pop(runner.id, None)
        await runner.tell(Detach())

    async def _ping(self, runner: Runner) -> None:
        """Ask now and then, so that a runner that has gone mute is noticed. One with nothing in its care may sleep."""
        while not (runner.is_dead or runner.is_dismissed):
            if not self._handed.cares(runner.id):
                await runner.stirred.wait()  # the lease alone comes every few seconds
                continue
            await trio.sleep(self._answer_seconds)
            if self._handed.cares(runner.id) and runner.connection is not None and runner.asked_at is None:
                runner.asked_at = trio.current_time()
                await runner.tell(Ping())

    async def _apply_attached(self, runner: Runner, attached: Attached, *, is_first: bool) -> None:
        """Its word on all its attempts. What we had handed to it and it does not name it never got.

        `is_first`: nothing was sent on this connection before it; later ones decide only about what was buried.
        """
        news = self._handed.counted(runner.id, attached, is_first=is_first)
        runner.settled.set()
        runner.stir()
        for event in news:
            await self._publish(event)
        for order in self._handed.said_again(attached):
            await runner.tell(order)
        if self._lease is not None and runner.id not in self._mute:
            await runner.tell(self._lease)
        runner.buried.set()
        await self._publish(attached)

    async def _hear(self, runner: Runner, event: Event) -> None:
        if isinstance(event, Attached):
            await self._apply_attached(runner, event, is_first=False)
            return
        self._handed.heard(event)
        await self._publish(event)

    async def _publish(self, event: Event) -> None:
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            try:
                self._events.send_nowait(event)
            except trio.WouldBlock:
                await self._events.send(event)

    # -- runners come and go

    async def _newest(self) -> Runner:
        """A runner of this release that answers; one is started if there is none. Raises `KueueError`."""
        found = self._present()
        if found is not None:
            return found
        await self._flush()  # what was put before must not wait for the start of a program
        async with self._launching:
            found = self._present()
            return await self._program.launch(self._met) if found is None else found

    def _present(self) -> Runner | None:
        for runner in self._runners.values():
            if (
                runner.version == self._program.version
                and runner.connection is not None
                and runner.is_well(self._answer_seconds)
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
        self._handed.learn(runner.id, await self._start_records())
        self._runners.pop(runner.id, None)
        runner.settled.set()
        delay = 1.0
        async with self._burying:
            while not self._closing:
                left = self._handed.of(runner.id)
                if not left:
                    return
                log.warning("runner %s is gone with %d attempts", runner.id, len(left))
                try:
                    newest = await self._newest()
                except KueueError as error:
                    log.warning("%s %s", error, error.hint)
                    await trio.sleep(delay)
                    delay = min(60.0, delay * 2)
                    continue
                for known in left:
                    if known.runner == runner.id:
                        known.is_orphan = True
                        known.runner = newest.id
                newest.buried = trio.Event()
                await newest.tell(Inherit())
                with trio.move_on_after(self._answer_seconds):
                    await newest.buried.wait()
                    return
                for known in left:
                    if known.is_orphan:
                        known.runner = runner.id

    # -- the disk

    async def _start_records(self) -> list[StartRecord]:
        return await trio.to_thread.run_sync(start_records, self._state / "spool")

    def _prepare(self) -> None:
        for name in ("runners", "spool"):
            (self._state / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._program.prepare()

    def _directories(self) -> list[Path]:
        folder = self._state / "runners"
        return [path for path in folder.iterdir() if self._is_alive(path.name)] if folder.is_dir() else []

    def _is_alive(self, runner: str) -> bool:
        """Does it hold its lock?"""
        try:
            return places.is_locked(str(self._state / "runners" / runner / "lock"))
        except OSError:
            return False
