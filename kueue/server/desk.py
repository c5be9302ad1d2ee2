"""What tasks beside the driver ask of it: a look at the state, a read of the store, a change; and how that is served.

Rules
- A look sees the state only at moments when all of it is stored: nobody is told what a crash could undo.
- The store is used by the driver alone, one call at a time; a read is one page.
- A change returns when its facts are stored, or raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import trio

from kueue.core.engine import Engine
from kueue.core.queue import Turn
from kueue.errors import DiskFull, KueueError, UserError
from kueue.model import Now
from kueue.storage.store import Store

T = TypeVar("T")

Look = Callable[[Engine, Now], T]
Read = Callable[[Store], T]
Change = Callable[[Engine, Now], Turn]

READS = 8
"""Most store reads between two rounds; a page takes some milliseconds."""
LOOKS_SECONDS = 0.02
"""Time for looks between two rounds."""


class Waiting(Generic[T]):
    """A task of somebody else that waits for a result."""

    def __init__(self) -> None:
        self._done = trio.Event()
        self._result: T | None = None
        self._error: BaseException | None = None

    def give(self, result: T) -> None:
        self._result = result
        self._done.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._done.set()

    async def result(self) -> T:
        """The result, or the error raised anew."""
        await self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # `give` was called; None may be the result itself


class Desk:
    """Looks, reads and changes that wait to be served."""

    def __init__(self) -> None:
        self.changes: list[tuple[Change, bool, Waiting[None]]] = []
        """(change, tried even while the server is read-only, who waits)."""
        self._looks: deque[tuple[Look[Any], Waiting[Any]]] = deque()
        self._reads: deque[tuple[Read[Any], Waiting[Any]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._looks or self._reads or self.changes)

    def look(self, look: Look[T]) -> Waiting[T]:
        waiting: Waiting[T] = Waiting()
        self._looks.append((look, waiting))
        return waiting

    def read(self, read: Read[T]) -> Waiting[T]:
        waiting: Waiting[T] = Waiting()
        self._reads.append((read, waiting))
        return waiting

    def change(self, change: Change, *, although_full: bool) -> Waiting[None]:
        waiting: Waiting[None] = Waiting()
        self.changes.append((change, although_full, waiting))
        return waiting

    def serve_looks(self, engine: Engine, clock: Callable[[], Now]) -> None:
        """For some milliseconds; the rest waits for the next time."""
        now = clock()
        until = now.steady + LOOKS_SECONDS
        while self._looks and clock().steady <= until:
            look, waiting = self._looks.popleft()
            try:
                waiting.give(look(engine, now))
            except Exception as error:  # noqa: BLE001  raised in the task of who asked: it ends that session alone
                waiting.fail(error)

    async def serve_reads(
        self, store: Store, in_store: Callable[[Callable[[], list[Any]]], Awaitable[list[Any]]]
    ) -> None:
        """Some of them in one trip to the store's thread. Raises `StorageError` other than `DiskFull`."""
        reads = [self._reads.popleft() for _ in range(min(READS, len(self._reads)))]
        if not reads:
            return
        results = await in_store(partial(_read_all, [read for read, _ in reads], store))
        for (_, waiting), result in zip(reads, results, strict=True):
            if isinstance(result, Exception):
                waiting.fail(result)
            else:
                waiting.give(result)

    def close(self, error: KueueError) -> None:
        """Whoever waits still hears `error`."""
        for _, waiting in (*self._looks, *self._reads):
            waiting.fail(error)
        for _, _, changed in self.changes:
            changed.fail(error)
        self._looks.clear()
        self._reads.clear()
        self.changes.clear()


def _read_all(reads: Sequence[Read[Any]], store: Store) -> list[Any]:
    return [_result(read, store) for read in reads]


def _result(read: Read[Any], store: Store) -> Any:
    """What the reader gets: a result, or an error of its own; any other failure of the store is everybody's."""
    try:
        return read(store)
    except (DiskFull, UserError) as error:
        return error
    except KueueError:
        raise
    except Exception as error:  # noqa: BLE001  raised in the task of who asked: it ends that session alone
        return error
