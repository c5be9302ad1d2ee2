"""The server as a process: what it keeps, whom it serves, how it stops."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time

import pytest

from kueue import __version__
from kueue.model import Excerpt
from kueue.protocol import codec
from kueue.protocol import messages as m
from tests.support.server_program import Client, ServerProgram, eventually, job_range


@pytest.fixture
def server(tmp_path):
    program = ServerProgram(tmp_path)
    yield program
    program.close()


def test_a_job_goes_from_submission_to_its_end_over_real_tls(server):
    server.start()
    with server.client() as client, server.worker() as worker:
        (job,) = client.submit("echo", "hello")
        offer = worker.hear_a(m.Offer)
        assert offer.job == job
        assert offer.payload.argv == ("echo", "hello")
        worker.start(offer)
        eventually(lambda: client.states() == {job: "running"}, "the job runs")
        worker.end(offer, stdout=Excerpt(size=6, head=b"hello\n"))
        assert worker.hear_a(m.Acknowledge).offers == (offer.offer,)
        assert client.states() == {job: "succeeded"}
        (detail,) = client.ask(m.ShowJobs, ids=((job, job),)).jobs
        assert detail.end.stdout.head == b"hello\n"
        assert next(what for _, _, what in detail.events).startswith("submitted")


def test_the_local_socket_serves_commands_too(server):
    server.start()
    with server.client(local=True) as client, server.client() as other:
        client.submit("true")
        assert other.states() == client.states() == {0: "pending"}
    path = next((server.state / "server").glob("*.sock"))
    assert path.stat().st_mode & 0o777 == 0o600


def test_everything_acknowledged_survives_kill_9_and_ids_go_on(server):
    server.start()
    with server.client() as client:
        acknowledged = []
        for _ in range(25):
            acknowledged += client.submit("true", count=4)
        server.kill()
    server.start()
    with server.client() as client:
        assert sorted(client.states()) == acknowledged == list(range(100))
        assert set(client.states().values()) == {"pending"}
        assert client.submit("true") == [100]


def test_a_submission_repeated_after_a_lost_answer_makes_no_second_job(server):
    server.start()
    request = "ab" * 16
    with server.client() as client:
        first = client.ask(m.Submit, request_id=request, ranges=(job_range("true"),))
    server.kill()
    server.start()
    with server.client() as client:
        again = client.ask(m.Submit, request_id=request, ranges=(job_range("true"),))
        assert again.ids == first.ids
        assert list(client.states()) == [0]


def test_a_running_job_survives_a_restart_of_the_server(server):
    server.start()
    with server.client() as client, server.worker() as worker:
        (job,) = client.submit("sleep", "1000")
        offer = worker.hear_a(m.Offer)
        worker.start(offer)
        eventually(lambda: client.states() == {job: "running"})
        assert server.stop() == 0
        assert worker.hear_a(m.Goodbye).reason
        assert client.hear_a(m.Goodbye).reason
    server.start()
    report = m.AttemptReport(
        offer=offer.offer, job=job, queue_id=worker.welcome.queue_id, state="running", started_wall=time.time()
    )
    with server.client() as client, server.worker(attempts=(report,)) as worker:
        assert worker.welcome.queue_id == report.queue_id
        assert client.states() == {job: "running"}
        worker.end(offer)
        worker.hear_a(m.Acknowledge)
        assert client.states() == {job: "succeeded"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_stops_in_order_and_a_hangup_meanwhile_does_not_revive_it(server, number):
    server.start()
    with server.client() as client:
        client.submit("true")
        server.send(number)
        server.send(signal.SIGHUP)
        began = time.monotonic()
        assert server.process.wait(15) == 0
        assert time.monotonic() - began < 10
        assert client.hear_a(m.Goodbye).reason
    assert not list((server.state / "server").glob("*.sock"))


def test_a_second_server_of_one_state_names_the_first_and_leaves_it_alone(server):
    server.start()
    second = subprocess.run(
        server.command(), env=server.environ(), capture_output=True, text=True, timeout=30, check=False
    )
    assert second.returncode == 1
    assert f"pid {server.process.pid}" in second.stderr
    assert "Traceback" not in second.stderr
    with server.client(local=True) as client:
        assert client.submit("true") == [0]


def test_a_pid_of_a_stranger_in_the_lock_file_of_a_killed_server_hinders_nobody(server):
    server.start()
    server.kill()
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        (server.state / "server" / "lock").write_text(f"{stranger.pid} 1\n")
        server.start()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_port_in_use_is_a_clear_error(server):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server.port = taken.getsockname()[1]
        server.write_config()
        done = subprocess.run(
            server.command(), env=server.environ(), capture_output=True, text=True, timeout=30, check=False
        )
    assert done.returncode == 1
    assert "Failed to bind any address!" in done.stderr
    assert str(server.port) in done.stderr
    assert "Traceback" not in done.stderr


def test_without_settings_and_without_a_terminal_it_says_so_and_makes_none(server):
    server.config.unlink()
    done = subprocess.run(
        server.command(), env=server.environ(), capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 1
    assert str(server.config) in done.stderr
    assert not server.config.exists()


def test_with_the_word_of_kueue_up_it_makes_the_settings(server, tmp_path):
    server.config = tmp_path / "new" / "config.toml"
    server.port = 0
    environ = {**server.environ(), "KUEUE_UP": "1"}
    with server.log.open("ab") as log:
        process = subprocess.Popen(server.command(), env=environ, stdout=log, stderr=log)
    try:
        eventually(lambda: server.config.exists() and "kueue" in server.said())
        assert server.config.stat().st_mode & 0o777 == 0o600
    finally:
        process.terminate()
        process.wait(15)


def test_a_wrong_secret_is_let_in_nowhere(server):
    server.start()
    with contextlib.suppress(OSError):
        stranger = Client(server.raw_tls("another secret of good length"), hello=False)
        stranger.say(m.ClientHello(), m.Submit(seq=1, request_id="0" * 32, ranges=(job_range("true"),)))
        assert stranger.hear() is None
    eventually(lambda: "not let in" in server.said())
    with server.client() as client:
        assert client.states() == {}


def test_another_protocol_is_told_both_versions(server):
    server.start()
    client = Client(server.raw_tls(), hello=False)
    client.say(m.ClientHello(protocol=m.PROTOCOL + 1, version="99.0"))
    sorry = client.hear_a(m.Sorry)
    assert "99.0" in sorry.reason
    assert f"kueue {__version__}" in sorry.reason
    assert client.hear() is None
    worker = server.worker(protocol=m.PROTOCOL - 1, welcome=False)
    assert f"protocol {m.PROTOCOL - 1}" in worker.hear_a(m.Sorry).reason
    eventually(lambda: "99.0" in server.said())
    with server.client() as good:
        assert good.ask(m.ListWorkers).workers == ()


def test_bad_peers_harm_nobody(server):
    server.start()

    def junk():
        with server.raw_tls() as sock:
            sock.sendall(os.urandom(4096))
            sock.settimeout(20)
            try:
                while sock.recv(4096):
                    pass
            except OSError:
                pass

    def gigabyte():
        with server.raw_tls() as sock:
            sock.sendall((1 << 30).to_bytes(4, "big") + b"[" * 1000)
            assert sock.recv(10) == b""

    def half_a_frame():
        with server.raw_tls() as sock:
            sock.sendall(codec.encode([m.ClientHello()])[:-3])

    def no_tls():
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
            sock.settimeout(20)
            sock.recv(1000)

    def question_before_the_hello():
        client = Client(server.raw_tls(), hello=False)
        client.say(m.ListJobs(seq=1))
        assert isinstance(client.hear(), m.Sorry)
        assert client.hear() is None

    with server.client() as bystander:
        for peer in (junk, gigabyte, half_a_frame, no_tls, question_before_the_hello):
            peer()
            began = time.monotonic()
            bystander.ask(m.ServerInfo)
            assert time.monotonic() - began < 2
    assert "Traceback" not in server.said()


def test_a_frame_that_dribbles_byte_by_byte_is_understood_and_delays_nobody(server):
    server.start()
    slow = Client(server.raw_tls(), hello=False)
    frame = codec.encode([m.ClientHello()])
    with server.client() as other:
        for at in range(len(frame)):
            slow.sock.sendall(frame[at : at + 1])
            if at % 10 == 0:
                other.ask(m.ServerInfo)
    assert isinstance(slow.hear(), m.Welcome)
    slow.close()


def test_two_hundred_connections_cut_off_in_the_middle_leave_nothing(server):
    server.start()
    with server.client() as client:
        (job,) = client.submit("true")
        for _ in range(200):
            watcher = Client(server.raw_local(), hello=False)
            watcher.say(m.ClientHello(), m.WatchJobs(seq=1, ids=((job, job),)))
            watcher.close()
        files = f"/proc/{server.process.pid}/fd"
        eventually(lambda: len(os.listdir(files)) < 60, "the descriptors are closed")
        began = time.monotonic()
        client.ask(m.ListJobs)
        assert time.monotonic() - began < 1
        eventually(lambda: _cpu_share(server.process.pid) < 0.05, "it idles")


def _cpu_share(pid: int, seconds: float = 1.0) -> float:
    """Of one core, measured over some time."""
    before, wall = _cpu_seconds(pid), time.monotonic()
    time.sleep(seconds)
    return (_cpu_seconds(pid) - before) / (time.monotonic() - wall)


def _cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_hangup_reads_limits_and_resources_anew(server):
    server.start()
    with server.client() as client, server.worker(slots=4) as worker:
        refused = client.ask(m.Submit, ranges=(job_range("x", counters=(("genus", 1),)),))
        assert isinstance(refused, m.Failed)
        server.write_config(resources={"genus": 3}, global_max_parallel_jobs=1)
        server.send(signal.SIGHUP)
        eventually(lambda: client.ask(m.ListResources).resources, "the resource is known")
        (row,) = client.ask(m.ListResources).resources
        assert (row.name, row.total) == ("genus", 3)
        client.submit("x", count=2, counters=(("genus", 1),))
        worker.hear_a(m.Offer)
        assert sorted(client.states().values()) == ["offered", "pending"]


def test_a_hangup_with_broken_settings_changes_nothing(server):
    server.start()
    with server.client() as client:
        server.config.write_text("[common_settings\n")
        server.send(signal.SIGHUP)
        eventually(lambda: "stay as they were" in server.said())
        assert client.submit("true") == [0]


def test_a_hangup_with_settings_that_cannot_be_read_to_their_end_changes_nothing(server):
    server.start()
    with server.client() as client:
        server.config.unlink()
        server.config.symlink_to("/proc/self/mem")
        server.send(signal.SIGHUP)
        eventually(lambda: "stay as they were" in server.said())
        assert client.submit("true") == [0]


def test_the_secret_rotates_without_a_pause(server):
    server.start()
    old = server.secret
    with server.worker() as worker:
        server.secret = "the next secret, also of good length"
        server.write_config(previous=old)
        server.send(signal.SIGHUP)
        eventually(lambda: "count now" in server.said())
        worker.beat()
        with server.client() as new, server.client(secret=old) as previous, server.client(local=True) as local:
            for client in (new, previous, local):
                client.ask(m.ServerInfo)


def test_an_answer_of_many_pages_is_complete_over_a_slow_line(server):
    server.start()
    with server.client() as client:
        client.submit("x" * 300, count=3000)
        client.say(m.ListJobs(seq=900))
        ids = []
        while True:
            time.sleep(0.01)
            part = client.hear_a(m.JobList)
            ids += [row.id for row in part.jobs]
            if part.end:
                break
        assert ids == list(range(3000))
        assert dict(part.counts)["pending"] == 3000


def test_the_service_manager_hears_when_it_is_ready_alive_reloading_and_stopping(server, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(20)
        server.more_environ = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "400000"}
        server.start()
        said: list[str] = []

        def hears(word: str) -> bool:
            while word not in "\n".join(said):
                said.append(manager.recv(4096).decode())
            said.clear()
            return True

        assert hears("READY=1")
        assert hears("WATCHDOG=1")
        server.send(signal.SIGHUP)
        assert hears("RELOADING=1")
        assert hears("READY=1")
        server.send(signal.SIGTERM)
        assert hears("STOPPING=1")
        assert server.process.wait(15) == 0


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="no IPv6 here")
def test_the_default_addresses_serve_both_families_without_an_error(server):
    server.write_config(bind_addresses="0.0.0.0 [::]")
    server.start()
    assert "ERROR" not in server.said()
    assert server.said().count("Failed to bind") == 0
    for host in ("127.0.0.1", "::1"):
        with socket.create_connection((host, server.port), timeout=10):
            pass


@pytest.mark.parametrize("name", ["nobody.invalid", "ralab..lab"])
def test_a_name_that_nobody_knows_is_warned_about(server, name):
    server.config.write_text(
        server.config.read_text().replace("[server_settings]", f'server_name = "{name}"\n[server_settings]')
    )
    server.start()
    eventually(lambda: f"{name} is not known here" in server.said())
    with server.client() as client:
        assert client.submit("true") == [0]


@pytest.mark.slow
def test_a_removal_that_its_worker_does_not_confirm_is_answered_within_ten_seconds(server):
    server.start()
    with server.client() as client, server.worker() as worker:
        (job,) = client.submit("sleep", "1000")
        offer = worker.hear_a(m.Offer)
        worker.start(offer)
        eventually(lambda: client.states() == {job: "running"})
        began = time.monotonic()
        (result,) = client.ask(m.RemoveJobs, ids=((job, job),), kill=True).results
        assert time.monotonic() - began < 11
        assert not result.ok
        assert "will not be started again" in result.text
        assert worker.hear_a(m.StopAttempt).offer == offer.offer
        worker.end(offer, code=0)
        worker.hear_a(m.Acknowledge)
        assert client.states()[job] in {"canceled", "succeeded"}
