"""Runs work for many hosts side by side in threads, so many at once, and stops waiting for what does not return.

Rules
- All work begins at once; `parallel` bounds what is between `Ticket.enter` and `Ticket.leave`. Whoever waits for a host
  that is silent is outside and holds no lane; `CROWD` bounds these threads.
- A thread cannot be ended from outside. One that exceeds its limit is *abandoned*: its lane is free for others, its
  result will be dropped, and what it does next must ask its `Ticket` first.
- Abandoned threads of one key are bounded: while `LINGERING` of them hang, the key is told to hang without a new one.
- All threads are daemons. Those of `concurrent.futures` are waited for at exit and would keep the program from ending.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from queue import SimpleQueue
from typing import Generic, TypeVar

from kueue import log
from kueue.errors import KueueError

T = TypeVar("T")
LINGERING = 3
CROWD = 256
"""Threads at once; the address space of more of them, and their sockets, are a matter of what the machine allows."""

_log = log.logger("restart.lanes")


class Abandoned(Exception):
    """Work that exceeded its limit: nobody waits for it any more, and it must not change anything."""


class Ticket:
    """The right to work on one key."""

    def __init__(self, key: str, limit_seconds: float, lanes: Lanes | None = None) -> None:
        """Without `lanes` there is no bound: `enter` returns at once."""
        self.key = key
        self.limit_seconds = limit_seconds
        self.deadline = 0.0
        self.has_thread = False
        self._lanes = lanes
        self._is_over = False
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raises `Abandoned` if nobody waits for this work any more; called before anything is changed."""
        if self._is_over:
            raise Abandoned(self.key)

    def enter(self) -> None:
        """Waits for a free lane, from which on the limit counts anew; nothing if it has one.

        Raises `Abandoned` if there will be none.
        """
        if self._lanes is not None:
            self._lanes.let_in(self)
        self.check()

    def leave(self) -> None:
        """Gives the lane to the next one; nothing if it has none."""
        if self._lanes is not None:
            self._lanes.let_out(self)

    @property
    def is_awaited(self) -> bool:
        """Somebody still waits for this work."""
        return not self._is_over

    def end(self) -> bool:
        """Whether this call ended it: exactly one of result and limit does."""
        with self._lock:
            was_open, self._is_over = not self._is_over, True
        return was_open


class Result(Generic[T]):
    """What became of one piece of work: `value`, or `error`; `Abandoned` is the error of one that hangs."""

    def __init__(self, key: str, value: T | None = None, error: BaseException | None = None) -> None:
        self.key = key
        self.value = value
        self.error = error

    @property
    def is_hung(self) -> bool:
        return isinstance(self.error, Abandoned)


