"""The program `kueue_restart_workers` before it has loaded what it needs."""

import signal
import subprocess
import sys
from pathlib import Path

from tests.support.deaf import DEAF

ROOT = Path(__file__).parents[3]


def loading(folder, *options: str) -> subprocess.Popen[str]:
    """The program while it loads what it needs, which takes for ever here."""
    (folder / "fabric.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(60)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "kueue_ops.restart_workers", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": f"{folder}:{ROOT}:{ROOT / 'ops'}"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "loading\n"
    return process


def test_an_interrupt_while_it_loads_ends_it_without_a_traceback(tmp_path):
    with loading(tmp_path, "--once") as process:
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30) == ("", "")
    # By the signal itself: a shell ends its loop only then.
    assert process.returncode == -signal.SIGINT


def test_a_hangup_while_the_endless_rounds_load_does_not_end_them(tmp_path):
    with loading(tmp_path) as process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT


def test_a_hangup_ends_one_round(tmp_path):
    with loading(tmp_path, "--once") as process:
        process.send_signal(signal.SIGHUP)
        process.communicate(timeout=30)
    assert process.returncode == -signal.SIGHUP


def test_a_match_that_fails_is_not_taken_for_one_where_whoever_started_it_ignores_the_end_of_children(tmp_path):
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text(
        "Match exec false\n ProxyCommand echo wrong >&2; exit 1\nHost *\n ProxyCommand echo right >&2; exit 1\n"
    )
    (tmp_path / "lab.toml").write_text(
        f'[common_settings]\nshared_secret = "a secret of these tests"\nstate_dir = "{tmp_path}/state"\n'
        '[restart_workers]\nhostnames = "a"\nssh_user = "ada"\n'
    )
    (tmp_path / "lab.toml").chmod(0o600)
    done = subprocess.run(
        [*DEAF, sys.executable, "-m", "kueue_ops.restart_workers", "-c", str(tmp_path / "lab.toml"), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": f"{ROOT}:{ROOT / 'ops'}"},
    )
    assert "its ProxyCommand failed: right." in done.stdout, done.stderr
