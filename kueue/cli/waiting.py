"""Waiting for the end of jobs: what is printed meanwhile, and what the command exits with."""

from __future__ import annotations

from kueue.cli.session import Session
from kueue.cli.text import harmless
from kueue.errors import EXIT_OWN_FAILURE, EXIT_REFUSED
from kueue.units import format_id_ranges, subtract_id_ranges

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

JOB_NOT_FOUND = "Job not found!"

_LOOK_SECONDS = 3.0
# Longer than a job takes to start where there is room, short enough that nobody believes the command hangs.
_BAD_ENDS_TOLD = 10
_RANGES_NAMED = 20
# Of what is left of a range that was typed; else those that are over are named with it.


def wait_for(session: Session, ids: Sequence[tuple[int, int]], *, prints_codes: bool) -> int:
    """Returns the highest exit code of the jobs, 1 at least if one does not exist.

    With `prints_codes` a single job's return code is printed alone (nothing if it was canceled), those of several as
    ``ID CODE`` in the order they end. What did not succeed is told on stderr.
    """
    screen = session.screen
    total = sum(last - first + 1 for first, last in ids)
    over: list[tuple[int, int]] = []
    is_quiet = getattr(session.arguments, "quiet", False)
    worst = done = failed = 0
    try:
        for message in session.client.watch(ids, look_seconds=None if is_quiet else _LOOK_SECONDS):
            if message["type"] == "JobList":
                tell_why_it_waits(session, message["jobs"][-1], is_alone=total - done == 1)
                continue
            if message["type"] == "Watching":
                missing = [(first, last) for first, last in message.get("missing", ())]
                if missing:
                    worst = max(worst, EXIT_REFUSED)
                    total -= sum(last - first + 1 for first, last in missing)
                    over += missing
                    tell_missing(session, ids, missing)
                continue
            done += 1
            over.append((message["id"], message["id"]))
            code = EXIT_OWN_FAILURE if message.get("outcome") is None else message.get("exit_code", 0)
            failed += code != 0
            worst = max(worst, code)
            _print_end(session, message, prints_codes=prints_codes, is_alone=is_one(ids))
            if code != 0 and not is_quiet and failed <= _BAD_ENDS_TOLD:
                tell_bad_end(session, message)
            if total > 1 and not is_quiet:
                screen.status(f"{done} of {total} jobs ended{f', {failed} not well' if failed else ''}")
    except KeyboardInterrupt:
        tell_how_to_go_on(session, ids, over)
        raise
    screen.clear_status()
    if failed > _BAD_ENDS_TOLD and not is_quiet:
        screen.remark(f"{failed - _BAD_ENDS_TOLD} more did not end well: `kueue list-jobs --failed --canceled`.")
    return worst


def tell_bad_end(session: Session, message: dict[str, Any]) -> None:
    """Says on stderr how a job ended that did not succeed, from a `JobEnded`, and where more is to be seen."""
    outcome, job = message.get("outcome"), message["id"]
    if outcome is None:
        return  # it was cleaned away, which is told already
    sentence = f"Job {job} {bad_end(outcome)}."
    is_own = outcome["type"] in {"exited", "signaled", "timed_out"}
    more = f"`kueue log {job}` and `kueue log --stderr {job}` show" if is_own else f"`kueue show-job {job}` shows"
    what = "its output" if is_own else "all about it"
    session.screen.remark(f"{sentence} {more} {what}.")
    hint = hint_at_not_started(outcome)
    if hint:
        session.screen.remark(f"Hint: {hint}")


def bad_end(outcome: dict[str, Any]) -> str:
    """How a job ended, as the rest of a sentence that begins with the job; no full stop."""
    kind, reason = outcome["type"], harmless(outcome.get("reason") or "").removesuffix(".")
    if kind == "exited":
        return f"exited with code {outcome['code']}"
    if kind == "signaled":
        return f"was ended by signal {outcome['signal']}{_signal_name(outcome['signal'])}"
    if kind == "not_started":
        return f"could not start: {reason}"
    if kind == "timed_out":
        return f"was stopped after its time limit of {outcome['after_seconds']:g} s"
    words = {"canceled": "was canceled", "lost": "was lost"}.get(kind, kind)
    return f"{words}: {reason}" if reason else words


def hint_at_not_started(outcome: dict[str, Any]) -> str:
    """What is to be typed instead when a whole command line was given as one word; empty if that was not so."""
    program = harmless(outcome.get("reason") or "").rpartition(": ")[0]
    if outcome.get("cause") != "not_found" or " " not in program.strip():
        return ""
    from shlex import quote  # noqa: PLC0415 - only a bad end pays for it

    return f"'{program}' was taken as one word; use a shell: sh -c {quote(program)}"


def _signal_name(number: int) -> str:
    import signal  # noqa: PLC0415 - 2 ms that only a bad end pays for

    try:
        return f" ({signal.Signals(number).name})"
    except ValueError:
        return ""


def tell_missing(session: Session, asked: Sequence[tuple[int, int]], missing: Sequence[tuple[int, int]]) -> None:
    """Says on stderr that jobs do not exist; which ones, if several were asked for."""
    which = "" if is_one(asked) else f" (ID={format_id_ranges(missing)})"
    session.screen.remark(f"{JOB_NOT_FOUND}{which}")


def tell_why_it_waits(session: Session, job: dict[str, Any], *, is_alone: bool) -> None:
    """Says on stderr why the job does not run, as the listing does; `is_alone`: no other one is waited for now."""
    if job["state"] == "held":
        reason, more = "it is held", f"`kueue release {job['id']}` lets it start."
    else:
        reason, more = harmless(job.get("note") or "no reason is known"), f"`kueue explain {job['id']}` says more."
    subject = f"Job {job['id']} waits" if is_alone else f"None of the jobs runs now; job {job['id']} waits"
    session.screen.remark(f"{subject}: {reason}. {more}")
    from kueue.cli.job_text import against_other_work  # noqa: PLC0415 - a job that starts need not pay for it

    advice = against_other_work(job.get("note") or "")
    if advice and job["state"] != "held":
        session.screen.remark(f"Hint: {' '.join(advice)}")


def tell_how_to_go_on(session: Session, asked: Sequence[tuple[int, int]], over: Sequence[tuple[int, int]]) -> None:
    """After an interrupt: the jobs that are not `over` were not touched."""
    left = subtract_id_ranges(asked, over)
    if not left:
        return
    is_alone = is_one(left)
    if len(left) > _RANGES_NAMED:
        left = subtract_id_ranges(asked, [(0, left[0][0] - 1)])
    ids = format_id_ranges(left)
    session.screen.remark(
        f"\nNo longer waiting; {'the job goes' if is_alone else 'the jobs go'} on. `kueue wait-job {ids}` waits again, "
        f"`kueue remove-job --kill {ids}` ends {'it' if is_alone else 'them'}."
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
