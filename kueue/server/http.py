"""What the server shows of itself: /metrics and /healthz at a place of the settings, and a file for node_exporter.

Rules
- All of it is in the server's own loop and none of it may stop the server: a failure is a line of the log.
- The state is looked at directly, between two turns of the engine; what is counted by job is counted after its commit.
- The disk is asked in a thread that is given up when it hangs; its figures are missing then.
- `renew` makes changed settings count at once.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import suppress
from http import HTTPStatus
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from kueue import clock, log
from kueue.config import MetricsSettings
from kueue.http import Page, Site
from kueue.net import Entrance
from kueue.server import outage
from kueue.server.driver import Driver

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from kueue.exposition import Program
    from kueue.server.metrics import Disk

TEXTFILE_SECONDS = 15.0
"""As often as Prometheus usually asks."""
LAG_SECONDS = 5.0
DISK_SECONDS = 2.0
"""A file system that takes longer has no figures."""
WRITE_SECONDS = 60.0
REMOVE_SECONDS = 1.0

_log = log.logger("server.metrics")


class Window:
    """The figures of one server. `run` serves them; prometheus-client is loaded only if somebody wants them."""

    def __init__(self, driver: Driver, entrance: Entrance, store: Path, settings: MetricsSettings) -> None:
        """`store`: the file of the state."""
        self._driver = driver
        self._entrance = entrance
        self._store = store
        self._settings = settings
        self._changed = trio.Event()
        self._program: Program | None = None
        self._site = Site({"/metrics": self.metrics, "/healthz": self.health, "/": self.index})
        self._threads = trio.CapacityLimiter(2)

    def renew(self, settings: MetricsSettings) -> None:
        """Make these settings count from now on."""
        if settings != self._settings:
            self._settings = settings
            self._changed.set()

    async def run(self) -> None:
        """Until cancelled, or until a bug of ours: the queue goes on without figures then."""
        try:
            while True:
                self._changed = trio.Event()
                async with trio.open_nursery() as nursery:
                    await self._open(nursery)
                    await self._changed.wait()
                    nursery.cancel_scope.cancel()
        except Exception:  # noqa: BLE001  logged whole; the queue must go on
            _log.exception("a bug: there are no figures until the next start; the queue goes on")

    async def _open(self, nursery: trio.Nursery) -> None:
        settings = self._settings
        if settings.server_bind or settings.server_textfile:
            # 60 ms, in which heartbeats are answered.
            await trio.to_thread.run_sync(import_module, "kueue.server.metrics")
            nursery.start_soon(self._sample_lag)
        if settings.server_bind:
            nursery.start_soon(self._site.listen, settings.server_bind, "/metrics and /healthz")
        if settings.server_textfile:
            nursery.start_soon(self._keep_file, Path(settings.server_textfile))

    # --- pages -------------------------------------------------------------------------------------------------------

    async def metrics(self, accept: str) -> Page:
        """All figures, in the format that was asked for."""
        from kueue.exposition import Program, rendered  # noqa: PLC0415  loaded by `_open`, if at all

        if self._program is None:
            self._program = Program()
        families = await self._families()
        kind, body = await rendered([*families, *self._program.families()], accept)
        return Page(body, kind)

    async def health(self, _: str) -> Page:
        """200 if jobs are accepted and offered, else 503; the word says why."""
        word = "ok"
        if self._driver.is_stopping:
            word = "stopping"
        elif self._driver.is_rebuilding:
            word = "rebuilding"
        elif self._driver.read_only:
            word = "read-only"
        status = HTTPStatus.OK if word == "ok" else HTTPStatus.SERVICE_UNAVAILABLE
        return Page(json.dumps({"status": word}).encode() + b"\n", "application/json", status)

    async def index(self, _: str) -> Page:
        """For the person who looks whether anything is there."""
        await trio.lowlevel.checkpoint()
        return Page(b"kueue_server: see /metrics and /healthz\n")

    async def _families(self) -> list[Metric]:
        from kueue.server.metrics import Sight, families  # noqa: PLC0415  as above

        disk = await self._disk()
        driver = self._driver
        outage.show_answering(driver)
        kinds = Counter("worker" if session.is_worker else "command" for session in driver.sessions.values())
        return families(
            Sight(
                engine=driver.engine,
                now=clock.now(),
                measures=driver.measures,
                read_only=bool(driver.read_only),
                connections={
                    "worker": kinds["worker"],
                    "command": kinds["command"],
                    "unproven": max(0, self._entrance.connections - kinds.total()),
                },
                refused_total=self._entrance.refused_total,
                disk=disk,
            )
        )

    async def _disk(self) -> Disk | None:
        with trio.move_on_after(DISK_SECONDS):
            return await trio.to_thread.run_sync(
                _look_at_disk, self._store, abandon_on_cancel=True, limiter=self._threads
            )
        return None

    # --- the file ----------------------------------------------------------------------------------------------------

    async def _keep_file(self, path: Path) -> None:
        """Write it again and again; removed at the end, because what stands in it would be believed for ever."""
        remark = ""
        limiter = trio.CapacityLimiter(1)
        try:
            while True:
                before, remark = remark, await self._write(path, limiter)
                if remark and remark != before:
                    _log.warning("cannot write the figures to %s: %s; all else goes on", path, remark)
                elif before and not remark:
                    _log.info("the figures are written to %s again", path)
                await trio.sleep(TEXTFILE_SECONDS)
        finally:
            with trio.move_on_after(REMOVE_SECONDS, shield=True):
                await trio.to_thread.run_sync(_remove, path, abandon_on_cancel=True, limiter=limiter)

    async def _write(self, path: Path, limiter: trio.CapacityLimiter) -> str:
        """Returns why it could not be written; empty: it was."""
        from kueue.exposition import rendered, write_file  # noqa: PLC0415  as above

        # Without process_… and python_…: node_exporter has its own of these names and refuses all if they differ.
        _, body = await rendered(await self._families())
        with trio.move_on_after(WRITE_SECONDS):
            try:
                await trio.to_thread.run_sync(write_file, path, body, abandon_on_cancel=True, limiter=limiter)
            except OSError as error:
                return error.strerror or str(error)
            return ""
        return "the file system does not answer"

    # --- the loop ----------------------------------------------------------------------------------------------------

    async def _sample_lag(self) -> None:
        while True:
            due = clock.steady() + LAG_SECONDS
            await trio.sleep(LAG_SECONDS)
            self._driver.measures.lag.observe(clock.steady() - due)


def _look_at_disk(store: Path) -> Disk | None:
    from kueue.server.metrics import Disk  # noqa: PLC0415  loaded by the caller

    try:
        size = sum(path.stat().st_size for path in (store, Path(f"{store}-wal")) if path.exists())
        found = os.statvfs(store.parent)
    except OSError:
        return None
    return Disk(size, found.f_bavail * found.f_frsize)


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
