"""The file by which a worker is known again."""

from __future__ import annotations

import json
import shutil
import stat

import pytest

from kueue.errors import KueueError
from kueue.worker.identity_file import own_identity


def test_an_identity_is_made_once_and_private(tmp_path):
    path = tmp_path / "identity"
    first = own_identity(str(path), "machine")
    assert len(first) == 32
    assert own_identity(str(path), "machine") == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text())["machine_id"] == "machine"


def test_two_workers_are_two(tmp_path):
    assert own_identity(str(tmp_path / "a"), "m") != own_identity(str(tmp_path / "b"), "m")


def test_a_copied_directory_is_refused_and_the_first_one_goes_on(tmp_path):
    first, copy = tmp_path / "first", tmp_path / "copy"
    first.mkdir()
    identity = own_identity(f"{first}/identity", "m", "boot")
    shutil.copytree(first, copy)
    with pytest.raises(KueueError, match="is a copy of another"):
        own_identity(f"{copy}/identity", "m", "boot")
    assert own_identity(f"{first}/identity", "m", "boot") == identity


def test_a_moved_directory_is_the_same_worker(tmp_path):
    (tmp_path / "old").mkdir()
    identity = own_identity(f"{tmp_path}/old/identity", "m", "boot")
    (tmp_path / "old").rename(tmp_path / "new")
    assert own_identity(f"{tmp_path}/new/identity", "m", "boot") == identity


@pytest.mark.parametrize("older", [{}, {"boot_id": "before", "inode": 1}])
def test_after_a_boot_or_an_older_release_the_directory_is_taken_down_anew(tmp_path, older):
    path = tmp_path / "identity"
    path.write_text(json.dumps({"identity": "ab" * 16, "machine_id": "m", **older}))
    assert own_identity(str(path), "m", "boot") == "ab" * 16
    assert json.loads(path.read_text())["inode"] == tmp_path.stat().st_ino


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"identity": "xyz"}', '{"identity": "ab"}', '{"identity": 5}'])
def test_what_is_no_identity_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "identity"
    path.write_text(content)
    with pytest.raises(KueueError, match="does not hold an identity"):
        own_identity(str(path), "m")
    assert path.read_text() == content


def test_an_identity_that_cannot_be_kept_is_none(tmp_path):
    (tmp_path / "identity.new").mkdir()  # like a disk that takes no new file
    with pytest.raises(KueueError, match="identity cannot be written: Is a directory"):
        own_identity(str(tmp_path / "identity"), "machine")
    assert not (tmp_path / "identity").exists()
