"""Under `systemd --user`: nothing that happens to the worker's unit touches jobs, and each job has a cgroup of its own."""

import json
import re
import shlex
import sys

import pytest

from tests.lab.host import GUEST, REPOSITORY, UID, USER, Host, NoHost, install

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CONFIG = """
[common_settings]
shared_secret = "a secret of this host and of nobody else"
server_name = "127.0.0.1"
[server_settings]
bind_addresses = "127.0.0.1"
worker_timeout_seconds = 10
[worker_settings]
worker_name = "here"
dynamic_check_free_resources = false
cores = 16
ram_mb = 64000
"""

UNIT = """
[Service]
Type=notify
ExecStart={python} -m kueue.{program}.main -c %h/kueue.toml
Environment=PYTHONPATH={repository} PYTHONDONTWRITEBYTECODE=1 PATH=%h/bin:/usr/local/bin:/usr/bin:/bin
WatchdogSec=60
"""

# It leaves session, parent, environment and tag behind.
RUNAWAY = "(ulimit -S -x unlimited; setsid env -i sh -c 'echo $$ > runaway; exec sleep 1000' &)"
UNTIL_GO = "touch ready; until [ -e go ]; do sleep 0.05; done; exit 7"


class Site:
    """Server and worker as units of the user on such a host."""

    def __init__(self, host):
        self.host = host
        self.home = host.shared
        (self.home / "kueue.toml").write_text(CONFIG)
        units = self.home / ".config/systemd/user"
        units.mkdir(parents=True)
        (self.home / "bin").mkdir()
        (self.home / "jobs").mkdir()
        for program in ("server", "worker"):
            text = UNIT.format(python=sys.executable, program=program, repository=REPOSITORY)
            (units / f"kueue-{program}.service").write_text(text)
        host.root("chown", "-R", f"{USER}:", f"/home/{USER}")
        host.root("chmod", "600", f"/home/{USER}/kueue.toml")
        self.systemctl("daemon-reload")
        self.systemctl("start", "kueue-server", "kueue-worker")

    def systemctl(self, *words):
        return self.host.user("systemctl", "--user", *words)

    def python(self, *words, **more):
        return self.host.user(sys.executable, *words, PYTHONPATH=str(REPOSITORY), PYTHONDONTWRITEBYTECODE="1", **more)

    def kueue(self, *words):
        config = f"/home/{USER}/kueue.toml"
        return self.python("-m", "kueue.cli.main", "-c", config, *words)

    def folder(self, name):
        path = self.home / "jobs" / name
        path.mkdir()
        self.host.root("chown", f"{USER}:", f"/home/{USER}/jobs/{name}")
        return path

    def start(self, name, script):
        """A job in a folder of its own, once it has made the file ``ready`` there: (its number, the folder)."""
        folder = self.folder(name)
        text = f"cd {shlex.quote(f'/home/{USER}/jobs/{name}')}; {script}"
        number = int(self.kueue("cmd", "--", "bash", "-c", text))
        self.host.until((folder / "ready").exists, f"the job {name} runs")
        return number, folder

    def job(self, number):
        return json.loads(self.kueue("show-job", "--json", str(number)))["jobs"][0]

    def ends(self, number):
        self.host.until(lambda: self.job(number)["outcome"], f"job {number} ends")
        return self.job(number)

    def processes(self, pattern):
        return [
            int(word) for word in self.host.root("sh", "-c", f"pgrep -u {USER} -f {shlex.quote(pattern)} || :").split()
        ]

    def cgroup(self, pid):
        """Directory of a process's cgroup."""
        lines = self.host.root("cat", f"/proc/{pid}/cgroup").splitlines()
        return "/sys/fs/cgroup" + next(line[3:] for line in lines if line.startswith("0::"))

    def end_all(self):
        """The worker, and with it the runner wherever it is."""
        self.systemctl("stop", "kueue-worker", "kueue-runner-*")
        self.host.until(lambda: not self.processes("runner-.*[.]pyz run"), "the runner has left")

    def is_alive(self, pid):
        return self.host.root("sh", "-c", f"test -e /proc/{pid} && echo yes || :") == "yes\n"


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    try:
        install()
        host = Host(tmp_path_factory.mktemp("host"))
    except NoHost as reason:
        pytest.skip(f"no host of its own with systemd: {reason}")
    yield host
    host.close()


@pytest.fixture(scope="module")
def site(host):
    return Site(host)


def test_a_job_survives_all_that_happens_to_the_workers_unit(site):
    number, folder = site.start("survivor", f"echo $$ > pid; {UNTIL_GO}")
    pid = int((folder / "pid").read_text())
    assert re.search(r"/kueue-runner-\w+\.scope/attempt-\d+$", site.cgroup(pid))
    site.systemctl("restart", "kueue-worker")
    assert site.is_alive(pid)
    for words in (["stop"], ["kill", "-s", "KILL"]):
        site.systemctl(*words, "kueue-worker")
        site.host.until(lambda: not site.processes("kueue.worker.main"), "the worker is gone")
        assert site.is_alive(pid)
        site.systemctl("start", "kueue-worker")
    (folder / "go").touch()
    end = site.ends(number)
    assert end["outcome"]["code"] == 7
    assert len(end["attempts"]) == 1


def test_a_job_that_ends_while_there_is_no_worker_ends_with_its_own_code(site):
    number, folder = site.start("alone", UNTIL_GO)
    site.systemctl("stop", "kueue-worker")
    (folder / "go").touch()
    site.host.until(lambda: site.processes("until .*go") == [], "the job has ended")
    site.systemctl("start", "kueue-worker")
    assert site.ends(number)["outcome"]["code"] == 7


