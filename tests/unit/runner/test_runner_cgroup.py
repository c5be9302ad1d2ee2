"""A runner with a cgroup of its own to divide: one for each attempt, which hides nobody, freezes, and goes at the end."""

import os
import shutil
import signal
import subprocess
import uuid
from pathlib import Path

import pytest
from runner_bench import QUEUE, is_alive, wait_until

from kueue.runner import cgroup
from kueue.runner.tree import Scanner, read_tag, status, tag_of

# It gives up its tag, session, parent and environment; only the cgroup still knows it.
RUNAWAY = "(ulimit -S -x unlimited; setsid env -i sh -c 'echo $$ > %s; exec sleep 7100' &)"


def shell(text):
    return ("bash", "-c", text)


@pytest.fixture
def ours():
    """Directory of a fresh cgroup."""
    here = cgroup.own_directory(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    if not here or not os.access(f"{here}/cgroup.procs", os.W_OK) or not os.access(here, os.W_OK):
        pytest.skip(f"no cgroup of the unified kind that we may divide (looked at {here or 'its mount'})")
    directory = f"{here}/kueue-test-{uuid.uuid4().hex[:8]}"
    os.mkdir(directory)
    yield directory
    cgroup.kill(directory)
    wait_until(lambda: cgroup.remove(directory), "the cgroup is empty")


@pytest.fixture
def divided(bench, ours):
    """An attachment to a runner in that cgroup, with a lease of an hour."""
    desk = bench.start_runner(ours=ours)
    desk.lease()
    return desk


def kill(*pids):
    """Stopped first, so that none sees another die."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)
    for pid in pids:
        wait_until(lambda pid=pid: not is_alive(pid))


def number_in(path):
    return wait_until(
        lambda: path.exists() and path.read_text().strip() and int(path.read_text()), f"{path} is written"
    )


def test_the_own_directory_is_found_in_every_layout():
    whole = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
    assert cgroup.own_directory(whole, "0::/user.slice/a.scope\n") == "/sys/fs/cgroup/user.slice/a.scope"
    both = (
        "41 30 0:36 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n"
        "42 30 0:37 / /sys/fs/cgroup/unified rw shared:11 master:2 - cgroup2 cgroup2 rw\n"
    )
    assert cgroup.own_directory(both, "1:name=systemd:/a\n0::/a\n") == "/sys/fs/cgroup/unified/a"
    assert cgroup.own_directory(both, "0::/\n") == "/sys/fs/cgroup/unified"
    assert cgroup.own_directory(both, "1:name=systemd:/a\n") == ""
    part = "30 23 0:26 /jail /mnt/my\\040groups rw - cgroup2 cgroup2 rw\n"
    assert cgroup.own_directory(part, "0::/jail/a\n") == "/mnt/my groups/a"
    assert cgroup.own_directory(part, "0::/jailer/a\n") == ""
    assert cgroup.own_directory("", "0::/a\n") == ""


def test_what_is_not_there_counts_as_empty(tmp_path):
    gone = str(tmp_path / "gone")
    assert cgroup.members(gone) == []
    assert not cgroup.is_frozen(gone)
    assert not cgroup.freeze(gone)
    assert not cgroup.kill(gone)
    assert cgroup.remove(gone)


def test_each_attempt_has_a_cgroup_that_goes_with_it(divided, bench, ours):
    divided.start(1, "sh", "-c", "sleep 7101 & touch ready; wait")
    divided.start(2, "cat", "/proc/self/cgroup")
    assert divided.end(2)["outcome"] == {"type": "exited", "code": 0}
    assert "/attempt-2" in bench.text(2)
    wait_until((bench.work / "ready").exists)
    assert sorted(cgroup.members(f"{ours}/attempt-1")) == sorted(bench.tree(1))
    assert {bench.keeper(), bench.spawner()} <= set(cgroup.members(f"{ours}/runner"))
    divided.send("StopOrder", offer=1, kill=True)
    assert divided.end(1)["outcome"]["type"] == "canceled"

    def removed():
        divided.drain()
        return not list(Path(ours).glob("attempt-*"))

    wait_until(removed)


def test_who_gave_up_its_tag_is_stopped_with_the_rest(divided, bench):
    divided.start(1, *shell(RUNAWAY % "pid" + "; sleep 7102"))
    runaway = number_in(bench.work / "pid")
    assert read_tag(runaway) is None
    assert status(runaway).session == runaway
    divided.send("StopOrder", offer=1, kill=True)
    assert divided.end(1)["outcome"]["type"] == "canceled"
    assert not is_alive(runaway)


def test_who_gave_up_its_tag_counts_among_what_is_left_over(divided, bench):
    end = divided.run(1, *shell(RUNAWAY % "pid" + "; until [ -s pid ]; do sleep 0.01; done; exit 3"))
    assert end["outcome"] == {"type": "exited", "code": 3}
    assert end["leftovers_stopped"] == 1
    assert not is_alive(number_in(bench.work / "pid"))


def test_a_fork_bomb_is_killed(divided, bench, ours):
    divided.start(1, *shell("b() { sleep 0.02; b & b & wait; }; touch ready; b"))
    wait_until(lambda: len(cgroup.members(f"{ours}/attempt-1")) > 8)
    divided.send("StopOrder", offer=1, kill=True)
    assert divided.end(1)["outcome"]["type"] == "canceled"
    assert bench.tree(1) == []
    assert cgroup.members(f"{ours}/attempt-1") == []


def test_a_lapse_freezes_and_the_next_lease_thaws(divided, bench, ours):
    divided.start(
        1,
        *shell(
            "trap 'echo continued' CONT; "
            + RUNAWAY % "pid"
            + "; touch ready; until [ -e go ]; do sleep 0.05; done; exit 7"
        ),
    )
    wait_until((bench.work / "ready").exists)
    runaway = number_in(bench.work / "pid")
    divided.lease(0.1)
    divided.expect("Changed", 1, state="paused")
    divided.expect("PauseDone")
    assert cgroup.is_frozen(f"{ours}/attempt-1")
    assert runaway in cgroup.members(f"{ours}/attempt-1")
    assert status(runaway).state not in "Tt"  # it is not stopped: nobody who waits for it is told of anything
    (bench.work / "go").touch()
    divided.lease()
    divided.expect("Changed", 1, state="running")
    end = divided.end(1)
    assert end["outcome"] == {"type": "exited", "code": 7}
    assert bench.text(1) == ""


def test_what_left_the_cgroup_is_stopped_when_the_rest_is_frozen(divided, bench, ours):
    os.mkdir(f"{ours}/elsewhere")
    counts = "i=0; while :; do i=$((i+1)); echo $i > %s; sleep 0.01; done"
    divided.start(1, *shell(f"(echo 0 > {ours}/elsewhere/cgroup.procs; {counts % 'outside'}) & {counts % 'inside'}"))
    for name in ("outside", "inside"):
        number_in(bench.work / name)
    (outsider, *_) = wait_until(lambda: cgroup.members(f"{ours}/elsewhere"))
    divided.lease(0.1)
    divided.expect("PauseDone")
    assert status(outsider).state == "T"
    before = {name: (bench.work / name).read_text() for name in ("outside", "inside")}
    divided.drain()
    assert {name: (bench.work / name).read_text() for name in before} == before
    divided.lease()
    for name, text in before.items():
        wait_until(lambda name=name, text=text: (bench.work / name).read_text() not in (text, ""), f"{name} goes on")
    divided.send("StopOrder", offer=1, kill=True)
    divided.end(1)
    assert not is_alive(outsider)


def test_what_is_frozen_is_killed_without_running_again(divided, bench, ours):
    divided.start(1, *shell("trap 'echo told' TERM; touch ready; while :; do sleep 0.05; done"))
    wait_until((bench.work / "ready").exists)
    divided.lease(0.1)
    divided.expect("PauseDone")
    divided.send("StopOrder", offer=1)
    assert divided.end(1)["outcome"]["type"] == "canceled"
    assert bench.text(1) == ""


def test_a_keeper_killed_while_an_attempt_is_frozen_is_followed_by_one_that_thaws_it(divided, bench, ours):
    divided.start(1, *shell("touch ready; until [ -e go ]; do sleep 0.05; done; exit 9"))
    wait_until((bench.work / "ready").exists)
    divided.lease(0.1)
    divided.expect("PauseDone")
    kill(bench.keeper())
    again = bench.attach()
    assert [state["state"] for state in again.attached["attempts"]] == ["paused"]
    assert cgroup.is_frozen(f"{ours}/attempt-1")
    (bench.work / "go").touch()
    again.lease()
    assert again.end(1)["outcome"] == {"type": "exited", "code": 9}


def test_the_next_runner_kills_also_those_that_only_the_cgroup_of_a_dead_one_knows(divided, bench, ours):
    divided.start(1, *shell(RUNAWAY % "pid" + "; sleep 7103"))
    runaway = number_in(bench.work / "pid")
    kill(bench.spawner(), bench.keeper())
    other = bench.start_runner("two")
    if other.attached["attempts"][0]["state"] != "gone":
        other.expect("Gone", 1)
    wait_until(lambda: not is_alive(runaway))
    wait_until(lambda: (other.drain(), not Path(f"{ours}/attempt-1").exists())[1])


def test_what_may_stay_behind_keeps_its_cgroup_until_it_ends(divided, bench, ours):
    end = divided.run(1, *shell("sleep 7104 & echo $!"), keep_background=True)
    assert end["outcome"] == {"type": "exited", "code": 0}
    stays = int(bench.text(1))
    divided.drain()
    assert cgroup.members(f"{ours}/attempt-1") == [stays]
    divided.send("ForgetAttempts", offers=[1])
    assert divided.run(1, "cat", "/proc/self/cgroup", queue_id="another")["outcome"]["code"] == 0
    assert bench.text(1).endswith("/attempt-1.2\n")
    os.kill(stays, signal.SIGKILL)
    wait_until(lambda: (divided.drain(), not Path(f"{ours}/attempt-1").exists())[1])


def test_where_no_cgroup_can_be_made_the_tag_does_the_work_alone(divided, bench, ours):
    Path(f"{ours}/cgroup.max.descendants").write_text("1")
    divided.start(1, *shell("sleep 7105 & touch ready; wait; exit 4"))
    wait_until((bench.work / "ready").exists)
    assert not Path(f"{ours}/attempt-1").exists()
    divided.lease(0.1)
    divided.expect("Changed", 1, state="paused")
    divided.expect("PauseDone")
    divided.lease()
    divided.expect("Changed", 1, state="running")
    divided.send("StopOrder", offer=1)
    assert divided.end(1)["outcome"]["type"] == "canceled"
    assert bench.tree(1) == []


def test_jobs_are_more_likely_to_be_taken_by_the_kernel_than_their_runner(divided, bench):
    assert divided.run(1, "cat", "/proc/self/oom_score_adj")["outcome"]["code"] == 0
    guards = [int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in (bench.keeper(), bench.spawner())]
    assert int(bench.text(1)) > max(guards)


def test_what_shows_no_frozen_state_is_stopped_by_signals(divided, bench, tmp_path):
    divided.start(1, *shell("touch ready; while :; do :; done"))
    wait_until((bench.work / "ready").exists)
    wait_until(lambda: len(bench.tree(1)) == 1)  # `touch` has made the file, and is gone
    (pid,) = bench.tree(1)
    stuck = tmp_path / "stuck"  # what the kernel shows while one of the processes waits for a dead file server
    stuck.mkdir()
    for name, text in (("events", "populated 1\nfrozen 0\n"), ("procs", f"{pid}\n"), ("freeze", "0\n")):
        (stuck / f"cgroup.{name}").write_text(text)
    scanner = Scanner()
    tag = tag_of(QUEUE, bench.identity, 1)
    scanner.cgroups[tag] = str(stuck)
    wait_until(lambda: scanner.pause_tree(tag).running == 0)
    assert status(pid).state == "T"
    scanner.continue_tree(tag)
    assert status(pid).state != "T"
    assert (stuck / "cgroup.freeze").read_text().startswith("0")


@pytest.fixture
def dead_disk(tmp_path):
    """A directory in which every write waits until it is told to answer: (the directory, what tells it)."""
    image, place = tmp_path / "image", tmp_path / "disk"
    place.mkdir()
    if not shutil.which("fsfreeze") or not shutil.which("mkfs.ext4"):
        pytest.skip("no fsfreeze or no mkfs.ext4")
    with image.open("wb") as file:
        file.truncate(32 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    mounted = subprocess.run(["mount", "-o", "loop", image, place], check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted from a file: {mounted.stderr.strip()}")

    def answer():
        subprocess.run(["fsfreeze", "-u", place], check=False, capture_output=True)

    try:
        subprocess.run(["fsfreeze", "-f", place], check=True)
        yield place, answer
    finally:
        answer()
        subprocess.run(["umount", "-l", place], check=True)


def test_an_attempt_of_which_one_process_waits_for_a_dead_disk_is_paused_by_signals(divided, bench, ours, dead_disk):
    disk, answer = dead_disk
    writer = f"(echo x > {disk}/file; echo > wrote)"
    divided.start(1, *shell(f"{writer} & touch ready; while :; do echo x >> counts; done"))
    wait_until(lambda: "D" in [now.state for pid in bench.tree(1) if (now := status(pid))])
    wait_until((bench.work / "counts").exists)
    divided.lease(0.1)
    divided.expect("Changed", 1, state="paused")
    divided.expect("PauseDone")
    assert not cgroup.is_frozen(f"{ours}/attempt-1")
    before = (bench.work / "counts").stat().st_size
    answer()
    wait_until(lambda: {status(pid).state for pid in bench.tree(1)} == {"T"}, "it took the signal before all else")
    assert not (bench.work / "wrote").exists()
    assert (bench.work / "counts").stat().st_size == before
    divided.lease()
    wait_until((bench.work / "wrote").exists)
    divided.send("StopOrder", offer=1, kill=True)
    assert divided.end(1)["outcome"]["type"] == "canceled"