class Lanes:
    """`parallel` pieces of work in a lane at once; `limit_seconds` counts from the begin, and anew in the lane."""

    def __init__(self, parallel: int, limit_seconds: float, *, crowd: int = CROWD) -> None:
        """Raises `KueueError` when there is no thread to be had for the watch over the limits."""
        self.limit_seconds = limit_seconds
        self._parallel = parallel
        self._crowd = crowd
        self._lock = threading.Condition()
        self._waiting: deque[Callable[[], None]] = deque()
        self._running: set[Ticket] = set()
        self._queue: deque[Ticket] = deque()
        self._inside: set[Ticket] = set()
        self._lingering: Counter[str] = Counter()
        self._is_closed = False
        self._tells: dict[Ticket, Callable[[BaseException], None]] = {}
        try:
            # Now, not with the first work: nothing may ever run without it.
            threading.Thread(target=self._watch_limits, name="lanes", daemon=True).start()
        except RuntimeError as error:
            raise KueueError(
                "This account may have no more threads.", hint="`ulimit -u` is how many; `ps -LU $USER` shows them."
            ) from error

    @property
    def busy(self) -> int:
        """Pieces of work that run or wait; abandoned ones do not count."""
        with self._lock:
            return len(self._running) + len(self._waiting)

    @property
    def lingering(self) -> int:
        """Abandoned threads that have not ended yet."""
        with self._lock:
            return self._lingering.total()

    def widen(self, parallel: int, limit_seconds: float) -> None:
        """New bounds; they hold for what begins from now on."""
        with self._lock:
            self._parallel, self.limit_seconds = parallel, limit_seconds
        self._begin_more()

    def submit(self, key: str, work: Callable[[Ticket], T], done: Callable[[Result[T]], None]) -> None:
        """`done` is called once, from another thread, with the result; it must be quick and not raise.

        After `close` nothing happens at all.
        """

        def begin() -> None:
            ticket = Ticket(key, self.limit_seconds, self)
            self._running.add(ticket)
            self._tells[ticket] = lambda error: done(Result(key, error=error))
            if self._lingering[key] < LINGERING:
                ticket.deadline = time.monotonic() + self.limit_seconds
                thread = threading.Thread(target=self._run, args=(ticket, work, done), name=f"lane {key}", daemon=True)
                try:
                    thread.start()
                    ticket.has_thread = True
                except RuntimeError:  # no more threads for this user
                    del self._tells[ticket]
                    self._running.discard(ticket)
                    if self._running:
                        self._waiting.appendleft(begin)  # one of those that run will end
                        raise
                    # As if it hung; its deadline tells.
                    self._running.add(ticket)
                    self._tells[ticket] = lambda error: done(Result(key, error=error))
                    ticket.deadline = 0.0

        with self._lock:
            if self._is_closed:
                return
            self._waiting.append(begin)
        self._begin_more()

    def each(self, keys: Iterable[str], work: Callable[[Ticket], T]) -> Iterator[Result[T]]:
        """The results of all, in the order in which they come."""
        results: SimpleQueue[Result[T]] = SimpleQueue()
        count = 0
        for key in keys:
            self.submit(key, work, results.put)
            count += 1
        for _ in range(count):
            yield results.get()

    def let_in(self, ticket: Ticket) -> None:
        """Returns when the ticket has a lane, in the order of asking, or when it is over or all is closed."""
        with self._lock:
            if ticket in self._inside:
                return
            # Only the limits of the others count while it waits.
            ticket.deadline = float("inf")
            self._queue.append(ticket)
            self._lock.wait_for(lambda: self._is_closed or not ticket.is_awaited or self._is_next(ticket))
            if self._is_next(ticket) and not self._is_closed and ticket.is_awaited:
                self._inside.add(ticket)
            elif self._is_closed:
                ticket.end()
            self._queue.remove(ticket)
            ticket.deadline = time.monotonic() + self.limit_seconds
            self._lock.notify_all()

    def let_out(self, ticket: Ticket) -> None:
        """The ticket has no lane any more."""
        with self._lock:
            self._inside.discard(ticket)
            self._lock.notify_all()

    def close(self) -> None:
        """Nothing more begins; what runs goes on until the program ends, with its ticket withdrawn by `withdraw`."""
        with self._lock:
            self._is_closed = True
            self._waiting.clear()
            self._lock.notify_all()

    def wait_idle(self, seconds: float) -> bool:
        """Whether all that runs has ended within `seconds`."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._running, seconds)

    def withdraw(self) -> None:
        """All that still runs is abandoned; nobody hears of it."""
        with self._lock:
            running = list(self._running)
        for ticket in running:
            ticket.end()

    def _is_next(self, ticket: Ticket) -> bool:
        return self._queue[0] is ticket and len(self._inside) < self._parallel

    def _begin_more(self) -> None:
        with self._lock, contextlib.suppress(RuntimeError):
            while self._waiting and len(self._running) < self._crowd + self._parallel and not self._is_closed:
                self._waiting.popleft()()
        with self._lock:
            self._lock.notify_all()

    def _run(self, ticket: Ticket, work: Callable[[Ticket], T], done: Callable[[Result[T]], None]) -> None:
        try:
            result = Result(ticket.key, value=work(ticket))
        except BaseException as error:  # noqa: BLE001  whatever it is, whoever waits gets it as the result
            result = Result(ticket.key, error=error)
        is_awaited = ticket.end()
        if is_awaited:
            _tell(lambda: done(result))
        with self._lock:
            self._running.discard(ticket)
            self._inside.discard(ticket)
            self._tells.pop(ticket, None)
            if not is_awaited and self._lingering[ticket.key] > 0:
                self._lingering[ticket.key] -= 1
        self._begin_more()

    def _watch_limits(self) -> None:
        while True:
            with self._lock:
                if self._is_closed and not self._running:
                    return
                nearest = min((ticket.deadline for ticket in self._running), default=float("inf"))
                self._lock.wait(None if nearest == float("inf") else max(0.0, nearest - time.monotonic()))
                now = time.monotonic()
                tells = []
                for ticket in [one for one in self._running if one.deadline <= now]:
                    self._running.discard(ticket)
                    self._inside.discard(ticket)
                    tell = self._tells.pop(ticket, None)
                    if ticket.end() and tell is not None:
                        self._lingering[ticket.key] += ticket.has_thread
                        tells.append((tell, ticket.key))
            for tell, key in tells:
                _tell(partial(tell, Abandoned(key)))
            if tells:
                self._begin_more()


def _tell(tell: Callable[[], None]) -> None:
    """A fault in whoever is told must cost neither a lane nor the watch over the limits of all others."""
    try:
        tell()
    except Exception:  # noqa: BLE001  logged whole
        _log.exception("a fault in kueue itself, in what follows of a result")
