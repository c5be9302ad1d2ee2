"""The real worker against the real server: how it answers, survives, stops and comes back."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.support.deaf import DEAF
from tests.support.lab import Lab

SMALL = ("-c", "1", "-r", "1")
MORTAL = {"worker_timeout_seconds": 10}


class WorkerLab(Lab):
    """A lab whose workers are looked at closely."""

    def listed(self):
        found = self.kueue("list-workers", "--json")
        return json.loads(found.stdout)["workers"] if found.returncode == 0 else []


@pytest.fixture
def lab(tmp_path):
    lab = WorkerLab(tmp_path)
    yield lab
    lab.close()


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """A lab for tests that leave it as they found it."""
    lab = WorkerLab(tmp_path_factory.mktemp("calm"))
    lab.start_server()
    lab.start_worker("w1", worker_max_parallel_jobs=2, output_limit_mb=1)
    yield lab
    lab.close()


def ends(lab, job, state="succeeded", seconds=30):
    lab.until(
        lambda: lab.job(job)["state"] in {"succeeded", "failed", "canceled"}, f"job {job} is done", seconds=seconds
    )
    found = lab.job(job)
    assert found["state"] == state, found
    return found


def stdout(lab, job):
    """Captured output as `show-job` prints it."""
    shown = lab.kueue("show-job", str(job)).stdout
    return shown.partition("=== stdout ===\n")[2].partition("\n=== ")[0].strip("\n")


def stopped_state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def processes_of(argument):
    """Pids whose command line holds this argument."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if argument.encode() in words and words[0] == b"sleep":
                    found.append(int(entry.name))
    return found


# --- answering -------------------------------------------------------------------------------------------------------


def test_a_job_gets_the_accounts_environment_and_no_secret(calm):
    job = calm.submit(*SMALL, "env")
    ends(calm, job)
    env = dict(line.split("=", 1) for line in stdout(calm, job).splitlines() if "=" in line)
    assert env["KUEUE_JOB_ID"] == str(job)
    assert env["KUEUE_CPUS"] == "1"
    assert env["KUEUE_WORKER"] == "w1"
    assert {"HOME", "USER", "LOGNAME", "SHELL"} <= set(env)
    assert set(env) & {"KUEUE_STATE_DIR", "KUEUE_CONFIG", "NOTIFY_SOCKET", "INVOCATION_ID"} == set()
    assert "a secret of this test" not in stdout(calm, job)


