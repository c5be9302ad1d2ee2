"""The file by which a worker is known again: a random number, made once, and the machine and directory it is for."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path

from kueue.errors import KueueError

BITS = 128


def own_identity(path: str, machine_id: str, boot_id: str = "") -> str:
    """The identity (32 hex digits) in the file at `path`, which is made if it is not there.

    The server compares machines: on a copied disk the same identity comes with another `machine_id` and is refused.
    On one machine, where the server cannot tell, a copied directory is refused here: its worker would take the jobs of
    the other one for leftovers of its own. Directories are compared within one boot only, for not every file system
    keeps inode numbers over a mount.
    Raises `KueueError` for a copy, for a file that is not one of ours (it is left alone), and if none can be made.
    """
    file = Path(path)
    here = {"machine_id": machine_id, "boot_id": boot_id, "inode": file.parent.stat().st_ino}
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        identity = secrets.token_hex(BITS // 8)
        try:
            _write(file, json.dumps({"identity": identity, **here}))
        except OSError as error:
            raise KueueError(
                f"{path} cannot be written: {error.strerror}.",
                hint="Without it the server would not know this worker again. Start it when there is room.",
            ) from error
        return identity
    except OSError as error:
        raise KueueError(f"{path} cannot be read: {error.strerror}.") from error
    try:
        found = json.loads(text)
        identity = str(found["identity"])
        is_one = len(bytes.fromhex(found["identity"])) * 8 == BITS
    except (ValueError, KeyError, TypeError, RecursionError):
        is_one = False
    if not is_one:
        raise KueueError(
            f"{path} does not hold an identity.",
            hint="If no job of this worker runs any more, delete the file: the worker is then a new one.",
        )
    if boot_id and found.get("boot_id") == boot_id and found.get("inode") != here["inode"]:
        raise KueueError(
            f"{file.parent} is a copy of another worker's directory.",
            hint=f"For a new worker delete the copied {file.parent}; start the other one where it was.",
        )
    if {**found, **here} != found:
        # A full disk must keep no worker from starting; it is as before then.
        with contextlib.suppress(OSError):
            _write(file, json.dumps({**found, **here, "machine_id": found.get("machine_id", machine_id)}))
    return identity


def _write(file: Path, text: str) -> None:
    """All or nothing, also if the machine goes down: half an identity would be no identity."""
    fresh = file.with_name(file.name + ".new")
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(handle, text.encode())
        os.fsync(handle)
    finally:
        os.close(handle)
    fresh.replace(file)
