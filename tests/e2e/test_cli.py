"""The command against a real server and a real worker, started with ``kueue up`` on loopback."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kueue import places
from kueue.core.facts import Aggregates
from kueue.storage import cut

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


class Lab:
    """A configuration with server and worker of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.work = directory / "work"
        self.work.mkdir()
        self.state = directory / "state"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.config = directory / "config.toml"
        self.config.write_text(
            f"""
[common_settings]
shared_secret = "a secret for these tests alone"
server_port = {self.port}
[server_settings]
bind_addresses = "127.0.0.1"
[worker_settings]
dynamic_check_free_resources = false
worker_name = "here"
cores = 16
ram_mb = 64000
worker_max_parallel_jobs = 16
kill_grace_seconds = 1
[client_settings]
job_default_cpus = 1
job_default_ram_mb = 10
[global_resources]
genus = 1
"""
        )
        self.config.chmod(0o600)

    def environment(self, **more: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("KUEUE", "COLUMNS"))}
        return {
            **kept,
            "PYTHONPATH": str(ROOT),
            "KUEUE_CONFIG": str(self.config),
            "KUEUE_STATE_DIR": str(self.state),
            **more,
        }

    def start(self, *words: str, env: dict[str, str] | None = None, **more) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "kueue.cli.main", *words],
            env=self.environment(**(env or {})),
            **{
                "stdin": subprocess.DEVNULL,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                "cwd": self.work,
                **more,
            },
        )

    def run(self, *words: str, **more) -> tuple[int, str, str]:
        with self.start(*words, **more) as process:
            try:
                out, err = process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
            return process.returncode, out.decode("utf-8", "surrogateescape"), err.decode()

    def ok(self, *words: str, **more) -> str:
        code, out, err = self.run(*words, **more)
        assert code == 0, (out, err)
        return out

    def submit(self, *words: str, **more) -> str:
        return self.ok("cmd", *words, **more).strip()

    def state_of(self, job: str) -> str:
        return self.ok("show-job", job).partition("job status: ")[2].splitlines()[0]

    @property
    def server_lock(self) -> str:
        return places.Places(str(self.state)).server_lock


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)
    return found


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    made = Lab(tmp_path_factory.mktemp("lab"))
    made.ok("up")
    yield made
    jobs = made.ok("list-jobs", "-q", "-p", "-o", "-r", "--held", "-n", "999999").split()
    if jobs:
        made.run("remove-job", "--kill", *jobs)
    made.ok("down")
    assert not places.is_locked(made.server_lock)
    _end(made)


def _end(lab: Lab) -> None:
    # The runner would leave by itself after some seconds, as it has neither jobs nor a worker.
    for pid in _processes_of(lab):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not _processes_of(lab))


def _processes_of(lab: Lab) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if str(lab.state).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def test_up_says_what_runs_already(lab):
    out = lab.ok("up")
    assert "The server runs already (pid " in out
    assert "The worker runs already (pid " in out


def test_up_says_at_once_that_the_worker_has_an_old_secret(tmp_path):
    lab = Lab(tmp_path)
    try:
        lab.ok("up")
        server, worker = (
            int(Path(place).read_text().split()[0])
            for place in (lab.server_lock, f"{places.Places(str(lab.state)).worker('here')}/lock")
        )
        os.kill(server, signal.SIGKILL)
        lab.config.write_text(lab.config.read_text().replace("for these tests alone", "that is quite a new one"))
        begun = time.monotonic()
        code, _, err = lab.run("up")
        assert (code, time.monotonic() - begun < 30) == (1, True), err
        assert f"The worker that runs here (pid {worker}) was started with another secret" in err
        assert f"kill -HUP {worker}" in err
        os.kill(worker, signal.SIGHUP)
        lab.ok("up")
        lab.ok("down")
    finally:
        _end(lab)


def test_up_says_once_where_to_read_what_the_server_has_lost(tmp_path):
    lab = Lab(tmp_path)
    try:
        lab.ok("up")
        assert lab.ok("cmd", "-q", "--hold", "true") == "0\n"
        lab.ok("down")
        cut.write(Path(lab.state, "server", "queue.sqlite"), cut.Note(is_log=True, sums=Aggregates(next_job=20)))
        code, _, err = lab.run("up")
        log = Path(lab.state, "server", "server.log")
        assert (code, f"See {log}." in err) == (0, True), err
        assert "Numbers go on at job 20" in log.read_text()
        assert lab.ok("cmd", "-q", "--hold", "true") == "20\n"
        lab.ok("down")
        assert lab.run("up")[2] == ""
        lab.ok("down")
    finally:
        _end(lab)


