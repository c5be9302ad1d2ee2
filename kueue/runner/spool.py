"""The records of attempts on the local disk, one directory for each offer.

    start.json        written before the process is made: who it is, which tag, under which terms
    main.json         how the main process ended, written before it is reaped: whoever takes over still learns it
    not_started.json  why the program could not be executed
    exit.json         how the attempt ended, written before anybody is told
    stdout, stderr    what the job wrote; they stay when the records go

Nothing is flushed to the platter: a record must survive every process, and a loss of power ends the job as well.
"""
# ruff: noqa: PTH102, PTH103, PTH104, PTH106, PTH108, PTH116, PTH123, PTH208 (paths are bytes here, or this runs a thousand times a second)

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

from kueue.runner import whole_file

START = "start.json"
MAIN = "main.json"
NOT_STARTED = "not_started.json"
EXIT = "exit.json"
RECORDS = (NOT_STARTED, MAIN, EXIT, START)  # the start last: as long as it is there the attempt is known

Record = dict[str, Any]


class NumberInUse(Exception):
    """There is an attempt of this number (of another queue, then) whose end nobody has taken note of."""


class Spool:
    """All attempt directories below `root`."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.vacant: list[str] = []
        """Directories in which nothing is left, to be removed by `tidy`."""

    def folder(self, offer: int) -> str:
        return f"{self.root}/{offer}"

    def begin(self, offer: int, record: Record) -> None:
        """Raises `NumberInUse`, and `OSError` with nothing left behind. Output that an attempt of another queue left
        under this number is moved aside.
        """
        folder = self.folder(offer)
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            if self.read(offer, START) is not None:
                raise NumberInUse(folder) from None
            if folder in self.vacant:
                self.vacant.remove(folder)
            else:
                self._move_aside(folder)
                os.mkdir(folder, 0o700)
        except FileNotFoundError:
            # As in `_write_whole`, of the whole spool.
            os.makedirs(folder, 0o700)
        try:
            self._write(f"{folder}/{START}", record)
        except OSError:
            with contextlib.suppress(OSError):
                self.forget(offer)
            raise

    def claim(self, offer: int, record: Record, runner: str) -> None:
        """The attempt is now looked after by this runner."""
        with contextlib.suppress(OSError):  # full disk: then the next one may claim it as well, nothing runs by then
            self._write_whole(offer, START, {**record, "runner": runner})

    def write_main(self, offer: int, record: Record) -> None:
        with contextlib.suppress(OSError):  # full disk: the same goes to the keeper in a message
            self._write(f"{self.folder(offer)}/{MAIN}", record)

    def write_exit(self, offer: int, record: Record) -> None:
        self._write_whole(offer, EXIT, record)

    def write_not_started(self, offer: int, record: Record) -> None:
        with contextlib.suppress(OSError):  # full disk: the same goes to the spawner through a pipe
            self._write(f"{self.folder(offer)}/{NOT_STARTED}", record)

    def read(self, offer: int, name: str) -> Record | None:
        """None: there is no such record, or its writer died while writing it."""
        try:
            with open(f"{self.folder(offer)}/{name}", "rb") as file:
                record = json.loads(file.read())
        except (OSError, ValueError, RecursionError):
            return None
        return record if isinstance(record, dict) else None

    def forget(self, offer: int) -> None:
        """Drop the records; an output directory that is empty without them goes too, when there is time to `tidy`.

        Raises `OSError` if a record cannot be dropped: the start is there then, and with it the attempt is known.
        """
        folder = self.folder(offer)
        for name in RECORDS:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{folder}/{name}")
        is_vacant = True
        for name in ("stdout", "stderr"):
            with contextlib.suppress(OSError):  # what cannot be removed keeps its directory
                if os.stat(f"{folder}/{name}").st_size == 0:
                    os.unlink(f"{folder}/{name}")
                else:
                    is_vacant = False
        if is_vacant:
            self.vacant.append(folder)

    def tidy(self) -> None:
        """Remove one vacant directory. Apart from `forget` because a file system may sleep over it for milliseconds."""
        with contextlib.suppress(OSError):
            os.rmdir(self.vacant.pop())

    def starts(self) -> Iterator[tuple[int, Record]]:
        """All attempts whose records were not dropped."""
        try:
            names = os.listdir(self.root)
        except FileNotFoundError:
            return
        for name in names:
            if name.isdecimal():
                record = self.read(int(name), START)
                if record is not None:
                    yield int(name), record

    def _write_whole(self, offer: int, name: str, record: Record) -> None:
        path = f"{self.folder(offer)}/{name}"
        try:
            whole_file.write(path, _encoded(record))
        except FileNotFoundError:
            # Somebody, perhaps the job, has removed the directory: the attempt is known all the same.
            os.makedirs(self.folder(offer), 0o700, exist_ok=True)
            whole_file.write(path, _encoded(record))

    @staticmethod
    def _move_aside(folder: str) -> None:
        number = 1
        while os.path.lexists(f"{folder}.old{number}"):
            number += 1
        os.rename(folder, f"{folder}.old{number}")

    @staticmethod
    def _write(path: str, record: Record) -> None:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            whole_file.fill(handle, _encoded(record))
        finally:
            os.close(handle)


def _encoded(record: Record) -> bytes:
    return json.dumps(record).encode()
