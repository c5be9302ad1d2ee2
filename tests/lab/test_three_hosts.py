"""The restart tool on a laboratory of three real hosts: it runs in a ``screen`` on the first, as its manual says."""

import json
import os
import re
import signal
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from tests.lab.cluster import Cluster, NoHost, install
from tests.lab.department import BIN, RECHECK_SECONDS, UP, Department
from tests.support import wheel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.xdist_group("three hosts")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    try:
        install()
        cluster = Cluster(folder)
    except NoHost as reason:
        pytest.skip(f"no hosts of its own with systemd and sshd: {reason}")
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def department(cluster, tmp_path_factory):
    return Department(cluster, wheel.build(tmp_path_factory.mktemp("wheel")))


@pytest.fixture
def lab(department):
    """The tool runs, and all three hosts have a worker."""
    department.all_up()
    yield department
    for host in department.cluster.hosts.values():
        host.plug() if host.is_on else host.power_on()


def test_all_hosts_get_a_worker_in_a_detached_session_of_its_own(lab):
    lab.stop_tool()
    code, said, complaints = lab.tool("--stop")
    assert (code, said.count("Stopped the worker")) == (0, 3), said + complaints
    assert [lab.worker(name) for name in lab.names] == [(0, 0)] * 3
    assert [lab.sessions(name) for name in lab.names] == [[]] * 3
    lab.start_tool()
    lab.until(lambda: set(lab.workers()) == set(lab.names), "the server sees all three")
    for name in lab.names:
        (session,) = lab.sessions(name)
        pid, _ = lab.worker(name)
        chain = lab.cluster[name].root("ps", "-o", "ppid=", "-p", str(pid)).split()
        assert chain == [str(session)], "the worker is what runs in that session"
        assert "(Detached)" in lab.screens(lab.cluster[name])


def test_workers_that_live_are_the_same_processes_after_five_rounds(lab):
    before = lab.all_up()
    sessions = [lab.sessions(name) for name in lab.names]
    begun = lab.content()

    def rounds():
        seen = Counter(look.host for look in lab.looks(begun) if look.text.endswith(UP))
        return min((seen[name] for name in lab.names), default=0)

    lab.until(lambda: rounds() >= 5, "five rounds")
    assert {name: lab.worker(name) for name in lab.names} == before
    assert [lab.sessions(name) for name in lab.names] == sessions
    assert {look.text.partition(" ")[2] for look in lab.looks(begun)} == {UP}


def test_a_host_that_lost_its_power_is_at_work_within_one_recheck_and_its_jobs_run_again_once(lab):
    lost = lab.names[2]
    jobs = lab.start_jobs(9)
    first = {one.job: one for one in lab.begun()}
    hit = sorted(job for job, one in first.items() if one.worker == lost)
    spared = sorted(set(jobs) - set(hit))
    assert hit
    assert spared
    others = {name: lab.worker(name) for name in lab.names if name != lost}
    # What it saw there before tells it that the server's word is about an earlier boot.
    ready = time.time()
    lab.until(
        lambda: any(look.host == lost and UP in look.text for look in lab.looks(ready)), "the tool knows the host"
    )
    down = time.time()
    lab.cluster[lost].lose_power()
    cut = time.time()
    lab.until(lambda: any(look.host == lost and UP not in look.text for look in lab.looks(down)), "the tool says so")
    missed = time.time()
    assert len(lab.begun()) == len(jobs), "a host that is off is no proof: nothing runs twice"
    begin = time.time()
    lab.cluster[lost].power_on()
    booted = time.time()
    started = lab.until(lambda: lab.worker(lost) != (0, 0), "its worker is back")
    again = lab.until(lambda: len(lab.begun()) == len(jobs) + len(hit), "its jobs run again")
    # A look may have begun a moment before the boot; then it is the next one that finds the host.
    assert started - booted < 2 * RECHECK_SECONDS + 10
    ends = lab.finish(jobs)
    assert {row["id"]: (row["outcome"], row["attempt"]) for row in ends} == {
        job: ({"type": "exited", "code": code}, 2 if job in hit else 1) for job, code in jobs.items()
    }
    attempts = sorted((one.job, one.attempt) for one in lab.begun())
    assert attempts == sorted([(job, 1) for job in jobs] + [(job, 2) for job in hit])
    assert lab.ended() == sorted(jobs), "each job came to its end once"
    assert {name: lab.worker(name) for name in others} == others
    for name, moment in (
        ("power gone", cut - down),
        ("told as lost", missed - down),
        ("power on", begin - down),
        ("booted", booted - down),
        ("worker process", started - down),
        ("attempt 2", again - down),
    ):
        print(name, f"{moment:.2f} s")


