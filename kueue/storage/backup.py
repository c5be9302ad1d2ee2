"""A consistent copy of the open state file, made in small portions between which its owner goes on writing.

Rules
- The copy is made under a draft's name beside the target, checked whole, flushed, and only then gets its name. Whatever
  goes wrong before leaves nothing behind.
- A file server that hangs must not hang the state's owner: a copy that goes to one is first made beside the state, and
  brought there by `finish`, which needs no turn of the owner. Other disks are written at once.
- Whoever waits for `finish` may stop waiting: after `abort` it publishes nothing more, whenever its file server
  answers, and touches no file but those it has made itself.
- What fails here is the copy's trouble alone and comes as `UserError`: the state and its owner are as before.

Theory of operation
    SQLite copies page by page (sqlite.org/backup.html) and keeps what it has copied true when *the same connection*
    writes between two portions. Python offers that only as one call that returns at the end. So the call runs in a
    thread of its own, which stands still after each portion until `Copy.step` lets it go on for one more: the
    connection is never used by two at once, and the copy is of the moment of its last portion.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from kueue import places, threads
from kueue.errors import StorageError, UserError
from kueue.storage import rows
from kueue.storage.damage import DAMAGE, words
from kueue.storage.opening import is_state
from kueue.storage.room import NO_ROOM

PORTION_PAGES = 256
"""1 MiB, some milliseconds."""

_DONE = 101
"""SQLITE_DONE of sqlite.org/rescode.html: that was the last portion. Python 3.10 has no name for it."""

_NAME_BYTES = 200
"""Of the target's name in that of its draft: with the rest it must stay below the 255 of file systems."""

OLD_SECONDS = 86400.0
"""A draft that has not grown for so long has no maker any more."""

RESERVE_BYTES = 32 * 2**20
"""Left free for the owner when the copy goes to the disk that the state lies on."""


class Progress(NamedTuple):
    """Bytes of the file."""

    done: int
    total: int


class Summary(NamedTuple):
    """What a copy holds."""

    size: int
    """Bytes."""
    live: int
    """Jobs that are not over."""
    finished: int
    next_job: int
    queue_id: str


class Plan(NamedTuple):
    """Where a copy goes. Made by `plan`."""

    target: Path
    force: bool
    """A file that is there is replaced."""
    is_staged: bool
    """It is made beside the state first."""


class _Aborted(Exception):
    """Ends the call to SQLite."""


