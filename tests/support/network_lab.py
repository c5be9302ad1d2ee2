"""A laboratory of several hosts: each in a network namespace of its own, all on one switch that can be cut.

A cut drops every packet both ways and closes nothing, as a broken switch does. Needs root and ``ip``; `Network.close`
removes everything.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from kueue import client, transport
from tests.support.kill_lab import KillLab


def need_network() -> None:
    """Skip, with the reason, where namespaces cannot be made."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None:
        pytest.skip("the program `ip` (package iproute2) is not here")
    name = f"kq{os.getpid()}probe"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no network namespace can be made here: {done.stderr.strip()}")
    subprocess.run(["ip", "netns", "del", name], check=True)


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, (words, done.stderr)


class Network:
    """A switch and the hosts on it; names are of this process alone, with `prefix` of this network."""

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix or f"kq{os.getpid()}"
        self.switch = f"{self.prefix}sw"
        self.hosts: dict[str, str] = {}
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "sw", "type", "bridge")
        # A bridge that borrows the address of a port changes it when that port goes.
        ip("-n", self.switch, "link", "set", "sw", "address", "02:00:00:00:00:fe", "up")

    def add(self, host: str) -> str:
        """A new host, or one that was removed; its address."""
        known = self.hosts.get(host)
        space, address = self.space(host), known or f"10.211.0.{len(self.hosts) + 1}"
        ip("netns", "add", space)
        self.hosts[host] = address
        ip("-n", space, "link", "set", "lo", "up")
        # One that comes back has the card that it had: the others remember its number for a while.
        card = f"02:00:00:00:00:{int(address.rpartition('.')[2]):02x}"
        ends = ["eth", "address", card, "type", "veth", "peer", "name", host, "netns", self.switch]
        ip("-n", space, "link", "add", *ends)
        ip("-n", space, "address", "add", f"{address}/24", "dev", "eth")
        ip("-n", space, "link", "set", "eth", "up")
        ip("-n", self.switch, "link", "set", host, "master", "sw", "up")
        return address

    def space(self, host: str) -> str:
        return f"{self.prefix}{host}"

    def remove(self, host: str) -> None:
        """The host and all its connections, of which nobody hears; `add` brings it back."""
        ip("-n", self.switch, "link", "del", host)
        ip("netns", "del", self.space(host))

    def unplug(self, host: str) -> None:
        """Its cable is out: the host itself sees that."""
        ip("-n", self.switch, "link", "set", host, "down")

    def plug(self, host: str) -> None:
        ip("-n", self.switch, "link", "set", host, "up")

    def cut(self, host: str) -> None:
        ip("-n", self.switch, "link", "set", host, "nomaster")

    def heal(self, host: str) -> None:
        ip("-n", self.switch, "link", "set", host, "master", "sw")

    def close(self) -> None:
        for space in [*(self.space(host) for host in self.hosts), self.switch]:
            subprocess.run(["ip", "netns", "del", space], check=False, timeout=30)


class NetworkLab(KillLab):
    """The server on the host `srv`; each worker on a host of its name, with a state directory of its own.

    The network is the caller's, to be closed after the laboratory.
    """

    def __init__(self, folder: Path, network: Network) -> None:
        super().__init__(folder)
        self.network = network
        self.boot_ids: dict[str, Path] = {}
        self.jobs_on: dict[str, list[int]] = {}
        """Processes of jobs that lie on a host, for `lose_power`; jobs do not get the environment of their worker."""
        self.address = network.add("srv")
        self.settings["common_settings"]["server_name"] = self.address
        self.settings["server_settings"]["bind_addresses"] = "0.0.0.0"

    def start_on(self, host: str, module: str, *args: str, log: str) -> subprocess.Popen[bytes]:
        """A program on that host."""
        boot = self.boot_ids.get(host)
        # What `ip netns exec` mounts is seen by that program alone.
        script = f'mount --bind {boot} /proc/sys/kernel/random/boot_id && exec "$@"' if boot else 'exec "$@"'
        inside = ["ip", "netns", "exec", self.network.space(host)]
        with open(self.folder / f"{log}.log", "ab") as stream:
            process = subprocess.Popen(
                [*inside, "sh", "-c", script, "sh", sys.executable, "-m", module, *args],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env=self.environment(KUEUE_STATE_DIR=str(self.state_of(host))),
                cwd=self.folder,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def lose_power(self, host: str) -> None:
        """Nothing is said to anybody, nothing of it lives on; its next boot has another id."""
        self.network.cut(host)
        mark = f"KUEUE_STATE_DIR={self.state_of(host)}".encode()
        own = [pid for pid in self.members() if mark in environ_of(pid) or pid in self.jobs_on.get(host, ())]
        self.kill(*own)
        self.network.heal(host)
        self.boot_ids[host] = self.folder / f"boot-{host}"
        self.boot_ids[host].write_text(f"{uuid.uuid4()}\n")

    def state_of(self, host: str) -> Path:
        return self.folder / ("state" if host == "srv" else f"state-{host}")

    def start_server(self, *args: str, **sections: dict[str, object]) -> subprocess.Popen[bytes]:
        for section, keys in sections.items():
            self.settings.setdefault(section, {}).update(keys)
        self.config()
        before = self.log("server").count("listening on")
        self.server = self.start_on(
            "srv", "kueue.server.main", "-c", str(self.folder / "lab.toml"), *args, log="server"
        )
        self.until(lambda: self.log("server").count("listening on") > before, "it listens", process=self.server)
        return self.server

    def start_worker(self, name: str = "w1", **worker_settings: object) -> subprocess.Popen[bytes]:
        if name not in self.network.hosts:
            self.network.add(name)
        path = self.config(
            name, worker_settings={**self.settings["worker_settings"], "worker_name": name, **worker_settings}
        )
        process = self.workers[name] = self.start_on(name, "kueue.worker.main", "-c", str(path), log=name)
        self.until(lambda: self.is_online(name), f"worker {name} is online", process=process)
        return process

    def worker_state(self, worker: str = "w1") -> Path:
        return self.state_of(worker) / "workers" / worker

    def runners(self) -> list[int]:
        return [pid for pid in self.members() if b".pyz" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def ask_parts(self, kind: str, **fields: object) -> list[dict[str, object]]:
        """Over the server's own local socket: we are on none of the hosts."""
        if self._client is None:
            self._client = client.Client(self._server(), tell=lambda _: None)
        return self._client.ask_parts(kind, **fields)

    def _server(self) -> transport.Server:
        from kueue import places

        one = self.identity()
        return transport.Server(
            self.address, self.port, [places.find(str(self.state_of("srv"))).server_socket(self.port, one.fingerprint)]
        )


def environ_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


class Timeline:
    """What happened where, in seconds since the beginning, on the one clock of this machine."""

    def __init__(self) -> None:
        self.begin = time.time()
        self.entries: list[tuple[float, str, str]] = []

    def note(self, where: str, what: str, wall: float | None = None) -> float:
        at = (time.time() if wall is None else wall) - self.begin
        self.entries.append((at, where, what))
        return at

    def __str__(self) -> str:
        return "\n".join(f"  {at:6.2f} s  {where:7} {what}" for at, where, what in sorted(self.entries))
