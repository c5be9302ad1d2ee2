"""Files that are taken away from under an open store: nothing that was accepted is lost by it, and it is told."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kueue.errors import DiskFull, StorageError
from kueue.storage import backup
from kueue.storage.sqlite import SqliteStore
from tests.support.small_disk import FILLER, fill, small_disk
from tests.support.storage_rows import batch, job_range, live_ids, submitted

FAT = tuple((os.urandom(500).hex(),) for _ in range(200))
LOGS = {"local": "-wal", "network": "-journal"}

KILLED = """
import os, shutil, sys
from pathlib import Path
from kueue.storage.sqlite import SqliteStore
from tests.support.storage_rows import batch, job_range, submitted
path, kind, how = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
log = path.with_name(path.name + {"local": "-wal", "network": "-journal"}[kind])
store = SqliteStore(path, ballast_bytes=4096, is_network=kind == "network")
def accept(job):
    store.commit(batch(submitted(job, job_range(1)), next_job=job + 1))
accept(1)
shutil.copy2(log, path.with_name("old"))
accept(2)
for job in (3, 5):
    if how == "removed":
        log.unlink()
    elif how == "replaced by an older one":
        shutil.copy2(path.with_name("old"), path.with_name("copy"))
        path.with_name("copy").replace(log)
    else:
        path.with_name("noise").write_bytes(os.urandom(100_000))
        path.with_name("noise").replace(log)
    accept(job)
    accept(job + 1)
os._exit(0)
"""


def opened(path: Path, kind: str = "local") -> SqliteStore:
    return SqliteStore(path, ballast_bytes=4096, is_network=kind == "network")


def accept(store: SqliteStore, job: int) -> None:
    store.commit(batch(submitted(job, job_range(1)), next_job=job + 1))


def accepted(path: Path, kind: str = "local") -> list[int]:
    with contextlib.closing(opened(path, kind)) as store:
        return live_ids(store.replay())


def is_the_one(log: Path) -> bool:
    """Does this process have the file of that name open?"""
    with contextlib.suppress(OSError):
        return any(os.path.samestat(os.stat(entry), log.stat()) for entry in Path("/proc/self/fd").iterdir())
    return False


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOGS)
@pytest.mark.parametrize("how", ["removed", "replaced by an older one", "replaced by noise"])
def test_a_log_that_was_taken_away_costs_nothing_that_was_accepted(tmp_path, kind, how):
    path = tmp_path / "queue.sqlite"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(path), kind, how], check=True, timeout=60, capture_output=True, text=True
    )
    assert killed.stderr.count("was removed or replaced while the server runs. Nothing is lost") == 2
    assert accepted(path, kind) == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOGS)
def test_another_log_is_begun_under_the_name_and_the_state_stays_locked(tmp_path, kind):
    path = tmp_path / "queue.sqlite"
    log = tmp_path / f"queue.sqlite{LOGS[kind]}"
    with contextlib.closing(opened(path, kind)) as store:
        accept(store, 1)
        assert is_the_one(log)
        log.unlink()
        accept(store, 2)
        assert is_the_one(log)
        script = "import sys; from kueue.storage.sqlite import SqliteStore; SqliteStore(sys.argv[1])"
        other = subprocess.run(
            [sys.executable, "-c", script, str(path)], capture_output=True, check=False, text=True, timeout=60
        )
        assert "Another server uses" in other.stderr
        assert is_the_one(log)
    assert accepted(path, kind) == [1, 2]


def test_an_idle_store_saves_what_its_log_held(tmp_path):
    path = tmp_path / "queue.sqlite"
    with contextlib.closing(opened(path)) as store:
        accept(store, 1)
        Path(f"{path}-wal").unlink()
        store.tidy()
        saved = tmp_path / "after a kill"
        saved.mkdir()
        shutil.copy2(path, saved)
        assert accepted(saved / path.name) == [1]


def test_a_log_that_nothing_can_take_the_place_of_ends_the_service_and_costs_nothing(tmp_path, caplog):
    path = tmp_path / "queue.sqlite"
    log = Path(f"{path}-wal")
    with contextlib.closing(opened(path)) as store:
        accept(store, 1)
        log.unlink()
        log.mkdir()
        for _ in range(2):
            with pytest.raises(StorageError, match="cannot be used"):
                accept(store, 2)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert f"{log} was removed or replaced" in caplog.text
    log.rmdir()
    assert accepted(path) == [1]


def test_a_log_that_was_taken_away_on_a_full_disk_is_saved_when_there_is_room(tmp_path, caplog):
    with small_disk(tmp_path / "disk", 20) as disk:
        path = disk / "queue.sqlite"
        with contextlib.closing(opened(path)) as store:
            store.commit(batch(submitted(1, job_range(argvs=FAT)), next_job=201))
            fill(disk)
            # Its room comes back only when nobody has it open any more.
            Path(f"{path}-wal").unlink()
            for _ in range(3):
                with pytest.raises(DiskFull):
                    accept(store, 201)
            assert live_ids(store.replay()) == list(range(1, 201))
            (disk / FILLER).unlink()
            store.probe()
            accept(store, 201)
            assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
        assert accepted(path) == list(range(1, 202))


def test_a_copy_under_way_is_whole_although_the_log_is_taken_away(tmp_path):
    path = tmp_path / "queue.sqlite"
    away = tmp_path / "away"
    away.mkdir()
    with contextlib.closing(opened(path)) as store:
        for first in range(1, 3001, 200):
            store.commit(batch(submitted(first, job_range(argvs=FAT)), next_job=first + 200))
        copy = store.begin_copy(backup.plan(away / "copy", path, force=False))
        assert not copy.step()
        Path(f"{path}-wal").unlink()
        accept(store, 3001)
        while not copy.step():
            pass
        assert copy.finish().live == 3001
        accept(store, 3002)
    assert accepted(away / "copy") == list(range(1, 3002))
    assert accepted(path) == list(range(1, 3003))
