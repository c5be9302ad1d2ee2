"""The server's claim on its lock, which says on this host that there is a server.

Rules
- Runners of this host prolong their leases while the file at its path is held by nobody. So it is looked at whenever
  somebody comes, with each heartbeat, with the upkeep, and before a silence counts. Silence that was counted while it
  was not in place, or may not have been, says nothing: it counts anew from the moment it is back.
- Moved away and back between two looks it shows by its change time alone, which a rename sets (POSIX leaves that open;
  the local file systems of Linux do). A chmod or a backup tool sets it, too, and costs one count. Who does that time
  and again must not keep a dead worker from being given away for ever: after `TOUCHES` within a day it counts no more.
- It is taken back, whatever is there, as long as nobody holds that. That this server is the only one is seen to by the
  lock of its state, which it has had since its start: whoever holds the file meanwhile is a second server that is
  refused in a moment, or a `--backup` or `--restore` that is, too. The file is taken when they are gone.
- A directory that is not ours any more is left alone: the state is gone with it, and the next commit ends the server
  (`kueue.storage.own_files`).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from types import TracebackType

from kueue import clock, log, places
from kueue.errors import KueueError, StorageError

WHO = "A kueue server"

TOUCHES = 3
"""Changes of the lock's own file within `TOUCHES_SECONDS` that count as "it may have been away"."""
TOUCHES_SECONDS = 86400.0
"""Far above every `worker_timeout_seconds`: what changes it less often holds no silence up for ever."""
REMINDER_SECONDS = 60.0
"""No job is given away as long as it cannot be taken back: that is said again and again."""

_log = log.logger("server")


class Claim:
    """Of the server that holds `lock`, which it takes over: to be used as a context, which gives it up at the end.

    `is_watched`: False where a look may hang (a network file system); runners make none there either. `steady`: seconds
    of a clock that does not jump.
    """

    def __init__(
        self, lock: places.Lock, *, is_watched: bool = True, steady: Callable[[], float] = clock.steady
    ) -> None:
        self.trouble = ""
        """Why no job is given away since the last look, one sentence; empty: the lock stood, or was put back."""
        self._lock = lock
        # Another file right after it was taken: this file system numbers open files anew, and every look would be
        # false. None at all: it was removed just now, which is what the looks are for.
        self._is_watched = is_watched and lock.is_in_place() is not False
        self._directory = places.KeptDirectory(os.path.dirname(lock.path))  # noqa: PTH120  as in places
        self._steady = steady
        self._changed_ns = lock.changed_ns()
        self._touches: deque[float] = deque(maxlen=TOUCHES + 1)
        """When its change time was seen to be another one."""
        self._said_at = float("-inf")

    def __enter__(self) -> Claim:  # noqa: PYI034  Self is not in Python 3.10
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()
        self._directory.close()

    def stands(self) -> bool:
        """Was the lock in its place? If not, it is by now, where that can be done. Two stats while all is well."""
        if not self._is_watched:
            return True
        if self._lock.is_in_place():
            is_touched = self._is_touched()
            if not self.trouble:
                return not is_touched
            # Also between the last look and its return somebody may have found nobody there.
            _log.info("%s is in its place again: silence of workers counts anew", self._lock.path)
            self._is_back()
            return False
        if not self._directory.is_in_place():
            self._warn(
                "The directory of %s was removed or replaced: no job is given away, and nothing will be accepted",
                ". Put it back if you can, and start the server again",
            )
            return False
        try:
            self._lock.take_back(WHO)
        except StorageError as error:
            self._warn(
                "%s was removed or replaced and cannot be put back; no job is given away until it is", f": {error}"
            )
        except (KueueError, OSError):
            self._warn(
                "%s was removed or replaced, and another process holds what is there now; no job is given away until "
                "that has ended",
                self._holder,
            )
        else:
            self._is_back()
            self._changed_ns = self._lock.changed_ns()
            _log.warning(
                "%s was removed or replaced: it is put back, and silence of workers counts anew. Leave the files of a "
                "running server alone",
                self._lock.path,
            )
        return False

    def _is_back(self) -> None:
        self.trouble = ""
        self._said_at = float("-inf")

    def _is_touched(self) -> bool:
        """Was its file changed by somebody else since the last look, as by moving it away and back?"""
        changed_ns = self._lock.changed_ns()
        if changed_ns == self._changed_ns:
            return False
        self._changed_ns = changed_ns
        was_ignored = self._is_often_touched()
        self._touches.append(self._steady())
        if not self._is_often_touched():
            _log.warning(
                "%s was moved away and back, or touched: silence of workers counts anew. Leave the files of a running "
                "server alone",
                self._lock.path,
            )
            return True
        if not was_ignored:
            _log.warning(
                "%s is touched again and again (by a backup tool, a chmod?): that no longer counts as moved away until "
                "it is rarer than %d times a day. Find out who does it: if somebody moves it, a job may run twice",
                self._lock.path,
                TOUCHES,
            )
        return False

    def _is_often_touched(self) -> bool:
        return len(self._touches) > TOUCHES and self._steady() - self._touches[0] < TOUCHES_SECONDS

    def _holder(self) -> str:
        try:
            pid = places.holder(self._lock.path)
        except OSError:
            pid = None
        return f" (pid {pid})" if pid else ""

    def _warn(self, text: str, more: str | Callable[[], str]) -> None:
        """Once a minute, until it is in place again. `more`: behind it, and asked for only then."""
        self.trouble = text % self._lock.path
        now = self._steady()
        if now - self._said_at < REMINDER_SECONDS:
            return
        self._said_at = now
        _log.warning("%s%s", self.trouble, more if isinstance(more, str) else more())
