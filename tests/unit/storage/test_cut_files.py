"""Files of an open store that somebody makes shorter: all is saved, or nothing is made worse; and never a false alarm."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from kueue.errors import DiskFull, StorageError, UserError
from kueue.storage import backup, cut, opening, own_files, rewriting, sqlite
from kueue.storage.salvage import salvage
from kueue.storage.sqlite import SqliteStore
from tests.support.small_disk import FILLER, fill, small_disk
from tests.support.storage_rows import batch, cleaned, ending, job_range, live_ids, submitted

FAT = tuple((os.urandom(500).hex(),) for _ in range(200))
"""About 220 KB of jobs."""
KINDS = ("local", "network")


KILLED = """
import os, sys
from pathlib import Path
from kueue.storage import cut, rescue
from kueue.storage.own_files import OwnFiles
from kueue.storage.sqlite import SqliteStore
from tests.support.storage_rows import batch, job_range, submitted
path, what, step = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
def end(*_, **__):
    os._exit(9)
def ends_behind(call):
    def both(*given, **named):
        call(*given, **named)
        end()
    return both
def marked(state, note, write=cut.write):
    write(state, note)
    if note.anew:
        end()
store = SqliteStore(path, ballast_bytes=4096)
store.aggregates()
store.commit(batch(submitted(1, job_range(200)), next_job=201))
store.tidy()
for first in range(201, 1001, 200):
    store.commit(batch(submitted(first, job_range(200)), next_job=first + 200))
store._connection.execute("PRAGMA integrity_check").fetchall()  # reads every page
if what in ("log", "both"):
    os.truncate(f"{path}-wal", 9000)
if what in ("state", "both"):
    os.truncate(path, 0)
if step == "noted":
    rescue.rewritten = end
elif step == "copied":
    rescue.rewritten = ends_behind(rescue.rewritten)
elif step == "marked":
    cut.write = marked
elif step == "replaced":
    Path.replace = ends_behind(Path.replace)
elif step == "emptied":
    OwnFiles.empty_log = ends_behind(OwnFiles.empty_log)
else:
    cut.remove = end
store.commit(batch(submitted(1001), next_job=1002))
"""


LIMITED = """
import os, resource, sys
from kueue.errors import DiskFull
from kueue.storage.sqlite import SqliteStore
from tests.support.storage_rows import batch, job_range, live_ids, submitted
store = SqliteStore(sys.argv[1], ballast_bytes=4096)
argvs = tuple((f"{n:01000}",) for n in range(200))
for first in range(1, 3001, 200):
    store.commit(batch(submitted(first, job_range(argvs=argvs)), next_job=first + 200))
os.truncate(f"{sys.argv[1]}-wal", 0)
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
for _ in range(2):
    try:
        store.commit(batch(submitted(3001), next_job=3002))
    except DiskFull as error:
        print(error.hint)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
store.commit(batch(submitted(3001), next_job=3002))
store.close()
"""


VACUUMED = """
import os, sys
from kueue.storage.sqlite import SqliteStore
from tests.support.storage_rows import batch, cleaned, ending, job_range, submitted
store = SqliteStore(sys.argv[1], ballast_bytes=4096)
argvs = tuple((f"{n:01000}",) for n in range(200))
for first in range(1, 1001, 200):
    store.commit(batch(submitted(first, job_range(argvs=argvs)), next_job=first + 200))