class Copy:
    """One copy on its way from the connection `source` (of the file at `path`) to `target`.

    To be made, and stepped, in the turn of whoever owns the connection; `finish` and `abort` need no turn. The caller
    has called `plan`. Raises `UserError` when there cannot be a copy.
    """

    def __init__(self, source: sqlite3.Connection, path: Path, plan: Plan) -> None:
        self._source = source
        self._target = plan.target
        self._plan = plan
        self._is_over = self._is_aborted = self._is_published = False
        self._progress = Progress(0, 1)
        self._failure: BaseException | None = None
        self._turn = threading.Lock()
        self._go = threading.Semaphore(0)
        self._stands = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._final = _draft_of(plan.target)
        self._draft = path.with_name(f"{path.name}.copy") if plan.is_staged else self._final
        self._page = _number(source, "PRAGMA page_size")
        _check_room(self._draft, path, self._page * _number(source, "PRAGMA page_count"))
        self._own: dict[Path, tuple[int, int]] = {}
        """The drafts that were made here → device and inode. A later copy to the same target has the same names."""
        self._connection = self._opened()

    def _opened(self) -> sqlite3.Connection:
        with _told(self._target), contextlib.ExitStack() as undone:
            undone.callback(self._unlink, self._draft)
            os.close(self._create(self._draft))
            connection = open_alone(self._draft, "rw")
            undone.callback(connection.close)
            # A draft that a crash spoils is worth nothing; it is flushed once, when it is whole.
            connection.execute("PRAGMA journal_mode = OFF")
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute("PRAGMA cache_size = -4000")
            undone.pop_all()
            return connection

    def step(self) -> bool:
        """Copy one portion. True when all is copied. Raises `UserError`; nothing is left behind then."""
        with self._turn:
            self._go_on()
            if self._is_over:
                return True
            if self._thread is None:
                self._thread = _begun(self._run)
            self._go.release()
            self._stands.acquire()
            if not self._is_over:
                return False
            self._thread.join()
            if self._failure is None:
                return True
        self.abort()
        with _told(self._target):
            raise self._failure

    @property
    def progress(self) -> Progress:
        return self._progress

    def _run(self) -> None:
        self._go.acquire()
        try:
            self._source.backup(self._connection, pages=PORTION_PAGES, progress=self._stand, sleep=0.001)
        except BaseException as error:  # noqa: BLE001  raised again by `step`, in the thread of who waits for it
            self._failure = error
        self._is_over = True
        self._stands.release()

    def _stand(self, status: int, remaining: int, total: int) -> None:
        self._progress = Progress((total - remaining) * self._page, total * self._page)
        if status == _DONE:
            return
        self._stands.release()
        self._go.acquire()
        if self._is_aborted:
            raise _Aborted

    def finish(self) -> Summary:
        """Check the whole copy and give it its name. Takes seconds for a large one, for ever on a dead file server.

        Raises `UserError`, also when it was given up meanwhile; nothing is left behind then.
        """
        try:
            with _told(self._target):
                self._connection.close()
                summary = self._examined()
                self._publish()
                return summary
        except BaseException:
            self.abort()
            self.leave()
            raise

    def _examined(self) -> Summary:
        with self._draft.open("r+b") as file:
            # Marked as a file without a log beside it, so that it can be moved about and read without locks. Layout:
            # sqlite.org/fileformat2, "file format version numbers". SQLite itself does this only under a lock.
            file.seek(18)
            file.write(b"\1\1")
            file.flush()
            os.fsync(file.fileno())
        connection = open_alone(self._draft, "ro")
        try:
            return examined(connection, self._draft)
        finally:
            connection.close()

    def _publish(self) -> None:
        if self._draft != self._final:
            self._bring()
        self._go_on()
        # A copy takes its time: what was free may be taken.
        if self._plan.force:
            self._final.replace(self._target)
        else:
            _rename_new(self._final, self._target)
        places.sync_directory(self._target.parent)
        self._is_published = True

    def _bring(self) -> None:
        with self._draft.open("rb") as source, os.fdopen(self._create(self._final), "wb") as sink:
            while portion := source.read(PORTION_PAGES * 4096):
                self._go_on()
                sink.write(portion)
            sink.flush()
            os.fsync(sink.fileno())
        self._unlink(self._draft)

    def _create(self, draft: Path) -> int:
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        about = os.fstat(descriptor)
        self._own[draft] = (about.st_dev, about.st_ino)
        return descriptor

    def _unlink(self, draft: Path) -> None:
        with contextlib.suppress(OSError):
            about = draft.lstat()
            # Once only: after that its inode may be that of the next file of this name.
            if self._own.pop(draft, None) == (about.st_dev, about.st_ino):
                draft.unlink()

    def _go_on(self) -> None:
        if self._is_aborted:
            raise UserError(f"The copy to {self._target} was given up.")

    def abort(self) -> None:
        """Give the copy up and remove what there is of it beside the state; does nothing to a finished one.

        What there is of it at a file server is removed by `leave`.
        """
        if self._is_published:
            return
        with self._turn:
            self._is_aborted = True
            if self._thread is not None and self._thread.is_alive():
                self._go.release()
                self._thread.join()
            self._connection.close()
            self._unlink(self._draft)

    def lose_source(self) -> None:
        """The connection will be closed: give the copy up unless all of it was read. In the owner's turn."""
        if not self._is_over:
            self.abort()

    def leave(self) -> None:
        """Remove what there is of a copy that was given up where it was to go. Hangs with a file server that does."""
        if not self._is_published:
            self._unlink(self._final)


def _begun(run: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=run, name="kueue-backup", daemon=True)
    with threads.wanted("backup"):
        thread.start()
    return thread


def open_alone(path: Path, mode: str, *, is_still: bool = False) -> sqlite3.Connection:
    """A connection to a file that nobody else uses: no locks (file servers without them), no shared memory.

    `is_still`: it does not change and has no log beside it, even if it is marked as a file that has one.
    """
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}&nolock=1{'&immutable=1' if is_still else ''}",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE").fetchall()
    except BaseException:
        connection.close()
        raise
    return connection


def examined(connection: sqlite3.Connection, path: Path) -> Summary:
    """What a complete state file holds, every page of it looked at.

    Raises what `DAMAGE` lists if it is damaged.
    """
    verdicts = [" ".join(str(verdict).split()) for (verdict,) in connection.execute("PRAGMA integrity_check(1)")]
    if verdicts != ["ok"]:
        raise sqlite3.DatabaseError(f"malformed: {verdicts[0]}")
    (queue_id,) = connection.execute("SELECT value FROM meta WHERE key = 'queue_id'").fetchone() or ("",)
    return Summary(
        size=path.stat().st_size,
        live=_number(connection, "SELECT ifnull(sum(remaining), 0) FROM ranges"),
        finished=_number(connection, "SELECT count(*) FROM finished"),
        next_job=rows.aggregates(connection).next_job,
        queue_id=str(queue_id),
    )


def plan(target: Path, state: Path, *, force: bool) -> Plan:
    """How a copy of the file `state` gets to `target`. May hang with the file server that holds it.

    `force`: a file at `target` is replaced. Raises `UserError` when it may not go there.
    """
    _check_target(target, state, force=force)
    sweep(target)
    return Plan(target, force, places.is_network(str(target.parent)))


def _check_target(target: Path, state: Path, *, force: bool) -> None:
    with _told(target):
        if not target.parent.is_dir():
            raise UserError(f"There is no directory {target.parent}.")
        _check_not_ours(target, state)
        try:
            found = target.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISREG(found.st_mode):
            raise UserError(f"{target} is not a file.", hint="Name a file for the backup, or one that does not exist.")
        if not force:
            raise UserError(f"{target} exists.", hint="Name another file, or replace it with --force.")


