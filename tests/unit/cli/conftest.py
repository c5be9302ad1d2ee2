"""What the tests of the command share: a peer on a socket, a session on a screen that can be read."""

from __future__ import annotations

import io
import os
import time
from types import SimpleNamespace

import pytest
from peer import Peer
from samples import NOON

from kueue.cli import arguments
from kueue.cli.screen import Screen
from kueue.cli.session import Session
from kueue.client import Client
from kueue.config import Config
from kueue.transport import Server


@pytest.fixture
def peers(tmp_path):
    """Makes peers; each is closed after the test and must not have met anything its script did not expect."""
    made = []

    def make(script, name="s.sock"):
        made.append(Peer(str(tmp_path / name), script))
        return made[-1]

    yield make
    for peer in made:
        peer.close()


@pytest.fixture
def utc(monkeypatch):
    """Local time is UTC."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


class Recorded(io.TextIOWrapper):
    """A text stream whose bytes can be looked at."""

    def __init__(self, encoding="utf-8"):
        super().__init__(io.BytesIO(), encoding=encoding, write_through=True)

    @property
    def text(self):
        return self.buffer.getvalue().decode(self.encoding)


@pytest.fixture
def run(utc):
    """Runs a verb in this process against a peer: `run(peer, "list-jobs", ...)` gives code, out and err."""
    clients = []

    def call(peer, *words, config=None, columns=None, encoding="utf-8", patience=5.0):
        out, err = Recorded(encoding), Recorded(encoding)
        screen = Screen(out, err)
        screen.columns = columns
        chosen = arguments.parse(list(words))
        session = Session(chosen, screen)
        session.config = config or Config()
        session.now_wall = NOON
        session.client = Client(
            Server("nowhere.invalid", 1, [peer.path]), patience_seconds=patience, tell=screen.remark
        )
        clients.append(session.client)
        module, _, function = chosen.handler.partition(":")
        __import__(f"kueue.cli.{module}")
        import sys

        code = getattr(sys.modules[f"kueue.cli.{module}"], function)(session)
        screen.flush()
        return SimpleNamespace(code=code, out=out.text, err=err.text)

    yield call
    for client in clients:
        client.close()


@pytest.fixture
def pty_screen():
    """A screen on a real terminal, and a function that reads what was printed there."""
    outer, inner = os.openpty()
    stream = open(inner, "w", encoding="utf-8")  # noqa: SIM115 - closed after the test

    def read():
        stream.flush()
        return os.read(outer, 10**6).decode().replace("\r\n", "\n")

    yield (lambda: Screen(stream, io.StringIO())), read
    stream.close()
    os.close(outer)
