"""Remembers which files were installed and what stood in them, so that nobody's changes are overwritten or removed.

The record lies beside the usual settings file: a home that hosts share holds both, the files and the record. It has the
format of sha256sum(1), so ``sha256sum -c`` shows what was changed; lines with ``#`` say for what the files are.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import stat
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from kueue import whole_file
from kueue.errors import KueueError

LOCK_SECONDS = 10.0
_ESCAPES = defaultdict(str, {"\\": "\\", "n": "\n", "r": "\r"})

State = Literal["absent", "same", "ours", "changed"]
"""Of a file: not there; as it is to be; as we wrote it earlier; somebody else's, or changed since."""


def place(environ: dict[str, str]) -> Path:
    """``$XDG_CONFIG_HOME/kueue/installed.sha256`` (``~/.config/kueue``)."""
    base = environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".config") / "kueue" / "installed.sha256"


class Record:
    """Path → checksum of what was written, by purpose (``systemd``, ``completion`` ...)."""

    def __init__(self, path: Path, files: dict[str, dict[str, str]]) -> None:
        self._path = path
        self._files = files
        self._is_changed = False

    def state(self, file: Path, text: str | None = None) -> State:
        """What is to be thought of a file into which `text` is to be written (None: that is to be removed)."""
        try:
            if not stat.S_ISREG(file.stat().st_mode):
                return "changed"  # a FIFO would be waited for
            body = file.read_bytes()
        except FileNotFoundError:
            return "changed" if file.is_symlink() else "absent"
        if text is not None and body == text.encode():
            return "same"
        if file.is_symlink():
            return "changed"
        noted = next((files[str(file)] for files in self._files.values() if str(file) in files), "")
        return "ours" if noted == hashlib.sha256(body).hexdigest() else "changed"

    def files(self, purpose: str) -> list[Path]:
        """All that was installed for a purpose, in the order of their names."""
        return [Path(name) for name in sorted(self._files.get(purpose, {}))]

    def note(self, purpose: str, file: Path, text: str) -> None:
        self._files.setdefault(purpose, {})[str(file)] = hashlib.sha256(text.encode()).hexdigest()
        self._is_changed = True

    def forget(self, file: Path) -> None:
        for files in self._files.values():
            self._is_changed = files.pop(str(file), None) is not None or self._is_changed

    def save(self) -> None:
        """Write what changed; without any file the record goes too."""
        if not self._is_changed:
            return
        lines = []
        for purpose, files in sorted(self._files.items()):
            if files:
                lines += [f"# {purpose}", *(_line(checksum, name) for name, checksum in sorted(files.items()))]
        if lines:
            write(self._path, "\n".join(lines) + "\n", mode=0o600)
        else:
            self._path.unlink(missing_ok=True)
        self._is_changed = False


@contextlib.contextmanager
def opened(path: Path, *, is_dry: bool = False) -> Iterator[Record]:
    """The record, for this process alone until the block ends; it is saved also when the block fails.

    `is_dry`: nothing is locked or saved. Raises `KueueError` when another installation holds it.
    """
    if is_dry:
        yield _read(path)
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(descriptor, path)
        record = _read(path)
        try:
            yield record
        finally:
            record.save()
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    end = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # noqa: PERF203  that is what the loop waits for
            if time.monotonic() > end:
                raise KueueError(f"Another kueue_install holds {path.parent}.", hint="Try again later.") from None
            time.sleep(0.05)
        except OSError:
            return  # a file system without locks: two installations at once are not worth a failure
        else:
            return


def _read(path: Path) -> Record:
    files: dict[str, dict[str, str]] = {}
    purpose = ""
    if path.exists() and not path.is_file():
        raise KueueError(f"{path} is not a file.", hint="Move it away: what is installed is written down there.")
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_bytes().decode("utf-8", "surrogateescape").split("\n"):
            if line.startswith("#"):
                purpose = line.lstrip("# ")
                continue
            checksum, blanks, name = line.partition("  ")
            if checksum.startswith("\\"):
                checksum, name = checksum[1:], re.sub(r"\\(.)", lambda found: _ESCAPES[found[1]], name)
            if blanks and purpose:
                files.setdefault(purpose, {})[name] = checksum
    return Record(path, files)


def _line(checksum: str, name: str) -> str:
    """As sha256sum(1) writes it: a backslash in front says that there are more in the name."""
    escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return f"{checksum}  {name}" if escaped == name else f"\\{checksum}  {escaped}"


def write(path: Path, text: str, mode: int = 0o644) -> None:
    """The whole file or nothing, with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    whole_file.write(path, text.encode("utf-8", "surrogateescape"), mode, draft=str(draft))
