"""Several hosts with a real systemd and sshd, one shared home, on a switch of their own: a laboratory as it stands in a university.

Each host is a `Host` with its own name, machine id, boot id, local disk and network namespace; the home of `USER` is
one folder for all. The network is in namespaces of this object alone, so that runs beside each other do not meet.
Power loss is real: the cable goes first, so that no peer hears of it, then every process at once; the disk stays.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.lab import host as one_host
from tests.lab.host import BOOT_SECONDS, UID, USER, Host, NoHost
from tests.support.network_lab import Network

NAMES = ("ralab01", "ralab02", "ralab03")
UNIT = """
[Unit]
After=network.target
[Service]
Type=notify
RuntimeDirectory=sshd
{environment}
ExecStart={sshd} -D -f /etc/ssh/sshd_config
KillMode=process
Restart=always
"""
SSHD = """
HostKey /etc/ssh/ssh_host_ed25519_key
PasswordAuthentication no
UsePAM yes
UseDNS no
MaxStartups 50
PrintMotd no
"""
# As distributions have it, so that a login is a session of logind.
PAM = """
auth required pam_deny.so
account required pam_nologin.so
@include common-account
session optional pam_loginuid.so
@include common-session
"""


class NetworkedHost(Host):
    """One of them. It is booted by `Cluster`, loses its power by `lose_power`, and is switched on by `power_on`."""

    def __init__(self, folder: Path, name: str, cluster: Cluster) -> None:
        self.cluster = cluster
        self.address = cluster.network.hosts[name]
        super().__init__(
            folder, host_name=name, shared=cluster.home, network=f"/run/netns/{cluster.network.space(name)}"
        )

    @property
    def disk(self) -> Path:
        """Its root, seen from outside."""
        return self.store / "root"

    def _lay_out(self) -> None:
        super()._lay_out()
        place = self.disk / "etc/ssh"
        shutil.rmtree(place)
        place.mkdir()
        for suffix in ("", ".pub"):
            shutil.copy(self.cluster.folder / f"{self.host_name}.key{suffix}", place / f"ssh_host_ed25519_key{suffix}")
        (place / "sshd_config").write_text(SSHD)
        (self.disk / "etc/pam.d/sshd").write_text(PAM)
        (self.disk / "etc/hosts").write_text(self.cluster.hosts_file())
        accounts = self.disk / "etc/passwd"
        if "\nsshd:" not in accounts.read_text():
            with accounts.open("a") as file:
                file.write("sshd:x:59999:65534::/run/sshd:/usr/sbin/nologin\n")
        units = self.disk / "etc/systemd/system"
        text = UNIT.format(sshd=self.cluster.sshd, environment=_libraries(self.cluster.sshd))
        (units / "sshd.service").write_text(text)
        wants = units / "multi-user.target.wants"
        wants.mkdir(exist_ok=True)
        (wants / "sshd.service").symlink_to("../sshd.service")

    def ssh(self, *words: str, seconds: float = 60) -> str:
        """As the user, logged in from here to there: ``ssh("ralab02", "uptime")``."""
        return self.user("ssh", "-o", "BatchMode=yes", *words, seconds=seconds)

    # --- what happens to it ------------------------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        return self.leader != 0

    def lose_power(self) -> None:
        assert self.nspawn is not None
        assert self.is_on
        self.cluster.network.remove(self.host_name)
        os.kill(self.leader, signal.SIGKILL)
        self.nspawn.wait(BOOT_SECONDS)
        self.leader = 0
        end = time.monotonic() + BOOT_SECONDS
        # Who was entered from outside has no part in its process namespace's end.
        while left := self.processes():
            for pid in left if time.monotonic() > end - BOOT_SECONDS + 1 else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            assert time.monotonic() < end, f"these do not die: {left}"
            time.sleep(0.01)
        self._remove_cgroups()

    def power_on(self) -> None:
        """Returns when it is up."""
        assert not self.is_on
        self.cluster.network.add(self.host_name)
        self._boot()

    def processes(self) -> list[int]:
        """All that runs on it, as it is numbered out here."""
        return _members(self.cgroups)

    def unplug(self) -> None:
        self.cluster.network.unplug(self.host_name)

    def plug(self) -> None:
        self.cluster.network.plug(self.host_name)


class Cluster:
    """The hosts of `names`, booted. Raises `NoHost` when that cannot be on this machine; `close` leaves no trace."""

    def __init__(self, folder: Path, names: Sequence[str] = NAMES) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.sshd = _sshd()
        self.hosts: dict[str, NetworkedHost] = {}
        # A name of their own: the tests of one process may have other networks.
        try:
            self.network = Network(f"kq{os.getpid()}x{uuid.uuid4().hex[:4]}")
        except AssertionError as reason:
            raise NoHost(f"no network namespaces: {reason}") from reason
        try:
            self._names = tuple(names)
            for name in names:
                self.network.add(name)
            self._make_home()
            with ThreadPoolExecutor(len(names)) as crew:
                boots = {name: crew.submit(self._boot, name) for name in names}
            # Those that are up first, so that all of them are known to `close`.
            self.hosts = {name: boot.result() for name, boot in boots.items() if boot.exception() is None}
            for boot in boots.values():
                boot.result()
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> NetworkedHost:
        return self.hosts[name]

    def hosts_file(self) -> str:
        lines = [f"{address} {name}.lab.example {name}" for name, address in self.network.hosts.items()]
        return "\n".join(["127.0.0.1 localhost", *lines, ""])

    def own(self, path: Path) -> Path:
        """Give a file or folder in the home to the user."""
        for place, _, files in os.walk(path):
            for name in [place, *(os.path.join(place, file) for file in files)]:
                os.chown(name, UID, UID, follow_symlinks=False)
        if not path.is_dir():
            os.chown(path, UID, UID)
        return path

    def close(self) -> None:
        for host in self.hosts.values():
            if host.is_on:
                host.plug()
        with ThreadPoolExecutor(max(1, len(self.hosts))) as crew:
            endings = [crew.submit(host.close) for host in self.hosts.values()]
        self.network.close()
        for ending in endings:
            ending.result()

    def _boot(self, name: str) -> NetworkedHost:
        folder = self.folder / name
        folder.mkdir()
        return NetworkedHost(folder, name, self)

    def _make_home(self) -> None:
        """One key opens all hosts, and all hosts are known."""
        ssh = self.home / ".ssh"
        ssh.mkdir(parents=True)
        for path in (ssh / "id_ed25519", *(self.folder / f"{name}.key" for name in self._names)):
            made = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.name, "-f", str(path)]
            subprocess.run(made, check=True, stdin=subprocess.DEVNULL, timeout=60)
        shutil.copy(ssh / "id_ed25519.pub", ssh / "authorized_keys")
        lines = [
            f"{name},{address} {' '.join((self.folder / f'{name}.key.pub').read_text().split()[:2])}\n"
            for name, address in self.network.hosts.items()
        ]
        (ssh / "known_hosts").write_text("".join(lines))
        self.own(self.home)
        for path in (self.home, ssh):
            path.chmod(0o700)


def install() -> None:
    """Have what such hosts need. Raises `NoHost`."""
    one_host.install()
    sweep()
    missing = [program for program in ("ip", "screen", "ssh", "ssh-keygen") if shutil.which(program) is None]
    if missing:
        raise NoHost(f"not installed here: {', '.join(missing)}")
    sshd = _sshd()
    done = subprocess.run(["ldd", sshd], capture_output=True, text=True, check=False, env=_library_path(sshd))
    lacking = re.findall(r"(\S+) => not found", done.stdout)
    if lacking:
        raise NoHost(f"{sshd} does not run without {', '.join(lacking)}")


def sweep() -> None:
    """Take away what runs that were killed have left: the processes of hosts, mounts, namespaces, cgroups.

    All their names begin with the number of the process that made them.
    """

    def is_left(name: str) -> bool:
        made = re.match(r"(?:kq|kueue)(\d+)x[0-9a-f]+", name)
        return made is not None and not Path("/proc", made[1]).exists()

    groups = [Path(top, name) for top in one_host.cgroup_roots() for name in os.listdir(top) if is_left(name)]
    end = time.monotonic() + BOOT_SECONDS
    while (members := _members(groups)) and time.monotonic() < end:
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    with open("/proc/self/mounts") as table:
        mounts = [line.split()[:2] for line in table]
    for point in [point for name, point in mounts if is_left(name)][::-1]:
        subprocess.run(["umount", "-l", point], check=False)
    spaces = Path("/run/netns")
    for name in filter(is_left, os.listdir(spaces) if spaces.exists() else ()):
        subprocess.run(["ip", "netns", "del", name], check=False)
    passages = [Path(top) for top in ("/run/systemd/nspawn/propagate", "/run/systemd/nspawn/unix-export")]
    groups += [place / name for place in passages if place.exists() for name in os.listdir(place) if is_left(name)]
    for group in groups:
        for place, _, _ in os.walk(group, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(place)


def _members(groups: Sequence[Path]) -> list[int]:
    """All processes of these cgroups and of those below, as they are numbered out here."""
    found = set()
    for place in (Path(place) for group in groups for place, _, _ in os.walk(group)):
        with contextlib.suppress(OSError):
            found.update(map(int, (place / "cgroup.procs").read_text().split()))
    return sorted(found - {0})


def _sshd() -> str:
    found = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/sbin")
    if found is None:
        raise NoHost("sshd is not installed here")
    return os.path.realpath(found)


def _library_path(sshd: str) -> dict[str, str]:
    """Where the libraries are of an sshd that was taken out of its package and not installed."""
    top = Path(sshd).parents[2]
    places = [] if top == Path("/") else [str(place) for place in sorted(top.glob("**/lib/*-linux-gnu*"))]
    return {"LD_LIBRARY_PATH": ":".join(places)} if places else {}


def _libraries(sshd: str) -> str:
    return "".join(f"Environment={name}={value}" for name, value in _library_path(sshd).items())


__all__ = ["NAMES", "USER", "Cluster", "NetworkedHost", "NoHost", "install"]
