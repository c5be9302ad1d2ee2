"""The file by which a worker is known again: a random number, made once, and the machine it was made on."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

from kueue.errors import KueueError

BITS = 128


def own_identity(path: str, machine_id: str) -> str:
    """The identity (32 hex digits) in the file at `path`, which is made if it is not there.

    The server compares machines: on a copied disk the same identity comes with another `machine_id` and is refused.
    Raises `KueueError` for a file that is not one of ours: it is left alone.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        identity = secrets.token_hex(BITS // 8)
        _write(file, json.dumps({"identity": identity, "machine_id": machine_id}))
        return identity
    except OSError as error:
        raise KueueError(f"{path} cannot be read: {error.strerror}.") from error
    try:
        identity = json.loads(text)["identity"]
        if len(bytes.fromhex(identity)) * 8 == BITS:
            return str(identity)
    except (ValueError, KeyError, TypeError):
        pass
    raise KueueError(
        f"{path} does not hold an identity.",
        hint="If no job of this worker runs any more, delete the file: the worker is then a new one.",
    )


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