def test_a_job_gives_its_id_its_code_and_its_output(lab):
    job = lab.submit("sh", "-c", "echo out; echo err >&2; exit 3")
    assert job.isdigit()
    assert lab.run("wait-job", "-q", job) == (3, "", "")
    assert lab.run("wait-job", job)[2].startswith(f"Job {job} exited with code 3. ")
    shown = lab.ok("show-job", job)
    assert "=== stdout ===\nout\n" in shown
    assert "=== stderr ===\nerr\n" in shown
    assert "job status: failed\n" in shown
    assert lab.run("cmd", "--wait", "-q", "sh", "-c", "exit 3") == (3, "3\n", "")


@pytest.mark.parametrize(
    ("command", "code", "printed"),
    [
        (["true"], 0, "0\n"),
        (["sh", "-c", "exit 255"], 255, "255\n"),
        (["sh", "-c", "kill -9 $$"], 137, "-44\n"),
        (["/no/such"], 127, "-43\n"),
        (["/etc/passwd"], 126, "-43\n"),
        (["cat"], 0, "0\n"),
    ],
)
def test_the_code_of_a_waited_job_is_the_commands_own(lab, command, code, printed):
    assert lab.run("cmd", "--wait", "--", *command)[:2] == (code, printed)


def test_a_job_over_its_time_is_stopped_and_ends_with_124(lab):
    assert lab.run("cmd", "--wait", "--timeout", "1", "sleep", "600")[:2] == (124, "-48\n")


def test_arguments_reach_the_job_without_a_shell_and_without_loss(lab):
    odd = os.fsdecode(b"\xff\xfe")
    job = lab.submit("printf", "%s|", "$HOME", "*", "Grüße ☃", odd, "--wait", "", "a b")
    lab.run("wait-job", job)
    assert lab.ok("log", "--raw", job) == f"$HOME|*|Grüße ☃|{odd}|--wait||a b|"


def test_120000_letters_in_one_argument_arrive(lab):
    job = lab.submit("echo", "x" * 120_000)
    lab.run("wait-job", job)
    assert lab.ok("log", job) == "x" * 120_000 + "\n"


def test_two_megabytes_of_arguments_are_refused_and_the_server_lives(lab):
    lines = lab.work / "huge"
    lines.write_text("y" * 3_000_000)
    code, _, err = lab.run("cmd", "--each-line", str(lines))
    assert code == 1
    assert "MAX_ARG_STRLEN" in err
    assert lab.run("list-jobs")[0] == 0


def test_directory_variables_and_umask_of_the_submitter_travel(lab):
    real, link = lab.work / "real", lab.work / "link"
    real.mkdir()
    link.symlink_to(real)
    script = 'echo "$PWD"; pwd -P; echo "$COLOUR $COPIED"; umask; printenv HOME; env | grep -c KUEUE_SECRET'
    job = lab.submit(
        "--env",
        "COLOUR=red",
        "--env",
        "COPIED",
        "sh",
        "-c",
        script,
        cwd=link,
        env={"PWD": str(link), "COPIED": "yes", "HOME": "/home/somebody"},
        umask=0o027,
    )
    lab.run("wait-job", job)
    assert lab.ok("log", job).split("\n") == [str(link), str(real), "red yes", "0027", "/home/somebody", "0", ""]


def test_output_files_lie_in_the_submit_directory_and_null_is_no_file(lab):
    job = lab.submit("-o", "out.txt", "-e", " NULL ", "sh", "-c", "echo a; echo b >&2")
    lab.run("wait-job", job)
    assert (lab.work / "out.txt").read_text() == "a\n"
    assert not [path for path in lab.work.iterdir() if path.name.strip().lower() == "null"]
    shown = lab.ok("show-job", job)
    assert f"Redirected to {lab.work / 'out.txt'}" in shown
    assert "=== stderr ===" not in shown


def test_each_line_of_a_file_becomes_a_job(lab):
    lines = lab.work / "lines"
    lines.write_text("0\n3\n\n1\n")
    code, out, _ = lab.run("cmd", "--wait", "--each-line", str(lines), "sh", "-c", "exit {}")
    assert code == 3
    assert sorted(line.split()[1] for line in out.splitlines()) == ["0", "1", "3"]
    ids = [int(line.split()[0]) for line in out.splitlines()]
    assert sorted(ids) == list(range(min(ids), min(ids) + 3))


