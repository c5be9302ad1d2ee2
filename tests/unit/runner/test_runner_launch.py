"""The short way of starting a program gives a job the same world as the long one, and leaves what fails to it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from runner_bench import wait_until

from tests.support.file_server import dead_file_server

WORLD = """
import json, os, resource, sys
# Ignored by this Python itself (SIGPIPE, SIGXFSZ), and by posix_spawn of the C library: two signals of its own threads.
ELSE = 1 << 12 | 1 << 24 | 1 << 31 | 1 << 32
status = open("/proc/self/status").read()
def mask(name):
    return int(status.split(name + ":")[1].split()[0], 16)
world = {
    "argv": sys.argv[1:],
    "cwd": os.getcwd(),
    "environ": dict(os.environ),
    "descriptors": sorted(os.listdir("/proc/self/fd"))[:4],
    "targets": [os.readlink(f"/proc/self/fd/{n}") for n in range(3)],
    "flags": [open(f"/proc/self/fdinfo/{n}").read().split("flags:")[1].split()[0] for n in range(3)],
    "blocked": mask("SigBlk"), "ignored": mask("SigIgn") & ~ELSE,
    "leads": os.getsid(0) == os.getpid() == os.getpgid(0),
    "umask": os.umask(0),
    "oom": open("/proc/self/oom_score_adj").read(),
    "nice": os.nice(0),
    "tagged": resource.getrlimit(10)[0] & 0xffffffff,
    "parent": open(f"/proc/{os.getppid()}/comm").read(),
}
print(json.dumps(world))
"""


def test_both_ways_give_a_job_the_same_world(desk, bench):
    folder = str(bench.work)
    more = {"cwd": folder, "pwd": folder, "umask": 0o027, "env": {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}}
    worlds = []
    for offer in (1, 2):  # the second comes right after the first, so it takes the short way
        end = desk.run(offer, sys.executable, "-c", WORLD, "one", "two", **more)
        assert end["outcome"] == {"type": "exited", "code": 0}, bench.text(offer, "stderr")
        world = json.loads(bench.text(offer).replace(str(bench.folder(offer)), "FOLDER"))
        assert world.pop("tagged") == offer
        worlds.append(world)
    assert worlds[0] == worlds[1]
    assert worlds[1]["environ"] == {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "PWD": folder}
    assert worlds[1]["parent"] == "kueue-spawner\n"
    assert worlds[1]["blocked"] == worlds[1]["ignored"] == 0


def test_a_directory_keeps_the_name_the_user_gave_it(desk, bench, tmp_path):
    (tmp_path / "link").symlink_to(bench.work)
    for offer in (1, 2, 3):
        desk.run(offer, "sh", "-c", "echo $PWD", pwd=str(tmp_path / "link"))
    assert [bench.text(offer) for offer in (1, 2, 3)] == [f"{tmp_path}/link\n"] * 3


def test_a_name_that_is_no_longer_the_directory_is_not_told_the_job(desk, bench, tmp_path):
    for offer in (1, 2):
        desk.run(offer, "sh", "-c", "echo $PWD", pwd=str(tmp_path))
    assert [bench.text(offer) for offer in (1, 2)] == [f"{bench.work}\n"] * 2


def test_a_program_that_vanishes_between_two_starts_is_explained(desk, bench):
    program = bench.work / "program"
    program.symlink_to("/bin/true")
    for offer in (1, 2):
        assert desk.run(offer, "./program", pwd=str(bench.work))["outcome"] == {"type": "exited", "code": 0}
    program.unlink()
    outcome = desk.run(3, "./program", pwd=str(bench.work))["outcome"]
    assert (outcome["type"], outcome["cause"]) == ("not_started", "not_found")
    program.write_text("echo script $1\n")
    program.chmod(0o755)
    assert desk.run(4, "./program", "run", pwd=str(bench.work))["outcome"] == {"type": "exited", "code": 0}
    assert bench.text(4) == "script run\n"


def test_a_directory_that_vanishes_between_two_starts_is_named(desk, bench):
    place = bench.work / "place"
    place.mkdir()
    for offer in (1, 2):
        desk.run(offer, "true", cwd=str(place), pwd=str(place))
    place.rmdir()
    outcome = desk.run(3, "true", cwd=str(place), pwd=str(place))["outcome"]
    assert (outcome["type"], outcome["cause"]) == ("not_started", "directory")
    assert str(place) in outcome["reason"]


def test_arguments_that_became_too_long_are_refused_with_their_size(desk, bench):
    for offer in (1, 2):
        desk.run(offer, "true", pwd=str(bench.work))
    outcome = desk.run(3, "true", "x" * 200_000, pwd=str(bench.work))["outcome"]
    assert (outcome["type"], outcome["cause"]) == ("not_started", "limit")
    assert "too long: 200" in outcome["reason"]


def test_output_can_be_thrown_away(desk, bench):
    for offer in (1, 2):
        desk.run(offer, "sh", "-c", "echo out; echo err >&2", pwd=str(bench.work), stdout="null", stderr="null")
        assert not (bench.folder(offer) / "stdout").exists()


LAUNCH = """
import os, sys
from kueue.runner.launch import OWN_UMASK, Launcher, key_of
from kueue.runner.program import prepared
os.umask(OWN_UMASK)
os.chdir("/")
order = prepared(sys.argv[1].encode())
launcher = Launcher()
assert not launcher.can_launch(order, 100.0)  # nothing is known of it
launcher.executed(key_of(order), 100.0, 5.0)
assert not launcher.can_launch(order, 100.0)  # it was slow
launcher.executed(key_of(order), 100.0, 0.1)
assert launcher.can_launch(order, 101.0)
assert not launcher.can_launch({**order, "cwd": "/elsewhere"}, 101.0)
assert not launcher.can_launch({**order, "stdout": "file"}, 101.0)
assert not launcher.can_launch({**order, "nice": 5}, 101.0)
assert not launcher.can_launch(order, 103.0)  # that was long ago
pid = launcher.launch(order, sys.argv[2])
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
assert os.getcwd() == "/"
assert os.umask(0) == OWN_UMASK
"""


@pytest.mark.parametrize("pwd", ["same", "", "/"], ids=["named", "unnamed", "named falsely"])
def test_the_short_way_is_taken_only_where_a_start_was_quick_just_now(tmp_path, pwd):
    argv = ["sh", "-c", "echo $PWD; umask; exit 3"]
    pwd = str(tmp_path) if pwd == "same" else pwd
    order = {"argv": argv, "env": [["PATH", "/usr/bin:/bin"]], "cwd": str(tmp_path), "pwd": pwd, "umask": 18}
    root = str(Path(__file__).parents[3])
    command = [sys.executable, "-c", LAUNCH, json.dumps(order), str(tmp_path)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": root})
    assert (tmp_path / "stdout").read_text() == f"{tmp_path}\n0022\n"


@pytest.mark.parametrize("way", [1, 2])
def test_a_job_started_either_way_is_paused_at_the_end_of_the_lease(desk, bench, way):
    for offer in range(1, way):
        desk.run(offer, "sleep", "0", pwd=str(bench.work))
    desk.start(way, "sleep", "7099", pwd=str(bench.work))
    desk.expect("Started", way)
    desk.lease(0.1)
    desk.expect("PauseDone")
    desk.send("StopOrder", offer=way, kill=True)
    assert desk.end(way)["outcome"]["type"] == "canceled"


@pytest.mark.slow
def test_a_file_server_that_dies_between_two_starts_holds_up_the_others_for_seconds_only(desk, bench):
    place = bench.work / "place"
    place.mkdir()
    desk.start(1, "sh", "-c", "while [ ! -e go ]; do sleep 0.02; done; exit 7")
    desk.expect("Started", 1)
    old = bench.spawner()
    for offer in (2, 3):
        desk.run(offer, "true", cwd=str(place), pwd=str(place))
    with dead_file_server(place):
        for offer in (4, 5):
            desk.start(offer, "true", cwd=str(place), pwd=str(place))
        wait_until(lambda: bench.spawner() != old)
        assert desk.run(6, "sh", "-c", "exit 2")["outcome"] == {"type": "exited", "code": 2}
        (bench.work / "go").touch()
        assert desk.end(1)["outcome"] == {"type": "exited", "code": 7}
        desk.send("StopOrder", offer=4, kill=True)
        assert desk.end(4)["outcome"]["type"] == "canceled"
    outcome = desk.end(5)["outcome"]  # with the server back, or gone for good, it is told what became of it
    assert outcome == {"type": "exited", "code": 0} or outcome["cause"] == "directory"
