"""A real sshd on a free loopback port, with keys, a home directory and a login shell of its own; all in one folder.

Run by whoever runs the tests, for that very user; nothing of the machine is changed.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from kueue_ops.address import HostAddress
from tests.support import reaper
from tests.support.ports import free_port

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
CHECKOUT = Path(__file__).parents[2]


def need(*programs: str) -> None:
    """Skip the test where a program is not installed."""
    missing = [one for one in ("ssh-keygen", *programs) if shutil.which(one) is None]
    if not Path(SSHD).exists():
        missing.insert(0, "sshd")
    if missing:
        pytest.skip(f"not installed here: {', '.join(missing)}")


class Sshd:
    """One host. `home` is its user's home, `client` the folder of the person who logs in."""

    def __init__(
        self,
        folder: Path,
        *,
        name: str = "sshd",
        shell: str = "",
        config: tuple[str, ...] = (),
        **environment: str,
    ) -> None:
        """`shell`: the login shell, as a path; empty: the user's own. `config`: more lines of sshd_config."""
        need()
        self.folder = folder / name
        self.folder.mkdir()
        self.user = pwd.getpwuid(os.getuid()).pw_name
        self.port = free_port()
        self.home = self._made("home")
        self.bin = self._made("bin")
        # The path of a socket has at most 107 bytes; a test's folder leaves too little of them.
        self.screens = Path(tempfile.mkdtemp(prefix="kueue-screens-"))
        self.client = self._made("client")
        self.host_key = make_key(self.folder / "host_key")
        self.key = make_key(self.client / "id_ed25519")
        self.known_hosts = self.client / "known_hosts"
        self.trust()
        (self.folder / "authorized_keys").write_text(self.key.with_suffix(".pub").read_text())
        self.ssh_config = self.client / "config"
        self.write_ssh_config()
        self.environment = {
            "HOME": str(self.home),
            "PATH": f"{self.bin}:/usr/local/bin:/usr/bin:/bin",
            "SCREENDIR": str(self.screens),
            "KUEUE_STATE_DIR": str(self.folder / "state"),
            "TEST_SESSION_OF_KUEUE": os.environ.get("TEST_SESSION_OF_KUEUE", ""),
            **environment,
        }
        self.shell = shell
        self.more_config = config
        self.process: subprocess.Popen[bytes] | None = None

    def _made(self, name: str) -> Path:
        path = self.folder / name
        path.mkdir(mode=0o700)
        return path

    # --- the client's side -------------------------------------------------------------------------------------------

    @property
    def address(self) -> HostAddress:
        return HostAddress(f"127.0.0.1:{self.port}", None, "127.0.0.1", self.port)

    def trust(self, key: Path | None = None) -> None:
        """Write the host key into known_hosts, or `key` in its place."""
        kind, blob = (key or self.host_key).with_suffix(".pub").read_text().split()[:2]
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {kind} {blob}\n")

    def write_ssh_config(self, *lines: str, key: Path | str | None = None, agent: str = "none") -> None:
        """`lines` come first, and so win."""
        self.ssh_config.write_text(
            "\n".join(
                [
                    *lines,
                    "Host *",
                    f"  UserKnownHostsFile {self.known_hosts}",
                    "  GlobalKnownHostsFile none",
                    f"  IdentityFile {key or self.key}",
                    f"  IdentityAgent {agent}",
                    "",
                ]
            )
        )

    # --- the host's side ---------------------------------------------------------------------------------------------

    def start(self) -> Sshd:
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # privilege separation; packages make it at boot
        lines = [
            f"Port {self.port}",
            "ListenAddress 127.0.0.1",
            f"HostKey {self.host_key}",
            f"AuthorizedKeysFile {self.folder}/authorized_keys",
            "PidFile none",
            "StrictModes no",
            "UsePAM no",
            "PermitRootLogin yes",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PrintMotd no",
            "MaxStartups 100",
            *self.more_config,
            "SetEnv " + " ".join(f'"{key}={value}"' for key, value in self.environment.items()),
        ]
        if self.shell:
            lines.append(f'ForceCommand exec {self.shell} -c "$SSH_ORIGINAL_COMMAND"')
        path = self.folder / "sshd_config"
        path.write_text("\n".join(lines) + "\n")
        with open(self.folder / "sshd.log", "ab") as log:
            self.process = subprocess.Popen(
                [SSHD, "-D", "-e", "-f", str(path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as probe:
                if probe.recv(4).startswith(b"SSH"):
                    return self
            assert self.process.poll() is None, self.log()
            time.sleep(0.02)
        raise AssertionError(self.log())

    def log(self) -> str:
        return (self.folder / "sshd.log").read_text(errors="replace")

    def script(self, name: str, text: str, folder: Path | None = None) -> Path:
        """An executable file in the host's PATH, or in `folder`."""
        place = folder or self.bin
        place.mkdir(parents=True, exist_ok=True)
        path = place / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def install_worker(self, folder: Path | None = None) -> Path:
        """`kueue_worker` and `kueue` of this checkout, as an installation would put them there."""
        for name, module in (("kueue", "kueue.cli.main"), ("kueue_worker", "kueue.worker.main")):
            text = (
                f"#!/bin/sh\nPYTHONPATH={shlex.quote(str(CHECKOUT))} "
                f'exec {shlex.quote(sys.executable)} -m {module} "$@"\n'
            )
            path = self.script(name, text, folder)
        return path

    def members(self) -> list[int]:
        """Pids of what lives in that home: workers, screens, runners, shells."""
        return reaper.marked(self._mark)

    @property
    def _mark(self) -> bytes:
        return f"HOME={self.home}".encode()

    def close(self) -> None:
        self._end()
        shutil.rmtree(self.screens, ignore_errors=True)

    def _end(self) -> None:
        if self.process is not None:
            # The listener and the sessions below it.
            children = descendants(self.process.pid)
            self.process.kill()
            self.process.wait()
            for pid in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        reaper.end_all(self._mark)


def make_key(path: Path, *more: str, kind: str = "ed25519", passphrase: str = "") -> Path:
    """A key pair at `path` and `path`.pub."""
    subprocess.run(
        ["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", "test", "-f", str(path), *more],
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return path


def descendants(pid: int) -> list[int]:
    """Pids of the children of a process, and of theirs."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *descendants(child)]
    return found
