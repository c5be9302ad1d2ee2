"""The clocks of the machine; whoever decides by time gets its moments from here, as parameters.

Rules
- `wall` is for the record and for people; it may jump.
- `steady` is for deadlines inside one program; it stands still while the machine sleeps.
- `boottime` is for leases: it goes on while the machine sleeps, and all programs of one machine read the same value.
"""

from __future__ import annotations

import time

from kueue.model import Now


def wall() -> float:
    """UTC seconds since 1970."""
    return time.time()


def steady() -> float:
    """Seconds of ``CLOCK_MONOTONIC``."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def boottime() -> float:
    """Seconds of ``CLOCK_BOOTTIME`` (Linux), which counts suspended time."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def now() -> Now:
    """Both clocks of the core at one moment."""
    return Now(wall(), steady())