@pytest.mark.parametrize("how", ["kill", "quit"])
def test_a_worker_that_was_killed_is_back_and_its_jobs_go_on(lab, how):
    """Its runner may be quicker than the tool; then the tool finds it alive."""
    name = lab.names[1]
    host = lab.cluster[name]
    if not lab.sessions(name):
        host.user(f"{BIN}/kueue_worker", "--stop")
        lab.until(lambda: lab.sessions(name) and lab.worker(name) != (0, 0), "its worker is in a session")
        lab.all_up()
    jobs = lab.start_jobs(6)
    before = lab.worker(name)
    if how == "kill":
        host.root("kill", "-KILL", str(before[0]))
        lab.until(lambda: lab.worker(name) not in {before, (0, 0)}, "another process is its worker")
    else:
        (session,) = lab.sessions(name)
        host.user("screen", "-S", f"{session}.kueue_worker", "-X", "quit")
        lab.until(lambda: session not in lab.sessions(name), "the session is gone")
        lab.until(lambda: lab.worker(name) != (0, 0), "there is a worker")
    lab.until(lambda: name in lab.workers(), "the server sees it")
    mark = time.time()
    lab.until(lambda: any(look.host == name and UP in look.text for look in lab.looks(mark)), "the tool is content")
    ends = lab.finish(jobs)
    assert {row["id"]: (row["outcome"], row["attempt"]) for row in ends} == {
        job: ({"type": "exited", "code": code}, 1) for job, code in jobs.items()
    }
    assert Counter(one.job for one in lab.begun()) == Counter(list(jobs)), "none began twice"
    assert lab.ended() == sorted(jobs)


def test_an_unplugged_host_delays_no_other(lab):
    """The wait for it takes up to half a minute; the others are looked at as if it were not there."""
    out, *others = reversed(lab.names)

    def pauses(since, until):
        """The longest time between two looks at one of the others."""
        longest = 0.0
        for name in others:
            times = [look.at for look in lab.looks(since) if look.host == name and look.at <= until]
            longest = max([longest, *(later - sooner for sooner, later in pairwise(times))])
        return longest

    def rounds(since):
        return min(sum(look.host == name for look in lab.looks(since)) for name in others)

    begin = time.time()
    lab.until(lambda: rounds(begin) >= 3, "rounds with all cables in")
    lab.cluster[out].unplug()
    unplugged = time.time()
    lab.until(lambda: rounds(unplugged) >= 5, "rounds without that host")
    lab.until(
        lambda: any(look.host == out and UP not in look.text for look in lab.looks(unplugged)),
        "the trouble is told",
        seconds=120,
    )
    end = time.time()
    usual, then = pauses(begin, unplugged), pauses(unplugged, end)
    print("longest pause with all hosts", f"{usual:.2f} s")
    print("longest pause without one", f"{then:.2f} s")
    assert {look.text.partition(" ")[2] for look in lab.looks(unplugged) if look.host in others} == {UP}
    # The usual pause, and what a busy machine adds to it: far from the time that the missing host costs.
    assert then < usual + RECHECK_SECONDS + 2
    lab.cluster[out].plug()
    plugged = time.time()
    lab.until(lambda: any(look.host == out and UP in look.text for look in lab.looks(plugged)), "it is seen again")


def test_the_status_is_true(lab):
    before = lab.all_up()
    lab.content()
    code, said, complaints = lab.tool("--status", "--json")
    assert (code, complaints) == (0, "")
    found = json.loads(said)
    assert (found["running"], found["server_reached"]) == (True, True)
    for row in found["hosts"]:
        name = row["host"]
        assert (row["is_reachable"], row["worker"], row["server"]) == (True, name, "alive")
        assert row["worker_pid"] == before[name][0]
        assert row["session"] == next((f"screen {one}" for one in lab.sessions(name)), "none")
        assert 0 <= row["next_wall"] - row["looked_wall"] < 10 * RECHECK_SECONDS
    assert [row["host"] for row in found["hosts"]] == lab.names
    code, said, _ = lab.tool("--status")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in said.splitlines()]
    assert rows[0][:5] == ["host", "reachable", "session", "worker", "server"]
    assert [(row[0], row[1], row[3], row[4]) for row in rows[1:]] == [
        (name, "yes", name, "alive") for name in lab.names
    ]

    out = lab.names[2]
    lab.cluster[out].lose_power()
    lost = time.time()
    lab.until(lambda: any(look.host == out and UP not in look.text for look in lab.looks(lost)), "it is missed")
    found = json.loads(lab.tool("--status", "--json")[1])
    reachable = {row["host"]: row["is_reachable"] for row in found["hosts"]}
    assert reachable == {name: name != out for name in lab.names}


