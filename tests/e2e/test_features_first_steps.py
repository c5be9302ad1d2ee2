"""The newcomer's way: one command starts a server and a worker, the next one runs a job."""

from __future__ import annotations

import functools
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kueue import log
from tests.support.feature_lab import SMALL, FeatureLab
from tests.support.lab import SECRET
from tests.support.removal import remove_tree


@pytest.fixture
def lab(tmp_path):
    with FeatureLab(tmp_path) as lab:
        yield lab


@functools.cache
def own_world():
    """Words that run a command with a network and mounts of its own; none if the system does not let us."""
    words = ("unshare", "--net", "--mount", *([] if os.getuid() == 0 else ["--map-root-user"]))
    if not all(shutil.which(word) for word in ("unshare", "mount", "ip")):
        return None
    probe = subprocess.run([*words, "sh", "-c", "ip link set lo up && mount --bind /proc/loadavg /proc/loadavg"],
        capture_output=True, check=False)  # fmt: skip
    return words if probe.returncode == 0 else None


def newcomer(lab, script, load):
    """Run a script as somebody who has never used kueue, on a machine of that load: its own figure is covered.

    The usual port is free there whatever else runs, and nothing is set but the home directory.
    """
    world = own_world()
    if world is None:
        pytest.skip("this system gives us no network and mounts of our own")
    figure = lab.folder / "loadavg"
    figure.write_text(f"{load:.2f} {load:.2f} {load:.2f} 1/100 12345\n")
    env = {key: value for key, value in lab.environment().items() if key != "KUEUE_STATE_DIR"}
    env["KUEUE"] = f"{lab.python} -m kueue.cli.main"
    return subprocess.run(
        [*world, "sh", "-c", f"ip link set lo up && mount --bind {figure} /proc/loadavg && {script}"],
        capture_output=True, text=True, env=env, cwd=lab.folder, stdin=subprocess.DEVNULL, check=False, timeout=60,
    )  # fmt: skip


def settings(lab, **worker):
    folder = lab.folder / "home" / ".config" / "kueue"
    folder.mkdir(parents=True, mode=0o700)
    lines = [f'[common_settings]\nshared_secret = "{SECRET}"\n[worker_settings]']
    lines += [f"{key} = {value}" for key, value in worker.items()]
    (folder / "config.toml").write_text("\n".join(lines) + "\n")
    (folder / "config.toml").chmod(0o600)


def slowness():
    """How many times longer than alone a program takes here now, because others compute on the same processors."""
    wall, begin = time.monotonic(), os.times()
    subprocess.run([sys.executable, "-c", "sum(range(6_000_000))"], check=True)
    end = os.times()
    used = end.children_user + end.children_system - begin.children_user - begin.children_system
    return max(1.0, (time.monotonic() - wall) / used)


@pytest.mark.parametrize(
    ("worker", "load"),
    [
        (None, 0.05),  # no configuration file at all
        ({"cores": 2, "ram_mb": 2048}, 0.3),
        ({"cores": 8}, 0.05),
    ],
)
def test_two_commands_run_the_first_job_within_five_seconds(tmp_path, worker, load):
    spent = []
    for number in range(3):  # the best of three counts: other tests compute on this machine meanwhile
        folder = tmp_path / str(number)
        folder.mkdir()
        with FeatureLab(folder) as lab:
            lab.environment()  # makes the home directory
            if worker is not None:
                settings(lab, **worker)
            done = newcomer(
                lab,
                "date +%s.%N && $KUEUE up >&2 && $KUEUE cmd --wait true && date +%s.%N "
                "&& $KUEUE cmd --wait sh -c 'echo $KUEUE_CPUS $KUEUE_RAM_MB > took' >&2; $KUEUE down >&2",
                load,
            )
            assert done.returncode == 0, done.stderr
            begin, printed, end = done.stdout.split()
            assert printed == "0"
            assert (lab.folder / "home" / ".config" / "kueue" / "config.toml").exists()
            cores, ram_mb = map(int, (folder / "took").read_text().split())
            has = len(os.sched_getaffinity(0))
            given = has if worker is None else worker["cores"]
            # One core is busy with that load, unless the machine has others that jobs do not get, or what is left of
            # the first job in the average accounts for it.
            assert cores in {min(8, given), min(8, given - (has <= given))}
            if worker is not None and "ram_mb" in worker:
                assert worker["ram_mb"] / 2 <= ram_mb <= worker["ram_mb"]
            spent.append(float(end) - float(begin))
            if spent[-1] < 5 * slowness():
                return
    raise AssertionError(spent)


