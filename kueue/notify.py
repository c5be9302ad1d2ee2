"""Telling the service manager how we are: ready, alive, reloading, stopping (sd_notify(3), datagrams only).

Everything here does nothing when the program was not started by a service manager that listens. A message that
cannot be delivered is dropped: the service manager will notice silence by itself, and nothing else depends on it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time

READY = "READY=1"
STOPPING = "STOPPING=1"
ALIVE = "WATCHDOG=1"


def notify(*states: str) -> bool:
    """Whether the service manager was told; `states` are assignments such as `READY` or ``"STATUS=…"``."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as channel,
    ):
        # A leading @ stands for the zero byte of an abstract address.
        channel.connect("\0" + address[1:] if address.startswith("@") else address)
        channel.send("\n".join(states).encode())
        return True
    return False


def reloading() -> bool:
    """Tell that the configuration is being read anew; `READY` has to follow."""
    return notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")


def status(sentence: str) -> bool:
    """One line for ``systemctl --user status``."""
    return notify("STATUS=" + sentence.replace("\n", " "))


def watchdog_seconds() -> float | None:
    """How often `ALIVE` is due: half the limit that the service manager set for this very process; None without one."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    try:
        limit = int(os.environ.get("WATCHDOG_USEC", "")) / 1e6
    except ValueError:
        return None
    return limit / 2 if limit > 0 else None
