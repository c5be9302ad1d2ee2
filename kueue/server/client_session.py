"""A command's connection: changes go to the engine, questions are answered by tasks of the session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import trio

from kueue import __version__, log
from kueue.errors import KueueError
from kueue.net import MessageStream
from kueue.protocol import messages as m
from kueue.server import answers
from kueue.server.session import PRINCIPAL, Session

if TYPE_CHECKING:
    from kueue.server.driver import Driver

TASKS_MAX = 64
"""Questions under way in one session, followed streams included."""

_log = log.logger("server.sessions")


class ClientSession(Session):
    """See `Session`. Questions are answered in any order, each under its ``seq``."""

    def __init__(self, driver: Driver, stream: MessageStream[Any]) -> None:
        super().__init__(driver, stream)
        self._nursery: trio.Nursery | None = None
        self._tasks: dict[int, trio.CancelScope] = {}

    async def serve(self, nursery: trio.Nursery, rest: Sequence[m.Message]) -> None:
        self._nursery = nursery
        _log.debug("%s: hello of a command", self.stream.name)
        self.say(
            m.Welcome(protocol=m.PROTOCOL, version=__version__, queue_id=self.driver.queue_id, principal=PRINCIPAL)
        )
        messages = rest
        while not self.is_ending:
            if messages:
                self.driver.post(self, messages)
                await self.driver.mailbox.room(self.number, 1)
            messages = await self.stream.receive()
            if not messages:
                break
        if self.is_ending:
            await trio.sleep_forever()  # `end` closes when the last words are out

    def ask(self, question: m.Message) -> None:
        if isinstance(question, m.StopReading):
            scope = self._tasks.get(question.seq)
            if scope is not None:
                scope.cancel()
            return
        if isinstance(question, m.ClientHello):
            self.stream.drop("said hello twice")
            return
        assert self._nursery is not None
        seq: int = getattr(question, "seq", -1)
        if isinstance(question, m.CleanJobs):
            # Belongs to the server: it is carried to its end even if this client goes.
            try:
                self.driver.clean(self.number, question)
            except KueueError as error:
                self._say_failed(seq, error)
            return
        if seq in self._tasks or len(self._tasks) >= TASKS_MAX:
            self.say(m.Failed(seq=seq, error="Too many questions at once on this connection."))
            return
        self._tasks[seq] = scope = trio.CancelScope()
        self._nursery.start_soon(self._answer, seq, question, scope)

    async def _answer(self, seq: int, question: m.Message, scope: trio.CancelScope) -> None:
        try:
            with scope:
                await answers.answer(self, question)
        except KueueError as error:
            self._say_failed(seq, error)
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            raise  # of the connection
        except Exception:  # noqa: BLE001  logged whole; it ends this session alone
            _log.exception("a bug: %s cannot be answered a %s", self.stream.name, type(question).__name__)
            self.end()
        finally:
            del self._tasks[seq]

    def _say_failed(self, seq: int, error: KueueError) -> None:
        self.say(m.Failed(seq=seq, error=str(error), hint=error.hint, exit_code=error.exit_code))
