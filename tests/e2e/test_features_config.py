"""One file of settings for all programs: where it is, what it may leave out, and what it does."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess

import pytest

from tests.support.feature_lab import SMALL, FeatureLab
from tests.support.lab import SECRET

DEFAULTS = [
    'server_name = "localhost"',
    "server_port = 11236",
    'log_level = "info"',
    'bind_addresses = "0.0.0.0 [::]"',
    "maintenance_interval_seconds = 60",
    "worker_timeout_seconds = 300",
    "job_offer_timeout_seconds = 60",
    "job_cleanup_after_minutes = 2880",
    "global_max_parallel_jobs = 100",
    "system_update_interval_seconds = 60",
    "worker_max_parallel_jobs = 10",
    "dynamic_check_free_resources = true",
    "dynamic_cpu_load_scale_factor = 1.0",
    "job_default_cpus = 8",
    "job_default_ram_mb = 8192",
]


@pytest.fixture
def lab(tmp_path):
    with FeatureLab(tmp_path) as lab:
        yield lab


def program(lab, module, *words, timeout=30, **environment):
    """A program to its end, with nothing but its own words: no configuration is chosen for it."""
    return subprocess.run(
        [lab.python, "-m", module, *words], capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL,
        cwd=lab.folder, env=lab.environment(**environment), check=False,
    )  # fmt: skip


def usual_file(lab):
    return lab.folder / "home" / ".config" / "kueue" / "config.toml"


def test_the_first_start_writes_a_template_and_the_second_leaves_it_alone(lab):
    done = program(lab, "kueue.cli.main", "list-jobs", timeout=60)
    assert done.returncode == 1  # there is no server
    assert "localhost:11236" in done.stderr
    path = usual_file(lab)
    assert str(path) in done.stderr
    text = path.read_text()
    assert re.findall(r"^\[(\w+)\]$", text, re.MULTILINE) == [
        "common_settings", "server_settings", "worker_settings", "client_settings",
    ]  # fmt: skip
    keys = [line for line in text.splitlines() if re.match(r"\w+ = ", line)]
    assert re.fullmatch(r'shared_secret = "[A-Za-z0-9]{64}"', keys[0])
    assert keys[1:] == DEFAULTS
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    program(lab, "kueue.cli.main", "--patience", "0", "list-jobs")
    assert path.read_text() == text


def test_a_file_with_the_secret_alone_serves_all_programs(lab):
    # The port of all defaults may be somebody else's on this machine, so this one key stands there as well.
    path = lab.folder / "lab.toml"
    path.write_text(f'[common_settings]\nshared_secret = "{SECRET}"\nserver_port = {lab.port}\n')
    path.chmod(0o600)
    lab.start("kueue.server.main", "-c", str(path), log="server")
    lab.until(lab.answers, "the server answers")
    lab.start("kueue.worker.main", "-c", str(path), log="worker")
    name = socket.gethostname().partition(".")[0]
    lab.until(lambda: name in lab.machines(), "the worker is there")
    assert lab.submit(*SMALL, "true") == 0


def test_the_file_named_on_the_command_line_is_the_only_one(lab):
    usual_file(lab).parent.mkdir(parents=True)
    usual_file(lab).write_text("this is no settings file")
    lab.start_server()
    lab.start_worker("w1")
    assert lab.run(*SMALL, "true")["state"] == "succeeded"
    assert usual_file(lab).read_text() == "this is no settings file"
    usual_file(lab).unlink()
    assert lab.kueue("list-jobs").returncode == 0
    assert not usual_file(lab).exists()
    # The environment names it too.
    done = program(lab, "kueue.cli.main", "list-jobs", "--quiet", KUEUE_CONFIG=str(lab.folder / "lab.toml"))
    assert (done.returncode, done.stdout) == (0, "0\n")


def test_an_address_that_cannot_be_bound_is_told_and_the_others_serve(lab):
    lab.start_server(server_settings={"bind_addresses": "127.0.0.1 192.0.2.1"})
    lab.until(lambda: "192.0.2.1" in lab.log("server"), "the trouble is told")
    assert lab.kueue("list-jobs").returncode == 0


def test_a_server_that_can_listen_nowhere_ends_with_a_sentence(lab):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", lab.port))
        taken.listen()
        path = lab.config(server_settings={"bind_addresses": "127.0.0.1 192.0.2.1"})
        done = program(lab, "kueue.server.main", "-c", str(path))
    assert done.returncode == 1
    assert f"Failed to bind 127.0.0.1, port {lab.port}: " in done.stderr
    assert "Failed to bind 192.0.2.1" in done.stderr
    assert "Failed to bind any address!" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_server_that_is_away_is_named_and_the_command_gives_up(lab):
    lab.config()
    done = lab.kueue("--patience", "1", "cmd", "true", timeout=10)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"127.0.0.1:{lab.port}" in done.stderr


def test_a_command_waits_for_its_server_and_says_so_once(lab):
    lab.config()
    waiting = lab.popen_kueue("cmd", *SMALL, "true")
    first = waiting.stderr.readline().decode()
    assert f"127.0.0.1:{lab.port}" in first
    assert waiting.poll() is None
    lab.start_server()
    assert waiting.wait(30) == 0
    assert waiting.stdout.read() == b"0\n"
    assert f"127.0.0.1:{lab.port}" not in waiting.stderr.read().decode()


def test_the_log_level_changes_the_log_and_nothing_else(tmp_path):
    lines, steps = {}, {}
    for level in ("INFO", "debug"):
        (tmp_path / level).mkdir()
        with FeatureLab(tmp_path / level) as lab:
            lab.start_server(common_settings={"log_level": level})
            lab.start_worker("w1")
            done = lab.kueue("cmd", "--wait", *SMALL, "true")
            assert (done.returncode, done.stdout) == (0, "0\n")
            lines[level] = (len(lab.log("server").splitlines()), len(lab.log("w1").splitlines()))
            steps[level] = done.stderr.splitlines()
    assert lines["debug"] > lines["INFO"]
    assert lines["debug"][1] > lines["INFO"][1]
    assert steps["INFO"] == []
    words = [line.split()[1] for line in steps["debug"]]
    assert words[:6] == ["settings", "connects", "welcome", "asks", "answered", "asks"]
    assert "Submit" in steps["debug"][3]
    assert "WatchJobs" in steps["debug"][5]


@pytest.mark.parametrize("module", ["kueue.server.main", "kueue.worker.main", "kueue.cli.main"])
def test_an_unknown_log_level_names_the_five(lab, module):
    path = lab.config(common_settings={"log_level": "foo"})
    done = program(lab, module, "-c", str(path), *(["list-jobs"] if module == "kueue.cli.main" else []))
    assert done.returncode == 1
    assert done.stdout == ""
    for level in ("trace", "debug", "info", "warn", "error"):
        assert level in done.stderr
    assert str(path) in done.stderr


def test_a_section_that_a_program_does_not_use_cannot_stop_it(lab):
    lab.start_server()
    path = lab.config("odd", restart_workers={"ssh_user": 3}, worker_settings={"cores": "many"})
    assert lab.kueue("-c", str(path), "list-jobs").returncode == 0
    done = program(lab, "kueue.worker.main", "-c", str(path))
    assert done.returncode == 1
    assert "cores" in done.stderr


def test_a_secret_that_others_can_read_is_refused_with_the_cure(lab):
    path = lab.config()
    path.chmod(0o644)
    for module, words in (("kueue.cli.main", ["list-jobs"]), ("kueue.server.main", []), ("kueue.worker.main", [])):
        done = program(lab, module, "-c", str(path), *words)
        assert done.returncode == 1
        assert f"chmod 600 {path}" in done.stderr


def test_limits_are_read_again_on_a_hangup(lab):
    lab.start_server(server_settings={"global_max_parallel_jobs": 1})
    lab.start_worker("w1", worker_max_parallel_jobs=2)
    gate = lab.gate()
    for _ in range(4):
        lab.submit(*SMALL, *gate.command)
    lab.until(lambda: len(gate.begun) == 1, "one runs")
    lab.remains(lambda: len(gate.begun) == 1, 0.3)
    lab.config(server_settings={**lab.settings["server_settings"], "global_max_parallel_jobs": 10})
    lab.server.send_signal(signal.SIGHUP)
    lab.until(lambda: len(gate.begun) == 2, "the worker's slots are the limit now")
    lab.config(
        "w1", worker_settings={**lab.settings["worker_settings"], "worker_name": "w1", "worker_max_parallel_jobs": 4}
    )
    lab.workers["w1"].send_signal(signal.SIGHUP)
    lab.until(lambda: len(gate.begun) == 4, "all run")


def test_all_programs_tell_their_version_and_help_without_settings(lab):
    for module in ("kueue.cli.main", "kueue.server.main", "kueue.worker.main"):
        for word in ("--version", "-V", "--help", "-h"):
            done = program(lab, module, word)
            assert (done.returncode, done.stderr) == (0, ""), module
            assert done.stdout.strip()
    assert not usual_file(lab).exists()
    assert not os.path.exists(lab.folder / "state")
