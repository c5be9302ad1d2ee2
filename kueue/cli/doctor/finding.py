"""One finding of the doctor, and the form in which programs get it.

The form is documented for `--json` and stable: ``{"findings": [...], "ok": bool}``. Each of `TOPICS` stands in it
exactly once, with all that was measured as its ``value``; further findings of a topic are named ``topic.detail`` and
are there only when something is to be said.
"""

from __future__ import annotations

from typing import Any, NamedTuple

OK, NOTE, WARNING, PROBLEM = STATES = ("ok", "note", "warning", "problem")
"""From good to bad. Only a problem makes the exit code 1."""

TOPICS = (
    *("python", "version", "config", "server", "worker", "home", "cwd", "state", "spool"),
    *("clock", "linger", "screen", "systemd", "shell", "limits"),
)

Facts = dict[str, Any]
"""What was measured, in values of JSON. A missing key could not be measured."""


class Finding(NamedTuple):
    """What is so, and what to do about it."""

    name: str
    state: str
    text: str
    """A sentence."""
    hint: str = ""
    """What to type or do; empty if nothing need be done."""
    value: Facts = {}  # noqa: RUF012  nobody changes it


class Answer(NamedTuple):
    """What came of one measurement."""

    facts: Facts
    """All of it, or what was found before it went wrong."""
    trouble: str = ""
    """The second half of a sentence: why it was not finished; empty: it was."""
    stage: str = ""
    """What it was busy with then."""


def unmeasured(name: str, what: str, answer: Answer, hint: str = "") -> Finding:
    """The finding that a measurement was not finished, which is a problem by itself."""
    busy = f" (while {answer.stage})" if answer.stage else ""
    return Finding(name, PROBLEM, f"{what} {answer.trouble}{busy}.", hint, answer.facts)


def ordered(findings: list[Finding]) -> list[Finding]:
    """By topic, each topic's main finding first."""
    place = {name: index for index, name in enumerate(TOPICS)}
    return sorted(findings, key=lambda one: (place[one.name.partition(".")[0]], "." in one.name))


def as_json(findings: list[Finding]) -> dict[str, Any]:
    """The form for programs."""
    return {"findings": [one._asdict() for one in findings], "ok": is_well(findings)}


def is_well(findings: list[Finding]) -> bool:
    """Is there no problem?"""
    return all(one.state != PROBLEM for one in findings)
