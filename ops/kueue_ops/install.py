"""``kueue_install``: puts what comes with kueue where systemd, shells, Grafana and Prometheus look for it."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from kueue import __version__
from kueue.errors import EXIT_CANCELED, EXIT_OWN_FAILURE, EXIT_REFUSED, Bug, KueueError
from kueue_ops import install_files, install_units, record
from kueue_ops.shells import ALIASES, SHELLS
from kueue_ops.steps import Steps
from kueue_ops.systemd import PARTS

PROGRAM = "kueue_install"


def main(words: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code: 0 all is done, 1 something was refused or kept, 2 wrong usage."""
    options = _parser().parse_args(words)
    try:
        _check_home()
        with record.opened(record.place(dict(os.environ)), is_dry=options.dry_run) as known:
            steps = Steps(known, options.purpose, is_dry=options.dry_run, is_forced=options.force)
            act: Callable[[argparse.Namespace, Steps], None] = options.act
            act(options, steps)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing is left to be written at exit
        return EXIT_REFUSED
    except KeyboardInterrupt:
        return EXIT_CANCELED
    except KueueError as error:
        if options.debug or isinstance(error, Bug):
            traceback.print_exc()
        return _complain(f"Error: {error}", error.hint and f"Hint: {error.hint}", error.exit_code)
    except OSError as error:
        if options.debug:
            traceback.print_exc()
        where = f"{error.filename}: " if error.filename else ""
        return _complain(f"Error: {where}{error.strerror or error}.", "", EXIT_REFUSED)
    except Exception as error:  # noqa: BLE001  whatever it is, the person gets a sentence, and the place on request
        if options.debug:
            traceback.print_exc()
        sentence = f"Error: a fault in kueue itself: {type(error).__name__}: {error}"
        return _complain(sentence, f"Hint: see `{PROGRAM} --debug`.", EXIT_OWN_FAILURE)
    return EXIT_REFUSED if steps.failures else 0


def _check_home() -> None:
    try:
        home = Path.home()
    except RuntimeError:  # neither HOME nor an account of this number
        raise KueueError("There is no home directory to install into.", hint="Log in anew, or set HOME.") from None
    # What is written below it would lie in the current folder.
    if not home.is_absolute():
        raise KueueError(f"HOME is '{home}', which is no absolute path.", hint="Log in anew, or set HOME.")


def _complain(sentence: str, hint: str, code: int) -> int:
    print(sentence, file=sys.stderr)
    if hint:
        print(hint, file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Puts what comes with kueue where systemd, shells, Grafana and Prometheus look for it. Needs no "
        "root. Files that you changed are neither overwritten nor removed.",
        epilog=f"Example: {PROGRAM} systemd --dry-run",
    )
    parser.add_argument("-V", "--version", action="version", version=f"{PROGRAM} {__version__}")
    parser.add_argument("--debug", action="store_true", help="show a traceback with errors")
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
    kind.add_argument("-c", "--config", metavar="PATH", help="settings file (default: ~/.config/kueue/config.toml)")
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
    return Path(path).expanduser().absolute()


if __name__ == "__main__":
    sys.exit(main())
