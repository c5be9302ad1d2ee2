"""Server and worker whose settings lie on a file server that died while they run."""

from __future__ import annotations

import signal

import pytest

from tests.support.file_server import dead_file_server
from tests.support.lab import Lab

pytestmark = pytest.mark.slow
READ_AGAIN = {"server": "reload: the settings of", "worker": "configuration read again from"}


@pytest.fixture
def lab(tmp_path):
    lab = Lab(tmp_path)
    yield lab
    lab.close()


@pytest.mark.parametrize("program", READ_AGAIN)
def test_a_hangup_that_finds_no_settings_stops_neither_the_work_nor_the_stop(lab, program):
    place = lab.folder / "dead"
    place.mkdir()
    lab.config()
    (lab.folder / "lab.toml").rename(place / "lab.toml")
    lab.config()
    if program == "worker":
        lab.start_server()
    process = lab.start(f"kueue.{program}.main", "-c", str(place / "lab.toml"), log="it")
    words = {"server": "listening on", "worker": "taken in by the server"}[program]
    lab.until(lambda: words in lab.log("it"), words, process=process)
    if program == "server":
        lab.start_worker("w1")

    with dead_file_server(place):
        for _ in range(3):
            process.send_signal(signal.SIGHUP)
        done = lab.kueue("cmd", "--wait", "--", "true", timeout=120)
        assert done.returncode == 0, done.stderr
    # What was asked for before the file server died has an answer, or an error, as soon as it is gone.
    process.send_signal(signal.SIGHUP)
    lab.until(lambda: READ_AGAIN[program] in lab.log("it"), "the settings are read again", process=process)

    with dead_file_server(place):
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, lab.log("it")
