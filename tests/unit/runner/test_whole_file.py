"""A record is there whole or not at all, whatever room the disk has."""

import os

import pytest

from kueue.runner import whole_file
from kueue.runner.spool import START, Spool


def test_a_disk_that_takes_a_part_keeps_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "record"
    whole_file.write(str(path), b"old")
    write = os.write
    with monkeypatch.context() as disk:
        disk.setattr(os, "write", lambda handle, body: write(handle, body[:2]))
        with pytest.raises(OSError, match="No space left"):
            whole_file.write(str(path), b"new and longer")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["record"]


def test_an_attempt_whose_start_record_does_not_fit_is_not_begun(tmp_path, monkeypatch):
    spool = Spool(str(tmp_path))
    write = os.write
    with monkeypatch.context() as disk:
        disk.setattr(os, "write", lambda handle, body: write(handle, body[:-1]))
        with pytest.raises(OSError, match="No space left"):
            spool.begin(1, {"offer": 1})
    assert spool.read(1, START) is None
