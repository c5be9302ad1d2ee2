"""Threads for calls that block, of an account that may be at its limit of processes at any moment.

A program that makes a thread there gets a bare `RuntimeError` from Python, wherever it happens to be; the job that
forks without end may be its own. Here that is either a sentence for who asked, or a wait until there is one again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import trio

from kueue import log
from kueue.errors import UserError

T = TypeVar("T")

RETRY_SECONDS = 1.0

_NONE_TO_BE_HAD = "can't start new thread"
"""What Python says then (``_threadmodule.c``)."""

_log = log.logger("threads")


@contextmanager
def wanted(purpose: str) -> Iterator[None]:
    """Around what starts a thread. Raises `UserError` where there is none to be had."""
    try:
        yield
    except RuntimeError as error:
        if str(error) != _NONE_TO_BE_HAD:
            raise
        raise UserError(
            f"There is no thread left for the {purpose}: this account is at its limit of processes.",
            hint="See `ulimit -u`, and what runs there: `ps -u USER -L`.",
        ) from error


async def patiently(
    call: Callable[..., T],
    *args: Any,
    abandon_on_cancel: bool = False,
    limiter: trio.CapacityLimiter | None = None,
) -> T:
    """As `trio.to_thread.run_sync`; waits as long as no thread can be had."""
    is_told = False
    while True:
        try:
            return await trio.to_thread.run_sync(call, *args, abandon_on_cancel=abandon_on_cancel, limiter=limiter)
        except RuntimeError as error:
            if str(error) != _NONE_TO_BE_HAD:
                raise
        if not is_told:
            is_told = True
            _log.warning("no thread can be made: the account is at its limit of processes; trying again")
        await trio.sleep(RETRY_SECONDS)
