"""How programs with threads end."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
LEAVES = """
from kueue import log
from kueue_ops.command_line import leave

log.start("info")
log.unhurried()
for number in range(200):
    log.logger("test").info("%d %s", number, "x" * 200)
leave(3)
"""


def test_whoever_leaves_at_once_has_said_all_before():
    done = subprocess.run(
        [sys.executable, "-c", LEAVES],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'ops'}"},
    )
    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 200
