"""What is taken for a backup, and what a restored state knows of the time since."""

from __future__ import annotations

import os
import sqlite3

import pytest

from kueue import places
from kueue.core import facts as f
from kueue.errors import KueueError, StorageError
from kueue.server.recovery import state_file
from kueue.server.restore import SKIPPED, restore
from kueue.storage import backup, schema
from kueue.storage.opening import Host
from kueue.storage.sqlite import SqliteStore
from tests.support.state_user import in_use
from tests.support.storage_rows import WALL, batch, job_range, node_changed, offered, started, submitted


def opened(path, **how):
    return SqliteStore(path, ballast_bytes=4096, wall=lambda: WALL, **how)


@pytest.fixture
def where(tmp_path):
    return places.Places(places.own_directory(str(tmp_path / "state")))


@pytest.fixture
def state(where):
    from pathlib import Path

    return state_file(Path(where.server))


def copied(store, target):
    copy = store.begin_copy(backup.plan(target, store.path, force=False))
    while not copy.step():
        pass
    return copy.finish()


def filled(store):
    """Jobs 1 to 4: done before, running, held, waiting."""
    store.commit(
        batch(
            node_changed(),
            submitted(2, job_range(), job_range(held=True), job_range()),
            offered(2, 7),
            started(2, 7),
            next_job=5,
            next_offer=8,
            next_node=2,
        )
    )


@pytest.fixture
def copy(state, tmp_path):
    """A backup, from which the state has gone on."""
    store = opened(state)
    filled(store)
    copied(store, tmp_path / "copy")
    store.commit(batch(submitted(5), next_job=6, next_offer=31, next_node=2))
    store.close()
    return tmp_path / "copy"


def facts_of(path):
    store = opened(path)
    try:
        return list(store.replay()), store.aggregates()
    finally:
        store.close()


def files(directory):
    return {entry.name: entry.read_bytes() for entry in directory.iterdir()}


def refused(where, state, file, **how):
    before = files(state.parent)
    with pytest.raises(KueueError) as caught:
        restore(where, str(file), **{"take_over": False, **how})
    assert files(state.parent) == before
    return f"{caught.value} {caught.value.hint}"


def test_numbers_go_on_above_those_of_the_state_that_is_replaced(where, state, copy, capsys):
    present = state.read_bytes()
    assert restore(where, str(copy), take_over=False) == 0
    facts, sums = facts_of(state)
    assert (sums.next_job, sums.next_offer) == (6, 31)
    # Offers given since the backup are nobody's to stop.
    assert sums.never_given == ((8, 30),)
    assert [fact for fact in facts if isinstance(fact, f.JobHeld)] == [
        f.JobHeld(job=4, principal="restore", wall=next(fact.wall for fact in facts if isinstance(fact, f.JobHeld)))
    ]
    assert any(isinstance(fact, f.JobStarted) and fact.offer == 7 for fact in facts)
    (aside,) = state.parent.glob("queue.sqlite.before-*")
    assert aside.read_bytes() == present
    out = capsys.readouterr().out
    assert str(aside) in out
    assert "`kueue release 4`" in out
    assert copy.exists()


def test_a_new_machine_leaves_a_gap_in_the_numbers(where, state, copy):
    for path in state.parent.iterdir():
        path.unlink()
    assert restore(where, str(copy), take_over=False) == 0
    _, sums = facts_of(state)
    assert (sums.next_job, sums.next_offer) == (5 + SKIPPED, 8 + SKIPPED)
    assert not list(state.parent.glob("*.before-*"))


def test_a_state_of_another_queue_or_a_spoiled_one_tells_no_numbers_and_is_kept(where, state, copy):
    for path in state.parent.glob(f"{state.name}*"):
        path.unlink()
    opened(state).close()
    assert restore(where, str(copy), take_over=False) == 0
    assert facts_of(state)[1].next_job == 5 + SKIPPED
    state.write_bytes(b"spoiled")
    for path in state.parent.glob("*.before-*"):
        path.unlink()
    assert restore(where, str(copy), take_over=False) == 0
    assert facts_of(state)[1].next_job == 5 + SKIPPED
    (aside,) = state.parent.glob("*.before-*")
    assert aside.read_bytes() == b"spoiled"


