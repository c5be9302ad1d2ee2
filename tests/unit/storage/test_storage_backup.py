"""A copy of a store that is written to meanwhile: whole, of one moment, and nothing of it left when it fails."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
import time

import pytest

from kueue.errors import UserError
from kueue.storage import backup
from kueue.storage.sqlite import SqliteStore
from tests.support.file_server import dead_file_server
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


@pytest.fixture
def mortal(away):
    """A place whose file server can die later: skips before anything is open if there can be none here."""
    with dead_file_server(away):
        pass
    return away


def begun(store, target, **how):
    return store.begin_copy(backup.plan(target, store.path, **{"force": False, **how}))


def stands_in(thread, function):
    """The thread has called this function and is not back."""
    frame = sys._current_frames().get(thread.ident)
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None


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


def test_a_copy_to_a_file_server_that_dies_can_be_given_up_and_another_be_made(store, mortal, monkeypatch):
    monkeypatch.setattr("kueue.places.is_network", lambda _: True)
    copy = begun(store, mortal / "copy")
    while not copy.step():
        pass
    failures = []

    def finish():
        try:
            copy.finish()
        except UserError as error:
            failures.append(str(error))

    waiting = threading.Thread(target=finish, daemon=True)
    with dead_file_server(mortal):
        waiting.start()
        while not stands_in(waiting, "_create"):
            time.sleep(0.01)
        copy.abort()
        assert not [path.name for path in store.path.parent.iterdir() if "copy" in path.name]
        again = begun(store, mortal.parent / "copy")
        while not again.step():
            pass
    waiting.join(20)
    assert again.finish().live == 500
    assert len(failures) == 1
    assert list(mortal.iterdir()) == []


def test_a_copy_that_fails_after_the_next_one_has_begun_takes_nothing_of_that_away(store, away, monkeypatch):
    monkeypatch.setattr("kueue.places.is_network", lambda _: True)
    copy, later = begun(store, away / "copy"), []
    while not copy.step():
        pass

    def hangs_and_fails(*_):
        copy.abort()
        # Its draft is gone by now, and a file system may give the number of a file that is gone to the next one.
        later.append(begun(store, away / "other"))
        raise UserError("the file server is back and says no")

    with monkeypatch.context() as patch:
        patch.setattr(backup, "_rename_new", hangs_and_fails)
        with pytest.raises(UserError):
            copy.finish()
    (again,) = later
    while not again.step():
        pass
    assert again.finish().live == 500
    assert [path.name for path in away.iterdir()] == ["other"]


@pytest.mark.parametrize("name", ["queue.sqlite-journal", "lock", "new", "queue.sqlite.restored-1"])
@pytest.mark.parametrize("force", [True, False])
def test_no_name_beside_the_state_is_taken_for_a_backup(store, tmp_path, name, force):
    link = tmp_path / "link"
    link.symlink_to(store.path.parent)
    before = sorted(store.path.parent.iterdir())
    for folder in (store.path.parent, link):
        with pytest.raises(UserError, match="among the state of the server itself"):
            backup.plan(folder / name, store.path, force=force)
    assert sorted(store.path.parent.iterdir()) == before


def test_a_name_as_long_as_names_may_be_is_one_for_a_backup(store, away):
    target = away / ("ü" * 127)
    copy = begun(store, target)
    while not copy.step():
        pass
    copy.finish()
    assert list(away.iterdir()) == [target]


def test_drafts_of_makers_that_were_killed_go_at_once_or_after_a_day_and_nothing_else_does(store, away):
    gone = subprocess.Popen(["true"])
    gone.wait()
    copy = begun(store, away / "whole")
    while not copy.step():
        pass
    copy.finish()
    body = (away / "whole").read_bytes()

    def draft(name, pid, days, body=body):
        path = away / f".{name}.part-{pid}"
        path.write_bytes(body)
        os.utime(path, (time.time() - days * 86400.0,) * 2)
        return path

    go = [draft("copy", gone.pid, 0), draft("copy-of-monday", gone.pid, 2)]
    stay = [
        draft("copy-of-today", gone.pid, 0.5),
        draft("of-one-that-lives", os.getpid(), 2),
        draft("of-another-program", gone.pid, 2, b"a download"),
        draft("of-another-program-with-a-database", gone.pid, 2, body[:68] + b"\0" * 4 + body[72:]),
        away / "whole",
    ]
    assert backup.sweep(away / "copy")
    assert [path.exists() for path in go] == [False, False]
    assert all(path.exists() for path in stay)
    assert not backup.sweep(away / "of-one-that-lives")


def test_what_killed_copies_and_restores_left_beside_the_state_goes_unless_the_state_is_missing(tmp_path):
    state = tmp_path / "queue.sqlite"
    kept = ["queue.sqlite.before-20260101-000000", "queue.sqlite.damaged-20260101-000000", "queue.sqlite.format-0"]
    names = [
        *kept,
        "queue.sqlite.copy",
        "queue.sqlite.restored-20260101-000000",
        "queue.sqlite.new-17",
        "queue.sqlite.new-17-journal",
        "queue.sqlite.trial-17",
        "queue.sqlite.format-0.new",
        "recovered-20260101-000000.sqlite",
    ]
    for name in names:
        (tmp_path / name).touch()
    bench = tmp_path / "recovered-20260101-000000.sqlite.salvage-17"
    bench.mkdir()
    (bench / "copy").touch()
    backup.sweep_beside(state)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, bench.name])
    state.touch()
    os.link(state, tmp_path / "queue.sqlite.before-20260101-000001")
    os.link(state, tmp_path / "queue.sqlite.damaged-20260101-000001")
    backup.sweep_beside(state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["queue.sqlite", *kept]


class Refusing(sqlite3.Connection):
    """SQLite on a disk that fails at one statement."""

    refused = ""

    def execute(self, statement, *values):
        if self.refused and self.refused in statement:
            raise sqlite3.OperationalError("disk I/O error")
        return super().execute(statement, *values)


@pytest.mark.parametrize("refused", ["locking_mode", "journal_mode", "cache_size"])
def test_a_copy_that_cannot_be_begun_leaves_nothing_behind(store, away, monkeypatch, refused):
    made = []

    def connect(*how, **settings):
        made.append(real(*how, factory=Refusing, **settings))
        return made[-1]

    real = sqlite3.connect
    monkeypatch.setattr(Refusing, "refused", refused)
    monkeypatch.setattr(sqlite3, "connect", connect)
    with pytest.raises(UserError, match="disk I/O error"):
        begun(store, away / "copy")
    assert list(away.iterdir()) == []
    (connection,) = made
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.cursor()


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
