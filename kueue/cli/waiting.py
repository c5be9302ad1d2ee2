"""Waiting for the end of jobs: what is printed meanwhile, and what the command exits with."""

from __future__ import annotations

from kueue.cli.session import Session
from kueue.cli.text import harmless
from kueue.errors import EXIT_CANCELED, EXIT_OWN_FAILURE, EXIT_REFUSED
from kueue.units import format_id_ranges

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

JOB_NOT_FOUND = "Job not found!"

_LOOK_SECONDS = 3.0
# Longer than a job takes to start where there is room, short enough that nobody believes the command hangs.


def wait_for(session: Session, ids: Sequence[tuple[int, int]], *, prints_codes: bool) -> int:
    """Returns the highest exit code of the jobs, 1 at least if one does not exist.

    With `prints_codes` a single job's return code is printed alone (nothing if it was canceled), those of several as
    ``ID CODE`` in the order they end.
    """
    screen = session.screen
    total = sum(last - first + 1 for first, last in ids)
    is_quiet = getattr(session.arguments, "quiet", False)
    worst = done = failed = 0
    try:
        for message in session.client.watch(ids, look_seconds=None if is_quiet else _LOOK_SECONDS):
            if message["type"] == "JobList":
                tell_why_it_waits(session, message["jobs"][-1], is_alone=is_one(ids))
                continue
            if message["type"] == "Watching":
                missing = [(first, last) for first, last in message.get("missing", ())]
                if missing:
                    worst = max(worst, EXIT_REFUSED)
                    total -= sum(last - first + 1 for first, last in missing)
                    tell_missing(session, ids, missing)
                continue
            done += 1
            code = EXIT_OWN_FAILURE if message.get("outcome") is None else message.get("exit_code", 0)
            failed += code != 0
            worst = max(worst, code)
            _print_end(session, message, prints_codes=prints_codes, is_alone=is_one(ids))
            if total > 1 and not is_quiet:
                screen.status(f"{done} of {total} jobs ended{f', {failed} not well' if failed else ''}")
    except KeyboardInterrupt:
        tell_how_to_go_on(session, format_id_ranges(ids))
        return EXIT_CANCELED
    screen.clear_status()
    return worst


def tell_missing(session: Session, asked: Sequence[tuple[int, int]], missing: Sequence[tuple[int, int]]) -> None:
    """Says on stderr that jobs do not exist; which ones, if several were asked for."""
    which = "" if is_one(asked) else f" (ID={format_id_ranges(missing)})"
    session.screen.remark(f"{JOB_NOT_FOUND}{which}")


def tell_why_it_waits(session: Session, job: dict[str, Any], *, is_alone: bool) -> None:
    """Says on stderr why the job has not started, as the listing does; `is_alone`: no other one is waited for."""
    if job["state"] == "held":
        reason, more = "it is held", f"`kueue release {job['id']}` lets it start."
    else:
        reason, more = harmless(job.get("note") or "no reason is known"), f"`kueue explain {job['id']}` says more."
    subject = f"Job {job['id']} waits" if is_alone else f"No job has started yet; job {job['id']} waits"
    session.screen.remark(f"{subject}: {reason}. {more}")


def tell_how_to_go_on(session: Session, ids: str) -> None:
    """After an interrupt: the jobs were not touched."""
    session.screen.remark(
        f"\nNo longer waiting; the job goes on. `kueue wait-job {ids}` waits again, "
        f"`kueue remove-job --kill {ids}` ends it."
        if ids.isdigit()
        else f"\nNo longer waiting; the jobs go on. `kueue wait-job {ids}` waits again, "
        f"`kueue remove-job --kill {ids}` ends them."
    )


def _print_end(session: Session, message: dict[str, Any], *, prints_codes: bool, is_alone: bool) -> None:
    outcome = message.get("outcome")
    if outcome is None:
        session.screen.remark(f"Job {message['id']} was cleaned away; how it ended is not known any more.")
        return
    if not prints_codes:
        return
    if not is_alone:
        session.screen.print(f"{message['id']} {message.get('return_code', 0)}")
    elif outcome["type"] != "canceled":
        session.screen.print(str(message.get("return_code", 0)))
    session.screen.flush()


def is_one(ids: Sequence[tuple[int, int]]) -> bool:
    """Do the ranges name a single id?"""
    return len(ids) == 1 and ids[0][0] == ids[0][1]
