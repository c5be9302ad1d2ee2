"""``kueue_install``: puts what comes with kueue where systemd, shells, Grafana and Prometheus look for it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from kueue import console, places
from kueue.errors import EXIT_REFUSED, KueueError
from kueue_ops import command_line, install_files, install_units, record
from kueue_ops.completion_places import ALIASES, SHELLS
from kueue_ops.steps import Steps
from kueue_ops.systemd import PARTS

PROGRAM = "kueue_install"


def main(words: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code: 0 all is done, 1 something was refused or kept, 2 wrong usage."""
    return console.concluded(lambda: _main(words))


def _main(words: Sequence[str] | None) -> int:
    options = _parser().parse_args(words)
    try:
        _check_home()
        console.expect_children()
        with record.opened(record.place(dict(os.environ)), is_dry=options.dry_run) as known:
            steps = Steps(known, options.purpose, is_dry=options.dry_run, is_forced=options.force)
            act: Callable[[argparse.Namespace, Steps], None] = options.act
            act(options, steps)
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001  said in a sentence
        return command_line.explained(error, PROGRAM, trace=options.debug)
    return EXIT_REFUSED if steps.failures else 0


def _check_home() -> None:
    try:
        home = Path.home()
    except RuntimeError:  # neither HOME nor an account of this number
        raise KueueError("There is no home directory to install into.", hint="Log in anew, or set HOME.") from None
    # What is written below it would lie in the current folder.
    if not home.is_absolute():
        raise KueueError(f"HOME is '{home}', which is no absolute path.", hint="Log in anew, or set HOME.")


def _parser() -> argparse.ArgumentParser:
    parser = command_line.parser(
        PROGRAM,
        "Puts what comes with kueue where systemd, shells, Grafana and Prometheus look for it. Needs no root. Files "
        "that you changed are neither overwritten nor removed.",
        f"{PROGRAM} systemd --dry-run",
    )
    kinds = parser.add_subparsers(metavar="WHAT", required=True)
    _add_systemd(kinds)
    _add_completion(kinds)
    _add_grafana(kinds)
    _add_prometheus(kinds)
    return parser


def _kind(
    kinds: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    act: Callable[[argparse.Namespace, Steps], None],
    text: str,
    example: str,
) -> argparse.ArgumentParser:
    kind = kinds.add_parser(name, help=text, description=f"{text}.", epilog=f"Example: {PROGRAM} {name} {example}")
    kind.set_defaults(act=act, purpose=name)
    kind.add_argument("-n", "--dry-run", action="store_true", help="print the steps and change nothing")
    kind.add_argument("--uninstall", action="store_true", help="take away what was installed")
    kind.add_argument("--force", action="store_true", help="overwrite or remove files that somebody changed, too")
    return kind


def _add_systemd(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    kind = _kind(
        kinds,
        "systemd",
        install_units.act,
        "Services of your own service manager: they start with the machine and come back after a crash",
        "worker --start",
    )
    kind.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        type=_one_of(PARTS),
        help=f"{', '.join(PARTS)}; without any: the worker, and the server if the settings name this machine",
    )
    command_line.add_config(kind)
    # Not argparse.BooleanOptionalAction: Python 3.10 adds words of its own to its help.
    enable = kind.add_mutually_exclusive_group()
    enable.add_argument(
        "--enable", action="store_true", default=True, help="start the services with the machine (default)"
    )
    enable.add_argument("--no-enable", dest="enable", action="store_false", help="do not start them with the machine")
    kind.add_argument("--start", action="store_true", help="start them now; those that run are started again")


def _add_completion(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    kind = _kind(
        kinds, "completion", install_files.completion, "Completion of the command kueue in your shell", "bash fish"
    )
    kind.add_argument(
        "shells",
        nargs="*",
        metavar="SHELL",
        type=_one_of(SHELLS, ALIASES),
        help=f"{', '.join(SHELLS)}; without any: your login shell",
    )


def _add_grafana(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    kind = _kind(
        kinds,
        "grafana",
        install_files.grafana,
        "Dashboards and provisioning for Grafana, in a folder",
        "~/kueue-grafana",
    )
    kind.add_argument("folder", type=_absolute, help="where to put them; made if it is not there")
    kind.add_argument(
        "--prometheus-url",
        metavar="URL",
        default="http://127.0.0.1:9090",
        help="where Grafana finds Prometheus (default: %(default)s)",
    )


def _add_prometheus(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    kind = _kind(
        kinds,
        "prometheus",
        install_files.prometheus,
        "Scrape configuration and alert rules for Prometheus, in a folder",
        "~/kueue-prometheus",
    )
    kind.add_argument("folder", type=_absolute, help="where to put them; made if it is not there")


def _one_of(known: Iterable[str], aliases: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """`choices` of argparse does not take an empty list of arguments."""
    names = list(known)

    def checked(word: str) -> str:
        name = (aliases or {}).get(word, word)
        if name not in names:
            raise argparse.ArgumentTypeError(f"'{word}' is none of {', '.join(names)}")
        return name

    return checked


def _absolute(path: str) -> Path:
    return Path(places.typed(path))


if __name__ == "__main__":
    sys.exit(main())
