"""Connections under trio: streams of messages over TLS or a local socket, and the way to a server.

Sending never waits: `MessageStream.put` queues, one task per connection writes. A peer that does not read is dropped
when its backlog is too long; who can leave something out looks at `backlog` first.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar, cast

import trio

from kueue import identity, threads
from kueue.errors import KueueError, ProtocolError, Refused, Unreachable, UserError
from kueue.protocol import codec
from kueue.protocol.messages import FRAME_LIMIT, FRAME_LIMIT_BEFORE_HELLO, Message

CONNECT_SECONDS = 10.0
GOODBYE_SECONDS = 2.0
"""How long the last words may take when a connection is closed in good order."""
BACKLOG_LIMIT = 64 * 1024 * 1024
"""Bytes queued for one peer above which it counts as one that does not read: four of the largest frames."""
COMPANY_SECONDS = 0.005
"""How long what can wait waits for company: a short job begins and ends within it."""

_READ_BYTES = 256 * 1024

_log = logging.getLogger("kueue.net")

M = TypeVar("M")
N = TypeVar("N")


# --- a stream of messages ---------------------------------------------------------------------------------------------


class MessageStream(Generic[M]):
    """Messages in and out over one connection. Made by `messages_over`, which runs its writer."""

    def __init__(
        self, stream: trio.abc.Stream, decoder: codec.Decoder[M], *, name: str, limit: int, backlog_limit: int
    ) -> None:
        self.name = name
        """Who is at the other end, for the log."""
        self.backlog = 0
        """Bytes that are queued or being written."""
        self._stream = stream
        self._decoder: codec.Decoder[Any] = decoder
        self._reader = codec.FrameReader(limit)
        self._bodies: list[bytes] = []
        self._backlog_limit = backlog_limit
        self._queue: list[bytes | bytearray] = []
        self._work = trio.Event()
        self._hurry = trio.Event()
        self._less = trio.Event()
        self._closed = False
        self._writing = trio.CancelScope()

    def __repr__(self) -> str:
        return f"<MessageStream {self.name}>"

    @property
    def is_closed(self) -> bool:
        """Nothing more will be sent; `receive` gives what has come and then the end."""
        return self._closed

    def speaking(self, decoder: codec.Decoder[N], limit: int = FRAME_LIMIT) -> MessageStream[N]:
        """The same stream, from now on with another vocabulary and frame limit: used once, after the hello."""
        self._decoder = decoder
        self._reader.limit = limit
        return cast("MessageStream[N]", self)

    def put(self, messages: Sequence[Message], *, can_wait: bool = False) -> None:
        """Queue messages, in order, without waiting; after the end of the connection they are dropped.

        `can_wait`: nobody waits for them, so they may stay some milliseconds for the next ones to go with them.
        A backlog above the limit drops the connection.
        """
        if self._closed or not messages:
            return
        frame = codec.encode(messages)
        self._queue.append(frame)
        self.backlog += len(frame)
        if self.backlog > self._backlog_limit:
            self.drop(f"does not read: {self.backlog} bytes wait for it")
        self._work.set()
        if not can_wait:
            self._hurry.set()

    async def send(self, messages: Sequence[Message], below: int = 1024 * 1024) -> None:
        """Queue messages and wait until less than `below` bytes are waiting; returns at the end of the connection."""
        self.put(messages)
        await self.drained(below)

    async def drained(self, below: int = 1) -> None:
        """Wait until less than `below` bytes are waiting to be written, or the connection has ended."""
        await trio.lowlevel.checkpoint()
        while self.backlog >= below and not self._closed:
            await self._less.wait()

    async def receive(self) -> list[M]:
        """All messages that have come, at least one; empty at the end of the connection, whoever ended it.

        Raises `ProtocolError` for what the peer may not send, `Unreachable` for a broken connection, `Refused` when
        the peer does not accept our certificate. The connection is of no use after any of them.
        """
        while True:
            bodies, self._bodies = self._bodies, []
            messages = self._decoder.decode_all(bodies)
            if messages:
                await trio.lowlevel.checkpoint()
                return messages
            if not await self._fill():
                return []

    async def receive_first(self) -> list[M]:
        """The messages of the first frame alone: what follows may need another vocabulary. Errors as `receive`."""
        while not self._bodies:
            if not await self._fill():
                return []
        return self._decoder.decode(self._bodies.pop(0))

    async def _fill(self) -> bool:
        """Read once; False at the end."""
        try:
            chunk = await self._stream.receive_some(_READ_BYTES)
        except trio.ClosedResourceError:
            return False
        except trio.BrokenResourceError as error:
            if self._closed:
                return False
            raise _broken(error, self.name) from error
        if not chunk:
            if not self._reader.is_between_frames:
                raise ProtocolError("The connection ended in the middle of a frame.")
            return False
        self._bodies += self._reader.feed(chunk)
        return True

    def drop(self, reason: str = "") -> None:
        """End the connection at once; what is queued is lost. A `reason` ("it `reason`") goes to the log."""
        if not self._closed:
            self._closed = True
            self._less.set()
            if reason:
                _log.info("%s: connection dropped: it %s", self.name, reason)
            self._writing.cancel()

    async def write(self) -> None:
        """The writer: runs until the connection ends. All that waits goes out in one call."""
        try:
            with self._writing:
                while True:
                    if not self._queue:
                        self._work = trio.Event()
                        await self._work.wait()
                    if not self._hurry.is_set():
                        with trio.move_on_after(COMPANY_SECONDS):
                            await self._hurry.wait()
                    self._hurry = trio.Event()
                    queue, self._queue = self._queue, []
                    data = queue[0] if len(queue) == 1 else b"".join(queue)
                    await self._stream.send_all(data)
                    self.backlog -= len(data)
                    self._less.set()
                    self._less = trio.Event()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the reader meets the same end and tells
        finally:
            self._closed = True
            self._less.set()
            # Also wakes a reader: without a writer the connection is of no use.
            await trio.aclose_forcefully(self._stream)


def _broken(error: trio.BrokenResourceError, name: str) -> KueueError:
    cause = error.__cause__
    if isinstance(cause, ssl.SSLError) and "ALERT" in (cause.reason or "").upper():
        # In TLS 1.3 a client is refused only after its own handshake is done: the alert comes with the first read.
        return _refused()
    return Unreachable(f"The connection to {name} broke: {cause or str(error) or 'closed by the other side'}.")


def _refused() -> Refused:
    return Refused(
        identity.AUTHENTICATION_FAILED,
        hint="The shared_secret of this machine and of the server must be equal.",
    )


@asynccontextmanager
async def messages_over(
    stream: trio.abc.Stream,
    decoder: codec.Decoder[M],
    *,
    name: str,
    limit: int = FRAME_LIMIT_BEFORE_HELLO,
    backlog_limit: int = BACKLOG_LIMIT,
) -> AsyncIterator[MessageStream[M]]:
    """A message stream over any connection. On leaving in good order what is queued is still sent, for two seconds.

    The connection is closed in any case. An exception of the block comes out as it is, not in a group.
    """
    messages = MessageStream(stream, decoder, name=name, limit=limit, backlog_limit=backlog_limit)
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(messages.write)
        try:
            yield messages
        except Exception as error:  # noqa: BLE001  raised again below, outside of the nursery, which would wrap it
            failure = error
        with trio.move_on_after(GOODBYE_SECONDS):
            await messages.drained()
        messages.drop()
    if failure is not None:
        raise failure


def keep_alive(stream: trio.SocketStream) -> None:
    """Notice a vanished peer within about two minutes: laptops close, cables are pulled, firewalls forget."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # Milliseconds after which sent bytes without an answer end the connection (tcp(7)); the default is 15 minutes.
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 120_000)


