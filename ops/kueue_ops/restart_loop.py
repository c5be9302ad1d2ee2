"""The restart tool at work: rounds for ever in the foreground, or once until every host is settled."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from kueue import clock, log, notify, places
from kueue.cli.screen import Screen
from kueue.cli.text import harmless
from kueue.errors import EXIT_REFUSED, KueueError
from kueue_ops import patience, progress, restart_settings, restart_status
from kueue_ops.command_line import RESTART_WORKERS, leave
from kueue_ops.host_care import HostCare, Reach
from kueue_ops.restart_settings import Laboratory
from kueue_ops.restart_status import HostStatus, RoundsStatus
from kueue_ops.rounds import TICK_SECONDS, Rounds
from kueue_ops.server_view import ServerView, client_of

STOP_SECONDS = 3.0
"""What is being done on hosts may end in so long after a signal to stop; the whole stop takes less than 5."""
STATUS_SECONDS = 1.0
"""To write what is known of the hosts; a file system that takes longer gets the next."""
SETTINGS_SECONDS = 10.0
"""After so long it is said that the settings have no answer; they count when it comes all the same."""
_YEARS_SECONDS = 1e8
_STEP_SECONDS = 0.1

_log = log.logger("restart")


class Loop:
    """The endless rounds. `reach_of` makes the way to the hosts of a laboratory."""

    def __init__(self, lab: Laboratory, chosen: Sequence[str], reach_of: Callable[[Laboratory], Reach]) -> None:
        self._lab = lab
        self._chosen = chosen
        self._reach_of = reach_of
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._is_dirty = threading.Event()
        self._read: queue.SimpleQueue[Laboratory | Exception] = queue.SimpleQueue()
        self._reading_since: float | None = None
        self._is_to_read_again = False
        self._locks: dict[str, places.Lock | None] = {lab.lock: None}
        """Of each state directory that the settings named since the start; None: held by who called us."""
        self._care = HostCare(
            lab.hosts,
            _view(lab),
            reach_of(lab),
            limits=lab.limits,
            settings_stamp=lambda: self._lab.stamp,
            changed=self._changed,
            hurry=lambda host: self._rounds.look_again(host, 0.0),
        )
        self._rounds = Rounds(
            self._care.check,
            interval_seconds=lab.interval_seconds,
            parallel=lab.settings.parallel_hosts,
            limit_seconds=lab.look_seconds,
            hung=self._care.hung,
            failed=self._care.failed,
        )

    def run(self) -> int:
        """Returns 0 after a signal to stop; never otherwise. Ends the process itself when threads hang by then."""
        log.unhurried()
        with self._signals():
            self._say_what_is_done()
            self._rounds.start(self._lab.hosts)
            notify.notify(notify.READY)
            try:
                number = self._serve()
            finally:
                notify.notify(notify.STOPPING)
                is_clean = self._rounds.stop(STOP_SECONDS)
                if not is_clean:
                    _log.warning("looks that had not ended: %s", " ".join(self._rounds.unfinished) or "abandoned ones")
                self._write_status()
        _log.info("stopped by %s", signal.Signals(number).name)
        if not is_clean:
            # The interpreter would not wait for them, but what they hold (locks of buffers) may hold it at its end.
            leave(0)
        return 0

    def _serve(self) -> int:
        """Until a signal says stop, whose number is returned."""
        pause = min(TICK_SECONDS, notify.watchdog_seconds() or TICK_SECONDS)
        next_tick = clock.steady() + pause
        while True:
            left = next_tick - clock.steady()
            if left <= 0:
                next_tick = clock.steady() + pause
                if self._rounds.tick():
                    notify.notify(notify.ALIVE)
                self._see_to_reading()
                continue
            ready, _, _ = select.select([self._wake_in], [], [], left)
            received = b""
            if ready:
                with contextlib.suppress(BlockingIOError):
                    received = self._wake_in.recv(256)
            for number in received:
                if number in {signal.SIGTERM, signal.SIGINT}:
                    return number
                if number == signal.SIGHUP:
                    log.outlive_terminal(RESTART_WORKERS, self._lab.log, f"kill {os.getpid()}")
                    self._reread()
            with contextlib.suppress(queue.Empty):
                self._take_over(self._read.get_nowait())
            if self._is_dirty.is_set():
                # Many hosts change at once; a little later they fit into one writing. A signal meanwhile waits as long.
                time.sleep(_STEP_SECONDS)
                self._is_dirty.clear()
                self._write_status()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Signals arrive as bytes at `_wake_in`; a handler in Python would run in the middle of anything."""
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        before = {number: signal.signal(number, lambda *_: None) for number in numbers}
        descriptor = signal.set_wakeup_fd(self._wake_out.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(descriptor)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _reread(self) -> None:
        """Begin to read the settings anew, in a thread: their file server may be dead, and this loop never waits."""
        if self._reading_since is not None:
            self._is_to_read_again = True
            return
        notify.reloading()
        self._reading_since = clock.steady()
        try:
            threading.Thread(target=self._read_settings, name="settings", daemon=True).start()
        except RuntimeError as error:  # no more threads for this user
            self._take_over(error)

    def _read_settings(self) -> None:
        found: Laboratory | Exception
        try:
            found = restart_settings.load(self._lab.config.path, self._chosen)
            _ = found.status  # looks for the state directory, here and not in the loop
            if found.lock not in self._locks:
                # Whoever reads these settings asks there whether we run.
                self._locks[found.lock] = lock(found)
        except Exception as error:  # noqa: BLE001  whatever it is, the settings stay and the loop says why
            found = error
        self._read.put(found)
        self._wake()

    def _see_to_reading(self) -> None:
        """Say once that the settings are still being read."""
        since = self._reading_since
        if since is not None and since + SETTINGS_SECONDS < clock.steady():
            self._reading_since = float("inf")
            _log.error(
                "the settings stay as they were: %s has no answer, perhaps its file server is dead. They count as soon "
                "as they can be read.",
                self._lab.config.path,
            )
            notify.notify(notify.READY)

    def _take_over(self, found: Laboratory | Exception) -> None:
        self._reading_since = None
        if isinstance(found, Laboratory):
            log.start(found.config.common.log_level)
            self._lab = found
            care, rounds = self._care, self._rounds
            care.addresses, care.limits = dict(found.hosts), found.limits
            care.server, care.reach = _view(found), self._reach_of(found)
            rounds.lanes.widen(found.settings.parallel_hosts, found.look_seconds)
            rounds.set_pace(found.interval_seconds)
            self._say_what_is_done()
            rounds.set_hosts(found.hosts)
        else:
            hint = found.hint if isinstance(found, KueueError) else ""
            _log.error("the settings stay as they were: %s", f"{found} {hint}".strip())
        notify.notify(notify.READY)
        if self._is_to_read_again:
            self._is_to_read_again = False
            self._reread()

    def _say_what_is_done(self) -> None:
        for remark in self._lab.remarks:
            _log.warning("%s", remark)
        hosts = len(self._lab.hosts)
        pace = self._rounds.interval_seconds / 60
        _log.info("%d %s, looked at every %g min", hosts, "host" if hosts == 1 else "hosts", pace)

    def _changed(self, _: HostStatus) -> None:
        if not self._is_dirty.is_set():
            self._is_dirty.set()
            self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_out.send(b"\0")  # no signal has this number

    def _write_status(self) -> None:
        rows = []
        now = clock.wall()
        for host in self._lab.hosts:
            left = self._rounds.due_in(host)
            rows.append(
                msgspec.structs.replace(self._care.status(host), next_wall=None if left is None else now + left)
            )
        write_status(self._lab, RoundsStatus(tuple(rows)))
        notify.status(f"{sum(row.has_worker for row in rows)} of {len(rows)} hosts have a worker")


def once(lab: Laboratory, reach: Reach) -> int:
    """One round, and further looks at the hosts of which one look does not tell all.

    Prints a line for each host. Returns 0 if all have a worker, else 1.
    """
    settled: set[str] = set()
    is_new = threading.Event()

    def changed(status: HostStatus) -> None:
        if status.is_settled:
            settled.add(status.host)
            is_new.set()

    care = HostCare(
        lab.hosts,
        _view(lab),
        reach,
        limits=lab.limits,
        settings_stamp=lambda: lab.stamp,
        changed=changed,
        hurry=lambda host: rounds.look_again(host, 0.0),
    )
    rounds = Rounds(
        care.check,
        interval_seconds=_YEARS_SECONDS,
        parallel=lab.settings.parallel_hosts,
        limit_seconds=lab.look_seconds,
        hung=care.hung,
        failed=care.failed,
    )
    for remark in lab.remarks:
        _log.warning("%s", remark)
    with progress.shown("hosts", len(lab.hosts), lab.config.common.log_level) as tell:
        rounds.start(lab.hosts)
        told: set[str] = set()
        while len(told) < len(lab.hosts):
            is_new.wait(1.0)
            is_new.clear()
            for host in sorted(settled - told):
                told.add(host)
                tell(host)
        rounds.stop(0.5)
    rows = [care.status(host) for host in lab.hosts]
    _keep(lab, rows)
    width = max(len(row.host) for row in rows)
    screen = Screen()
    for row in rows:
        hint = f" {row.hint}" if row.hint and not row.has_worker else ""
        state = screen.styled("up  ", "green") if row.has_worker else screen.styled("DOWN", "red")
        screen.print(f"{row.host:<{width}}  {state}  {harmless(f'{row.sentence}{hint}')}")
    screen.flush()
    return 0 if all(row.has_worker for row in rows) else EXIT_REFUSED


def _keep(lab: Laboratory, rows: Sequence[HostStatus]) -> None:
    """For `--status`: the new rows, and what is known of the hosts that were not chosen."""
    with contextlib.suppress(OSError):
        before = patience.within(STATUS_SECONDS, "old status", lambda: restart_status.read(lab.status))
        others = [row for row in before.hosts if row.host not in lab.hosts] if before else []
        write_status(lab, RoundsStatus((*rows, *others)))


def write_status(lab: Laboratory, status: RoundsStatus) -> None:
    """Nothing depends on it: what cannot be written, or not in time, is left out."""

    def write() -> None:
        places.own_directory(os.path.dirname(lab.status))  # noqa: PTH120  whoever tidies /var/tmp takes it away
        restart_status.write(lab.status, status)

    try:
        patience.within(STATUS_SECONDS, "status", write)
    except (OSError, ValueError, KueueError) as error:
        _log.debug("the status could not be written: %s", error)


def lock(lab: Laboratory) -> places.Lock:
    """Held while this tool runs with these settings on this machine; raises `KueueError` if another one does."""
    try:
        return places.lock_exclusive(lab.lock, "kueue_restart_workers")
    except KueueError as error:
        pid = places.holder(lab.lock)
        if pid is None:
            raise
        # One round has no use for a hang-up and ends by it.
        hint = (
            f"It looks at all hosts now if you type: kill -HUP {pid}"
            if _has_handler(pid, signal.SIGHUP)
            else f"It looks at hosts once and ends by itself. To end it now: kill {pid}"
        )
        raise KueueError(f"{error}", hint=hint) from error


def _has_handler(pid: int, number: signal.Signals) -> bool:
    """Does that process do something of its own at this signal (``SigCgt`` of proc_pid_status(5))?"""
    try:
        lines = Path(f"/proc/{pid}/status").read_text("ascii", "replace").splitlines()
        caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False  # it has ended
    return bool(caught >> (number - 1) & 1)


def _view(lab: Laboratory) -> ServerView:
    def tell(sentence: str, hint: str) -> None:
        if hint or "again" not in sentence:
            _log.warning("%s", f"{sentence} {hint}".strip())
        else:
            _log.info("%s", sentence)

    return ServerView(partial(client_of, lab.config.path), tell)
