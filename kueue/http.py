"""A few fixed pages over HTTP/1.1, for programs that look at this one; under trio, in the loop of the program itself.

Rules
- One request a connection, then it is closed. Only the head of a request is read; what is behind it is thrown away.
- Each step has a deadline, the head a size, the connections a bound: of too many the oldest goes, so that a new peer
  always gets in.
- Whatever a peer does ends its own connection and is a line of the log at level debug. A page that fails answers 500.
- A place that cannot be listened at is logged once and tried again; nobody else is told.

Why this way: the HTTP server that comes with prometheus-client needs a thread for each connection, beside an engine
that is read without locks.
"""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus

import trio

from kueue import log, threads, units
from kueue.errors import UserError

AGAIN_SECONDS = 60.0
"""Between two tries to listen at a place that is taken or not there (yet)."""

_REQUEST_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([!-~]+) HTTP/([0-9])\.([0-9])")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*?)[ \t]*")
_END = re.compile(rb"\r?\n\r?\n")
_log = log.logger("http")


@dataclass(frozen=True)
class Page:
    """An answer."""

    body: bytes
    kind: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK
    headers: tuple[tuple[str, str], ...] = ()


Maker = Callable[[str], Awaitable[Page]]
"""Makes a page; given the ``Accept`` header, empty if there is none."""


@dataclass(frozen=True)
class Limits:
    """How much peers may cost."""

    connections: int = 32
    head_bytes: int = 16 * 1024
    head_seconds: float = 5.0
    answer_seconds: float = 15.0
    """To make the page and to have it taken."""
    parting_seconds: float = 1.0
    """To throw away what a peer still sends: closing upon it would reset the connection under our answer."""


class _Bad(Exception):
    """The request gets this answer instead of a page."""

    def __init__(self, status: HTTPStatus, *headers: tuple[str, str]) -> None:
        super().__init__(status.phrase)
        self.page = Page(f"{status.phrase}\n".encode(), status=status, headers=headers)


