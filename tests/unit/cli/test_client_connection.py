"""The client API against a peer on a real socket: what it sends, and what it does when the other end breaks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import msgspec
import pytest
from peer import WELCOME, answering, frame

from kueue import places
from kueue.client import Client, rouse_own_server
from kueue.errors import KueueError, ProtocolError, Refused, Unreachable, UserError
from kueue.protocol import messages
from kueue.transport import FRAME_LIMIT, PROTOCOL, Server, encode, is_this_host

RANGE = {"payload": {"argv": ["true"]}, "place": {"cwd": "/"}, "request": {}}


def client_of(peer, patience=5.0, told=None):
    told = [] if told is None else told
    return Client(Server("nowhere.invalid", 1, [peer.path]), patience_seconds=patience, tell=told.append)


def test_its_protocol_number_and_frame_limit_are_those_of_the_message_table():
    assert PROTOCOL == messages.PROTOCOL
    assert FRAME_LIMIT == messages.FRAME_LIMIT


def test_a_question_gets_the_answer_with_its_own_number(peers):
    def script(talk):
        talk.greet()
        for _ in range(2):
            (question,) = talk.hear()
            talk.say({"type": "Info", "seq": 999}, {"type": "Info", "seq": question["seq"], "pid": 7})

    with client_of(peers(script)) as client:
        assert client.ask("ServerInfo")["pid"] == 7
        assert client.ask("ServerInfo")["pid"] == 7


def test_an_answer_in_parts_is_read_to_its_end(peers):
    parts = [{"type": "JobList", "jobs": [1], "end": False}, {"type": "JobList", "jobs": [2], "end": True}]
    with client_of(peers(answering({"ListJobs": parts}))) as client:
        assert [part["jobs"] for part in client.ask_parts("ListJobs")] == [[1], [2]]


def test_a_piece_of_output_is_a_whole_answer_although_the_stream_goes_on(peers):
    piece = {"type": "Output", "offset": 0, "data": "YQ==", "end": False}
    with client_of(peers(answering({"ReadOutput": piece}))) as client:
        assert client.ask("ReadOutput", id=0)["data"] == "YQ=="


def test_after_a_lost_connection_the_same_bytes_go_out_again(peers):
    def script(talk):
        talk.greet()
        (question,) = talk.hear()
        if talk.number == 2:
            talk.say({"type": "Submitted", "seq": question["seq"], "ids": [[0, 0]]})
            talk.hear()

    peer = peers(script)
    told = []
    with client_of(peer, told=told) as client:
        assert client.submit([RANGE])["ids"] == [[0, 0]]
    sent = [talk.frames[1] for talk in peer.talks]
    assert len(sent) == 3
    assert sent[0] == sent[1] == sent[2]
    assert b'"request_id":"' in sent[0]
    assert len(told) == 1


def test_every_step_is_told_to_whoever_wants_to_know(peers):
    def script(talk):
        talk.greet()
        (question,) = talk.hear()
        if talk.number:
            talk.say({"type": "Info", "seq": question["seq"]}, {"type": "Info", "seq": question["seq"]})
            talk.hear()

    peer = peers(script)
    steps = []
    with client_of(peer) as client:
        client.debug = steps.append
        client.ask("ServerInfo")
    said = re.sub(r"[0-9]+\.[0-9] ms", "N ms", "\n".join(steps)).splitlines()
    connected = ["connects to nowhere.invalid:1", f"welcome after N ms over {peer.path}, from kueue 0.1.0"]
    question = f"asks ServerInfo, {len(peer.talks[0].frames[1])} bytes"
    assert said == [
        *connected,
        question,
        "no connection: the server closed the connection",
        *connected,
        question,
        "answered after N ms: Info",
    ]


def test_two_changes_have_different_request_ids(peers):
    peer = peers(answering({"CleanJobs": {"type": "Done"}}))
    with client_of(peer) as client:
        client.change("CleanJobs", failed=False)
        client.change("CleanJobs", failed=False)
    ids = [json.loads(sent[4:])[0]["request_id"] for sent in peer.talks[0].frames[1:]]
    assert len(set(ids)) == 2
    assert all(len(one) == 32 and int(one, 16) >= 0 for one in ids)


def test_half_a_frame_is_a_lost_connection_and_no_answer(peers):
    def script(talk):
        talk.greet()
        (question,) = talk.hear()
        answer = frame({"type": "Info", "seq": question["seq"], "pid": 7})
        talk.sock.sendall(answer if talk.number else answer[:-3])
        if talk.number:
            talk.hear()

    peer = peers(script)
    with client_of(peer) as client:
        assert client.ask("ServerInfo")["pid"] == 7
    assert len(peer.talks) == 2


def test_a_frame_that_comes_byte_by_byte_is_read(peers):
    def script(talk):
        talk.greet()
        (question,) = talk.hear()
        for byte in frame({"type": "Info", "seq": question["seq"], "pid": 7}):
            talk.sock.sendall(bytes([byte]))
        talk.hear()

    with client_of(peers(script)) as client:
        assert client.ask("ServerInfo")["pid"] == 7


@pytest.mark.parametrize("payload", [b"\xff\xff\xff\xff", b"\0\0\0\2{}", b"\0\0\0\4nope", b'\0\0\0\5["a"]'])
def test_what_is_no_frame_of_messages_ends_with_a_sentence(peers, payload):
    def script(talk):
        talk.greet()
        talk.hear()
        talk.sock.sendall(payload)
        talk.hear()

    with client_of(peers(script)) as client, pytest.raises(ProtocolError, match="The server sent a frame"):
        client.ask("ServerInfo")


def test_another_protocol_is_refused_naming_both(peers):
    def script(talk):
        talk.hear()
        talk.say({**WELCOME, "protocol": 99, "version": "7.0"})
        talk.hear()

    with client_of(peers(script)) as client, pytest.raises(Refused, match=r"protocol 99 \(kueue 7\.0\).* protocol 1"):
        client.ask("ServerInfo")


def test_the_reason_of_a_server_that_is_sorry_is_told(peers):
    def script(talk):
        talk.hear()
        talk.say({"type": "Sorry", "reason": "Your version is too old.", "hint": "Upgrade."})
        talk.hear()

    with client_of(peers(script)) as client, pytest.raises(Refused, match="too old") as caught:
        client.ask("ServerInfo")
    assert caught.value.hint == "Upgrade."


def test_a_server_that_is_sorry_for_now_is_asked_again(peers):
    def script(talk):
        talk.hear()
        if talk.number == 0:
            talk.say({"type": "Sorry", "reason": "Too many connections.", "lasting": False})
            return
        talk.say(WELCOME)
        (question,) = talk.hear()
        talk.say({"type": "Info", "seq": question["seq"], "pid": 7})
        talk.hear()

    told = []
    with client_of(peers(script), told=told) as client:
        assert client.ask("ServerInfo")["pid"] == 7
    assert len(told) == 1
    assert "Too many connections" in told[0]


def test_a_refused_question_raises_its_sentence_hint_and_code(peers):
    failed = {"type": "Failed", "error": "No job 9.", "hint": "Look.", "exit_code": 2}
    with client_of(peers(answering({"ExplainJob": failed}))) as client:
        with pytest.raises(UserError, match=r"No job 9\.") as caught:
            client.ask("ExplainJob", id=9)
        assert (caught.value.hint, caught.value.exit_code) == ("Look.", 2)


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def identity(tmp_path_factory):
    from kueue.identity import identity_of

    return identity_of("a secret for these tests alone", str(tmp_path_factory.mktemp("cache")))


@pytest.mark.parametrize("name", ["nobody.invalid", "ralab..lab"])
def test_a_name_that_nobody_knows_is_not_waited_for(identity, name):
    with pytest.raises(Unreachable, match=f"name '{name}' .* is not known: .") as caught:
        Client(Server(name, 1, [], [identity])).ask("ServerInfo")
    assert "server_name" in caught.value.hint


def test_a_server_that_is_away_is_told_of_once_and_named(identity):
    port = _free_port()
    told = []
    client = Client(Server("127.0.0.1", port, [], [identity]), patience_seconds=0.3, tell=told.append)
    begun = time.monotonic()
    with pytest.raises(Unreachable, match=f"127.0.0.1:{port}"):
        client.ask("ServerInfo")
    assert time.monotonic() - begun >= 0.3
    assert len(told) == 1
    assert f"127.0.0.1:{port}" in told[0]


def test_a_server_that_comes_while_it_is_waited_for_gets_the_question(tmp_path, peers, identity):
    path = str(tmp_path / "late.sock")
    client = Client(Server("127.0.0.1", _free_port(), [path], [identity]), patience_seconds=20)
    waiting = threading.Event()
    client.tell = lambda _: waiting.set()
    answers = []
    asking = threading.Thread(target=lambda: answers.append(client.ask("ServerInfo")))
    asking.start()
    assert waiting.wait(10)
    peers(answering({"ServerInfo": {"type": "Info", "pid": 7}}), "late.sock")
    asking.join(10)
    assert answers[0]["pid"] == 7
    client.close()


def _tls_server(identity, script):
    """One thread that takes TLS connections with this identity; returns port and stop function."""
    import ssl

    context = identity.server_context()
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            try:
                with context.wrap_socket(plain, server_side=True) as secured:
                    script(secured)
            except (OSError, ssl.SSLError):
                plain.close()

    thread = threading.Thread(target=serve)
    thread.start()

    def stop():
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)

    return listener.getsockname()[1], stop


def _answer_one(secured):
    length = int.from_bytes(secured.recv(4), "big")
    assert secured.recv(length)
    secured.sendall(frame(WELCOME))
    (question,) = json.loads(secured.recv(65536)[4:])
    secured.sendall(frame({"type": "Info", "seq": question["seq"], "pid": 7}))


def test_over_tls_the_same_secret_is_let_in(identity):
    port, stop = _tls_server(identity, _answer_one)
    try:
        with Client(Server("127.0.0.1", port, [], [identity]), patience_seconds=5) as client:
            assert client.ask("ServerInfo")["pid"] == 7
    finally:
        stop()


@pytest.mark.slow
@pytest.mark.parametrize("is_reset", [False, True])
def test_a_connection_that_breaks_before_the_welcome_again_and_again_is_no_refusal(identity, is_reset):
    """As of a server that is killed at each start, or a tunnel with nobody behind it."""
    ends = []

    def script(secured):
        if len(ends) < 6:
            ends.append(None)
            if is_reset:
                secured.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(secured.detach())
            return
        _answer_one(secured)

    port, stop = _tls_server(identity, script)
    told = []
    try:
        with Client(Server("127.0.0.1", port, [], [identity]), patience_seconds=30, tell=told.append) as client:
            assert client.ask("ServerInfo")["pid"] == 7
        ends.clear()
        with (
            Client(Server("127.0.0.1", port, [], [identity]), patience_seconds=0, tell=told.append) as client,
            pytest.raises(Unreachable, match="ended before the server's welcome"),
        ):
            client.ask("ServerInfo")
    finally:
        stop()
    assert len(told) == 1


def test_over_tls_another_secret_is_refused_at_once(identity, tmp_path):
    from kueue.identity import identity_of

    other = identity_of("quite another secret, of somebody else", str(tmp_path))
    port, stop = _tls_server(other, lambda secured: secured.recv(1))
    told = []
    try:
        client = Client(Server("127.0.0.1", port, [], [identity]), patience_seconds=20, tell=told.append)
        with pytest.raises(Refused, match=r"^Authentication failed!$"):
            client.ask("ServerInfo")
    finally:
        stop()
    assert told == []


def test_watching_goes_on_after_a_lost_connection_for_the_rest_alone(peers):
    def script(talk):
        talk.greet()
        (question,) = talk.hear()
        talk.say({"type": "Watching", "seq": question["seq"], "missing": []})
        ended = 3 if talk.number == 0 else 4
        talk.say({"type": "JobEnded", "seq": question["seq"], "id": ended, "outcome": {"type": "exited", "code": 0}})

    peer = peers(script)
    with client_of(peer, patience=None) as client:
        ended = [message["id"] for message in client.watch([(3, 4)]) if message["type"] == "JobEnded"]
    assert ended == [3, 4]
    assert json.loads(peer.talks[0].frames[1][4:])[0]["ids"] == [[3, 4]]
    assert json.loads(peer.talks[1].frames[1][4:])[0]["ids"] == [[4, 4]]


def test_watching_tells_which_jobs_do_not_exist_and_ends_without_them(peers):
    peer = peers(answering({"WatchJobs": {"type": "Watching", "missing": [[7, 9]]}}))
    with client_of(peer) as client:
        assert [message["missing"] for message in client.watch([(7, 9)])] == [[[7, 9]]]


def test_a_job_cleaned_away_while_the_server_was_not_reached_ends_without_an_outcome(peers):
    def script(talk):
        talk.greet()
        (question,) = talk.hear()
        talk.say({"type": "Watching", "seq": question["seq"], "missing": [[5, 5]] if talk.number else []})
        if talk.number:
            talk.hear()

    with client_of(peers(script)) as client:
        ended = [message for message in client.watch([(5, 5)]) if message["type"] == "JobEnded"]
    assert [(one["id"], one["outcome"]) for one in ended] == [(5, None)]


def test_a_long_submission_goes_in_parts_that_fit_and_decode(peers):
    def script(talk):
        talk.greet()
        while True:
            (question,) = talk.hear()
            if question["last"]:
                talk.say({"type": "Submitted", "seq": question["seq"], "ids": [[0, 39]]})

    # 40 lines of 120,000 characters that take six bytes each as JSON: 29 MB.
    argvs = [["sh", "-c", f"{number:02}" + "\x01" * 120_000] for number in range(40)]
    peer = peers(script)
    with client_of(peer) as client:
        assert client.submit([{**RANGE, "argvs": argvs}])["ids"] == [[0, 39]]
    frames = peer.talks[0].frames[1:]
    assert len(frames) > 1
    assert all(len(one) <= messages.FRAME_LIMIT for one in frames)
    parts = [msgspec.json.decode(one[4:], type=list[messages.Submit])[0] for one in frames]
    assert [part.part for part in parts] == list(range(len(parts)))
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert len({(part.seq, part.request_id) for part in parts}) == 1
    assert [list(argv) for part in parts for one in part.ranges for argv in one.argvs] == argvs


def test_a_message_that_no_frame_can_hold_is_refused_before_it_is_sent():
    with pytest.raises(UserError, match="at most 16777216"):
        encode([{"type": "Submit", "text": "x" * messages.FRAME_LIMIT}])


def test_a_socket_path_longer_than_an_address_is_reached(tmp_path, peers):
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    directory = os.open(deep, os.O_PATH)
    try:
        peer = peers(answering({"ServerInfo": {"type": "Info", "pid": 7}}), f"/proc/self/fd/{directory}/s.sock")
        with Client(Server("nowhere.invalid", 1, [str(deep / "s.sock")]), patience_seconds=1) as client:
            assert client.ask("ServerInfo")["pid"] == 7
        assert len(peer.talks) == 1
    finally:
        os.close(directory)


def test_this_host_is_known_by_its_names_and_addresses_alone():
    assert is_this_host("localhost")
    assert is_this_host("127.0.0.1")
    assert is_this_host("::1")
    assert is_this_host(socket.gethostname())
    assert is_this_host(socket.gethostname().upper())
    assert not is_this_host("192.0.2.7")  # TEST-NET-1 of RFC 5737 belongs to nobody
    assert not is_this_host("some-other-host")


def test_a_range_of_a_thousand_million_is_waited_for_as_far_as_it_exists(peers):
    def script(talk):
        talk.greet()
        (question,) = talk.hear()
        assert question["ids"] == [[0, 10**12]]
        seq = question["seq"]
        talk.say(
            {"type": "Watching", "seq": seq, "missing": [[2, 10**12]]},
            {"type": "JobEnded", "seq": seq, "id": 1, "outcome": {"type": "exited", "code": 0}},
            {"type": "JobEnded", "seq": seq, "id": 0, "outcome": {"type": "exited", "code": 0}},
        )

    with client_of(peers(script)) as client:
        heard = list(client.watch([(0, 10**12)]))
    assert [message.get("id") for message in heard] == [None, 1, 0]


def test_a_connection_to_itself_is_no_server(monkeypatch, identity):
    """Where nobody listens on a port that the kernel gives to clients it may give that very one."""

    def to_itself(*_, **__):
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        sock.connect(sock.getsockname())
        return sock

    monkeypatch.setattr(socket, "create_connection", to_itself)
    client = Client(Server("127.0.0.1", 1, (), [identity]), patience_seconds=0.0, tell=lambda _: None)
    with pytest.raises(Unreachable, match="connection refused"):
        client.ask("ServerInfo")


def echoing(talk):
    talk.greet()
    while questions := talk.hear():
        talk.say(*({"type": "Info", "seq": one["seq"], "word": one["word"]} for one in questions))


def test_threads_that_share_a_client_get_their_own_answers(peers):
    wrong = []

    def ask(client, name):
        for number in range(50):
            word = f"{name} {number}"
            if client.ask("ServerInfo", word=word)["word"] != word:
                wrong.append(word)

    with client_of(peers(echoing)) as client:
        threads = [threading.Thread(target=ask, args=(client, name)) for name in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


FORKING = """
import os, sys
from kueue.client import Client
from kueue.transport import Server

