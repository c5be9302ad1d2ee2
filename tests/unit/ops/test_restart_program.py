"""The program `kueue_restart_workers` before it has loaded what it needs."""

import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_an_interrupt_while_it_loads_ends_it_without_a_traceback(tmp_path):
    (tmp_path / "fabric.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(60)\n")
    with subprocess.Popen(
        [sys.executable, "-m", "kueue_ops.restart_workers", "--once"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": f"{tmp_path}:{ROOT}:{ROOT / 'ops'}"},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == 130
