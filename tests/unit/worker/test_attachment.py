"""One connection to a runner, over real sockets that are full, dumb or gone."""

from __future__ import annotations

import json
import os
import resource
import socket
from contextlib import asynccontextmanager

import pytest
import trio

from kueue.worker.attachment import Attachment, Mute, attach
from kueue.worker.orders import Ping, Pong, StartAttempt

pytestmark = pytest.mark.trio

LARGE = "x" * 200_000


def order(offer, word=""):
    return StartAttempt(offer=offer, job=offer, queue_id="q", argv=("true", word), env=(), cwd="/")


@asynccontextmanager
async def pair(patience_seconds=30.0):
    """Our end, and the plain socket of the runner."""
    ours, theirs = trio.socket.socketpair()
    attachment = Attachment(trio.SocketStream(ours), patience_seconds)
    with theirs, trio.fail_after(30):
        yield attachment, theirs
        await attachment.close()


async def offers_read(theirs, count):
    data = b""
    while data.count(b"\n") < count:
        data += await theirs.recv(1 << 20)
    return [json.loads(line)["offer"] for line in data.splitlines()]


async def test_all_that_was_put_goes_out_in_one_piece_and_in_order():
    async with pair() as (attachment, theirs):
        for offer in range(5):
            attachment.put(order(offer))
        await attachment.flush()
        assert (await theirs.recv(1 << 20)).count(b"\n") == 5


async def test_orders_larger_than_the_socket_takes_arrive_whole_and_in_order_from_several_tasks():
    async with pair() as (attachment, theirs), trio.open_nursery() as nursery:
        for offer in range(20):
            attachment.put(order(offer, LARGE))
            nursery.start_soon(attachment.flush)
            if offer % 5 == 0:
                await trio.lowlevel.checkpoint()
        assert await offers_read(theirs, 20) == list(range(20))


async def test_a_runner_that_takes_nothing_loses_the_connection(autojump_clock):
    async with pair(patience_seconds=5.0) as (attachment, _theirs):
        attachment.put(order(1, LARGE * 20))
        await attachment.flush()
        with pytest.raises(trio.ClosedResourceError):
            async for _ in attachment.events():
                pass


async def test_a_runner_that_is_gone_is_no_error_of_the_writer():
    async with pair() as (attachment, theirs):
        theirs.close()
        attachment.put(Ping())
        await attachment.flush()


async def test_events_come_as_they_were_read_and_unknown_ones_are_skipped():
    async with pair() as (attachment, theirs):
        await theirs.send(
            b'{"type":"Pong","number":1}\n{"type":"Dreamed"}\nnonsense\n{"type":"Pong","number":2}\n{"typ'
        )
        events = attachment.events()
        assert await anext(events) == [Pong(number=1), Pong(number=2)]
        await theirs.send(b'e":"Pong","number":3}\n')
        assert await anext(events) == [Pong(number=3)]
        theirs.close()
        assert [batch async for batch in events] == []


async def test_a_socket_of_somebody_else_is_not_spoken_to(tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        await (await attach(tmp_path, 5.0)).close()
        monkeypatch.setattr("kueue.worker.attachment.os.getuid", lambda: 12345)
        with pytest.raises(Mute, match="belongs to user"):
            await attach(tmp_path, 5.0)


async def test_a_try_for_which_there_is_no_socket_leaves_no_descriptor(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            await attach(tmp_path, 5.0)
        again = os.dup(0)
        os.close(again)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert again == free