def test_on_a_busy_machine_the_job_waits_and_says_why(lab):
    settings_of_two_cores = {"cores": 2, "ram_mb": 2048}
    lab.environment()
    settings(lab, **settings_of_two_cores)
    done = newcomer(
        lab, "$KUEUE up >&2 && $KUEUE cmd -q true && $KUEUE explain 0 && $KUEUE list-jobs -p; $KUEUE down >&2", 64.0
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "0"
    name = socket.gethostname().partition(".")[0]
    assert any(line.startswith(f"   - {name}") for line in lines)
    assert "busy with other work, which takes " in lines[1]
    assert "dynamic_check_free_resources = false" in done.stdout
    assert "pending since" in done.stdout


def test_down_leaves_jobs_running_and_up_finds_them_again(lab):
    path = lab.config(worker_settings={**lab.settings["worker_settings"], "worker_name": "w1"})
    up = lab.kueue("up")
    assert up.returncode == 0, up.stderr
    assert up.stdout.endswith("Ready: kueue cmd ./my_script.py\n")
    again = lab.kueue("up")
    assert again.returncode == 0
    assert "The server runs already" in again.stdout
    assert "The worker runs already" in again.stdout
    done = lab.kueue("cmd", "--wait", *SMALL, "echo", "It works")
    assert (done.returncode, done.stdout) == (0, "0\n")
    assert "=== stdout ===\nIt works\n" in lab.kueue("show-job", "0").stdout
    gate = lab.gate()
    job = lab.submit(*SMALL, *gate.command)
    lab.until(lambda: gate.begun, "it runs")
    down = lab.kueue("down")
    assert down.returncode == 0, down.stderr
    assert "Running jobs go on" in down.stdout
    assert not lab.answers()
    (pid, *_) = lab.processes_of(job)
    assert lab.kueue("down").returncode == 0
    assert lab.kueue("up").returncode == 0
    assert lab.state(job) == "running"
    assert pid in lab.processes_of(job)
    gate.open()
    assert lab.end_of(job)["attempt"] == 1
    assert path.exists()
    assert lab.kueue("down").returncode == 0


def test_up_proves_that_server_and_worker_answer_with_the_secret_of_the_file(lab):
    names = {"worker_settings": {**lab.settings["worker_settings"], "worker_name": "w1"}}
    path = lab.config(**names)
    assert lab.kueue("up").returncode == 0
    lab.config(**names, common_settings={"shared_secret": "the secret of a file that was made anew"})
    done = lab.kueue("up")
    assert done.returncode == 1
    assert "Ready" not in done.stdout
    assert f"was started with another secret than the one in {path}." in done.stderr
    assert "kueue down" in done.stderr
    refused = lab.kueue("list-jobs")
    assert refused.returncode == 1
    assert "Authentication failed!" in refused.stderr
    assert "The server that runs here (pid " in refused.stderr
    assert lab.kueue("down").returncode == 0
    assert lab.kueue("up").returncode == 0
    assert lab.kueue("cmd", "--wait", *SMALL, "true").stdout == "0\n"
    assert lab.kueue("down").returncode == 0


def test_up_after_a_crash_of_the_server_waits_until_the_worker_is_connected(lab):
    lab.config(worker_settings={**lab.settings["worker_settings"], "worker_name": "w1"})
    first = lab.kueue("up")
    assert first.returncode == 0, first.stderr
    os.kill(int(first.stdout.partition("(pid ")[2].partition(",")[0]), signal.SIGKILL)
    lab.until(lambda: not lab.answers(), "the server is gone")
    again = lab.kueue("up")
    assert again.returncode == 0, again.stderr
    assert "Started the server" in again.stdout
    assert "The worker runs already" in again.stdout
    listed = lab.kueue("list-workers", "--json").stdout
    assert [(one["name"], one["state"]) for one in json.loads(listed)["workers"]] == [("w1", "online")]
    assert lab.kueue("down").returncode == 0


def test_up_tells_of_a_setting_that_nobody_knows(lab):
    worker = {**lab.settings["worker_settings"], "worker_name": "w1", "worker_max_paralel_jobs": 3}
    lab.config(worker_settings=worker)
    done = lab.kueue("up")
    assert done.returncode == 0, done.stderr
    assert "unknown key worker_settings.worker_max_paralel_jobs; did you mean worker_max_parallel_jobs?" in done.stderr
    assert lab.kueue("down").returncode == 0


def test_up_says_why_the_server_does_not_start_and_behind_that_what_it_hints_at(lab):
    lab.config()
    place = lab.folder / "state" / "server" / "queue.sqlite"
    place.parent.mkdir(parents=True)
    place.write_text("no database")
    done = lab.kueue("up")
    assert done.returncode == 1
    assert f"Error: The server ended at once: {place}" in done.stderr
    (hint,) = [line for line in done.stderr.splitlines() if line.startswith("Hint: ")]
    assert "`kueue_server --recover`" in hint
    assert hint.endswith(f"All it said: {place.parent}/server.log")


@pytest.mark.parametrize("has_long_log", [False, True])
def test_up_says_why_the_worker_does_not_start_also_when_its_log_gets_another_name_by_that(lab, has_long_log):
    lab.start_server()
    lab.config(worker_settings={"worker_name": "w1"})
    place = lab.folder / "state" / "workers" / "w1"
    place.mkdir(parents=True)
    (place / "identity").write_text("nobody")
    if has_long_log:
        (place / "worker.log").write_text("old news\n" * (log.FILE_LIMIT // 9))
    done = lab.kueue("up")
    assert done.returncode == 1
    assert f"Error: The worker ended at once: {place}/identity does not hold an identity.\n" in done.stderr
    assert (place / "worker.log.1").exists() is has_long_log


def test_two_that_type_up_at_once_start_one_of_each_and_only_one_says_that_it_did(lab):
    lab.config(worker_settings={**lab.settings["worker_settings"], "worker_name": "w1"})
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: lab.kueue("up"), range(2)))
    assert [done.returncode for done in both] == [0, 0], both
    said = "".join(done.stdout for done in both)
    for what in ("server", "worker"):
        (pid,) = re.findall(rf"Started the {what} \(pid (\d+),", said)
        assert f"The {what} runs already (pid {pid})." in said
    assert lab.kueue("down").returncode == 0


def test_up_fails_soon_when_a_program_that_is_no_server_has_the_port(lab):
    lab.config()
    with socket.create_server(("127.0.0.1", lab.port)):
        done = lab.kueue("up")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"TCP port {lab.port} of this machine is taken by another program" in done.stderr
    assert "server_port" in done.stderr
    assert not list(lab.folder.glob("state/server/*.log"))


def test_up_starts_no_worker_for_a_server_whose_directory_was_removed(lab):
    lab.config(worker_settings={**lab.settings["worker_settings"], "worker_name": "w1"})
    (server,) = re.findall(r"Started the server \(pid (\d+),", lab.kueue("up").stdout)
    remove_tree(lab.folder / "state")
    done = lab.kueue("up")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"The directory of {lab.folder}/state/server/lock was removed or replaced" in done.stderr
    assert f"`kill {server}`, and `kueue up` starts another" in done.stderr
    ended = os.pidfd_open(int(server))
    os.kill(int(server), signal.SIGTERM)
    assert select.select([ended], [], [], 30)[0] == [ended]
    os.close(ended)
    done = lab.kueue("up")
    assert (done.returncode, done.stderr) == (0, ""), done
    assert lab.kueue("cmd", *SMALL, "--wait", "true").stdout == "0\n"
    assert lab.kueue("down").returncode == 0


def test_up_tells_a_colleagues_server_on_the_port_from_ones_own(lab, tmp_path_factory):
    with FeatureLab(tmp_path_factory.mktemp("colleague")) as colleague:
        colleague.start_server()
        lab.port = lab.settings["common_settings"]["server_port"] = colleague.port
        path = lab.config(common_settings={"shared_secret": "quite another secret than theirs"})
        done = lab.kueue("up")
        assert (done.returncode, done.stdout) == (1, "")
        assert f"TCP port {lab.port} of this machine is taken by another program" in done.stderr
        assert str(path) in done.stderr
        lab.config(common_settings={"shared_secret": SECRET}, worker_settings={"worker_name": "mine"})
        done = lab.kueue("up")
        assert done.returncode == 0, done.stderr
        assert f"A server of this lab, started by somebody else, runs already at 127.0.0.1:{lab.port}." in done.stdout
        assert "mine" in colleague.machines()
        done = lab.kueue("down")
        assert "Stopped the worker" in done.stdout
        assert "Stopped the server" not in done.stdout
        assert colleague.answers()
