"""Fair and bounded."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from kueue.protocol import messages as m
from kueue.server.mailbox import Mailbox

pytestmark = pytest.mark.trio


def beats(*numbers: int) -> list[m.Message]:
    return [m.Heartbeat(number=number) for number in numbers]


async def test_sessions_are_served_in_turn_and_keep_their_own_order():
    box = Mailbox(lambda: None)
    box.put(1, beats(*range(100)))
    box.put(2, beats(0, 1))
    taken = [(session, message.number) for session, message in box.take(5)]
    assert taken == [(1, 0), (2, 0), (1, 1), (2, 1), (1, 2)]
    box.put(3, beats(0))
    # Whoever waited is served before those who have just been.
    assert 3 in [session for session, _ in box.take(2)]


async def test_a_reader_waits_until_there_is_room():
    box = Mailbox(lambda: None)
    box.put(1, beats(1, 2, 3))
    async with trio.open_nursery() as nursery:
        done = trio.Event()

        async def read() -> None:
            await box.room(1, 1)
            done.set()

        nursery.start_soon(read)
        box.take(2)
        await trio.testing.wait_all_tasks_blocked()
        assert not done.is_set()
        box.take(2)
        await done.wait()


async def test_a_closed_session_leaves_nothing_and_frees_its_reader():
    box = Mailbox(lambda: None)
    box.put(1, beats(1))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(box.room, 1, 1)
        await trio.testing.wait_all_tasks_blocked()
        box.drop(1)
    assert not box
    assert box.take(10) == []


async def test_arrivals_are_announced_and_nothing_is_not():
    calls = []
    box = Mailbox(lambda: calls.append(1))
    box.put(1, [])
    assert not calls
    assert not box
    box.put(1, beats(1))
    assert calls
