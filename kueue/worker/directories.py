"""Can a job's directory be used here? Asked in threads, because a dead file server answers never.

Rules
- One question per directory at a time: a file server that hangs holds one thread per directory, not one per job.
- A good answer is believed for a moment, so that a thousand short jobs do not ask a thousand times; a bad one never,
  because a directory may appear at any time.
- Whoever asks decides how long to wait (`kueue.worker.agent`); the thread is left alone until the kernel lets it go.
"""

from __future__ import annotations

import os
import stat

import trio

from kueue.model import Place, from_os_text, shown

BELIEVED_SECONDS = 0.5
THREADS = 40
"""So many directories may hang before others have to wait."""


class Directories:
    """Answers for directories, each after a look at it."""

    def __init__(self) -> None:
        self._limiter = trio.CapacityLimiter(THREADS)
        self._good_until: dict[str, float] = {}
        self._asked: dict[str, trio.Event] = {}
        self._answers: dict[str, str | None] = {}

    def is_known_good(self, place: Place) -> bool:
        """It was found good a moment ago."""
        return self._good_until.get(from_os_text(place.cwd), 0.0) > trio.current_time()

    async def problem(self, place: Place) -> str | None:
        """None if a job can start there, else a sentence why not. May never return."""
        if self.is_known_good(place):
            return None
        path = from_os_text(place.cwd)
        while path in self._asked:
            asked = self._asked[path]
            await asked.wait()
            if path in self._answers:
                return self._answers[path]
        event = self._asked[path] = trio.Event()
        self._answers.pop(path, None)
        try:
            problem = await trio.to_thread.run_sync(
                look, path, shown(place.cwd), abandon_on_cancel=True, limiter=self._limiter
            )
        finally:
            del self._asked[path]
            event.set()
        self._answers = {path: problem}
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
