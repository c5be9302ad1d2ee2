"""Calls what may hang on a dead file server or resolver, in a thread that is left behind when it takes too long.

A thread that hangs in the kernel cannot be ended. So while any that was left behind has not come back, calls of the
same kind are told at once that there is no answer, and no further thread hangs.
"""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
FILE_SECONDS = 5.0
"""For a file that is read; a file server that is only slow answers in less."""

_left: Counter[str] = Counter()
"""Kind → threads that were left behind, never 0. Of those that began side by side all may hang."""
_lock = threading.Lock()


def within(seconds: float, kind: str, work: Callable[[], T]) -> T:
    """What `work` returns or raises.

    Raises `TimeoutError` when it takes longer, or when an earlier call of this `kind` has not come back; what `work`
    does after that is lost. Raises `OSError` ``EAGAIN`` when there is no thread to be had.
    """
    done = threading.Event()
    answer: list[Any] = []
    errors: list[BaseException] = []
    is_over = is_left = False

    def run() -> None:
        nonlocal is_over
        try:
            answer.append(work())
        except BaseException as error:  # noqa: BLE001  raised again by who waits
            errors.append(error)
        with _lock:
            is_over = True
            if is_left:
                _left[kind] -= 1
                if not _left[kind]:
                    del _left[kind]
        done.set()

    with _lock:
        if kind in _left:
            raise _silent()
    try:
        threading.Thread(target=run, name=kind, daemon=True).start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, "this account may have no more threads") from error
    if not done.wait(seconds):
        with _lock:
            if not is_over:
                is_left = True
                _left[kind] += 1
                raise _silent()
    if errors:
        raise errors[0]
    result: T = answer[0]
    return result


def _silent() -> OSError:
    return TimeoutError(errno.ETIMEDOUT, "the file system does not answer")
