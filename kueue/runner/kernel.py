"""Linux calls that the standard library has no name for."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import struct
import sys
import time

PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
JOBS_MORE_OOM = 300  # of 1000: under memory pressure the kernel takes a job before its guard, see proc(5) oom_score_adj
_PIDFD_INFO_BYTES = 64  # the first release of struct pidfd_info: mask first, exit code last
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO_BYTES << 16 | 0xFF << 8 | 11
_PIDFD_INFO_EXIT = 1 << 3

_libc = ctypes.CDLL(None, use_errno=True)
# struct flock with 64-bit offsets (fcntl(2)): type, whence, start, length, pid
_FLOCK = "hhqqi4x" if sys.maxsize > 2**32 else "hhqqi"


def be_subreaper() -> None:
    """Orphans among our descendants become our children, not init's (prctl(2))."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def name_process(name: str) -> None:
    """The name in ``ps``; at most 15 bytes."""
    _libc.prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def lock_file(path: str) -> int | None:
    """An exclusive lock that lasts until every process that inherits the descriptor is gone (an OFD lock, fcntl(2)).

    Returns the descriptor; None: somebody holds it.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.fcntl(handle, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError:
        os.close(handle)
        return None
    return handle


def exit_status(pidfd: int) -> int | None:
    """The wait status (waitpid(2)) of a process that was somebody else's child, as soon as that one has reaped it.

    None: not yet, or this kernel does not tell (Linux does since 6.15; linux/pidfd.h).
    """
    info = bytearray(_PIDFD_INFO_BYTES)
    struct.pack_into("=Q", info, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    (mask,) = struct.unpack_from("=Q", info, 0)
    return struct.unpack_from("=i", info, _PIDFD_INFO_BYTES - 4)[0] if mask & _PIDFD_INFO_EXIT else None


def is_locked(path: str) -> bool | None:
    """Does anybody hold the lock of this file? Looks without taking it. None: there is no such file to look at.

    One that cannot be looked at (no descriptor left, a failing disk) may be held, and counts as that.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait for its other end
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return True
    try:
        query = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(handle, fcntl.F_OFD_GETLK, query)
    except OSError:
        return True
    finally:
        os.close(handle)
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)


class OomScore:
    """Puts a child, from its birth, higher on the list of whom the kernel kills when memory is out."""

    def __init__(self) -> None:
        self._own = b""
        self._raised = b""
        self._handle = -1
        with contextlib.suppress(OSError, ValueError):
            self._handle = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
            own = int(os.pread(self._handle, 32, 0))
            self._own = str(own).encode()
            self._raised = str(min(1000, own + JOBS_MORE_OOM)).encode()

    def raise_it(self) -> None:
        self._write(self._raised)

    def put_back(self) -> None:
        self._write(self._own)

    def _write(self, value: bytes) -> None:
        if value:
            with contextlib.suppress(OSError):  # then jobs and guard are equal before the kernel, as without us
                os.pwrite(self._handle, value, 0)


_NO_LATER = 1e9  # boottime; no machine runs for thirty years, and 32 bits hold it


class _Moment(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Alarm(ctypes.Structure):
    _fields_ = (("interval", _Moment), ("at", _Moment))


class Alarm:
    """A descriptor that can be read from a moment on (timerfd_create(2)); the moment is boottime.

    A time-out of poll(2) does not go on while the machine is suspended: what is due meanwhile would be late by what was
    left of it. This one is due at once when the machine wakes.
    """

    def __init__(self) -> None:
        """Raises `OSError`."""
        self._handle = _libc.timerfd_create(time.CLOCK_BOOTTIME, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._handle < 0:
            raise OSError(ctypes.get_errno(), "no timer can be made")
        self._at: float | None = None

    def fileno(self) -> int:
        return int(self._handle)

    def set(self, at: float | None) -> None:
        """The moment; None: never. What was due before no longer is."""
        if at == self._at:
            return
        self._at = at
        at = min(max(at, 0.0), _NO_LATER) if at is not None else 0.0
        whole = int(at)
        # A moment of all zeros means never.
        parts = 0 if self._at is None else max(1, int((at - whole) * 1e9))
        _libc.timerfd_settime(self._handle, 1, ctypes.byref(_Alarm(at=_Moment(whole, parts))), None)

    def rang(self) -> None:
        """It was seen to be due, and is not again before it is set anew."""
        self._at = None
        with contextlib.suppress(BlockingIOError):
            os.read(self._handle, 8)

    def close(self) -> None:
        os.close(self._handle)
