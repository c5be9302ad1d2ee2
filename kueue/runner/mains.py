"""Which process was made for which attempt: one file per spawner, which outlives it.

S/runners/<id>/mains-<pid>    first the boot's id, then a line ``offer number start-time`` for each process

It is read only when its writer is dead, or mute. A line may be missing (full disk) or old (its process has ended, the
offer is of another queue): the start time shows whether the process is still the one that was meant.
"""
# ruff: noqa: PTH123, PTH208 (pathlib would cost the runner memory)

from __future__ import annotations

import contextlib
import os

from kueue.runner import whole_file

PREFIX = "mains-"
FILE_BYTES = 256 * 1024  # after so much, some ten thousand starts, those that have ended are dropped


class Mains:
    """The file of this process. Nobody depends on it, so a full disk is silence."""

    def __init__(self, folder: str) -> None:
        self._path = f"{folder}/{PREFIX}{os.getpid()}"
        self._handle = -1
        self._bytes = 0
        self._most = FILE_BYTES
        self._is_torn = False
        """The last line may not have been written to its end."""
        self._living: dict[int, bytes] = {}
        with contextlib.suppress(OSError):
            self._handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._append(boot_id() + b"\n")

    def add(self, offer: int, pid: int, start: int) -> None:
        line = self._living[offer] = b"%d %d %d\n" % (offer, pid, start)
        if self._bytes > self._most:
            self._write_again()
            self._most = self._bytes + FILE_BYTES  # also if there was no room: not at each start of many
        self._append(line)

    def ended(self, offer: int) -> None:
        self._living.pop(offer, None)

    def _append(self, line: bytes) -> None:
        if self._is_torn:
            # Two halves must not make one line that means a third attempt; this makes the first one mean nothing.
            line = b" torn\n%s\n%s" % (boot_id(), line)
        self._is_torn = True
        with contextlib.suppress(OSError):
            written = os.write(self._handle, line)
            self._bytes += written
            self._is_torn = written < len(line)

    def _write_again(self) -> None:
        """Without those that have ended; the old file is the one that counts until the new one is whole."""
        body = b"".join((boot_id(), b"\n", *self._living.values()))
        with contextlib.suppress(OSError):
            old, self._handle = self._handle, whole_file.written(self._path, body)
            self._bytes, self._is_torn = len(body), False
            os.close(old)


def read_mains(folder: str) -> dict[int, tuple[int, int]]:
    """Offer → (number, start time) of its main process, as the spawners of this runner have noted since the boot."""
    found: dict[int, tuple[int, int]] = {}
    boot = boot_id()
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if name.startswith(PREFIX) and not name.endswith(whole_file.DRAFT):
                for offer, pid, start in _lines(f"{folder}/{name}", boot):
                    if start >= found.get(offer, (0, 0))[1]:
                        found[offer] = (pid, start)
    return found


def _lines(path: str, boot: bytes) -> list[tuple[int, int, int]]:
    found = []
    is_ours = False
    with contextlib.suppress(OSError), open(path, "rb") as file:
        for line in file.read().split(b"\n")[:-1]:  # the last may be cut off
            words = line.split()
            if len(words) == 3 and all(word.isdigit() for word in words):
                if is_ours:
                    found.append((int(words[0]), int(words[1]), int(words[2])))
            elif len(words) == 1:
                is_ours = line == boot
    return found


def boot_id() -> bytes:
    """A name that no other start of this machine has."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return file.read().strip() or b"unknown"
    except OSError:
        return b"unknown"
