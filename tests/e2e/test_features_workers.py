"""How jobs are spread over workers: who gets which, how many at once, and what happens when one says no."""

from __future__ import annotations

import time

import pytest

from kueue.core.chaining import SHORT_SECONDS
from kueue.model import MachineLoad
from kueue.protocol import messages as m
from tests.support.feature_lab import SMALL, FeatureLab


@pytest.fixture
def lab(tmp_path):
    with FeatureLab(tmp_path) as lab:
        yield lab


def test_a_job_runs_only_where_its_directory_is_seen(lab, tmp_path):
    lab.start_server()
    lab.start_worker("sees")
    folder = tmp_path / "data"
    folder.mkdir()
    gate = lab.gate()
    lab.submit("-c", "8", "-r", "1", *gate.command, cwd=tmp_path)
    lab.until(lambda: gate.begun, "it is half full")
    with lab.peer("blind") as blind:  # the less busy one: it is asked first
        job = lab.submit(*SMALL, "pwd", cwd=folder)
        offer = blind.hear_a(m.Offer)
        blind.say(m.OfferRejected(offer=offer.offer, reason=f"the directory {folder} is not there"))
        assert lab.end_of(job)["worker"] == "sees"
        # It is not asked again for that directory, but it is for others.
        assert lab.run(*SMALL, "pwd", cwd=folder)["worker"] == "sees"
        lab.submit(*SMALL, "pwd", cwd=tmp_path)
        assert blind.hear_a(m.Offer).place.cwd == str(tmp_path)
    assert lab.output(job) == f"{folder}\n"


def test_a_job_whose_directory_nobody_sees_waits_says_so_and_starts_when_it_appears(lab, tmp_path):
    lab.start_server()
    lab.start_worker("w1")
    folder = tmp_path / "late"
    folder.mkdir()
    job = lab.submit(*SMALL, "--hold", "pwd", cwd=folder)
    folder.rmdir()
    assert lab.kueue("release", str(job)).returncode == 0
    lab.until(
        lambda: str(folder) in lab.kueue("list-jobs", str(job)).stdout.partition("pending since")[2], "the reason"
    )
    assert str(folder) in lab.kueue("explain", str(job)).stdout
    folder.mkdir()
    lab.end_of(job, seconds=10)
    assert lab.output(job) == f"{folder}\n"


def test_long_jobs_are_shared_out_and_nothing_is_offered_ahead(lab):
    lab.start_server()
    for name in ("w1", "w2"):
        lab.start_worker(name, cores=2)
    gate = lab.gate()
    done = lab.kueue(
        "cmd", *SMALL, "--each-line", "-", *gate.command[:2], f"true {{}}; {gate.command[2]}", stdin="\n".join("x" * 20)
    )
    assert done.returncode == 0, done.stderr
    jobs = sorted(row["id"] for row in lab.rows())
    worked = set()

    def nothing_is_ahead():
        on_each = [len(one["running"]) + len(one["offered"]) for one in lab.machines().values()]
        return len(lab.rows("running", "offered")) <= 4 and max(on_each) <= 2

    for rounds in range(5):
        lab.until(lambda: len(gate.begun) == 4 * (rounds + 1), "two run on each worker")  # noqa: B023 - called at once
        # Twice as long as what counts as short: those behind would be offered ahead.
        lab.remains(nothing_is_ahead, 2 * SHORT_SECONDS)
        worked |= {row["worker"] for row in lab.rows("running")}
        gate.open()
    for job in jobs:
        assert len(lab.end_of(job)["attempts"]) == 1
    assert worked == {"w1", "w2"}


def test_a_deferred_job_is_offered_elsewhere_at_once(lab):
    lab.start_server()
    with lab.peer("busy", slots=10) as busy:
        job = lab.submit(*SMALL, "true")
        offer = busy.hear_a(m.Offer)
        lab.start_worker("free")
        busy.say(m.OfferDeferred(offer=offer.offer, reason="somebody else computes here", load=MachineLoad()))
        begin = time.monotonic()
        assert lab.end_of(job)["worker"] == "free"
        assert time.monotonic() - begin < 2
        assert lab.job(job)["attempt"] == 1  # an offer that came to nothing is no attempt


