"""Licences of the lab and named resources of a machine."""

from __future__ import annotations

import pytest

from tests.support.feature_lab import SMALL, FeatureLab


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with FeatureLab(tmp_path_factory.mktemp("resources")) as lab:
        lab.start_server(global_resources={"genus": 3, "primelib": 31, "Genus": 1})
        lab.start_worker("w1", resources="gpu=2", kill_grace_seconds=2)
        yield lab


@pytest.fixture
def lab(shared):
    yield shared
    shared.settle()


def used(lab):
    return {row["name"]: row["used"] for row in lab.ask("ListResources")["resources"]}


def test_a_licence_is_never_given_more_often_than_there_are(lab):
    gate = lab.gate()
    jobs = [lab.submit(*SMALL, "--resource", "genus", *gate.command) for _ in range(5)]
    lab.until(lambda: len(gate.begun) == 3, "three run")
    for _ in range(100):
        assert lab.states(jobs).count("running") <= 3
        assert used(lab)["genus"] <= 3
    assert lab.states(jobs) == ["running"] * 3 + ["pending"] * 2
    explained = lab.kueue("explain", str(jobs[3])).stdout
    assert "genus" in explained
    assert "3 of 3" in explained
    gate.open()
    lab.until(lambda: len(gate.begun) == 5, "the others follow")
    gate.open()
    for job in jobs:
        lab.end_of(job)
    assert used(lab)["genus"] == 0


def test_several_licences_with_amounts_are_held_while_the_job_runs(lab):
    gate = lab.gate()
    job = lab.submit(*SMALL, "--resource", "genus", "--resource", "primelib=4", *gate.command)
    lab.until(lambda: gate.begun, "it runs")
    shown = lab.kueue("show-job", str(job)).stdout
    assert "\nadditional resources:\n   1x genus\n   4x primelib\n\n" in shown
    assert "| 1x genus, 4x primelib |" in lab.kueue("list-jobs", str(job)).stdout
    assert lab.kueue("list-resources").stdout.splitlines() == [
        "| resource | used | total |",
        "| Genus    |    0 |     1 |",
        "| genus    |    1 |     3 |",
        "| primelib |    4 |    31 |",
    ]
    gate.open()
    lab.end_of(job)
    assert used(lab) == {"genus": 0, "primelib": 0, "Genus": 0}


def test_an_impossible_or_unknown_resource_is_refused_and_takes_no_id(lab):
    first = lab.submit(*SMALL, "true")
    for resource, text in (
        ("genus=4", "Required resource exceeds limits configured on the server: max. genus=3"),
        ("foo", "Required resource not configured on server: foo"),
    ):
        done = lab.kueue("cmd", "--resource", resource, "true")
        assert (done.returncode, done.stdout) == (1, "")
        assert f"Error: Job rejected by server: {text}" in done.stderr
    assert lab.submit(*SMALL, "true") == first + 1


@pytest.mark.parametrize("written", ["a=b=c", "a=x", "a=", "=1", "a=-1"])
def test_a_malformed_resource_is_refused(lab, written):
    done = lab.kueue("cmd", "--resource", written, "true")
    assert (done.returncode, done.stdout) == (1, "")
    assert "Failed to parse resource: " in done.stderr
    assert written in done.stderr


def test_of_a_resource_named_twice_the_last_counts(lab):
    job = lab.run(*SMALL, "--resource", "genus=3", "--resource", "genus=2", "true")
    assert job["resources"] == {"genus": 2}


def test_without_resources_the_list_says_so(tmp_path):
    with FeatureLab(tmp_path) as lab:
        lab.start_server()
        done = lab.kueue("list-resources")
        assert (done.returncode, done.stdout) == (0, "No resources configured on the server.\n")
        refused = lab.kueue("cmd", "--resource", "genus=2", "true")
        assert refused.returncode == 1
        assert "No global resources configured on the server! Requested resources: {genus=2}" in refused.stderr
        # Licences are bought while the lab works.
        with open(tmp_path / "lab.toml", "a") as file:
            file.write("[global_resources]\ngenus = 2\n")
        lab.server.send_signal(1)
        lab.until(lambda: "genus" in lab.kueue("list-resources").stdout, "the server has read its settings again")
        assert lab.kueue("cmd", "--resource", "genus=2", "true").returncode == 0


def test_a_killed_jobs_licence_is_free_only_when_its_processes_are_gone(lab):
    stubborn = "trap '' TERM; echo up; while :; do sleep 0.1; done"
    job = lab.submit(*SMALL, "--resource", "Genus", "sh", "-c", stubborn)
    lab.until(lambda: lab.output(job) == "up\n", "it ignores the signal from now on")
    waiting = lab.submit(*SMALL, "--resource", "Genus", "true")
    killer = lab.popen_kueue("remove-job", "--kill", str(job))
    lab.until(lambda: lab.rows("running")[0].get("stopping"), "it is being stopped")
    assert "stopping" in lab.kueue("list-jobs", str(job)).stdout
    while True:
        taken = used(lab)["Genus"]
        states = lab.states([job, waiting])  # of one moment, after that of the sum
        if states[0] != "running":
            break
        assert (taken, states[1]) == (1, "pending")
    lab.end_of(job, "canceled")
    lab.end_of(waiting)
    killer.wait(20)


def test_gpus_of_the_machine_are_given_by_number(lab):
    gate = lab.gate()
    print_and_wait = ("sh", "-c", f"echo $CUDA_VISIBLE_DEVICES; {gate.command[2]}")
    jobs = [lab.submit(*SMALL, "--gpus", "1", *print_and_wait) for _ in range(3)]
    lab.until(lambda: len(gate.begun) == 2, "two run")
    assert sorted(lab.output(job) for job in jobs[:2]) == ["0\n", "1\n"]
    assert lab.state(jobs[2]) == "pending"
    gate.open()
    lab.until(lambda: len(gate.begun) == 3, "the third gets one of them")
    gate.open()
    lab.end_of(jobs[2])
