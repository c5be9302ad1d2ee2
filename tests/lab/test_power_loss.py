"""A host loses its power: no word is said, no process is left, and its next boot is another one."""

from __future__ import annotations

import time

import pytest

from tests.support.kill_lab import FLOCK_PROBE, MORTAL
from tests.support.network_lab import Network, NetworkLab, need_network

T = 10.0
SCRIPT = f"{FLOCK_PROBE}; echo $KUEUE_ATTEMPT $KUEUE_WORKER >> begun; while [ ! -e go ]; do sleep 0.1; done"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def lab(tmp_path):
    need_network()
    network = Network()
    try:
        with NetworkLab(tmp_path, network) as lab:
            yield lab
    finally:
        network.close()


def test_a_job_of_a_host_that_booted_anew_runs_again_at_once(lab):
    """The new boot proves that nothing of the old one runs: nobody has to wait for a time-out."""
    lab.start_server(server_settings={"worker_timeout_seconds": 300})
    lab.start_worker("w1")
    job = lab.shell(SCRIPT)
    lab.until(lambda: lab.lines("begun"), "it runs")
    lab.jobs_on["w1"] = lab.processes_of(job)
    lab.lose_power("w1")
    assert lab.state(job) == "running", "nobody can know yet"
    begin = time.monotonic()
    lab.start_worker("w1")
    lab.until(lambda: lab.lines("begun") == ["1 w1", "2 w1"], "it runs again", seconds=20)
    took = time.monotonic() - begin
    (lab.folder / "go").touch()
    lab.until_state(job, "succeeded")
    assert lab.numbers_of(job) == [1, 2]
    assert lab.lines("twice") == []
    lab.no_traceback()
    print(f"\nattempt 2 ran {took:.1f} s after the start of the worker, worker_timeout_seconds = 300")


def test_a_job_of_a_host_without_power_runs_elsewhere_after_the_time_out(lab):
    lab.start_server(server_settings=MORTAL)
    lab.start_worker("w1")
    job = lab.shell(SCRIPT)
    lab.until(lambda: lab.lines("begun"), "it runs")
    lab.jobs_on["w1"] = lab.processes_of(job)
    lab.start_worker("w2")
    begin = time.monotonic()
    lab.lose_power("w1")
    lab.until(lambda: lab.lines("begun") == ["1 w1", "2 w2"], "it runs elsewhere", seconds=30)
    assert time.monotonic() - begin > T - 2
    lab.start_worker("w1")
    (lab.folder / "go").touch()
    lab.until_state(job, "succeeded")
    assert lab.numbers_of(job) == [1, 2]
    assert lab.lines("twice") == []
    lab.no_traceback()


def test_a_server_that_lost_its_power_comes_back_with_all_it_acknowledged_and_the_jobs_go_on(lab):
    lab.start_server(server_settings={"worker_timeout_seconds": 60})
    lab.start_worker("w1")
    job = lab.shell(SCRIPT)
    lab.until(lambda: lab.lines("begun"), "it runs")
    held = lab.quick(lab.range_of("true", held=True, count=50))
    lab.lose_power("srv")
    lab.start_server()
    # No end of the connection was ever said: the worker finds out by its heartbeats.
    lab.until_online("w1", 60)
    assert [row["id"] for row in lab.rows()] == [job, *held]
    (lab.folder / "go").touch()
    lab.until_state(job, "succeeded")
    assert lab.numbers_of(job) == [1]
    assert lab.lines("begun") == ["1 w1"]
    lab.no_traceback()
