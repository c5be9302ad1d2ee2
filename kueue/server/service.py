"""The running server: listeners, signals, reload, watchdog, and the order in which all that starts and stops."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import trio

from kueue import config, identity, log, notify, places, whole_file
from kueue.config import Config
from kueue.core.settings import Settings
from kueue.entrance import Entrance, addresses_of, bind, bind_unix
from kueue.errors import KueueError
from kueue.server.claim import Claim
from kueue.server.driver import Driver
from kueue.server.http import ServerWindow
from kueue.server.recovery import state_file
from kueue.server.session import greet
from kueue.server.threads import in_thread
from kueue.storage.store import Store

STOP_SECONDS = 9.0
"""An orderly stop takes no longer, whatever the disk does; service managers lose patience after ten."""
LAST_WORDS_SECONDS = 3.0
RELOADABLE = ("server_settings", "global_resources", "metrics_settings")

_log = log.logger("server")


def engine_settings(settings: Config) -> Settings:
    """What the engine must know of the configuration."""
    server = settings.server
    return Settings(
        worker_timeout_seconds=float(server.worker_timeout_seconds),
        job_offer_timeout_seconds=float(server.job_offer_timeout_seconds),
        # In whole minutes, strictly more than the setting: with 0 there is still a minute to look at a job.
        job_cleanup_after_seconds=(server.job_cleanup_after_minutes + 1) * 60.0,
        global_max_parallel_jobs=server.global_max_parallel_jobs,
        counters=dict(settings.global_resources or {}),
    )


class Service:
    """One start of the server. The caller closes the store, and gives up the lock (`claim`) behind that."""

    def __init__(
        self,
        settings: Config,
        where: places.Places,
        store: Store,
        identities: Sequence[identity.Identity],
        claim: Claim,
    ) -> None:
        self._settings = settings
        self._places = where
        self._identities = list(identities)
        self._driver = Driver(store, engine_settings(settings), stands=claim.stands, trouble=lambda: claim.trouble)
        self._driver.upkeep.interval_seconds = settings.server.maintenance_interval_seconds
        self._driver.renew_secrets(_fingerprints(identities))
        self._entrance = Entrance(identities, partial(greet, self._driver))
        self._window = ServerWindow(self._driver, self._entrance, state_file(Path(where.server)), settings.metrics)
        self._port = settings.common.server_port
        self._reloads = 0
        self._starting = trio.CancelScope()
        self._is_open = trio.Event()
        self._sockets: dict[str, trio.CancelScope] = {}
        """Paths of the local sockets that are served, each with what ends it."""

    async def run(self) -> None:
        """Until SIGTERM or SIGINT. Raises `KueueError` for what makes serving impossible."""
        failure: KueueError | None = None
        # The receiver is open until the end: a signal that comes during the stop must not end it in the middle.
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._hear_signals, signals, nursery)
                    try:
                        with self._starting:
                            await self._driver.load()
                            listeners = await bind(self._settings.server.bind_addresses, self._port)
                        if not self._starting.cancelled_caught:
                            await self._serve(listeners, nursery)
                    except KueueError as error:
                        failure = error  # raised below, outside of the nursery, which would wrap it
                    nursery.cancel_scope.cancel()
            finally:
                self._close()
        if failure is not None:
            raise failure

    async def _serve(self, listeners: Sequence[trio.SocketListener], nursery: trio.Nursery) -> None:
        await self._open(listeners, nursery)
        nursery.start_soon(self._say_alive)
        nursery.start_soon(self._look_at_name)
        nursery.start_soon(self._window.run)
        self._is_open.set()
        await self._driver.run()
        await self._see_off()

    async def _open(self, listeners: Sequence[trio.SocketListener], nursery: trio.Nursery) -> None:
        self._port = addresses_of(listeners)[0][1]
        self._remove_sockets()
        # Behind the load: a lease granted before this moment is older than the silence that counts from here.
        self._driver.opened()
        nursery.start_soon(self._entrance.serve, listeners)
        await self._serve_locally(nursery)
        self._note_port()
        addresses = " ".join(f"{f'[{host}]' if ':' in host else host}:{port}" for host, port in addresses_of(listeners))
        _log.info("listening on %s", addresses)
        notify.notify(notify.READY, f"STATUS=listening on {addresses}")

    def _note_port(self) -> None:
        """For people and scripts; a full disk must not keep anybody from serving, and from making room by that."""
        note = Path(self._places.server, "port")
        try:
            whole_file.write(note, f"{self._port}\n".encode())
        except OSError as error:
            _log.warning("the port is not noted in %s: %s", note, error.strerror)

    async def _serve_locally(self, nursery: trio.Nursery) -> None:
        """A local socket for each secret that counts; the command finds it by the secret's fingerprint."""
        paths = [self._places.server_socket(self._port, known.fingerprint) for known in self._identities]
        for path in set(self._sockets) - set(paths):
            self._sockets.pop(path).cancel()
            with suppress(OSError):
                Path(path).unlink()  # noqa: ASYNC240  tiny, local
        for path in paths:
            if path in self._sockets:
                continue
            address, descriptor = places.socket_address(path)
            try:
                listener = await bind_unix(address, path)
            except KueueError as error:
                _log.warning("%s Commands on this host use the network instead.", error)
                continue
            finally:
                if descriptor >= 0:
                    os.close(descriptor)
            self._sockets[path] = scope = trio.CancelScope()
            nursery.start_soon(self._serve_one, listener, scope)

    async def _serve_one(self, listener: trio.SocketListener, scope: trio.CancelScope) -> None:
        with scope:
            await self._entrance.serve([], listener)

    def _remove_sockets(self) -> None:
        """Those of earlier starts and ports; the lock says that nobody serves them."""
        for path in Path(self._places.server).glob("*.sock"):
            with suppress(OSError):
                path.unlink()

    def _close(self) -> None:
        notify.notify(notify.STOPPING)
        for path in self._sockets:
            with suppress(OSError):
                Path(path).unlink()

    # --- while it runs -----------------------------------------------------------------------------------------------

    async def _hear_signals(self, signals: AsyncIterator[int], nursery: trio.Nursery) -> None:
        async for number in signals:
            if self._driver.is_stopping:
                continue
            if number == signal.SIGHUP:
                log.outlive_terminal("kueue_server", f"{self._places.server}/server.log", f"kill {os.getpid()}")
                self._reloads += 1
                if self._reloads == 1:
                    # Not here: on a dead file server the settings have no answer, and a signal to stop comes behind.
                    nursery.start_soon(self._reload_all, nursery)
            else:
                self._stop(number)

    def _stop(self, number: int) -> None:
        _log.info("%s: stopping; running jobs go on", signal.Signals(number).name)
        notify.notify(notify.STOPPING)
        # Nothing that was acknowledged can be lost by this: it is on the disk already.
        guard = threading.Timer(STOP_SECONDS, os._exit, (0,))
        guard.daemon = True
        try:
            guard.start()
        except RuntimeError:  # no more threads for this account: the kernel's own clock ends it then, by a signal
            signal.setitimer(signal.ITIMER_REAL, STOP_SECONDS)
        self._starting.cancel()
        self._driver.stop("the server is stopped")

    async def _see_off(self) -> None:
        """Let the sessions say their last words."""
        with trio.move_on_after(LAST_WORDS_SECONDS):
            await self._driver.empty()

    async def _reload_all(self, nursery: trio.Nursery) -> None:
        """As long as it was asked for; of those that came during one a single further one does."""
        await self._is_open.wait()
        while self._reloads:
            self._reloads = 1
            await self._reload(nursery)
            self._reloads -= 1

    async def _reload(self, nursery: trio.Nursery) -> None:
        notify.reloading()
        try:
            new = await in_thread(partial(_read_again, self._settings.path), purpose="new settings")
            secrets = new.common.shared_secret, new.common.shared_secret_previous
            identities = await in_thread(
                partial(identity.identities, *secrets, self._places.cache), purpose="new secret"
            )
            await self._driver.reload(engine_settings(new))
        except (KueueError, OSError) as error:
            hint = error.hint if isinstance(error, KueueError) else ""
            _log.error("reload: %s The settings stay as they were. %s", error, hint)
        else:
            self._take_over_settings(new, identities)
            await self._serve_locally(nursery)
            _log.info("reload: the settings of %s count now", new.path)
        notify.notify(notify.READY)

    def _take_over_settings(self, new: Config, identities: Sequence[identity.Identity]) -> None:
        old, self._settings = self._settings, new
        self._identities = list(identities)
        self._entrance.renew(identities)
        self._driver.renew_secrets(_fingerprints(identities))
        self._driver.upkeep.interval_seconds = new.server.maintenance_interval_seconds
        self._window.renew(new.metrics)
        log.start(new.common.log_level)
        for warning in new.warnings:
            _log.warning("%s", warning)
        if (old.common.server_port, old.server.bind_addresses) != (new.common.server_port, new.server.bind_addresses):
            _log.warning("reload: server_port and bind_addresses count after the next start only")

    async def _say_alive(self) -> None:
        period = notify.watchdog_seconds()
        while period is not None:
            notify.notify(notify.ALIVE)
            await trio.sleep(period)

    async def _look_at_name(self) -> None:
        """Warn when workers would come here in vain: the name leads elsewhere, or only back to themselves."""
        name = self._settings.common.server_name
        try:
            found = await in_thread(
                partial(socket.getaddrinfo, name, None, type=socket.SOCK_STREAM), purpose="name look-up"
            )
        except (OSError, UnicodeError) as error:  # the latter of what can be no name: a..b
            _log.warning("server_name = %s is not known here: %s", name, getattr(error, "strerror", None) or error)
            return
        except KueueError as error:
            _log.warning("server_name = %s was not looked up: %s", name, error)
            return
        addresses = sorted({str(address[0]).partition("%")[0] for *_, address in found})
        remark = name_remark(name, addresses, _is_ours)
        if remark:
            _log.warning("server_name = %s means %s %s", name, " ".join(addresses), remark)


def name_remark(name: str, addresses: Sequence[str], is_ours: Callable[[str], bool]) -> str:
    """What is wrong with a name that leads to these addresses, as the end of a sentence; empty: nothing."""
    if all(ipaddress.ip_address(address).is_loopback for address in addresses):
        if name == "localhost" or _is_address(name):
            return ""  # a lab of one machine, and meant to be
        return (
            "here, a Debian habit: if it means that on the workers too, they look for the server on themselves. "
            "Mend /etc/hosts, or name an address"
        )
    if any(is_ours(address) for address in addresses):
        return ""
    return "which is not this host: workers and commands will not come here"


def _fingerprints(identities: Sequence[identity.Identity]) -> tuple[str, ...]:
    return tuple(one.fingerprint for one in identities)


def _read_again(path: str) -> Config:
    new = config.load(path, RELOADABLE)
    if not new.exists:
        raise KueueError(f"There is no settings file {path}.")
    return new


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_ours(address: str) -> bool:
    """Can a socket be bound to it? Only to addresses of this host."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
