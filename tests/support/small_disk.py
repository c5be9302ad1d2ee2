"""A small disk of its own at a directory, to be filled to the last byte."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

FILLER = "other people's data"


@contextlib.contextmanager
def small_disk(place: Path, megabytes: int, *, inodes: int = 0) -> Iterator[Path]:
    """Lies at `place`, which is made, until the block ends. `inodes`: as many files and folders; 0: no limit.

    Skips where nothing can be mounted.
    """
    place.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,nr_inodes={inodes},mode=700", "tmpfs", str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        # Lazily: a test that failed may have left a file open.
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk: Path) -> None:
    """Take what is left of the disk, to the last byte."""
    with (disk / FILLER).open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(65536))
