"""A worker's connection: everything it says goes to the engine, read as soon as it comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import trio

from kueue import log
from kueue.net import MessageStream
from kueue.protocol import messages as m
from kueue.server.mailbox import WORKER_BOUND
from kueue.server.session import Session

if TYPE_CHECKING:
    from kueue.server.driver import Driver

_log = log.logger("server.sessions")


class WorkerSession(Session):
    """See `Session`; its first message is the worker's hello itself."""

    is_worker = True

    def __init__(self, driver: Driver, stream: MessageStream[Any], name: str) -> None:
        super().__init__(driver, stream)
        self.name = name

    async def serve(self, nursery: trio.Nursery, rest: Sequence[m.Message]) -> None:  # noqa: ARG002  nothing to start
        _log.info("%s: hello of worker %s", self.stream.name, log.keys(worker=self.name))
        messages = rest
        while messages and not self.is_ending:
            outputs = [message for message in messages if isinstance(message, m.FetchedOutput)]
            for message in outputs:
                self.driver.outputs.fetched(self.number, message)
            if outputs:
                messages = [message for message in messages if not isinstance(message, m.FetchedOutput)]
            self.driver.post(self, messages)
            await self.driver.mailbox.room(self.number, WORKER_BOUND)
            messages = await self.stream.receive()
        if self.is_ending:
            # Sent away: the last words go out before the connection closes.
            await trio.sleep_forever()
        # It has hung up; what it said before is handled first.
        await self.driver.mailbox.room(self.number, 1)