def test_who_left_session_environment_and_tag_behind_is_gone_after_a_kill(site):
    number, folder = site.start(
        "runaway", f"{RUNAWAY}; echo $$ > pid; until [ -s runaway ]; do sleep 0.05; done; {UNTIL_GO}"
    )
    runaway, pid = (int((folder / name).read_text()) for name in ("runaway", "pid"))
    directory = site.cgroup(pid)
    assert site.cgroup(runaway) == directory
    assert "unlimited" in site.host.root("grep", "Max file locks", f"/proc/{runaway}/limits")
    site.kueue("remove-job", "--kill", str(number))
    assert site.ends(number)["outcome"]["type"] == "canceled"
    assert not site.is_alive(runaway)
    site.host.until(
        lambda: site.host.root("sh", "-c", f"ls -d {directory} 2>&1 || :").startswith("ls:"), "its cgroup goes"
    )


def test_a_silent_server_freezes_the_job_and_its_return_thaws_it(site):
    number, folder = site.start(
        "frozen", f"{RUNAWAY}; echo $$ > pid; until [ -s runaway ]; do sleep 0.05; done; {UNTIL_GO}"
    )
    pid, runaway = (int((folder / name).read_text()) for name in ("pid", "runaway"))
    directory = site.cgroup(pid)
    site.systemctl("kill", "-s", "STOP", "kueue-server")
    site.host.until(lambda: "frozen 1" in site.host.root("cat", f"{directory}/cgroup.events"), "it is frozen")
    members = site.host.root("cat", f"{directory}/cgroup.procs").split()
    assert {str(pid), str(runaway)} <= set(members)
    assert site.host.root("ps", "-o", "stat=", "-p", str(runaway))[0] not in "Tt"
    (folder / "go").touch()
    site.systemctl("kill", "-s", "CONT", "kueue-server")
    end = site.ends(number)
    assert end["outcome"]["code"] == 7
    assert len(end["attempts"]) == 1


def test_a_job_sees_nothing_of_the_service_manager_and_dies_before_its_runner_when_memory_is_out(site):
    number, folder = site.start("seen", "env > env; cat /proc/self/oom_score_adj > score; touch ready")
    site.ends(number)
    names = {line.partition("=")[0] for line in (folder / "env").read_text().splitlines()}
    assert not names & {
        "NOTIFY_SOCKET",
        "WATCHDOG_PID",
        "WATCHDOG_USEC",
        "INVOCATION_ID",
        "JOURNAL_STREAM",
        "LISTEN_FDS",
    }
    (runner, *_) = site.processes("[k]ueue-keeper") or site.processes("runner-.*[.]pyz run")
    kept = site.host.root("sh", "-c", f"tr '\\0' '\\n' < /proc/{runner}/environ")
    assert "NOTIFY_SOCKET" not in kept
    assert int((folder / "score").read_text()) > int(site.host.root("cat", f"/proc/{runner}/oom_score_adj"))


@pytest.mark.parametrize(("name", "text"), [("fails", "echo no bus today >&2; exit 1"), ("hangs", "exec sleep 1000")])
def test_without_a_scope_jobs_run_all_the_same_and_the_log_says_it_once(site, name, text):
    site.end_all()
    broken = site.home / "bin/systemd-run"
    broken.write_text(f"#!/bin/sh\n{text}\n")
    broken.chmod(0o755)
    try:
        site.systemctl("start", "kueue-worker")
        for count in (1, 2):
            number, folder = site.start(f"{name}{count}", "cat /proc/self/cgroup > cgroup; touch ready; exit 6")
            assert site.ends(number)["outcome"]["code"] == 6
            assert "kueue-worker.service" in (folder / "cgroup").read_text()
        remarks = site.host.root(
            "journalctl", "--no-pager", "-o", "cat", "--since", "today", "_SYSTEMD_USER_UNIT=kueue-worker.service"
        )
        why = {"fails": "no bus today", "hangs": "does not answer"}[name]
        assert remarks.count(why) == 1
    finally:
        broken.unlink()
        site.end_all()
        site.systemctl("start", "kueue-worker")


# Where would a runner of a worker be that was started here?
QUESTION = """
import os, subprocess, sys, trio
sys.path.insert(0, sys.argv[1])
from kueue.worker.scope import Scopes
prefix = trio.run(Scopes(os.environ).prefix, sys.argv[2])
subprocess.run([*prefix, "cat", "/proc/self/cgroup"], check=True)
"""


def test_a_scope_is_asked_for_only_where_it_lives_as_long_as_the_worker(site):
    def ask(token):
        return [sys.executable, "-B", "-c", QUESTION, str(REPOSITORY), token]

    of_a_unit = site.host.user("systemd-run", "--user", "--pipe", "--quiet", *ask("0a"))
    assert f"user@{UID}.service/app.slice/kueue-runner-0a.scope" in of_a_unit
    # Both logins have a manager; that of one stays when the login ends.
    assert "/kueue-runner-0b.scope" in site.host.login(USER, *ask("0b"))
    assert "/session-" in site.host.login(GUEST, *ask("0c"))
    as_from_cron = ["env", "-u", "XDG_RUNTIME_DIR", "-u", "DBUS_SESSION_BUS_ADDRESS"]
    assert "/kueue-runner-0d.scope" in site.host.login(USER, *as_from_cron, *ask("0d"))