def _check_not_ours(target: Path, state: Path) -> None:
    """No name in the directories of the programs, taken or free: a lock that is replaced locks nobody out any more, and
    what is called like a journal of the state SQLite takes for one.
    """
    home = target.parent.resolve()
    server = state.parent.resolve()
    if home == server or home.is_relative_to(server.parent / "workers"):
        raise UserError(
            f"{target} would lie among the state of the server itself.",
            hint="Name a file in another directory, best on another disk.",
        )


def sweep(target: Path) -> bool:
    """Remove drafts of copies to `target` whose makers were killed. True if none is left, of the living either.

    Those of other copies beside it go when they are a day old: names of backups often have a date in them, and a maker
    on another host of a shared directory is not seen from here.
    """
    is_clean = True
    with contextlib.suppress(OSError):
        for draft in target.parent.iterdir():
            begin, _, pid = draft.name.rpartition("-")
            if not (begin.startswith(".") and begin.endswith(".part") and pid.isdecimal()):
                continue
            is_of_target = f"{begin}-" == _draft_prefix(target)
            if _lives(int(pid)):
                is_clean = is_clean and not is_of_target
            elif is_of_target or _is_old_draft(draft):
                draft.unlink(missing_ok=True)
    return is_clean


def _is_old_draft(draft: Path) -> bool:
    """An old file that is ours by its contents."""
    with contextlib.suppress(OSError):
        about = draft.lstat()
        if not stat.S_ISREG(about.st_mode) or time.time() - about.st_mtime < OLD_SECONDS:
            return False
        with draft.open("rb") as file:
            return is_state(file.read(100))
    return False


def sweep_beside(state: Path) -> None:
    """Remove what starts, copies, restores and recoveries have left that were killed. The caller holds the state's
    lock.
    """
    if state.exists():  # else it is to be told of: see `kueue.storage.opening`
        drafts = ("copy", "restored-*", "new-*", "trial-*", "format-*.new")
        patterns = (*(f"{state.name}.{draft}" for draft in drafts), "recovered-*.sqlite")
        for left in (path for pattern in patterns for path in state.parent.glob(pattern)):
            with contextlib.suppress(OSError):
                left.unlink()
        for bench in state.parent.glob("recovered-*.sqlite.salvage-*"):
            shutil.rmtree(bench, ignore_errors=True)
        for aside in (path for kind in ("before", "damaged") for path in state.parent.glob(f"{state.name}.{kind}-*")):
            # Killed between the link and the exchange: a second name of the state, which changes with it.
            with contextlib.suppress(OSError):
                if aside.samefile(state):
                    aside.unlink()


def _lives(pid: int) -> bool:
    try:
        # proc_pid_stat(5): the state follows the name, which may hold anything.
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in b"ZX"
    except (OSError, IndexError):
        return False


def _draft_of(target: Path) -> Path:
    return target.with_name(f"{_draft_prefix(target)}{os.getpid()}")


def _draft_prefix(target: Path) -> str:
    return f".{os.fsdecode(os.fsencode(target.name)[:_NAME_BYTES])}.part-"


def _check_room(target: Path, state: Path, size: int) -> None:
    """Before anything is written: a disk that is filled to the brim for a moment would stop the server, too."""
    with _told(target):
        about = os.statvfs(target.parent)
        free = about.f_bavail * about.f_frsize
        if target.parent.stat().st_dev == state.parent.stat().st_dev:
            free -= RESERVE_BYTES
    if free < size:
        raise _full(target, f": the copy takes {_mb(size)} MB, {_mb(max(0, free))} MB can be had")


def _mb(size: int) -> int:
    return -(-size // 2**20)


def _full(target: Path, more: str = "") -> UserError:
    return UserError(
        f"There is no room for the backup in {target.parent}{more}.",
        hint="Nothing was left there, and the server is unharmed. Name a directory on another disk.",
    )


@contextlib.contextmanager
def _told(target: Path) -> Iterator[None]:
    """Turns what the disk and SQLite say about a copy into a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise _full(target) from error
        hint = "A server that runs as a service may be kept from writing there; a path below your home is best."
        is_kept_out = error.errno in {errno.EROFS, errno.EACCES, errno.EPERM}
        raise UserError(
            f"The backup {target} cannot be written: {error.strerror or error}.", hint=hint if is_kept_out else ""
        ) from error
    except DAMAGE as error:
        if "is full" in str(error):
            raise _full(target) from error
        raise UserError(f"The backup {target} cannot be made: {words(error)}.") from error


def _rename_new(draft: Path, target: Path) -> None:
    """Give the draft its name unless that is taken meanwhile."""
    try:
        os.link(draft, target)
    except FileExistsError:
        raise UserError(f"{target} exists.", hint="Name another file, or replace it with --force.") from None
    except OSError:
        draft.rename(target)  # no hard links there (FAT, some file servers): almost as good
    else:
        draft.unlink()


def _number(connection: sqlite3.Connection, query: str) -> int:
    row = connection.execute(query).fetchone()
    if row is None:
        raise StorageError(f"Nothing answers {query}")
    return int(row[0])
