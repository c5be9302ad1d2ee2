"""What a worker has in its directory: the lock that keeps a second one of the same identity away.

Rules
- A held lock keeps others away only as long as its file is at its path. That is looked at before each try to reach the
  server and each hello, before each start that is handed to a runner, and with each heartbeat.
- A lock that was removed, with nothing in its place, is put back: whoever takes the file first has it, also of two that
  start at this moment, so there is never more than one. Its attempts and records are all still there.
- Another file there means that another worker is or was at work in this directory, and a directory that is gone takes
  the identity, the records and the sockets of the runners with it. Then nothing is claimed any more, for good: the jobs
  go on under their runners, and the lease sees to it that none runs twice.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from kueue import log, places
from kueue.errors import KueueError, StorageError

_log = log.logger("worker")


class Claim:
    """One worker's right to `folder`, by its lock there. To be used as a context: it gives the lock up at the end.

    `who`: as in the sentences. `is_watched`: False where a look may hang (a network file system).
    """

    def __init__(self, folder: str, who: str, *, is_watched: bool = True) -> None:
        """Takes the lock. Raises `KueueError` if another one has it, and what `places.lock_exclusive` raises."""
        self.loss: KueueError | None = None
        """Why nothing is claimed any more."""
        self.on_loss: Callable[[], None] = lambda: None
        """Called once when it is lost, from the look that found it out."""
        self._folder = folder
        self._who = who
        self._lock = places.lock_exclusive(f"{folder}/lock", who)
        self._is_watched = is_watched and self._lock.is_in_place() is True
        self._directory = places.KeptDirectory(folder)
        self._is_told = False

    def __enter__(self) -> Claim:  # noqa: PYI034  Self is not in Python 3.10
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()
        self._directory.close()

    def holds(self) -> bool:
        """Is this directory still ours alone? One stat, as long as all is well. Once False, always False."""
        if self.loss is not None:
            return False
        is_in_place = self._lock.is_in_place() if self._is_watched else True
        if is_in_place is None:
            self._put_back()
        elif not is_in_place:
            self._lose_to_another()
        return self.loss is None

    def _put_back(self) -> None:
        if not self._directory.is_in_place():
            self._lose(
                f"The directory {self._folder} was removed or replaced while {self._in_text} ran: it ends.",
                "If it was moved: remove what its runner has made there meanwhile, put it back and start the worker "
                "again; it takes up its jobs. Else `kueue up` makes a new worker, and the server gives the jobs away.",
            )
            return
        try:
            self._lock.take_back(self._who)
        except StorageError as error:
            # Where we can make no file another one cannot either; and before the next start we look again.
            if not self._is_told:
                _log.warning("the lock of this worker was removed and cannot be put back: %s", error)
            self._is_told = True
            return
        except KueueError:
            self._lose_to_another()
            return
        self._is_told = False
        _log.warning("%s was removed: it is put back. It keeps a second worker from starting here", self._lock.path)

    def _lose_to_another(self) -> None:
        pid = places.holder(self._lock.path)
        self._lose(
            f"{self._lock.path} was replaced while {self._in_text} ran: it ends, and its jobs go on.",
            f"The worker that has it now (pid {pid}) takes them up. Files named lock are never to be removed."
            if pid
            else "`kueue up` starts a worker that takes them up. Files named lock are never to be removed.",
        )

    @property
    def _in_text(self) -> str:
        return self._who[:1].lower() + self._who[1:]

    def _lose(self, sentence: str, hint: str) -> None:
        self.loss = KueueError(sentence, hint=hint)
        self.on_loss()
