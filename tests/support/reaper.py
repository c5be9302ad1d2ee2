"""Ends what a test session started when that session is killed itself: ``python reaper.py MARK PID`` with a pipe as stdin.

The session holds the other end of the pipe; whatever ends it closes that. PID is the process whose death ends the
session too (with xdist the one that hands out the tests). MARK is the ``NAME=value`` in the environment of all that the
session started. Standard library alone; imports nothing of kueue.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from pathlib import Path

LONGEST_SECONDS = 5.0
"""What waits in the kernel does not end at once."""
PASSES = 3
"""Something may be started while we look."""


def marked(mark: bytes) -> list[int]:
    """Pids of living processes that carry the mark, this one not counted."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                environ = (entry / "environ").read_bytes()
            except OSError:
                continue  # ended meanwhile, or another user's
            if mark in environ.split(b"\0"):
                found.append(int(entry.name))
    return found


def end(pid: int, mark: bytes) -> None:
    """SIGKILL by descriptor, after one more look: the number may mean another process by now."""
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            signal.pidfd_send_signal(process, signal.SIGKILL)
    except OSError:
        return
    finally:
        os.close(process)


def end_all(mark: bytes) -> None:
    """End all that carry the mark, also what they start meanwhile."""
    deadline = time.monotonic() + LONGEST_SECONDS
    while (left := marked(mark)) and time.monotonic() < deadline:
        for pid in left:
            end(pid, mark)
        time.sleep(0.02)


def main() -> None:
    mark = sys.argv[1].encode()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    chief = os.pidfd_open(int(sys.argv[2]))
    ready, _, _ = select.select([0, chief], [], [])
    if 0 in ready and os.read(0, 1):
        return  # the session ended in order and has looked by itself
    for _ in range(PASSES):
        for pid in marked(mark):
            end(pid, mark)
        time.sleep(0.3)


if __name__ == "__main__":
    main()
