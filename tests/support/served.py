"""The driver with its real sessions and the real engine over memory streams: no process, no socket, any store."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio
import trio.testing

from kueue import entrance, net
from kueue.core.settings import Settings
from kueue.model import MachineLoad, MachineTotals
from kueue.protocol import codec
from kueue.protocol import messages as m
from kueue.server.driver import Driver
from kueue.server.session import greet
from tests.support.server_program import job_range

PATIENCE = 20.0


async def eventually(claim: Callable[[], Any], what: str = "") -> Any:
    """The first true answer of `claim`."""
    deadline = time.monotonic() + PATIENCE
    while not (answer := claim()):
        assert time.monotonic() < deadline, f"never came true: {what or claim}"
        await trio.sleep(0.005)
    return answer


class House:
    """A served driver and those who come to it."""

    def __init__(self, driver: Driver, nursery: trio.Nursery) -> None:
        self.driver = driver
        self._nursery = nursery

    async def _connect(
        self, decoder: codec.Decoder[Any], name: str, *, without_buffer: bool = False, uid: int | None = None
    ) -> tuple[net.MessageStream[Any], trio.Event]:
        pair = trio.testing.lockstep_stream_pair if without_buffer else trio.testing.memory_stream_pair
        ours, theirs = pair()
        self._nursery.start_soon(self._serve, theirs, name, uid)
        connection: tuple[net.MessageStream[Any], trio.Event] = await self._nursery.start(
            self._hold, ours, decoder, name
        )
        return connection

    async def _hold(self, stream: trio.abc.Stream, decoder: codec.Decoder[Any], name: str, task_status: Any) -> None:
        over = trio.Event()
        async with net.messages_over(stream, decoder, name=name, limit=m.FRAME_LIMIT) as messages:
            task_status.started((messages, over))
            await over.wait()

    async def _serve(self, stream: trio.abc.Stream, name: str, uid: int | None) -> None:
        async with net.messages_over(stream, codec.first, name=name, limit=m.FRAME_LIMIT) as messages:
            hello = await messages.receive_first()
            if hello:
                await greet(self.driver, messages, hello, entrance.Peer(name, uid))

    async def client(self, *, without_buffer: bool = False, uid: int | None = None) -> Client:
        """A command; `without_buffer`: what it does not read stays with the server; `uid`: at the local socket."""
        client = Client(*await self._connect(codec.to_client, "client", without_buffer=without_buffer, uid=uid))
        client.say(m.ClientHello())
        await client.hear_a(m.Welcome)
        return client

    async def worker(self, name: str = "w1", *, slots: int = 10, attempts: tuple[Any, ...] = (), welcome: bool = True):
        worker = Worker(*await self._connect(codec.to_worker, name))
        worker.say(
            m.WorkerHello(
                identity=f"identity of {name}",
                name=name,
                machine_id="machine",
                boot_id="boot",
                totals=MachineTotals(slots, slots, 1000),
                load=MachineLoad(),
                attempts=attempts,
            )
        )
        if welcome:
            worker.welcome = await worker.hear_a(m.WorkerWelcome)
        return worker


class Peer:
    """Says and hears messages."""

    def __init__(self, stream: net.MessageStream[Any], over: trio.Event) -> None:
        self.stream = stream
        self._over = over
        self._heard: list[Any] = []

    def say(self, *messages: m.Message) -> None:
        self.stream.put(messages)

    async def hear(self) -> Any:
        """The next message; None at the end of the connection."""
        with trio.fail_after(PATIENCE):
            if not self._heard:
                self._heard = list(await self.stream.receive())
            return self._heard.pop(0) if self._heard else None

    async def hear_a(self, kind: type) -> Any:
        """The next message of that kind; others before it are dropped."""
        while not isinstance(message := await self.hear(), kind):
            assert message is not None, f"the connection ended before a {kind.__name__}"
        return message

    async def end(self) -> None:
        """Wait until the server has ended the connection."""
        while await self.hear() is not None:
            pass

    def close(self) -> None:
        """Hang up after what was said has gone out."""
        self._over.set()


class Client(Peer):
    def __init__(self, stream: net.MessageStream[Any], over: trio.Event) -> None:
        super().__init__(stream, over)
        self.seqs = itertools.count(1)

    def put(self, kind: type[m.Message], **fields: Any) -> int:
        """Ask without waiting; the seq."""
        seq = next(self.seqs)
        if "request_id" in kind.__struct_fields__ and "request_id" not in fields:
            fields["request_id"] = secrets.token_hex(16)
        self.say(kind(seq=seq, **fields))
        return seq

    async def ask(self, kind: type[m.Message], **fields: Any) -> Any:
        """The answer; lists come whole."""
        seq = self.put(kind, **fields)
        parts: list[Any] = []
        while True:
            message = await self.hear()
            assert message is not None, "the connection ended"
            if getattr(message, "seq", None) != seq:
                continue
            parts.append(message)
            if not isinstance(message, (m.JobList, m.JobDetails)) or message.end:
                break
        if len(parts) == 1:
            return parts[0]
        values = {name: getattr(parts[-1], name) for name in parts[-1].__struct_fields__}
        return type(parts[-1])(**{**values, "jobs": tuple(row for part in parts for row in part.jobs)})

    async def submit(self, *argv: str, count: int = 1, **fields: Any) -> list[int]:
        answer = await self.ask(m.Submit, ranges=(job_range(*argv, count=count, **fields),))
        assert isinstance(answer, m.Submitted), answer
        return [job for first, last in answer.ids for job in range(first, last + 1)]

    async def states(self) -> dict[int, str]:
        return {row.id: row.state for row in (await self.ask(m.ListJobs)).jobs}


class Worker(Peer):
    welcome: Any = None

    async def beat(self, number: int = 1) -> m.HeartbeatAnswer:
        self.say(m.Heartbeat(number=number))
        answer = await self.hear_a(m.HeartbeatAnswer)
        assert answer.number == number
        return answer

    def start(self, offer: m.Offer) -> None:
        self.say(m.AttemptStarted(offer=offer.offer, started_wall=time.time()))


@asynccontextmanager
async def serving(store: Any, settings: Settings | None = None, **options: Any) -> AsyncIterator[House]:
    """A driver that runs; it is stopped at the end."""
    driver = Driver(store, settings or Settings(worker_timeout_seconds=60), **options)
    await driver.load()
    driver.opened()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(driver.run)
        yield House(driver, nursery)
        driver.stop("the test is over")
        with trio.fail_after(PATIENCE):
            await driver.empty()
        nursery.cancel_scope.cancel()
