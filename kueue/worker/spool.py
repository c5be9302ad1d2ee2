"""What jobs wrote: excerpts for the server, pieces on demand, the size limit, and cleaning up.

The runner lets jobs append to ``<spool>/<offer>/stdout`` and ``stderr``; it drops its own records there once the server
has stored the end, the output stays until its age or the server says otherwise.

Rules
- A user's own file (``-o``) is read when somebody asks for it and never changed.
- The limit is kept by punching the middle out of the file: the job writes on undisturbed, offsets stay what they were,
  and the hole itself tells what is missing (``SEEK_HOLE``).
- A full or broken disk makes an answer with a reason, never an exception: the worker has more to do.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import stat
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import msgspec

from kueue.model import DISCARD, EndRecord, Excerpt, OsText, from_os_text, to_os_text
from kueue.protocol.messages import FetchedOutput, FetchOutput, Stream

EXCERPT_BYTES = 64 * 1024
"""Head and tail of a stream that the server keeps: a screenful and a traceback with room to spare."""
LARGEST_PIECE = 4 * 1024 * 1024
"""Of one answer; in base64 it must stay well below the frame limit."""
BLOCK = 4096
"""Holes are made of whole blocks; what is cut is aligned so that no other bytes become zeros."""
PATHS = "redirected.json"
KEEP_SIZE, PUNCH_HOLE = 0x01, 0x02
"""Of fallocate(2)."""
MEGABYTE = 1 << 20


class Paths(msgspec.Struct, frozen=True):
    """Where the streams of an attempt go: None is the spool, `DISCARD` nowhere, else an absolute path."""

    stdout: OsText | None = None
    stderr: OsText | None = None

    def of(self, stream: Stream) -> OsText | None:
        return self.stdout if stream == "stdout" else self.stderr


class Hole(NamedTuple):
    """Bytes that the size limit cut out: [start, end)."""

    start: int
    end: int


class Spool:
    """The output below one directory. Every method may block on the disk: call them in a thread."""

    def __init__(self, root: str, limit_mb: int = 0) -> None:
        self.root = root
        self.limit_mb = limit_mb
        """Per stream; 0: none."""
        self.remark = ""
        """Why the limit cannot be kept, once that is known."""
        self.punched_bytes = 0
        """Taken out by the limit since this was made."""

    def _folder(self, offer: int) -> str:
        return f"{self.root}/{offer}"

    # --- the end of an attempt ---------------------------------------------------------------------------------------

    def with_excerpts(self, offer: int, end: EndRecord, paths: Paths) -> EndRecord:
        """The record with head and tail of both streams. Where the user's files are is written down."""
        notes = list(end.notes)
        excerpts = {}
        for stream in ("stdout", "stderr"):
            excerpts[stream], note = self._excerpt(offer, stream, paths.of(stream))
            if note:
                notes.append(f"{stream}: {note}")
        if paths != Paths():
            with contextlib.suppress(OSError):  # then a later reader hears that nothing is kept here
                Path(f"{self._folder(offer)}/{PATHS}").write_bytes(msgspec.json.encode(paths))
        return msgspec.structs.replace(end, notes=tuple(notes), **excerpts)

    def _excerpt(self, offer: int, stream: Stream, path: OsText | None) -> tuple[Excerpt, str]:
        if path == DISCARD:
            return Excerpt(discarded=True), ""
        if path is not None:
            return Excerpt(redirected=path), ""
        name = f"{self._folder(offer)}/{stream}"
        try:
            if os.stat(name).st_size == 0:  # noqa: PTH116  most jobs say nothing, and an open costs more
                return Excerpt(), ""
            with open(name, "rb", buffering=0) as file:  # noqa: PTH123  unbuffered
                self._cut(file.fileno(), final=True)
                size = os.fstat(file.fileno()).st_size
                if size <= 2 * EXCERPT_BYTES:
                    return Excerpt(size=size, head=os.pread(file.fileno(), size, 0)), ""
                hole = find_hole(file.fileno(), size, 0)
                return Excerpt(
                    size=size,
                    head=os.pread(file.fileno(), EXCERPT_BYTES, 0),
                    tail=os.pread(file.fileno(), EXCERPT_BYTES, size - EXCERPT_BYTES),
                ), _cut_note(hole)
        except FileNotFoundError:
            return Excerpt(), ""  # it was never started
        except OSError as error:
            return Excerpt(), f"the output cannot be read: {error.strerror}"

    # --- pieces ------------------------------------------------------------------------------------------------------

    def fetch(self, question: FetchOutput, paths: Paths | None) -> FetchedOutput:
        """The piece that was asked for. `paths`: of an attempt that is known; None: as written down at its end.

        A piece that would begin in a hole begins after it, and one behind the end of a file that somebody cut short
        (log rotation) begins at its start; both say so.
        """
        offer = question.offer
        is_known = paths is not None
        if paths is None:
            paths = self._recorded_paths(offer)
        path = paths.of(question.stream)
        if path == DISCARD:
            return _answer(question, note="the stream was discarded")
        name = f"{self._folder(offer)}/{question.stream}" if path is None else from_os_text(path)
        try:
            handle = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as error:
            if path is None and error.errno == errno.ENOENT:
                return _answer(question, error="" if is_known else "the output is not kept any more")
            return _answer(question, error=f"{name}: {error.strerror}")
        try:
            return self._piece(question, handle, name, is_own=path is None)
        except OSError as error:
            return _answer(question, error=f"{name}: {error.strerror}")
        finally:
            os.close(handle)

    def _piece(self, question: FetchOutput, handle: int, name: str, *, is_own: bool) -> FetchedOutput:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            return _answer(question, error=f"{name} is not a regular file")
        start, note = max(0, question.offset), ""
        if start > found.st_size:
            start, note = 0, "the file was cut short meanwhile; what stands in it now follows"
        end = min(found.st_size, start + max(0, min(question.limit, LARGEST_PIECE)))
        hole = find_hole(handle, found.st_size, start) if is_own else None
        if hole is not None and hole.start <= start:
            start = hole.end
            end = min(found.st_size, start + max(0, min(question.limit, LARGEST_PIECE)))
            note = _cut_note(hole)
        elif hole is not None:
            end = min(end, hole.start)
        data = os.pread(handle, end - start, start) if end > start else b""
        return FetchedOutput(token=question.token, offset=start, data=data, size=found.st_size, note=note)

    def _recorded_paths(self, offer: int) -> Paths:
        try:
            return msgspec.json.decode(Path(f"{self._folder(offer)}/{PATHS}").read_bytes(), type=Paths)
        except (OSError, msgspec.MsgspecError):
            return Paths()

    # --- the size limit ----------------------------------------------------------------------------------------------

    def trim(self, offers: Collection[int]) -> None:
        """Keep the limit for these running attempts; to be called every second or so."""
        if not self.limit_mb or self.remark:
            return
        for offer in offers:
            for stream in ("stdout", "stderr"):
                name = f"{self._folder(offer)}/{stream}"
                with contextlib.suppress(OSError):
                    # 512: the unit of st_blocks whatever the file system's block size is (stat(2)).
                    if os.stat(name).st_blocks * 512 > self.limit_mb * MEGABYTE:  # noqa: PTH116  every second
                        handle = os.open(name, os.O_RDWR | os.O_CLOEXEC)
                        try:
                            self._cut(handle)
                        finally:
                            os.close(handle)

    def _cut(self, handle: int, *, final: bool = False) -> None:
        """A quarter of the limit stays at the start, half at the end: the rest is room until the next cut."""
        limit = self.limit_mb * MEGABYTE
        found = os.fstat(handle)
        if not limit or self.remark or found.st_blocks * 512 <= limit:
            return
        if final:
            # The reader has it open for reading only; the name in /proc stands for the same file.
            writable = os.open(f"/proc/self/fd/{handle}", os.O_RDWR | os.O_CLOEXEC)
            try:
                self._cut(writable)
            finally:
                os.close(writable)
            return
        start = limit // 4 // BLOCK * BLOCK
        end = (found.st_size - limit // 2) // BLOCK * BLOCK
        if end <= start:
            return
        try:
            punch(handle, start, end - start)
            self.punched_bytes += max(0, found.st_blocks - os.fstat(handle).st_blocks) * 512
        except OSError as error:
            if error.errno not in {errno.EOPNOTSUPP, errno.ENOSYS}:
                raise
            self.remark = (
                f"The file system of {self.root} cannot give up the middle of a file: "
                f"the output limit of {self.limit_mb} MB is not kept."
            )

    # --- cleaning up -------------------------------------------------------------------------------------------------

    def forget(self, offers: Collection[int]) -> None:
        """Drop the output of these. Records of the runner stay: they are not ours."""
        for offer in offers:
            folder = self._folder(offer)
            for name in ("stdout", "stderr", PATHS):
                with contextlib.suppress(OSError):
                    os.unlink(f"{folder}/{name}")  # noqa: PTH108  thousands at a clean-up
            with contextlib.suppress(OSError):
                os.rmdir(folder)  # noqa: PTH106

    def clean(self, older_than_seconds: float, known: Collection[int]) -> int:
        """Drop output whose end is acknowledged (no start record is left) and that is older. Returns how many.

        `known`: attempts that the worker still speaks of; they stay whatever their age is.
        """
        dropped = 0
        try:
            names = os.listdir(self.root)  # noqa: PTH208
        except OSError:
            return 0
        oldest = time.time() - older_than_seconds
        for name in names:
            number, _, aside = name.partition(".old")
            if not number.isdecimal() or (not aside and int(number) in known):
                continue
            folder = Path(self.root) / name
            with contextlib.suppress(OSError):
                if folder.stat().st_mtime <= oldest and not (folder / "start.json").exists():
                    shutil.rmtree(folder)
                    dropped += 1
        return dropped


def resolved(path: OsText | None, cwd: OsText) -> OsText | None:
    """Where a stream goes in the end: relative paths are under the job's directory."""
    if path is None or path == DISCARD:
        return path
    # Joined as text: `..` and links are for the kernel to follow, on the file system of the job.
    return to_os_text(os.path.join(from_os_text(cwd), from_os_text(path)))  # noqa: PTH118


def _answer(question: FetchOutput, *, error: str = "", note: str = "") -> FetchedOutput:
    return FetchedOutput(token=question.token, offset=question.offset, error=error, note=note)


def _cut_note(hole: Hole | None) -> str:
    return f"{hole.end - hole.start} bytes were cut out here by the size limit" if hole is not None else ""


def find_hole(handle: int, size: int, start: int) -> Hole | None:
    """The first hole at or after `start`, with its true beginning; None if there is none before the end."""
    if start >= size:
        return None
    try:
        begin = os.lseek(handle, start, os.SEEK_HOLE)
        if begin >= size:
            return None
        end = os.lseek(handle, begin, os.SEEK_DATA)
    except OSError:
        return None  # no data up to the end, or a file system that does not know
    return Hole(begin, min(end, size))


_libc = ctypes.CDLL(None, use_errno=True)
_fallocate = getattr(_libc, "fallocate64", None) or _libc.fallocate  # musl has only the one, with 64 bits
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def punch(handle: int, start: int, length: int) -> None:
    """Give these bytes back to the file system; the size of the file stays. Raises `OSError`."""
    while _fallocate(handle, PUNCH_HOLE | KEEP_SIZE, start, length) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