def test_follow_streams_while_the_job_runs_and_ends_with_its_code(lab):
    gate = lab.work / "gate"
    script = f"echo one; while [ ! -e {gate} ]; do sleep 0.05; done; echo two; echo err >&2; exit 5"
    job = lab.submit("--hold", "sh", "-c", script)
    with lab.start("follow", job) as process:
        lab.ok("release", job)
        assert process.stdout.readline() == b"one\n"
        gate.touch()
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (5, b"two\n")
    assert b"err\n" in err
    code, out, _ = lab.run("follow", job)
    assert (code, out) == (5, "one\ntwo\n")
    assert lab.run("follow", "999999")[:2] == (1, "")


def test_output_that_is_not_utf8_is_shown_with_a_replacement_sign_and_kept_as_it_is(lab):
    job = lab.submit("printf", r"ok\377ok\n")
    lab.run("wait-job", job)
    assert "ok\ufffdok\n" in lab.ok("show-job", job)
    assert lab.ok("log", "--raw", job).encode("utf-8", "surrogateescape") == b"ok\xffok\n"


def test_running_jobs_are_protected_and_kill_ends_them(lab):
    job = lab.submit("sh", "-c", "sleep 600 & wait")
    wait_until(lambda: lab.state_of(job) == "running")
    code, out, err = lab.run("remove-job", job)
    assert (code, out, err.splitlines()[0]) == (1, "", f"Job ID={job} has already started!")
    with lab.start("wait-job", job) as waiter:
        assert lab.run("remove-job", "--kill", job)[:2] == (0, f"Canceled job ID={job}!\n")
        assert waiter.wait(60) == 130
    assert lab.state_of(job) == "canceled"
    assert lab.run("remove-job", job)[:2] == (1, "")


def test_an_interrupted_waiter_leaves_the_job_running(lab):
    job = lab.submit("sleep", "600")
    with lab.start("wait-job", job) as waiter:
        wait_until(lambda: lab.state_of(job) == "running")
        # The handler stands once the question is out; before that the interrupt is only earlier.
        waiter.send_signal(signal.SIGINT)
        assert waiter.wait(60) == -signal.SIGINT
    assert lab.state_of(job) == "running"
    lab.ok("remove-job", "--kill", job)


def test_a_held_job_waits_says_so_and_starts_when_released(lab):
    job = lab.submit("--hold", "--name", "nap", "true")
    assert "pending (held)" in lab.ok("list-jobs", "--held")
    assert "[nap] true" in lab.ok("list-jobs", job)
    assert lab.run("explain", job)[0] == 0
    assert lab.run("release", job)[0] == 0
    assert lab.run("wait-job", job)[0] == 0


def test_a_job_that_waits_for_a_licence_explains_it(lab):
    first = lab.submit("--resource", "genus", "sleep", "600")
    wait_until(lambda: lab.state_of(first) == "running")
    second = lab.submit("--resource", "genus", "true")
    assert "genus" in lab.ok("explain", second)
    assert "| genus    |    1 |     1 |" in lab.ok("list-resources")
    lab.ok("remove-job", "--kill", first)
    assert lab.run("wait-job", second)[0] == 0
    code, _, err = lab.run("cmd", "--resource", "genus=4", "true")
    assert code == 1
    assert "Job rejected by server: Required resource exceeds limits configured on the server: max. genus=1" in err


def test_an_offline_worker_gets_no_jobs_until_it_is_online_again(lab):
    assert lab.run("node", "offline", "here")[0] == 0
    try:
        job = lab.submit("true")
        assert "here (offline" in lab.ok("list-workers")
        assert lab.state_of(job).startswith("pending")
    finally:
        assert lab.run("node", "online", "here")[0] == 0
    assert lab.run("wait-job", job)[0] == 0
    assert lab.run("node", "offline", "nobody")[0] == 1


def test_what_does_not_exist_is_told_on_stderr_with_code_1(lab):
    for words in (["show-job"], ["remove-job"], ["wait-job"], ["log"], ["hold"], ["explain"], ["show-worker"]):
        code, out, err = lab.run(*words, "999999")
        assert (code, out) == (1, ""), words
        assert "not found" in err, words


def test_a_waiter_sees_the_end_across_a_kill_of_the_server(lab):
    gate = lab.work / "second-gate"
    job = lab.submit("sh", "-c", f"while [ ! -e {gate} ]; do sleep 0.05; done; exit 6")
    wait_until(lambda: lab.state_of(job) == "running")
    with lab.start("wait-job", job) as waiter:
        os.kill(places.holder(lab.server_lock), signal.SIGKILL)
        wait_until(lambda: not places.is_locked(lab.server_lock))
        gate.touch()
        lab.ok("up")
        _, err = waiter.communicate(timeout=60)
    assert waiter.returncode == 6
    assert err.count(b"Waiting for the server") <= 1


