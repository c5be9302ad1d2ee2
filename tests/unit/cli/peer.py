"""A server for tests of the command: it speaks frames over a real Unix socket, as each test tells it to."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable

from kueue.transport import PROTOCOL

WELCOME = {"type": "Welcome", "protocol": PROTOCOL, "version": "0.1.0", "queue_id": "q" * 32, "principal": "operator"}


class Gone(Exception):
    """The command closed the connection."""


class Talk:
    """One connection of the command, as the server sees it."""

    def __init__(self, sock: socket.socket, number: int) -> None:
        self.sock = sock
        self.number = number
        self.frames: list[bytes] = []

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self.sock.recv(size - len(data))
            if not piece:
                raise Gone
            data += piece
        return data

    def hear(self) -> list[dict]:
        length = self._exactly(4)
        payload = self._exactly(int.from_bytes(length, "big"))
        self.frames.append(length + payload)
        return json.loads(payload)

    def say(self, *messages: dict) -> None:
        self.sock.sendall(frame(*messages))

    def greet(self) -> None:
        hello = self.hear()
        assert [message["type"] for message in hello] == ["ClientHello"]
        self.say(WELCOME)


def frame(*messages: dict) -> bytes:
    payload = json.dumps(messages).encode()
    return len(payload).to_bytes(4, "big") + payload


class Peer:
    """Listens; `script(talk)` is called for each connection in turn, in a thread, and may run as long as it likes."""

    def __init__(self, path: str, script: Callable[[Talk], None]) -> None:
        self.path = path
        self.script = script
        self.talks: list[Talk] = []
        self.trouble: list[BaseException] = []
        self._listener = socket.socket(socket.AF_UNIX)
        # A socket address holds 107 bytes, and directories of tests are deep.
        directory = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY)
        self._listener.bind(f"/proc/self/fd/{directory}/{os.path.basename(path)}")
        os.close(directory)
        self._listener.listen()
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            talk = Talk(sock, len(self.talks))
            self.talks.append(talk)
            thread = threading.Thread(target=self._talk, args=(talk,))
            self._threads.append(thread)
            thread.start()

    def _talk(self, talk: Talk) -> None:
        try:
            self.script(talk)
        except (Gone, ConnectionError):
            pass
        except BaseException as error:  # noqa: BLE001 - told when the test ends
            self.trouble.append(error)
        finally:
            talk.sock.close()

    def close(self) -> None:
        # shutdown wakes the thread in accept(); close alone would not.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for talk in self.talks:
            with contextlib.suppress(OSError):
                talk.sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        assert not self.trouble, self.trouble


def answering(answers: dict[str, dict | list[dict] | Callable[[dict], list[dict]]]) -> Callable[[Talk], None]:
    """A script that answers each question by its type, the question's ``seq`` put in."""

    def script(talk: Talk) -> None:
        talk.greet()
        while True:
            for message in talk.hear():
                answer = answers[message["type"]]
                parts = answer(message) if callable(answer) else answer if isinstance(answer, list) else [answer]
                talk.say(*({"seq": message["seq"], **part} for part in parts))

    return script
