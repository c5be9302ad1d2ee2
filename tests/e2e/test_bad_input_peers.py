"""Peers that know the secret and tell nonsense: the service goes on, and nobody else's job is touched."""

import json
import socket
import ssl
import subprocess
import sys

import pytest

from kueue.protocol import messages as m
from tests.support.server_program import ServerProgram, eventually

HUGE = 10**25
"""Neither SQLite nor JSON's own encoder takes it."""
HELLO = {
    "type": "WorkerHello",
    "version": "test",
    "name": "liar",
    "machine_id": "machine",
    "boot_id": "boot",
    "totals": {"slots": 4, "cores": 4, "ram_mb": 1000},
}
END = {"outcome": {"type": "exited", "code": 0}, "started_wall": 1.0, "ended_wall": 2.0}

SPEAKERS = []
"""Those of the running test; closed behind it."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    program = ServerProgram(tmp_path_factory.mktemp("lab"))
    yield program.start()
    program.close()


@pytest.fixture
def honest(server):
    """A worker with a job that runs, as a bystander."""
    with server.client() as client, server.worker("honest", slots=1) as worker:
        eventually(lambda: [w.name for w in client.ask(m.ListWorkers).workers if w.state == "online"] == ["honest"])
        (job,) = client.submit("true")
        offer = worker.hear_a(m.Offer)
        assert offer.job == job
        worker.start(offer)
        yield worker, offer
        while SPEAKERS:
            SPEAKERS.pop().sock.close()
        if client.states().get(job) == "running":
            worker.end(offer)
            worker.hear_a(m.Acknowledge)
        client.ask(m.RemoveJobs, ids=((0, 10_000),), force=True)
        client.ask(m.CleanJobs, failed=True)


class Speaker:
    """Says any JSON at all over a connection that has proven the secret."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.rest = b""
        SPEAKERS.append(self)

    def say(self, *messages: object) -> None:
        body = json.dumps(messages).encode()
        self.sock.sendall(len(body).to_bytes(4, "big") + body)

    def hear(self, kind: str) -> dict | None:
        """The next message of that kind; None when the connection ends before it comes."""
        while True:
            while len(self.rest) < 4 or len(self.rest) - 4 < int.from_bytes(self.rest[:4], "big"):
                try:
                    chunk = self.sock.recv(65536)
                except (ConnectionError, ssl.SSLError):
                    chunk = b""
                if not chunk:
                    return None
                self.rest += chunk
            size = int.from_bytes(self.rest[:4], "big")
            body, self.rest = self.rest[4 : 4 + size], self.rest[4 + size :]
            for message in json.loads(body):
                if message["type"] == kind:
                    return message


def as_worker(server, **hello):
    speaker = Speaker(server.raw_tls())
    speaker.say({**HELLO, "identity": "liar", **hello})
    return speaker


def as_client(server, *messages):
    speaker = Speaker(server.raw_local())
    speaker.say({"type": "ClientHello"}, *messages)
    return speaker


def goes_on(server, worker, offer):
    """The server answers, the worker keeps its lease and its job runs."""
    assert worker.beat().lease_seconds > 0
    with server.client() as client:
        assert client.states()[offer.job] == "running"
        (row,) = [row for row in client.ask(m.ListWorkers).workers if row.name == "honest"]
        assert row.running == (offer.job,)
    assert server.process.poll() is None
    assert "Traceback" not in server.said()


