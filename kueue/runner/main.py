"""The runner's command line.

runner.pyz run --state DIR --runner ID --identity TEXT --version TEXT [--linger SECONDS] [--delegated yes]

--delegated yes: the cgroup it is started in is the runner's own, to be divided among attempts.
"""

from __future__ import annotations

import encodings.ascii
import encodings.utf_8  # noqa: F401 - loaded now: later the file we come from may be gone
import gc
import os
import signal
import sys
from dataclasses import replace

from kueue.runner import cgroup
from kueue.runner.keeper import Keeper, Settings
from kueue.runner.kernel import lock_file
from kueue.runner.log import Log
from kueue.runner.rundir import Rundir

EXIT_LOCKED = 3


def main() -> int:
    options = dict(zip(sys.argv[2::2], sys.argv[3::2], strict=True))
    settings = Settings(
        rundir=Rundir(options["--state"], options["--runner"]),
        identity=options["--identity"],
        version=options["--version"],
        linger_seconds=float(options.get("--linger", 10.0)),
        is_local=options.get("--local") != "no",
    )
    return run(settings, is_delegated=options.get("--delegated") == "yes")


def run(settings: Settings, *, is_delegated: bool) -> int:
    """Become a runner in the background. Returns, in the process that was started, when the runner accepts workers."""
    os.umask(0o077)
    os.chdir("/")
    place = settings.rundir
    for folder in (place.spool, place.path):
        os.makedirs(folder, mode=0o700, exist_ok=True)  # noqa: PTH103 - pathlib would cost the runner memory
    ready_read, ready_write = os.pipe()
    if os.fork():
        os.close(ready_write)
        # One byte: it listens. None: it ended, and its log says why.
        return 0 if os.read(ready_read, 1) else EXIT_LOCKED
    os.close(ready_read)
    os.setsid()
    if os.fork():
        os._exit(0)
    _detach(place, ready_write)
    lock = lock_file(place.lock)
    if lock is None:
        return EXIT_LOCKED
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # a child then copies fewer pages
    if is_delegated:
        settings = replace(settings, cgroup=cgroup.divide())
    try:
        Keeper(settings, lock).run(lambda: _say_ready(ready_write), begins=True)
    except BaseException as error:
        Log(place.log)(f"the keeper failed: {type(error).__name__}: {error}")
        raise
    return 0


def _detach(place: Rundir, keep: int) -> None:
    """Only the ready pipe stays open; what is printed by accident goes to the log."""
    null = os.open("/dev/null", os.O_RDONLY)
    log = os.open(place.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.closerange(3, keep)
    os.closerange(keep + 1, 65536)


def _say_ready(pipe: int) -> None:
    os.write(pipe, b"!")
    os.close(pipe)
