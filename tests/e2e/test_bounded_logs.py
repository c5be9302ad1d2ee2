"""Logs of programs in the background: bounded, whole, and each line once."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kueue import log
from tests.support.lab import Lab


@pytest.fixture
def lab(tmp_path):
    lab = Lab(tmp_path)
    yield lab
    lab.close()


@pytest.mark.slow
def test_what_kueue_up_starts_logs_into_bounded_files_without_doubling(lab):
    lab.config()
    assert lab.kueue("up").returncode == 0
    try:
        logs = {path.name: path for path in (lab.folder / "state").rglob("*.log")}
        assert set(logs) == {"server.log", "worker.log"}
        for path, once in ((logs["server.log"], "listening on"), (logs["worker.log"], "taken in by the server")):
            assert path.read_text().count(once) == 1
            assert path.stat().st_mode & 0o777 == 0o600
    finally:
        assert lab.kueue("down").returncode == 0
    assert "stopping on SIGTERM" in logs["worker.log"].read_text()


def test_a_worker_whose_log_cannot_be_written_works_all_the_same(lab):
    path = lab.config()
    worker = lab.start("kueue.worker.main", "-c", str(path), "--log-file", "/nowhere/worker.log", log="w")
    lab.until(lambda: "Cannot connect" in lab.log("w"), "it works", process=worker)
    assert "no log is written to /nowhere/worker.log" in lab.log("w")
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(30) == 0


@pytest.mark.slow
def test_a_worker_that_is_restarted_by_its_runner_goes_on_in_the_same_log(lab):
    lab.start_server()
    file = lab.folder / "mine.log"
    path = lab.config("w1", worker_settings={**lab.settings["worker_settings"], "worker_name": "w1"})
    worker = lab.start("kueue.worker.main", "-c", str(path), "--log-file", str(file), log="w1")
    lab.until(lambda: lab.worker("w1").get("state") == "online", "online", process=worker)
    lab.submit("sleep", "1000")
    lab.until(lambda: lab.worker("w1").get("jobs_running") or lab.jobs()[0]["state"] == "running", "the job runs")
    worker.kill()
    worker.wait()
    lab.until(lambda: file.read_text().count("taken in by the server") == 2, "the next worker logs there, too")
    assert log.last_words(str(file))


def test_status_tells_the_running_worker_and_stop_ends_it(lab):
    path = lab.config()

    def ask(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "kueue.worker.main", "-c", str(path), *args],
            env=lab.environment(),
            capture_output=True,
            text=True,
            check=False,
        )

    assert ask("--force").returncode == 2
    assert ask("--status", "--stop").returncode == 2
    worker = lab.start("kueue.worker.main", "-c", str(path), log="w")
    lab.until(lambda: ask("--status").returncode == 0, "it runs", process=worker)
    status = ask("--status").stdout
    assert f'"pid": {worker.pid}' in status
    assert '"running_version": "' in status
    stopped = ask("--stop")
    assert stopped.returncode == 0
    assert "Stopped the worker" in stopped.stdout
    assert worker.wait(10) == 0
    assert ask("--status").returncode == 3
    assert "No worker" in ask("--stop").stdout


@pytest.mark.slow
def test_stop_tells_of_a_worker_that_hangs_and_force_kills_it(lab):
    path = lab.config()
    worker = lab.start("kueue.worker.main", "-c", str(path), log="w")
    lab.until(lambda: "Cannot connect" in lab.log("w"), "it works", process=worker)
    os.kill(worker.pid, signal.SIGSTOP)
    command = [sys.executable, "-m", "kueue.worker.main", "-c", str(path), "--stop", "--force"]
    begin = time.monotonic()
    done = subprocess.run(command, env=lab.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "Killed the worker" in done.stdout
    assert time.monotonic() - begin > 15
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker.pid, signal.SIGKILL)
    assert worker.wait(10) == -signal.SIGKILL
    assert Path(f"/proc/{worker.pid}").exists() is False
