"""To remove a directory in which a program is at work."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path


def remove_tree(folder: Path) -> None:
    """Until it is gone: what is written there meanwhile keeps a single try from ending."""
    while folder.exists():
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
