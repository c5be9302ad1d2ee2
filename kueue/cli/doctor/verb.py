"""The verb ``doctor``: has everything measured at once, judges it, prints a line for each finding.

Rules
- It writes nothing, needs nothing (no settings, no server, no terminal, no variable but HOME) and is never late: each
  probe has a limit, and all of them together end within `LIMIT_SECONDS`.
- Only what needs the settings waits for the settings.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

from kueue import console
from kueue.cli.doctor import LIMIT_SECONDS, file_facts, file_verdict, host_facts, host_verdict, lab_facts, lab_verdict
from kueue.cli.doctor.finding import NOTE, OK, PROBLEM, WARNING, Answer, Finding, as_json, is_well, ordered
from kueue.cli.doctor.probes import Probes
from kueue.cli.session import Session
from kueue.cli.text import harmless
from kueue.errors import EXIT_REFUSED

_SETTINGS_SECONDS = 4.5
"""Reading one file, and two derivations of a third of a second each, on a busy machine."""
_FILE_SECONDS = 3.0
_PROGRAM_SECONDS = 6.0
_SERVER_SECONDS = 5.2
"""After the settings."""
assert _SETTINGS_SECONDS + max(_SERVER_SECONDS, _FILE_SECONDS) < LIMIT_SECONDS
_COLOURS = {OK: "green", NOTE: "blue", WARNING: "yellow", PROBLEM: "red"}


def doctor(session: Session) -> int:
    """Returns 1 if there is a problem."""
    findings = ordered(list(examine(session.arguments.config)))
    if session.arguments.json:
        session.print_json(as_json(findings))
    else:
        for one in findings:
            state = session.screen.styled(f"{one.state:<8}", _COLOURS[one.state])
            hint = f" {one.hint}" if one.hint else ""
            session.screen.print(f"{state} {harmless(f'{one.name:<8} {one.text}{hint}')}")
    return 0 if is_well(findings) else EXIT_REFUSED


def examine(path: str | None) -> Iterator[Finding]:
    """All findings of this machine with the settings at `path` (None: the usual place)."""
    console.expect_children()
    uid = os.getuid()
    environ = dict(os.environ)
    with Probes() as probes:
        probes.start("config", _SETTINGS_SECONDS, partial(lab_facts.config_facts, path))
        probes.start("home", _FILE_SECONDS, file_facts.home_facts)
        probes.start("cwd", _FILE_SECONDS, file_facts.cwd_facts)
        probes.start("quota", _FILE_SECONDS, file_facts.quota_facts)
        probes.start("shell", _PROGRAM_SECONDS, host_facts.shell_facts)
        probes.start("agent", _FILE_SECONDS, host_facts.agent_facts)
        probes.start("limits", _FILE_SECONDS, host_facts.limits_facts)
        probes.start("systemd", _FILE_SECONDS, host_facts.systemd_facts)
        probes.start("linger", _PROGRAM_SECONDS, host_facts.linger_facts)
        probes.start("screen", _FILE_SECONDS, host_facts.screen_facts)
        probes.start("ntp", _FILE_SECONDS, host_facts.time_facts)

        config = probes.answer("config")
        setting = str(config.facts.get("state_dir", ""))
        worker_name = str(config.facts.get("worker_name") or os.uname().nodename.partition(".")[0])
        probes.start("state", _FILE_SECONDS, partial(file_facts.state_facts, setting, environ))
        probes.start("spool", _FILE_SECONDS, partial(file_facts.spool_facts, setting, environ, worker_name))
        is_usable = bool(config.facts.get("usable")) and not config.trouble
        if is_usable:
            probes.start("worker", _FILE_SECONDS, partial(lab_facts.worker_facts, config.facts))
            probes.start("server", _SERVER_SECONDS, partial(lab_facts.server_facts, config.facts))
        ask = probes.answer
        server = ask("server") if is_usable else Answer({})
        worker = ask("worker") if is_usable else Answer({})

        yield from lab_verdict.config_findings(config)
        if is_usable:
            yield from lab_verdict.server_findings(server, worker)
            yield from lab_verdict.worker_findings(worker, server)
        else:
            why = "there are no settings" if config.facts.get("exists") is False else "the settings cannot be used"
            yield from lab_verdict.without_settings(why)
        yield from lab_verdict.clock_findings(server, ask("ntp"))
        yield from file_verdict.home_findings(ask("home"), ask("quota"), uid)
        yield from file_verdict.cwd_findings(ask("cwd"))
        yield from file_verdict.state_findings(ask("state"), uid)
        yield from file_verdict.spool_findings(ask("spool"), int(config.facts.get("output_limit_mb", 0)))
        yield from host_verdict.python_findings(host_facts.python_facts())
        yield from host_verdict.version_findings(host_facts.version_facts(), ask("shell"))
        yield from host_verdict.shell_findings(ask("shell"), ask("agent"))
        yield from host_verdict.limits_findings(ask("limits"), ask("systemd"), ask("linger"))
        yield from host_verdict.systemd_findings(ask("systemd"), uid)
        yield from host_verdict.linger_findings(ask("linger"), ask("systemd"))
        yield from host_verdict.screen_findings(ask("screen"))
