"""A scope of its own for a runner, where a service manager of the user can give one (systemd.scope(5)).

In the cgroup of the worker's unit the runner and all jobs would be ended with the worker. In a scope nothing that
happens to the worker reaches them, and the cgroup is delegated: the runner divides it among the attempts.

Rules
- A scope ends with the manager that made it. So it is asked for only where that costs nothing: the worker is below
  that manager anyway, or the manager stays after the last logout (*linger*). A worker that was started over ssh without
  linger keeps its runner in the login session: that one mostly survives the logout, the manager never does.
- Whether there is a manager that works is found by trying; what does not work in time is told once and done without.
"""

from __future__ import annotations

import logging
import os
import pwd
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import trio

from kueue import threads
from kueue.errors import UserError

log = logging.getLogger(__name__)

SYSTEMD_RUN = "systemd-run"
TRY_SECONDS = 5.0
LINGER = Path("/var/lib/systemd/linger")


class Scopes:
    """Makes scopes for runners, or says once why there are none."""

    def __init__(self, environ: Mapping[str, str], *, try_seconds: float = TRY_SECONDS) -> None:
        self._runtime_dir = "" if "XDG_RUNTIME_DIR" in environ else f"/run/user/{os.getuid()}"
        self._try_seconds = try_seconds
        self._told = False

    async def prefix(self, token: str) -> tuple[str, ...]:
        """What to put before a command so that it runs in the scope ``kueue-runner-<token>``; empty: start it as it is.

        Takes up to `try_seconds` if the manager hangs.
        """
        if not await threads.patiently(is_wanted):
            return ()
        if shutil.which(SYSTEMD_RUN) is None:
            return self.failed(f"there is no {SYSTEMD_RUN}")
        problem = "it does not answer"
        with trio.move_on_after(self._try_seconds):
            problem = await self._try(token)
        return (
            self.failed(problem) if problem else self._command(f"kueue-runner-{token}", "The kueue runner and its jobs")
        )

    async def _try(self, token: str) -> str:
        """What hinders; empty: nothing."""
        try:
            with threads.wanted("question whether there are scopes"):
                done = await trio.run_process(
                    [*self._command(f"kueue-probe-{token}", "Whether there are scopes for kueue"), "true"],
                    check=False,
                    stdin=subprocess.DEVNULL,
                    capture_stdout=True,
                    capture_stderr=True,
                )
        except UserError as error:
            return str(error)
        except OSError as error:
            return error.strerror or str(error)
        said = done.stderr.decode(errors="replace").strip()
        return (said or f"exit code {done.returncode}") if done.returncode else ""

    def _command(self, unit: str, purpose: str) -> tuple[str, ...]:
        # Cron and units of the system do not say where the user's manager listens.
        address = ("env", f"XDG_RUNTIME_DIR={self._runtime_dir}") if self._runtime_dir else ()
        return (
            *(*address, SYSTEMD_RUN, "--user", "--scope", "--quiet", "--collect", f"--unit={unit}"),
            *(f"--description={purpose}", "-p", "Delegate=yes", "--"),
        )

    def failed(self, problem: str) -> tuple[str, ...]:
        """Says it once; returns the empty prefix."""
        if not self._told:
            self._told = True
            log.warning(
                "the runner gets no scope of its own from systemd --user (%s): jobs end if the unit or session of this "
                "worker is stopped as a whole",
                problem,
            )
        return ()


def is_wanted() -> bool:
    """Would a scope live at least as long as what this worker is in now?"""
    try:
        membership = Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return False
    return is_below_manager(membership, os.getuid()) or _lingers()


def is_below_manager(membership: str, uid: int) -> bool:
    """Is the process with this ``/proc/PID/cgroup`` in a unit of that user's manager?"""
    return any(f"/user@{uid}.service/" in f"{line}/" for line in membership.splitlines())


def _lingers() -> bool:
    try:
        return (LINGER / pwd.getpwuid(os.getuid()).pw_name).exists()
    except (KeyError, OSError):
        return False
