"""The pages over HTTP: what is answered to whom, and that no peer keeps others from them."""

from __future__ import annotations

import logging
import random
import socket
from contextlib import asynccontextmanager, suppress

import pytest
import trio

from kueue import http
from kueue.http import Limits, Page, Site
from tests.support.served import eventually

pytestmark = pytest.mark.trio

GOOD = b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n"


async def metrics(accept: str) -> Page:
    await trio.lowlevel.checkpoint()
    return Page(f"accept={accept}\n".encode())


async def broken(_: str) -> Page:
    raise RuntimeError("a bug")


async def endless(_: str) -> Page:
    await trio.sleep_forever()
    raise AssertionError


async def large(_: str) -> Page:
    await trio.lowlevel.checkpoint()
    return Page(bytes(8 * 1024 * 1024))


PAGES = {"/metrics": metrics, "/broken": broken, "/endless": endless, "/large": large}


@asynccontextmanager
async def served(site: Site | None = None, **limits):
    """The port of a site with `PAGES`."""
    site = site or Site(PAGES, Limits(**limits))
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(site.serve, listeners)
        with trio.fail_after(60):
            yield listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel()


async def ask(port: int, request: bytes, *, eof: bool = False) -> bytes:
    """All that is answered; a connection that is reset counts as ended."""
    answer = b""
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    async with stream:
        try:
            await stream.send_all(request)
            if eof:
                await stream.send_eof()
            async for chunk in stream:
                answer += chunk
        except trio.BrokenResourceError:
            pass
    return answer


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def body(answer: bytes) -> bytes:
    return answer.partition(b"\r\n\r\n")[2]


async def test_a_page_comes_with_its_length_and_the_connection_ends():
    async with served() as port:
        answer = await ask(port, b"GET /metrics?debug=1 HTTP/1.1\r\nHost: here\r\nACCEPT:  text/plain \r\n\r\n")
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\nContent-Length: %d" % len(rest) in head
    assert b"\r\nConnection: close" in head
    assert rest == b"accept=text/plain\n"


async def test_head_gets_the_head_alone():
    async with served() as port:
        answer = await ask(port, GOOD.replace(b"GET", b"HEAD"))
        missing = await ask(port, b"HEAD /nothing HTTP/1.1\r\nHost: here\r\n\r\n")
    assert status(answer) == 200
    assert b"Content-Length: 8" in answer
    assert body(answer) == b""
    assert (status(missing), body(missing)) == (404, b"")


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (b"GET /nothing HTTP/1.1\r\nHost: h\r\n\r\n", 404),
        (b"GET /metrics/ HTTP/1.1\r\nHost: h\r\n\r\n", 404),
        (b"GET /../metrics HTTP/1.1\r\nHost: h\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc", 405),
        (b"DELETE /metrics HTTP/1.1\r\nHost: h\r\n\r\n", 405),
        (b"get /metrics HTTP/1.1\r\nHost: h\r\n\r\n", 405),
        (b"GET /metrics HTTP/1.0\r\n\r\n", 200),
        (b"GET /metrics HTTP/1.1\n\n", 400),
        (b"GET /metrics HTTP/1.1\nHost: h\n\n", 200),
        (b"\r\n\r\nGET /metrics HTTP/1.1\r\nHost: h\r\n\r\n", 200),
        (b"GET http://h:1/metrics HTTP/1.1\r\nHost: h\r\n\r\n", 200),
        (b"GET /metrics HTTP/1.1\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nHost: h\r\n folded\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nHost: h\r\nNo colon\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nHost : h\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nHost: h\r\nX: a\x00b\r\n\r\n", 400),
        (b"GET  /metrics HTTP/1.1\r\nHost: h\r\n\r\n", 400),
        (b"GET /metrics\r\n\r\n", 400),
        (b"GET /me trics HTTP/1.1\r\nHost: h\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\n", 505),
        (b"GET /metrics HTTP/9.9\r\n\r\n", 505),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET /broken HTTP/1.1\r\nHost: h\r\n\r\n", 500),
        (b"GET /metrics HTTP/1.1\r\nHost: h\r\n", 0),
        (b"", 0),
    ],
)
async def test_each_request_is_answered_as_it_deserves(request_, expected):
    async with served() as port:
        assert status(await ask(port, request_, eof=True)) == expected


async def test_405_names_what_is_allowed():
    async with served() as port:
        assert b"\r\nAllow: GET, HEAD\r\n" in await ask(port, b"PUT /metrics HTTP/1.1\r\nHost: h\r\n\r\n")


async def test_what_a_peer_says_does_not_come_back_in_a_head():
    async with served() as port:
        answer = await ask(port, b"GET /metrics HTTP/1.1\r\nHost: h\r\nAccept: a\r\nAccept: b\r\n\r\n")
    assert body(answer) == b"accept=a, b\n"
    assert b"accept" not in answer.partition(b"\r\n\r\n")[0]


async def test_a_head_that_is_too_large_is_refused_and_its_peer_hears_it():
    async with served(head_bytes=1000) as port:
        assert status(await ask(port, b"GET /metrics HTTP/1.1\r\nX: " + bytes(b"a" * 20_000))) == 431
        assert status(await ask(port, b"GET /metrics HTTP/1.1\r\nX: " + b"a" * 2000 + b"\r\n\r\n")) == 431
        assert status(await ask(port, GOOD)) == 200


