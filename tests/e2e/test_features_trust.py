"""Who may talk to whom: one secret, proven by both sides, on encrypted connections."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading

import pytest

from kueue import identity
from tests.support.feature_lab import SMALL, FeatureLab

OTHER = "another secret that is just as long as this"


@pytest.fixture
def lab(tmp_path):
    with FeatureLab(tmp_path) as lab:
        yield lab


class Tap:
    """A wire to a port that keeps all that passes, in both directions."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.seen: list[bytes] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.sockets = [self.listener]
        self.threads = [threading.Thread(target=self._accept)]
        self.threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                far = socket.create_connection(("127.0.0.1", self.target))
                self.sockets += [near, far]
                for pair in ((near, far), (far, near)):
                    self.threads.append(threading.Thread(target=self._pump, args=pair))
                    self.threads[-1].start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(65536):
                self.seen.append(piece)
                sink.sendall(piece)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for one in self.sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self.threads:
            thread.join()


def test_with_a_wrong_secret_nothing_is_done_and_nothing_is_told(lab):
    lab.start_server()
    lab.start_worker("w1")
    job = lab.run(*SMALL, "echo", "private")["id"]
    wrong = lab.config("wrong", common_settings={**lab.settings["common_settings"], "shared_secret": OTHER})
    for words in (
        ("cmd", "true"), ("list-jobs",), ("show-job", str(job)), ("log", str(job)), ("follow", str(job)),
        ("wait-job", str(job)), ("remove-job", str(job)), ("clean-jobs", "--all"), ("list-workers",),
        ("list-resources",), ("explain", str(job)), ("node", "dead", "w1"),
    ):  # fmt: skip
        done = lab.kueue("-c", str(wrong), *words, timeout=15)
        assert (done.returncode, done.stdout) == (1, ""), words
        assert "Authentication failed!" in done.stderr, words
    assert [row["id"] for row in lab.rows()] == [job]
    assert lab.worker("w1")["state"] == "online"


def test_a_worker_with_a_wrong_secret_is_never_listed(lab):
    lab.start_server()
    path = lab.config(
        "stranger",
        common_settings={**lab.settings["common_settings"], "shared_secret": OTHER},
        worker_settings={**lab.settings["worker_settings"], "worker_name": "stranger"},
    )
    lab.start("kueue.worker.main", "-c", str(path), log="stranger")
    lab.until(lambda: "Authentication failed!" in lab.log("stranger"), "it is told")
    assert lab.ask("ListWorkers")["workers"] == []


def test_no_word_of_a_job_can_be_read_on_the_wire(lab):
    lab.start_server()
    tap = Tap(lab.port)
    try:
        through = lab.config("tap", common_settings={**lab.settings["common_settings"], "server_port": tap.port},
            worker_settings={**lab.settings["worker_settings"], "worker_name": "w1"})  # fmt: skip
        lab.start("kueue.worker.main", "-c", str(through), log="w1")
        lab.until(lambda: "w1" in lab.machines(), "the worker is there")
        done = lab.kueue("-c", str(through), "cmd", "--wait", *SMALL, "echo", "TOPSECRET")
        assert (done.returncode, done.stdout) == (0, "0\n")
        assert lab.kueue("-c", str(through), "log", "0").stdout == "TOPSECRET\n"
    finally:
        tap.close()
    wire = b"".join(tap.seen)
    assert len(wire) > 2000
    for word in (b"TOPSECRET", b"echo", b"argv", b"Welcome", b"w1"):
        assert word not in wire or len(word) < 3


@pytest.mark.parametrize("who", ["worker", "command"])
def test_a_false_server_learns_nothing(lab, who):
    """It accepts everybody, but does not know the secret."""
    cache = lab.folder / "others"
    cache.mkdir(mode=0o700)
    identity.identity_of(OTHER, str(cache))
    (pem,) = cache.glob("*.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    heard, handshakes = [], []
    listener = socket.create_server(("127.0.0.1", lab.port))

    def pretend():
        with contextlib.suppress(OSError):
            while True:
                plain, _ = listener.accept()
                with plain:
                    plain.settimeout(10)
                    handshakes.append(plain)
                    with contextlib.suppress(OSError), context.wrap_socket(plain, server_side=True) as secure:
                        heard.append(secure.recv(65536))

    thread = threading.Thread(target=pretend)
    thread.start()
    try:
        if who == "worker":
            path = lab.config("w1", worker_settings={**lab.settings["worker_settings"], "worker_name": "w1"})
            lab.start("kueue.worker.main", "-c", str(path), log="w1")
            lab.until(lambda: "Authentication failed!" in lab.log("w1"), "it turns away")
        else:
            lab.config()
            done = lab.kueue("--patience", "2", "cmd", "echo", "TOPSECRET")
            assert (done.returncode, done.stdout) == (1, "")
            assert "Authentication failed!" in done.stderr
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
    assert handshakes
    assert b"".join(heard) == b""


def test_a_secret_too_short_is_refused_and_a_weak_one_is_warned_about(lab):
    for secret, code in (("q8=zX", 1), ("keep private!", 0)):
        lab.settings["common_settings"]["shared_secret"] = secret
        path = lab.config()
        if code:
            done = lab.kueue("list-jobs")
            assert done.returncode == 1
            assert "shared_secret" in done.stderr
            assert secret not in done.stderr
            continue
        lab.start("kueue.server.main", "-c", str(path), log="server")
        lab.until(lab.answers, "it serves")
        assert lab.kueue("list-jobs").returncode == 0
        assert "shared_secret" in lab.log("server")
        assert secret not in lab.log("server")
