"""One connection as the server knows it, from the hello to its end.

Rules
- The first message says who it is: a command or a worker, and which protocol it speaks. Whoever speaks another one is
  told both versions and sent away.
- Saying never waits. A peer that has read nothing for a minute while something waits for it is dropped.
- A session ends when its peer hangs up, breaks the protocol or is sent away; its tasks end with it, and the driver is
  told.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import trio

from kueue import __version__, log
from kueue.entrance import Peer
from kueue.errors import Bug, KueueError, ProtocolError
from kueue.net import GOODBYE_SECONDS, MessageStream
from kueue.protocol import codec
from kueue.protocol import messages as m

if TYPE_CHECKING:
    from kueue.server.driver import Driver

UNREAD_SECONDS = 60.0
"""A peer that takes no byte for so long is as good as gone; a stopped command or a worker behind a dead network."""
PRINCIPAL = "operator"
"""Whoever holds the secret may do everything."""

_log = log.logger("server.sessions")


class Session(ABC):
    """What client and worker sessions have in common. `run` lives as long as the connection."""

    is_worker = False
    is_local = False
    """The peer is a process of this account on this machine."""
    secret = ""
    """Fingerprint of the secret that the peer proved; empty at the local socket."""

    def __init__(self, driver: Driver, stream: MessageStream[Any]) -> None:
        self.driver = driver
        self.stream = stream
        self.number = 0
        self.is_welcomed = False
        """A worker that was taken in: its heartbeats are answered as they come."""
        self.is_ending = False
        """Nothing more is heard from it."""
        self.is_watching = False
        """The engine keeps watches for it."""
        self.unanswered: set[int] = set()
        """``seq`` of its questions that change something and have no answer yet."""
        self._end = trio.Event()
        self._backlog_before = 0
        self._unread_since = trio.current_time()

    def say(self, *messages: m.Message) -> bool:
        """Queue messages. False if the connection has ended."""
        if self.stream.is_closed:
            return False
        for message in messages:
            if isinstance(message, m.WorkerWelcome):
                self.is_welcomed = True
            elif self.unanswered:
                self.unanswered.discard(getattr(message, "seq", -1))
        try:
            self.stream.put(messages)
        except Bug as error:
            # One answer larger than any frame: its asker hears of it, nobody else.
            _log.exception("%s: an answer could not be sent", self.stream.name)
            seq = getattr(messages[-1], "seq", None)
            if self.is_worker or seq is None:
                self.stream.drop("was to be sent a message that is too large")
                return False
            self.stream.put([m.Failed(seq=seq, error=str(error))])
        return True

    def deafen(self) -> None:
        """Hear nothing more from this peer; what is still to be said to it may be said."""
        self.is_ending = True

    def end(self) -> None:
        """End the connection after what was said has gone out (2 s at most)."""
        self.is_ending = True
        self._end.set()

    def ask(self, question: m.Message) -> None:
        """Answer a question that changes nothing; called by the driver when what came before it is stored."""
        raise Bug(f"{type(question).__name__} is no message of a worker")

    async def run(self, rest: Sequence[m.Message]) -> None:
        """Until the connection ends. `rest`: what came behind the hello."""
        self.number = self.driver.enter(self)
        failure: KueueError | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._end_when_told, nursery.cancel_scope)
            try:
                await self.serve(nursery, rest)
            except KueueError as error:
                failure = error  # raised below, outside of the nursery, which would wrap it
            finally:
                # Before the nursery closes: whoever the driver knows may be asked, and then starts a task in it.
                self.is_ending = True
                self.driver.leave(self)
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    @abstractmethod
    async def serve(self, nursery: trio.Nursery, rest: Sequence[m.Message]) -> None:
        """Read until the end of the connection; `nursery` is for tasks that end with it."""

    async def _end_when_told(self, scope: trio.CancelScope) -> None:
        await self._end.wait()
        with trio.move_on_after(GOODBYE_SECONDS):
            await self.stream.drained()
        scope.cancel()

    def drop_if_unread(self, now: float) -> None:
        """End the connection if its peer has taken nothing for a minute. Called every few seconds; `now`: trio time."""
        if self.stream.backlog == 0 or self.stream.backlog != self._backlog_before:
            self._backlog_before, self._unread_since = self.stream.backlog, now
        elif now - self._unread_since >= UNREAD_SECONDS:
            self.stream.drop(f"has read nothing for {UNREAD_SECONDS:g} s")


async def greet(driver: Driver, stream: MessageStream[Any], first: Sequence[m.Message], peer: Peer) -> None:
    """All that happens on one connection after its first frame was read. Raises what ended it, for `net` to log."""
    # Here, because both kinds of session are built on this module.
    from kueue.server.client_session import ClientSession  # noqa: PLC0415
    from kueue.server.worker_session import WorkerSession  # noqa: PLC0415

    driver.look_at_claim()  # who comes may look for us by our lock next
    hello, rest = first[0], first[1:]
    vocabulary = m.FromClient if isinstance(hello, m.ClientHello) else m.FromWorker
    stray = next((message for message in rest if not isinstance(message, vocabulary)), None)
    if driver.is_stopping:
        stream.put([m.Sorry(reason="The server is stopping.", lasting=False)])
    elif not isinstance(hello, m.ClientHello | m.WorkerHello):
        stream.put([m.Sorry(reason=f"The first message must be a hello, not {type(hello).__name__}.")])
    elif hello.protocol != m.PROTOCOL:
        sorry = _other_version(hello)
        _log.warning("%s: %s", peer.name, sorry.reason)
        stream.put([sorry])
    elif stray is not None:
        raise ProtocolError(f"A {type(stray).__name__} came behind a {type(hello).__name__}.")
    elif isinstance(hello, m.ClientHello):
        command = ClientSession(driver, stream.speaking(codec.from_client))
        command.is_local, command.secret = peer.uid is not None, peer.secret
        await command.run(rest)
    else:
        # Whether it is taken in is for the engine to decide.
        worker = WorkerSession(driver, stream.speaking(codec.from_worker), hello.name)
        worker.secret = peer.secret
        await worker.run(first)


def _other_version(hello: m.ClientHello | m.WorkerHello) -> m.Sorry:
    who = "The command" if isinstance(hello, m.ClientHello) else f"Worker {hello.name}"
    theirs = f"kueue {hello.version or 'of unknown version'} (protocol {hello.protocol})"
    older = who if hello.protocol < m.PROTOCOL else "the server"
    return m.Sorry(
        reason=f"{who} is {theirs}, the server is kueue {__version__} (protocol {m.PROTOCOL}): they do not understand "
        "each other.",
        hint=f"Upgrade {older[0].lower()}{older[1:]}.",
    )
