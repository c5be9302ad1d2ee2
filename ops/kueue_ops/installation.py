"""Finds the programs of this very installation: beside the running one, in a wheel, a venv, pipx or a checkout."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import kueue
from kueue_ops.systemd import Command, Part


def command(part: Part) -> Command:
    """How this installation's program is started, with an absolute path that an upgrade leaves valid."""
    for folder in _folders():
        script = folder / part.program
        if script.is_file() and os.access(script, os.X_OK):
            return Command((str(script),))
    # A checkout that nobody installed: the modules are found in the folder they are started from.
    root = Path(kueue.__file__).absolute().parents[1]
    ops = Path(__file__).absolute().parents[1]
    python_path = "" if ops == root or part.module.startswith("kueue.") else str(ops)
    return Command((sys.executable, "-m", part.module), directory=str(root), python_path=python_path)


def _folders() -> Iterator[Path]:
    """Where scripts may lie, the most telling place first.

    Links are not followed: that of pipx in ``~/.local/bin`` stays when pipx makes the environment anew.
    """
    started = Path(sys.argv[0])
    if started.name.startswith("kueue_"):
        yield started.absolute().parent
    yield Path(sys.executable).absolute().parent
    yield Path(sysconfig.get_path("scripts"))
    if "site-packages" in kueue.__file__:  # of a checkout nothing lies there, but of another installation it may
        yield Path(sysconfig.get_path("scripts", f"{os.name}_user"))