def test_a_job_runs_where_its_directory_appears(calm, tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    job = calm.submit(*SMALL, "pwd", cwd=there)
    ends(calm, job)
    there.rmdir()
    gone = tmp_path / "gone"
    gone.mkdir()
    calm.kueue("cmd", "--hold", *SMALL, "pwd", cwd=gone)
    waiting = max(calm.jobs())
    gone.rmdir()
    assert calm.kueue("release", str(waiting)).returncode == 0
    calm.until(lambda: str(gone) in json.dumps(calm.job(waiting)["waits"]), "the reason names the directory")
    gone.mkdir()
    ends(calm, waiting, seconds=20)
    assert stdout(calm, waiting) == str(gone)


def test_no_more_jobs_run_than_the_worker_has_slots(calm, tmp_path):
    def go(number):
        (tmp_path / f"go{number}").touch()

    def states():
        return [calm.job(job)["state"] for job in jobs]

    jobs = [
        calm.submit("-c", "0", "-r", "0", "sh", "-c", f"while [ ! -e {tmp_path}/go{number} ]; do sleep 0.05; done")
        for number in range(5)
    ]
    try:
        calm.until(lambda: states().count("running") == 2, "two run")
        assert calm.worker("w1")["free_slots"] == 0
        for number in range(3):
            go(number)
            calm.until(lambda number=number: states().count("succeeded") == number + 1, "one has ended")
            calm.until(lambda: states().count("running") == 2, "the next runs")
    finally:
        for number in range(5):
            go(number)
    calm.until(lambda: states().count("succeeded") == 5, "all have ended")


def test_jobs_are_shot_by_the_kernel_before_the_worker_is(calm):
    job = calm.submit(*SMALL, "cat", "/proc/self/oom_score_adj")
    ends(calm, job)
    own = int(Path(f"/proc/{calm.workers['w1'].pid}/oom_score_adj").read_text())
    assert int(stdout(calm, job)) > own


def test_the_worker_sits_in_the_root_directory(calm):
    assert os.readlink(f"/proc/{calm.workers['w1'].pid}/cwd") == "/"


def test_special_ends_are_told(calm):
    missing = ends(calm, calm.submit(*SMALL, "/no/such/program"), "failed")
    assert missing["return_code"] == -43
    killed = ends(calm, calm.submit(*SMALL, "sh", "-c", "kill -9 $$"), "failed")
    assert killed["return_code"] == -44


def test_output_above_the_limit_loses_its_middle_and_says_so(calm):
    job = calm.submit(*SMALL, "sh", "-c", "echo first; head -c 6000000 /dev/zero | tr '\\0' x; echo; echo last")
    ends(calm, job)
    shown = calm.kueue("show-job", str(job)).stdout
    assert "first" in shown
    assert "last" in shown
    spooled = [
        path for path in (calm.folder / "state/workers/w1/spool").glob("*/stdout") if path.stat().st_size > 6_000_000
    ]
    assert len(spooled) == 1
    if "cannot give up the middle of a file" not in calm.log("w1"):
        assert "size limit" in shown
        assert spooled[0].stat().st_blocks * 512 <= 2**20


def test_a_users_output_file_stays_where_it_is(calm, tmp_path):
    job = calm.submit(*SMALL, "-o", "out.txt", "--", "sh", "-c", "echo mine", cwd=tmp_path)
    ends(calm, job)
    assert (tmp_path / "out.txt").read_text() == "mine\n"
    assert f"Redirected to {tmp_path}/out.txt" in calm.kueue("show-job", str(job)).stdout


def test_many_short_jobs_leave_neither_zombies_nor_descriptors(calm):
    pid = calm.workers["w1"].pid
    ends(calm, calm.submit(*SMALL, "true"))
    before = len(os.listdir(f"/proc/{pid}/fd"))
    lines = calm.folder / "lines"
    lines.write_text("true\n" * 300)
    calm.kueue("cmd", *SMALL, "--each-line", str(lines))
    last = max(calm.jobs())
    ends(calm, last, seconds=60)
    calm.until(lambda: all(job["state"] != "running" for job in calm.jobs().values()), "all are done")
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert [child for child in children if stopped_state(child) == "Z"] == []
    assert abs(len(os.listdir(f"/proc/{pid}/fd")) - before) <= 5


# --- starting --------------------------------------------------------------------------------------------------------


def test_a_second_worker_of_the_same_name_says_so_and_ends(calm):
    second = calm.start("kueue.worker.main", "-c", str(calm.folder / "w1.toml"), log="second")
    assert second.wait(20) == 1
    assert f"w1 is running already (pid {calm.workers['w1'].pid})" in calm.log("second")


def test_two_workers_of_one_machine_are_two(lab):
    lab.start_server()
    lab.start_worker("w1")
    lab.start_worker("w2")
    assert sorted(row["name"] for row in lab.listed()) == ["w1", "w2"]


def test_without_a_configuration_it_waits_names_the_file_and_writes_none(lab):
    lab.start_server()
    path = lab.folder / "late.toml"
    worker = lab.start("kueue.worker.main", "-c", str(path), "--name", "late", log="late")
    lab.until(lambda: f"{path} does not exist" in lab.log("late"), "it names the file", process=worker)
    assert not path.exists()
    lab.config("late")
    lab.until(lambda: lab.worker("late").get("state") == "online", "it comes up", process=worker)


def test_a_worker_whose_runner_cannot_be_written_says_so_and_goes_on_until_it_can(lab):
    lab.start_server()
    worker = lab.start_worker()
    worker.terminate()
    assert worker.wait(15) == 0
    (path,) = (lab.folder / "state/workers/w1").glob("runner-*.pyz")
    path.unlink()
    path.mkdir()  # like a disk that takes no new file
    lab.start_worker()
    assert f"{path} cannot be written: Is a directory. The runner of the jobs starts from there" in lab.log("w1")
    job = lab.submit("true")
    lab.until(lambda: "cannot be written" in lab.kueue("explain", str(job)).stdout, "it says why the job waits")
    path.rmdir()
    ends(lab, job)
    assert "Traceback" not in lab.log("w1")


def test_a_wrong_secret_is_said_in_one_line_and_the_worker_is_not_listed(lab):
    lab.start_server()
    path = lab.config("wrong", common_settings={"shared_secret": "some other secret, quite long"})
    lab.start("kueue.worker.main", "-c", str(path), "--name", "wrong", log="wrong")
    lab.until(lambda: lab.log("wrong").count("Authentication failed!") >= 2, "it says so at each try")
    assert "Traceback" not in lab.log("wrong")
    assert lab.worker("wrong") == {}
    pauses = [float(found) for found in re.findall(r"next try in ([\d.]+) s", lab.log("wrong"))]
    assert pauses[1] > pauses[0]


def test_a_worker_bound_to_one_cpu_offers_one_and_a_setting_wins(lab):
    lab.start_server()
    one = str(min(os.sched_getaffinity(0)))
    path = lab.config("bound", worker_settings={"cores": 0})
    process = subprocess.Popen(
        ["taskset", "-c", one, sys.executable, "-m", "kueue.worker.main", "-c", str(path), "--name", "bound"],
        env=lab.environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    lab.processes.append(process)
    lab.until(lambda: lab.worker("bound").get("state") == "online", "it is online", process=process)
    assert lab.worker("bound")["cores"] == 1
    lab.start_worker("w2", cores=5)
    assert lab.worker("w2")["cores"] == 5


def test_a_hangup_reads_the_limits_again(lab):
    lab.start_server()
    worker = lab.start_worker("w1", worker_max_parallel_jobs=3)
    assert lab.worker("w1")["slots"] == 3
    lab.config("w1", worker_settings={"worker_name": "w1", "worker_max_parallel_jobs": 7})
    worker.send_signal(signal.SIGHUP)
    lab.until(lambda: lab.worker("w1")["slots"] == 7, "the new limit is known", process=worker)
    (lab.folder / "w1.toml").write_text("[worker_settings]\nworker_max_parallel_jobs = 'many'\n")
    worker.send_signal(signal.SIGHUP)
    lab.until(lambda: "stays as it was" in lab.log("w1"), "a broken file changes nothing", process=worker)
    assert lab.worker("w1")["slots"] == 7


def test_help_and_version_are_quick_and_need_nothing():
    for option in ("--help", "-V"):
        done = subprocess.run(
            [sys.executable, "-m", "kueue.worker.main", option], capture_output=True, text=True, check=True
        )
        assert "kueue_worker" in done.stdout


# --- surviving -------------------------------------------------------------------------------------------------------


def test_an_orderly_stop_leaves_the_job_running_and_its_end_is_told_by_the_next_worker(lab, tmp_path):
    lab.start_server()
    worker = lab.start_worker("w1")
    fifo = tmp_path / "go"
    os.mkfifo(fifo)
    job = lab.submit(*SMALL, "sh", "-c", f"echo begin; read x < {fifo}; echo once >> {tmp_path}/count; exit 7")
    lab.until(lambda: lab.job(job)["state"] == "running", "it runs")
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(10) == 0
    subprocess.run(["sh", "-c", f"echo > {fifo}"], check=True, timeout=20)
    lab.until((tmp_path / "count").exists, "the job went on")
    lab.start_worker("w1")
    assert ends(lab, job, "failed")["return_code"] == 7
    assert (tmp_path / "count").read_text() == "once\n"
    assert "begin" in stdout(lab, job)


def test_a_killed_worker_is_brought_back_by_its_runner_and_the_job_never_stops(lab, tmp_path):
    lab.start_server()
    worker = lab.start_worker("w1")
    fifo = tmp_path / "go"
    os.mkfifo(fifo)
    job = lab.submit(*SMALL, "sh", "-c", f"echo $$; read x < {fifo}; echo done")
    lab.until(lambda: lab.job(job)["state"] == "running", "it runs")
    worker.kill()
    worker.wait()
    lab.until(lambda: lab.worker("w1").get("state") == "online", "the worker is back", seconds=20)
    subprocess.run(["sh", "-c", f"echo > {fifo}"], check=True, timeout=20)
    found = ends(lab, job)
    assert len([one for one in found["attempts"] if one["number"]]) == 1


def test_a_silent_connection_is_given_up_and_made_anew(lab):
    """As when a firewall forgets it: nothing is closed, nothing arrives."""
    lab.start_server(server_settings=MORTAL)
    with Relay(lab.port) as relay:
        path = lab.config("far", common_settings={"server_port": relay.port}, worker_settings={"worker_name": "far"})
        far = lab.start("kueue.worker.main", "-c", str(path), log="far")
        # The server knows it a moment before it has the welcome, for which it waits longer.
        lab.until(lambda: "taken in by the server" in lab.log("far"), "it is taken in", process=far)
        relay.freeze()
        lab.until(lambda: relay.accepted >= 2, "it connects anew", seconds=12, process=far)
        job = lab.submit(*SMALL, "true")
        ends(lab, job, seconds=20)


@pytest.mark.slow
def test_jobs_pause_while_the_server_does_not_answer_and_go_on_with_it(lab):
    server = lab.start_server(server_settings=MORTAL)
    lab.start_worker("w1")
    mark = str(1000 + os.getpid() / 1e6)
    rerun = lab.submit(*SMALL, "sleep", mark)
    stays = lab.submit(*SMALL, "--on-lost", "wait", "sleep", mark + "1")
    lab.until(lambda: processes_of(mark) and processes_of(mark + "1"), "both run")
    (first,), (second,) = processes_of(mark), processes_of(mark + "1")
    try:
        server.send_signal(signal.SIGSTOP)
        lab.until(lambda: stopped_state(first) == "T", "the job that may be given away is paused", seconds=15)
        assert stopped_state(second) == "S"
    finally:
        server.send_signal(signal.SIGCONT)
    lab.until(lambda: stopped_state(first) == "S", "it continues", seconds=20)
    assert lab.job(rerun)["state"] == lab.job(stays)["state"] == "running"
    assert lab.kueue("remove-job", "--kill", str(rerun), str(stays)).returncode == 0
    lab.until(lambda: not processes_of(mark) and not processes_of(mark + "1"), "both are gone")


@pytest.mark.slow
def test_a_job_of_a_runner_that_hangs_is_stopped_before_it_runs_elsewhere(lab):
    lab.start_server(server_settings=MORTAL)
    worker = lab.start_worker("w1")
    mark = str(3000 + os.getpid() / 1e6)
    job = lab.submit(*SMALL, "sleep", mark)
    lab.until(lambda: processes_of(mark), "it runs")
    (first,) = processes_of(mark)
    hung = lab.runners()
    for pid in hung:
        os.kill(pid, signal.SIGSTOP)
    worker.kill()
    worker.wait()
    try:
        lab.start_worker("w1")
        lab.until(lambda: len(processes_of(mark)) == 2 or stopped_state(first) == "T", "one or the other", seconds=30)
        assert stopped_state(first) == "T"
        lab.until(lambda: len(processes_of(mark)) == 2, "it runs anew under another runner", seconds=40)
        assert stopped_state(first) == "T"
    finally:
        for pid in hung:
            os.kill(pid, signal.SIGCONT)
    lab.until(lambda: first not in processes_of(mark), "the attempt that was given away is killed")
    assert lab.job(job)["state"] == "running"
    assert lab.kueue("remove-job", "--kill", str(job)).returncode == 0


@pytest.mark.slow
def test_a_runner_that_hangs_is_told_of_and_the_worker_gets_jobs_all_the_same(lab, tmp_path):
    lab.start_server(server_settings={**MORTAL, "job_offer_timeout_seconds": 30})
    lab.start_worker("w1")
    first = lab.submit(*SMALL, "sh", "-c", f"until [ -e {tmp_path}/go ]; do sleep 0.1; done; exit 4")
    lab.until(lambda: lab.job(first)["state"] == "running", "it runs")
    hung = lab.runners()
    for pid in hung:
        os.kill(pid, signal.SIGSTOP)
    try:
        second = lab.submit(*SMALL, "true")
        for job in (first, second):
            lab.until(lambda job=job: lab.job(job)["note"] == "its runner does not answer", "it is told", seconds=40)
        lab.until(lambda: "does not answer" in str(lab.worker("w1").get("note")), "it is told of the worker")
        ends(lab, lab.submit(*SMALL, "true"))
        assert "`kill -CONT" in lab.log("w1")
        (tmp_path / "go").touch()
    finally:
        for pid in hung:
            os.kill(pid, signal.SIGCONT)
    assert ends(lab, first, "failed")["return_code"] == 4
    assert [one["number"] for one in ends(lab, second)["attempts"]] == [1]
    lab.until(lambda: lab.worker("w1").get("note") == "", "nothing hinders the worker")


@pytest.mark.slow
def test_on_the_servers_own_host_jobs_run_on_while_there_is_no_server(lab):
    lab.start_server(server_settings=MORTAL)
    lab.start_worker("w1")
    mark = str(2000 + os.getpid() / 1e6)
    job = lab.submit(*SMALL, "sleep", mark)
    lab.until(lambda: processes_of(mark), "it runs")
    (pid,) = processes_of(mark)
    lab.server.send_signal(signal.SIGTERM)
    lab.server.wait(20)
    until = time.monotonic() + 14  # past the lease of 8 s, the guard and the time-out
    while time.monotonic() < until:
        assert stopped_state(pid) == "S"
        time.sleep(0.1)
    lab.start_server()
    lab.until(lambda: lab.worker("w1").get("state") == "online", "the worker is back")
    assert lab.job(job)["state"] == "running"
    assert lab.kueue("remove-job", "--kill", str(job)).returncode == 0


def test_identity_and_state_are_private(calm):
    folder = calm.folder / "state/workers/w1"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "identity").stat().st_mode) == 0o600


