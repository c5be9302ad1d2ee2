"""What `--recover` saves from a damaged file, and that it is honest about the rest."""

from __future__ import annotations

import os
import random
import sqlite3

import pytest

from kueue.core import facts as f
from kueue.core.state import State
from kueue.errors import StorageError
from kueue.storage.salvage import salvage
from kueue.storage.sqlite import SqliteStore
from tests.support.storage_format import fill, told
from tests.support.storage_rows import (
    PLACE,
    WALL,
    answered,
    batch,
    ending,
    job_range,
    live_ids,
    node_changed,
    offered,
    started,
    submitted,
)


def opened(path) -> SqliteStore:
    return SqliteStore(path, wall=lambda: WALL, ballast_bytes=4096)


def big(path) -> None:
    """A file of some hundred pages: 300 finished jobs, 100 waiting, 50 running."""
    store = opened(path)
    store.commit(batch(node_changed(1), submitted(1, job_range(300)), answered(1), next_job=301))
    for first in range(1, 301, 50):
        store.commit(ending(*range(first, first + 50)))
    for job in range(301, 451):
        store.commit(batch(submitted(job), next_job=451, next_offer=1000))
    for job in range(301, 351):
        store.commit(batch(offered(job, job), started(job, job), next_job=451, next_offer=1000))
    store.close()


def pages_of(path, name: str) -> list[int]:
    """The pages of a table or index, from 1; by its root and the pages below it. Layout: sqlite.org/fileformat2."""
    connection = sqlite3.connect(path)
    (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (name,)).fetchone()
    connection.close()
    content = path.read_bytes()
    found, ahead = [], [root]
    while ahead:
        page = ahead.pop()
        found.append(page)
        at = (page - 1) * 4096
        if content[at] == 5:
            cells = int.from_bytes(content[at + 3 : at + 5], "big")
            ahead.append(int.from_bytes(content[at + 8 : at + 12], "big"))
            for cell in range(cells):
                place = at + int.from_bytes(content[at + 12 + 2 * cell : at + 14 + 2 * cell], "big")
                ahead.append(int.from_bytes(content[place : place + 4], "big"))
    return found


