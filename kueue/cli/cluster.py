"""The verbs about workers, lab-wide resources and the server."""

from __future__ import annotations

from kueue import __version__
from kueue.cli import job_json, worker_text
from kueue.cli.session import Session
from kueue.errors import EXIT_REFUSED, KueueError


def list_workers(session: Session) -> int:
    workers = session.client.ask("ListWorkers")["workers"]
    if session.arguments.json:
        session.print_json({"workers": [job_json.worker(one) for one in workers]})
    elif session.arguments.quiet:
        for one in workers:
            session.screen.print(str(one["id"]))
    elif not workers:
        session.screen.print("No workers registered on server!")
    else:
        for line in worker_text.listing(session.screen, workers, session.now_wall):
            session.screen.print(line)
    return 0


def show_worker(session: Session) -> int:
    answer = session.client.ask("ListWorkers", ids=session.arguments.ids)
    if session.arguments.json:
        session.print_json({"workers": [job_json.worker(one) for one in answer["workers"]]})
    else:
        for index, one in enumerate(answer["workers"]):
            if index:
                session.screen.print()
            for line in worker_text.page(session.screen, one, session.now_wall):
                session.screen.print(line)
    if answer.get("missing"):
        session.screen.remark("Worker not found!")
        return EXIT_REFUSED
    return 0


def list_resources(session: Session) -> int:
    rows = session.client.ask("ListResources")["resources"]
    if session.arguments.json:
        session.print_json({"resources": [{key: row[key] for key in ("name", "used", "total")} for row in rows]})
    elif session.arguments.quiet:
        for row in rows:
            session.screen.print(row["name"])
    elif not rows:
        session.screen.print("No resources configured on the server.")
    else:
        for line in worker_text.resources(session.screen, rows):
            session.screen.print(line)
    return 0


def node(session: Session) -> int:
    worst = 0
    for name in session.arguments.names:
        try:
            answer = session.client.change(
                "SetNode", name=name, state=session.arguments.state, force=session.arguments.force
            )
        except KueueError as error:
            if len(session.arguments.names) == 1:
                raise
            session.report(error)
            worst = max(worst, error.exit_code)
            continue
        worst = max(worst, session.tell_results(answer))
    return worst


def version(session: Session) -> int:
    """Of both programs; a server that is away is told of and makes the code 1."""
    client = session.client
    # A question about versions is asked when something is wrong; it must not wait.
    client.patience_seconds = min(session.patience_seconds, 2.0)
    known: dict[str, object] = {"command": __version__, "server": None, "server_started": None}
    trouble: KueueError | None = None
    try:
        info = client.ask("ServerInfo")
        known["server"] = {
            key: info.get(key) for key in ("version", "protocol", "queue_id", "pid", "read_only", "lock_trouble")
        }
        known["server_started"] = info.get("started_wall")
    except KueueError as error:
        trouble = error
    if session.arguments.json:
        session.print_json(known)
    else:
        session.screen.print(f"kueue {__version__}")
        if trouble is None:
            session.screen.print(f"server {info['version']} at {client.server}, pid {info['pid']}")
            if info.get("read_only"):
                session.screen.remark(f"The server accepts nothing at the moment: {info['read_only']}")
            if info.get("lock_trouble"):
                session.screen.remark(f"Warning: {info['lock_trouble']}.")
    if trouble is not None:
        session.report(trouble)
        return trouble.exit_code
    return 0
