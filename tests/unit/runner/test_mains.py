"""The note of which process is whose: also after the disk was full it means what it says."""

import errno
import itertools
import os

import pytest

from kueue.runner import mains
from kueue.runner.mains import Mains, read_mains


@pytest.fixture
def noted(tmp_path, monkeypatch):
    monkeypatch.setattr(mains, "FILE_BYTES", 100)
    return Mains(str(tmp_path))


def test_a_file_that_could_not_be_replaced_goes_on_being_written(noted, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "full")

    descriptors = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as disk:
        disk.setattr(mains.os, "rename", full)
        for offer in range(50):
            noted.add(offer, 1000 + offer, 7)
    assert read_mains(str(tmp_path)) == {offer: (1000 + offer, 7) for offer in range(50)}
    assert os.listdir(tmp_path) == [f"mains-{os.getpid()}"]
    assert len(os.listdir("/proc/self/fd")) == descriptors
    for offer in range(49):
        noted.ended(offer)
    for offer in range(50, 100):
        noted.add(offer, 1000 + offer, 7)
    assert read_mains(str(tmp_path)) == {offer: (1000 + offer, 7) for offer in range(49, 100)}


def test_on_a_full_disk_it_is_not_written_anew_at_each_start(noted, tmp_path, monkeypatch):
    tries = []

    def full(*_):
        tries.append(noted._bytes)
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as disk:
        disk.setattr(mains.os, "rename", full)
        for offer in range(100):
            noted.add(offer, 1000 + offer, 7)
    assert len(tries) > 3
    assert all(after > before + 100 for before, after in itertools.pairwise(tries))


def test_a_new_file_that_has_no_room_for_all_does_not_replace_the_old_one(noted, tmp_path, monkeypatch):
    for offer in range(5):
        noted.add(offer, 1000 + offer, 7)
    write = os.write
    with monkeypatch.context() as disk:
        disk.setattr(mains.os, "write", lambda handle, line: write(handle, line[: min(len(line), 45)]))
        for offer in range(5, 10):
            noted.add(offer, 1000 + offer, 7)
    assert read_mains(str(tmp_path)) == {offer: (1000 + offer, 7) for offer in range(10)}


@pytest.mark.parametrize("length", range(8))
def test_half_a_line_means_nobody(tmp_path, monkeypatch, length):
    noted = Mains(str(tmp_path))
    noted.add(1, 400, 7)
    write = os.write
    with monkeypatch.context() as disk:
        disk.setattr(mains.os, "write", lambda handle, line: write(handle, line[:length]))
        noted.add(1, 500, 7)
    noted.add(3, 600, 7)
    assert read_mains(str(tmp_path)) == {1: (400, 7), 3: (600, 7)}
