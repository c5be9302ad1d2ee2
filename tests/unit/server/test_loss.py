"""The start after files of the state were cut: no number twice, nothing runs twice by itself, and it is told."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import pytest

from kueue import places
from kueue.core import facts as f
from kueue.errors import StorageError
from kueue.server.loss import settle
from kueue.server.recovery import recover, state_file
from kueue.server.restore import SKIPPED, restore
from kueue.storage import backup, cut
from kueue.storage.sqlite import SqliteStore
from tests.support.storage_rows import batch, job_range, live_ids, node_changed, offered, started, submitted


def opened(path: Path) -> SqliteStore:
    return SqliteStore(path, ballast_bytes=4096)


@pytest.fixture
def where(tmp_path):
    return places.Places(places.own_directory(str(tmp_path / "state")))


@pytest.fixture
def state(where):
    return state_file(Path(where.server))


def forget(store: SqliteStore) -> None:
    """Have the connection keep next to nothing in memory."""
    store._connection.execute("PRAGMA cache_size = 10")
    store._connection.execute("PRAGMA shrink_memory")


def checkpointed(state: Path) -> SqliteStore:
    """Jobs 1 and 2, running and waiting, are in the state; jobs 3 to 22 in the log."""
    store = opened(state)
    sums = {"next_node": 2, "timeout_seconds": 60.0}
    facts = (node_changed(), submitted(1, job_range(), job_range()), offered(1, 7), started(1, 7))
    store.commit(batch(*facts, next_job=3, next_offer=8, **sums))
    store.tidy()
    store.commit(batch(submitted(3, job_range(20)), next_job=23, next_offer=31, **sums))
    return store


def cut_beyond_help(state: Path) -> None:
    store = checkpointed(state)
    forget(store)
    os.truncate(f"{state}-wal", 0)
    with pytest.raises(StorageError, match="is lost"):
        store.commit(batch(submitted(23), next_job=24))
    store.close()


def test_after_a_loss_numbers_go_on_and_what_waited_is_held(state, caplog):
    cut_beyond_help(state)
    caplog.clear()
    with contextlib.closing(opened(state)) as store:
        settle(store)
        facts, sums = list(store.replay()), store.aggregates()
        assert live_ids(facts) == [1, 2]
        assert [fact.job for fact in facts if isinstance(fact, f.JobHeld)] == [2]
        assert (sums.next_job, sums.next_offer, sums.never_given) == (23, 31, ((8, 30),))
        first, second = [record.getMessage() for record in caplog.records]
        assert "was made shorter while the server ran (seen today " in first
        assert "what was accepted since today" in first
        assert "Numbers go on at job 23" in first
        assert "1 jobs waited then" in second
        assert "`kueue release 2`" in second
        settle(store)
        assert list(store.replay()) == facts
    assert cut.read(state) is None


def test_a_note_that_cannot_be_read_leaves_out_many_numbers(state):
    cut_beyond_help(state)
    state.with_name(f"{state.name}{places.CUT_SUFFIX}").write_bytes(b"\xff")
    with contextlib.closing(opened(state)) as store:
        settle(store)
        assert store.aggregates().next_job == 3 + SKIPPED


def test_a_state_of_another_queue_is_left_as_it_is(state):
    opened(state).close()
    cut.write(state, cut.Note("of another one", is_log=True, sums=f.Aggregates(next_job=1000)))
    with contextlib.closing(opened(state)) as store:
        settle(store)
        assert store.aggregates().next_job == 0
    assert cut.read(state) is None


def test_a_backup_that_is_restored_after_a_loss_goes_on_above_what_was_lost(where, state, tmp_path):
    with contextlib.closing(checkpointed(state)) as store:
        copy = store.begin_copy(backup.plan(tmp_path / "copy", state, force=False))
        while not copy.step():
            pass
        copy.finish()
        store.commit(batch(submitted(23, job_range(20)), next_job=43, next_offer=51))
        forget(store)
        os.truncate(f"{state}-wal", 100)
        with pytest.raises(StorageError, match="is lost"):
            store.tidy()
    assert restore(where, str(tmp_path / "copy"), take_over=False) == 0
    assert cut.read(state) is None
    with contextlib.closing(opened(state)) as store:
        assert store.aggregates().next_job == 43


def test_a_whole_file_that_was_put_in_the_place_of_a_cut_one_needs_a_word(state, caplog):
    checkpointed(state).close()
    cut.write(state, cut.Note("some queue", is_log=False))
    with pytest.raises(StorageError, match="a part of it was cut away"):
        opened(state)
    caplog.set_level(logging.INFO, "kueue")
    assert recover(state.parent) == 0
    assert "is whole" in caplog.text
    with contextlib.closing(opened(state)) as store:
        assert live_ids(store.replay()) == list(range(1, 23))


def test_a_state_that_was_cut_is_recovered_with_all_that_the_server_had_in_memory(state, caplog):
    checkpointed(state).close()
    store = opened(state)
    store.aggregates()
    assert live_ids(store.replay()) == list(range(1, 23))
    os.truncate(state, 0)
    with pytest.raises(StorageError, match="made shorter"):
        store.commit(batch(submitted(23), next_job=24))
    store.close()
    with pytest.raises(StorageError, match="a part of it was cut away") as raised:
        opened(state)
    assert "--recover" in raised.value.hint
    assert recover(state.parent) == 0
    with contextlib.closing(opened(state)) as store:
        settle(store)
        assert live_ids(store.replay()) == list(range(1, 23))
        assert store.aggregates().next_job == 23
    assert "Numbers go on at job 23" in caplog.text
    assert cut.read(state) is None


def test_a_note_that_cannot_be_removed_lets_nothing_be_accepted(state):
    checkpointed(state).close()
    state.with_name("queue.sqlite.cut").mkdir()
    with contextlib.closing(opened(state)) as store, pytest.raises(StorageError, match="cannot be removed"):
        settle(store)