def spoil(path, page: int) -> None:
    with path.open("r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(random.Random(page).randbytes(4096))


def rescued(tmp_path):
    """Salvage the file, hold that it was left alone and that the new one can be replayed into a state."""
    path, target = tmp_path / "state.sqlite", tmp_path / "rescued.sqlite"
    before = path.read_bytes()
    report = salvage(path, target, wall=WALL)
    assert path.read_bytes() == before
    assert {entry.name for entry in tmp_path.iterdir()} <= {"state.sqlite", "rescued.sqlite", "state.sqlite.ballast"}
    store = opened(target)
    state = State()
    for fact in store.replay():
        state.evolve(fact)
    return report, store, state


def test_an_undamaged_file_is_saved_whole(tmp_path):
    store = opened(tmp_path / "state.sqlite")
    fill(store)
    before, queue = told(store), store.queue_id
    store.close()
    report, store, _ = rescued(tmp_path)
    assert report.lost == ()
    assert report.held == 0
    after = told(store)
    assert (after.facts, after.finished, after.events) == (before.facts, before.finished, before.events)
    assert (store.queue_id, store.aggregates().next_offer) == (queue, 60)
    store.commit(ending(1))
    store.close()


def test_a_bad_page_of_finished_jobs_costs_those_on_it(tmp_path):
    path = tmp_path / "state.sqlite"
    big(path)
    leaf = pages_of(path, "finished")[5]
    spoil(path, leaf)
    report, store, state = rescued(tmp_path)
    rows = store.finished()
    assert 250 < len(rows) < 300
    assert any("finished" in sentence for sentence in report.lost)
    assert store.aggregates().succeeded == len(rows)
    assert store.aggregates().next_job == 451
    assert len(state.jobs) == 150
    assert report.held == 0
    store.close()


def test_when_what_happened_to_live_jobs_is_lost_they_are_held_not_started_again(tmp_path):
    path = tmp_path / "state.sqlite"
    big(path)
    leaf = pages_of(path, "live")[2]
    spoil(path, leaf)
    report, store, state = rescued(tmp_path)
    assert sorted(state.jobs) == list(range(301, 451))
    words = [job.state.value for job in state.jobs.values()]
    assert words.count("pending") == 0
    assert 0 < words.count("running") < 50
    assert words.count("running") + words.count("offered") + words.count("held") == 150
    assert report.held == words.count("held")
    assert len(store.finished()) == 300
    # What may still run somewhere as the attempt of a held job is not stopped as one that was given away.
    known = {offer for offer in range(1000) if not any(a <= offer <= b for a, b in store.aggregates().never_given)}
    assert known == {held.offer for held in state.attempts.values()}
    store.close()


def test_a_lost_submission_takes_its_jobs_along_and_says_which(tmp_path):
    path = tmp_path / "state.sqlite"
    big(path)
    connection = sqlite3.connect(path)
    connection.execute("UPDATE ranges SET body = '{\"payload\":' WHERE first = 310")
    connection.execute("DELETE FROM blobs WHERE id = (SELECT place FROM ranges WHERE first = 400)")
    connection.commit()
    connection.close()
    report, store, state = rescued(tmp_path)
    assert state.jobs == {}
    assert "ranges: number 310 is spoiled" in report.lost
    assert any("jobs 400 to 400" in sentence for sentence in report.lost)
    # Their place is lost too, but how they ended is known.
    assert len(store.finished()) == 300
    assert store.finished()[0].place != PLACE
    store.close()


def test_lost_sums_are_reckoned_anew_and_no_number_is_used_twice(tmp_path):
    path = tmp_path / "state.sqlite"
    big(path)
    for page in pages_of(path, "aggregates") + pages_of(path, "meta"):
        spoil(path, page)
    report, store, state = rescued(tmp_path)
    sums = store.aggregates()
    assert sums.next_job >= 451
    assert report.held == 0
    assert len(state.attempts) == 50
    assert sums.timeout_seconds >= 3600
    assert (351, sums.next_offer - 1) in sums.never_given
    assert sums.next_offer > 1000
    assert sums.next_node == 2
    assert sums.succeeded == 300
    assert any("identity" in sentence for sentence in report.lost)
    store.close()


@pytest.mark.parametrize("size", [16, 100, 4096])
def test_a_spoiled_beginning_of_the_file_costs_nothing(tmp_path, size):
    path = tmp_path / "state.sqlite"
    big(path)
    with path.open("r+b") as file:
        file.write(bytes(size))
    with pytest.raises(StorageError, match="damaged"):
        opened(path)
    report, store, state = rescued(tmp_path)
    assert report.lost == ()
    assert len(store.finished()) == 300
    assert len(state.jobs) == 150
    store.close()


def test_a_file_cut_short_gives_what_is_left(tmp_path):
    path = tmp_path / "state.sqlite"
    big(path)
    os.truncate(path, path.stat().st_size // 2 // 4096 * 4096)
    report, store, _ = rescued(tmp_path)
    assert report.lost
    assert 0 < len(store.finished()) < 300
    store.close()


@pytest.mark.parametrize("seed", range(12))
def test_any_few_spoiled_pages_leave_a_record_that_can_be_used(tmp_path, seed):
    path = tmp_path / "state.sqlite"
    big(path)
    pages = path.stat().st_size // 4096
    for page in random.Random(seed).sample(range(1, pages + 1), 3):
        spoil(path, page)
    _, store, state = rescued(tmp_path)
    # Whatever is left takes part in the usual life of a queue.
    job = store.aggregates().next_job + 1000
    store.commit(batch(submitted(job), offered(job, 10**6), next_job=job + 1))
    store.commit(ending(job))
    assert sorted(state.jobs) == live_ids(store.replay())
    for held in [job.id for job in state.jobs.values() if job.state.value == "held"][:3]:
        store.commit(batch(f.JobReleased(job=held, principal="operator", wall=WALL)))
    store.close()


def test_an_existing_target_is_not_overwritten(tmp_path):
    path = tmp_path / "state.sqlite"
    big(path)
    target = tmp_path / "precious"
    target.write_text("keep")
    with pytest.raises(StorageError, match="exists"):
        salvage(path, target, wall=WALL)
    assert target.read_text() == "keep"


def test_a_file_with_nothing_in_it_is_told_so(tmp_path):
    path = tmp_path / "state.sqlite"
    path.write_bytes(b"not a database at all, but a letter" * 1000)
    with pytest.raises(StorageError, match=r"[Nn]othing"):
        salvage(path, tmp_path / "rescued.sqlite", wall=WALL)
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.sqlite"]
