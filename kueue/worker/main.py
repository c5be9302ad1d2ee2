"""The command ``kueue_worker``: options, exit code, and the last sentence of a worker that cannot run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from kueue import __version__, console, inside_job, places
from kueue.errors import KueueError, UsageError

PROGRAM = "kueue_worker"
EXIT_NOT_RUNNING = 3
"""Of ``--status``, as of a service that is stopped (LSB)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 after an orderly stop, 1 when the worker cannot run."""
    return console.concluded(lambda: _main(arguments))


def _main(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    try:
        if options.force and not options.stop:
            raise UsageError("--force belongs to --stop.")
        if options.status or options.stop:
            return _look_or_stop(options)
        return _work(options)
    except KueueError as error:
        sys.stderr.write(f"Error: {error}\n" + (f"Hint: {error.hint}\n" if error.hint else ""))
        return error.exit_code


def _work(options: argparse.Namespace) -> int:
    inside_job.refuse("A worker", "by a login of its own (ssh), or `systemd-run --user kueue_worker`")
    console.expect_children()
    from kueue import log  # noqa: PLC0415  --help and --version do not wait for it

    if options.log_file:
        try:
            log.to_file(options.log_file)
        except OSError as error:
            # It can work without; whoever looks for the log is told why there is none.
            sys.stderr.write(f"Warning: no log is written to {options.log_file}: {error.strerror}.\n")
    log.start("info")
    try:
        import trio  # noqa: PLC0415  as above

        from kueue.worker.program import Program  # noqa: PLC0415

        log.unhurried()
        trio.run(Program(options.config, options.name, options.log_file).run)
    except KueueError as error:
        if options.log_file:
            log.logger("worker").error("%s%s", error, f" {error.hint}" if error.hint else "")
        raise
    except BaseException as error:
        # Nobody may see its stderr; the traceback itself goes there.
        if options.log_file and not isinstance(error, SystemExit):
            log.logger("worker").critical("ended by %s: %s", type(error).__name__, error)
        raise
    finally:
        log.written()  # what is said after that, of an error, stands below it
    return 0


def _look_or_stop(options: argparse.Namespace) -> int:
    from kueue.worker.presence import Presence  # noqa: PLC0415  as above

    presence = Presence(options.config, options.name)
    if options.stop:
        sys.stdout.write(presence.stop(by_force=options.force) + "\n")
        return 0
    status = presence.status()
    sys.stdout.write(json.dumps(status) + "\n")
    return 0 if status["is_running"] else EXIT_NOT_RUNNING


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Runs jobs of the kueue server on this machine, in the foreground.",
        epilog="Examples: kueue_worker; kueue_worker --status; screen -dmS kueue_worker kueue_worker",
    )
    parser.add_argument(
        "-c", "--config", metavar="PATH", type=_absolute, help="configuration file instead of the usual one"
    )
    parser.add_argument("--name", default="", help="name of this worker; another name is another worker")
    parser.add_argument(
        "--log-file",
        metavar="PATH",
        type=_absolute,
        default="",
        help="log to this file, too; at 1 MiB it becomes PATH.1, of which one is kept",
    )
    actions = parser.add_mutually_exclusive_group()
    actions.add_argument(
        "--status",
        action="store_true",
        help=f"print a JSON object about this machine's worker; exits with 0 if it runs, {EXIT_NOT_RUNNING} if not",
    )
    actions.add_argument(
        "--stop", action="store_true", help="stop the worker of this machine; its running jobs go on without it"
    )
    parser.add_argument("--force", action="store_true", help="let --stop kill a worker that does not stop")
    parser.add_argument("-V", "--version", action="version", version=f"{PROGRAM} {__version__}")
    return parser


def _absolute(path: str) -> str:
    """The worker leaves the directory it was started in. Empty stays empty: argparse asks for the default, too."""
    return path and places.typed(path)


if __name__ == "__main__":
    sys.exit(main())
