"""Which state files are taken, which are refused, and that a refused one stays as it is."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading

import pytest

from kueue.errors import Bug, StorageError
from kueue.storage import schema
from kueue.storage.opening import Host
from kueue.storage.sqlite import SqliteStore
from tests.support.storage_rows import batch, ending, job_range, submitted

CRASHED = """
import os, sys
from kueue.storage.sqlite import SqliteStore
from tests.support.storage_rows import batch, ending, job_range, submitted
store = SqliteStore(sys.argv[1], ballast_bytes=4096, is_network=bool(sys.argv[2:]))
store.commit(batch(submitted(1, job_range(400, argvs=tuple((str(n) * 30,) for n in range(400)))), next_job=401))
store.commit(ending(*range(1, 300)))
os._exit(0)
"""


def opened(path, **how) -> SqliteStore:
    return SqliteStore(path, ballast_bytes=4096, **how)


def crashed(path, *how) -> None:
    """A state file with content, left behind by a server that had no chance to close it."""
    subprocess.run([sys.executable, "-c", CRASHED, str(path), *how], check=True, timeout=60)


def files(directory) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in directory.iterdir() if not entry.name.endswith("-shm")}


def refused(path, **how) -> str:
    """The sentence and hint of the refusal; holds that nothing was touched."""
    before = files(path.parent)
    with pytest.raises(StorageError) as caught:
        opened(path, **how)
    assert files(path.parent) == before
    return f"{caught.value} | {caught.value.hint}"


def test_the_file_is_private_and_named_as_ours(tmp_path):
    path = tmp_path / "made" / "state.sqlite"
    opened(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    header = path.read_bytes()[:100]
    assert header[68:72] == b"kueu"
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["state.sqlite", "state.sqlite.ballast"]


def test_a_second_opener_in_the_same_process_is_refused_and_harms_nobody(tmp_path):
    path = tmp_path / "state.sqlite"
    first = opened(path)
    first.commit(batch(submitted(1)))
    with pytest.raises(StorageError, match="Another server uses"):
        opened(path)
    script = "import sys; from kueue.storage.sqlite import SqliteStore; SqliteStore(sys.argv[1])"
    other = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, check=False, text=True, timeout=60
    )
    assert "Another server uses" in other.stderr
    first.commit(batch(submitted(2)))
    first.close()
    store = opened(path)
    assert list(store.replay()) == [submitted(1), submitted(2)]
    store.close()


@pytest.mark.parametrize("how", [(), ("network",)])
def test_a_second_opener_in_another_process_is_refused(tmp_path, how):
    path = tmp_path / "state.sqlite"
    script = (
        "import sys; from kueue.storage.sqlite import SqliteStore\n"
        "store = SqliteStore(sys.argv[1], is_network=bool(sys.argv[2:])); print('open', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path), *how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout.readline() == "open\n"
        assert "Another server uses" in refused(path, is_network=bool(how))
        first.stdin.close()
    opened(path).close()


def test_a_file_of_a_newer_kueue_is_refused_and_untouched(tmp_path):
    path = tmp_path / "state.sqlite"
    crashed(path)
    store = opened(path)
    store.close()
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {schema.FORMAT + 1}")
    connection.close()
    sentence = refused(path)
    assert "newer kueue" in sentence
    assert str(path) in sentence


def test_a_foreign_database_and_a_file_that_is_none_are_refused(tmp_path):
    path = tmp_path / "state.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE bookmarks (url)")
    connection.close()
    assert "not the state of a kueue server" in refused(path)
    path.write_bytes(b"a letter to the editor\n" * 100)
    assert "damaged" in refused(path)
    path.write_bytes(b"")
    assert "--recover" in refused(path)


@pytest.fixture(scope="module", params=["local", "network"])
def crashed_files(request, tmp_path_factory):
    """A directory with a state file and what a crash left beside it; whether it is of a network file system."""
    path = tmp_path_factory.mktemp("crashed") / "state.sqlite"
    is_network = request.param == "network"
    crashed(path, *(["network"] if is_network else []))
    if not is_network:
        # The crash left everything in the log: put that into the file, and crash again with a little in a new log.
        opened(path).close()
        crash_more = CRASHED.split("store.commit", maxsplit=1)[0] + "store.probe()\nos._exit(0)"
        subprocess.run([sys.executable, "-c", crash_more, str(path)], check=True, timeout=60)
        assert path.with_name("state.sqlite-wal").stat().st_size
    return path.parent, is_network


@pytest.mark.parametrize("page", range(2, 40, 3))
def test_a_damaged_file_is_refused_and_left_with_its_log_byte_for_byte(tmp_path, crashed_files, page):
    directory, is_network = crashed_files
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "state.sqlite"
    with path.open("r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(os.urandom(4096))
    sentence = refused(path, is_network=is_network)
    assert "damaged" in sentence
    assert str(path) in sentence


def test_what_a_crash_left_in_the_log_is_there_after_the_next_start(tmp_path):
    path = tmp_path / "state.sqlite"
    crashed(path)
    assert path.with_name("state.sqlite-wal").stat().st_size > 4096
    store = opened(path)
    assert store.aggregates().next_job == 0  # the second batch of the crashed server said so
    assert len(store.finished()) == 299
    store.close()
    assert not path.with_name("state.sqlite-wal").exists()
    assert not path.with_name("state.sqlite-shm").exists()


@pytest.mark.parametrize(
    ("left", "how"), [("-wal", ()), ("-journal", ("network",)), (".ballast", ()), (".ballast", ("network",))]
)
def test_a_state_that_is_missing_beside_what_belongs_to_it_is_not_made_anew(tmp_path, left, how):
    path = tmp_path / "state.sqlite"
    crashed(path, *how)
    path.rename(tmp_path / "elsewhere")
    for entry in tmp_path.iterdir():
        if entry.name not in {"elsewhere", f"state.sqlite{left}"}:
            entry.unlink()
    sentence = refused(path, is_network=bool(how))
    assert "is missing, though there was one" in sentence
    assert f"state.sqlite{left} |" in sentence
    assert "--restore" in sentence
    path.with_name(f"state.sqlite{left}").unlink()
    opened(path).close()


FIRST_STARTS = """
import os, sys, threading
from pathlib import Path
from kueue.storage.sqlite import SqliteStore
WATCHED = {"open", "sqlite3.connect", "os.link", "os.mkdir", "os.remove", "os.rename", "os.truncate"}
def begin(path, number):
    met = 0
    def hook(event, _):
        nonlocal met
        if event in WATCHED:
            met += 1
            if met == number:
                os._exit(7)
    sys.addaudithook(hook)
    SqliteStore(path, ballast_bytes=4096)
    os._exit(0)
