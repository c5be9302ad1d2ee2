"""Backups of a queue that is in use, and what comes back from them."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import threading
from pathlib import Path

import pytest

from kueue import errors
from tests.support.kill_lab import KillLab, lives, sleepers
from tests.support.small_disk import small_disk

pytestmark = pytest.mark.slow


@pytest.fixture
def lab(tmp_path):
    with KillLab(tmp_path) as lab:
        yield lab


def server_command(lab, *words, cwd=None):
    """`kueue_server` with options that end at once."""
    return subprocess.run(
        [lab.python, "-m", "kueue.server.main", "-c", str(lab.folder / "lab.toml"), *words],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd or lab.folder,
        env=lab.environment(),
        check=False,
    )


def backup(lab, file="copy", *words):
    done = server_command(lab, "--backup", file, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def held(lab, count=1):
    """Jobs that wait."""
    return lab.quick(lab.range_of("true", held=True, count=count))


def submit_without_end(lab):
    while True:
        lab.quick(lab.range_of("true", held=True, argvs=[["x" * 100_000] for _ in range(20)]))


def test_a_backup_of_a_running_server_holds_all_that_was_acknowledged_and_says_so(lab):
    lab.start_server()
    jobs = held(lab, 3)
    (lab.folder / "below").mkdir()
    done = server_command(lab, "--backup", "copy", cwd=lab.folder / "below")
    assert done.returncode == 0, done.stderr
    copy = lab.folder / "below" / "copy"
    assert (
        done.stdout == f"Backup {copy}: {copy.stat().st_size / 2**20:.1f} MB, 3 jobs not over, 0 finished, next id 3.\n"
    )
    assert names(copy.parent) == {"copy"}
    assert copy.stat().st_mode & 0o777 == 0o600
    with contextlib.closing(sqlite3.connect(copy)) as reader:
        assert reader.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert reader.execute("SELECT sum(remaining) FROM ranges").fetchone() == (len(jobs),)
        assert reader.execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_without_a_server_the_command_copies_the_state_itself(lab):
    lab.start_server()
    held(lab, 2)
    lab.kill_server()
    assert "2 jobs not over, 0 finished, next id 2." in backup(lab)
    lab.start_server()
    assert len(lab.rows()) == 2


def test_a_backup_replaces_a_file_only_by_force_and_never_the_state(lab):
    lab.start_server()
    (lab.folder / "copy").write_text("mine")
    refused = server_command(lab, "--backup", "copy")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert f"{lab.folder / 'copy'} exists." in refused.stderr
    assert "--force" in refused.stderr
    assert (lab.folder / "copy").read_text() == "mine"
    backup(lab, "copy", "--force")
    assert (lab.folder / "copy").read_bytes().startswith(b"SQLite format 3")
    for target, sentence in (
        ("state/server/queue.sqlite", "among the state of the server itself"),
        ("state/server/queue.sqlite-journal", "among the state of the server itself"),
        ("state/server/lock", "among the state of the server itself"),
        ("no/such/copy", "There is no directory"),
        (".", "is not a file"),
        ("/dev/null", "is not a file"),
    ):
        refused = server_command(lab, "--backup", target, "--force")
        assert refused.returncode == 1
        assert sentence in refused.stderr
    held(lab)


@pytest.mark.parametrize("option", ["--backup", "--restore"])
def test_an_unset_variable_in_the_place_of_a_file_starts_no_server(lab, option):
    lab.config()
    done = server_command(lab, option, "")
    assert done.returncode == 2
    assert "the name of a file is missing" in done.stderr
    assert not (lab.folder / "state").exists()


def test_only_a_command_on_the_server_s_machine_can_ask_for_a_backup(lab):
    lab.start_server()
    with pytest.raises(Exception, match="only on the server's own machine"):
        lab.ask("Backup", path=str(lab.folder / "copy"))
    assert not (lab.folder / "copy").exists()


def test_jobs_are_taken_while_a_large_state_is_copied_and_the_copy_is_whole(lab):
    lab.start_server()
    fat = [["x" * 100_000] for _ in range(100)]
    for _ in range(10):
        lab.quick(lab.range_of("true", held=True, argvs=fat))
    taken, copied = [], threading.Event()

    def make() -> None:
        taken.append(backup(lab))
        copied.set()

    thread = threading.Thread(target=make)
    thread.start()
    more = 0
    while not copied.is_set() and thread.is_alive():
        held(lab)
        more += 1
    thread.join()
    assert more > 10
    with contextlib.closing(sqlite3.connect(lab.folder / "copy")) as reader:
        (there,) = reader.execute("SELECT sum(remaining) FROM ranges").fetchone()
    assert 1000 <= there <= 1000 + more
    assert f"{there} jobs not over" in taken[0]


@pytest.fixture
def small(tmp_path):
    """Mounts a file system of so many megabytes at a name below the lab's folder."""
    with contextlib.ExitStack() as mounted:
        yield lambda name, megabytes: mounted.enter_context(small_disk(tmp_path / name, megabytes))


