"""A copy of a store that is written to meanwhile: whole, of one moment, and nothing of it left when it fails."""

from __future__ import annotations

import pytest

from kueue.errors import UserError
from kueue.storage import backup
from kueue.storage.sqlite import SqliteStore
from tests.support.storage_rows import batch, ending, job_range, live_ids, submitted

FAT = tuple(("x" * 20_000,) for _ in range(50))
"""Arguments of 50 jobs: a megabyte, one portion."""


@pytest.fixture
def store(tmp_path):
    (tmp_path / "state").mkdir()
    store = SqliteStore(tmp_path / "state" / "queue.sqlite", ballast_bytes=4096)
    for first in range(0, 500, 50):
        store.commit(batch(submitted(first, job_range(argvs=FAT)), next_job=first + 50))
    yield store
    store.close()


@pytest.fixture
def away(tmp_path):
    away = tmp_path / "away"
    away.mkdir()
    return away


def begun(store, target, **how):
    return store.begin_copy(backup.plan(target, store.path, **{"force": False, **how}))


def content(path):
    store = SqliteStore(path, ballast_bytes=4096)
    try:
        return store.aggregates(), list(store.replay()), [row.id for row in store.finished()]
    finally:
        store.close()


def test_what_is_stored_between_two_portions_is_in_the_copy(store, away):
    copy = begun(store, away / "copy")
    first, portions = 500, 0
    while not copy.step():
        portions += 1
        store.commit(batch(submitted(first, job_range(argvs=FAT[:5])), next_job=first + 5))
        store.commit(ending(portions))
        first += 5
    store.commit(batch(submitted(first), next_job=first + 1))
    summary = copy.finish()
    assert portions > 5
    assert (summary.live, summary.finished) == (first - portions, portions)
    _, facts, done = content(away / "copy")
    assert live_ids(facts) == [job for job in range(first) if not 1 <= job <= portions]
    assert sorted(done) == list(range(1, portions + 1))
    assert {path.name for path in away.iterdir()} == {"copy", "copy.ballast"}


def test_the_copy_is_a_state_that_tells_the_same(store, away):
    copy = begun(store, away / "copy")
    while not copy.step():
        pass
    assert copy.finish().next_job == 0 + store.aggregates().next_job
    expected = store.aggregates(), list(store.replay()), []
    assert content(away / "copy") == expected
    assert (away / "copy").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_copy_that_is_given_up_leaves_nothing_and_the_store_goes_on(store, away, steps):
    copy = begun(store, away / "copy")
    for _ in range(steps):
        copy.step()
    copy.abort()
    assert list(away.iterdir()) == []
    with pytest.raises(UserError, match="was given up"):
        copy.step()
    store.commit(batch(submitted(500), next_job=501))
    again = begun(store, away / "copy")
    while not again.step():
        pass
    assert again.finish().next_job == 501


def test_a_name_that_is_taken_while_the_copy_is_made_stays_taken(store, away):
    copy = begun(store, away / "copy")
    while not copy.step():
        pass
    (away / "copy").write_text("mine")
    with pytest.raises(UserError, match="exists"):
        copy.finish()
    assert [path.name for path in away.iterdir()] == ["copy"]
    assert (away / "copy").read_text() == "mine"


def test_a_copy_to_a_file_server_is_made_beside_the_state_first(store, away, monkeypatch):
    monkeypatch.setattr("kueue.places.is_network", lambda _: True)
    copy = begun(store, away / "copy")
    while not copy.step():
        assert list(away.iterdir()) == []
    assert copy.finish().live == 500
    assert [path.name for path in away.iterdir()] == ["copy"]
    assert not [path.name for path in store.path.parent.iterdir() if "copy" in path.name]
    assert live_ids(content(away / "copy")[1]) == list(range(500))


def test_a_copy_whose_directory_goes_away_fails_with_a_sentence(store, away):
    copy = begun(store, away / "copy")
    copy.step()
    for path in away.iterdir():
        path.unlink()
    away.rmdir()
    while not copy.step():
        pass
    with pytest.raises(UserError, match="cannot be"):
        copy.finish()
    store.commit(batch(submitted(500), next_job=501))
