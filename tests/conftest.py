"""What every test run shares: order, seeds, and the promise that nothing is left behind."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

SESSION_MARK = f"TEST_SESSION_OF_KUEUE={uuid.uuid4().hex}"
os.environ["TEST_SESSION_OF_KUEUE"] = SESSION_MARK.partition("=")[2]

LEFT_BEHIND_GRACE_SECONDS = 15.0
"""A runner without work leaves by itself after a short linger."""

# A run under nohup or cron, or behind `&`, ignores some of these, and every program that a test starts and interrupts
# would ignore them too: across exec an ignored signal stays ignored, a handled one does not. We go on as if we ignored.
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

# Nothing of the person who runs the tests may leak in, and nothing may leak out into their state. Python's own switches
# belong to it: with PYTHONUNBUFFERED a program whose last output fails ends otherwise than a user's does.
for name in [name for name in os.environ if name.startswith("KUEUE_") and not name.startswith("KUEUE_TEST_")]:
    del os.environ[name]
for name in [name for name in os.environ if name.startswith("PYTHON")]:
    del os.environ[name]


def processes_left() -> dict[int, str]:
    """Pid → command line of living processes that descend from this test session, itself not counted."""
    found: dict[int, str] = {}
    mark = SESSION_MARK.encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            environ = (entry / "environ").read_bytes()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue  # it ended while we looked
        if mark in environ.split(b"\0") and state != "Z":
            found[int(entry.name)] = command
    return found


@pytest.fixture(autouse=True)
def loggers_as_they_were():
    """Whoever starts the log of a program in this process does not decide what later tests see of it."""
    root = logging.getLogger("kueue")
    before = root.level, root.propagate, list(root.handlers)
    kept = {name: getattr(logging, name) for name in ("_srcfile", "logThreads", "logProcesses", "raiseExceptions")}
    yield
    root.propagate, root.handlers[:] = before[1], before[2]
    root.setLevel(before[0])
    for name, value in kept.items():
        setattr(logging, name, value)


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind():
    """No process that a test started may outlive the session, not even if the session is killed."""
    chief = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    reaper = subprocess.Popen(
        [sys.executable, "-I", "-S", Path(__file__).parent / "support/reaper.py", SESSION_MARK, str(chief)],
        stdin=subprocess.PIPE,
        start_new_session=True,
        env={},
    )
    yield
    deadline = time.monotonic() + LEFT_BEHIND_GRACE_SECONDS
    while (left := processes_left()) and time.monotonic() < deadline:
        time.sleep(0.2)
    reaper.communicate(b"." if not left else b"")
    assert not left, f"processes left behind: {left}"
