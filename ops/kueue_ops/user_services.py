"""The user's own service manager (`systemd --user`): is there one, how is it reached, does it outlive the logout?"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from kueue.errors import KueueError

BOOTED = Path("/run/systemd/system")
"""There if this machine was started by systemd (sd_booted(3))."""
LINGER = Path("/var/lib/systemd/linger")
RUNTIME = Path("/run/user")
ASK_SECONDS = 15.0
START_SECONDS = 1000.0
"""A little more than the units' own limits for a start."""


class UserServices:
    """One user's service manager on this machine. `reach` must have been called before anything is asked of it."""

    def __init__(self, environ: Mapping[str, str], runtime_dir: str, version: int) -> None:
        self._environ = environ
        self.runtime_dir = runtime_dir
        """Empty: there is none, so no manager runs for this user now."""
        self.version = version
        self.remark = ""
        """What a person should know of how it was reached; empty: nothing."""
        if runtime_dir and environ.get("XDG_RUNTIME_DIR") != runtime_dir:
            self.remark = (
                f"XDG_RUNTIME_DIR is {'wrong' if environ.get('XDG_RUNTIME_DIR') else 'missing'} here; {runtime_dir} is "
                f"used. For systemctl in this terminal type: export XDG_RUNTIME_DIR={runtime_dir}"
            )

    def problem(self) -> str:
        """Why the manager cannot be asked, with what to type; empty: it answers."""
        if not self.runtime_dir:
            return (
                f"No service manager runs for you on this machine now: there is no {RUNTIME / str(os.getuid())}. "
                "It runs while you are logged in (by ssh or at the console, not by su or sudo), and always after: "
                f"{linger_command()}"
            )
        told = self.systemctl("show-environment", seconds=ASK_SECONDS)
        return told and f"Your service manager does not answer ({told}). Log in anew, or type: {linger_command()}"

    def systemctl(self, *words: str, seconds: float = START_SECONDS) -> str:
        """Run ``systemctl --user``; what went wrong, empty: nothing."""
        environ = dict(self._environ)
        if environ.get("XDG_RUNTIME_DIR") != self.runtime_dir:
            environ["XDG_RUNTIME_DIR"] = self.runtime_dir
            # It would lead to where the other one did.
            environ.pop("DBUS_SESSION_BUS_ADDRESS", None)
        try:
            done = subprocess.run(
                ["systemctl", "--user", "--no-ask-password", *words],
                env=environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return f"no answer within {seconds:g} s"
        except OSError as error:
            return error.strerror or str(error)
        said = " ".join(done.stderr.split()) or " ".join(done.stdout.split())
        return (said or f"exit code {done.returncode}") if done.returncode else ""

    def lingers(self) -> bool:
        """Does the manager start with the machine and stay after the last logout?"""
        try:
            return (LINGER / user_name()).exists()
        except OSError:
            return False


def find(environ: Mapping[str, str] = os.environ) -> UserServices:
    """Raises `KueueError` when this machine does not run systemd."""
    if not BOOTED.is_dir() or shutil.which("systemctl") is None:
        raise KueueError(
            "This machine does not run systemd, so there are no units to install.",
            hint="Keep the programs in screen instead: screen -dmS kueue_server kueue_server; screen -dmS kueue_worker "
            "kueue_worker. `kueue up` starts both in the background, kueue_restart_workers brings workers back.",
        )
    return UserServices(environ, _runtime_dir(environ), _version())


def _runtime_dir(environ: Mapping[str, str]) -> str:
    """That of the environment if it is ours (after `su` it is another's), else the usual one if it is there."""
    for path in (environ.get("XDG_RUNTIME_DIR", ""), str(RUNTIME / str(os.getuid()))):
        try:
            if path and Path(path).stat().st_uid == os.getuid():
                return path
        except OSError:  # noqa: PERF203  each path has its own trouble
            continue
    return ""


def _version() -> int:
    """Of systemd; 0 if it does not say."""
    try:
        told = subprocess.run(
            ["systemctl", "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=ASK_SECONDS,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.match(r"systemd (\d+)", told)
    return int(found[1]) if found else 0


def user_name() -> str:
    """The user's name; the number where no name is known."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def home() -> str:
    """The home of the account, which the service manager sees whatever HOME says; empty where no account is known."""
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return ""


def linger_command() -> str:
    return f"loginctl enable-linger {user_name()}"