@dataclass
class Site:
    """Pages by path. `listen` serves them at one place until cancelled."""

    pages: Mapping[str, Maker]
    limits: Limits = field(default_factory=Limits)
    _open: dict[trio.CancelScope, None] = field(default_factory=dict)
    """Of each connection, oldest first."""

    async def listen(self, place: str, what: str) -> None:
        """Serve at `place` (``host:port``), also if it is free only later. `what` is shown there, for the log."""
        host, port = units.parse_bind(place)
        was_told = False
        while True:
            try:
                listeners = await _listeners(host, port)
            except (OSError, UnicodeError, UserError) as error:  # noqa: PERF203  once a minute
                if not was_told:
                    reason = getattr(error, "strerror", None) or error
                    _log.warning("cannot listen at %s for %s: %s; all else goes on", place, what, reason)
                was_told = True
                await trio.sleep(AGAIN_SECONDS)
            else:
                at = " ".join(dict.fromkeys(_url(listener) for listener in listeners))
                _log.info("%s at %s", what, at)
                await self.serve(listeners)

    async def serve(self, listeners: Sequence[trio.SocketListener]) -> None:
        """Until cancelled; the listeners are closed then."""
        async with AsyncExitStack() as stack:
            for listener in listeners:
                await stack.enter_async_context(listener)
            async with trio.open_nursery() as nursery:
                for listener in listeners:
                    nursery.start_soon(self._accept, listener, nursery)

    async def _accept(self, listener: trio.SocketListener, nursery: trio.Nursery) -> None:
        while True:
            try:
                stream = await listener.accept()
            except OSError as error:  # noqa: PERF203  a connection costs a thousand times more
                # Mostly out of descriptors; those who wait stay in the kernel's queue.
                _log.debug("cannot accept connections for now: %s", error.strerror)
                await trio.sleep(0.1)
            else:
                nursery.start_soon(self._meet, stream)

    async def _meet(self, stream: trio.SocketStream) -> None:
        """One connection; nothing that happens to it may reach the others."""
        with trio.CancelScope() as scope:
            if len(self._open) >= self.limits.connections:
                oldest = next(iter(self._open))
                del self._open[oldest]
                oldest.cancel()
            self._open[scope] = None
            try:
                await self._converse(stream)
            except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
                _log.debug("a connection broke: %s", error)
            except Exception:  # noqa: BLE001  logged whole; the other connections must go on
                _log.exception("a connection was closed after a failure of our own")
            finally:
                self._open.pop(scope, None)
                await trio.aclose_forcefully(stream)

    async def _converse(self, stream: trio.SocketStream) -> None:
        head: bytes | None = None
        is_head = False
        try:
            with trio.move_on_after(self.limits.head_seconds):
                head = await self._head(stream)
                if not head:
                    return
            if head is None:
                raise _Bad(HTTPStatus.REQUEST_TIMEOUT)  # noqa: TRY301  all that is bad is answered in one place
            # For an answer to HEAD also an error must come without a body.
            is_head = head.startswith(b"HEAD ")
            with trio.fail_after(self.limits.answer_seconds):
                page = await self._page(head)
        except _Bad as bad:
            _log.debug("a bad request: %s", bad)
            page = bad.page
        except Exception:  # noqa: BLE001  logged whole, and answered
            # Also a page that takes too long, which is nobody's fault but ours.
            _log.exception("a page could not be made")
            page = _Bad(HTTPStatus.INTERNAL_SERVER_ERROR).page
        with trio.move_on_after(self.limits.answer_seconds):
            await stream.send_all(_answer(page, is_head=is_head))
            await stream.send_eof()
        with trio.move_on_after(self.limits.parting_seconds), suppress(trio.BrokenResourceError):
            left = self.limits.head_bytes * 4
            while left > 0 and (chunk := await stream.receive_some(4096)):
                left -= len(chunk)

    async def _head(self, stream: trio.SocketStream) -> bytes:
        """Request line and headers; empty if the peer left before their end."""
        data = bytearray()
        while True:
            chunk = await stream.receive_some(4096)
            if not chunk:
                return b""
            data += chunk
            # RFC 9112, section 2.2: blank lines before the request line are skipped, a bare LF ends a line.
            start = len(data) - len(data.lstrip(b"\r\n"))
            end = _END.search(data, start)
            if (len(data) if end is None else end.start()) > self.limits.head_bytes:
                raise _Bad(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            if end is not None:
                return bytes(data[start : end.start()])

    async def _page(self, head: bytes) -> Page:
        method, path, headers = _parsed(head)
        make = self.pages.get(path)
        if make is None:
            raise _Bad(HTTPStatus.NOT_FOUND)
        if method not in {"GET", "HEAD"}:
            raise _Bad(HTTPStatus.METHOD_NOT_ALLOWED, ("Allow", "GET, HEAD"))
        return await make(", ".join(headers.get("accept", ())))


async def _listeners(host: str, port: int) -> list[trio.SocketListener]:
    """At all addresses of a host that this machine has. Raises `OSError`, `UnicodeError`, and `UserError` without a
    thread to look its name up.
    """
    try:
        with threads.wanted("name look-up"):
            return await trio.open_tcp_listeners(port, host=host or None)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        # Many names have an address that is switched off here: ::1 of localhost, where there is no IPv6.
        failure = error
    found: list[trio.SocketListener] = []
    with threads.wanted("name look-up"):
        answers = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for address in dict.fromkeys(str(where[0]) for *_, where in answers):
        try:
            found += await trio.open_tcp_listeners(port, host=address)
        except OSError as error:  # noqa: PERF203  once a minute at most
            if error.errno != errno.EADDRNOTAVAIL:
                failure = error
    if found and failure.errno == errno.EADDRNOTAVAIL:
        return found
    for listener in found:
        await listener.aclose()
    raise failure


def _parsed(head: bytes) -> tuple[str, str, dict[str, list[str]]]:
    """(method, path, values of each header by its name in small letters). Raises `_Bad`."""
    lines = re.split(rb"\r?\n", head)
    line = _REQUEST_LINE.fullmatch(lines[0])
    if line is None:
        raise _Bad(HTTPStatus.BAD_REQUEST)
    method, target, major, minor = (part.decode("ascii") for part in line.groups())
    if major != "1":
        raise _Bad(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED)
    headers: dict[str, list[str]] = {}
    for each in lines[1:]:
        header = _HEADER.fullmatch(each)
        if header is None:
            raise _Bad(HTTPStatus.BAD_REQUEST)
        headers.setdefault(header[1].decode("ascii").lower(), []).append(header[2].decode("latin-1"))
    if minor != "0" and len(headers.get("host", ())) != 1:
        raise _Bad(HTTPStatus.BAD_REQUEST)  # RFC 9112, section 3.2
    if target.startswith(("http://", "https://")):
        # RFC 9112, section 3.2.2: what proxies send has to be understood.
        target = "/" + target.partition("://")[2].partition("/")[2]
    return method, target.partition("?")[0], headers


def _answer(page: Page, *, is_head: bool) -> bytes:
    headers = (
        ("Date", formatdate(usegmt=True)),
        ("Content-Type", page.kind),
        ("Content-Length", str(len(page.body))),
        ("Connection", "close"),
        ("Cache-Control", "no-store"),
        ("X-Content-Type-Options", "nosniff"),
        *page.headers,
    )
    lines = [f"HTTP/1.1 {page.status.value} {page.status.phrase}", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + (b"" if is_head else page.body)


def _url(listener: trio.SocketListener) -> str:
    host, port = listener.socket.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"
