"""Free TCP ports that stay ours while what listened on one is dead, so that nobody else's server answers there.

A test that kills its server leaves the port free for a moment. A port that the system chose could go to any other
program in that moment, such as the server of a test next door, which has another secret.
"""

from __future__ import annotations

import functools
import itertools
import os
import socket
from collections.abc import Iterator

LOWEST, HIGHEST = 10_000, 32_700
"""Below those that Linux gives to outgoing connections."""
BLOCK = 100
"""Ports that one process has for itself. One is given again only after all the others."""


def free_port() -> int:
    """A TCP port of this process's block that nobody uses now. Raises `RuntimeError` if there is none."""
    _, ports = _block(os.getpid())
    for port in itertools.islice(ports, BLOCK):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"none of {BLOCK} ports is free")


@functools.cache
def _block(pid: int) -> tuple[socket.socket, Iterator[int]]:
    """The lock of a block, and its ports round and round."""
    numbers = range(LOWEST, HIGHEST, BLOCK)
    for step in range(len(numbers)):
        first = numbers[(pid + step) % len(numbers)]
        lock = socket.socket(socket.AF_UNIX)
        try:
            # An abstract name: it belongs to one process of this network, whoever runs it, and goes with it.
            lock.bind(f"\0kueue-tests-ports-{first}")
        except OSError:
            lock.close()
            continue
        return lock, itertools.cycle(range(first, first + BLOCK))
    raise RuntimeError("all blocks of ports are taken")