def test_what_is_no_whole_backup_is_refused_and_nothing_is_touched(where, state, copy, tmp_path):
    assert "cannot be read: No such file" in refused(where, state, tmp_path / "missing")
    assert "is not a file" in refused(where, state, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "is not a file" in refused(where, state, tmp_path / "pipe")
    text = tmp_path / "text"
    text.write_text("hello")
    assert "it is not a database" in refused(where, state, text)
    foreign = tmp_path / "foreign"
    connection = sqlite3.connect(foreign)
    connection.execute("CREATE TABLE x (y)")
    connection.close()
    assert "is not the state of a kueue server" in refused(where, state, foreign)
    whole = copy.read_bytes()
    short = tmp_path / "short"
    short.write_bytes(whole[: len(whole) // 2])
    assert "is damaged" in refused(where, state, short)
    spoiled = tmp_path / "spoiled"
    spoiled.write_bytes(whole[:8192] + b"\xaa" * 4096 + whole[12288:])
    assert "is damaged" in refused(where, state, spoiled)
    unreadable_name = tmp_path / "unreadable"
    unreadable_name.write_bytes(whole.replace(b"indexevents_of_one", b"indexev\xe5nts_of_one"))
    assert "is damaged" in refused(where, state, unreadable_name)
    for number, sums in enumerate(("7", "'{}'")):
        copied_sums = tmp_path / f"sums-{number}"
        copied_sums.write_bytes(whole)
        connection = sqlite3.connect(copied_sums, isolation_level=None)
        connection.execute(f"UPDATE aggregates SET body = {sums}")
        connection.close()
        assert "is damaged" in refused(where, state, copied_sums)
    newer = tmp_path / "newer"
    newer.write_bytes(whole[:60] + (schema.FORMAT + 1).to_bytes(4, "big") + whole[64:])
    assert "was written by a newer kueue" in refused(where, state, newer)
    beside = tmp_path / "beside"
    beside.write_bytes(whole)
    (tmp_path / "beside-wal").write_bytes(b"log")
    assert "has a log beside it" in refused(where, state, beside)


def test_a_record_that_is_spoiled_is_a_fault_of_the_backup_and_no_state_is_to_be_recovered(where, state, copy):
    copy.write_bytes(copy.read_bytes().replace(b'"JobOffered"', b'"JobOfferee"'))
    said = refused(where, state, copy)
    assert said.startswith(f"{copy} is damaged")
    assert "--recover" not in said


def test_restores_within_one_second_replace_nothing_that_an_earlier_one_has_put_aside(where, state, copy):
    kept = [state.read_bytes()]
    for _ in range(3):
        restore(where, str(copy), take_over=False)
        kept.append(state.read_bytes())
    asides = sorted(path.read_bytes() for path in state.parent.glob("*.before-*"))
    assert asides == sorted(kept[:-1])


def test_what_a_restore_has_put_aside_can_be_restored(where, state, copy):
    restore(where, str(copy), take_over=False)
    (aside,) = state.parent.glob("*.before-*")
    assert restore(where, str(aside), take_over=False) == 0
    facts, sums = facts_of(state)
    assert sums.next_job == 6
    assert any(isinstance(fact, f.JobsSubmitted) for fact in facts)


def test_after_a_restore_that_was_killed_no_empty_queue_is_begun_and_it_can_be_done_again(where, state, copy):
    state.rename(state.with_name("queue.sqlite.before-20260101-000000"))
    draft = state.with_name("queue.sqlite.restored-20260101-000000")
    draft.write_bytes(copy.read_bytes())
    with pytest.raises(StorageError, match="a restore was interrupted") as caught:
        opened(state)
    assert "--restore" in caught.value.hint
    assert not state.exists()
    assert restore(where, str(copy), take_over=False) == 0
    assert not draft.exists()
    assert facts_of(state)[1].next_job == 5 + SKIPPED


def test_a_recovery_that_was_killed_is_told_of_as_well(state):
    state.with_name("recovered-20260101-000000.sqlite").write_bytes(b"all that could be read")
    with pytest.raises(StorageError, match="was interrupted"):
        opened(state)


def test_a_backup_of_another_host_needs_the_word_that_that_server_is_gone(where, state, tmp_path):
    elsewhere = tmp_path / "elsewhere" / "queue.sqlite"
    elsewhere.parent.mkdir()
    store = opened(elsewhere, host=Host("ralab99", "0" * 32))
    filled(store)
    copied(store, tmp_path / "copy")
    store.close()
    said = refused(where, state, tmp_path / "copy")
    assert "belongs to the server on host ralab99" in said
    assert "--take-over" in said
    assert restore(where, str(tmp_path / "copy"), take_over=True) == 0
    assert facts_of(state)[1].next_job == 5 + SKIPPED


@pytest.mark.parametrize("is_network", [False, True])
@pytest.mark.parametrize("is_cut", [False, True])
def test_a_state_that_a_program_has_open_is_not_replaced(where, state, copy, is_network, is_cut):
    with in_use(state, is_network=is_network) as other:
        if is_cut:
            os.truncate(state, 4096)
        said = refused(where, state, copy)
        assert f"Another server or program uses {state} (pid {other.pid})" in said
        assert f"kill {other.pid}" in said