def test_a_full_target_leaves_nothing_behind_and_the_server_unharmed(lab, small):
    disk = small("disk", 4)
    lab.start_server()
    lab.quick(lab.range_of("true", held=True, argvs=[["x" * 100_000] for _ in range(60)]))
    refused = server_command(lab, "--backup", str(disk / "copy"))
    assert refused.returncode == 1
    assert f"There is no room for the backup in {disk}" in refused.stderr
    assert names(disk) == set()
    held(lab)
    lab.stop_server()
    refused = server_command(lab, "--backup", str(disk / "copy"))
    assert f"There is no room for the backup in {disk}" in refused.stderr
    assert names(disk) == set()


def test_a_server_whose_disk_is_full_can_still_be_backed_up_elsewhere(lab, small):
    small("state", 40)
    lab.start_server()
    with pytest.raises(errors.UserError, match="disk full"):
        submit_without_end(lab)
    there = len(lab.rows())
    refused = server_command(lab, "--backup", "state/copy")
    assert refused.returncode == 1
    assert "There is no room for the backup" in refused.stderr
    assert "copy" not in names(lab.folder / "state")
    assert f"{there} jobs not over" in backup(lab)
    assert lab.kueue("list-jobs", "-q").returncode == 0


def test_a_backup_that_is_interrupted_leaves_nothing_behind(lab):
    lab.start_server()
    for _ in range(20):
        lab.quick(lab.range_of("true", held=True, argvs=[["x" * 100_000] for _ in range(100)]))
    away = lab.folder / "away"
    away.mkdir()
    process = lab.start(
        "kueue.server.main", "-c", str(lab.folder / "lab.toml"), "--backup", str(away / "copy"), log="b"
    )
    lab.until(lambda: names(away), "the copy is on its way")
    process.send_signal(signal.SIGKILL)
    process.wait()
    lab.until(lambda: not names(away) or names(away) == {"copy"}, "nothing unfinished is left")
    held(lab)
    lab.no_traceback()


def test_a_backup_ends_with_its_server_and_what_it_left_is_swept_up(lab):
    lab.start_server()
    for _ in range(10):
        lab.quick(lab.range_of("true", held=True, argvs=[["x" * 100_000] for _ in range(100)]))
    away = lab.folder / "away"
    away.mkdir()
    process = lab.start(
        "kueue.server.main", "-c", str(lab.folder / "lab.toml"), "--backup", str(away / "copy"), log="b"
    )
    lab.until(lambda: names(away), "the copy is on its way")
    lab.kill_server()
    if (away / "copy").exists():
        pytest.skip("the copy was faster than the killer")
    assert process.wait(20) == 1
    assert "The server ended before it had told that the backup is complete" in lab.log("b")
    assert names(away) == set()


def test_a_restored_queue_goes_on_without_reusing_a_number_or_killing_a_stranger(lab):
    lab.start_server(server_settings={"worker_timeout_seconds": 10})
    lab.start_worker("w1")
    ended = lab.run("-c", "1", "-r", "1", "true")["id"]
    marks = [f"{7000 + os.getpid() % 1000}.{number}" for number in range(3)]
    running = lab.quick(lab.range_of("sleep", marks[0]))[0]
    lab.until_state(running, "running")
    waiting = held(lab, 2)
    # Waits now, and is started between the backup and the crash.
    assert lab.kueue("node", "offline", "w1").returncode == 0
    later = lab.quick(lab.range_of("sleep", marks[1]))[0]
    before = set(lab.jobs())
    backup(lab)
    assert lab.kueue("node", "online", "w1").returncode == 0
    lab.until_state(later, "running")
    new = lab.quick(lab.range_of("sleep", marks[2]))[0]
    lab.until_state(new, "running")
    last = lab.run("-c", "1", "-r", "1", "true")["id"]
    offers = {
        one["offer"]
        for job in (running, new, last)
        for one in lab.ask("ShowJobs", ids=[[job, job]])["jobs"][0]["attempts"]
    }
    refused = server_command(lab, "--restore", "copy")
    assert refused.returncode == 1
    assert "A kueue server is running already" in refused.stderr
    lab.kill_server()
    done = server_command(lab, "--restore", "copy")
    assert done.returncode == 0, done.stderr
    assert "jobs not over" in done.stdout
    (aside,) = (lab.folder / "state" / "server").glob("queue.sqlite.before-*[0-9]")
    assert str(aside) in done.stdout
    assert f"kueue release {later}" in done.stdout
    lab.start_server()
    lab.until(lambda: lab.worker("w1").get("state") == "offline", "the worker is back, and offline as it was")
    assert lab.kueue("node", "online", "w1").returncode == 0
    assert set(lab.jobs()) == before
    assert lab.state(later) == "held"
    lab.until_state(running, "running")
    after = lab.quick(lab.range_of("true"))[0]
    assert after > last
    lab.end_of(after)
    (made,) = lab.ask("ShowJobs", ids=[[after, after]])["jobs"][0]["attempts"]
    assert made["offer"] > max(offers)
    # The worker's lease and all its reports have passed by now: what runs there is not known here, and still runs.
    lab.remains(lambda: [len(sleepers(mark)) for mark in marks] == [1, 1, 1], 3)
    assert lab.state(later) == "held"
    assert lab.state(ended) == "succeeded"
    assert lab.kueue("remove-job", "--kill", str(running)).returncode == 0
    assert not sleepers(marks[0])
    assert lives(sleepers(marks[2])[0])
    assert len(waiting) == 2
    lab.no_traceback()
