"""``up`` and ``down``: a server and a worker on this machine, in the background, without root or a service manager."""
# pathlib is left out for the command's start-up time (5 ms):
# ruff: noqa: PTH120, PTH123

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import kueue
from kueue import inside_job, log, places
from kueue.cli.session import Session
from kueue.client import connect, rouse_own_server
from kueue.config import Config, load
from kueue.errors import EXIT_REFUSED, KueueError, Refused, Unreachable
from kueue.transport import is_this_host

_READY_SECONDS = 30.0
# The first start derives the key of the secret and makes a new store: about a second, on a slow disk several.
_STRANGER_SECONDS = 3.0
_STOP_SECONDS = 30.0
_CONNECTED_SECONDS = 60.0
# A worker that has waited long for its server tries again every 25 s.
_LOOK_SECONDS = 0.05
_LOG_TAIL_BYTES = 2000


class Daemon(NamedTuple):
    """A program that runs once for each directory of state."""

    what: str
    module: str
    lock: str
    log: str
    secrets: str = ""
    """File in which it notes its pid and the fingerprints of the secrets that it proves; empty: it does not."""
    note: str = ""
    """File in which the last one has left that something was lost (`kueue.storage.cut`); the next one removes it."""

    def pid(self) -> int | None:
        """The pid of the one that runs now; a lock decides, not a number in a file."""
        return places.holder(self.lock)


def up(session: Session) -> int:
    """Starts what does not run yet and returns when it serves."""
    config = _settings(session)
    rouse_own_server(places.find(config.common.state_dir))
    server, worker = _server(config), _worker(config)
    screen = session.screen
    name = config.common.server_name
    if is_this_host(name):
        if _is_ours_to_start(session, server, config):
            _start(session, server, config, lambda: _is_serving(session, server, config))
    else:
        screen.remark(f"The server of this lab is {name}, not this machine: only a worker is started here.")
    worker_name = _worker_name(config)
    _start(session, worker, config, lambda: _is_listed(session, worker, worker_name))
    screen.print("Ready: kueue cmd ./my_script.py")
    return 0


def down(session: Session) -> int:
    """Stops worker and server; their jobs go on under their runner."""
    config = _settings(session)
    stopped = [_stop(session, _worker(config))]
    # Behind it: a server that hangs without its lock keeps no worker from being stopped.
    rouse_own_server(places.find(config.common.state_dir))
    stopped.append(_stop(session, _server(config)))
    if any(stopped):
        session.screen.print("Running jobs go on; `kueue up` takes them up again.")
    else:
        session.screen.print("Neither a server nor a worker of this configuration runs on this machine.")
    return 0


def _settings(session: Session) -> Config:
    """All sections that the programs to be started or stopped use, so that mistakes are told here and not in a log."""
    known = session.config  # this writes the template when there is none
    config = load(known.path, ("server_settings", "worker_settings", "client_settings", "metrics_settings"))
    for warning in config.warnings:
        if warning not in known.warnings:
            session.screen.remark(f"Warning: {warning}")
    return config


def _server(config: Config) -> Daemon:
    state = places.find(config.common.state_dir)
    return Daemon("server", "kueue.server.main", state.server_lock, f"{state.server}/server.log", note=state.cut_note)


def _worker(config: Config) -> Daemon:
    directory = places.find(config.common.state_dir).worker(_worker_name(config))
    return Daemon(
        "worker", "kueue.worker.main", f"{directory}/lock", f"{directory}/worker.log", f"{directory}/fingerprints"
    )


def _worker_name(config: Config) -> str:
    return config.worker.worker_name or socket.gethostname().partition(".")[0]


def _is_ours_to_start(session: Session, server: Daemon, config: Config) -> bool:
    """Is there no server yet that serves this lab? Raises `KueueError` when something else has its port, or a server
    that is about to end.
    """
    if places.is_locked(server.lock) or not _is_taken(config):
        return True
    common = config.common
    with connect(config, patience_seconds=0.0) as client:
        # What listens there and is no server may stay mute.
        client.welcome_seconds = _STRANGER_SECONDS
        try:
            info = client.ask("ServerInfo")
        except KueueError as error:
            raise KueueError(
                f"TCP port {common.server_port} of this machine is taken by another program, maybe by a colleague's "
                "server.",
                hint=f"To join that server write its shared_secret into {config.path}; else choose another "
                "server_port there.",
            ) from error
    if info.get("lock_trouble"):
        # A worker that greets it is the change at which it finds its state gone and ends.
        raise KueueError(
            f"The server that runs already at {client.server} (pid {info['pid']}) is of no use any more. "
            f"{info['lock_trouble']}.",
            hint=f"Put the directory back if it was moved away. Then `kill {info['pid']}`, and `kueue up` starts "
            "another.",
        )
    session.screen.print(f"A server of this lab, started by somebody else, runs already at {client.server}.")
    return False


