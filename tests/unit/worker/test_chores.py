"""What the worker does again and again for its attempts."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import trio
import trio.testing

from kueue.worker.chores import Chores

pytestmark = pytest.mark.trio


class Guard:
    """In the place of the trees of processes: notes what is done, and takes its time for a stop."""

    def __init__(self) -> None:
        self.done: list[tuple[str, frozenset[int]]] = []
        self.begun = threading.Event()
        self.gate = threading.Event()

    def stop(self, offers):
        self.begun.set()
        self.gate.wait(30)
        self.done.append(("stop", frozenset(offers)))

    def let_go(self, offers):
        self.done.append(("let_go", frozenset(offers)))


async def test_what_is_let_go_while_it_is_being_stopped_goes_on_in_the_end(tmp_path):
    attempts = {offer: SimpleNamespace(offer=offer, is_over=False) for offer in (1, 2)}
    chores = Chores(SimpleNamespace(attempts=attempts), SimpleNamespace(root=str(tmp_path)))
    guard = chores._guard = Guard()
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(chores._hold)
            chores.hold((1, 2))
            await trio.to_thread.run_sync(guard.begun.wait)
            chores.release((1,))
            async with trio.open_nursery() as letting:
                letting.start_soon(chores.let_go, (1,))
                await trio.testing.wait_all_tasks_blocked(0.05)
                guard.gate.set()
            nursery.cancel_scope.cancel()
    assert guard.done[:2] == [("stop", frozenset({1, 2})), ("let_go", frozenset({1}))]


async def test_what_is_held_again_meanwhile_is_not_let_go(tmp_path):
    chores = Chores(SimpleNamespace(attempts={}), SimpleNamespace(root=str(tmp_path)))
    guard = chores._guard = Guard()
    chores.hold((1,))
    await chores.let_go((1, 2))
    assert guard.done == [("let_go", frozenset({2}))]
