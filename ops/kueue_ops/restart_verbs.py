"""What ``kueue_restart_workers`` can be told to do: the rounds, one round, or a thing on all hosts at once."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from kueue import console, log, places
from kueue.cli.screen import Screen
from kueue.cli.text import harmless
from kueue.errors import EXIT_REFUSED, KueueError
from kueue_ops import lab_check, progress, restart_loop, restart_settings, restart_status
from kueue_ops.command_line import RESTART_WORKERS, leave
from kueue_ops.host_care import Reach
from kueue_ops.lanes import Lanes, Ticket
from kueue_ops.remote import Remote
from kueue_ops.restart_settings import Laboratory
from kueue_ops.server_view import ServerView, client_of
from kueue_ops.sight import Trouble
from kueue_ops.trouble import HostTrouble, trouble

_log = log.logger("restart")


def run(options: argparse.Namespace) -> int:
    """Carry out what the command line says. Returns the exit code. Raises `KueueError`."""
    # An end by `kill` shall leave the terminal as an interrupt does; the endless loop has handlers of its own.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    log.start("info")
    lab = restart_settings.load(options.config, options.hosts)
    level = "debug" if options.debug else lab.config.common.log_level
    log.start(level)
    if options.status:
        return _status(lab, is_json=options.json)
    if options.check:
        return _check(lab, level, is_json=options.json)
    if options.push_config:
        return _push_config(lab, level, force=options.force)
    if options.stop:
        _refuse_beside_the_loop(lab)
        return _stop(lab, level)
    with restart_loop.lock(lab):
        if options.once:
            code = restart_loop.once(lab, _reach(lab))
            return leave(code)
        return restart_loop.Loop(lab, options.hosts, _reach).run()


def _reach(lab: Laboratory) -> Reach:
    return lambda address, ticket: Remote(address, lab.settings, ticket)


def _status(lab: Laboratory, *, is_json: bool) -> int:
    """Returns 0 if the server sees a worker of every host."""
    troubles: list[str] = []
    view = ServerView(
        partial(client_of, lab.config.path), lambda sentence, hint: troubles.append(f"{sentence} {hint}".strip())
    )
    workers = view.workers()
    known = restart_status.read(lab.status)
    pid = places.holder(lab.lock)
    rows = restart_status.merged(list(lab.hosts), known, workers)
    if is_json:
        answer = restart_status.as_json(
            rows, pid=pid, server_reached=workers is not None, recheck_seconds=lab.interval_seconds
        )
        print(json.dumps(answer, indent=2))
    else:
        screen = Screen()
        for line in restart_status.table(screen, rows, is_running=pid is not None):
            screen.print(line)
        screen.flush()
    for sentence in troubles[:1]:
        print(sentence, file=sys.stderr)
    if pid is None:
        print(f"{RESTART_WORKERS} does not run on this machine. Start it: screen {RESTART_WORKERS}", file=sys.stderr)
    return 0 if all(row.server in {"alive", "offline"} for row in rows) else EXIT_REFUSED


def _check(lab: Laboratory, level: str, *, is_json: bool) -> int:
    def ask(ticket: Ticket) -> Mapping[str, Any]:
        host = ticket.key
        with Remote(lab.hosts[host], lab.settings, ticket) as remote:
            answer = remote.run_doctor()
        if not isinstance(answer, Mapping) or not isinstance(answer.get("findings"), list):
            raise trouble(
                "command", f"{host}: `kueue doctor` there answered something else.", "Is it the same version?"
            )
        return answer

    answers = _on_all(lab, "checked", level, ask)
    found = lab_check.lines({host: answers[host] for host in lab.hosts})
    if is_json:
        print(json.dumps(lab_check.as_json(found), indent=2))
    else:
        screen = Screen()
        colours = {"ok": "green", "note": "blue", "warning": "yellow", "problem": "red"}
        width = max(len(line.host) for line in found)
        for line in found:
            state = screen.styled(f"{line.state:<7}", colours[line.state])
            hint = f" {line.hint}" if line.hint else ""
            screen.print(f"{line.host:<{width}}  {state}  {harmless(f'{line.name:<9} {line.text}{hint}')}")
        screen.flush()
    return 0 if lab_check.is_well(found) else EXIT_REFUSED


def _refuse_beside_the_loop(lab: Laboratory) -> None:
    pid = places.holder(lab.lock)
    if pid is not None:
        raise KueueError(
            f"{RESTART_WORKERS} runs here (pid {pid}) and would start the workers again.",
            hint=f"Stop it first: kill {pid}",
        )


def _stop(lab: Laboratory, level: str) -> int:
    def stop(ticket: Ticket) -> str:
        with Remote(lab.hosts[ticket.key], lab.settings, ticket) as remote:
            return remote.stop()

    return _told(lab, _on_all(lab, "stopped", level, stop))


def _push_config(lab: Laboratory, level: str, *, force: bool) -> int:
    text = Path(lab.config.path).read_text(encoding="utf-8-sig")

    def push(ticket: Ticket) -> str:
        host = ticket.key
        with Remote(lab.hosts[host], lab.settings, ticket) as remote:
            result = remote.push_config(text, force=force)
        if result == "differs":
            hint = f"To replace it: {RESTART_WORKERS} --push-config --force {host}"
            raise trouble("command", "other settings are there and were left alone.", hint)
        return {"written": "the settings were written", "same": "the settings were there already"}[result]

    return _told(lab, _on_all(lab, "done", level, push))


def _told(lab: Laboratory, answers: Mapping[str, Any]) -> int:
    """A line for each host; results on stdout, troubles on stderr."""
    screen = Screen()
    for host in lab.hosts:
        answer = answers[host]
        if isinstance(answer, Trouble):
            console.complain(f"{host}: {answer.sentence}", answer.hint and f"  {answer.hint}")
        else:
            screen.print(f"{host}: {harmless(answer)}")
    screen.flush()
    return EXIT_REFUSED if any(isinstance(answer, Trouble) for answer in answers.values()) else 0


def _on_all(lab: Laboratory, what: str, level: str, work: Callable[[Ticket], Any]) -> dict[str, Any]:
    """What `work` returned for each host, or the `Trouble` that it met; hosts side by side, each within its limit."""
    for remark in lab.remarks:
        _log.warning("%s", remark)
    lanes = Lanes(lab.settings.parallel_hosts, lab.look_seconds)
    answers: dict[str, Any] = {}

    with progress.shown(what, len(lab.hosts), level) as tell:
        for result in lanes.each(list(lab.hosts), work):
            error = result.error
            if error is None:
                answers[result.key] = result.value
            elif isinstance(error, HostTrouble):
                answers[result.key] = msgspec.structs.replace(
                    error.trouble, sentence=error.trouble.sentence.removeprefix(f"{result.key}: ")
                )
            elif result.is_hung:
                answers[result.key] = Trouble("hung", "It does not come back; it was given up.")
            elif isinstance(error, Exception):
                _log.debug("%s", log.keys(host=result.key), exc_info=error)
                answers[result.key] = Trouble("ssh", f"A fault in kueue itself: {type(error).__name__}: {error}")
            else:
                raise error
            tell(result.key)
    return answers
