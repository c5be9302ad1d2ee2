"""A recovered state stands alone: nothing of the damaged one is left beside it to be played back into it."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest
import trio

from kueue import places
from kueue.core.settings import Settings
from kueue.errors import StorageError, UserError
from kueue.model import JobState, Now
from kueue.server.ledger import Ledger
from kueue.server.recovery import recover, state_file
from kueue.storage.sqlite import SqliteStore
from tests.support.state_user import in_use
from tests.support.storage_rows import WALL, batch, job_range, node_changed, offered, started, submitted


def test_a_journal_left_by_the_damaged_state_goes_aside_with_it(tmp_path):
    SqliteStore(state_file(tmp_path), is_network=True, wall=1.0).close()
    journal = tmp_path / "queue.sqlite-journal"
    journal.write_bytes(b"half a transaction")
    assert recover(tmp_path) == 0
    assert not journal.exists()
    aside = [path.name for path in tmp_path.glob("queue.sqlite.damaged-*-journal")]
    assert len(aside) == 1
    SqliteStore(state_file(tmp_path), is_network=True, wall=2.0).close()


def test_a_state_that_is_whole_is_left_alone(tmp_path):
    SqliteStore(state_file(tmp_path), is_network=False, wall=1.0).close()
    with pytest.raises(UserError, match="is whole"):
        recover(tmp_path)
    assert [
        path.name for path in tmp_path.iterdir() if path.name.startswith(("recovered", "queue.sqlite.damaged"))
    ] == []


def test_a_state_of_which_one_page_is_gone_is_recovered(tmp_path):
    SqliteStore(state_file(tmp_path), is_network=False, wall=1.0).close()
    with state_file(tmp_path).open("r+b") as file:
        file.seek(4096 * 2)
        file.write(bytes(4096))
    assert recover(tmp_path) == 0
    assert len(list(tmp_path.glob("queue.sqlite.damaged-*"))) == 1


def test_what_is_recovered_has_its_name_after_a_loss_of_power(tmp_path, monkeypatch):
    SqliteStore(state_file(tmp_path), is_network=False, wall=1.0).close()
    with state_file(tmp_path).open("r+b") as file:
        file.seek(4096 * 2)
        file.write(bytes(4096))
    damaged = state_file(tmp_path).stat().st_ino
    synced = []
    monkeypatch.setattr(
        places, "sync_directory", lambda folder: synced.append((folder, state_file(tmp_path).stat().st_ino != damaged))
    )
    assert recover(tmp_path) == 0
    assert synced[-1] == (tmp_path, True)


def spoiled(folder):
    SqliteStore(state_file(folder), is_network=False, wall=1.0).close()
    with state_file(folder).open("r+b") as file:
        file.seek(4096 * 2)
        file.write(bytes(4096))
    return state_file(folder).read_bytes()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_recovery_that_is_interrupted_leaves_all_as_it_was(tmp_path, monkeypatch):
    damaged = spoiled(tmp_path)
    there = names(tmp_path)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            recover(tmp_path)
    assert names(tmp_path) == there
    assert state_file(tmp_path).read_bytes() == damaged
    assert recover(tmp_path) == 0


def test_what_a_killed_recovery_has_left_goes_with_the_next_one(tmp_path):
    spoiled(tmp_path)
    bench = tmp_path / "recovered-20260101-000000.sqlite.salvage-17"
    bench.mkdir()
    (bench / "copy").write_bytes(bytes(4096))
    (tmp_path / "recovered-20260101-000000.sqlite").write_bytes(b"what could be read")
    assert recover(tmp_path) == 0
    assert not [name for name in names(tmp_path) if name.startswith("recovered")]


@pytest.mark.parametrize("has_log", [False, True])
def test_a_recovery_that_was_killed_while_there_was_no_state_is_finished(tmp_path, has_log, caplog):
    state = state_file(tmp_path)
    store = SqliteStore(state, is_network=False, wall=1.0)
    queue_id = store.queue_id
    store.close()
    state.rename(tmp_path / "recovered-20260101-000000.sqlite")
    if has_log:  # of the damaged one
        (tmp_path / "queue.sqlite-wal").write_bytes(b"spoiled")
    with pytest.raises(StorageError, match="a recovery was interrupted") as caught:
        SqliteStore(state, is_network=False, wall=1.0)
    assert "--recover" in caught.value.hint
    assert recover(tmp_path) == 0
    store = SqliteStore(state, is_network=False, wall=2.0)
    assert store.queue_id == queue_id
    store.close()
    # Beside the database that the killed one has moved aside, so that both can still be read together.
    assert (tmp_path / "queue.sqlite.damaged-20260101-000000-wal").exists() == has_log
    assert "what may have run is held" in caplog.text


def test_a_damaged_name_is_damage_and_costs_nothing(tmp_path, caplog):
    SqliteStore(state_file(tmp_path), is_network=False, wall=1.0).close()
    content = state_file(tmp_path).read_bytes()
    state_file(tmp_path).write_bytes(content.replace(b"live_by_joblive", b"\xffive_by_joblive", 1))
    assert recover(tmp_path) == 0
    assert "lost" not in caplog.text
    SqliteStore(state_file(tmp_path), is_network=False, wall=2.0).close()


def test_a_state_whose_facts_contradict_each_other_is_damaged_not_a_bug_and_is_recovered(tmp_path):
    """One row is gone: a job has started whose offer nobody made."""
    store = SqliteStore(state_file(tmp_path), wall=lambda: WALL)
    store.commit(batch(node_changed(1), submitted(1, job_range(2)), offered(1, 1), next_job=3, next_offer=2))
    store.commit(batch(started(1, 1), next_job=3, next_offer=2))
    store.close()
    with contextlib.closing(sqlite3.connect(state_file(tmp_path))) as connection, connection:
        connection.execute("DELETE FROM live WHERE seq = (SELECT min(seq) FROM live)")
    with pytest.raises(StorageError, match=r"is damaged: a job that is pending cannot meet .*job=1") as caught:
        load(tmp_path)
    assert "--recover" in caught.value.hint
    assert recover(tmp_path) == 0
    assert {job.id: job.state for job in load(tmp_path).state.jobs.values()} == {
        1: JobState.HELD,
        2: JobState.HELD,
    }


def load(folder):
    """The engine as a server that starts makes it."""
    store = SqliteStore(state_file(folder), wall=lambda: WALL)
    ledger = Ledger(store, Settings(), lambda: Now(0.0, WALL), lambda _: None)
    try:
        trio.run(ledger.rebuild)
        return ledger.engine
    finally:
        ledger.close()
        store.close()


@pytest.mark.parametrize("is_spoiled", [False, True])
def test_a_state_that_a_program_has_open_is_not_recovered(tmp_path, is_spoiled):
    state = state_file(tmp_path)
    with in_use(state) as other:
        if is_spoiled:
            with state.open("r+b") as file:
                file.write(bytes(4096))
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        with pytest.raises(StorageError, match=rf"uses {state} \(pid {other.pid}\)"):
            recover(tmp_path)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