store.commit(ending(*range(1, 1001)))
store.commit(batch(cleaned(*range(1, 1001)), next_job=1001))
store.tidy()
store._connection.executescript("PRAGMA incremental_vacuum(2000)")
os._exit(9)
"""


def opened(path: Path, kind: str = "local") -> SqliteStore:
    return SqliteStore(path, ballast_bytes=4096, is_network=kind == "network")


def accept(store: SqliteStore, job: int) -> None:
    store.commit(batch(submitted(job, job_range()), next_job=job + 1))


def accept_many(store: SqliteStore, first: int) -> None:
    store.commit(batch(submitted(first, job_range(argvs=FAT)), next_job=first + len(FAT)))


def accepted(path: Path, kind: str = "local") -> list[int]:
    with contextlib.closing(opened(path, kind)) as store:
        return live_ids(store.replay())


def log_of(path: Path) -> Path:
    return Path(f"{path}-wal")


def is_whole(path: Path) -> bool:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def forget(store: SqliteStore) -> None:
    """Have the connection keep next to nothing in memory, as when a long history was listed."""
    connection = store._connection
    connection.execute("PRAGMA cache_size = 10")
    connection.execute("PRAGMA shrink_memory")


@pytest.mark.parametrize("left", [0, 1, 5000, 100_000])
def test_a_log_that_was_cut_costs_nothing_while_the_server_lives(tmp_path, caplog, left):
    path = tmp_path / "queue.sqlite"
    with contextlib.closing(opened(path)) as store:
        accept_many(store, 1)
        store.tidy()  # so that the rest of the log is older than the state
        accept_many(store, 201)
        os.truncate(log_of(path), left)
        accept(store, 401)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert f"{log_of(path)} was made shorter while the server runs. Nothing is lost" in caplog.text
        # What a kill would leave now.
        killed = tmp_path / "killed"
        killed.mkdir()
        shutil.copy2(path, killed)
        shutil.copy2(log_of(path), killed)
        assert accepted(killed / path.name) == list(range(1, 402))
        accept(store, 402)
    assert is_whole(path)
    assert accepted(path) == list(range(1, 403))
    assert cut.read(path) is None
    assert not list(tmp_path.glob("*.new-*"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_was_cut_is_written_anew_from_what_the_server_still_has(tmp_path, caplog, kind):
    path = tmp_path / "queue.sqlite"
    with contextlib.closing(opened(path, kind)) as store:
        accept_many(store, 1)
        store.tidy()
        store._connection.execute("PRAGMA integrity_check").fetchall()  # reads every page
        os.truncate(path, 0)
        accept(store, 201)
        assert f"{path} was made shorter while the server runs. Nothing is lost" in caplog.text
        accept(store, 202)
    assert is_whole(path)
    assert accepted(path, kind) == list(range(1, 203))


def test_a_log_that_was_cut_by_the_last_commit_alone_is_noticed(tmp_path, caplog):
    path = tmp_path / "queue.sqlite"
    with contextlib.closing(opened(path)) as store:
        accept(store, 1)
        accept(store, 2)
        os.truncate(log_of(path), log_of(path).stat().st_size - 1)
        accept(store, 3)
    assert "was made shorter" in caplog.text
    assert accepted(path) == [1, 2, 3]


def test_an_orderly_stop_saves_what_a_cut_log_held(tmp_path, caplog):
    path = tmp_path / "queue.sqlite"
    store = opened(path)
    accept_many(store, 1)
    os.truncate(log_of(path), 20_000)
    store.close()
    assert "Nothing is lost" in caplog.text
    assert is_whole(path)
    assert accepted(path) == list(range(1, 201))


def test_a_state_that_was_replaced_is_not_replaced_again_because_its_log_was_cut(tmp_path):
    path = tmp_path / "queue.sqlite"
    store = opened(path)
    accept_many(store, 1)
    os.truncate(log_of(path), 0)
    (tmp_path / "other").write_bytes(b"of somebody")
    (tmp_path / "other").replace(path)
    with pytest.raises(StorageError, match="removed or replaced"):
        accept(store, 201)
    store.close()
    assert path.read_bytes() == b"of somebody"


def test_a_log_that_was_cut_and_removed_is_no_removed_one(tmp_path, caplog):
    path = tmp_path / "queue.sqlite"
    with contextlib.closing(opened(path)) as store:
        accept_many(store, 1)
        store.tidy()
        accept_many(store, 201)
        os.truncate(log_of(path), 50_000)
        log_of(path).unlink()
        accept(store, 401)
        assert "Nothing is lost" in caplog.text
    assert is_whole(path)
    assert accepted(path) == list(range(1, 402))


@pytest.mark.parametrize("left", [0, 50_000])
@pytest.mark.parametrize("how", ["commit", "stop", "read"])
def test_what_cannot_be_saved_leaves_the_state_as_of_the_last_checkpoint(tmp_path, caplog, left, how):
    path = tmp_path / "queue.sqlite"
    store = opened(path)
    store.aggregates()
    accept_many(store, 1)
    store.tidy()
    accept_many(store, 201)
    accept_many(store, 401)
    before = subprocess.run(["sha1sum", path], check=True, capture_output=True).stdout
    os.truncate(log_of(path), left)
    forget(store)
    if how == "commit":
        for _ in range(2):
            with pytest.raises(StorageError, match=r"made shorter .* nothing more was accepted, and what was accepted"):
                accept(store, 601)
    elif how == "read":
        with pytest.raises(StorageError, match="made shorter"):
            list(store.replay())
    store.close()
    if how == "stop":
        assert "cannot be saved" in caplog.text
    assert subprocess.run(["sha1sum", path], check=True, capture_output=True).stdout == before
    note = cut.read(path)
    assert note is not None
    assert note.sums is not None
    assert note.sums.next_job == 601
    assert note.is_log
    assert is_whole(path)
    assert accepted(path) == list(range(1, 201))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["log", "state", "both"])
@pytest.mark.parametrize("step", ["noted", "copied", "marked", "replaced", "emptied", "opened again"])
def test_a_kill_while_the_state_is_written_anew_leaves_the_old_files_with_a_note_or_all(tmp_path, caplog, what, step):
    path = tmp_path / "queue.sqlite"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path), what, step], timeout=60, check=False)
    assert killed.returncode == 9
    note = cut.read(path)
    assert note is not None
    assert note.sums is not None
    assert note.sums.next_job == 1001
    if step in {"replaced", "emptied", "opened again"}:
        assert accepted(path) == list(range(1, 1001))
        assert "Nothing is lost" in caplog.text
        assert cut.read(path) is None
    elif what == "log":
        assert accepted(path) == list(range(1, 201))
        assert cut.read(path) == note
    else:
        with pytest.raises(StorageError, match="a part of it was cut away"):
            opened(path)
        assert what == "both" or log_of(path).stat().st_size > 9000
        return
    assert is_whole(path)


def with_void_log(folder):
    """A state with jobs 1 to 1000, beside it a log that is older, as a part of one that was checkpointed, and a note."""
    path = folder / "queue.sqlite"
    with contextlib.closing(opened(path)) as store:
        accept_many(store, 1)
        shutil.copy2(log_of(path), folder / "old")
        for first in range(201, 1001, 200):
            accept_many(store, first)
    shutil.copy2(folder / "old", log_of(path))
    cut.write(path, cut.Note("", is_log=True))
    return path


def test_what_is_left_of_a_cut_log_is_not_read_after_a_kill(tmp_path):
    path = with_void_log(tmp_path)
    assert accepted(path) == list(range(1, 1001))
    assert is_whole(path)


def test_what_is_left_of_a_cut_log_is_neither_copied_nor_recovered(tmp_path):
    path = with_void_log(tmp_path)
    saved = salvage(path, tmp_path / "recovered.sqlite", wall=1.0)
    assert saved.lost == ()
    assert accepted(tmp_path / "recovered.sqlite") == list(range(1, 1001))
    assert log_of(path).read_bytes() == (tmp_path / "old").read_bytes()
    with contextlib.closing(opening.open_to_copy(path)) as connection:
        assert connection.execute("SELECT max(last) FROM ranges").fetchone() == (1000,)
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_where_no_note_can_be_left_the_sentence_says_what_follows(tmp_path):
    path = tmp_path / "queue.sqlite"
    store = opened(path)
    accept_many(store, 1)
    store.tidy()
    accept_many(store, 201)
    path.with_name("queue.sqlite.cut").mkdir()
    os.truncate(log_of(path), 50_000)
    with pytest.raises(StorageError, match=r"what was accepted since .* is lost") as raised:
        accept(store, 401)
    assert "numbers of jobs again" in raised.value.hint
    store.close()
    assert is_whole(path)
    assert accepted(path) == list(range(1, 201))


def test_free_pages_that_nobody_has_read_are_not_missed(tmp_path, caplog):
    path = tmp_path / "queue.sqlite"
    with contextlib.closing(opened(path)) as store:
        for first in range(1, 1001, 200):
            accept_many(store, first)
        store.commit(ending(*range(1, 900)))
        store.commit(batch(cleaned(*range(1, 900)), next_job=1001))
    with contextlib.closing(opened(path)) as store:
        (free,) = store._connection.execute("PRAGMA freelist_count").fetchone()
        assert free > 20
        store._connection.execute("PRAGMA integrity_check").fetchall()  # reads every page but the free ones
        os.truncate(path, 0)
        accept(store, 1001)
        assert "Nothing is lost" in caplog.text
    assert is_whole(path)
    assert accepted(path) == list(range(900, 1002))


def test_the_page_that_is_never_written_is_not_missed(tmp_path):
    path, page = tmp_path / "large", 65536
    lock = 2**30 // page + 1
    leaves = [number for number in range(4, lock + 2) if number != lock]
    half = len(leaves) // 2
    with path.open("w+b") as file:
        file.truncate(2**30 + 2 * page)
        for offset, words in (
            (0, [1]),
            (32, [2, len(leaves) + 2]),
            (page, [3, half, *leaves[:half]]),
            (2 * page, [0, len(leaves) - half, *leaves[half:]]),
        ):
            file.seek(offset)
            file.write(struct.pack(f">{len(words)}I", *words))
        assert not rewriting.lacks_a_page(file, page)
        file.seek(0, os.SEEK_END)
        file.write(bytes(page))  # of which the list says nothing
        assert rewriting.lacks_a_page(file, page)


def test_a_state_too_large_for_the_memory_is_not_read_into_it(tmp_path, monkeypatch):
    path = tmp_path / "queue.sqlite"
    (tmp_path / "meminfo").write_text("MemTotal:  900 kB\nMemAvailable:   100 kB\n", "ascii")
    store = opened(path)
    accept_many(store, 1)
    monkeypatch.setattr(rewriting, "MEMORY", tmp_path / "meminfo")
    os.truncate(log_of(path), 0)
    with pytest.raises(StorageError, match="more than half of the memory that is free"):
        accept(store, 201)
    store.close()


def test_a_vacuum_of_before_a_kill_that_a_later_checkpoint_brings_in_is_no_cut(tmp_path, caplog):
    path = tmp_path / "queue.sqlite"
    assert subprocess.run([sys.executable, "-c", VACUUMED, str(path)], timeout=60, check=False).returncode == 9
    before = path.stat().st_size
    with contextlib.closing(opened(path)) as store:
        store._connection.execute("PRAGMA wal_autocheckpoint = 1")
        accept(store, 1001)
        accept(store, 1002)
        assert path.stat().st_size < before
        accept(store, 1003)
    assert caplog.records == []
    assert accepted(path) == [1001, 1002, 1003]


def test_a_state_that_was_cut_beyond_help_ends_the_service(tmp_path):
    path = tmp_path / "queue.sqlite"
    store = opened(path)
    for first in range(1, 1001, 200):
        accept_many(store, first)
    store.tidy()
    forget(store)
    os.truncate(path, 4096 * 3)
    with pytest.raises(StorageError, match=r"queue.sqlite was made shorter .* cannot be saved") as raised:
        accept(store, 1001)
    assert "--restore" in raised.value.hint
    store.close()
    note = cut.read(path)
    assert note is not None
    assert not note.is_log


def test_half_a_page_is_not_taken_for_a_whole_one(tmp_path):
    path = tmp_path / "queue.sqlite"
    store = opened(path)
    accept_many(store, 1)
    store.tidy()
    store._connection.execute("PRAGMA integrity_check").fetchall()  # reads every page
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(StorageError, match="a part of it is nowhere any more"):
        accept(store, 201)
    store.close()


def test_a_state_is_written_anew_as_soon_as_the_disk_has_room(tmp_path, caplog):
    with small_disk(tmp_path / "disk", 20) as disk:
        path = disk / "queue.sqlite"
        with contextlib.closing(opened(path)) as store:
            accept_many(store, 1)
            fill(disk)
            os.truncate(log_of(path), 0)
            fill(disk)
            for _ in range(3):
                with pytest.raises(DiskFull):
                    accept(store, 201)
            assert live_ids(store.replay()) == list(range(1, 201))
            (disk / FILLER).unlink()
            store.probe()
            accept(store, 201)
            assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
        assert accepted(path) == list(range(1, 202))


def test_a_disk_without_room_for_another_name_is_waited_for(tmp_path, caplog):
    with small_disk(tmp_path / "disk", 20, inodes=40) as disk:
        path = disk / "queue.sqlite"
        with contextlib.closing(opened(path)) as store:
            accept_many(store, 1)
            store.tidy()
            accept_many(store, 201)
            fillers = [disk / f"filler-{number}" for number in range(40)]
            with contextlib.suppress(OSError):
                for filler in fillers:
                    filler.touch()
            os.truncate(log_of(path), 0)
            for _ in range(3):
                with pytest.raises(DiskFull, match="no room to write the state anew"):
                    accept(store, 401)
            for filler in fillers:
                filler.unlink(missing_ok=True)
            accept(store, 401)
            assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
        assert accepted(path) == list(range(1, 402))


def test_a_limit_of_the_length_of_files_is_waited_for_and_the_hint_is_true(tmp_path):
    path = tmp_path / "queue.sqlite"
    child = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True, timeout=60, check=True
    )
    hints = child.stdout.splitlines()
    assert len(hints) == 2
    assert all("Make room there" in hint and "clean-jobs" not in hint for hint in hints)
    assert accepted(path) == list(range(1, 3002))


def test_a_copy_under_way_is_given_up_when_the_state_is_written_anew(tmp_path):
    path = tmp_path / "queue.sqlite"
    away = tmp_path / "away"
    away.mkdir()
    with contextlib.closing(opened(path)) as store:
        for first in range(1, 3001, 200):
            accept_many(store, first)
        whole = store.begin_copy(backup.plan(away / "whole", path, force=False))
        while not whole.step():
            pass
        half = store.begin_copy(backup.plan(away / "half", path, force=False))
        assert not half.step()
        os.truncate(log_of(path), 0)
        accept(store, 3001)
        with pytest.raises(UserError, match="given up"):
            half.step()
        half.leave()
        assert whole.finish().live == 3000
    assert accepted(path) == list(range(1, 3002))
    assert [entry.name for entry in away.iterdir()] == ["whole"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_nothing_that_the_store_does_itself_looks_like_a_cut(tmp_path, monkeypatch, caplog, kind, seed):
    for module in (opening, own_files):
        monkeypatch.setattr(module, "LOG_BYTES", 300_000)
    monkeypatch.setattr(sqlite, "VACUUM_PAGES", 20)
    chance = random.Random(seed)
    path = tmp_path / "queue.sqlite"
    (tmp_path / "away").mkdir()
    store = opened(path, kind)
    live: list[int] = []
    over: list[int] = []
    state, log, sizes = path, log_of(path), set()
    next_job, shrunk = 1, set()
    for _ in range(250):
        match chance.choice(("one", "one", "many", "end", "end", "clean", "tidy", "full", "copy", "stop", "probe")):
            case "one":
                accept(store, next_job)
                live.append(next_job)
                next_job += 1
            case "many":
                accept_many(store, next_job)
                live += range(next_job, next_job + len(FAT))
                next_job += len(FAT)
            case "end" if live:
                ends = sorted(chance.sample(live, max(1, len(live) // 2)))
                store.commit(ending(*ends))
                live = [job for job in live if job not in set(ends)]
                over += ends
            case "clean" if over:
                store.commit(batch(cleaned(*over)))
                over = []
            case "tidy":
                store.tidy()
            case "full":
                store.release_ballast()
                store.tidy()
                store.restore_ballast()
            case "copy":
                copy = store.begin_copy(backup.plan(tmp_path / "away" / "copy", path, force=True))
                while not copy.step():
                    if chance.random() < 0.5:
                        store.probe()
                copy.finish()
            case "stop" if chance.random() < 0.3:
                store.close()
                store = opened(path, kind)
                store._connection.execute(f"PRAGMA wal_autocheckpoint = {chance.choice((5, 50, 4000))}")
            case "probe":
                store.probe()
        for file in (state, log):
            size = file.stat().st_size if file.exists() else 0
            if any(size < known for name, known in sizes if name == file):
                shrunk.add(file)
            sizes.add((file, size))
    assert live_ids(store.replay()) == live
    store.close()
    assert caplog.records == []
    assert cut.read(path) is None
    assert is_whole(path)
    assert accepted(path, kind) == live
    # The run has tried what it is about.
    assert state in shrunk
    assert kind == "network" or log in shrunk


def test_a_log_that_a_large_batch_has_made_long_may_become_shorter(tmp_path, monkeypatch, caplog):
    for module in (opening, own_files):
        monkeypatch.setattr(module, "LOG_BYTES", 100_000)
    path = tmp_path / "queue.sqlite"
    with contextlib.closing(opened(path)) as store:
        accept_many(store, 1)
        accept_many(store, 201)
        long = log_of(path).stat().st_size
        store.tidy()
        accept(store, 401)
        assert log_of(path).stat().st_size < long
        accept(store, 402)
    assert caplog.records == []
    assert accepted(path) == list(range(1, 403))
