"""The host keys that a person has accepted before: known_hosts files as sshd(8) describes them.

Why not paramiko's reader: it knows neither patterns, nor ``@revoked``, and a damaged line ends it with a traceback.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from kueue_ops import patience
from kueue_ops.trouble import HostTrouble, trouble

SSH_PORT = 22


class KnownKey(NamedTuple):
    """One line that names the host."""

    type: str
    blob: bytes
    where: str
    """``file:line``."""


class Known:
    """What the files say about one host."""

    def __init__(self) -> None:
        self.keys: list[KnownKey] = []
        self.plain: list[KnownKey] = []
        """Those of the host name without the port: good for it, too, but another one does not mean that it changed."""
        self.revoked: list[KnownKey] = []
        self.has_authority = False
        """A certificate authority vouches for this host; paramiko cannot check host certificates."""

    @property
    def types(self) -> tuple[str, ...]:
        """Key types to ask the host for, since those can be compared."""
        return tuple(dict.fromkeys(key.type for key in (*self.keys, *self.plain)))

    def knows(self, blob: bytes) -> bool:
        return any(hmac.compare_digest(key.blob, blob) for key in (*self.keys, *self.plain))


def entry_name(host: str, port: int) -> str:
    """How the files write that host: ``host``, or ``[host]:port`` if the port is another one than 22."""
    return host.lower() if port == SSH_PORT else f"[{host.lower()}]:{port}"


def look_up(files: Iterable[Path], host: str, port: int) -> Known:
    """What is known of that host. A missing file is an empty one.

    Like ssh(1): of another port than 22 a key of the plain host name is good, too, as long as the port has no entry of
    its own; a second sshd with a key of its own is just unknown.
    Raises `HostTrouble` if a file is there and cannot be read: without it a changed key would look like a new one.
    """
    lines = [line for file in files for line in _patient_lines(file)]
    found = _matching(lines, entry_name(host, port))
    if not found.keys and port != SSH_PORT:
        plain = _matching(lines, host.lower())
        found.plain = plain.keys
        found.revoked += plain.revoked
    return found


def fingerprint(blob: bytes) -> str:
    """``SHA256:…`` as ssh(1) and ``ssh-keygen -l`` show it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def remember(file: Path, entry: str, key_type: str, blob: bytes) -> bool:
    """Append the key of `entry_name` to the file (0600 in 0700 if it is new); False if that cannot be."""
    line = f"{entry} {key_type} {base64.b64encode(blob).decode()}\n"
    try:
        patience.within(patience.FILE_SECONDS, f"writing {file}", lambda: _append(file, line))
    except OSError:
        return False  # the caller tells that it was not remembered
    return True


def _append(file: Path, line: str) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.touch(mode=0o600)
    with file.open("ab+") as out:
        if out.seek(0, os.SEEK_END):
            out.seek(-1, os.SEEK_END)
            if out.read(1) != b"\n":  # editors leave it out; else two keys would be lost in one line
                line = f"\n{line}"
        out.write(line.encode())


def _patient_lines(file: Path) -> list[tuple[list[str], str]]:
    try:
        return patience.within(patience.FILE_SECONDS, f"reading {file}", lambda: _lines(file))
    except OSError as error:
        raise _unreadable(file, error) from error


def _lines(file: Path) -> list[tuple[list[str], str]]:
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _unreadable(file, error) from error
    return [(line.split(), f"{file}:{number}") for number, line in enumerate(text.splitlines(), 1)]


def _unreadable(file: Path, error: OSError) -> HostTrouble:
    return trouble("ssh", f"The known host keys in {file} cannot be read: {error.strerror}.", f"ls -l {file}")


def _matching(lines: list[tuple[list[str], str]], name: str) -> Known:
    known = Known()
    for fields, where in lines:
        marker = fields[0] if fields and fields[0].startswith("@") else ""
        words = fields[1:] if marker else fields
        if len(words) < 3 or words[0].startswith("#") or not _names(words[0], name):
            continue
        try:
            blob = base64.b64decode(words[2], validate=True)
        except ValueError:  # also what base64 says of letters that are none of ASCII
            continue  # ssh(1) skips a damaged line as well; the host is then not known by it
        if marker == "@cert-authority":
            known.has_authority = True
        elif marker == "@revoked":
            known.revoked.append(KnownKey(words[1], blob, where))
        elif not marker:
            known.keys.append(KnownKey(words[1], blob, where))
    return known


def _names(field: str, name: str) -> bool:
    """Does the first field of a line name the host? Hashed, or patterns parted by commas, one with ! against it."""
    if field.startswith("|1|"):
        _, _, salt, digest = [*field.split("|"), "", ""][:4]
        try:
            made = hmac.new(base64.b64decode(salt), name.encode(), hashlib.sha1).digest()
            return hmac.compare_digest(made, base64.b64decode(digest))
        except ValueError:  # as above
            return False
    hit = False
    for pattern in field.lower().split(","):
        # Brackets are literal here and a set of characters to fnmatch.
        if fnmatchcase(name, pattern.removeprefix("!").replace("[", "[[]")):
            if pattern.startswith("!"):
                return False
            hit = True
    return hit
