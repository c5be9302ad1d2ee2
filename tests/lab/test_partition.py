"""The network is cut in two between real hosts: nothing runs twice at once, and after healing one result stands."""

from __future__ import annotations

import time

import pytest

from tests.support.kill_lab import MORTAL, is_stopped, lives
from tests.support.network_lab import Network, NetworkLab, Timeline, need_network

T = 10.0
TICKING = (
    "echo $KUEUE_ATTEMPT $KUEUE_WORKER $$ >> begun; "
    "while [ ! -e go ]; do echo $KUEUE_ATTEMPT $(date +%s.%N) >> ticks; sleep 0.05; done; "
    "echo $KUEUE_ATTEMPT >> result; exit 0"
)

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


def ticks(lab: NetworkLab, attempt: int) -> list[float]:
    """The moments (wall clock) at which this attempt ran."""
    lines = [line.split() for line in lab.lines("ticks")]
    return [float(words[1]) for words in lines if len(words) == 2 and words[0] == str(attempt)]


def begin(lab: NetworkLab) -> tuple[int, int]:
    """A job that runs on w1, and its main process."""
    lab.start_server(server_settings=MORTAL)
    lab.start_worker("w1")
    job = lab.shell(TICKING)
    lab.until(lambda: len(ticks(lab, 1)) > 3, "it runs")
    return job, int(lab.lines("begun")[0].split()[2])


@pytest.mark.parametrize("heartbeat_phase_seconds", [0.0, 0.9])
def test_a_cut_longer_than_the_time_out_pauses_the_job_before_it_starts_elsewhere(lab, heartbeat_phase_seconds):
    job, main = begin(lab)
    lab.start_worker("w2")
    time.sleep(heartbeat_phase_seconds)  # the cut falls somewhere else between two heartbeats
    line = Timeline()
    lab.network.cut("w1")
    line.note("switch", "w1 is cut off")
    lab.until(lambda: is_stopped(main), "the job is paused on the cut side", seconds=20)
    paused = line.note("w1", "seen paused")
    lab.until(lambda: ticks(lab, 2), "it runs elsewhere", seconds=30)
    assert is_stopped(main)
    first, last = ticks(lab, 2)[0], ticks(lab, 1)[-1]
    line.note("w1", "attempt 1 ran for the last time", last)
    line.note("w2", "attempt 2 began", first)
    line.note("server", f"job {job} is {lab.state(job)} as attempt {lab.numbers_of(job)[-1]}")
    time.sleep(2)
    assert ticks(lab, 1)[-1] == last, "the cut side stays paused while the other runs"
    lab.network.heal("w1")
    healed = line.note("switch", "w1 is back")
    lab.until(lambda: not lives(main), "the stale attempt is gone", seconds=40)
    line.note("w1", "attempt 1 is gone")
    lab.until_online("w1", 40)
    line.note("server", "w1 is online")
    assert ticks(lab, 1)[-1] == last, "it never ran again"
    (lab.folder / "go").touch()
    lab.until_state(job, "succeeded", seconds=20)
    line.note("server", f"job {job} succeeded")
    print(f"\n{line}\n  margin between the last sign of attempt 1 and the first of attempt 2: {first - last:.2f} s")
    assert last < first
    assert paused < first - line.begin
    assert healed > T
    assert lab.lines("result") == ["2"]
    assert [words.split()[:2] for words in lab.lines("begun")] == [["1", "w1"], ["2", "w2"]]
    assert lab.numbers_of(job) == [1, 2]
    # The worker that was cut off is as good as before.
    workers = set()

    def used() -> bool:
        found = lab.shell("true")
        lab.until_state(found, "succeeded")
        workers.add(lab.rows("succeeded")[-1]["worker"])
        return "w1" in workers

    lab.until(used, "w1 gets jobs again", seconds=40)
    lab.no_traceback()


def test_a_cut_that_heals_before_anybody_took_the_job_lets_the_same_attempt_go_on(lab):
    job, main = begin(lab)
    line = Timeline()
    lab.network.cut("w1")
    line.note("switch", "w1 is cut off; there is no other worker")
    lab.until(lambda: is_stopped(main), "it is paused", seconds=20)
    line.note("w1", "seen paused")
    lab.until(lambda: not lab.is_online("w1"), "the server has noticed", seconds=20)
    line.note("server", "w1 is silent")
    lab.remains(lambda: is_stopped(main), 3)
    before = len(ticks(lab, 1))
    lab.network.heal("w1")
    line.note("switch", "w1 is back")
    lab.until(lambda: len(ticks(lab, 1)) > before, "it goes on", seconds=40)
    line.note("w1", "attempt 1 goes on", ticks(lab, 1)[before])
    lab.until(lambda: lab.state(job) == "running", "and the server knows", seconds=20)
    (lab.folder / "go").touch()
    lab.until_state(job, "succeeded", seconds=20)
    print(f"\n{line}")
    assert lab.lines("result") == ["1"]
    assert lab.numbers_of(job) == [1]
    lab.no_traceback()


def test_a_cut_shorter_than_the_lease_is_not_even_noticed_by_the_job(lab):
    job, main = begin(lab)
    lab.start_worker("w2")
    lab.network.cut("w1")
    lab.remains(lambda: not is_stopped(main), 5)
    lab.network.heal("w1")
    lab.remains(lambda: not is_stopped(main), T)
    (lab.folder / "go").touch()
    lab.until_state(job, "succeeded", seconds=20)
    assert lab.lines("result") == ["1"]
    assert lab.numbers_of(job) == [1]


def test_a_job_that_ends_on_the_cut_side_within_the_lease_counts_and_is_not_repeated(lab):
    job, main = begin(lab)
    lab.network.cut("w1")
    (lab.folder / "go").touch()
    lab.until(lambda: not lives(main), "it has ended", seconds=10)
    lab.until(lambda: not lab.is_online("w1"), "the server takes w1 for silent", seconds=20)
    assert lab.state(job) == "pending" or lab.rows("running")
    lab.network.heal("w1")
    lab.until_state(job, "succeeded", seconds=40)
    assert lab.lines("result") == ["1"]
    assert lab.numbers_of(job) == [1]
