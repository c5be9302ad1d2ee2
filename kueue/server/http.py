"""What the server shows of itself in its window, and in a file for node_exporter.

Rules
- The state is looked at directly, between two turns of the engine; what is counted by job is counted after its commit.
- The disk is asked in a thread that is given up when it hangs; its figures are missing then.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from kueue import clock, log
from kueue.config import MetricsSettings
from kueue.entrance import Entrance
from kueue.errors import UserError
from kueue.server import outage
from kueue.server.driver import Driver
from kueue.server.threads import in_thread
from kueue.window import Window

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from kueue.server.metrics import Disk

TEXTFILE_SECONDS = 15.0
"""As often as Prometheus usually asks."""
LAG_SECONDS = 5.0
DISK_SECONDS = 2.0
"""A file system that takes longer has no figures."""
WRITE_SECONDS = 60.0
REMOVE_SECONDS = 1.0

_log = log.logger("server.metrics")


class ServerWindow(Window[MetricsSettings]):
    """The figures of one server."""

    program = "kueue_server"
    module = "kueue.server.metrics"
    what_goes_on = "the queue"

    def __init__(self, driver: Driver, entrance: Entrance, store: Path, settings: MetricsSettings) -> None:
        """`store`: the file of the state."""
        super().__init__(settings)
        self._driver = driver
        self._entrance = entrance
        self._store = store
        self._threads = trio.CapacityLimiter(2)
        self._started_wall = clock.now().wall

    def place(self) -> str:
        return self.settings.server_bind

    def wants_figures(self) -> bool:
        return bool(self.settings.server_bind or self.settings.server_textfile)

    def open(self, nursery: trio.Nursery) -> None:
        if self.wants_figures():
            nursery.start_soon(self._sample_lag)
        if self.settings.server_textfile:
            nursery.start_soon(self._keep_file, Path(self.settings.server_textfile))

    def state(self) -> str:
        """``ok`` if jobs are accepted and offered."""
        if self._driver.is_stopping:
            return "stopping"
        if self._driver.is_rebuilding:
            return "rebuilding"
        return "read-only" if self._driver.read_only else "ok"

    async def families(self) -> list[Metric]:
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
                started_wall=self._started_wall,
            )
        )

    async def _disk(self) -> Disk | None:
        with trio.move_on_after(DISK_SECONDS):
            with suppress(UserError):
                return await in_thread(partial(_look_at_disk, self._store), purpose="figures", limiter=self._threads)
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
                with suppress(UserError):
                    await in_thread(partial(_remove, path), purpose="figures", limiter=limiter)

    async def _write(self, path: Path, limiter: trio.CapacityLimiter) -> str:
        """Returns why it could not be written; empty: it was."""
        from kueue.exposition import rendered, write_file  # noqa: PLC0415  as above

        # Without process_… and python_…: node_exporter has its own of these names and refuses all if they differ.
        _, body = await rendered(await self.families())
        with trio.move_on_after(WRITE_SECONDS):
            try:
                await in_thread(partial(write_file, path, body), purpose="figures", limiter=limiter)
            except (OSError, UserError) as error:
                return getattr(error, "strerror", None) or str(error)
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
