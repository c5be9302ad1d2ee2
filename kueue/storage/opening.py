"""Opens the state file: makes a new one, refuses what must not be touched, migrates what is older.

Rules
- Every reason to refuse is found through a connection that can only read, so that a refused file stays as it is, byte
  for byte, with the log beside it.
- A new file appears under its name only when it is complete, and never where another one has been.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from kueue import log, places
from kueue.core.facts import Aggregates
from kueue.errors import StorageError
from kueue.storage import cut, schema
from kueue.storage.damage import DAMAGE, LEFT, words
from kueue.storage.limits import LOG_BYTES

MAGIC = b"SQLite format 3\0"

_log = log.logger("storage")

LEFT_BESIDE = ("-wal", "-journal", ".ballast", places.CUT_SUFFIX)
"""Made only beside a state that has its name, so that they tell of one that is gone: not even a first start that is
killed leaves them alone.
"""


class Host(NamedTuple):
    """The machine whose server may use the file."""

    name: str
    machine_id: str
    """Of machine-id(5); empty if the machine has none."""


def this_host() -> Host:
    machine_id = ""
    with contextlib.suppress(OSError):
        machine_id = Path("/etc/machine-id").read_text(encoding="ascii", errors="replace").strip()
    # Early in the first boot it says "uninitialized".
    return Host(socket.gethostname(), machine_id if len(machine_id) == 32 else "")


class Wanted(NamedTuple):
    """How a file shall be opened."""

    path: Path
    is_network: bool
    """On a network file system: no shared memory and no log that only one host sees, a plain journal instead."""
    host: Host
    take_over: bool
    target: int = schema.FORMAT
    steps: Mapping[int, schema.Step] = schema.STEPS


def connect(wanted: Wanted) -> sqlite3.Connection:
    """The only connection to a file of the current format, locked for as long as it is open.

    Raises `StorageError` if another server has it, it is damaged, newer, of another host, or no state of kueue.
    """
    path = wanted.path
    if not path.exists():
        _create(wanted)
    note, is_anew = cut.read(path), cut.is_anew(path)
    if note is not None and not note.is_log and note.queue_id and not is_anew:
        raise StorageError(f"{path} is damaged: a part of it was cut away while the server ran", hint=LEFT)
    cut.empty_log(path)
    if is_anew:
        cut.remove(path)
        _log.warning("%s was written anew, because a file of it was made shorter. Nothing is lost", path)
    is_wal = _look_at_header(wanted)
    looked = False
    # Reading a write-ahead log needs shared memory unless the file is locked for good: not on a network file system.
    if not (wanted.is_network and is_wal):
        looked = _look_at_content(wanted)
    connection = _connect(path, "rw")
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        # The first write takes the lock, and exclusive mode keeps it.
        connection.execute("BEGIN EXCLUSIVE")
        connection.execute("COMMIT")
        if not looked:
            _examine(connection, wanted, thorough=True)
        else:
            _examine(connection, wanted, thorough=False)
        connection.execute(f"PRAGMA journal_mode = {'TRUNCATE' if wanted.is_network else 'WAL'}")
        connection.execute("PRAGMA synchronous = FULL")
        # 16 MiB of log, then it goes into the file even if there is no idle moment. An error there fails no commit.
        connection.execute("PRAGMA wal_autocheckpoint = 4000")
        connection.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")
        connection.execute("PRAGMA cache_size = -32000")
        connection.execute("PRAGMA temp_store = MEMORY")
        _migrate(connection, wanted)
        _settle_host(connection, wanted)
    except BaseException:
        connection.close()
        raise
    return connection


def is_state(header: bytes) -> bool:
    """Are these the first 100 bytes of a state file of kueue, of whatever format? Layout: sqlite.org/fileformat2."""
    return (
        len(header) == 100
        and header.startswith(MAGIC)
        and int.from_bytes(header[68:72], "big") == schema.APPLICATION_ID
    )


def check_header(path: Path) -> None:
    """Raises `StorageError` unless this is a state file of kueue, of a format that we know. The file is only read."""
    _look_at_header(Wanted(path, is_network=False, host=Host("", ""), take_over=True))


def open_to_copy(path: Path) -> sqlite3.Connection:
    """The only connection to a file that shall be copied as it is: whatever its format up to ours, and its host.

    The caller holds the server's lock. Raises `StorageError` if another server has it, it is newer or no state of
    kueue, or a log that is void cannot be emptied.
    """
    check_header(path)
    try:
        cut.empty_log(path)
    except OSError as error:
        raise StorageError(f"What is void of the log of {path} cannot be removed: {error}") from error
    connection = _connect(path, "rw")
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("BEGIN EXCLUSIVE")
        connection.execute("COMMIT")
    except DAMAGE as error:
        connection.close()
        if "locked" in str(error):
            raise StorageError(f"Another program uses {path}", hint="Wait for its end, or stop it.") from error
        raise StorageError(f"{path} cannot be read: {words(error)}", hint=LEFT) from error
    except BaseException:
        connection.close()
        raise
    return connection


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    # A second server shall hear at once that it is the second; two that start together look at the file for some
    # milliseconds, and one of them shall win.
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}", uri=True, timeout=0.5, isolation_level=None, check_same_thread=False
    )


def _create(wanted: Wanted) -> None:
    path = wanted.path
    # `kueue_server --restore` and `--recover` move the old state away before the new one gets its name.
    kinds = (("restore", f"{path.name}.restored-*", "--restore FILE"), ("recovery", "recovered-*.sqlite", "--recover"))
    for kind, pattern, option in kinds:
        for draft in path.parent.glob(pattern):
            raise StorageError(
                f"{path} is missing, but {draft.name} is there: a {kind} was interrupted",
                hint=f"Do it again (kueue_server {option}), or move that file away to begin with an empty queue.",
            )
    left = [f"{path.name}{suffix}" for suffix in LEFT_BESIDE if path.with_name(f"{path.name}{suffix}").exists()]
    # Another server may have made it meanwhile.
    if left and not path.exists():
        raise StorageError(
            f"The state {path} is missing, though there was one; what is left of it: {', '.join(left)}",
            hint="Put it back, or take a backup (`kueue_server --restore FILE`). To begin with an empty queue, remove "
            "what is left.",
        )
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.new-{os.getpid()}")
    draft.unlink(missing_ok=True)
    os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
    try:
        connection = _connect(draft, "rw")
        try:
            schema.create(connection)
            meta = {"queue_id": secrets.token_hex(16), "host": wanted.host.name, "machine_id": wanted.host.machine_id}
            connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
            connection.execute("INSERT INTO aggregates VALUES (1, ?)", (msgspec.json.encode(Aggregates()),))
            connection.execute("COMMIT")
        finally:
            connection.close()
        _publish(draft, path)
    finally:
        draft.unlink(missing_ok=True)
        draft.with_name(f"{draft.name}-journal").unlink(missing_ok=True)
    places.sync_directory(path.parent)


def _publish(draft: Path, path: Path) -> None:
    # A link, not a rename: it fails if another server was faster, whose file must not be replaced.
    try:
        os.link(draft, path)
    except FileExistsError:
        return
    except OSError:
        # Some network file systems have no links.
        if path.exists():
            return
        draft.rename(path)


def _look_at_header(wanted: Wanted) -> bool:
    """Refuse what the first 100 bytes tell; true if the file has a write-ahead log. Layout: sqlite.org/fileformat2."""
    path = wanted.path
    with path.open("rb") as file:
        header = file.read(100)
    if len(header) < 100 or not header.startswith(MAGIC):
        raise StorageError(f"{path} is damaged: it is not a database", hint=LEFT)
    if int.from_bytes(header[68:72], "big") != schema.APPLICATION_ID:
        raise StorageError(
            f"{path} is not the state of a kueue server", hint="It was left as it is; name another file."
        )
    _refuse_version(wanted, int.from_bytes(header[60:64], "big", signed=True))
    return header[18] == 2


def _refuse_version(wanted: Wanted, version: int) -> None:
    path, target = wanted.path, wanted.target
    if version > target:
        raise StorageError(
            f"{path} was written by a newer kueue (format {version}; this one knows {target})",
            hint="It was left as it is; install the newer kueue again.",
        )
    if any(old not in wanted.steps for old in range(version, target)):
        raise StorageError(
            f"{path} has format {version}, which is too old for this kueue (format {target})",
            hint="It was left as it is; open it once with a kueue in between.",
        )


def _look_at_content(wanted: Wanted) -> bool:
    """Refuse what needs reading; false if that cannot be done without writing.

    So it is when a transaction must be undone first, or when a full disk has no room for the index of the log.
    """
    beside = wanted.path.with_name(f"{wanted.path.name}-wal")
    has_log = beside.exists()
    try:
        with contextlib.closing(_connect(wanted.path, "ro")) as connection:
            try:
                _examine(connection, wanted, thorough=True)
            finally:
                if not has_log:
                    _drop_empty(beside, connection)
    except sqlite3.OperationalError as error:
        if any(sign in str(error) for sign in ("readonly", "unable to open", "I/O")):
            return False
        raise
    finally:
        # A reader of a write-ahead log leaves it behind. No server uses it: exclusive mode keeps that index in memory.
        wanted.path.with_name(f"{wanted.path.name}-shm").unlink(missing_ok=True)
    return True


def _drop_empty(beside: Path, connection: sqlite3.Connection) -> None:
    """Remove the empty log that a reader makes where there was none."""
    with contextlib.suppress(*DAMAGE, OSError):
        # Whoever has read holds a lock as long as it is open, and nobody else can have begun a log of his own.
        schema.version_of(connection)
        if not beside.stat().st_size:
            beside.unlink()


def _examine(connection: sqlite3.Connection, wanted: Wanted, *, thorough: bool) -> None:
    _refuse_version(wanted, schema.version_of(connection))
    if thorough:
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(f"malformed: {verdict}")
    meta = dict(connection.execute("SELECT key, value FROM meta"))
    known = Host(meta.get("host", ""), meta.get("machine_id", ""))
    if wanted.take_over or _is_same(known, wanted.host):
        return
    raise StorageError(
        f"{wanted.path} belongs to the server on host {known.name or 'unknown'}; this is {wanted.host.name}",
        hint="If that server will not run again, start this one with --take-over.",
    )


def _is_same(one: Host, other: Host) -> bool:
    if one.machine_id and other.machine_id:
        return one.machine_id == other.machine_id
    return one.name == other.name


def _migrate(connection: sqlite3.Connection, wanted: Wanted) -> None:
    version = schema.version_of(connection)
    if version == wanted.target:
        return
    _refuse_version(wanted, version)
    backup = wanted.path.with_name(f"{wanted.path.name}.format-{version}")
    draft = backup.with_name(f"{backup.name}.new")
    draft.unlink(missing_ok=True)
    os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
    try:
        with contextlib.closing(_connect(draft, "rw")) as copy:
            connection.backup(copy)
            # As one file without a log beside it, so that it can be moved about.
            copy.execute("PRAGMA journal_mode = DELETE")
        draft.replace(backup)
    finally:
        draft.unlink(missing_ok=True)
    schema.migrate(connection, target=wanted.target, steps=wanted.steps)


def _settle_host(connection: sqlite3.Connection, wanted: Wanted) -> None:
    host = wanted.host
    meta = dict(connection.execute("SELECT key, value FROM meta"))
    if (meta.get("host"), meta.get("machine_id")) == host:
        return
    connection.execute("BEGIN IMMEDIATE")
    rows = [("host", host.name), ("machine_id", host.machine_id)]
    connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows)
    connection.execute("COMMIT")
