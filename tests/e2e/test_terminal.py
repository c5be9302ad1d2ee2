"""Server, worker and restart tool in the foreground of a real terminal that is closed or stopped."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.lab import Lab
from tests.support.ports import free_port
from tests.support.terminal import Terminal

pytestmark = pytest.mark.slow
PROGRAMS = ("kueue.server.main", "kueue.worker.main", "kueue_ops.restart_workers")
TICKS = os.sysconf("SC_CLK_TCK")
CTRL_S, CTRL_Q = "\x13", "\x11"


class Foreground:
    """One of the programs before a person who reads what it says."""

    def __init__(self, folder: Path, module: str) -> None:
        self.lab = lab = Lab(folder)
        self.module = module
        closed = free_port()
        lab.settings["worker_settings"]["worker_name"] = "w1"
        config = lab.config(
            restart_workers={
                "ssh_user": "nobody",
                "hostnames": f"127.0.0.1:{closed}",
                "sleep_minutes_before_recheck": 100_000,
            }
        )
        checkout = Path(__file__).parents[2]
        environment = lab.environment(PYTHONPATH=f"{checkout}:{checkout / 'ops'}")
        self.terminal = Terminal([lab.python, "-m", module, "-c", str(config)], environment, folder)
        self.process = self.terminal.process

    def until_ready(self) -> None:
        words = {PROGRAMS[0]: "listening on", PROGRAMS[1]: "next try", PROGRAMS[2]: "refuses"}
        self.terminal.until(words[self.module])

    @property
    def log(self) -> str:
        """What it says where a person looks for it when the terminal is gone."""
        place = {
            PROGRAMS[0]: "state/server/server.log",
            PROGRAMS[1]: "state/workers/w1/worker.log",
            PROGRAMS[2]: "state/restart_workers/*.log",
        }[self.module]
        return "".join(path.read_text() for path in self.lab.folder.glob(place))

    def until_logged(self, words: str) -> None:
        self.lab.until(lambda: words in self.log, words, process=self.process)

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def close(self) -> None:
        self.terminal.close()
        self.lab.close()


@pytest.fixture(params=PROGRAMS)
def foreground(request, tmp_path):
    one = Foreground(tmp_path, request.param)
    try:
        one.until_ready()
        yield one
    finally:
        one.close()


def test_a_program_whose_terminal_is_closed_says_so_goes_on_and_can_be_ended(foreground):
    foreground.terminal.hang_up()
    foreground.until_logged("is gone; it goes on without one")
    again = {
        PROGRAMS[0]: "reload: the settings of",
        PROGRAMS[1]: "configuration read again from",
        PROGRAMS[2]: "1 host, looked at every",
    }[foreground.module]
    foreground.until_logged(again)
    before, begun = foreground.cpu_seconds(), time.monotonic()
    foreground.process.send_signal(signal.SIGHUP)
    foreground.lab.until(lambda: foreground.log.count(again) == 2, "it hears the next one", process=foreground.process)
    time.sleep(1.0)  # over some time it costs nothing to be without a terminal
    assert foreground.cpu_seconds() - before < 0.5 * (time.monotonic() - begun)
    assert foreground.log.count(again) == 2
    assert foreground.log.count("goes on without one") == 1
    foreground.process.send_signal(signal.SIGTERM)
    assert foreground.process.wait(30) == 0


def test_a_program_whose_terminal_is_stopped_goes_on(foreground):
    """Ctrl-S, with a screen session or without: nobody may wait for the person to notice."""
    foreground.terminal.type(CTRL_S)
    foreground.terminal.settle()
    for _ in range(3):
        foreground.process.send_signal(signal.SIGHUP)
    foreground.process.send_signal(signal.SIGTERM)
    assert foreground.process.wait(30) == 0
