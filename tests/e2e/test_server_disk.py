"""The server's disk: full, damaged, of another host."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import time

import pytest

from kueue.protocol import messages as m
from tests.support.server_program import ServerProgram, eventually, job_range
from tests.support.small_disk import fill, small_disk

FAT = "x" * 100_000


@pytest.fixture
def server(tmp_path):
    program = ServerProgram(tmp_path)
    yield program
    program.close()


def let_files_grow_to(pid: int, size: int) -> None:
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))


def test_a_full_disk_refuses_work_keeps_leases_and_comes_back_by_itself(server):
    server.start()
    pid = server.process.pid
    with server.client() as client, server.worker() as worker:
        (job,) = client.submit("sleep", "1000")
        offer = worker.hear_a(m.Offer)
        worker.start(offer)
        eventually(lambda: client.states() == {job: "running"})
        largest = max(
            file.stat().st_size
            for file in (server.state / "server").glob("queue.sqlite*")
            if "ballast" not in file.name
        )
        let_files_grow_to(pid, largest)
        refused = eventually(
            lambda: isinstance(answer := client.ask(m.Submit, ranges=(job_range(FAT),)), m.Failed) and answer
        )
        assert refused.error == "disk full: nothing was accepted"
        for _ in range(5):
            worker.beat()
        assert client.ask(m.ServerInfo).read_only
        (row,) = client.ask(m.ListWorkers).workers
        assert (row.state, row.note.partition(":")[0], row.running) == ("online", "read-only", (job,))
        assert client.ask(m.ListJobs).jobs[0].note == ""
        kept = client.states()
        assert kept[job] == "running"
        # The probe goes on failing: it does not come back too early.
        time.sleep(1.5)
        assert client.ask(m.ServerInfo).read_only
        let_files_grow_to(pid, resource.RLIM_INFINITY)
        eventually(lambda: not client.ask(m.ServerInfo).read_only, "it takes writes again")
        assert client.submit("next") == [max(kept) + 1]
    server.kill()
    server.start()
    with server.client() as client:
        assert set(client.states()) == {*kept, max(kept) + 1}


def test_a_server_starts_on_a_full_disk_and_can_be_backed_up_to_another_one(server):
    with small_disk(server.state / "server", 40) as disk:
        disk.chmod(0o700)
        server.start()
        with server.client() as client:
            client.submit("a", count=30)
        assert server.stop() == 0
        # What is written anew at every start shall have no room of its own.
        os.truncate(disk / "lock", 0)
        (disk / "port").unlink()
        (disk / "queue.sqlite.ballast").unlink()
        fill(disk)
        taken = subprocess.run(
            server.command("--backup", str(server.base / "copy")),
            env=server.environ(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert taken.returncode == 0, taken.stderr
        assert "30 jobs not over" in taken.stdout
        server.start(ready=False)
        eventually(lambda: server.said().count("listening on") == 2 or server.process.poll() is not None)
        assert server.process.poll() is None, server.said()
        eventually(lambda: "the port is not noted" in server.said())
        with server.client() as client:
            assert len(client.states()) == 30
        assert server.stop() == 0


def test_a_damaged_state_is_left_alone_and_recover_saves_what_can_be_read(server):
    server.start()
    with server.client() as client:
        client.submit("a", count=30)
        client.submit("b", count=30)
    assert server.stop() == 0
    file = server.state / "server" / "queue.sqlite"
    spoiled = bytearray(file.read_bytes())
    spoiled[0:16] = os.urandom(16)
    file.write_bytes(spoiled)
    refused = subprocess.run(
        server.command(), env=server.environ(), capture_output=True, text=True, timeout=30, check=False
    )
    assert refused.returncode == 1
    assert str(file) in refused.stderr
    assert "--recover" in refused.stderr
    assert file.read_bytes() == spoiled
    done = subprocess.run(
        server.command("--recover"), env=server.environ(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    (aside,) = [one for one in file.parent.glob("*.damaged-*") if not one.name.endswith(("-wal", "-shm"))]
    assert aside.read_bytes() == spoiled
    server.start()
    with server.client() as client:
        assert len(client.states()) == 60
        assert client.submit("c")[0] >= 60


def test_what_is_acknowledged_after_its_log_was_taken_away_survives_kill_9(server):
    server.start()
    with server.client() as client:
        acknowledged = client.submit("a", count=3)
        (server.state / "server" / "queue.sqlite-wal").unlink()
        acknowledged += client.submit("b", count=3)
        acknowledged += client.submit("c", count=3)
    eventually(lambda: "Nothing is lost" in server.said())
    server.kill()
    assert server.said().count("Nothing is lost") == 1
    server.start()
    with server.client() as client:
        assert sorted(client.states()) == acknowledged
        assert client.submit("d") == [9]


def test_what_stood_in_a_log_that_was_emptied_in_place_survives_kill_9_and_a_stop(server):
    server.start()
    log = server.state / "server" / "queue.sqlite-wal"
    with server.client() as client:
        acknowledged = client.submit("a", count=3)
        os.truncate(log, 0)
        acknowledged += client.submit("b", count=3)
    eventually(lambda: f"{log} was made shorter while the server runs. Nothing is lost" in server.said())
    server.kill()
    server.start()
    with server.client() as client:
        assert sorted(client.states()) == acknowledged
        acknowledged += client.submit("c", count=3)
    os.truncate(log, 0)
    assert server.stop() == 0
    assert server.said().count("Nothing is lost") == 2
    server.start()
    with server.client() as client:
        assert sorted(client.states()) == acknowledged
        assert client.submit("d") == [9]


def test_the_live_jobs_of_a_state_that_was_emptied_in_place_are_recovered(server):
    server.start()
    with server.client() as client:
        acknowledged = client.submit("a", count=3)
    assert server.stop() == 0
    server.start()
    os.truncate(server.state / "server" / "queue.sqlite", 0)
    with server.client() as client, pytest.raises(AssertionError, match="the connection ended"):
        client.submit("b")
    assert server.process.wait(30) == 1
    assert "nothing more was accepted" in server.said()
    done = subprocess.run(
        server.command("--recover"), env=server.environ(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    server.start()
    assert "Numbers go on at job 3" in server.said()
    with server.client() as client:
        assert sorted(client.states()) == acknowledged
        assert client.submit("d") == [3]


def test_a_state_that_was_removed_is_not_made_anew_and_kueue_up_says_why(server):
    server.start()
    file = server.state / "server" / "queue.sqlite"
    with server.client() as client:
        client.submit("a", count=3)
    assert server.stop() == 0
    kept = file.with_name("kept")
    file.rename(kept)
    for command in (server.command(), [sys.executable, "-m", "kueue.cli.main", "up"]):
        environ = {**server.environ(), "KUEUE_CONFIG": str(server.config)}
        refused = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
        assert refused.returncode == 1
        assert f"The state {file} is missing, though there was one" in refused.stderr
        assert "`kueue_server --restore FILE`" in refused.stderr
        assert not file.exists()
    kept.rename(file)
    server.start()
    with server.client() as client:
        assert len(client.states()) == 3


def test_recover_is_refused_while_a_server_runs(server):
    server.start()
    done = subprocess.run(
        server.command("--recover"), env=server.environ(), capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 1
    assert "running already" in done.stderr


def test_kill_9_under_load_loses_nothing_that_was_acknowledged(server):
    server.start()
    acknowledged: list[int] = []
    with server.client(local=True) as client:
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            acknowledged += client.submit("true")
        # Five more are on their way when it dies.
        for number in range(5):
            client.say(m.Submit(seq=10_000 + number, request_id=f"{number:032}", ranges=(job_range("late"),)))
        server.kill()
        with contextlib.suppress(OSError):
            while (message := client.hear()) is not None:
                if isinstance(message, m.Submitted):
                    acknowledged.append(message.ids[0][0])
    server.start()
    with server.client() as client:
        kept = client.ask(m.ListJobs).jobs
        assert set(acknowledged) <= {row.id for row in kept}
        # What is repeated is there once, whether it had been stored or not.
        for number in range(5):
            client.ask(m.Submit, request_id=f"{number:032}", ranges=(job_range("late"),))
        late = [row.id for row in client.ask(m.ListJobs).jobs if row.payload.argv == ("late",)]
        assert len(late) == 5
        assert {row.id for row in kept if row.payload.argv == ("late",)} <= set(late)
