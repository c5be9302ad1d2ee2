"""What the command lines of this package share: options, sentences for errors, and the end of a program with threads.

It is there before the rest of a program is loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from typing import NoReturn

from kueue import __version__
from kueue.console import complain, flushed
from kueue.errors import EXIT_OWN_FAILURE, EXIT_REFUSED, Bug, KueueError

RESTART_WORKERS = "kueue_restart_workers"


def parser(program: str, description: str, example: str) -> argparse.ArgumentParser:
    """With the options that all have."""
    made = argparse.ArgumentParser(prog=program, description=description, epilog=f"Example: {example}")
    made.add_argument("-V", "--version", action="version", version=f"{program} {__version__}")
    made.add_argument("--debug", action="store_true", help="log more, and show a traceback with errors")
    return made


def add_config(to: argparse.ArgumentParser) -> None:
    to.add_argument("-c", "--config", metavar="PATH", help="settings file (default: ~/.config/kueue/config.toml)")


def explained(error: Exception, program: str, *, trace: bool) -> int:
    """The exit code for an error that is now said. `trace`: with the place where it was raised."""
    if trace or isinstance(error, Bug):
        traceback.print_exception(type(error), error, error.__traceback__)
    if isinstance(error, KueueError):
        complain(f"Error: {error}", error.hint and f"Hint: {error.hint}")
        return error.exit_code
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        complain(f"Error: {where}{error.strerror or error}.")
        return EXIT_REFUSED
    # Whatever it is, the person gets a sentence, and the place on request.
    complain(f"Error: a fault in kueue itself: {type(error).__name__}: {error}", f"Hint: see `{program} --debug`.")
    return EXIT_OWN_FAILURE


def leave(code: int) -> NoReturn:
    """End the process now, whatever its threads do: they may hang on hosts. What stdout did not take counts as well."""
    from kueue import log  # noqa: PLC0415  see the module; whoever logs has loaded it by now

    code = flushed(code)
    log.written()  # the thread that does it ends with us
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(code)
