"""``kueue_restart_workers``: sees to it over ssh that every host of the laboratory has a worker.

Only the command line is read here: what is behind it takes a third of a second to load, in which an interrupt must not
end with a traceback.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from kueue import console, inside_job
from kueue.errors import EXIT_REFUSED, EXIT_USAGE, ConfigError, KueueError, UsageError
from kueue_ops import command_line
from kueue_ops.command_line import RESTART_WORKERS, explained, leave


def main(words: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code: 0 all is well, 1 not on all hosts, 2 wrong usage or settings."""
    return console.concluded(lambda: _main(words))


def _main(words: Sequence[str] | None) -> int:
    options = _parser().parse_args(words)
    try:
        _check_usage(options)
        console.expect_children()
        if not (options.once or options.status or options.stop or options.check or options.push_config):
            inside_job.refuse(
                RESTART_WORKERS, f"by a login of its own (ssh), or `systemd-run --user {RESTART_WORKERS}`"
            )
            # To look at all hosts now is what SIGHUP asks for, and what it does first anyway; it must not end it.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        from kueue_ops import restart_verbs  # noqa: PLC0415  see the module

        code = restart_verbs.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        leave(EXIT_REFUSED)
    except ConfigError as error:
        explained(error, RESTART_WORKERS, trace=options.debug)
        return EXIT_USAGE
    except KueueError as error:
        return explained(error, RESTART_WORKERS, trace=options.debug)
    except Exception as error:  # noqa: BLE001  said in a sentence
        leave(explained(error, RESTART_WORKERS, trace=options.debug))
    return code


def _parser() -> argparse.ArgumentParser:
    parser = command_line.parser(
        RESTART_WORKERS,
        "Sees to it that every host of [restart_workers] has a worker: logs in by ssh and starts one in a screen "
        "session where there is none. Without an option it does so for ever.",
        f"`{RESTART_WORKERS} --check`, and when all is well: `screen {RESTART_WORKERS}`",
    )
    parser.add_argument("hosts", nargs="*", metavar="HOST", help="only these of the hosts in the settings")
    command_line.add_config(parser)
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
