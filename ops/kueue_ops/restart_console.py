"""What the restart tool has to say before the rest of it is loaded, and how it leaves."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn

PROGRAM = "kueue_restart_workers"


def complain(sentence: str, hint: str) -> None:
    """To stderr; without a line for an empty hint."""
    print(sentence, file=sys.stderr)
    if hint:
        print(hint, file=sys.stderr)


def leave(code: int) -> NoReturn:
    """End the process now, whatever its threads do: they may hang on hosts."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
