"""Every program says in one sentence that nobody took its results, and tells it by its exit code."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAMS = {
    "kueue": "kueue.cli.main",
    "kueue_server": "kueue.server.main",
    "kueue_worker": "kueue.worker.main",
    "kueue_install": "kueue_ops.install",
    "kueue_restart_workers": "kueue_ops.restart_workers",
}
ANSWERS = [*(f"{module} --help" for module in PROGRAMS.values()), "kueue.worker.main --stop"]


def run(line: str, folder, *, buffered: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HOME": str(folder), "KUEUE_STATE_DIR": str(folder), "PYTHONUNBUFFERED": buffered}
    return subprocess.run(
        ["bash", "-c", line.replace("PYTHON", sys.executable)],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("buffered", ["", "1"])
@pytest.mark.parametrize("where", [">&-", ">/dev/full"])
@pytest.mark.parametrize("words", ANSWERS)
def test_results_that_nobody_takes_are_a_failure_with_one_sentence(tmp_path, words, where, buffered):
    done = run(f"PYTHON -m {words} {where}", tmp_path, buffered=buffered)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("Error: The results cannot be written: ")


@pytest.mark.parametrize("words", ANSWERS)
def test_a_reader_that_went_away_ends_the_program_as_it_does_any_other(tmp_path, words):
    done = run(f"PYTHON -m {words} | true; exit ${{PIPESTATUS[0]}}", tmp_path)
    assert done.stderr == ""
    # It may have written before its reader left.
    assert done.returncode in {0, 141}
    late = run(f"(sleep 0.2; PYTHON -m {words}; echo $? >&2) | true", tmp_path)
    assert late.stderr == "141\n"


@pytest.mark.parametrize("words", ANSWERS)
def test_without_any_stream_the_exit_code_is_still_true(tmp_path, words):
    assert run(f"PYTHON -m {words} >&- 2>&- <&-", tmp_path).returncode == 1
    module = words.partition(" ")[0]
    assert run(f"PYTHON -m {module} --nonsense >&- 2>&- <&-", tmp_path).returncode == 2
