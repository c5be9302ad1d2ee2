"""A worker's claim on its directory: it notices what becomes of its lock, and two never have it at once."""

from __future__ import annotations

import os
import shutil

import pytest

from kueue import places
from kueue.errors import KueueError
from kueue.worker.claim import Claim


@pytest.fixture
def folder(tmp_path):
    return places.own_directory(str(tmp_path / "w1"))


@pytest.fixture
def claim(folder):
    with Claim(folder, "The worker w1") as claim:
        yield claim


def test_it_holds_as_long_as_nothing_happens_to_its_lock(claim, folder):
    assert claim.holds()
    assert places.holder(f"{folder}/lock") == os.getpid()


def test_a_lock_that_was_removed_is_put_back_and_keeps_others_away(claim, folder):
    os.unlink(f"{folder}/lock")
    assert claim.holds()
    assert places.holder(f"{folder}/lock") == os.getpid()
    with pytest.raises(KueueError, match="The worker w1 is running already"):
        Claim(folder, "The worker w1")
    assert claim.holds()


def test_it_ends_where_another_has_taken_the_place_of_its_lock(claim, folder):
    told = []
    claim.on_loss = lambda: told.append(claim.loss)
    os.unlink(f"{folder}/lock")
    with Claim(folder, "The worker w1") as other:
        assert not claim.holds()
        assert other.holds()
    assert not claim.holds(), "it is lost for good"
    assert told == [claim.loss]
    assert str(claim.loss) == f"{folder}/lock was replaced while the worker w1 ran: it ends, and its jobs go on."
    assert f"(pid {os.getpid()}) takes them up" in claim.loss.hint


def test_it_ends_where_another_was_at_work_meanwhile_and_is_gone(claim, folder):
    """Who was there may have left runners that this one does not know."""
    os.unlink(f"{folder}/lock")
    Claim(folder, "The worker w1").__exit__(None, None, None)
    assert not claim.holds()
    assert "`kueue up` starts a worker" in claim.loss.hint


@pytest.mark.parametrize("is_made_anew", [False, True])
def test_it_ends_with_its_directory(claim, folder, is_made_anew):
    shutil.rmtree(folder)
    if is_made_anew:
        os.mkdir(folder, 0o700)
    assert not claim.holds()
    assert str(claim.loss) == f"The directory {folder} was removed or replaced while the worker w1 ran: it ends."
    assert os.path.exists(folder) == is_made_anew
    assert not os.path.exists(f"{folder}/lock"), "nothing is put into the place of another"


def test_it_ends_when_its_directory_is_moved_and_leaves_what_is_there_alone(claim, folder):
    os.rename(folder, f"{folder}.old")
    with Claim(places.own_directory(folder), "The worker w1") as other:
        assert not claim.holds()
        assert other.holds()


def test_where_nobody_can_make_a_file_it_goes_on_and_looks_again(claim, folder, monkeypatch):
    os.unlink(f"{folder}/lock")
    with monkeypatch.context() as full:
        full.setattr(places, "lock_exclusive", _full)
        assert claim.holds()
        assert claim.holds()
    assert not os.path.exists(f"{folder}/lock")
    assert claim.holds()
    assert places.is_locked(f"{folder}/lock")


def _full(path, _who):
    raise places.StorageError(f"{path} cannot be written: No space left on device.")


def test_where_a_look_may_hang_none_is_made(folder):
    with Claim(folder, "The worker w1", is_watched=False) as claim:
        os.unlink(f"{folder}/lock")
        assert claim.holds()
        assert not os.path.exists(f"{folder}/lock")
