"""The doctor's findings of many hosts, put together and compared."""

from __future__ import annotations

import pytest

from kueue_ops import lab_check
from kueue_ops.lab_check import ALL, as_json, compared, is_well, lines
from kueue_ops.sight import Trouble


def topics(**changes):
    value = {
        "version": {"version": "1.0"},
        "home": {"path": "/home/ada", "source": "nas:/home", "inode": 7, "network": True},
        "config": {"fingerprint": "aa"},
        "clock": {"offset_seconds": 0.01},
    }
    for name, change in changes.items():
        value[name] = {**value[name], **change}
    return value


def states(values):
    return {line.name: line.state for line in compared(values)}


def test_a_laboratory_in_order_has_only_good_lines():
    found = compared({"a": topics(), "b": topics()})
    assert {line.name for line in found} == {"version", "home", "config", "clock"}
    assert {(line.host, line.state) for line in found} == {(ALL, "ok")}


@pytest.mark.parametrize(
    ("change", "name", "state", "word"),
    [
        ({"version": {"version": "0.9"}}, "version", "warning", "0.9 on c"),
        ({"home": {"path": "/Users/ada"}}, "home", "warning", "/Users/ada on c"),
        ({"home": {"inode": 8}}, "home", "note", "not one and the same"),
        ({"home": {"network": False}}, "home", "note", "not one and the same"),
        ({"config": {"fingerprint": "bb"}}, "config", "problem", "bb on c"),
        ({"clock": {"offset_seconds": 30.0}}, "clock", "warning", "c is behind"),
        ({"clock": {"offset_seconds": -30.0}}, "clock", "warning", "c is ahead"),
    ],
)
def test_what_differs_is_said_with_the_hosts(change, name, state, word):
    found = {line.name: line for line in compared({"a": topics(), "b": topics(), "c": topics(**change)})}
    assert found[name].state == state
    assert word in found[name].text
    assert {line.state for key, line in found.items() if key != name} == {"ok"}


def test_the_hint_for_different_secrets_replaces_the_settings_that_are_there():
    found = compared({"a": topics(), "b": topics(config={"fingerprint": "bb"})})
    assert "--push-config --force" in next(line.hint for line in found if line.name == "config")


def test_one_host_is_compared_with_nothing():
    assert compared({"a": topics()}) == []


def test_what_was_not_measured_is_not_compared():
    assert states({"a": {}, "b": {}}) == {}
    assert states({"a": topics(), "b": {"clock": {"offset_seconds": None}}})["version"] == "ok"


def test_a_host_that_cannot_be_reached_is_a_line_among_the_others():
    answer = {"findings": [{"name": "python", "state": "warning", "text": "Python is old.", "hint": "Type x."}]}
    found = lines({"a": Trouble("refused", "Nobody listens.", "Start sshd."), "b": answer})
    assert [(line.host, line.name, line.state) for line in found] == [
        ("a", "reachable", "problem"),
        ("b", "reachable", "ok"),
        ("b", "python", "warning"),
    ]
    assert "Start sshd." in str(found[0])
    assert not is_well(found)
    assert is_well(found[1:])
    assert as_json(found)["ok"] is False
    assert as_json(found)["findings"][2]["hint"] == "Type x."


@pytest.mark.parametrize("odd", [{}, {"findings": ["x", {"name": "python"}]}, {"findings": [{"state": "strange"}]}])
def test_an_odd_answer_of_another_version_is_no_crash(odd):
    assert lines({"a": odd, "b": odd})[0].name == "reachable"
    assert {line.state for line in lines({"a": odd})} <= set(lab_check.STATES)
