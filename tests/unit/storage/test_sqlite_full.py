"""A full disk: nothing of the batch is accepted, nothing that was is lost, and clean-up goes on."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys

import pytest

from kueue.errors import DiskFull, StorageError
from kueue.storage import schema
from kueue.storage.sqlite import SqliteStore
from tests.support.small_disk import FILLER, fill, small_disk
from tests.support.storage_rows import batch, cleaned, ending, job_range, live_ids, submitted

FAT = tuple((os.urandom(500).hex(),) for _ in range(200))
"""Arguments of 200 jobs: a batch of some 200 kB."""


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", 20) as disk:
        yield disk


def commit_until_full(store: SqliteStore, first: int) -> int:
    """The first job that was not accepted."""
    for job in range(first, first + 200 * len(FAT), len(FAT)):
        try:
            store.commit(batch(submitted(job, job_range(argvs=FAT)), next_job=job + len(FAT)))
        except DiskFull:  # noqa: PERF203  # the very thing this loop waits for
            return job
    raise AssertionError("the disk never was full")


@pytest.mark.parametrize("is_network", [False, True])
def test_a_full_disk_accepts_nothing_and_loses_nothing_and_the_store_comes_back(disk, is_network):
    path = disk / "state.sqlite"
    store = SqliteStore(path, is_network=is_network, ballast_bytes=8 * 2**20)
    next_job = commit_until_full(store, 1)
    assert next_job > 1
    fill(disk)
    for _ in range(3):
        with pytest.raises(DiskFull, match="nothing was accepted"):
            store.commit(batch(submitted(next_job, job_range(argvs=FAT)), next_job=10**6))
    with pytest.raises(DiskFull):
        store.probe()
    assert live_ids(store.replay()) == list(range(1, next_job))
    assert store.aggregates().next_job == next_job
    assert not store.restore_ballast() or store.release_ballast()

    (disk / FILLER).unlink()
    store.release_ballast()
    store.probe()
    store.commit(batch(submitted(next_job), next_job=next_job + 1))
    store.close()
    store = SqliteStore(path, is_network=is_network, ballast_bytes=8 * 2**20)
    assert live_ids(store.replay()) == list(range(1, next_job + 1))
    store.close()


def test_the_ballast_lets_clean_up_run_while_others_keep_the_disk_full(disk):
    path = disk / "state.sqlite"
    store = SqliteStore(path, ballast_bytes=8 * 2**20)
    store.commit(batch(submitted(1, job_range(3000))))
    store.commit(ending(*range(1, 2901)))
    store.tidy()
    fill(disk)
    # The log has pages to spare from before; they do not last.
    next_job = commit_until_full(store, 3001)
    assert store.release_ballast()
    for first in range(1, 2901, 500):
        store.probe()
        store.commit(batch(cleaned(*range(first, min(first + 500, 2901)))))
    store.tidy()
    assert store.finished() == []
    assert live_ids(store.replay()) == list(range(2901, next_job))
    size = path.stat().st_size
    for _ in range(5):
        store.tidy()
    assert path.stat().st_size <= size
    assert store.restore_ballast()
    store.close()


def test_a_start_on_a_full_disk_works_and_says_that_there_is_no_ballast(disk):
    path = disk / "state.sqlite"
    store = SqliteStore(path, ballast_bytes=4096)
    store.commit(batch(submitted(1)))
    store.release_ballast()
    fill(disk)
    store.close()
    store = SqliteStore(path)
    assert list(store.replay()) == [submitted(1)]
    assert not store.restore_ballast()
    with pytest.raises(DiskFull):
        store.probe()
    store.close()


def test_a_first_start_on_a_full_disk_is_refused_and_leaves_nothing(disk):
    fill(disk)
    with pytest.raises(StorageError):
        SqliteStore(disk / "state.sqlite")
    assert [entry.name for entry in disk.iterdir()] == [FILLER]


def test_a_migration_that_finds_no_room_for_its_backup_leaves_nothing_of_it(disk):
    path = disk / "state.sqlite"
    store = SqliteStore(path, ballast_bytes=4096)
    for job in range(1, 12 * len(FAT), len(FAT)):
        store.commit(batch(submitted(job, job_range(argvs=FAT)), next_job=job + len(FAT)))
    store.close()
    (disk / FILLER).write_bytes(bytes(16 * 2**20))
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {schema.FORMAT - 1}")
    connection.close()
    there = {entry.name: entry.stat().st_size for entry in disk.iterdir()}
    with pytest.raises(StorageError):
        SqliteStore(path, steps={schema.FORMAT - 1: lambda _: None})
    assert {entry.name: entry.stat().st_size for entry in disk.iterdir()} == there


LIMITED = """
import resource, sys
from kueue.errors import DiskFull
from kueue.storage.sqlite import SqliteStore
from tests.support.small_disk import FILLER, fill, small_disk
from tests.support.storage_rows import batch, job_range, submitted
store = SqliteStore(sys.argv[1], ballast_bytes=4096)
resource.setrlimit(resource.RLIMIT_FSIZE, (3 * 2**20, resource.RLIM_INFINITY))
argvs = tuple((f"{n:01000}",) for n in range(200))
job, accepted = 1, 0
try:
    while True:
        store.commit(batch(submitted(job, job_range(argvs=argvs)), next_job=job + 200))
        accepted, job = accepted + 1, job + 200
except DiskFull:
    print(accepted)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
store.probe()
store.commit(batch(submitted(job), next_job=job + 1))
store.close()
"""


def test_a_file_that_may_not_grow_counts_as_a_full_disk(tmp_path):
    path = tmp_path / "state.sqlite"
    child = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True, timeout=60, check=True
    )
    accepted = int(child.stdout)
    assert accepted > 2
    store = SqliteStore(path, ballast_bytes=4096)
    assert live_ids(store.replay()) == list(range(1, 200 * accepted + 2))
    store.close()
