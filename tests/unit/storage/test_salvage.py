"""What `--recover` saves from a damaged file, and that it is honest about the rest."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3

import msgspec
import pytest

from kueue.core import facts as f
from kueue.core.state import State
from kueue.errors import StorageError
from kueue.model import Place, Request, Terms
from kueue.storage import rows
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

pytestmark = pytest.mark.slow


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
    try:
        for fact in store.replay():
            state.evolve(fact)
    except BaseException:
        store.close()
        raise
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
    # Its jobs that are over tell of offers up to 1014.
    assert (store.queue_id, store.aggregates().next_offer) == (queue, 1015)
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


@pytest.mark.parametrize("has_sums", [False, True])
def test_no_offer_of_a_job_that_is_over_is_given_again(tmp_path, has_sums):
    """Workers keep its output under that number."""
    path = tmp_path / "state.sqlite"
    store = opened(path)
    store.commit(batch(node_changed(1), submitted(1, job_range(1)), next_job=2, next_offer=7))
    ended = ending(1)
    (row,) = ended.finished
    past = msgspec.structs.replace(row.attempts[0], offer=500_000)
    row = msgspec.structs.replace(row, attempts=(past,))
    sums = msgspec.structs.replace(ended.aggregates, next_job=2, next_offer=7)
    store.commit(msgspec.structs.replace(ended, finished=(row,), aggregates=sums))
    store.close()
    if not has_sums:
        with contextlib.closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("DELETE FROM aggregates")
    _, store, _ = rescued(tmp_path)
    assert store.aggregates().next_offer > 500_000
    store.close()


def test_a_damaged_definition_of_a_table_costs_nothing(tmp_path):
    path = tmp_path / "state.sqlite"
    big(path)
    content = path.read_bytes()
    assert content[:4096].count(b"id INTEGER PRIMARY KEY, refs") == 1
    path.write_bytes(content.replace(b"id INTEGER PRIMARY KEY, refs", b"id INTEGER PRIMARQ KEY, refs", 1))
    report, store, state = rescued(tmp_path)
    store.close()
    assert report.lost == ()
    assert len(state.jobs) == 150


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


def changed(path, statement: str) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    assert connection.execute(statement).rowcount >= 1
    connection.close()


def other_body(was: str, now: str) -> str:
    return f"body = CAST(replace(CAST(body AS TEXT), '{was}', '{now}') AS BLOB)"


OTHER_OFFER = other_body('"offer":334', '"offer":330')
OTHER_NODE = other_body('"shares":[{"node":1', '"shares":[{"node":7')
FIRST_OFFER = "(SELECT min(seq) FROM live WHERE job = 334)"


@pytest.mark.parametrize(
    ("damage", "lost", "held", "jobs"),
    [
        ("UPDATE ranges SET last = 'x' WHERE first = 310", "ranges: number 310 is spoiled", 0, 149),
        ("UPDATE ranges SET seq = 'x' WHERE first = 310", "ranges: number 310 is spoiled", 0, 149),
        ("UPDATE ranges SET wall = x'00' WHERE first = 310", "ranges: number 310 is spoiled", 0, 149),
        # One job by its body, millions by its column.
        ("UPDATE ranges SET last = last + 16777216 WHERE first = 310", "ranges: number 310 is spoiled", 0, 149),
        ("UPDATE ranges SET place = settings WHERE first = 310", "jobs 310 to 310: their directory", 0, 149),
        # What is lost of one job may have been about any that seems to wait: 100 and this one.
        (f"UPDATE live SET job = 'x' WHERE seq = {FIRST_OFFER}", "job 334: what became of it", 101, 150),
        (f"UPDATE live SET offer = 17 WHERE seq = {FIRST_OFFER}", "job 334: what became of it", 101, 150),
        (f"UPDATE live SET {other_body('JobOffered', 'NoSuchFact')} WHERE seq = {FIRST_OFFER}", "job 334:", 101, 150),
        (f"UPDATE live SET {other_body('334', '335')} WHERE seq = {FIRST_OFFER}", "job 334: what", 101, 150),
        (
            f"UPDATE live SET offer = 330, {OTHER_OFFER} WHERE job = 334",
            "job 330:",
            102,
            150,
        ),
        (f"UPDATE live SET {OTHER_NODE}", "job 301:", 150, 150),
        ("UPDATE nodes SET id = 2", "nodes: number 2 is spoiled", 150, 150),
        ("UPDATE finished SET kind = 'failed' WHERE id = 20", "finished: number 20 is spoiled", 0, 150),
        ("UPDATE finished SET ended = 'x' WHERE id = 20", "finished: number 20 is spoiled", 0, 150),
        ("UPDATE blobs SET digest = x'00' WHERE id = (SELECT place FROM ranges)", "jobs 301 to 301: their", 0, 0),
        ("UPDATE meta SET value = x'ff' WHERE key = 'queue_id'", "a new identity", 0, 150),
    ],
)
def test_no_column_is_taken_that_cannot_be_or_that_contradicts_its_body(tmp_path, damage, lost, held, jobs):
    path = tmp_path / "state.sqlite"
    big(path)
    changed(path, damage)
    report, store, state = rescued(tmp_path)
    store.close()
    assert any(lost in sentence for sentence in report.lost), report.lost
    assert report.held == held
    assert len(state.jobs) == jobs
    assert sum(job.state.value == "held" for job in state.jobs.values()) == held


def test_an_order_that_cannot_have_been_is_mended_without_a_loss(tmp_path):
    path = tmp_path / "state.sqlite"
    big(path)
    changed(path, "UPDATE ranges SET seq = 100000 WHERE first = 310")
    report, store, state = rescued(tmp_path)
    store.commit(batch(submitted(451), next_job=452))
    store.close()
    assert report.lost == ()
    assert state.jobs[310].state.value == "running"
    assert len(state.jobs) == 150


def test_a_job_without_its_request_gets_the_empty_one_that_another_has(tmp_path):
    path = tmp_path / "state.sqlite"
    big(path)
    body = rows.encode(rows.Settings(Request(), Terms()))
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("INSERT INTO blobs VALUES (50, 1, ?, ?)", (rows.digest(body), body))
    connection.execute("UPDATE finished SET settings = 50 WHERE id = 20")
    connection.execute("UPDATE finished SET settings = 51 WHERE id = 21")
    connection.close()
    report, store, _ = rescued(tmp_path)
    found = {row.id: row.terms for row in store.finished()}
    store.close()
    assert report.lost == ("job 21: its directory or request is lost; how it ended is known",)
    assert len(found) == 300
    assert found[20] == found[21] == Terms()


def test_numbers_that_were_given_are_not_given_again_whatever_the_sums_say(tmp_path):
    path = tmp_path / "state.sqlite"
    big(path)
    for was, now in (('"next_job":451', '"next_job":401'), ('"next_offer":1000', '"next_offer":100')):
        changed(path, f"UPDATE aggregates SET {other_body(was, now)}")
    _, store, _ = rescued(tmp_path)
    sums = store.aggregates()
    store.close()
    assert (sums.next_job, sums.next_offer, sums.next_node) == (
        451,
        1301,
        2,
    )  # those of the jobs that are over included


def test_a_damaged_name_in_the_list_of_tables_costs_nothing(tmp_path):
    path = tmp_path / "state.sqlite"
    big(path)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"live_by_joblive", b"\xffive_by_joblive", 1))
    assert path.read_bytes() != content
    report, store, state = rescued(tmp_path)
    store.close()
    assert report.lost == ()
    assert len(state.jobs) == 150


def test_a_place_where_nothing_can_be_made_is_one_sentence(tmp_path):
    path = tmp_path / "state.sqlite"
    big(path)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="Not a directory"):
        salvage(path, tmp_path / "file" / "rescued.sqlite", wall=WALL)


@pytest.mark.parametrize("seed", range(12))
def test_any_few_spoiled_bytes_leave_a_record_that_can_be_loaded(tmp_path, seed):
    path = tmp_path / "state.sqlite"
    big(path)
    content, chosen = bytearray(path.read_bytes()), random.Random(seed)
    for _ in range(4):
        at = chosen.randrange(len(content) - 40)
        spoiled = chosen.randbytes(chosen.choice([1, 2, 8, 40]))
        content[at : at + len(spoiled)] = spoiled
    path.write_bytes(content)
    _, store, state = rescued(tmp_path)
    found = [store.finished_job(row.id) for row in store.finished()]
    sums = store.aggregates()
    store.close()
    assert len(found) == sums.succeeded
    assert len(state.jobs) == sum(state.by_state.values())


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


@pytest.mark.parametrize(
    "new",
    [
        {"place": Place("/other")},
        {"place": Place("/"), "request": Request(cores=7), "terms": Terms(timeout_seconds=60.0)},
    ],
)
def test_what_was_stored_after_a_recovery_is_whole_after_the_next(tmp_path, new):
    """A finished job without its place gets an empty one; its number must not be that of a content to come."""
    store = opened(tmp_path / "damaged")
    store.commit(batch(node_changed(1), submitted(1), next_job=2))
    store.commit(ending(1))
    store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "damaged")) as connection, connection:
        connection.execute("UPDATE blobs SET body = 'x' WHERE id = (SELECT place FROM finished)")
    assert len(salvage(tmp_path / "damaged", tmp_path / "saved", wall=WALL).lost) >= 1
    store = opened(tmp_path / "saved")
    store.commit(batch(submitted(2, msgspec.structs.replace(job_range(), **new)), next_job=3))
    before = list(store.replay())
    store.close()
    again = salvage(tmp_path / "saved", tmp_path / "again", wall=WALL)
    assert again.lost == ()
    store = opened(tmp_path / "again")
    assert list(store.replay()) == before
    store.close()
