"""What the shape of the code promises, held by looking at the code."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kueue import errors
from kueue.cli import verbs
from kueue.core import facts, lifecycle
from kueue.model import JobState
from kueue.settings import SECTIONS

ROOT = Path(__file__).parents[1]
HEAVY = {"trio", "rich", "ssl", "_ssl", "cryptography", "msgspec", "asyncio", "psutil"}
TRACKED_TEXT = sorted(
    path
    for folder in ("kueue", "docs", "tests", "ops", "completions", "systemd-user")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".md", ".toml", ".txt", ".sh", ".service"} and path.is_file()
)


def modules_loaded_by(*args: str, environment: dict[str, str] | None = None) -> set[str]:
    """Top-level modules that a run of the command imports."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "kueue.cli.main", *args],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
    )
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines() if "|" in line}


@pytest.mark.parametrize(
    "args", [["--help"], ["cmd", "--help"], ["list-jobs", "--help"], ["no-such-verb"], ["complete", "bash"]]
)
def test_the_command_starts_without_anything_heavy(args):
    loaded = modules_loaded_by(*args)
    assert "kueue" in loaded
    assert not loaded & HEAVY
    assert ("argcomplete" in loaded) == (args[0] == "complete")


def test_a_press_of_tab_loads_nothing_heavy():
    line = "kueue list-jobs --run"
    loaded = modules_loaded_by(environment={"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))})
    assert "argcomplete" in loaded
    assert not loaded & HEAVY


def test_every_fact_that_names_a_job_stands_in_the_table_of_life():
    named = {kind for kind in facts.Fact.__subclasses__() if "job" in kind.__struct_fields__}
    in_table = {kind for _, kind in lifecycle.TABLE}
    assert named == in_table


def test_every_state_can_be_reached_and_left():
    reached = set(lifecycle.TABLE.values()) | {JobState.PENDING}
    left = {state for state, _ in lifecycle.TABLE}
    assert reached == set(JobState)
    assert left == set(JobState) - {JobState.DONE}


def test_every_error_says_in_its_docstring_what_it_means():
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert len(classes) > 8
    assert all(kind.__doc__ for kind in classes)


def test_every_verb_stands_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    missing = [verb for verb in verbs.VERBS if not re.search(rf"`{re.escape(verb)}\b", readme)]
    assert not missing


def test_every_setting_stands_in_its_page():
    page = (ROOT / "docs/settings.md").read_text()
    missing = [key for section in SECTIONS.values() for key in section.settings if f"`{key}`" not in page]
    assert not missing


def test_every_module_opens_with_its_one_job():
    bare = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "kueue").rglob("*.py")
        if path.read_text().strip() and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not bare


def test_no_module_is_a_drawer():
    drawers = {"util", "utils", "common", "helper", "helpers", "misc"}
    assert not [path for path in (ROOT / "kueue").rglob("*.py") if path.stem in drawers]


@pytest.mark.parametrize("word", ["TO" + "DO", "FIX" + "ME", "X" * 3, "/wo" + "rk/", "Not" + "ImplementedError"])
def test_nothing_is_left_for_later_and_no_private_path_is_named(word):
    found = [str(path.relative_to(ROOT)) for path in TRACKED_TEXT if word in path.read_text(errors="replace")]
    assert not found


def test_no_two_test_files_have_one_name():
    # Test folders are no packages: the second of a name would be taken for the first.
    names = sorted(
        path.name for path in (ROOT / "tests").rglob("*.py") if path.name not in {"conftest.py", "__init__.py"}
    )
    assert not {name for name in names if names.count(name) > 1 and name.startswith("test_")}
