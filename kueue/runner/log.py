"""The runner's log: a file of bounded size, written line by line."""

from __future__ import annotations

import contextlib
import os
import time

LOG_BYTES = 512 * 1024  # and as much again in the older half


class Log:
    """Appends lines with UTC time to a file; nobody depends on it, so a full disk is silence."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, text: str) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with contextlib.suppress(OSError):
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(handle, f"{stamp} [{os.getpid()}] {text}\n".encode("utf-8", "replace"))
                if os.fstat(handle).st_size > LOG_BYTES:
                    os.replace(self.path, self.path + ".old")  # noqa: PTH105 - no Path is needed for it
            finally:
                os.close(handle)
