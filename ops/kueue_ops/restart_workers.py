"""``kueue_restart_workers``: sees to it over ssh that every host of the laboratory has a worker.

Only the command line is read here: what is behind it takes a third of a second to load, in which an interrupt must not
end with a traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from kueue import __version__
from kueue.errors import (
    EXIT_CANCELED,
    EXIT_OWN_FAILURE,
    EXIT_REFUSED,
    EXIT_USAGE,
    Bug,
    ConfigError,
    KueueError,
    UsageError,
)
from kueue_ops.restart_console import PROGRAM, complain, leave


def main(words: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code: 0 all is well, 1 not on all hosts, 2 wrong usage or settings."""
    if sys.stderr is None:  # closed by whoever started us: there is nobody to complain to
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115  open until the end
    options = _parser().parse_args(words)
    try:
        _check_usage(options)
        from kueue_ops import restart_verbs  # noqa: PLC0415  see the module

        code = restart_verbs.run(options)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        leave(EXIT_REFUSED)
    except KeyboardInterrupt:
        leave(EXIT_CANCELED)
    except KueueError as error:
        if options.debug or isinstance(error, Bug):
            traceback.print_exc()
        complain(f"Error: {error}", error.hint and f"Hint: {error.hint}")
        return EXIT_USAGE if isinstance(error, ConfigError) else error.exit_code
    except OSError as error:
        if options.debug:
            traceback.print_exc()
        where = f"{error.filename}: " if error.filename else ""
        complain(f"Error: {where}{error.strerror or error}.", "")
        leave(EXIT_REFUSED)
    except Exception as error:  # noqa: BLE001  whatever it is, the person gets a sentence, and the place on request
        if options.debug:
            traceback.print_exc()
        complain(f"Error: a fault in kueue itself: {type(error).__name__}: {error}", f"Hint: see `{PROGRAM} --debug`.")
        leave(EXIT_OWN_FAILURE)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Sees to it that every host of [restart_workers] has a worker: logs in by ssh and starts one in a "
        "screen session where there is none. Without an option it does so for ever.",
        epilog=f"Example: `{PROGRAM} --check`, and when all is well: `screen {PROGRAM}`",
    )
    parser.add_argument("hosts", nargs="*", metavar="HOST", help="only these of the hosts in the settings")
    parser.add_argument("-c", "--config", metavar="PATH", help="settings file (default: ~/.config/kueue/config.toml)")
    parser.add_argument("-V", "--version", action="version", version=f"{PROGRAM} {__version__}")
    parser.add_argument("--debug", action="store_true", help="log more, and show a traceback with errors")
    work = parser.add_mutually_exclusive_group()
    work.add_argument("--once", action="store_true", help="one round; exit code 0 if all hosts have a worker then")
    work.add_argument("--status", action="store_true", help="show what is known of each host; changes nothing")
    work.add_argument("--stop", action="store_true", help="stop the workers in good order; their jobs go on")
    work.add_argument("--check", action="store_true", help="run `kueue doctor` on every host and compare the hosts")
    work.add_argument("--push-config", action="store_true", help="copy the settings file to the hosts that have none")
    parser.add_argument("--json", action="store_true", help="with --status or --check: for programs")
    parser.add_argument("--force", action="store_true", help="with --push-config: also over a file that differs")
    return parser


def _check_usage(options: argparse.Namespace) -> None:
    if options.json and not (options.status or options.check):
        raise UsageError("--json goes with --status or --check.")
    if options.force and not options.push_config:
        raise UsageError("--force goes with --push-config.")


if __name__ == "__main__":
    sys.exit(main())
