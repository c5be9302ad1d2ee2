"""The completion scripts: what ``kueue complete`` prints, and the files that are made of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

import completions
from kueue.cli import programs, shells, verbs

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("file", completions.FILES)
def test_a_file_made_from_the_code_is_up_to_date(file):
    text = (completions.ROOT / file).read_text(encoding="utf-8")
    assert text == completions.FILES[file](), f"run: python {Path(completions.__file__).relative_to(completions.ROOT)}"


def test_there_is_a_file_for_each_shell_and_no_other():
    assert tuple(shells.FILES) == verbs.SHELLS
    assert {path.name for path in (ROOT / "completions").iterdir()} == set(shells.FILES.values())


@pytest.mark.parametrize("shell", verbs.SHELLS)
def test_the_script_is_printed_without_reading_or_writing_anything(shell, tmp_path):
    (tmp_path / "broken.toml").write_text("this is no configuration")
    before = sorted(tmp_path.rglob("*"))
    done = subprocess.run(
        [sys.executable, "-m", "kueue.cli.main", "complete", shell],
        capture_output=True,
        text=True,
        check=False,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "PYTHONPATH": str(ROOT),
            "KUEUE_CONFIG": str(tmp_path / "broken.toml"),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (ROOT / "completions" / shells.FILES[shell]).read_text(encoding="utf-8")
    assert sorted(tmp_path.rglob("*")) == before


def test_an_unknown_shell_is_refused_with_the_known_ones(capsys):
    from kueue.cli.main import main

    assert main(["complete", "cmd.exe"]) == 2
    assert "powershell" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_finds_no_fault_in_the_script(shell):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not on this machine")
    done = subprocess.run(
        [shell, "-n", str(ROOT / "completions" / shells.FILES[shell])], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("shell", "program"), [("powershell", "pwsh"), ("elvish", "elvish")])
def test_the_rarer_shells_find_no_fault_either(shell, program):
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not on this machine: its script was checked by eye alone")
    file = str(ROOT / "completions" / shells.FILES[shell])
    check = (
        ["-NoProfile", "-Command", f"[ScriptBlock]::Create((Get-Content -Raw '{file}')) | Out-Null"]
        if program == "pwsh"
        else ["-compileonly", file]
    )
    done = subprocess.run([program, *check], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("shell", verbs.SHELLS)
def test_a_script_names_every_program_and_leaves_no_mark_unfilled(shell):
    text = shells.script(shell)
    assert all(name in text for name in ("kueue", *programs.PROGRAMS))
    assert "@FILES@" not in text
    assert "@COMMAND@" not in text
    assert "@PROGRAM" not in text


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_the_parser_for_completion_takes_the_options_of_the_program(name):
    options = {word for action in programs.parser(name)._actions for word in action.option_strings}
    assert {"--help", "--version"} <= options
