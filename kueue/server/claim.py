"""The server's claim on its lock, which says on this host that there is a server.

Rules
- Runners of this host prolong their leases while the file at its path is held by nobody. So it is looked at whenever
  somebody comes, with each heartbeat, with the upkeep, and before a silence counts. Silence that was counted while it
  was not in place, or may not have been, says nothing: it counts anew from the moment it is back.
- It is taken back, whatever is there, as long as nobody holds that. That this server is the only one is seen to by the
  lock of its state, which it has had since its start: whoever holds the file meanwhile is a second server that is
  refused in a moment, or a `--backup` or `--restore` that is, too. The file is taken when they are gone.
- A directory that is not ours any more is left alone: the state is gone with it, and the next commit ends the server
  (`kueue.storage.own_files`).
"""

from __future__ import annotations

import os
from types import TracebackType

from kueue import log, places
from kueue.errors import KueueError, StorageError

WHO = "A kueue server"

_log = log.logger("server")


class Claim:
    """Of the server that holds `lock`, which it takes over: to be used as a context, which gives it up at the end.

    `is_watched`: False where a look may hang (a network file system); runners make none there either.
    """

    def __init__(self, lock: places.Lock, *, is_watched: bool = True) -> None:
        self._lock = lock
        self._is_watched = is_watched and lock.is_in_place() is True
        # While it is open, no other directory is given its number.
        self._directory = os.open(os.path.dirname(lock.path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)  # noqa: PTH120  as in places
        self._is_told = False

    def __enter__(self) -> Claim:  # noqa: PYI034  Self is not in Python 3.10
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()
        os.close(self._directory)

    def stands(self) -> bool:
        """Was the lock in its place? If not, it is by now, where that can be done. One stat, as long as all is well."""
        if not self._is_watched:
            return True
        if self._lock.is_in_place():
            self._is_told = False
            return True
        if not self._is_same_directory():
            self._warn(
                "the directory of %s was removed or replaced: no job is given away, and nothing will be accepted. Put "
                "it back if you can, and start the server again"
            )
            return False
        try:
            self._lock.take_back(WHO)
        except StorageError as error:
            self._warn(f"%s was removed or replaced and cannot be put back; no job is given away until it is: {error}")
        except (KueueError, OSError):
            self._warn(
                "%s was removed or replaced, and another process holds what is there now; no job is given away until "
                f"that has ended{self._holder()}"
            )
        else:
            self._is_told = False
            _log.warning(
                "%s was removed or replaced: it is put back, and silence of workers counts anew. Leave the files of a "
                "running server alone",
                self._lock.path,
            )
        return False

    def _is_same_directory(self) -> bool:
        try:
            return os.path.samestat(os.stat(os.path.dirname(self._lock.path)), os.fstat(self._directory))  # noqa: PTH116, PTH120  as above
        except OSError:
            return False

    def _holder(self) -> str:
        try:
            pid = places.holder(self._lock.path)
        except OSError:
            pid = None
        return f" (pid {pid})" if pid else ""

    def _warn(self, text: str) -> None:
        """Once, until it is in place again."""
        if not self._is_told:
            _log.warning(text, self._lock.path)
        self._is_told = True
