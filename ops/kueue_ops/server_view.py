"""What the server says about the workers: asked at most every few seconds, and never waited for longer than a limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from kueue.client import Client, connect
from kueue.config import load
from kueue.errors import KueueError
from kueue_ops.sight import ServerWord, WorkerSight

FRESH_SECONDS = 2.0
"""An answer may be so old when a host is judged by it: hosts are looked at in crowds."""
ANSWER_SECONDS = 8.0
"""The longest that a host waits for the server; a connection alone may take 5."""
AWAY_SECONDS = 10.0
"""After silence it is not waited for again for so long."""
_ALIVE = frozenset({"online", "offline", "set aside"})
"""States of a worker that is connected; ``silent`` and ``away`` are the others."""


class ServerView:
    """Asks one server for its list of workers; safe to use from all threads.

    `tell` gets a sentence and a hint each time the server is lost, and a sentence without hint when it is back.
    """

    def __init__(
        self,
        connected: Callable[[], Client],
        tell: Callable[[str, str], None],
        *,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        """`connected`: makes a client for one question."""
        self._connected = connected
        self._tell = tell
        self._answer_seconds = answer_seconds
        self._lock = threading.Condition()
        self._is_asking = False
        self._answered_at = float("-inf")
        self._asked_at = float("-inf")
        self._waited_in_vain_at = float("-inf")
        self._workers: Mapping[str, WorkerSight] | None = None
        self._is_lost = False

    def word(self, worker_name: str) -> ServerWord:
        """What the server says now of the worker of this name."""
        workers = self.workers()
        if workers is None:
            return ServerWord(is_reached=False)
        return ServerWord(is_reached=True, worker=workers.get(worker_name))

    def workers(self) -> Mapping[str, WorkerSight] | None:
        """All workers by name, as the server answered at most `FRESH_SECONDS` ago; None when it is not reached.

        Of several of one name the living one counts.
        """
        begun = time.monotonic()
        trouble = "The server does not answer."
        with self._lock:
            while True:
                now = time.monotonic()
                # The age counts from the question: what happened on a host before the answer may not stand in it.
                if self._asked_at >= begun - FRESH_SECONDS and self._answered_at >= self._asked_at:
                    return self._workers
                if not self._is_asking:
                    try:
                        threading.Thread(target=self._ask, name="server view", daemon=True).start()
                    except RuntimeError:  # the next one tries again
                        trouble = (
                            "There is no thread left to ask the server: this account is at its limit of processes."
                        )
                        left = float("inf")
                        break
                    self._is_asking = True  # the answer waits for our lock
                left = begun + self._answer_seconds - now
                if left <= 0 or now - self._waited_in_vain_at < AWAY_SECONDS:
                    break
                self._lock.wait(left)
            if left <= 0:
                self._waited_in_vain_at = time.monotonic()
        self._lost(trouble, "Hosts are judged by what they show themselves.")
        return None

    def _ask(self) -> None:
        begun = time.monotonic()
        workers: dict[str, WorkerSight] | None = None
        trouble: tuple[str, str] | None = None
        try:
            with self._connected() as client:
                client.tell = lambda _: None
                client.welcome_seconds = 5.0
                workers = _by_name(client.ask("ListWorkers").get("workers", ()))
        except KueueError as error:
            trouble = (str(error), error.hint)
        except Exception as error:  # noqa: BLE001  a damaged answer must not leave everybody waiting
            trouble = (f"The answer of the server cannot be used: {type(error).__name__}: {error}.", "")
        with self._lock:
            self._workers = workers
            self._asked_at, self._answered_at = begun, time.monotonic()
            self._is_asking = False
            self._lock.notify_all()
            if workers is not None:
                self._waited_in_vain_at = float("-inf")
            was_lost = self._is_lost
            self._is_lost = was_lost and workers is None
        if trouble is not None:
            self._lost(*trouble)
        elif was_lost:
            self._tell("The server answers again.", "")

    def _lost(self, sentence: str, hint: str) -> None:
        with self._lock:
            if self._is_lost:
                return
            self._is_lost = True
        self._tell(sentence, hint)


def client_of(path: str) -> Client:
    """A client for the server that the settings at `path` name now: a new shared secret counts from the next question.

    Raises `ConfigError`.
    """
    return connect(load(path, ()), patience_seconds=2.0)


def _by_name(rows: list[dict[str, object]]) -> dict[str, WorkerSight]:
    found: dict[str, WorkerSight] = {}
    for row in rows:
        name, state = str(row["name"]), row.get("state")
        sight = WorkerSight(
            name,
            state in _ALIVE,
            version=str(row.get("version", "")),
            boot_id=str(row.get("boot_id", "")),
            offline=state == "offline",
        )
        if name not in found or sight.is_alive:
            found[name] = sight
    return found