def test_running_jobs_go_on_over_down_and_up(lab):
    gate = lab.work / "third-gate"
    job = lab.submit("sh", "-c", f"while [ ! -e {gate} ]; do sleep 0.05; done; echo survived")
    wait_until(lambda: lab.state_of(job) == "running")
    out = lab.ok("down")
    assert "Stopped the server" in out
    assert "Stopped the worker" in out
    assert "Neither a server nor a worker" in lab.ok("down")
    lab.ok("up")
    assert lab.state_of(job) == "running"
    gate.touch()
    assert lab.run("wait-job", job)[0] == 0
    assert lab.ok("log", job) == "survived\n"


@pytest.mark.parametrize("is_replaced", [False, True])
def test_up_and_down_find_a_server_whose_lock_was_removed(lab, is_replaced):
    job = lab.submit("--hold", "true")
    pid = places.holder(lab.server_lock)

    def remove() -> None:
        os.unlink(lab.server_lock)
        if is_replaced:
            Path(lab.server_lock).touch()

    remove()
    assert f"The server runs already (pid {pid})" in lab.ok("up")
    assert places.holder(lab.server_lock) == pid
    remove()
    assert f"The server (pid {pid}) reads its settings again" in lab.ok("secret", "reload")
    remove()
    assert f"Stopped the server (pid {pid})" in lab.ok("down")
    assert "Started the server" in lab.ok("up")
    assert lab.state_of(job) == "pending (held)"
    lab.ok("remove-job", job)


def test_down_stops_the_worker_also_if_the_server_hangs_without_its_lock(lab):
    server = places.holder(lab.server_lock)
    worker_lock = f"{places.Places(str(lab.state)).worker('here')}/lock"
    os.kill(server, signal.SIGSTOP)
    try:
        os.unlink(lab.server_lock)
        code, out, err = lab.run("down")
        assert code == 1
        assert "Stopped the worker" in out
        assert "A server runs that does not answer" in err
        assert not places.is_locked(worker_lock)
    finally:
        os.kill(server, signal.SIGCONT)
    lab.ok("up")


def test_a_server_whose_lock_cannot_be_put_back_is_named_and_not_passed_over(lab):
    server = places.holder(lab.server_lock)
    os.unlink(lab.server_lock)
    try:
        Path(lab.server_lock, "x").mkdir(parents=True)
        for verb in ("up", "down"):
            code, _, err = lab.run(verb)
            assert (code, "A server runs that cannot put its lock" in err) == (1, True), err
        assert f"pid {server}" in lab.ok("version")
    finally:
        shutil.rmtree(lab.server_lock)
    lab.ok("up")
    assert places.holder(lab.server_lock) == server


def test_waiters_that_are_killed_leave_a_server_that_answers(lab):
    job = lab.submit("--hold", "true")
    waiters = [lab.start("wait-job", job, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(12)]
    for waiter in waiters:
        waiter.kill()
        waiter.wait(60)
    pid = places.holder(lab.server_lock)
    begin = _cpu_ticks(pid)
    assert lab.run("list-jobs")[0] == 0
    lab.ok("remove-job", job)
    # A connection that stays in the poll list would burn a core from now on.
    before = time.monotonic()
    wait_until(lambda: time.monotonic() - before > 1)
    assert _cpu_ticks(pid) - begin < 60
    assert lab.run("list-workers")[0] == 0


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_odd_pairs_of_commands_at_once_are_all_answered(lab):
    job = lab.submit("sleep", "600")
    wait_until(lambda: lab.state_of(job) == "running")
    words = [
        ["remove-job", "--kill", job],
        ["remove-job", job],
        ["clean-jobs", "--all"],
        ["hold", job],
        ["show-job", job],
    ]
    running = [lab.start(*one) for one in words * 2]
    for process in running:
        out, err = process.communicate(timeout=60)
        assert process.returncode in {0, 1}
        assert out or err
        assert b"Traceback" not in err
    assert lab.run("list-jobs")[0] == 0


def test_without_the_local_socket_the_same_is_said_over_tls(lab):
    env = {"KUEUE_STATE_DIR": str(lab.directory / "elsewhere")}
    job = lab.submit("echo", "over tls", env=env)
    assert lab.run("wait-job", job, env=env)[0] == 0
    assert lab.ok("log", job, env=env) == "over tls\n"


def test_another_secret_is_refused(lab, tmp_path):
    other = tmp_path / "other.toml"
    other.write_text(lab.config.read_text().replace("these tests", "somebody else"))
    other.chmod(0o600)
    code, out, err = lab.run("-c", str(other), "cmd", "true")
    assert (code, out) == (1, "")
    assert "Authentication failed!" in err
