"""Puts the findings of ``kueue doctor`` of all hosts together, and compares the hosts with each other. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from typing import Any

import msgspec

from kueue_ops.sight import Trouble

ALL = "all hosts"
CLOCK_SECONDS = 2.0
"""Clocks that are further apart are worth a line: dates in listings and Makefiles go wrong."""
STATES = ("ok", "note", "warning", "problem")


class Line(msgspec.Struct, frozen=True):
    """One finding on one host (or `ALL`)."""

    host: str
    name: str
    state: str
    """One of `STATES`."""
    text: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.host}  {self.state:<7}  {self.name:<9} {self.text}{f' {self.hint}' if self.hint else ''}"


def lines(answers: Mapping[str, Mapping[str, Any] | Trouble]) -> list[Line]:
    """All findings, host by host in the given order, then the comparisons.

    `answers`: the parsed JSON of ``kueue doctor --json`` of each host, or why there is none.
    """
    found: list[Line] = []
    for host, answer in answers.items():
        if isinstance(answer, Trouble):
            found.append(Line(host, "reachable", "problem", answer.sentence, answer.hint))
            continue
        found.append(Line(host, "reachable", "ok", "Logged in by ssh."))
        found += [_line(host, one) for one in answer.get("findings", ()) if isinstance(one, Mapping)]
    values = {host: _values(answer) for host, answer in answers.items() if not isinstance(answer, Trouble)}
    return found + compared(values)


def compared(values: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[Line]:
    """What differs between hosts; `values`: for each host what was measured, by topic. Nothing for a single host."""
    if len(values) < 2:
        return []
    return [*_versions(values), *_homes(values), *_secrets(values), *_clocks(values)]


def is_well(found: list[Line]) -> bool:
    """No problem anywhere?"""
    return all(line.state != "problem" for line in found)


def as_json(found: list[Line]) -> dict[str, Any]:
    """The form for programs."""
    return {"ok": is_well(found), "findings": [msgspec.to_builtins(line) for line in found]}


def _line(host: str, finding: Mapping[str, Any]) -> Line:
    state = str(finding.get("state", ""))
    return Line(
        host,
        str(finding.get("name", "?")),
        state if state in STATES else "note",
        str(finding.get("text", "")),
        str(finding.get("hint", "")),
    )


def _values(answer: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {
        str(one.get("name")): one["value"]
        for one in answer.get("findings", ())
        if isinstance(one, Mapping) and isinstance(one.get("value"), Mapping)
    }


def _groups(values: Mapping[str, Mapping[str, Mapping[str, Any]]], topic: str, *keys: str) -> dict[Hashable, list[str]]:
    """The hosts by what they have for these keys; hosts where nothing was measured are left out."""
    groups: dict[Hashable, list[str]] = defaultdict(list)
    for host, topics in values.items():
        value = topics.get(topic, {})
        if value.get(keys[0]) is not None:
            groups[tuple(str(value.get(key)) for key in keys)].append(host)
    return groups


def _told(groups: Mapping[Hashable, list[str]], position: int = 0) -> str:
    """``0.1.0 on a, b; 0.2.0 on c``, the largest group first."""
    largest_first = sorted(groups.items(), key=lambda item: -len(item[1]))
    return "; ".join(f"{key[position]} on {', '.join(hosts)}" for key, hosts in largest_first)  # type: ignore[index]


def _versions(values: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[Line]:
    groups = _groups(values, "version", "version")
    if len(groups) > 1:
        hint = "Install the same version on all: pip install --upgrade kueue-lab"
        return [Line(ALL, "version", "warning", f"Different versions of kueue: {_told(groups)}.", hint)]
    return [Line(ALL, "version", "ok", f"All have kueue {_told(groups).partition(' on ')[0]}.")] if groups else []


def _homes(values: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[Line]:
    found = []
    for topic, what in (("home", "home directory"), ("cwd", "directory after the login")):
        paths = _groups(values, topic, "path")
        if not paths:
            continue
        if len(paths) > 1:
            text = f"The {what} has different names: {_told(paths)}."
            hint = "A job runs in the directory it was submitted from: that must be there under the same name."
            found.append(Line(ALL, topic, "warning", text, hint))
            continue
        places = _groups(values, topic, "source", "inode", "network")
        is_shared = len(places) == 1 and all(key[2] == "True" for key in places)  # type: ignore[index]
        if is_shared:
            found.append(Line(ALL, topic, "ok", f"All share one {what}: {_told(paths).partition(' on ')[0]}."))
            continue
        text = f"The {what} has the same name everywhere, but is not one and the same."
        hint = "Files that jobs use must be on each host; kueue_restart_workers --push-config copies the settings."
        found.append(Line(ALL, topic, "note", text, hint))
    return found


def _secrets(values: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[Line]:
    groups = _groups(values, "config", "fingerprint")
    if len(groups) <= 1:
        return [Line(ALL, "config", "ok", "All have the same shared secret.")] if groups else []
    text = f"Different shared secrets, by their fingerprints: {_told(groups)}."
    return [
        Line(
            ALL,
            "config",
            "problem",
            text,
            "kueue_restart_workers --push-config --force puts the settings of this host in their place.",
        )
    ]


def _clocks(values: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[Line]:
    offsets = {
        host: float(topics["clock"]["offset_seconds"])
        for host, topics in values.items()
        if isinstance(topics.get("clock", {}).get("offset_seconds"), (int, float))
    }
    if len(offsets) < 2:
        return []
    # The offset is the server's clock less the host's: the largest belongs to the host that is most behind.
    behind, ahead = max(offsets, key=lambda host: offsets[host]), min(offsets, key=lambda host: offsets[host])
    apart = offsets[behind] - offsets[ahead]
    if apart <= CLOCK_SECONDS:
        return [Line(ALL, "clock", "ok", f"All clocks agree within {apart:.2f} s.")]
    text = f"The clocks differ by {apart:.1f} s: {behind} is behind, {ahead} is ahead."
    return [Line(ALL, "clock", "warning", text, "On the one that is wrong: sudo timedatectl set-ntp true")]
