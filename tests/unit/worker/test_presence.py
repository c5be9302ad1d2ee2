"""What `kueue_worker --status` tells of a worker of this machine."""

from __future__ import annotations

import os

import pytest

from kueue import places
from kueue.worker.presence import Presence, note_trouble


@pytest.fixture
def presence(tmp_path, monkeypatch):
    monkeypatch.setenv("KUEUE_STATE_DIR", str(tmp_path / "state"))
    config = tmp_path / "config.toml"
    config.write_text('[common_settings]\nshared_secret = "a secret of this test"\n')
    config.chmod(0o600)
    return Presence(str(config), "w1")


def test_what_hinders_the_running_worker_is_told_until_nothing_does(presence):
    with places.lock_exclusive(presence.lock):
        assert presence.status()["trouble"] == ""
        note_trouble(presence.folder, "the runner r1 (pid 7) does not answer")
        assert presence.status()["trouble"] == "the runner r1 (pid 7) does not answer"
        note_trouble(presence.folder, "")
        assert presence.status()["trouble"] == ""


def test_what_hindered_one_that_has_ended_is_not_told(presence):
    with places.lock_exclusive(presence.lock):
        note_trouble(presence.folder, "it was mute")
    assert presence.status()["trouble"] == ""


def test_what_another_process_noted_is_not_told(presence):
    with places.lock_exclusive(presence.lock):
        with open(f"{presence.folder}/trouble", "w") as file:
            file.write(f"{os.getpid() + 1} it was mute\n")
        assert presence.status()["trouble"] == ""
