"""Small disks that really fill up: the server refuses and comes back by itself, the worker loses no end of a job."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from kueue import errors
from tests.support.kill_lab import SMALL, KillLab, is_stopped, lives

MEGABYTE = 2**20


class Disk:
    """A file system in memory that can be filled."""

    def __init__(self, path: Path, megabytes: int) -> None:
        self.path = path
        self.filler = path / "filler"
        path.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=0700", "kueue-test", str(path)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")

    def fill(self, leave: int = 0) -> None:
        """Take all its room but `leave` bytes."""
        with self.filler.open("ab", buffering=0) as file:
            for size in (MEGABYTE, 4096):
                with contextlib.suppress(OSError):
                    while not leave or self.free_bytes - size >= leave:
                        file.write(bytes(size))

    def free(self) -> None:
        self.filler.unlink(missing_ok=True)

    @property
    def free_bytes(self) -> int:
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def close(self) -> None:
        subprocess.run(["umount", "-l", str(self.path)], check=True)


@pytest.fixture
def lab(tmp_path):
    with KillLab(tmp_path) as lab:
        yield lab


@pytest.fixture
def disk(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk to fill")
    disks: list[Disk] = []

    def make(path: Path, megabytes: int) -> Disk:
        disks.append(Disk(path, megabytes))
        return disks[-1]

    yield make
    for one in disks:
        one.close()


@pytest.mark.slow
def test_a_server_whose_disk_is_full_loses_nothing_it_acknowledged_and_comes_back_by_itself(disk, lab):
    small = disk(lab.folder / "state" / "server", 64)
    lab.start_server(server_settings={"worker_timeout_seconds": 10})
    lab.start_worker("w1")
    gate = lab.gate()
    job = lab.shell(f"{gate.command[2]}")
    ending = lab.shell("while [ ! -e go ]; do sleep 0.1; done; exit 7")
    lab.until_all([job, ending], "running")
    small.fill(leave=1_500_000)
    acknowledged = [job, ending]
    refusal: errors.UserError | None = None
    begin = time.monotonic()
    while refusal is None:
        assert time.monotonic() - begin < 60
        try:
            acknowledged += lab.quick(lab.range_of("echo", "x" * 50_000, held=True))
        except errors.UserError as error:
            refusal = error
    small.fill()
    assert len(acknowledged) > 5
    assert "disk full: nothing was accepted" in str(refusal)
    said = lab.kueue("cmd", *SMALL, "true")
    assert said.returncode == 1
    assert "disk full: nothing was accepted" in said.stderr
    assert "Free space on the server's disk" in said.stderr
    # A job that ends meanwhile is kept by its worker; leases are renewed, or the other one would be paused by now.
    (lab.folder / "go").touch()
    (main, *_) = lab.processes_of(job)
    lab.remains(lambda: lives(main) and not is_stopped(main), 12)
    assert lab.state(ending) == "running", "no end is acknowledged that is not stored"
    small.free()
    begin = time.monotonic()
    lab.until(lambda: not lab.ask("ServerInfo").get("read_only"), "it takes writes again", seconds=20)
    back = time.monotonic() - begin
    assert lab.end_of(ending, "failed")["return_code"] == 7
    new = lab.quick(lab.range_of("true", held=True))
    assert sorted(row["id"] for row in lab.rows()) == sorted([*acknowledged, *new])
    gate.open()
    lab.end_of(job)
    assert lab.numbers(job) == [1]
    lab.kill_server()
    lab.start_server()
    assert sorted(row["id"] for row in lab.rows()) == sorted([*acknowledged, *new])
    lab.no_traceback()
    print(f"\n{len(acknowledged)} acknowledged before the disk was full, back {back:.1f} s after room was made")


@pytest.mark.slow
def test_a_server_started_on_a_full_disk_says_so_or_serves_and_everything_is_there_later(disk, lab):
    small = disk(lab.folder / "state" / "server", 64)
    lab.start_server()
    kept = lab.quick(*[lab.range_of("echo", "x" * 10_000, held=True) for _ in range(20)])
    lab.kill_server()
    small.fill()
    server = lab.start("kueue.server.main", "-c", str(lab.folder / "lab.toml"), log="server")
    lab.until(lambda: lab.answers() or server.poll() is not None, "it serves, or ends and says why")
    assert "Traceback" not in lab.log("server")
    if server.poll() is not None:
        assert "full" in lab.log("server") or "space" in lab.log("server")
        small.free()
        lab.start_server()
    else:
        lab.server = server
        assert sorted(row["id"] for row in lab.rows()) == kept
        small.free()
        lab.until(lambda: not lab.ask("ServerInfo").get("read_only"), "it takes writes", seconds=20)
    assert sorted(row["id"] for row in lab.rows()) == kept
    assert lab.quick(lab.range_of("true", held=True)) == [kept[-1] + 1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_whose_disk_is_full_keeps_running_jobs_tells_their_ends_and_comes_back_by_itself(disk, lab):
    small = disk(lab.folder / "state" / "workers" / "w1", 32)
    lab.start_server()
    lab.start_worker("w1")
    quiet = lab.shell("echo $$ >> begun; while [ ! -e go ]; do sleep 0.1; done; exit 11")
    writer = lab.quick(lab.range_of("sh", "-c", "echo first; head -c 100000000 /dev/zero; echo $? >> wrote"))[0]
    lab.until(lambda: lab.lines("begun"), "it runs")
    # A job that fills the disk meets the error itself, as it would anywhere.
    lab.until(lambda: lab.lines("wrote"), "the writer was told")
    small.fill()
    pid = int(lab.lines("begun")[0])
    # A new job cannot start there: it waits, and the reason is told.
    waiting = lab.shell("echo ran >> ran")
    lab.until(lambda: "space" in str(lab.job(waiting)["waits"]).lower(), "the reason is told", seconds=30)
    # Now and then it is offered again, and put off again.
    lab.until(lambda: "space" in lab.kueue("explain", str(waiting)).stdout.lower(), "explain tells it, too", seconds=30)
    # The end of a job that has no room for its record is told when there is.
    (lab.folder / "go").touch()
    lab.until(lambda: not os.path.exists(f"/proc/{pid}"), "it has ended")
    assert lab.workers["w1"].poll() is None
    assert lab.is_online()
    small.free()
    begin = time.monotonic()
    for path in lab.spool().glob("*/stdout"):
        os.truncate(path, 1000)
    assert lab.end_of(quiet, "failed", seconds=30)["return_code"] == 11
    lab.end_of(waiting, seconds=90)
    back = time.monotonic() - begin
    assert lab.lines("ran") == ["ran"]
    lab.until_state(writer, "succeeded", "failed", seconds=30)
    assert lab.output(writer).startswith("first")
    # And a restart of everything finds it all as it was.
    lab.workers["w1"].send_signal(signal.SIGTERM)
    assert lab.workers["w1"].wait(15) == 0
    lab.start_worker("w1")
    lab.end_of(lab.shell("true"))
    lab.no_traceback()
    print(f"\nworker usable {back:.1f} s after room was made")
