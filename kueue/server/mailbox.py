"""What the sessions have read and the driver has not handled yet: bounded, and fair between sessions.

Rules
- Messages of one session stay in their order; between sessions they are taken in turns, one each.
- A client is read on only when what it sent before has been taken: its memory here is one read of its socket.
- A worker is read eagerly, up to a bound that a healthy one never reaches, because its silence is judged by what has
  been read from it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import trio

from kueue.protocol.messages import Message

WORKER_BOUND = 10_000
"""Messages of one worker that may wait; a worker with 100 slots sends some hundred in its busiest second."""


class Mailbox:
    """Waiting messages by session; `arrived` is called whenever there are new ones."""

    def __init__(self, arrived: Callable[[], None]) -> None:
        self._arrived = arrived
        self._waiting: dict[int, deque[Message]] = {}
        self._readers: dict[int, trio.Event] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, session: int, messages: Iterable[Message]) -> None:
        """Add messages of a session behind its others. Does not wait: see `room`."""
        queue = self._waiting.get(session)
        if queue is None:
            queue = self._waiting[session] = deque()
        queue.extend(messages)
        if queue:
            self._arrived()
        else:
            del self._waiting[session]

    async def room(self, session: int, bound: int) -> None:
        """Return when fewer than `bound` (at least 1) messages of that session wait."""
        while len(self._waiting.get(session, ())) >= bound:
            await self._readers.setdefault(session, trio.Event()).wait()

    def take(self, limit: int) -> list[tuple[int, Message]]:
        """At most `limit` messages with their sessions: one of each session in turn, until none is left."""
        taken: list[tuple[int, Message]] = []
        touched: set[int] = set()
        while self._waiting and len(taken) < limit:
            for session in list(self._waiting):
                if len(taken) >= limit:
                    break
                # To the end of the row: whoever was served waits until all others were, also over two calls.
                queue = self._waiting.pop(session)
                taken.append((session, queue.popleft()))
                touched.add(session)
                if queue:
                    self._waiting[session] = queue
        for session in touched:
            self._wake(session)
        return taken

    def put_back(self, taken: list[tuple[int, Message]]) -> None:
        """Undo the last of a `take`: these messages stand before all others of their sessions again."""
        for session, message in reversed(taken):
            self._waiting.setdefault(session, deque()).appendleft(message)

    def drop(self, session: int) -> None:
        """Forget what waits of a session that is closed."""
        self._waiting.pop(session, None)
        self._wake(session)

    def _wake(self, session: int) -> None:
        reader = self._readers.pop(session, None)
        if reader is not None:
            reader.set()
