"""The server under load: many connections, many submissions, long history."""

from __future__ import annotations

import os
import resource
import time

import pytest

from kueue.protocol import messages as m
from tests.support.server_program import Client, ServerProgram, eventually, job_range

IDLE_CONNECTIONS = 1200


@pytest.fixture
def server(tmp_path):
    program = ServerProgram(tmp_path, worker_timeout_seconds=10)
    yield program
    program.close()


@pytest.fixture
def many_descriptors():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = IDLE_CONNECTIONS + 200
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"only {hard} open files are allowed here, {wanted} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
def test_more_connections_than_select_could_count_leave_the_server_quick(server, many_descriptors):
    # As a shell with the usual soft limit would start it.
    server.start(prefix=["prlimit", "--nofile=1024:4096"])
    idle = [Client(server.raw_local()) for _ in range(IDLE_CONNECTIONS)]
    began = time.monotonic()
    with server.client() as client:
        assert client.submit("true") == [0]
    assert time.monotonic() - began < 2
    for one in idle:
        one.close()
    files = f"/proc/{server.process.pid}/fd"
    eventually(lambda: len(os.listdir(files)) < 60, "the descriptors are closed")


def test_two_thousand_submissions_cost_no_worker_its_lease(server):
    server.start()
    workers = [server.worker(f"w{number}", slots=2) for number in range(5)]
    client = server.client(local=True)
    for number in range(2000):
        client.say(m.Submit(seq=10_000 + number, request_id=f"{number:032x}", ranges=(job_range("true"),)))
    answered = 0
    slowest = 0.0
    while answered < 2000:
        for _ in range(100):
            answered += isinstance(client.hear(), m.Submitted)
        for worker in workers:
            began = time.monotonic()
            worker.beat()
            slowest = max(slowest, time.monotonic() - began)
    # A worker's lease is 8 s here.
    assert slowest < 2
    assert "silent" not in server.said()
    rows = client.ask(m.ListWorkers).workers
    assert [row.state for row in rows] == ["online"] * 5
    assert len(client.states()) == 2000


def test_a_long_history_makes_no_question_slow(server):
    server.start()
    with server.client(local=True) as client:
        client.submit("old", count=5000, held=True)
        client.ask(m.RemoveJobs, ids=((0, 4999),))
        client.submit("waiting", count=1000)
        for question, fields, limit in (
            (m.ShowJobs, {"ids": ((17, 17),)}, 0.5),
            (m.ListJobs, {"limit": 10}, 1.0),
            (m.ListJobs, {"limit": 10, "states": ("failed",)}, 1.0),
        ):
            began = time.monotonic()
            client.ask(question, **fields)
            assert time.monotonic() - began < limit
        began = time.monotonic()
        client.submit("new")
        assert time.monotonic() - began < 0.5
