"""Can a job's directory be used here? Asked in threads, because a dead file server answers never.

Rules
- One question per directory at a time: a file server that hangs holds one thread per directory, not one per job.
- A good answer is believed for a moment, so that a thousand short jobs do not ask a thousand times; a bad one never,
  because a directory may appear at any time.
- A look that hangs has one task, until the kernel lets its thread go. Whoever else asks for the same directory, or has
  to wait for a thread, is told after a while that it does not answer: a dead file server may stay dead for days.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field

import trio

from kueue import threads
from kueue.model import Place, from_os_text, shown

BELIEVED_SECONDS = 0.5
THREADS = 40
"""So many directories may hang before others have to wait."""


@dataclass
class _Look:
    """One that is under way."""

    problem: str | None
    """What to say of the directory; until the answer is there, that there is none."""
    is_over: trio.Event = field(default_factory=trio.Event)


class Directories:
    """Answers for directories, each after a look at it. `patience_seconds`: how long to wait for others."""

    def __init__(self, patience_seconds: float) -> None:
        self._patience_seconds = patience_seconds
        self._threads = trio.Semaphore(THREADS)
        """Waited for with patience, unlike the limiter, which has as many."""
        self._limiter = trio.CapacityLimiter(THREADS)
        self._good_until: dict[str, float] = {}
        self._looks: dict[str, _Look] = {}

    def is_known_good(self, place: Place) -> bool:
        """It was found good a moment ago."""
        return self._good_until.get(from_os_text(place.cwd), 0.0) > trio.current_time()

    async def problem(self, place: Place) -> str | None:
        """None if a job can start there, else a sentence why not. May never return, to one at a time for each path."""
        if self.is_known_good(place):
            return None
        path = from_os_text(place.cwd)
        other = self._looks.get(path)
        if other is not None:
            with trio.move_on_after(self._patience_seconds):
                await other.is_over.wait()
            return other.problem
        ours = self._looks[path] = _Look(f"the directory {shown(place.cwd)} does not answer")
        try:
            with trio.move_on_after(self._patience_seconds) as patience:
                await self._threads.acquire()
            if not patience.cancelled_caught:
                ours.problem = await self._look(path, place)
        finally:
            del self._looks[path]
            ours.is_over.set()
        return ours.problem

    async def _look(self, path: str, place: Place) -> str | None:
        """In a thread that was granted. A good answer is noted."""
        try:
            problem = await threads.patiently(
                look, path, shown(place.cwd), abandon_on_cancel=True, limiter=self._limiter
            )
        finally:
            self._threads.release()
        if problem is None:
            if len(self._good_until) > 1000:
                self._good_until.clear()
            self._good_until[path] = trio.current_time() + BELIEVED_SECONDS
        return problem


def look(path: str, name: str) -> str | None:
    """One look, which may hang. `name`: the path as people shall read it."""
    try:
        found = os.stat(path)  # noqa: PTH116  surrogate escapes and speed
        if not stat.S_ISDIR(found.st_mode):
            return f"{name} is not a directory"
        if not os.access(path, os.X_OK):
            return f"{name}: Permission denied"
    except FileNotFoundError:
        return f"no such directory: {name}"
    except (OSError, ValueError) as error:
        return f"{name}: {error.strerror if isinstance(error, OSError) else error}"
    return None