def test_the_less_busy_worker_gets_the_job(lab):
    lab.start_server()
    lab.start_worker("w1")
    gate = lab.gate()
    lab.submit("-c", "13", "-r", "1", *gate.command)  # 81 % of it
    lab.until(lambda: gate.begun, "w1 is busy")
    lab.start_worker("w2")
    for _ in range(20):
        assert lab.run(*SMALL, "true")["worker"] == "w2"


def test_a_worker_runs_no_more_jobs_than_it_has_slots(lab):
    lab.start_server()
    lab.start_worker("w1", worker_max_parallel_jobs=2)
    gate = lab.gate()
    for _ in range(5):
        lab.submit("-c", "0", "-r", "0", *gate.command)
    lab.until(lambda: len(gate.begun) == 2, "two run")
    lab.remains(lambda: len(lab.rows("running", "offered")) == 2, 0.5)


def test_all_workers_together_run_no_more_than_the_lab_allows(lab):
    lab.start_server(server_settings={"global_max_parallel_jobs": 3})
    for name in ("w1", "w2"):
        lab.start_worker(name)
    gate = lab.gate()
    jobs = [lab.submit(*SMALL, *gate.command) for _ in range(10)]
    for begun in (3, 6, 9, 10):
        lab.until(lambda: len(gate.begun) == begun, f"{begun} have begun")  # noqa: B023 - called at once
        lab.remains(lambda: len(lab.rows("running", "offered")) <= 3, 2 * SHORT_SECONDS)
        gate.open()
    for job in jobs:
        lab.end_of(job)
    refused = lab.kueue("cmd", "-j", "4", "true")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert (
        "Job requires more slots than the server will allow at once! See global_max_parallel_jobs setting in config."
    ) in refused.stderr


def test_a_worker_taken_out_finishes_its_jobs_and_gets_no_more(lab):
    lab.start_server()
    lab.start_worker("w1")
    gate = lab.gate()
    first = lab.submit(*SMALL, *gate.command)
    lab.until(lambda: gate.begun, "it runs")
    assert lab.kueue("node", "offline", "w1").returncode == 0
    waiting = lab.submit(*SMALL, "true")
    assert "| w1 (offline" in lab.kueue("list-workers").stdout
    gate.open()
    lab.end_of(first)
    lab.remains(lambda: lab.state(waiting) == "pending", 0.3)
    assert "offline" in lab.kueue("explain", str(waiting)).stdout
    assert lab.kueue("node", "online", "w1").returncode == 0
    lab.end_of(waiting)
    unknown = lab.kueue("node", "offline", "nobody")
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert "nobody" in unknown.stderr


def test_a_small_machine_takes_a_job_of_default_size(lab):
    lab.start_server()
    lab.start_worker("small", cores=2, ram_mb=2048)
    job = lab.run("sh", "-c", "echo $KUEUE_CPUS $KUEUE_RAM_MB")
    assert lab.output(job["id"]) == "2 2048\n"
    shown = lab.kueue("show-job", str(job["id"])).stdout
    assert "required CPU cores: 8 (default; took 2)\n" in shown
    assert "required RAM: 8192 megabytes (default; took 2048)\n" in shown
    assert lab.kueue("cmd", "-c", "8", "-r", "1", "true").stderr  # what was typed is exact, and fits nowhere


def test_an_idle_worker_reports_at_its_interval_and_not_all_the_time(lab):
    lab.start_server(common_settings={"log_level": "trace"})
    lab.start_worker("w1", system_update_interval_seconds=1)
    first = lab.machines()["w1"]["updated_wall"]
    seen = {first}
    deadline = time.monotonic() + 2.5
    while time.monotonic() < deadline:
        seen.add(lab.machines()["w1"]["updated_wall"])
        time.sleep(0.02)
    assert 2 <= len(seen) <= 4
