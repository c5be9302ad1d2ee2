"""Engine and store as one thing: what is decided is pending until it is stored, and what cannot be stored never was.

Rules
- `pending` is what the engine is ahead of the store by. Nobody is told of it.
- After a commit that failed, or a bug, the engine is thrown away and rebuilt from the store (`rebuild`).
- A full disk makes the ledger read-only until a probe shows that it takes writes again. Every other failure of the
  store is the caller's to die of.
- Whoever may start no more threads can still store: the store has one that is kept from the first `rebuild` to `close`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from kueue import __version__, log
from kueue.core.engine import Engine
from kueue.core.queue import Turn
from kueue.core.settings import Settings
from kueue.errors import DiskFull, StorageError
from kueue.model import Now
from kueue.server.batch import Pending
from kueue.server.threads import KeptThread
from kueue.storage.damage import LEFT, SENSELESS, words
from kueue.storage.store import Store

T = TypeVar("T")

PROBE_SECONDS = 1.0
PROBE_SECONDS_MAX = 16.0
FLAP_SECONDS = 30.0
"""A disk that fills again so soon after it had room is asked less often: each time all workers must say hello anew."""

_log = log.logger("server")


class Broken(Exception):
    """The engine raised what it never should; its state cannot be trusted any more."""

    def __init__(self, offender: int | None) -> None:
        super().__init__()
        self.offender = offender
        """The session whose message did it."""


class Ledger:
    """`take` is called with every turn; `closing` is told at once which sessions a turn closes."""

    def __init__(
        self, store: Store, settings: Settings, now: Callable[[], Now], closing: Callable[[int], None]
    ) -> None:
        self.store = store
        self.settings = settings
        self.pending = Pending()
        self.read_only = ""
        """Why nothing is accepted at the moment; empty: it is."""
        self.is_rebuilding = False
        self.probe_at = 0.0
        """Steady seconds of the next probe of a full disk."""
        self._now = now
        self._closing = closing
        self._thread = KeptThread("store")
        self._engine: Engine | None = None
        self._probe_pause = PROBE_SECONDS
        self._recovered_at = float("-inf")

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "rebuild() comes first"
        return self._engine

    async def rebuild(self) -> None:
        """Make the engine from the store. Raises `StorageError`, and `UserError` where no thread can be had for it."""
        self._thread.start()
        self.is_rebuilding = True
        self._engine = await self.in_store(self._replayed)
        self.is_rebuilding = False

    def _replayed(self) -> Engine:
        engine = Engine(self.settings, queue_id=self.store.queue_id, version=__version__)
        try:
            engine.replay(self.store.aggregates(), self.store.replay())
        except SENSELESS as error:
            raise StorageError(
                f"The state of queue {self.store.queue_id} is damaged: {words(error)}.", hint=LEFT
            ) from error
        return engine

    def opened(self) -> None:
        """Workers can be heard from now on: silence counts."""
        self.engine.opened(self._now())
        # What that decides leaves with the next turn, and has to be stored before the first lease is granted.
        self.take(self.engine.settle(self._now()))

    def run(self, call: Callable[[], Turn], offender: int | None = None) -> Turn:
        """Have the engine decide, and take what it decided. Raises `Broken`."""
        try:
            turn = call()
        except Exception as error:
            raise Broken(offender) from error
        self.take(turn)
        return turn

    def take(self, turn: Turn) -> None:
        self.pending.add(turn)
        for session in turn.closes:
            self._closing(session)

    async def commit(self) -> Pending:
        """Store what is pending; returns it, to be told. Raises what the store raised; all of it is pending then."""
        stored, self.pending = self.pending, Pending()
        if stored.facts:
            batch = stored.batch(self.engine, self._now().wall)
            try:
                await self.in_store(partial(self.store.commit, batch))
            except BaseException:
                # What was decided during the commit stands on what it would have stored.
                stored.follow(self.pending)
                self.pending = stored
                raise
        return stored

    def discard(self) -> Pending:
        """Give up what is pending; returns it, for those who must hear of that. `rebuild` has to follow."""
        self.is_rebuilding = True
        lost, self.pending = self.pending, Pending()
        return lost

    async def in_store(self, call: Callable[[], T]) -> T:
        """Run a call to the store in its thread. One at a time: only the driver's loop calls this."""
        return await self._thread.run(call)

    def close(self) -> None:
        """Let the store's thread end. Nothing is to be stored or read after this."""
        self._thread.end()

    # --- a full disk -------------------------------------------------------------------------------------------------

    def became_full(self, error: DiskFull) -> None:
        now = self._now().steady
        if not self.read_only:
            flapped = now - self._recovered_at < FLAP_SECONDS
            self._probe_pause = min(PROBE_SECONDS_MAX, self._probe_pause * 2) if flapped else PROBE_SECONDS
            _log.error("read-only: %s; nothing is accepted or offered until the disk takes writes again", error)
        self.read_only = str(error)
        self.probe_at = now + self._probe_pause

    async def probe(self) -> bool:
        """Does the disk take writes again?"""
        try:
            await self.in_store(self.store.probe)
        except DiskFull:
            self.probe_at = self._now().steady + self._probe_pause
            return False
        _log.info("the disk takes writes again; was read-only: %s", self.read_only)
        self.read_only = ""
        self._recovered_at = self._now().steady
        return True
