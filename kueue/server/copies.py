"""`kueue_server --backup FILE`: asks the server that runs, or copies the state itself if none does.

Rules
- The held lock says whether a server runs. Its local socket is found in its directory, not by the settings: they may
  have changed since it was started.
- Results go to stdout, remarks and progress to stderr.
"""

from __future__ import annotations

import contextlib
import sqlite3
import sys
import time
from pathlib import Path

import msgspec

from kueue import places
from kueue.client import Client
from kueue.errors import KueueError, Refused, StorageError, Unreachable, UserError
from kueue.model import to_os_text
from kueue.server.claim import WHO
from kueue.server.recovery import state_file
from kueue.storage import backup
from kueue.storage.opening import open_to_copy
from kueue.transport import Server

STARTING_SECONDS = 30.0
"""A server holds its lock before it listens: with a large state for some seconds."""
LOOK_SECONDS = 0.1
GONE_SECONDS = 2.0


def take(where: places.Places, file: str, *, force: bool) -> int:
    """Make the backup and tell of it. Returns the exit code. Raises `KueueError`."""
    target = Path(places.typed(file))
    deadline = time.monotonic() + STARTING_SECONDS
    while True:
        try:
            lock = places.lock_exclusive(where.server_lock, WHO)
        except StorageError as error:
            source = state_file(Path(where.root, "server"))
            raise StorageError(
                str(error),
                hint=f"If its disk takes no writes, copy {source} by hand, and {source}-wal if that is there.",
            ) from error
        except KueueError:
            if _asked(where, target, force=force):
                return 0
            if time.monotonic() > deadline:
                raise Unreachable(
                    f"A server (pid {places.holder(where.server_lock) or 'unknown'}) holds {where.server_lock}, "
                    "but it does not answer at its local socket.",
                    hint="Look at its log; a backup is possible when it runs, or when it is stopped.",
                ) from None
            time.sleep(LOOK_SECONDS)
            continue
        with lock:
            _tell(target, _copied(where, target, force=force))
        return 0


# --- a server runs ----------------------------------------------------------------------------------------------------


def _asked(where: places.Places, target: Path, *, force: bool) -> bool:
    """Have the server make it. False if it does not listen."""
    sockets = sorted(str(path) for path in Path(where.server).glob("*.sock"))
    client = Client(Server("this host", 0, sockets), tell=lambda _: _lost(target))
    with contextlib.closing(client):
        try:
            client.ask("ServerInfo")
        except Refused as error:
            if error.__cause__ is not None:
                raise
            return False  # none of the sockets took us, and there is no secret to try the network with
        _converse(client, target, force=force)
    return True


def _converse(client: Client, target: Path, *, force: bool) -> None:
    seq = client.next_seq()
    question = {"type": "Backup", "seq": seq, "path": msgspec.to_builtins(to_os_text(str(target))), "force": force}
    for said in client.converse(lambda: [question]):
        if said.get("seq") != seq:
            continue
        if said.get("end", True):
            _progress()
            _look_at(target, said["done_bytes"])
            _tell(target, backup.Summary(said["done_bytes"], said["live"], said["finished"], said["next_job"], ""))
            return
        if said.get("note"):
            _remark(said["note"])
        _progress(said.get("done_bytes", 0), said.get("total_bytes", 0))


def _lost(target: Path) -> None:
    """Called when the connection is gone: the copy is gone with it, and a server that starts again knows nothing."""
    _progress()
    # A server that is being killed may take a moment to be gone.
    deadline = time.monotonic() + GONE_SECONDS
    while not backup.sweep(target) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    raise Unreachable(
        f"The server ended before it had told that the backup is complete: do not count on {target}.",
        hint="Start the command again. A server that is older than this command cannot make backups while it runs.",
    )


def _look_at(target: Path, size: int) -> None:
    """The server may see another file system than its caller: a service with a /tmp of its own."""
    with contextlib.suppress(OSError):
        if target.stat().st_size == size:
            return
    raise UserError(
        f"The server wrote {target}, but here is no such file: it runs as a service with a file system of its own.",
        hint="Name a file below your home directory.",
    )


# --- no server runs ---------------------------------------------------------------------------------------------------


def _copied(where: places.Places, target: Path, *, force: bool) -> backup.Summary:
    source = state_file(Path(where.server))
    if not source.exists():
        raise UserError(f"There is nothing to back up: {source} does not exist.")
    plan = backup.plan(target, source, force=force)
    connection = open_to_copy(source)
    try:
        copy = backup.Copy(connection, source, plan)
        try:
            while not copy.step():
                _progress(*copy.progress)
            _progress()
            return copy.finish()
        finally:
            copy.abort()
            copy.leave()
    finally:
        with contextlib.suppress(sqlite3.Error):
            connection.close()


# --- telling ----------------------------------------------------------------------------------------------------------


def _tell(target: Path, made: backup.Summary) -> None:
    size = f"{made.size / 2**20:.1f} MB"
    print(f"Backup {target}: {size}, {made.live} jobs not over, {made.finished} finished, next id {made.next_job}.")  # noqa: T201  the result


def _remark(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201  for the person


def _progress(done: int = 0, total: int = 0) -> None:
    """One line that is written over, on a terminal alone; without figures it is wiped."""
    if sys.stderr.isatty():
        figures = f"copying: {100 * done // total} % of {total / 2**20:.0f} MB" if total else ""
        sys.stderr.write(f"\r\x1b[K{figures}")
        sys.stderr.flush()
