"""Keeps a worker connected: one session after the other for ever, with growing pauses while there is no server.

Rules
- A try that fails is one line of the log. Pauses double from half a second up to a bound and are scattered: a lab
  must not knock at a restarted server in step. A session that held makes the next pause short again.
- The older connection is closed before the next hello is sent.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from kueue import identity, log, net
from kueue.errors import KueueError
from kueue.protocol import codec
from kueue.worker.actions import Close
from kueue.worker.body import Body

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 25.0
"""A restarted server has all workers back within half a minute."""
TRIES_WITHIN_TIMEOUT = 4
HELD_SECONDS = 5.0
"""A session that lasted so long was a good one."""

_log = log.logger("worker")


@dataclass(frozen=True)
class Address:
    """Where the server is and what proves us to it."""

    host: str
    port: int
    identities: Sequence[identity.Identity]

    def is_other(self, address: Address) -> bool:
        """Another server or other secrets; with two of them the connection may be by either, which counts as other."""
        ours, theirs = ([one.fingerprint for one in some.identities] for some in (self, address))
        return (self.host, self.port, ours) != (address.host, address.port, theirs) or len(theirs) > 1

    @property
    def name(self) -> str:
        return f"{self.host}:{self.port}"


class Pauses:
    """How long to wait before the next try."""

    def __init__(self, scatter: Callable[[], float] = random.random) -> None:
        self._scatter = scatter
        self._next = FIRST_PAUSE_SECONDS

    def after(self, *, held: bool, lasting: bool = False, timeout_seconds: float | None = None) -> float:
        """`held`: the session was a good one. `lasting`: the server will say the same until somebody acts.

        `timeout_seconds`: the server's ``worker_timeout_seconds``, if known. A server that is back gives the jobs away
        of whoever does not come within it, so there must be time for several tries.
        """
        longest = LONGEST_PAUSE_SECONDS
        if timeout_seconds is not None:
            longest = max(FIRST_PAUSE_SECONDS, min(longest, timeout_seconds / TRIES_WITHIN_TIMEOUT))
        if held:
            self._next = FIRST_PAUSE_SECONDS
        if lasting:
            self._next = longest = LONGEST_PAUSE_SECONDS
        pause = min(self._next, longest)
        self._next = min(longest, 2 * pause)
        return pause * (0.7 + 0.3 * self._scatter())


async def keep_connected(body: Body, address: Callable[[], Address], hurry: Callable[[], trio.Event]) -> None:
    """Never returns. `address`: asked before every try. `hurry`: an event that ends the present pause."""
    pauses = Pauses()
    while True:
        if not body.is_ours():  # also while there is no server, for as long as that may be
            await trio.sleep_forever()  # what ends the program ends this
        here = address()
        began = trio.current_time()
        close = await _one_session(body, here)
        held = trio.current_time() - began >= HELD_SECONDS and body.was_welcome
        pause = pauses.after(held=held, lasting=close.lasting, timeout_seconds=body.agent.timeout_seconds)
        hint = f" {close.hint}" if close.hint else ""
        _log.warning("%s%s (next try in %.1f s)", close.reason, hint, pause)
        event = hurry()
        with trio.move_on_after(pause):
            await event.wait()


async def _one_session(body: Body, address: Address) -> Close:
    """One try. Returns why there is no session any more."""
    body.was_welcome = False
    try:
        async with net.connect_tls(address.host, address.port, address.identities, codec.to_worker) as stream:
            # Both ends are proven, and the first frame after the welcome may hold an offer of any size.
            return await body.converse(stream.speaking(codec.to_worker))
    except KueueError as error:
        return Close(str(error), error.hint)
    except OSError as error:
        return Close(f"The connection to {address.name} failed: {error.strerror or error}.")