@pytest.mark.parametrize(
    "lie",
    [
        {"attempts": [{"offer": HUGE, "job": 0, "state": "running"}]},
        {"attempts": [{"offer": 0, "job": HUGE, "state": "running"}]},
        {"attempts": [{"offer": -1, "job": -1, "state": "gone"}]},
        {"totals": {"slots": HUGE, "cores": 1, "ram_mb": 1}},
        {"totals": {"slots": -1, "cores": -1, "ram_mb": -1}},
        {"totals": {"slots": 1, "cores": 1, "ram_mb": 1, "named": [["gpu", 2**40]]}},
        {"totals": {"slots": 1, "cores": 1, "ram_mb": 1, "named": [["gpu", -1]]}},
        {"load": {"busy_cores": -HUGE}},
        {"load": {"load": [0, 0, -1e300]}},
        {"name": "n" * 60_000},
        {"name": ""},
        {"version": "v" * 60_000},
        {"made_boottime": 1e300},
        {"info": {"cpu_mhz": HUGE}},
    ],
    ids=lambda lie: json.dumps(lie)[:60],
)
def test_a_hello_that_cannot_be_true_is_not_taken_in(server, honest, lie):
    for attempt in lie.get("attempts", ()):
        with server.client() as client:
            attempt["queue_id"] = client.welcome.queue_id
    assert as_worker(server, **lie).hear("WorkerWelcome") is None
    goes_on(server, *honest)


def test_the_highest_numbers_that_may_be_told_leave_room_for_more(tmp_path):
    server = ServerProgram(tmp_path).start()
    try:
        top = 2**50 - 1
        with server.client() as client:
            report = {"offer": top, "job": top, "queue_id": client.welcome.queue_id, "state": "running"}
            assert as_worker(server, attempts=[report]).hear("WorkerWelcome") is not None
            assert client.submit("true") == [top + 1]
        server.stop()
        server.start()
        with server.client() as client:
            assert client.submit("true") == [top + 2]
            assert list(client.states()) == [top + 1, top + 2]
    finally:
        server.close()


@pytest.mark.parametrize(
    "lie",
    [
        {"run_seconds": 1e300},
        {"run_seconds": -1.0},
        {"ended_wall": -1e300},
        {"ended_wall": 1e300},
        {"started_wall": -1e12},
        {"outcome": {"type": "exited", "code": HUGE}},
        {"outcome": {"type": "exited", "code": -5}},
        {"outcome": {"type": "signaled", "signal": -500}},
        {"outcome": {"type": "timed_out", "after_seconds": 1e300}},
        {"max_rss_mb": HUGE},
        {"leftovers_stopped": -HUGE},
        {"stdout": {"size": -5, "head": "YWFh"}},
        {"stdout": {"size": HUGE}},
        {"stdout": {"size": 10**7, "head": "YWFh" * 2_500_000}},
        {"stdout": {"redirected": {"b64": "no base64"}}},
        {"notes": ["x" * 1000] * 1000},
    ],
    ids=lambda lie: json.dumps(lie)[:60],
)
def test_an_end_that_cannot_be_true_ends_the_connection_and_decides_nothing(server, honest, lie):
    liar = as_worker(server, identity=json.dumps(lie)[:60])
    assert liar.hear("WorkerWelcome") is not None
    with server.client() as client:
        (job,) = client.submit("true")
        offer = liar.hear("Offer")
        assert offer is not None
        liar.say({"type": "AttemptEnded", "offer": offer["offer"], "end": {**END, **lie}})
        assert liar.hear("Acknowledge") is None
        assert client.states()[job] == "offered"
        client.ask(m.RemoveJobs, ids=((job, job),), force=True)
    goes_on(server, *honest)


def test_what_a_worker_tells_of_anothers_attempt_decides_nothing(server, honest):
    _, offer = honest
    liar = as_worker(server, identity="jealous")
    assert liar.hear("WorkerWelcome") is not None
    liar.say({"type": "AttemptEnded", "offer": offer.offer, "end": END})
    assert liar.hear("Acknowledge") == {"type": "Acknowledge", "offers": [offer.offer]}
    for kind in ("AttemptGone", "OfferRejected"):
        liar.say({"type": kind, "offer": offer.offer, "reason": "so that it runs twice"})
    liar.say({"type": "OfferWithdrawn", "offer": offer.offer}, {"type": "Heartbeat", "number": 1})
    assert liar.hear("HeartbeatAnswer") is not None
    goes_on(server, *honest)


