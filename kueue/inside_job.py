"""Is this process part of a job of kueue? A service that is started there is ended with the job.

What a job leaves behind in the background belongs to it and is ended when its program has ended. A server or worker of
which somebody believes that it stays would go down a moment later, and nothing would start it again.
"""

from __future__ import annotations

import os

from kueue.errors import KueueError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

OVERRIDE = "KUEUE_INSIDE_JOB"
"""Set to 1 in the environment: start it all the same. Jobs that may leave processes behind have it."""
_RLIMIT_LOCKS = 10  # asm-generic/resource.h; the module `resource` has no name for it
_FIRST_TAG = 1 << 32
"""The runner marks the processes of a job by this soft limit; 31 bits above these 32 are never all zero."""


def refuse(what: str, elsewhere: str, environ: Mapping[str, str] = os.environ) -> None:
    """Raises `KueueError` if this process belongs to a job. `what`: "A worker"; `elsewhere`: how to do it rightly."""
    if environ.get(OVERRIDE) == "1" or not is_inside():
        return
    job = environ.get("KUEUE_JOB_ID", "")
    raise KueueError(
        f"{what} cannot be started inside of a job of kueue{f' (job {job})' if job.isdecimal() else ''}: "
        "it would be ended with the job.",
        hint=f"Start it outside of any job: {elsewhere}. Only for one that may end with the job: {OVERRIDE}=1.",
    )


def is_inside() -> bool:
    """Does this process carry the mark of a job, whatever its environment says?"""
    import resource  # noqa: PLC0415  a millisecond that only services need

    soft, hard = resource.getrlimit(_RLIMIT_LOCKS)
    # Where an administrator has set both, the soft one is not ours.
    return soft not in (resource.RLIM_INFINITY, hard) and soft >= _FIRST_TAG