def test_one_round_tells_by_its_exit_code_and_stopping_leaves_jobs_alone(lab):
    code, _, complaint = lab.tool("--once")
    assert code == 1
    assert "is running already" in complaint
    assert lab.tool("--stop")[0] == 1
    jobs = lab.start_jobs(6)
    lab.stop_tool()
    begin = time.monotonic()
    code, said, complaints = lab.tool("--once")
    print("one round on three hosts", f"{time.monotonic() - begin:.2f} s")
    assert (code, len(re.findall(r"^ralab0\d +up ", said, re.MULTILINE))) == (0, 3), complaints

    code, said, complaints = lab.tool("--stop")
    assert (code, said.count("its running jobs go on")) == (0, 3), said + complaints
    assert [lab.worker(name) for name in lab.names] == [(0, 0)] * 3
    code, _, complaint = lab.tool("--status")
    assert code == 1
    assert "does not run on this machine" in complaint
    for one in lab.begun():
        lab.cluster[one.worker].root("test", "-d", f"/proc/{one.pid}")

    lab.cluster[lab.names[2]].unplug()
    code, said, _ = lab.tool("--once", *lab.names[1:])
    assert code == 1
    assert [line.split()[:2] for line in said.splitlines()] == [[lab.names[1], "up"], [lab.names[2], "DOWN"]]
    lab.cluster[lab.names[2]].plug()
    code, said, complaints = lab.tool("--once")
    assert code == 0, said + complaints
    ends = lab.finish(jobs)
    assert {row["id"]: (row["outcome"]["code"], row["attempt"]) for row in ends} == {
        job: (code, 1) for job, code in jobs.items()
    }
    assert lab.ended() == sorted(jobs)


def test_the_check_of_all_hosts_finds_nothing_wrong(lab):
    code, said, complaints = lab.tool("--check", "--json")
    assert code == 0, said + complaints
    found = json.loads(said)
    lines = found["findings"]
    assert set(lab.names) <= {line["host"] for line in lines}
    assert not [line for line in lines if line["state"] == "problem"]
    server = [line["text"] for line in lines if line["name"] == "server"]
    assert len(server) == 3
    assert all(lab.names[0] in text for text in server)


def test_a_worker_that_systemd_keeps_is_left_to_it(lab):
    name = lab.names[1]
    lab.stop_tool()
    assert lab.tool("--stop", name)[0] == 0
    host = lab.cluster[name]
    host.user(f"{BIN}/kueue_install", "systemd", "worker", "--start")
    try:
        lab.until(lambda: name in lab.workers(), "the server sees it")
        before = lab.worker(name)
        assert int(lab.systemctl("show", "-p", "MainPID", "--value", "kueue-worker", host=name)) == before[0]
        lab.start_tool()
        mark = time.time()
        lab.until(
            lambda: sum(look.host == name and UP in look.text for look in lab.looks(mark)) >= 2,
            "two rounds",
            seconds=90,
        )
        assert lab.worker(name) == before
        assert lab.sessions(name) == []
        # After a crash it is the service manager's, whoever looks first.
        os.kill(_outside(host, before[0]), signal.SIGKILL)
        lab.until(lambda: lab.worker(name) not in {before, (0, 0)}, "another process is its worker")
    finally:
        host.user(f"{BIN}/kueue_install", "systemd", "worker", "--uninstall")


def _outside(host, pid):
    """The number out here of a process on the host."""
    for one in host.processes():
        numbers = re.search(r"^NSpid:\s+(.*)$", Path(f"/proc/{one}/status").read_text(), re.MULTILINE)
        if numbers and numbers[1].split()[-1] == str(pid):
            return one
    raise AssertionError(f"no process {pid} on {host.host_name}")
