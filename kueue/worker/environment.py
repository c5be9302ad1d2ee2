"""The environment of a job: the account's, with what the submitter sent on top, and what kueue tells the job.

Rules
- Pure: what the worker's process has comes in by parameter.
- A job never sees the worker's own settings, and nothing by which a service manager or a login session would
  take it for the worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kueue import inside_job
from kueue.model import Share, from_os_text
from kueue.protocol.messages import Offer

OWN_PREFIX = "KUEUE_"

NOT_FOR_JOBS = frozenset(
    {
        # a service manager's talk with the worker (systemd.exec(5), sd_notify(3), sd_listen_fds(3))
        *("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"),
        *("INVOCATION_ID", "JOURNAL_STREAM", "MANAGERPID", "MANAGERPIDFDID", "SYSTEMD_EXEC_PID", "MAINPID"),
        *("MEMORY_PRESSURE_WATCH", "MEMORY_PRESSURE_WRITE", "CREDENTIALS_DIRECTORY", "RUNTIME_DIRECTORY"),
        *("STATE_DIRECTORY", "CACHE_DIRECTORY", "LOGS_DIRECTORY", "CONFIGURATION_DIRECTORY", "FDSTORE"),
        # the login session or terminal from which somebody once started the worker
        *("SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "SSH_ASKPASS", "STY", "WINDOW", "TMUX", "TMUX_PANE"),
        *("DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY", "WINDOWID", "TERM", "COLUMNS", "LINES"),
        *("PWD", "OLDPWD", "SHLVL", "_"),
    }
)


class Account(NamedTuple):
    """The worker's user, as the password database has it."""

    name: str
    home: str
    shell: str


def base_environment(environ: Mapping[str, str], account: Account) -> dict[str, str]:
    """What of the worker's own environment every job gets; what cron or a service manager left out is filled in."""
    base = {key: value for key, value in environ.items() if key not in NOT_FOR_JOBS and not key.startswith(OWN_PREFIX)}
    wanted = {"HOME": account.home, "USER": account.name, "LOGNAME": account.name, "SHELL": account.shell}
    for key, value in wanted.items():
        if value:
            base.setdefault(key, value)
    return base


def additions(offer: Offer, share: Share, worker: str) -> dict[str, str]:
    """What comes on top of the base: what the submitter sent, and what kueue tells the job.

    Strings may hold surrogate escapes. ``PWD`` is left to the runner.
    """
    env = {from_os_text(key): from_os_text(value) for key, value in offer.place.env}
    env["KUEUE_JOB_ID"] = str(offer.job)
    env["KUEUE_ATTEMPT"] = str(offer.attempt)
    env["KUEUE_CPUS"] = str(share.cores)
    env["KUEUE_RAM_MB"] = str(share.ram_mb)
    env["KUEUE_SLOTS"] = str(share.slots)
    env["KUEUE_WORKER"] = worker
    if offer.terms.keep_background:
        env[inside_job.OVERRIDE] = "1"  # what it starts may stay
    units = _units(share.named, "gpu")
    if units is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, units))
    return env


def _units(named: Sequence[tuple[str, tuple[int, ...]]], name: str) -> tuple[int, ...] | None:
    return next((units for found, units in named if found == name), None)
