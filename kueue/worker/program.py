"""The worker as a process: its configuration, its place on the disk, its signals, its beginning and its end.

Rules
- It never dies of what will pass: no configuration yet, no server, a wrong secret, a full disk. It says so and goes on.
- SIGTERM and SIGINT stop it within seconds; its jobs go on under their runner and are found again by the next worker.
- SIGHUP reads the configuration again: limits, overrides, server, secret. Name and state directory stay.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import site
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import trio

from kueue import __version__, clock, config, identity, log, notify, places, threads
from kueue.errors import ConfigError, KueueError
from kueue.worker import machine, presence
from kueue.worker.agent import Agent, AgentSettings
from kueue.worker.body import LOCK_LEASE_SECONDS, Body
from kueue.worker.claim import Claim
from kueue.worker.connection import Address, keep_connected
from kueue.worker.environment import Account, base_environment
from kueue.worker.http import WorkerWindow
from kueue.worker.identity_file import own_identity
from kueue.worker.machine import MachineSettings
from kueue.worker.runner_link import RunnerSet
from kueue.worker.scope import Scopes
from kueue.worker.spool import Spool

PROGRAM = "kueue_worker"
SECTIONS = ("worker_settings", "metrics_settings")
LONGEST_WAIT_SECONDS = 30.0
STOP_SECONDS = 8.0
"""For the last words; in all an orderly stop takes less than 10 s."""
NAME_MAX = 255
"""Characters; what `model.Name` lets through."""

_log = log.logger("worker")


class Program:
    """One worker process."""

    def __init__(self, config_path: str | None, name: str, log_file: str = "") -> None:
        self._path = config_path
        self._named = name
        self._log_file = log_file
        self._folder = ""
        self._reloads = 0
        self._cache: str | None = None
        self._stopped = trio.Event()
        self._hurry = trio.Event()
        self._body: Body | None = None
        self._window: WorkerWindow | None = None
        self._address: Address | None = None

    async def run(self) -> None:
        """Until SIGTERM or SIGINT. Raises `KueueError` for what does not pass by itself."""
        failure: KueueError | None = None
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._follow, signals, nursery)
                try:
                    settings = await self._configured()
                    if settings is not None:
                        await self._serve(settings)
                except KueueError as error:
                    # Raised again outside of the nursery, which would wrap it.
                    failure = error
                nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _follow(self, signals: AsyncIterator[int], nursery: trio.Nursery) -> None:
        async for number in signals:
            if number == signal.SIGHUP:
                if self._folder:  # before that nothing but a message every minute is to be lost
                    log.outlive_terminal(PROGRAM, f"{self._folder}/worker.log", f"{PROGRAM} --stop")
                self._reloads += 1
                if self._reloads == 1:
                    # Not here: on a dead file server the settings have no answer, and a signal to stop comes behind.
                    nursery.start_soon(self._reload_all)
            else:
                _log.info("stopping on %s", signal.Signals(number).name)
                self._stopped.set()

    # --- configuration -----------------------------------------------------------------------------------------------

    def _load(self) -> config.Config:
        settings = config.load(self._path, SECTIONS, cache_dir=self._cache)
        log.start(settings.common.log_level)
        for warning in settings.warnings:
            _log.warning("%s", warning)
        return settings

    async def _configured(self) -> config.Config | None:
        """The configuration, as soon as there is one with a secret; None: stopped while waiting for it."""
        pause = 1.0
        while not self._stopped.is_set():
            settings = self._load()
            if settings.common.shared_secret:
                return settings
            what = "has no shared_secret" if settings.exists else "does not exist"
            _log.warning(
                "%s %s: copy the file of the server's machine to that place (looking again in %.0f s)",
                settings.path,
                what,
                pause,
            )
            # To wait for the file is no failure to start, and it may take days.
            notify.notify(notify.READY, notify.ALIVE, f"STATUS=waiting for {settings.path}")
            await self._pause(min(pause, notify.watchdog_seconds() or pause))
            pause = min(LONGEST_WAIT_SECONDS, 2 * pause)
        return None

    async def _pause(self, seconds: float) -> None:
        """Ends early on any signal."""
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                for event in (self._stopped, self._hurry):
                    nursery.start_soon(self._end_with, event, nursery.cancel_scope)

    @staticmethod
    async def _end_with(event: trio.Event, scope: trio.CancelScope) -> None:
        await event.wait()
        scope.cancel()

    async def _address_of(self, settings: config.Config) -> Address:
        common = settings.common
        if not common.shared_secret:
            raise KueueError(f"{settings.path} has no shared_secret.")
        # A third of a second, unless the key derived from the secret is in the cache.
        proofs = await threads.patiently(
            identity.identities, common.shared_secret, common.shared_secret_previous, self._cache
        )
        presence.note_secrets(self._folder, [proof.fingerprint for proof in proofs])
        return Address(common.server_name, common.server_port, proofs)

    async def _reload_all(self) -> None:
        """As long as it was asked for; of those that came during one a single further one does."""
        while self._reloads:
            self._reloads = 1
            await self._reload()
            self._hurry.set()
            self._hurry = trio.Event()
            self._reloads -= 1

    async def _reload(self) -> None:
        body = self._body
        if body is None:
            return
        notify.reloading()
        try:
            settings = await threads.patiently(self._load, abandon_on_cancel=True)
            before, self._address = self._address, await self._address_of(settings)
        except (KueueError, OSError) as error:
            hint = error.hint if isinstance(error, KueueError) else ""
            _log.error("the configuration stays as it was: %s %s", error, hint)
        else:
            body.agent.configure(lambda before: _changeable(before, settings), clock.boottime())
            body.spool.limit_mb = settings.worker.output_limit_mb
            body.reconfigure(machine_settings(settings))
            if self._window is not None:
                self._window.renew(settings.metrics.worker_bind)
            _log.info("configuration read again from %s", settings.path)
            if before is None or before.is_other(self._address):
                # Proven anew, in a rotation also when nothing changed here: the server may have got the new secret
                # since we came, and is asked who is still there by the old one.
                body.reconnect("the settings were read again")
        notify.notify(notify.READY)

    # --- life --------------------------------------------------------------------------------------------------------

    async def _serve(self, settings: config.Config) -> None:
        place = places.find(settings.common.state_dir)
        if place.remark:
            _log.warning("%s", place.remark)
        kept = place.keep()
        self._cache = place.cache
        name = self._named or settings.worker.worker_name or socket.gethostname().partition(".")[0]
        if len(name) > NAME_MAX:
            raise ConfigError(f"worker_settings.worker_name has {len(name)} characters, at most {NAME_MAX} are taken.")
        folder = self._folder = place.worker(name)
        try:
            # On a network file system a look may hang, and with it the heartbeats.
            with Claim(folder, f"The worker {name}", is_watched=not place.is_network) as claim:
                claim.on_loss = self._stopped.set
                presence.note_version(folder)
                presence.note_trouble(folder, "")
                os.chdir("/")
                await self._work(settings, place, name, claim)
            if claim.loss is not None:
                raise claim.loss
        finally:
            os.close(kept)

    async def _work(self, settings: config.Config, place: places.Places, name: str, claim: Claim) -> None:
        folder = self._folder
        agent = Agent(
            _changeable(
                AgentSettings(
                    identity=own_identity(f"{folder}/identity", machine.machine_id(), machine.boot_id()),
                    name=name,
                    machine_id=machine.machine_id(),
                    boot_id=machine.boot_id(),
                    version=__version__,
                    info=machine.info(),
                    base_environment=base_environment(os.environ, _account()),
                ),
                settings,
            ),
            machine.totals(machine_settings(settings), machine.measure()),
        )
        lock = await threads.patiently(_server_lock, settings.common.server_name, place)
        runners = RunnerSet(
            Path(folder),
            agent.settings.identity,
            restart_command=self._restart_command(name),
            restart_env=_restart_environment(),
            server_lock_path=lock or None,
            server_lock_seconds=LOCK_LEASE_SECONDS if lock else 0.0,
            scopes=Scopes(os.environ),
            is_ours=claim.holds,
            is_local=not place.is_network,
            # On a network file system it may hang, and a dead one is a reason for trouble.
            on_trouble=lambda trouble: None if place.is_network else presence.note_trouble(folder, trouble),
        )
        spool = Spool(f"{folder}/spool", settings.worker.output_limit_mb)
        body = Body(agent, runners, spool, machine_settings(settings), lock, self._welcomed, claim.holds)
        window = self._window = WorkerWindow(body, settings.metrics.worker_bind)
        self._address = await self._address_of(settings)
        async with trio.open_nursery() as nursery:
            await nursery.start(body.run)
            nursery.start_soon(window.run)
            self._body = body
            await runners.open(nursery)
            body.begin()
            _log.info("%s", log.keys(worker=name, pid=os.getpid(), state=folder))
            notify.notify(notify.READY)
            sessions = trio.CancelScope()
            nursery.start_soon(self._keep_connected, body, sessions)
            await self._stopped.wait()
            notify.notify(notify.STOPPING)
            with trio.move_on_after(STOP_SECONDS):
                await body.say_goodbye()
                sessions.cancel()  # else it would greet the server again
                await runners.close(orderly=True)
            nursery.cancel_scope.cancel()

    async def _keep_connected(self, body: Body, scope: trio.CancelScope) -> None:
        with scope:
            await keep_connected(body, self._present_address, lambda: self._hurry)

    def _present_address(self) -> Address:
        assert self._address is not None
        return self._address

    def _welcomed(self) -> None:
        assert self._address is not None
        _log.info("taken in by the server at %s", self._address.name)
        notify.status(f"connected to {self._address.name}")

    def _restart_command(self, name: str) -> list[str]:
        """How a runner brings this worker back after a crash; a service manager does that itself."""
        if _is_managed():
            return []
        script = Path(sys.argv[0])
        start = [str(script.absolute())] if script.name == PROGRAM else ["-m", "kueue.worker.main"]
        command = [sys.executable, *start, "--name", name]
        if self._log_file:
            command += ["--log-file", self._log_file]
        return [*command, "--config", self._path] if self._path else command


def _restart_environment() -> dict[str, str]:
    """Ours; a package that was found in the directory we were started in must be found from elsewhere, too."""
    env = dict(os.environ)
    parent = str(Path(__file__).absolute().parents[2])
    if Path(sys.argv[0]).name != PROGRAM and parent not in site.getsitepackages():
        env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys((parent, *filter(None, [env.get("PYTHONPATH")]))))
    return env


def machine_settings(settings: config.Config) -> MachineSettings:
    """What the configuration says about the machine."""
    worker = settings.worker
    return MachineSettings(
        slots=worker.worker_max_parallel_jobs,
        cores=worker.cores,
        ram_mb=worker.ram_mb,
        named=worker.named,
        looks_at_load=worker.dynamic_check_free_resources,
        load_scale=worker.dynamic_cpu_load_scale_factor,
    )


def _changeable(before: AgentSettings, settings: config.Config) -> AgentSettings:
    worker = settings.worker
    return replace(
        before,
        job_nice=worker.job_nice,
        kill_grace_seconds=float(worker.kill_grace_seconds),
        report_interval_seconds=float(worker.system_update_interval_seconds),
    )


def _account() -> Account:
    """Of a uid that the password database does not have nothing is filled in."""
    try:
        entry = pwd.getpwuid(os.getuid())
    except KeyError:
        return Account("", "", "")
    return Account(entry.pw_name, entry.pw_dir, entry.pw_shell)


def _server_lock(server_name: str, place: places.Places) -> str:
    """The server's state lock if the server is on this very host, else empty: an absent server proves nothing then."""
    if place.is_network or not _is_this_host(server_name):
        return ""
    return place.server_lock


def _is_this_host(name: str) -> bool:
    """Only an address of this machine can be bound here; port 0 takes nothing away from anybody."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False


def _is_managed() -> bool:
    """A service manager started this very process (systemd.exec(5)); a desktop terminal inherits the other variable."""
    started = os.environ.get("SYSTEMD_EXEC_PID")
    return "INVOCATION_ID" in os.environ and (started is None or started == str(os.getpid()))
