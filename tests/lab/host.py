"""A Linux host with a real systemd: a systemd-nspawn container over this machine's own files, for tests that run as root.

Its root is an overlay (lower: `/`, upper: memory), so this machine's Python is there and nothing on this machine changes.
It has no network but its own loopback. One ordinary user is there, `USER`, whose service manager runs from boot on
(linger); a second one, `GUEST`, has none until a login. The folder `shared` is the user's home, seen from both sides.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

USER, UID = "ada", 1000
GUEST, GUEST_UID = "guest", 1001
PACKAGES = ("systemd-container", "libpam-systemd", "dbus", "dbus-user-session")
HIDDEN = (
    "root",
    "home",
    "run",
    "tmp",
    "var/tmp",
    "var/log",
    "var/lib/systemd",
    "etc/systemd/system",
    "etc/systemd/user",
)
REPOSITORY = Path(__file__).parents[2]
BOOT_SECONDS = 60.0
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class NoHost(Exception):
    """Such a host cannot be had on this machine; the text says why."""


class Host:
    """One booted host. Raises `NoHost` when it cannot be."""

    def __init__(self, folder: Path, *, host_name: str = "", shared: Path | None = None, network: str = "") -> None:
        """`host_name`, `shared`: if not its own; `network`: the path of a network namespace, else it has only loopback."""
        self.name = f"kueue{os.getpid()}x{uuid.uuid4().hex[:6]}"
        self.host_name = host_name or self.name
        self.folder = folder
        self.shared = shared or folder / "home"
        self.network = network
        self.cgroups = [Path(place, self.name) for place in cgroup_roots()]
        self.nspawn: subprocess.Popen[bytes] | None = None
        self.leader = 0
        try:
            self._lay_out()
            self._boot()
        except BaseException:
            self.close()
            raise

    # --- what is done on it ------------------------------------------------------------------------------------------

    def root(self, *command: str, seconds: float = 60) -> str:
        """Run as root; returns stdout. Raises `AssertionError` with all it said when it fails."""
        inside = [place / "payload" if (place / "payload").exists() else place for place in self.cgroups]
        enter = _entering(inside, ["nsenter", "-t", str(self.leader), "-a", "--", *command])
        return self._run(enter, seconds)

    def user(self, *command: str, seconds: float = 60, **environment: str) -> str:
        """As `root`, by the ordinary user, outside of any login session."""
        known = {"HOME": f"/home/{USER}", "USER": USER, "PATH": PATH, "XDG_RUNTIME_DIR": f"/run/user/{UID}"}
        words = [f"{name}={value}" for name, value in {**known, **environment}.items()]
        switch = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--"]
        return self.root(*switch, "env", "-i", "-C", f"/home/{USER}", *words, *command, seconds=seconds)

    def login(self, user: str, *command: str) -> str:
        """As `root`, by a user in a login session of their own."""
        return self.root("su", "-l", user, "-c", shlex.join(command))

    def until(self, holds: Callable[[], object], what: str, seconds: float = 60) -> None:
        """Wait for a condition; fails with the host's journal."""
        end = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > end:
                raise AssertionError(f"not within {seconds:g} s: {what}\n{self.journal()}")
            time.sleep(0.05)

    def journal(self) -> str:
        return self.root("journalctl", "--no-pager", "-q", "-o", "cat", "-n", "100", f"_UID={UID}")

    # --- its life ----------------------------------------------------------------------------------------------------

    def _lay_out(self) -> None:
        self.store = self.folder / "store"
        self.store.mkdir()
        self.shared.mkdir(exist_ok=True)
        os.chown(self.shared, UID, UID)
        _must("mount", "-t", "tmpfs", "-o", "mode=755", self.name, str(self.store))
        upper, work, top = (self.store / name for name in ("upper", "work", "root"))
        for path in (upper, work, top):
            path.mkdir()
        for name in HIDDEN:
            path = upper / name
            path.mkdir(parents=True)
            path.chmod(0o1777 if name.endswith("tmp") else 0o711 if name == "root" else 0o755)
            os.setxattr(path, "trusted.overlay.opaque", b"y")
        files = {
            "etc/hostname": f"{self.host_name}\n",
            "etc/hosts": f"127.0.0.1 localhost {self.host_name}\n",
            "etc/machine-id": f"{uuid.uuid4().hex}\n",
            "etc/fstab": "",
            "etc/resolv.conf": "",
            f"var/lib/systemd/linger/{USER}": "",
            **_accounts(),
        }
        for name, text in files.items():
            path = upper / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if (path.parent / path.name).is_symlink():
                path.unlink()
            path.write_text(text)
        (upper / "etc/shadow").chmod(0o600)
        units = upper / "etc/systemd/system"
        (units / "default.target").symlink_to("/lib/systemd/system/multi-user.target")
        noise = "console-getty.service systemd-networkd.service systemd-resolved.service systemd-timesyncd.service tmp.mount"
        for unit in noise.split():
            (units / unit).symlink_to("/dev/null")
        options = f"lowerdir=/,upperdir={upper},workdir={work}"
        _must("mount", "-t", "overlay", self.name, "-o", options, str(top))

    def _boot(self) -> None:
        shown = {str(REPOSITORY), *map(os.path.realpath, (sys.prefix, sys.base_prefix)), sys.prefix}
        command = ["systemd-nspawn", "--quiet", "--keep-unit", "--register=no", "--settings=no", "--boot"]
        command += [f"--machine={self.name}", f"--directory={self.store / 'root'}", f"--hostname={self.host_name}"]
        command += [f"--network-namespace-path={self.network}" if self.network else "--private-network"]
        command += ["--link-journal=no", "--resolv-conf=off", "--timezone=off", "--console=read-only"]
        command += [f"--bind={self.shared}:/home/{USER}"]
        command += [f"--bind-ro={path}" for path in sorted(shown) if not path.startswith("/usr")]
        for place in self.cgroups:
            place.mkdir()
        with (self.folder / "console.log").open("ab") as console:
            self.nspawn = subprocess.Popen(
                _entering(self.cgroups, command),
                env={
                    "PATH": PATH,
                    "LANG": "C.UTF-8",
                    "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1",
                    # By which a run that is killed is cleared away; what runs on the host does not inherit it.
                    "TEST_SESSION_OF_KUEUE": os.environ.get("TEST_SESSION_OF_KUEUE", ""),
                },
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
            )
        self._wait_until_up()

    def _wait_until_up(self) -> None:
        end = time.monotonic() + BOOT_SECONDS
        while not (self._find_leader() and self._is_up()):
            if self.nspawn is None or self.nspawn.poll() is not None or time.monotonic() > end:
                said = (self.folder / "console.log").read_text(errors="replace")[-3000:]
                raise NoHost(f"a container with systemd does not boot here: {said}")
            time.sleep(0.05)

    def reboot(self) -> None:
        """An orderly reboot; returns when the host is up again. What was written to its disk is there."""
        assert self.nspawn is not None
        self.root("systemctl", "--no-block", "poweroff")
        self.nspawn.wait(BOOT_SECONDS)
        self.leader = 0
        self._remove_cgroups()
        self._boot()

    def _find_leader(self) -> bool:
        """Its process 1, as it is numbered out here."""
        todo = [self.nspawn.pid] if self.nspawn else []
        while todo:
            pid = todo.pop()
            with contextlib.suppress(OSError):
                for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
                    numbers = next(
                        line.split()[1:]
                        for line in Path(f"/proc/{child}/status").read_text().splitlines()
                        if line.startswith("NSpid:")
                    )
                    if len(numbers) > 1 and numbers[-1] == "1":
                        self.leader = child
                        return True
                    todo.append(child)
        return False

    def _is_up(self) -> bool:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            for unit in ("multi-user.target", f"user@{UID}.service"):
                self.root("systemctl", "is-active", "--quiet", unit, seconds=10)
            return True
        return False

    def _run(self, command: list[str], seconds: float) -> str:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=seconds,
            env={"PATH": PATH, "LANG": "C.UTF-8"},
        )
        assert done.returncode == 0, f"{shlex.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def close(self) -> None:
        """Power off, and leave no trace."""
        if self.leader:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.leader, signal.SIGKILL)  # all in its process namespace ends with it
        if self.nspawn is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.nspawn.wait(10)
            if self.nspawn.poll() is None:
                self.nspawn.kill()
                self.nspawn.wait()
        self._remove_cgroups()
        for path in (self.store / "root", self.store):
            if path.is_mount():
                subprocess.run(["umount", "-l", str(path)], check=True)
        for place in ("propagate", "unix-export"):
            with contextlib.suppress(OSError):
                os.rmdir(f"/run/systemd/nspawn/{place}/{self.name}")

    def _remove_cgroups(self) -> None:
        for place in self.cgroups:
            for path, _, _ in os.walk(place, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(path)


def install() -> None:
    """Have what a host needs. Raises `NoHost`."""
    if os.geteuid() != 0:
        raise NoHost("a host of its own needs root")
    if not cgroup_roots():
        raise NoHost("no cgroups of the unified kind")
    pam = any(Path(place).exists() for place in ("/usr/share/pam-configs/systemd", "/usr/lib/pam.d/systemd-user"))
    if shutil.which("systemd-nspawn") and pam and shutil.which("dbus-daemon"):
        return
    if not shutil.which("apt-get"):
        raise NoHost("no systemd-nspawn and no apt-get to install it")
    refuse = Path("/usr/sbin/policy-rc.d")  # no daemon is started out here
    is_ours = not refuse.exists()
    if is_ours:
        refuse.write_text("#!/bin/sh\nexit 101\n")
        refuse.chmod(0o755)
    try:
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for arguments in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
            command = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300", *arguments]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    finally:
        if is_ours:
            refuse.unlink()
    if done.returncode:
        raise NoHost(f"{' '.join(PACKAGES)} cannot be installed: {done.stderr[-500:]}")


def cgroup_roots() -> list[str]:
    """Where this machine shows process groups: one tree, or systemd's own beside it on older ones."""
    both = [
        place for place in ("/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified") if Path(place, "cgroup.procs").exists()
    ]
    if "/sys/fs/cgroup/unified" in both:
        return both
    return ["/sys/fs/cgroup"] if Path("/sys/fs/cgroup/cgroup.controllers").exists() else []


def _entering(cgroups: list[Path], command: list[str]) -> list[str]:
    """The command, run in these cgroups."""
    enter = "; ".join(f"echo 0 > {shlex.quote(str(place))}/cgroup.procs" for place in cgroups)
    return ["sh", "-c", f'{enter}; exec "$@"', "sh", *command]


def _accounts() -> dict[str, str]:
    """This machine's accounts of the system, and our two users instead of its people."""
    system = [one for one in pwd.getpwall() if not 1000 <= one.pw_uid < 60000 and one.pw_name not in (USER, GUEST)]
    users = [(USER, UID), (GUEST, GUEST_UID)]
    passwd = [":".join(map(str, (one.pw_name, "x", *one[2:]))) for one in system]
    passwd += [f"{name}:x:{uid}:{uid}::/home/{name}:/bin/bash" for name, uid in users]
    taken = {name for name, _ in users}
    groups = [line for line in Path("/etc/group").read_text().splitlines() if line.split(":")[0] not in taken]
    groups = [line for line in groups if line.split(":")[2] not in (str(UID), str(GUEST_UID))]
    groups += [f"{name}:x:{uid}:" for name, uid in users]
    shadow = [f"{name}:*:19700:0:99999:7:::" for name in [*(one.pw_name for one in system), *taken]]
    texts = {"etc/passwd": passwd, "etc/group": groups, "etc/shadow": shadow}
    return {name: "".join(f"{line}\n" for line in lines) for name, lines in texts.items()}


def _must(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoHost(f"{shlex.join(command)}: {done.stderr.strip()}")