def name_of(stream: trio.SocketStream) -> str:
    try:
        address = stream.socket.getpeername()
    except OSError:
        return "a peer that is gone"
    return _at(address[0], address[1]) if isinstance(address, tuple) else "local socket"


def _at(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# --- going to the server ----------------------------------------------------------------------------------------------


@asynccontextmanager
async def connect_tls(
    host: str, port: int, identities: Sequence[identity.Identity], decoder: codec.Decoder[M]
) -> AsyncIterator[MessageStream[M]]:
    """A proven connection to the server; the first frame limit is the small one: call `speaking` after the welcome.

    Each identity is tried in turn. Raises `Unreachable` naming host and port, or `Refused` ("Authentication failed!");
    also `MessageStream.receive` may raise `Refused` before the welcome.
    """
    if not identities:
        raise _refused()
    for present in identities:
        secure = await _handshake(host, port, present)
        if secure is not None:
            break
    else:
        raise _refused()
    async with messages_over(secure, decoder, name=_at(host, port)) as messages:
        yield messages


async def _dialled(host: str, port: int) -> trio.SocketStream:
    stream = await trio.open_tcp_stream(host, port)
    try:
        if stream.socket.getsockname() == stream.socket.getpeername():
            # Nobody listens, and the kernel has given our own end that very port (RFC 9293, 3.5).
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    except OSError:
        await trio.aclose_forcefully(stream)
        raise
    return stream


async def _handshake(host: str, port: int, present: identity.Identity) -> trio.SSLStream[trio.SocketStream] | None:
    """The connection, or None when the server holds another secret."""
    where = _at(host, port)
    with trio.move_on_after(CONNECT_SECONDS):
        try:
            with threads.wanted("name look-up"):
                stream = await _dialled(host, port)
        except (OSError, UnicodeError, ValueError, UserError) as error:
            raise Unreachable(
                f"Cannot connect to the server at {where}: {_reason(error)}.",
                hint="Is kueue_server running there? See server_name and server_port in the settings.",
            ) from error
        try:
            keep_alive(stream)
            secure = trio.SSLStream(
                stream, present.client_context(), server_hostname=present.server_hostname, https_compatible=True
            )
            await secure.do_handshake()
            identity.check_peer(secure.getpeercert(binary_form=True), [present])
        except BaseException as error:
            await trio.aclose_forcefully(stream)
            if isinstance(error, Refused) or isinstance(error.__cause__, ssl.SSLCertVerificationError):
                return None
            if isinstance(error, (OSError, trio.BrokenResourceError)):
                raise Unreachable(
                    f"The server at {where} did not complete the handshake: {_reason(error.__cause__ or error)}.",
                    hint="Does kueue_server listen there, or another program?",
                ) from error
            raise
        return secure
    raise Unreachable(
        f"The server at {where} does not answer within {CONNECT_SECONDS:.0f} s.",
        hint="Is the machine on, and does a firewall let the port through?",
    )


def _reason(error: BaseException) -> str:
    if isinstance(error, KueueError):
        return str(error).rstrip(".")
    if isinstance(error, ssl.SSLError):
        return error.reason or str(error)
    cause = error.__cause__ or error
    nested = getattr(cause, "exceptions", None)  # one for each address that was tried
    if nested:
        return "; ".join(dict.fromkeys(_reason(each) for each in nested))
    if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
        return os.strerror(cause.errno)  # trio's own text repeats the address
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror  # of the resolver, whose numbers are not those of the system
    return str(cause) or "the connection was closed"