for number in range(1, 1000):
    path = Path(sys.argv[1], str(number), "state.sqlite")
    child = os.fork()
    if not child:
        begin(path, number)
    _, status = os.waitpid(child, 0)
    SqliteStore(path, ballast_bytes=4096).close()
    if not status:
        print(number)
        break
"""


def test_a_first_start_that_is_killed_at_any_step_can_be_made_again(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", FIRST_STARTS, str(tmp_path)], check=True, timeout=120, capture_output=True, text=True
    )
    assert int(ended.stdout) > 8


def test_on_a_network_file_system_there_is_no_write_ahead_log(tmp_path):
    path = tmp_path / "state.sqlite"
    crashed(path)
    store = opened(path, is_network=True)
    store.commit(ending(300))
    assert {entry.name for entry in tmp_path.iterdir()} <= {
        "state.sqlite",
        "state.sqlite.ballast",
        "state.sqlite-journal",
    }
    assert len(store.finished()) == 300
    store.close()
    assert path.read_bytes()[18:20] == b"\1\1"
    store = opened(path)
    assert len(store.finished()) == 300
    store.close()
    assert path.read_bytes()[18:20] == b"\2\2"


def test_a_file_of_another_host_asks_to_be_taken_over(tmp_path):
    path = tmp_path / "state.sqlite"
    opened(path, host=Host("alpha", "a" * 32)).close()
    sentence = refused(path, host=Host("beta", "b" * 32))
    assert "alpha" in sentence
    assert "--take-over" in sentence
    opened(path, host=Host("beta", "b" * 32), take_over=True).close()
    opened(path, host=Host("beta", "b" * 32)).close()
    assert "beta" in refused(path, host=Host("alpha", "a" * 32))


def test_a_host_is_known_by_its_machine_id_or_else_by_its_name(tmp_path):
    path = tmp_path / "state.sqlite"
    opened(path, host=Host("alpha", "a" * 32)).close()
    opened(path, host=Host("renamed", "a" * 32)).close()
    opened(path, host=Host("renamed", "")).close()
    assert "renamed" in refused(path, host=Host("alpha", ""))


def older(path) -> None:
    """A made-up file of the format before this one: finished jobs had no kind."""
    crashed(path)
    opened(path).close()
    connection = sqlite3.connect(path)
    connection.executescript(
        "DROP INDEX finished_by_kind; DROP INDEX finished_by_end; ALTER TABLE finished DROP COLUMN kind;"
        f"PRAGMA user_version = {schema.FORMAT - 1};"
    )
    connection.close()


def add_kinds(connection: sqlite3.Connection) -> None:
    connection.execute("ALTER TABLE finished ADD COLUMN kind TEXT NOT NULL DEFAULT 'succeeded'")
    connection.execute("CREATE INDEX finished_by_kind ON finished (kind, id)")
    connection.execute("CREATE INDEX finished_by_end ON finished (kind, ended)")


def test_an_older_file_is_migrated_after_a_backup(tmp_path):
    path = tmp_path / "state.sqlite"
    older(path)
    store = opened(path, steps={schema.FORMAT - 1: add_kinds})
    assert len(store.finished(kinds=["succeeded"])) == 299
    store.commit(ending(300))
    store.close()
    opened(path).close()
    backup = sqlite3.connect(tmp_path / f"state.sqlite.format-{schema.FORMAT - 1}")
    assert backup.execute("PRAGMA user_version").fetchone() == (schema.FORMAT - 1,)
    assert backup.execute("SELECT count(*) FROM finished").fetchone() == (299,)
    assert "kind" not in [row[1] for row in backup.execute("PRAGMA table_info(finished)")]
    backup.close()


def test_a_migration_that_fails_leaves_the_older_file_as_it_was(tmp_path):
    path = tmp_path / "state.sqlite"
    older(path)

    def fail(connection: sqlite3.Connection) -> None:
        add_kinds(connection)
        connection.execute("SELECT * FROM no_such_table")

    with pytest.raises(StorageError):
        opened(path, steps={schema.FORMAT - 1: fail})
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (schema.FORMAT - 1,)
    assert "kind" not in [row[1] for row in connection.execute("PRAGMA table_info(finished)")]
    connection.close()


def test_a_file_too_old_to_be_migrated_is_refused(tmp_path):
    path = tmp_path / "state.sqlite"
    older(path)
    assert "too old" in refused(path, steps={})


def test_two_first_starts_make_one_queue(tmp_path):
    path = tmp_path / "state.sqlite"
    script = (
        "import sys; from kueue.storage.sqlite import SqliteStore\n"
        "sys.stdin.read(1)\nstore = SqliteStore(sys.argv[1])\nprint(store.queue_id, flush=True)\nsys.stdin.read()"
    )
    both = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        for server in both:
            server.stdin.write("x")
            server.stdin.flush()
        gate = threading.Barrier(3)
        lines: list[str] = []

        def read(server) -> None:
            lines.append(server.stdout.readline())
            gate.wait(60)

        readers = [threading.Thread(target=read, args=(server,)) for server in both]
        for reader in readers:
            reader.start()
        gate.wait(60)
    finally:
        ends = [server.communicate(timeout=60) for server in both]
    # Under load both may give up on the other's short look at the file; never may both be taken.
    assert sum(bool(line) for line in lines) <= 1
    assert all("Another server uses" in err for _, err in ends if err)
    opened(path).close()


def test_a_damaged_name_is_told_as_damage(tmp_path):
    path = tmp_path / "state.sqlite"
    opened(path).close()
    content = path.read_bytes()
    path.write_bytes(content.replace(b"live_by_joblive", b"\xffive_by_joblive", 1))
    assert path.read_bytes() != content
    sentence = refused(path)
    assert "is damaged" in sentence
    assert "--recover" in sentence


def test_text_that_is_none_is_told_as_damage(tmp_path):
    path = tmp_path / "state.sqlite"
    with contextlib.closing(opened(path)) as store:
        store.commit(batch(submitted(1), next_job=2))
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("UPDATE ranges SET principal = CAST(x'ff41' AS TEXT)")
    connection.close()
    with contextlib.closing(opened(path)) as store, pytest.raises(StorageError, match="is damaged"):
        list(store.replay())


@pytest.mark.parametrize("body", ["7", "'{}'"])
def test_sums_that_are_no_sums_are_told_as_damage(tmp_path, body):
    path = tmp_path / "state.sqlite"
    opened(path).close()
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(f"UPDATE aggregates SET body = {body}")
    connection.close()
    with contextlib.closing(opened(path)) as store, pytest.raises(StorageError, match="is damaged") as caught:
        store.aggregates()
    assert "--recover" in caught.value.hint


def test_a_body_of_another_type_is_told_as_damage(tmp_path):
    path = tmp_path / "state.sqlite"
    with contextlib.closing(opened(path)) as store:
        store.commit(batch(submitted(1), next_job=2))
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("UPDATE ranges SET body = 7")
    connection.close()
    with contextlib.closing(opened(path)) as store, pytest.raises(StorageError, match="is damaged"):
        list(store.replay())


class Last(sqlite3.Connection):
    """SQLite without memory for its last act."""

    def execute(self, statement, *values):
        if "wal_checkpoint" in statement:
            raise MemoryError
        return super().execute(statement, *values)


def test_a_store_that_fails_while_it_is_closed_is_closed_all_the_same(tmp_path, monkeypatch):
    path, connect = tmp_path / "state.sqlite", sqlite3.connect
    with monkeypatch.context() as patched:
        patched.setattr(sqlite3, "connect", lambda *how, **more: connect(*how, factory=Last, **more))
        store = opened(path)
    store.commit(batch(submitted(1), next_job=2))
    with pytest.raises(MemoryError):
        store.close()
    with contextlib.closing(opened(path)) as again:
        assert list(again.replay()) == [submitted(1)]


def test_calls_may_come_from_changing_threads(tmp_path):
    store = opened(tmp_path / "state.sqlite")
    for first in (1, 2):
        thread = threading.Thread(target=store.commit, args=(batch(submitted(first, job_range())),))
        thread.start()
        thread.join()
    assert list(store.replay()) == [submitted(1), submitted(2)]
    store.close()


def test_a_file_that_was_removed_or_replaced_takes_nothing_more(tmp_path):
    path = tmp_path / "queue.sqlite"
    with contextlib.closing(opened(path)) as store:
        store.commit(batch(submitted(1, job_range(1)), next_job=2))
        shutil.copy2(path, tmp_path / "copy")
        (tmp_path / "copy").replace(path)
        with pytest.raises(StorageError, match="was removed or replaced"):
            store.commit(batch(submitted(2, job_range(1)), next_job=3))
        path.unlink()
        with pytest.raises(StorageError, match="was removed or replaced"):
            store.commit(batch(submitted(2, job_range(1)), next_job=3))


def test_a_value_without_a_stored_form_is_our_fault_and_not_the_disks(tmp_path):
    with contextlib.closing(opened(tmp_path / "queue.sqlite")) as store:
        with pytest.raises(Bug, match="cannot be written"):
            store.commit(batch(submitted(10**25, job_range(1)), next_job=10**25 + 1))
        store.commit(batch(submitted(1, job_range(1)), next_job=2))
        assert len(list(store.replay())) == 1