client = Client(Server("nowhere.invalid", 1, [sys.argv[1]]), patience_seconds=5.0)
assert client.ask("ServerInfo", word="before")["word"] == "before"
child = os.fork()
for number in range(100):
    word = f"{child} {number}"
    assert client.ask("ServerInfo", word=word)["word"] == word
if child:
    sys.exit(os.waitpid(child, 0)[1] != 0)
"""


def test_the_child_of_a_fork_asks_over_a_connection_of_its_own(peers):
    peer = peers(echoing)
    done = subprocess.run(
        [sys.executable, "-c", FORKING, peer.path], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len(peer.talks) == 2


def test_a_question_in_a_signal_handler_that_interrupts_another_is_refused(peers):
    refused = []

    def script(talk):
        talk.greet()
        (question,) = talk.hear()
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_for(lambda: refused)
        talk.say({"type": "Info", "seq": question["seq"], "word": "late"})

    with client_of(peers(script)) as client:

        def handler(*_):
            with pytest.raises(UserError, match="waits for an answer already") as caught:
                client.ask("ServerInfo", word="nested")
            refused.append(caught.value)

        previous = signal.signal(signal.SIGUSR1, handler)
        try:
            assert client.ask("ServerInfo", word="first")["word"] == "late"
        finally:
            signal.signal(signal.SIGUSR1, previous)
    assert len(refused) == 1


def wait_for(holds):
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_server_at_whose_socket_so_many_wait_that_nobody_can_come_is_not_taken_for_none(tmp_path):
    state = places.Places(str(tmp_path / "state"))
    path, descriptor = places.socket_address(f"{state.server}/1-ab.sock")
    with contextlib.ExitStack() as open_ones:
        if descriptor >= 0:
            open_ones.callback(os.close, descriptor)
        listener = open_ones.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        listener.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting = open_ones.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                waiting.connect(path)
        with pytest.raises(KueueError, match="A server runs that does not answer"):
            rouse_own_server(state)
    rouse_own_server(state)  # its socket is left, and nobody is behind it
