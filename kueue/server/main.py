"""The program `kueue_server`: reads the settings, owns lock and store, serves until it is told to stop."""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import trio

from kueue import __version__, client, config, console, identity, inside_job, log, places
from kueue.config import Config
from kueue.errors import EXIT_OWN_FAILURE, ConfigError, KueueError, UsageError
from kueue.server import copies, loss, recovery, restore
from kueue.server.claim import WHO, Claim
from kueue.server.service import Service
from kueue.storage import backup
from kueue.storage.sqlite import SqliteStore

SECTIONS = ("server_settings", "global_resources", "metrics_settings")
UP_VARIABLE = "KUEUE_UP"
"""Set to 1 by `kueue up`: a person stands behind this start although there is no terminal."""

_log = log.logger("server")


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point; exits with 0 after an orderly stop, else with the code of what went wrong."""
    sys.exit(console.concluded(lambda: _concluded(arguments)))


def _concluded(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # the name of a backup need not be text
    try:
        return _run(options)
    except KueueError as error:
        _complain(error, trace=options.debug)
        return error.exit_code
    except KeyboardInterrupt:
        if _is_for_once(options):
            raise
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kueue_server",
        description="The server of kueue: owns the queue, gives jobs to workers. Runs until it is told to stop.",
        epilog="Examples: kueue_server --config ~/.config/kueue/config.toml; kueue_server --backup ~/queue.backup",
    )
    parser.add_argument("-c", "--config", metavar="PATH", help="settings file (default: ~/.config/kueue/config.toml)")
    parser.add_argument("-V", "--version", action="version", version=f"kueue_server {__version__}")
    for_once = parser.add_mutually_exclusive_group()
    for_once.add_argument(
        "--recover", action="store_true", help="save what can be read of a damaged state into a new one, then exit"
    )
    for_once.add_argument(
        "--backup",
        metavar="FILE",
        type=_file,
        help="copy the state to a new file, then exit; the server may run meanwhile",
    )
    for_once.add_argument(
        "--restore", metavar="FILE", type=_file, help="make a backup the state, then exit; what is there is moved aside"
    )
    parser.add_argument("--force", action="store_true", help="let --backup replace a file that exists")
    parser.add_argument(
        "--log-file",
        metavar="PATH",
        type=_file,
        help="log to this file, too; at 1 MiB it becomes PATH.1, of which one is kept",
    )
    parser.add_argument("--take-over", action="store_true", help="use a state directory that another host has used")
    parser.add_argument("--debug", action="store_true", help="show a traceback with errors")
    return parser


def _file(word: str) -> str:
    """Its absolute path. An unset variable of a script must not start a server."""
    if not word:
        raise argparse.ArgumentTypeError("the name of a file is missing")
    return places.typed(word)


def _is_for_once(options: argparse.Namespace) -> bool:
    """It does something and exits; nobody is served."""
    return bool(options.backup or options.restore or options.recover)


def _complain(error: KueueError, *, trace: bool) -> None:
    log.written()  # what was said before stands above it
    print(f"Error: {error}", file=sys.stderr)  # noqa: T201  there may be no log yet
    if error.hint:
        print(f"Hint: {error.hint}", file=sys.stderr)  # noqa: T201  as above
    if trace or error.exit_code == EXIT_OWN_FAILURE:
        sys.excepthook(type(error), error, error.__traceback__)


def _run(options: argparse.Namespace) -> int:
    if options.force and not options.backup:
        raise UsageError("--force belongs to --backup.")
    if not _is_for_once(options):
        inside_job.refuse("A server", "by a login of its own (ssh), or `systemd-run --user kueue_server`")
    settings = _settings(options.config, may_make=not _is_for_once(options))
    if options.log_file:
        try:
            log.to_file(options.log_file)
        except OSError as error:
            raise UsageError(f"--log-file {options.log_file} cannot be written: {error.strerror}.") from error
    log.start(settings.common.log_level)
    for warning in settings.warnings:
        _log.warning("%s", warning)
    where = places.find(settings.common.state_dir)
    if where.remark:
        _log.warning("%s", where.remark)
    kept = where.keep()
    try:
        client.rouse_own_server(where)
        if options.backup:
            return copies.take(where, options.backup, force=options.force)
        with Claim(places.lock_exclusive(where.server_lock, WHO), is_watched=not where.is_network) as claim:
            if options.recover:
                return recovery.recover(Path(where.server))
            if options.restore:
                return restore.restore(where, options.restore, take_over=options.take_over)
            backup.sweep_beside(recovery.state_file(Path(where.server)))
            # Before the service hears signals: a reload that comes now has nothing to reload, and must not end us.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            log.unhurried()
            _allow_many_connections()
            known = identity.identities(
                settings.common.shared_secret, settings.common.shared_secret_previous, where.cache
            )
            store = SqliteStore(
                recovery.state_file(Path(where.server)), is_network=where.is_network, take_over=options.take_over
            )
            try:
                loss.settle(store)
                trio.run(Service(settings, where, store, known, claim).run)
            finally:
                log.written()  # what is said after that, of an error, stands below it
                store.close()
                log.written()  # what that had to say
            return 0
    finally:
        os.close(kept)


def _settings(path: str | None, *, may_make: bool) -> Config:
    """The settings; a new file is made only when a person is there to read that it was."""
    loaded = config.load(path, SECTIONS)
    if loaded.exists:
        return loaded
    if not may_make or not (sys.stderr.isatty() or os.environ.get(UP_VARIABLE) == "1"):
        raise ConfigError(
            f"There is no settings file {loaded.path}.",
            hint="Copy that of the lab, or start kueue_server once in a terminal to get a new one.",
        )
    remark = config.first_start(loaded.path)
    if remark:
        print(remark, file=sys.stderr)  # noqa: T201  for the person at the terminal, whatever the log level
    return config.load(path, SECTIONS)


def _allow_many_connections() -> None:
    """Each connection is a descriptor, and the usual soft limit is 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        _log.debug("the limit of open files stays as it is: %s", error)


if __name__ == "__main__":
    main()