async def test_who_says_nothing_or_dribbles_is_let_go():
    async with served(head_seconds=0.2) as port:
        assert status(await ask(port, b"")) == 408
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        async with stream:
            with pytest.raises(trio.BrokenResourceError):
                await _dribble(stream)
        assert status(await ask(port, GOOD)) == 200


async def _dribble(stream: trio.SocketStream) -> None:
    while True:
        await stream.send_all(b"X")
        await trio.sleep(0.01)


async def test_a_page_that_takes_too_long_is_our_fault():
    async with served(answer_seconds=0.1) as port:
        assert status(await ask(port, b"GET /endless HTTP/1.1\r\nHost: h\r\n\r\n")) == 500


async def test_who_does_not_read_its_answer_is_let_go():
    site = Site(PAGES, Limits(answer_seconds=0.2, parting_seconds=0.1))
    async with served(site) as port:
        with socket.socket() as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peer.connect(("127.0.0.1", port))
            peer.sendall(b"GET /large HTTP/1.1\r\nHost: h\r\n\r\n")
            await eventually(lambda: site._open, "it is served")
            await eventually(lambda: not site._open, "it is let go")
            # What is still in the kernel's buffers is all that ever comes.
            peer.settimeout(20)
            size = await trio.to_thread.run_sync(_read_all, peer)
        assert size < 8 * 1024 * 1024
        assert status(await ask(port, GOOD)) == 200


def _read_all(peer: socket.socket) -> int:
    size = 0
    try:
        while chunk := peer.recv(65536):
            size += len(chunk)
    except ConnectionError:
        pass
    return size


async def test_of_too_many_connections_the_oldest_goes():
    async with served(connections=3) as port:
        first = await trio.open_tcp_stream("127.0.0.1", port)
        others = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(3)]
        with suppress(trio.BrokenResourceError):
            assert await first.receive_some(1) == b""
        assert status(await ask(port, GOOD)) == 200
        for stream in (first, *others):
            await stream.aclose()


async def test_a_hundred_peers_at_once_are_all_answered():
    answers: list[int] = []

    async def one(port: int) -> None:
        answers.append(status(await ask(port, GOOD)))

    async with served(connections=200) as port, trio.open_nursery() as nursery:
        for _ in range(100):
            nursery.start_soon(one, port)
    assert answers == [200] * 100


async def test_junk_never_ends_the_service():
    chance = random.Random(7)
    seeds = [
        GOOD,
        b"POST / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: \xff\xfe\r\n\r\n",
    ]
    async with served(head_seconds=0.1, parting_seconds=0.05) as port:
        for _ in range(100):
            data = bytearray(chance.choice(seeds))
            for _ in range(chance.randrange(1, 6)):
                at = chance.randrange(len(data))
                chance.choice((data.insert, data.__setitem__))(at, chance.randrange(256))
            answer = await ask(port, bytes(data[: chance.randrange(1, len(data) + 1)]), eof=chance.random() < 0.9)
            assert status(answer) in {0, 200, 400, 404, 405, 408, 431, 505}
        assert status(await ask(port, GOOD)) == 200


class Hosts(trio.abc.HostnameResolver):
    """A name with an address that this machine does not have, first, and one that it has."""

    async def getaddrinfo(self, host, port, *_, **__):
        await trio.lowlevel.checkpoint()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in ("192.0.2.1", "127.0.0.1")]

    async def getnameinfo(self, sockaddr, flags):
        raise AssertionError("nobody asks for the name of an address")


def listens(port):
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


async def test_an_address_that_is_switched_off_here_keeps_nobody_from_the_others():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    trio.socket.set_custom_hostname_resolver(Hosts())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Site(PAGES).listen, f"here.example:{port}", "figures")
        await eventually(lambda: listens(port))
        assert status(await ask(port, GOOD)) == 200
        nursery.cancel_scope.cancel()


async def test_a_place_that_is_taken_is_said_once_and_had_when_it_is_free(monkeypatch):
    monkeypatch.setattr("kueue.http.AGAIN_SECONDS", 0.02)
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    # Not caplog: whether and how often a line reaches it depends on what earlier tests did to the loggers.
    log, keep = logging.getLogger("kueue.http"), Keep()
    monkeypatch.setattr(log, "level", logging.INFO)
    monkeypatch.setattr(log, "handlers", [keep])
    log.manager._clear_cache()
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    site = Site(PAGES)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(site.listen, f"127.0.0.1:{port}", "figures")
        await eventually(lambda: "cannot listen" in "".join(said))
        taken.close()
        await eventually(lambda: "figures at http://127.0.0.1" in "".join(said))
        assert status(await ask(port, GOOD)) == 200
        nursery.cancel_scope.cancel()
    assert "".join(said).count("cannot listen") == 1


async def test_a_place_whose_name_no_thread_can_look_up_is_served_when_one_can(monkeypatch, caplog):
    monkeypatch.setattr(http, "AGAIN_SECONDS", 0.05)
    caplog.set_level(logging.INFO, "kueue")
    real, refused = trio.socket.getaddrinfo, []

    async def look_up(*arguments, **more):
        if not refused:
            refused.append(arguments)
            raise RuntimeError("can't start new thread")
        return await real(*arguments, **more)

    monkeypatch.setattr(trio.socket, "getaddrinfo", look_up)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Site(PAGES).listen, "localhost:0", "figures")
        await eventually(lambda: "figures at http://" in caplog.text, "it is served")
        assert "limit of processes" in caplog.text
        nursery.cancel_scope.cancel()