def _is_taken(config: Config) -> bool:
    """Does a program listen where the server is to listen?"""
    for word in config.server.bind_addresses.split():
        host = word.removeprefix("[").removesuffix("]")
        try:
            found = socket.getaddrinfo(
                host, config.common.server_port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
        except (OSError, UnicodeError):
            continue  # the server says what is wrong with an address
        for family, kind, _, _, address in found:
            try:
                with socket.socket(family, kind) as probe:
                    # Old connections that linger do not count, as with the server's own socket.
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    if family == socket.AF_INET6:
                        probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                    probe.bind(address)
            except OSError as error:  # noqa: PERF203 - each address has its own trouble
                if error.errno == errno.EADDRINUSE:
                    return True
    return False


def _start(session: Session, daemon: Daemon, config: Config, is_ready: Callable[[], bool]) -> None:
    """Starts the program if it does not run and waits until it is ready. Raises `KueueError` when it is not."""
    screen = session.screen
    if places.is_locked(daemon.lock):
        _await_running(session, daemon, config, is_ready)
        return
    inside_job.refuse(f"A {daemon.what}", f"`ssh {socket.gethostname()} kueue up`")
    begin = os.path.getsize(daemon.log) if os.path.exists(daemon.log) else 0  # noqa: PTH110, PTH202 - see above
    has_note = os.path.exists(daemon.note)  # noqa: PTH110 - see above
    # It is read by this descriptor, too: a log that gets too long has another name after that.
    descriptor = os.open(daemon.log, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        process = subprocess.Popen(
            # Its stderr leads there as well, for what it says before it has a log; the log itself is bounded.
            [sys.executable, "-m", daemon.module, "--config", config.path, "--log-file", daemon.log],
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            cwd=_import_root(),
            start_new_session=True,
        )
        deadline = time.monotonic() + _READY_SECONDS
        while time.monotonic() < deadline:
            screen.status(f"starting the {daemon.what} ...")
            has_ended = process.poll() is not None
            if has_ended and not places.is_locked(daemon.lock):
                why, advice = _last_words(descriptor, begin, daemon.log)
                raise KueueError(f"The {daemon.what} ended at once: {why}", hint=f"{advice}All it said: {daemon.log}")
            # Ready without a lock is another one, whose lock was removed and is about to be put back.
            if has_ended or (is_ready() and places.is_locked(daemon.lock)):
                if has_ended or daemon.pid() not in {None, process.pid}:
                    # Another `kueue up` was quicker. Ours must not take over later, when that one is told to end.
                    process.kill()
                    process.wait()
                    _await_running(session, daemon, config, is_ready)
                    return
                # It goes on without us; Popen would warn about a child that nobody waits for.
                process.returncode = 0
                screen.clear_status()
                screen.print(f"Started the {daemon.what} (pid {process.pid}, log {daemon.log}).")
                if has_note:
                    screen.remark(f"Warning: a file of its state was cut while the last one ran. See {daemon.log}.")
                return
            time.sleep(_LOOK_SECONDS)
        process.returncode = 0
        why, advice = _last_words(descriptor, begin, daemon.log)
        raise KueueError(
            f"The {daemon.what} (pid {process.pid}) is not ready after {_READY_SECONDS:g} s: {why}",
            hint=f"{advice}All it said: {daemon.log}",
        )
    finally:
        os.close(descriptor)


def _await_running(session: Session, daemon: Daemon, config: Config, is_ready: Callable[[], bool]) -> None:
    """Waits until the program that runs already is ready: that it runs does not say that it serves these settings."""
    screen = session.screen
    pid = daemon.pid()
    which = f"{daemon.what}{f' (pid {pid})' if pid else ''}"
    deadline = time.monotonic() + _CONNECTED_SECONDS
    while not is_ready():
        if not places.is_locked(daemon.lock):
            raise KueueError(f"The {which} ended meanwhile.", hint=f"`kueue up` starts another; its log: {daemon.log}")
        if time.monotonic() > deadline:
            raise KueueError(
                f"The {which} runs already, but is not ready after {_CONNECTED_SECONDS:g} s.",
                hint=f"Perhaps it was started with other settings than {config.path}: `kueue down && kueue up` starts "
                f"it with these. What it says: {daemon.log}",
            )
        screen.status(f"waiting for the {daemon.what} that runs already ...")
        time.sleep(_LOOK_SECONDS)
    screen.clear_status()
    screen.print(f"The {daemon.what} runs already{f' (pid {pid})' if pid else ''}.")


def _stop(session: Session, daemon: Daemon) -> bool:
    """Ends the program in order. False if it did not run. Raises `KueueError` when it does not end."""
    screen = session.screen
    pid = daemon.pid()
    if pid is None:
        if places.is_locked(daemon.lock):
            raise places.nameless(f"A {daemon.what}", daemon.lock)
        return False
    try:
        # The descriptor means this process alone, also if the number is given to another one meanwhile.
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if daemon.pid() != pid:
            return False
        signal.pidfd_send_signal(process, signal.SIGTERM)
    except ProcessLookupError:
        return True
    finally:
        os.close(process)
    deadline = time.monotonic() + _STOP_SECONDS
    while places.is_locked(daemon.lock):
        if time.monotonic() > deadline:
            raise KueueError(
                f"The {daemon.what} (pid {pid}) has not ended within {_STOP_SECONDS:g} s.",
                hint=f"What it says: {daemon.log}",
                exit_code=EXIT_REFUSED,
            )
        screen.status(f"stopping the {daemon.what} ...")
        time.sleep(_LOOK_SECONDS)
    screen.clear_status()
    screen.print(f"Stopped the {daemon.what} (pid {pid}).")
    return True


def _is_serving(session: Session, server: Daemon, config: Config) -> bool:
    """Does the server answer with this secret? Raises `KueueError` when it was started with another one."""
    client = session.client
    client.patience_seconds = 0.0
    try:
        client.ask("ServerInfo")
    except Unreachable:
        return False
    except Refused as error:
        if not places.is_locked(server.lock):
            raise
        pid = server.pid()
        raise Refused(
            f"The server that runs here{f' (pid {pid})' if pid else ''} was started with another secret than the one "
            f"in {config.path}.",
            hint="Put the old file back, or `kueue down && kueue up`: then the new secret counts, and the other "
            "machines need it, too. Jobs are kept.",
        ) from error
    return True


def _is_listed(session: Session, worker: Daemon, name: str) -> bool:
    """Does the server see the worker? Raises `KueueError` when it runs with another secret and never will be seen."""
    client = session.client
    # A server elsewhere may be away for a moment; one that was just started answers.
    client.patience_seconds = session.patience_seconds
    workers = client.ask("ListWorkers")["workers"]
    if any(one["name"] == name and one.get("state") not in {"away", "silent"} for one in workers):
        return True
    pid = worker.pid()
    if pid is not None and not _shares_a_secret(worker, pid, {one.fingerprint for one in client.server.identities}):
        raise Refused(
            f"The worker that runs here (pid {pid}) was started with another secret than the one in "
            f"{session.config.path}.",
            hint=f"kill -HUP {pid} lets it read its settings again; if they are not this file: `kueue down && kueue "
            "up`. Its running jobs go on.",
        )
    return False


def _shares_a_secret(daemon: Daemon, pid: int, fingerprints: set[str]) -> bool:
    """True also if the daemon has not said (yet) which secrets it proves."""
    try:
        with open(daemon.secrets, encoding="ascii", errors="replace") as file:
            noted, *proven = file.read(1000).split()
    except (OSError, ValueError):
        return True
    return noted != str(pid) or not fingerprints.isdisjoint(proven)


def _import_root() -> str:
    """A directory to start a program from so that it finds this very package: / if it is installed."""
    root = os.path.dirname(os.path.dirname(kueue.__file__))
    # -m puts the directory before the standard library, which must not be shadowed by what else is installed.
    return "/" if root.endswith(("site-packages", "dist-packages")) else root


def _last_words(descriptor: int, begin: int, path: str) -> tuple[str, str]:
    """(What it said went wrong, its hint with a blank behind it; empty if none).

    In the file that it was given at `begin`, or in the one that has its name by now.
    """
    size = os.fstat(descriptor).st_size
    begin = max(begin, size - _LOG_TAIL_BYTES)
    said = os.pread(descriptor, size - begin, begin).decode("utf-8", "replace")
    with contextlib.suppress(OSError), open(path, "rb") as file:
        if not os.path.sameopenfile(descriptor, file.fileno()):
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_TAIL_BYTES))
            said += file.read().decode("utf-8", "replace")
    _, _, behind = said.rpartition("Error: ")
    hints = [line.removeprefix("Hint: ") for line in behind.splitlines() if line.startswith("Hint: ")]
    return log.complaint(said) or "it said nothing.", f"{log.safe(hints[0])} " if hints else ""
