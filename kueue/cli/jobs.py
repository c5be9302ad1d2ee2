"""The verbs that look at jobs, wait for them, and end them."""

from __future__ import annotations

from kueue.cli import job_json, job_text
from kueue.cli.session import Session
from kueue.cli.waiting import is_one, tell_missing, wait_for
from kueue.errors import EXIT_REFUSED, KueueError, UserError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_LINES_BESIDE_TABLE = 4
# Header, two lines of summary, and the prompt.


def list_jobs(session: Session) -> int:
    arguments, screen = session.arguments, session.screen
    states = set(arguments.states or ())
    if "pending" in states:
        states.add("held")  # shown as pending (held)
    limit = arguments.num_jobs
    is_page = limit is None and not (arguments.ids or arguments.json or arguments.quiet)
    if is_page:
        limit = max(1, screen.lines - _LINES_BESIDE_TABLE)
    question: dict[str, Any] = {"states": sorted(states), "limit": limit}
    if arguments.ids:
        question["ids"] = arguments.ids
    parts = session.client.ask_parts("ListJobs", **question)
    answer = {**parts[-1], "jobs": [job for part in parts for job in part["jobs"]]}
    if arguments.json:
        session.print_json(job_json.listing(answer))
    elif arguments.quiet:
        for job in answer["jobs"]:
            screen.print(str(job["id"]))
    else:
        for line in job_text.listing(screen, answer, session.now_wall):
            screen.print(line)
        selected = sum(count for state, count in answer.get("counts", ()) if not states or state in states)
        if is_page and not screen.is_terminal and len(answer["jobs"]) == limit < selected:
            # Whoever reads a file or a pipe does not see where a page ends.
            screen.remark(f"{limit} of {selected} jobs are shown; -n N shows more.")
    return 0


def show_job(session: Session) -> int:
    arguments, screen = session.arguments, session.screen
    parts = session.client.ask_parts("ShowJobs", ids=arguments.ids)
    details = [detail for part in parts for detail in part["jobs"]]
    missing = [(first, last) for part in parts for first, last in part.get("missing", ())]
    if arguments.json:
        session.print_json({"jobs": [job_json.detail(one) for one in details]})
    else:
        for index, detail in enumerate(details):
            if index:
                screen.print()
            for line in job_text.page(screen, detail, session.now_wall):
                screen.print(line)
            _print_streams(session, detail)
    if missing:
        tell_missing(session, arguments.ids, missing)
        return EXIT_REFUSED
    return 0


def wait_job(session: Session) -> int:
    return wait_for(session, session.arguments.ids, prints_codes=False)


def remove_job(session: Session) -> int:
    arguments = session.arguments
    return session.tell_results(
        session.client.change(
            "RemoveJobs", ids=arguments.ids, kill=arguments.kill or arguments.force, force=arguments.force
        )
    )


def clean_jobs(session: Session) -> int:
    answer = session.client.change("CleanJobs", failed=session.arguments.all)
    session.screen.print(answer.get("text") or "Removed finished and canceled jobs!")
    return 0


def hold(session: Session) -> int:
    return session.tell_results(session.client.change("HoldJobs", ids=session.arguments.ids))


def release(session: Session) -> int:
    return session.tell_results(session.client.change("ReleaseJobs", ids=session.arguments.ids))


def explain(session: Session) -> int:
    worst = 0
    answers: list[dict[str, Any]] = []
    is_alone = is_one(session.arguments.ids)
    for job in session.each_job(session.arguments.ids):
        try:
            answer = session.client.ask("ExplainJob", id=job)
        except UserError as error:
            if is_alone:
                raise
            session.report(error)
            worst = max(worst, error.exit_code)
            continue
        if session.arguments.json:
            answers.append(job_json.explanation(answer))
            continue
        if not is_alone:
            session.screen.print(f"job {job}:")
        for line in job_text.explanation(answer):
            session.screen.print(line)
    if session.arguments.json:
        session.print_json({"jobs": answers})
    return worst


def _print_streams(session: Session, detail: dict[str, Any]) -> None:
    """What is stored of the output; of a job that runs, what there is so far."""
    job = detail["row"]
    if detail.get("end") is not None:
        for line in job_text.streams(session.screen, detail["end"], job["id"]):
            session.screen.print(line)
        return
    if job["state"] != "running":
        return
    for stream in ("stdout", "stderr"):
        try:
            answer = session.client.ask("ReadOutput", id=job["id"], stream=stream)
        except KueueError as error:
            session.report(error)
            return
        so_far = job_text.readable(job_text.decoded(answer.get("data", "")))
        if so_far:
            for line in ("", session.screen.styled(f"=== {stream} ===", "bold"), so_far):
                session.screen.print(line)
        if answer.get("note"):
            session.screen.remark(f"{stream}: {answer['note']}")
