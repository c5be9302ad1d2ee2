"""A file server that is dead: whoever looks into a directory of it waits in the kernel."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

_DETACH = 2
"""``MNT_DETACH``: does not look there."""


@contextlib.contextmanager
def dead_file_server(place: Path, source: str = "deadserver:/home") -> Iterator[Path]:
    """Lies over `place` until the block ends: FUSE without a program that answers. What waits gets an error then."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        pytest.skip(f"there is no /dev/fuse to make a file system that hangs: {error.strerror}")
    try:
        options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}".encode()
        if libc.mount(source.encode(), os.fsencode(place), b"fuse", 0, options) != 0:
            pytest.skip(f"FUSE cannot be mounted here: {os.strerror(ctypes.get_errno())}")
        try:
            yield place
        finally:
            libc.umount2(os.fsencode(place), _DETACH)
    finally:
        os.close(device)
