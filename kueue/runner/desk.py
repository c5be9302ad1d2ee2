"""Where workers attach: the listening socket, who is knocking, and the one that counts."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import socket
from collections.abc import Callable
from typing import Any

from kueue.runner.orders import Order, read_order
from kueue.runner.rundir import Rundir
from kueue.runner.wire import Lines, line_of, peer_uid

WAITING_ATTACHMENTS = 8  # connections that have not said `Attach` yet


class Desk:
    """The newest attachment gets what is told and is obeyed; an older one is closed.

    `attach` is called with the `Attach` of a new one, `obey` with each later line, `lost` when the newest is gone.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        attach: Callable[[Order], None],
        obey: Callable[[bytes], None],
        lost: Callable[[], None],
    ) -> None:
        self.listener: socket.socket | None = None
        self._selector = selector
        self._attach = attach
        self._obey = obey
        self._lost = lost
        self._newest: Lines | None = None
        self._waiting: dict[int, Lines] = {}

    @property
    def is_empty(self) -> bool:
        return self._newest is None and not self._waiting

    def open(self, place: Rundir) -> None:
        self.listener = place.listen()
        self._selector.register(self.listener, selectors.EVENT_READ)

    def close(self) -> None:
        self.drop()
        self.close_door()

    def close_door(self) -> None:
        """Nobody attaches any more until it is opened again; whoever is attached stays."""
        if self.listener is not None:
            self._selector.unregister(self.listener)
            self.listener.close()
            self.listener = None

    def tell(self, what: str, **more: Any) -> None:
        if self._newest is not None:
            self._newest.put(line_of({"type": what, **more}))

    @property
    def has_hung_up(self) -> bool:
        """The newest attachment is closed at its other end, though what it sent before may not all be read."""
        if self._newest is None or not self._newest.open:
            return True
        look = select.poll()
        look.register(self._newest, select.POLLRDHUP)
        return bool(look.poll(0))

    def flush(self) -> None:
        if self._newest is None:
            return
        self._newest.flush()
        want(self._selector, self._newest)

    def drop(self) -> None:
        """Close the newest attachment."""
        if self._newest is not None:
            self._newest.flush()
            close(self._selector, self._newest)
            self._newest = None

    def serve(self, ready: set[int]) -> None:
        """Handle what has come on these descriptors."""
        if self.listener is not None and self.listener.fileno() in ready:
            self._accept()
        for lines in list(self._waiting.values()):
            if lines.fileno() in ready:
                self._hear_waiting(lines)
        newest = self._newest
        if newest is not None and newest.fileno() in ready:
            self._obey_all(newest, newest.receive())

    def _accept(self) -> None:
        assert self.listener is not None
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                if peer_uid(connection) not in (os.getuid(), 0) or len(self._waiting) >= WAITING_ATTACHMENTS:
                    connection.close()
                    continue
                lines = Lines(connection)
                self._waiting[lines.fileno()] = lines
                self._selector.register(lines, selectors.EVENT_READ)

    def _hear_waiting(self, lines: Lines) -> None:
        received = lines.receive()
        if not received and lines.open:
            return
        del self._waiting[lines.fileno()]
        order = _attach_order(received[0]) if received else None
        if order is None:
            close(self._selector, lines)
            return
        self.drop()
        self._newest = lines
        self._attach(order)
        self._obey_all(lines, received[1:])

    def _obey_all(self, lines: Lines, received: list[bytes]) -> None:
        for line in received:
            if self._newest is lines:  # it may have detached
                self._obey(line)
        if not lines.open and self._newest is lines:
            self.drop()
            self._lost()


def want(selector: selectors.BaseSelector, lines: Lines) -> None:
    """Wake for writing only while there is something to write."""
    wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if lines.waits_to_send else 0)
    if lines.open and selector.get_key(lines).events != wanted:
        selector.modify(lines, wanted)


def close(selector: selectors.BaseSelector, lines: Lines) -> None:
    with contextlib.suppress(KeyError, ValueError):
        selector.unregister(lines)
    lines.close()


def _attach_order(line: bytes) -> Order | None:
    order = read_order(line)
    return order if order is not None and order["type"] == "Attach" else None
