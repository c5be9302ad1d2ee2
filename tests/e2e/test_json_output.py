"""docs/json.md says of every ``--json`` what it holds; here it is held against what the programs print."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.lab import Lab

PAGE = Path(__file__).parents[2] / "docs" / "json.md"
PLAIN = {
    "integer": lambda value: type(value) is int,
    "number": lambda value: type(value) in {int, float},
    "string": lambda value: type(value) is str,
    "boolean": lambda value: type(value) is bool,
    "text": lambda value: type(value) is str or (type(value) is dict and list(value) == ["b64"]),
}


def tables() -> dict[str, dict[str, str]]:
    """Title → key → type."""
    found: dict[str, dict[str, str]] = {}
    for part in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        found[title] = dict(re.findall(r"^\| `(\w+)` \| ([^|`]+) \|[^|]*\|$", body, flags=re.MULTILINE))
    found["full job"] = {**found["job"], **found["full job"]}
    return found


TABLES = tables()
OUTCOMES = {
    kind: set(re.findall(r"`(\w+)`", keys))
    for kind, keys in re.findall(r"^\| `(\w+)` \| ([^|]+) \| \w+ \|[^|]*\|$", PAGE.read_text(), flags=re.MULTILINE)
}


def check(value: object, kind: str, where: str) -> None:
    """Fails, naming the place, unless the value is of this type."""
    if kind.endswith(" or null"):
        if value is not None:
            check(value, kind.removesuffix(" or null"), where)
    elif kind in PLAIN:
        assert PLAIN[kind](value), f"{where} is no {kind}: {value!r}"
    elif kind.startswith("["):
        assert isinstance(value, list), where
        for each in value:
            check(each, kind[1:-1], f"{where}[]")
    elif kind.startswith("{"):
        assert isinstance(value, dict), where
        for name, each in value.items():
            check(each, kind[1:-1], f"{where}.{name}")
    elif kind == "outcome":
        assert isinstance(value, dict), where
        assert set(value) - {"type"} <= OUTCOMES[value["type"]], where
    else:
        assert isinstance(value, dict), where
        assert list(value) == list(TABLES[kind]), f"{where}: its keys are not those of the page"
        for key, inner in TABLES[kind].items():
            check(value[key], inner, f"{where}.{key}")


@pytest.fixture
def lab(tmp_path):
    made = Lab(tmp_path)
    made.settings["global_resources"] = {"genus": 2}
    yield made
    made.close()


@pytest.mark.slow
def test_all_that_is_printed_as_json_is_as_the_page_says(lab):
    lab.start_server()
    lab.start_worker("w1", job_slots=3)
    ran = [
        ("sh", "-c", "echo out; echo err >&2"),
        ("sh", "-c", "exit 3"),
        ("sh", "-c", "kill -9 $$"),
        ("/nonexistent/program",),
    ]
    for command in ran:
        lab.kueue("cmd", "--wait", "--resource", "genus=1", "--env", "A=b", *command)
    lab.kueue("cmd", "--wait", "--timeout", "1", "sleep", "60")
    lab.kueue("cmd", "--name", "n", "-o", "null", "-e", "file", "sleep", "1000")
    lab.kueue("cmd", "--job-slots", "3", "sleep", "1000")
    lab.kueue("cmd", "--hold", "echo", "not UTF-8: \udcff")
    lab.kueue("remove-job", "7")
    documents = {
        "kueue list-jobs --json": [("list-jobs", "-n", "100")],
        "kueue show-job --json": [("show-job", "7", "3", "0-7")],
        "kueue explain --json": [("explain", "7", "3", "0-7")],
        "kueue list-workers --json": [("list-workers",), ("show-worker", "0")],
        "kueue list-resources --json": [("list-resources",)],
        "kueue version --json": [("version",)],
    }
    assert set(documents) == {title for title in TABLES if title.startswith("kueue ")}
    told: dict[str, dict[str, object]] = {}
    for title, commands in documents.items():
        for words in commands:
            done = lab.kueue(*words, "--json")
            assert len(done.stdout.splitlines()) == 1, done
            told[words[0]] = json.loads(done.stdout)
            check(told[words[0]], title, " ".join(words))
    jobs = told["show-job"]["jobs"]
    for verb in ("list-jobs", "show-job", "explain"):
        assert [job["id"] for job in told[verb]["jobs"]] == list(range(8)), verb
    kinds = {job["outcome"]["type"] for job in jobs if job["outcome"] is not None}
    assert kinds == {"exited", "signaled", "not_started", "timed_out", "canceled"}
    assert jobs[0]["output"]["stdout"]["head_b64"] == "b3V0Cg=="
    lab.kueue("remove-job", "--kill", "0-7")
    lab.server.kill()
    lab.server.wait()
    away = lab.kueue("version", "--json")
    check(json.loads(away.stdout), "kueue version --json", "version")
    assert away.returncode != 0
