"""The threads of the server, whose account may be at its limit of processes at any moment.

Rules
- What the queue cannot go on without has a thread that is made at the start and kept: trio's own end after 10 s.
- Everything else takes a thread when it needs one. Where none can be had that alone fails, with a sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

import outcome
import trio

from kueue import threads

T = TypeVar("T")


async def in_thread(call: Callable[[], T], *, purpose: str, limiter: trio.CapacityLimiter | None = None) -> T:
    """What `call` returns or raises; left behind if the wait is cancelled. Raises `UserError` without a thread."""
    with threads.wanted(purpose):
        return await trio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=limiter)


class KeptThread:
    """A thread that carries out calls one after the other, from `start` to `end`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def start(self) -> None:
        """Does nothing where it is started. Raises `UserError` without a thread."""
        if self._thread is not None:
            return
        thread = Thread(target=_carry_out, args=(self._calls,), name=self._name, daemon=True)
        with threads.wanted(self._name):
            thread.start()
        self._thread = thread

    def end(self) -> None:
        """Behind the calls that wait; nobody is waited for."""
        if self._thread is not None:
            self._thread = None
            self._calls.put(None)

    async def run(self, call: Callable[[], T]) -> T:
        """What `call` returns or raises. Once begun it is waited for, cancelled or not."""
        await trio.lowlevel.checkpoint_if_cancelled()
        assert self._thread is not None, "start() comes first"
        task, token = trio.lowlevel.current_task(), trio.lowlevel.current_trio_token()

        def carried_out() -> None:
            result = outcome.capture(call)
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(trio.lowlevel.reschedule, task, result)

        self._calls.put(carried_out)
        result: T = await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)
        return result


def _carry_out(calls: SimpleQueue[Callable[[], Any] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # with all that it was called with: the next one may be far
