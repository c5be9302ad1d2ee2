"""The server's claim on its lock: it is put back, whatever is there, and every look tells whether it had to be."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys

import pytest

from kueue import places
from kueue.errors import KueueError
from kueue.server.claim import REMINDER_SECONDS, TOUCHES, TOUCHES_SECONDS, Claim

HOLD = "import sys; from kueue import places; lock = places.lock_exclusive(sys.argv[1]); print(flush=True); input()"


@pytest.fixture
def path(tmp_path):
    return f"{places.own_directory(str(tmp_path / 'server'))}/lock"


@pytest.fixture
def claim(path):
    with Claim(places.lock_exclusive(path)) as claim:
        yield claim


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records]


class Steady:
    """A clock that stands until it is set."""

    def __init__(self):
        self.seconds = 1000.0

    def __call__(self):
        return self.seconds


def changed(path, change):
    """Until the change time, which goes by the ticks of the kernel, tells of it."""
    before = os.stat(path).st_ctime_ns
    while os.stat(path).st_ctime_ns == before:
        change()


def moved_away_and_back(path):
    os.rename(path, f"{path}.away")
    os.rename(f"{path}.away", path)


def replace(path):
    os.unlink(path)
    with open(path, "w"):
        pass


def test_it_stands_as_long_as_nothing_happens_to_its_lock(claim, path, warnings):
    assert claim.stands()
    assert places.holder(path) == os.getpid()
    assert warnings() == []


@pytest.mark.parametrize("away", [os.unlink, replace])
def test_a_lock_that_nobody_holds_is_put_back_and_the_look_tells_that_it_was_away(claim, path, warnings, away):
    away(path)
    assert not claim.stands()
    assert places.holder(path) == os.getpid()
    assert claim.stands()
    with pytest.raises(KueueError, match="is running already"):
        places.lock_exclusive(path)
    (warning,) = warnings()
    assert warning.startswith(f"{path} was removed or replaced: it is put back")
    away(path)
    assert not claim.stands()
    assert len(warnings()) == 2, "each time is said"


def test_a_lock_that_another_process_holds_is_taken_back_when_that_is_gone(claim, path, warnings):
    os.unlink(path)
    with subprocess.Popen([sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline()
        assert not claim.stands()
        assert not claim.stands()
        assert places.holder(path) == other.pid
        other.stdin.close()
        other.wait(20)
        assert not claim.stands()
    assert claim.stands()
    assert places.holder(path) == os.getpid()
    held, back = warnings()
    assert (
        f"another process holds what is there now; no job is given away until that has ended (pid {other.pid})" in held
    )
    assert "it is put back" in back


@pytest.mark.parametrize("is_made_anew", [False, True])
def test_a_directory_that_is_not_its_own_any_more_is_left_alone(claim, path, warnings, is_made_anew):
    folder = os.path.dirname(path)
    shutil.rmtree(folder)
    if is_made_anew:
        os.mkdir(folder, 0o700)
    assert not claim.stands()
    assert not claim.stands()
    assert not os.path.exists(path)
    (warning,) = warnings()
    assert f"The directory of {path} was removed or replaced" in warning


def test_a_directory_that_was_moved_and_comes_back_brings_its_lock_along(claim, path):
    folder = os.path.dirname(path)
    os.rename(folder, f"{folder}.away")
    assert not claim.stands()
    os.rename(f"{folder}.away", folder)
    assert not claim.stands(), "somebody may have found nobody since the last look"
    assert claim.stands()


def test_where_no_file_can_be_made_it_says_so_once_and_tries_again(claim, path, warnings):
    os.unlink(path)
    os.mkdir(path)
    assert not claim.stands()
    assert not claim.stands()
    os.rmdir(path)
    assert not claim.stands()
    assert claim.stands()
    failed, back = warnings()
    assert f"{path} was removed or replaced and cannot be put back" in failed
    assert "it is put back" in back


def test_where_a_look_may_hang_none_is_made(path):
    with Claim(places.lock_exclusive(path), is_watched=False) as claim:
        os.unlink(path)
        assert claim.stands()
        assert not os.path.exists(path)


def test_the_lock_is_free_when_it_is_given_up(path):
    with Claim(places.lock_exclusive(path)) as claim:
        replace(path)
        claim.stands()
    assert not places.is_locked(path)


def test_a_lock_that_was_moved_away_and_back_between_two_looks_is_noticed(claim, path, warnings):
    changed(path, lambda: moved_away_and_back(path))
    assert places.holder(path) == os.getpid()
    assert not claim.stands()
    assert claim.stands()
    (warning,) = warnings()
    assert warning.startswith(f"{path} was moved away and back, or touched: silence of workers counts anew")


def test_what_touches_the_lock_again_and_again_holds_no_silence_up_for_ever(path, warnings):
    steady = Steady()
    with Claim(places.lock_exclusive(path), steady=steady) as claim:

        def look():
            changed(path, lambda: os.chmod(path, 0o600))
            steady.seconds += 60
            return claim.stands()

        assert [look() for _ in range(TOUCHES + 20)] == [False] * TOUCHES + [True] * 20
        *touched, ignored = warnings()
        assert len(touched) == TOUCHES
        assert f"{path} is touched again and again" in ignored
        os.unlink(path)
        assert not claim.stands(), "a lock that is gone counts all the same"
        steady.seconds += TOUCHES_SECONDS
        assert not look(), "rare again"


def test_a_lock_that_was_removed_just_before_is_watched_all_the_same(path):
    lock = places.lock_exclusive(path)
    os.unlink(path)
    with Claim(lock) as claim:
        assert not claim.stands()
        assert claim.stands()
        assert places.holder(path) == os.getpid()


def test_as_long_as_another_process_holds_it_that_is_said_each_minute_and_asked_only_then(path, warnings, monkeypatch):
    asked = []
    holder = places.holder
    monkeypatch.setattr(places, "holder", lambda path: asked.append(path) or holder(path))
    steady = Steady()
    with Claim(places.lock_exclusive(path), steady=steady) as claim:
        assert claim.trouble == ""
        os.unlink(path)
        os.mkdir(path)
        for _ in range(3):
            assert not claim.stands()
        assert len(warnings()) == 1
        steady.seconds += REMINDER_SECONDS
        for _ in range(3):
            assert not claim.stands()
        assert len(warnings()) == 2
        assert (
            claim.trouble == f"{path} was removed or replaced and cannot be put back; no job is given away until it is"
        )
        os.rmdir(path)
        with subprocess.Popen(
            [sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as other:
            assert other.stdout.readline()
            steady.seconds += REMINDER_SECONDS
            assert not claim.stands()
            count = len(asked)
            for _ in range(3):
                assert not claim.stands()
            assert "another process holds what is there now" in claim.trouble
            # `lock_exclusive` asks for its own sentence, once a look; ours is not asked for.
            assert len(asked) == count + 3
            other.stdin.close()
            other.wait(20)
        assert not claim.stands()
        assert claim.trouble == ""
        assert len(warnings()) == 4
