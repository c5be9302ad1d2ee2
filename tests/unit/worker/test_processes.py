"""Tagged trees of real processes: what they use, stopping and letting go."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kueue.worker.processes import Trees, read_stat, read_tag
from tests.support.nobody import kept_from

TAGGED = """
import os, resource, sys
os.setsid()
resource.setrlimit(10, (int(sys.argv[1]), resource.RLIM_INFINITY))  # RLIMIT_LOCKS
os.execvp(sys.argv[2], sys.argv[2:])
"""


def members(tag):
    """Living processes with this tag, as the kernel shows them."""
    found = {
        pid: read_stat(pid) for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if read_tag(pid) == tag
    }
    return {pid: stat for pid, stat in found.items() if stat is not None and stat.state not in "ZX"}


def until(holds, seconds=20):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_sleep(pid):
    return b"(sleep)" in Path(f"/proc/{pid}/stat").read_bytes()


def waits_to_stop(pid, stat):
    """A shell that made a child by vfork(2) waits in the kernel until that one, stopped, has executed its program."""
    if stat.state != "D":
        return False
    try:
        pending = re.search(rb"ShdPnd:\s*(\w+)", Path(f"/proc/{pid}/status").read_bytes())
    except OSError:
        return False
    return bool(int(pending[1], 16) >> (signal.SIGSTOP - 1) & 1)


@pytest.fixture
def tag():
    """Of this test alone."""
    return (secrets.randbits(31) << 32) | 5


@pytest.fixture
def trees(tmp_path, tag):
    (tmp_path / "spool" / "5").mkdir(parents=True)
    (tmp_path / "spool" / "5" / "start.json").write_text(json.dumps({"tag": tag}))
    return Trees(str(tmp_path / "spool"))


@pytest.fixture
def started(tag):
    processes = []

    def start(*argv, tag=tag):
        process = subprocess.Popen([sys.executable, "-c", TAGGED, str(tag), *argv], stdout=subprocess.PIPE)
        processes.append(process)
        return process

    yield start
    while left := members(tag):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_tree_is_found_by_its_tag_whatever_it_did_to_session_and_environment(trees, started, tag):
    started("sh", "-c", "setsid env -i sleep 60 & sleep 61; true")
    until(lambda: trees.use([5])[5].processes == 3)
    until(lambda: len({stat.session for stat in members(tag).values()}) == 2)
    assert trees.stop([5]) >= 3  # one that is slow to stop is sent it again
    assert {stat.state for stat in members(tag).values()} == {"T"}


def test_the_use_of_a_tree_counts_time_and_memory(trees, started):
    burn = "import sys; x = bytearray(60 << 20); print(flush=True)\nwhile True: pass"
    process = started(sys.executable, "-c", burn)
    process.stdout.readline()
    assert trees.use([5])[5].ram_mb >= 60
    until(lambda: trees.use([5])[5].cpu_seconds > 0.3)


def test_a_stopped_tree_stays_stopped_until_it_is_let_go(trees, started):
    process = started("sleep", "60")
    until(lambda: trees.use([5])[5].processes == 1 and is_sleep(process.pid))
    assert trees.stop([5]) >= 1  # one that is slow to stop is signalled again
    assert read_stat(process.pid).state == "T"
    assert trees.stop([5]) == 0
    assert trees.let_go([5]) == 1
    until(lambda: read_stat(process.pid).state == "S")


def test_a_tree_that_forks_is_stopped_whole(trees, started, tag):
    started("sh", "-c", "while true; do sleep 0.01 & sleep 0.01; done")
    until(lambda: trees.use([5])[5].processes >= 2)

    def all_stopped():
        trees.stop([5])
        return all(stat.state == "T" or waits_to_stop(pid, stat) for pid, stat in members(tag).items())

    until(all_stopped)


def test_processes_of_others_are_never_touched(trees, started, tag):
    stranger = started("sleep", "60", tag=tag + 1)
    until(lambda: read_tag(stranger.pid) == tag + 1 and is_sleep(stranger.pid))
    assert trees.stop([5]) == 0
    assert read_stat(stranger.pid).state == "S"
    assert read_tag(os.getpid()) in (None, read_tag(os.getppid()))


def test_runners_that_cannot_be_looked_at_end_nobody_and_their_processes_stay_untouched(tmp_path, trees, started, tag):
    runners = tmp_path / "runners"
    (runners / "one").mkdir(parents=True)
    spawner = started("sleep", "60")  # as if it carried the tag of the child that it makes
    until(lambda: read_tag(spawner.pid) == tag and is_sleep(spawner.pid))
    pair = (spawner.pid, read_stat(spawner.pid).start)
    (runners / "one" / "info.json").write_text(json.dumps({"keeper": pair, "spawners": []}))
    assert trees.use([5])[5].processes == 0
    for folder in (runners / "one", runners):
        with kept_from(folder):
            assert trees.use([5])[5].processes == 0


def test_an_attempt_without_a_record_has_no_processes(trees):
    assert trees.use([77]) == {}
    assert trees.use([]) == {}
    assert trees.stop([77]) == 0


def test_the_first_process_is_not_parsed_wrong_because_of_its_name(tmp_path, started):
    odd = Path(tmp_path) / "a) R (b"
    odd.symlink_to("/bin/sleep")
    process = started(str(odd), "60")
    until(lambda: b"a) R (b" in Path(f"/proc/{process.pid}/stat").read_bytes())
    until(lambda: read_stat(process.pid).state == "S")  # just after the exec it still runs


UNMARKED = """
import os, resource, subprocess, time
resource.setrlimit(10, (7, resource.RLIM_INFINITY))
subprocess.Popen(["sh", "-c", "setsid sleep 62 & sleep 63"])
print(flush=True)
time.sleep(64)
"""


@pytest.fixture
def unmarked(tmp_path, started):
    """A process that took its own tag away, as the spawner of a runner noted it."""
    process = started(sys.executable, "-c", UNMARKED)
    process.stdout.readline()
    until(lambda: len(descendants(process.pid)) == 3)
    place = tmp_path / "runners" / "one"
    place.mkdir(parents=True)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    start = read_stat(process.pid).start
    (place / "mains-9").write_text(f"{boot}4 1 1\n5 {process.pid} {start}\n")
    (tmp_path / "spool" / "5").mkdir(parents=True)
    yield process
    kin = descendants(process.pid)
    for pid in [process.pid, *kin]:
        os.kill(pid, signal.SIGKILL)
    process.wait()


def descendants(pid):
    found = []
    for name in os.listdir("/proc"):
        stat = read_stat(int(name)) if name.isdecimal() else None
        if stat is not None and stat.parent == pid:
            found += [int(name), *descendants(int(name))]
    return found


def test_who_took_its_tag_away_is_found_by_the_main_process_and_stopped_with_all_it_started(tmp_path, unmarked, tag):
    (tmp_path / "spool" / "5" / "start.json").write_text(json.dumps({"tag": tag, "runner": "one"}))
    trees = Trees(str(tmp_path / "spool"))
    until(lambda: trees.use([5])[5].processes == 4)
    assert trees.stop([5]) >= 4
    assert {read_stat(pid).state for pid in [unmarked.pid, *descendants(unmarked.pid)]} == {"T"}
    assert trees.let_go([5]) == 4


def test_another_process_in_the_number_of_a_main_process_is_never_touched(tmp_path, unmarked, tag):
    start = read_stat(unmarked.pid).start
    record = {"tag": tag, "runner": "two", "main": [unmarked.pid, start - 1]}
    (tmp_path / "spool" / "5" / "start.json").write_text(json.dumps(record))
    trees = Trees(str(tmp_path / "spool"))
    assert trees.stop([5]) == 0
    assert read_stat(unmarked.pid).state != "T"


def test_a_spawner_is_spared_though_it_carries_the_tag_of_the_child_it_makes(tmp_path, trees, started):
    spawner = started("sleep", "60")
    until(lambda: trees.use([5])[5].processes == 1 and is_sleep(spawner.pid))
    info = {"keeper": [1, 1], "spawners": [[spawner.pid, read_stat(spawner.pid).start]]}
    place = tmp_path / "runners" / "one"
    place.mkdir(parents=True)
    (place / "info.json").write_text(json.dumps(info))
    assert trees.stop([5]) == 0
    assert trees.use([5])[5].processes == 0