def test_exit_codes_of_what_it_starts_count_where_whoever_started_it_ignores_the_end_of_children(lab):
    """Of a runner that cannot start it would be told that all is well."""
    path = lab.config(worker_settings={"worker_name": "w1"})
    words = [*DEAF, lab.python, "-m", "kueue.worker.main", "-c", str(path)]
    with open(lab.folder / "w1.log", "ab") as stream:
        worker = subprocess.Popen(words, stderr=stream, env=lab.environment(), start_new_session=True)
    lab.processes.append(worker)
    lab.until(lambda: "Cannot connect" in lab.log("w1"), "it works", process=worker)
    ignored = re.search(r"^SigIgn:\s*(\w+)$", Path(f"/proc/{worker.pid}/status").read_text(), re.MULTILINE)
    assert ignored is not None
    assert not int(ignored[1], 16) >> signal.SIGCHLD - 1 & 1


class Relay:
    """A TCP relay that can stop forwarding what it carries, without closing; later connections work."""

    def __init__(self, target):
        self.target = target
        self.accepted = 0
        self._frozen = threading.Event()
        self._sockets = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def freeze(self):
        self._frozen.set()
        self._frozen = threading.Event()
        self.accepted = 1

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.accepted += 1
                far = socket.create_connection(("127.0.0.1", self.target))
                self._sockets += [near, far]
                for one, other in ((near, far), (far, near)):
                    thread = threading.Thread(target=self._carry, args=(one, other, self._frozen), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _carry(self, one, other, frozen):
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                if frozen.is_set():
                    return
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(10)