@pytest.mark.parametrize("hello", [{"type": "ClientHello"}, {**HELLO, "identity": "two tongues"}])
@pytest.mark.parametrize("stray", [{"type": "Heartbeat", "number": 1}, {"type": "ListJobs", "seq": 1}])
def test_nobody_speaks_for_both_sides(server, honest, hello, stray):
    is_at_home = (hello["type"] == "ClientHello") == (stray["type"] == "ListJobs")
    speaker = Speaker(server.raw_tls())
    speaker.say(hello, stray)
    answer = speaker.hear("JobList" if stray["type"] == "ListJobs" else "HeartbeatAnswer")
    assert (answer is not None) == is_at_home
    goes_on(server, *honest)


def submission(**changed):
    place = {"cwd": "/tmp", **changed.pop("place", {})}
    payload = {"argv": ["true"], **changed.pop("payload", {})}
    request = {"cores": 0, **changed.pop("request", {})}
    return {"payload": payload, "place": place, "request": request, "terms": {}, **changed}


@pytest.mark.parametrize(
    "changed",
    [
        {"payload": {"argv": [{"b64": "no base64"}]}},
        {"payload": {"name": {"b64": "é"}}},
        {"place": {"cwd": {"b64": "!"}}},
        {"place": {"env": [["A", {"b64": "!"}]]}},
    ],
    ids=json.dumps,
)
def test_text_that_nobody_could_read_later_is_not_taken(server, honest, changed):
    question = {"type": "Submit", "seq": 1, "request_id": "unreadable", "ranges": [submission(**changed)]}
    assert as_client(server, question).hear("Submitted") is None
    listed = subprocess.run(
        [sys.executable, "-m", "kueue.cli.main", "-c", str(server.config), "list-jobs"],
        env=server.environ(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert listed.returncode == 0, listed.stderr
    goes_on(server, *honest)


@pytest.mark.parametrize(
    "question",
    [
        {"type": "ListJobs", "limit": -1},
        {"type": "ReadOutput", "id": 0, "offset": -1},
        {"type": "CleanJobs", "request_id": "x" * 2_000_000},
        {"type": "Submit", "request_id": "", "ranges": []},
    ],
    ids=lambda question: question["type"],
)
def test_a_question_out_of_bounds_ends_its_connection_only(server, honest, question):
    assert as_client(server, {"seq": 1, **question}).hear("anything") is None
    goes_on(server, *honest)


@pytest.mark.parametrize("kind", ["ListJobs", "ShowJobs", "WatchJobs", "RemoveJobs", "HoldJobs", "ListWorkers"])
def test_ids_beyond_all_bounds_are_only_missing(server, honest, kind):
    change = {"request_id": f"huge {kind}"} if kind in {"RemoveJobs", "HoldJobs"} else {}
    speaker = as_client(
        server,
        {"type": kind, "seq": 1, "ids": [[10**9, HUGE], [-HUGE, -1], [7, 3]], **change},
        {"type": "ServerInfo", "seq": 2},
    )
    assert speaker.hear("Info") is not None
    goes_on(server, *honest)


def test_a_request_id_answers_only_the_question_it_was_made_for(server, honest):
    with server.client() as client:
        (job,) = client.submit("true", held=True)
        assert isinstance(client.ask(m.CleanJobs, request_id="a clean"), m.Done)
        assert isinstance(client.ask(m.CleanJobs, request_id="a clean"), m.Done)
        ids = ((job, job),)
        assert isinstance(client.ask(m.HoldJobs, request_id="a hold", ids=ids), m.Results)
        for stale in ("a clean", "a hold"):
            answer = client.ask(m.Submit, request_id=stale, ranges=())
            assert isinstance(answer, m.Failed)
            assert "another question" in answer.error
        answer = client.ask(m.CleanJobs, request_id="a hold")
        assert isinstance(answer, m.Failed)
        assert client.states()[job] == "held"
    goes_on(server, *honest)


def test_all_of_it_is_still_there_after_a_restart(server):
    with server.client() as client:
        before = client.states()
    server.stop()
    server.start()
    with server.client() as client:
        assert client.states() == before
        (job,) = client.submit("true", held=True)
        assert client.states()[job] == "held"
