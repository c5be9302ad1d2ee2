"""``kueue``: reads the command line, lets the verb's function work, turns every error into a sentence and a code."""

from __future__ import annotations

import os
import sys

from kueue import console
from kueue.errors import (
    EXIT_OWN_FAILURE,
    EXIT_REFUSED,
    EXIT_USAGE,
    Bug,
    KueueError,
    UsageError,
)

TYPE_CHECKING = False  # importing it from typing would take 3 ms at every start
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kueue.cli.session import Session


def main(words: Sequence[str] | None = None) -> int:
    """Carries out the command line (`sys.argv` if none is given). Returns the exit code, unless interrupted."""
    return console.concluded(lambda: _run(sys.argv[1:] if words is None else words))


def _run(words: Sequence[str]) -> int:
    if "_ARGCOMPLETE" in os.environ:
        from kueue.cli import completion  # noqa: PLC0415 - 20 ms, only at a press of TAB

        if completion.is_asked():
            completion.leave_with_answer()
    from kueue.cli import arguments  # noqa: PLC0415 - an interrupt while it loads ends without a traceback

    try:
        chosen = arguments.parse(words)
    except UsageError as error:
        console.complain(str(error), error.hint)
        return EXIT_USAGE
    if chosen.verb is None:
        console.complain(arguments.parser().format_help().rstrip("\n"))
        return EXIT_USAGE
    return _carry_out(chosen.handler, chosen)


def _carry_out(handler: str, chosen: object) -> int:
    from kueue.cli.screen import Screen  # noqa: PLC0415 - not needed for --help
    from kueue.cli.session import Session  # noqa: PLC0415 - as above

    session: Session | None = None
    is_debug = bool(getattr(chosen, "debug", False))
    try:
        session = Session(chosen, Screen())  # type: ignore[arg-type]
        module, _, function = handler.partition(":")
        __import__(f"kueue.cli.{module}")  # importlib would take 1 ms more
        verb: Callable[[Session], int] = getattr(sys.modules[f"kueue.cli.{module}"], function)
        code = verb(session)
        session.screen.flush()
    except (BrokenPipeError, KeyboardInterrupt):
        raise
    except KueueError as error:
        if session is not None:
            session.screen.clear_status()
            if session.screen.is_broken:
                console.forget_stdout()
        if is_debug or isinstance(error, Bug):
            _show_traceback()
        console.complain(f"Error: {error}", error.hint and f"Hint: {error.hint}")
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - whatever it is, the person gets a sentence, and the place on request
        if is_debug:
            _show_traceback()
        if isinstance(error, OSError) and error.filename:
            # Something in kueue's own directories is not what it was made as.
            path = os.fsencode(error.filename).decode("utf-8", "backslashreplace")
            console.complain(f"Error: {path}: {error.strerror}.")
            return EXIT_REFUSED
        console.complain(
            f"Error: a fault in kueue itself: {type(error).__name__}: {error}",
            "Hint: see `kueue --debug`.",
        )
        return EXIT_OWN_FAILURE
    finally:
        if session is not None:
            session.screen.clear_status()
            session.close()
    return code


def _show_traceback() -> None:
    import traceback  # noqa: PLC0415 - only when something is wrong

    traceback.print_exc()


if __name__ == "__main__":
    sys.exit(main())
