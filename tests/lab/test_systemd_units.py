"""The units that come with kueue, installed from a wheel by an ordinary user on a host with a real systemd."""

import contextlib
import json
import re
import shlex
import shutil
import sys

import pytest

from tests.lab.host import GUEST, GUEST_UID, REPOSITORY, UID, USER, Host, NoHost, install
from tests.support import wheel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.xdist_group("one host")]

CONFIG = """
[common_settings]
shared_secret = "a secret of this host and of nobody else"
server_name = "127.0.0.1"
server_port = {port}
[server_settings]
bind_addresses = "127.0.0.1"
worker_timeout_seconds = 10
[worker_settings]
dynamic_check_free_resources = false
cores = 16
ram_mb = 64000
[restart_workers]
ssh_user = "ada"
hostnames = "127.0.0.1"
[metrics_settings]
server_bind = ""
"""

UNTIL_GO = "touch ready; until [ -e go ]; do sleep 0.05; done; exit 7"
UNITS = ("kueue-server", "kueue-worker")


class Account:
    """One user of the host, with kueue in an environment below /home."""

    def __init__(self, host, name, uid, port):
        self.host = host
        self.name = name
        self.uid = uid
        self.home = f"/home/{name}"
        self.config = f"{self.home}/.config/kueue/config.toml"
        self.units = f"{self.home}/.config/systemd/user"
        host.root("install", "-d", "-o", name, "-g", name, self.home)
        self.sh(
            f"mkdir -p -m 700 ~/.config/kueue ~/jobs; umask 077; cat > {self.config} <<'E'\n{CONFIG.format(port=port)}\nE"
        )

    def run(self, *words, **environment):
        """Outside of any login session."""
        known = {"HOME": self.home, "USER": self.name, "PATH": "/usr/local/bin:/usr/bin:/bin"}
        known["XDG_RUNTIME_DIR"] = f"/run/user/{self.uid}"
        both = {**known, **environment}
        switch = ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups", "--"]
        return self.host.root(
            *switch, "env", "-i", "-C", self.home, *(f"{key}={value}" for key, value in both.items() if value), *words
        )

    def sh(self, script, **environment):
        return self.run("sh", "-c", script, **environment)

    def systemctl(self, *words):
        return self.run("systemctl", "--user", *words)

    def install(self, *words, **environment):
        """What the installation said, on both channels."""
        return self.sh(f"{self.bin}/kueue_install systemd {shlex.join(words)} 2>&1", **environment)

    @property
    def bin(self):
        return f"/home/{USER}/kueue/bin"

    def shown(self, unit, name):
        return self.systemctl("show", unit, "-p", name, "--value").strip()

    def is_active(self, unit):
        return self.shown(unit, "ActiveState") == "active"

    def pid(self, unit):
        return int(self.shown(unit, "MainPID"))

    def comes_back(self, unit, before):
        self.host.until(lambda: self.pid(unit) not in {0, before} and self.is_active(unit), f"{unit} is back")

    def kueue(self, *words):
        return self.run(f"{self.bin}/kueue", *words)

    def exists(self, path):
        return self.sh(f"test -e {path} && echo yes || :") == "yes\n"

    def script(self, name, script):
        self.sh(f"mkdir ~/jobs/{name}")
        return f"cd {self.home}/jobs/{name}; {script}"

    def start(self, name, script=UNTIL_GO):
        """The number of a job in a folder of its own, once it has made the file ``ready`` there."""
        number = int(self.kueue("cmd", "--", "bash", "-c", self.script(name, script)))
        self.host.until(lambda: self.exists(f"~/jobs/{name}/ready"), f"the job {name} runs")
        return number

    def go(self, name):
        self.sh(f"touch ~/jobs/{name}/go")

    def job(self, number):
        return json.loads(self.kueue("show-job", "--json", str(number)))["jobs"][0]

    def ends(self, number):
        self.host.until(lambda: self.job(number)["outcome"], f"job {number} ends")
        return self.job(number)

    @contextlib.contextmanager
    def dropin(self, unit, text):
        """Settings of the user's own for one unit, as `systemctl --user edit` writes them."""
        file = f"{self.units}/{unit}.service.d/override.conf"
        self.sh(f"cat > {file} <<'E'\n[Service]\n{text}\nE")
        self.systemctl("daemon-reload")
        self.systemctl("restart", unit)
        try:
            yield
        finally:
            self.sh(f"rm {file}")
            self.systemctl("daemon-reload")
            self.systemctl("restart", unit)


def numbers(job):
    """Of the attempts that were started; what a worker declined is none."""
    return [attempt["number"] for attempt in job["attempts"] if attempt["number"] is not None]


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
def ada(host, tmp_path_factory):
    built = wheel.build(tmp_path_factory.mktemp("wheel"))
    shutil.copy(built, host.shared)
    ada = Account(host, USER, UID, 11236)
    ada.sh("chmod 711 ~")
    for command in wheel.commands(f"{ada.home}/{built.name}", f"{ada.home}/kueue"):
        ada.run(*command)
    ada.said = ada.install("--start")
    return ada


def test_an_ordinary_user_installs_from_a_wheel_and_all_runs(ada):
    assert f"wrote {ada.units}/kueue-server.service (new)" in ada.said
    assert "ran systemctl --user enable kueue-server.service kueue-worker.service" in ada.said
    assert "Lingering" not in ada.said
    assert f"ExecStart={ada.bin}/kueue_worker" in ada.sh(f"cat {ada.units}/kueue-worker.service")
    ada.systemctl("start", *UNITS)
    assert ada.ends(int(ada.kueue("cmd", "sh", "-c", "exit 5")))["outcome"]["code"] == 5
    assert ada.systemctl("is-enabled", *UNITS).split() == ["enabled", "enabled"]
    problems = ada.sh(f"systemd-analyze --user verify {ada.units}/kueue-*.service 2>&1")
    assert problems == ""
    again = ada.install("--start")
    assert "unchanged" in again
    assert "wrote" not in again


def test_the_server_is_confined_and_the_worker_is_not(ada):
    def status(unit):
        lines = ada.host.root("cat", f"/proc/{ada.pid(unit)}/status").splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

    # The host itself has filters; what counts is what comes on top.
    server, worker = status("kueue-server"), status("kueue-worker")
    assert (server["NoNewPrivs"], worker["NoNewPrivs"]) == ("1", "0")
    assert int(server["Seccomp_filters"]) > int(worker["Seccomp_filters"])
    number = ada.start("free", "cat /proc/self/status > found; touch ready")
    ada.ends(number)
    found = ada.sh("cat ~/jobs/free/found")
    assert "NoNewPrivs:\t0" in found
    # Its runner may have been started from outside of the host's filters.
    filters = int(re.search(r"Seccomp_filters:\t(\d+)", found)[1])
    assert filters <= int(worker["Seccomp_filters"])


def test_the_journal_has_names_and_levels_and_no_second_time(ada):
    read = ["journalctl", "--no-pager", "-q", "-o", "json", "_SYSTEMD_USER_UNIT=kueue-server.service"]
    entries = [json.loads(line) for line in ada.host.root(*read).splitlines()]
    said = [one for one in entries if "listening on" in str(one["MESSAGE"])]
    assert said
    assert {one["SYSLOG_IDENTIFIER"] for one in said} == {"kueue_server"}
    assert {one["PRIORITY"] for one in said} == {"6"}
    assert not [one for one in said if re.match(r"<|\d{4}-", one["MESSAGE"])]


def test_what_was_killed_comes_back_and_the_job_notices_nothing(ada):
    number = ada.start("killed")
    before = {unit: ada.pid(unit) for unit in UNITS}
    for pid in before.values():
        ada.host.root("kill", "-9", str(pid))
    for unit, pid in before.items():
        ada.comes_back(unit, pid)
    ada.go("killed")
    end = ada.ends(number)
    assert end["outcome"]["code"] == 7
    assert numbers(end) == [1]


def test_jobs_survive_restart_and_kill_of_the_workers_unit_with_their_true_exit_codes(ada):
    through = ada.start("through")
    within = ada.start("within", "touch ready; until [ -e go ]; do sleep 0.05; done; touch gone; exit 9")
    ada.systemctl("restart", "kueue-worker")
    before = ada.pid("kueue-worker")
    ada.systemctl("kill", "-s", "KILL", "kueue-worker")
    ada.go("within")
    ada.host.until(lambda: ada.exists("~/jobs/within/gone"), "one ends while there is no worker")
    ada.comes_back("kueue-worker", before)
    ada.go("through")
    ends = [ada.ends(number) for number in (through, within)]
    assert [end["outcome"]["code"] for end in ends] == [7, 9]
    assert [numbers(end) for end in ends] == [[1], [1]]


def test_a_kill_without_a_signal_is_an_orderly_stop_and_the_next_start_tells_the_ends(ada):
    number = ada.start("asked")
    ada.systemctl("kill", "kueue-worker")
    ada.host.until(lambda: ada.shown("kueue-worker", "ActiveState") == "inactive", "the worker has stopped")
    assert ada.shown("kueue-worker", "Result") == "success"
    ada.go("asked")
    ada.systemctl("start", "kueue-worker")
    end = ada.ends(number)
    assert end["outcome"]["code"] == 7
    assert numbers(end) == [1]


def test_without_a_scope_stop_and_restart_end_the_worker_alone(ada):
    ada.systemctl("stop", "kueue-worker", "kueue-runner-*")
    ada.sh("mkdir -p ~/broken; printf '#!/bin/sh\\nexit 1\\n' > ~/broken/systemd-run; chmod +x ~/broken/systemd-run")
    try:
        with ada.dropin("kueue-worker", "Environment=PATH=%h/broken:/usr/local/bin:/usr/bin:/bin"):
            number = ada.start("inside", f"cat /proc/self/cgroup > cgroup; {UNTIL_GO}")
            assert "kueue-worker.service" in ada.sh("cat ~/jobs/inside/cgroup")
            ada.systemctl("restart", "kueue-worker")
            ada.systemctl("stop", "kueue-worker")
            ada.go("inside")
            ada.systemctl("start", "kueue-worker")
            end = ada.ends(number)
            assert end["outcome"]["code"] == 7
            assert numbers(end) == [1]
    finally:
        ada.sh("rm -r ~/broken")
        # Its runner lingers inside of the unit and would serve the next test, whose jobs shall be outside.
        ada.systemctl("kill", "-s", "KILL", "kueue-worker")
        ada.systemctl("restart", "kueue-worker")


def test_a_job_that_the_kernel_shoots_takes_nobody_with_it(ada):
    before = ada.pid("kueue-worker")
    number = ada.start("shot", "touch ready; ulimit -S -t 1; ulimit -H -t 1; while :; do :; done")
    end = ada.ends(number)
    assert end["outcome"]["type"] == "signaled"
    assert end["outcome"]["signal"] == 9
    assert ada.pid("kueue-worker") == before
    assert ada.is_active("kueue-worker")


def test_a_stopped_server_is_killed_by_the_watchdog_and_comes_back(ada):
    number = ada.start("watched")
    with ada.dropin("kueue-server", "WatchdogSec=2"):
        before = ada.pid("kueue-server")
        ada.host.root("kill", "-STOP", str(before))
        ada.comes_back("kueue-server", before)
        assert "watchdog" in ada.host.journal().lower()
        ada.go("watched")
        end = ada.ends(number)
    assert end["outcome"]["code"] == 7
    assert numbers(end) == [1]


def test_a_reload_reads_the_settings_again(ada):
    before = {unit: ada.pid(unit) for unit in UNITS}
    ada.systemctl("reload", *UNITS)
    assert {unit: ada.pid(unit) for unit in UNITS} == before
    ada.host.until(lambda: "configuration read again" in ada.host.journal(), "the worker has read it")


def test_without_a_runtime_directory_in_the_environment_it_is_found(ada):
    for found in ("", "/run/user/0", "/nowhere"):
        said = ada.install(XDG_RUNTIME_DIR=found)
        assert f"type: export XDG_RUNTIME_DIR=/run/user/{UID}" in said
        assert "ran systemctl --user daemon-reload" in said


def test_a_worker_without_settings_waits_and_makes_none_up(ada):
    ada.systemctl("stop", *UNITS)
    ada.sh(f"mv {ada.config} {ada.config}.away")
    try:
        ada.systemctl("start", *UNITS)
        ada.host.until(
            lambda: "waiting for" in ada.shown("kueue-worker", "StatusText"), "the worker says what it waits for"
        )
        assert ada.is_active("kueue-worker")
        assert ada.shown("kueue-server", "ConditionResult") == "no"
        assert not ada.is_active("kueue-server")
        assert not ada.exists(ada.config)
    finally:
        ada.sh(f"mv {ada.config}.away {ada.config}")
        ada.systemctl("start", *UNITS)
    ada.host.until(lambda: "connected" in ada.shown("kueue-worker", "StatusText"), "it has gone on by itself")
    assert ada.shown("kueue-worker", "NRestarts") == "0"


def test_on_a_second_host_of_the_same_home_the_server_does_not_start_and_the_worker_only_if_installed(ada):
    name = ada.host.root("uname", "-n").strip()
    own = f"{ada.units}/kueue-worker.service.d/host-elsewhere.conf"
    ada.systemctl("stop", *UNITS)
    ada.host.root("hostname", "elsewhere")
    try:
        ada.systemctl("start", *UNITS)
        assert [ada.shown(unit, "ConditionResult") for unit in UNITS] == ["no", "no"]
        with pytest.raises(AssertionError, match=rf"exit 1\s.*kueue-server.service is installed for {name}"):
            ada.install("server")
        with pytest.raises(AssertionError, match=rf"{name} and this machine share the unit"):
            ada.sh(
                f"{sys.executable} -B -m kueue_ops.install systemd worker 2>&1",
                PYTHONPATH=f"{REPOSITORY}:{REPOSITORY}/ops",
            )
        assert not ada.exists(own)
        ada.install("worker", "--start")
        assert ada.exists(own)
        assert ada.is_active("kueue-worker")
        said = ada.install("--uninstall")
        assert f"kueue-server.service stays: it is installed for {name}" in said
        assert not ada.exists(own)
        assert not ada.is_active("kueue-worker")
    finally:
        ada.host.root("hostname", name)
        ada.systemctl("start", *UNITS)
    assert all(map(ada.is_active, UNITS))
    assert ada.systemctl("is-enabled", *UNITS).split() == ["enabled", "enabled"]


def test_the_server_moves_to_another_host_when_that_is_wanted(ada):
    name = ada.host.root("uname", "-n").strip()
    ada.host.root("hostname", "elsewhere")
    try:
        said = ada.install("server", "--force")
        assert f"removed {ada.units}/kueue-server.service.d/host-{name}.conf" in said
        ada.systemctl("restart", "kueue-server")
        assert ada.is_active("kueue-server")
    finally:
        ada.host.root("hostname", name)
        ada.install("server", "--force", "--start")
    assert ada.is_active("kueue-server")
    assert not ada.exists(f"{ada.units}/kueue-server.service.d/host-elsewhere.conf")


def test_the_restart_manager_runs_confined_reloads_and_goes_again(ada):
    unit = "kueue-restart-workers"
    said = ada.install("restart-workers", "--start")
    assert f"ran systemctl --user restart {unit}.service" in said
    before = ada.pid(unit)
    assert "NoNewPrivs:\t1" in ada.host.root("cat", f"/proc/{before}/status")
    ada.systemctl("reload", unit)
    ada.host.until(lambda: ada.is_active(unit), "it has reloaded")  # it says itself when it begins and ends to
    assert ada.pid(unit) == before
    ada.install("restart-workers", "--uninstall")
    assert not ada.is_active(unit)
    assert not ada.exists(f"{ada.units}/{unit}.service")
    assert all(map(ada.is_active, UNITS))


def test_what_runs_outside_of_systemd_is_not_started_twice(ada):
    ada.systemctl("stop", "kueue-worker")
    bare = "env -i HOME=$HOME"
    ada.sh(f"setsid {bare} {ada.bin}/kueue_worker > ~/outside.log 2>&1 < /dev/null & echo $! > ~/outside")
    ada.host.until(lambda: "taken in" in ada.sh("cat ~/outside.log"), "a worker runs without a unit")
    try:
        # Neither it nor who submits has a PATH, and the job finds its programs all the same.
        number = int(ada.sh(f"{bare} {ada.bin}/kueue cmd -- sh -c 'ls / && exit 5'"))
        assert ada.ends(number)["outcome"]["code"] == 5
        with pytest.raises(AssertionError, match=r"A kueue_worker runs already outside of systemd \(pid \d+\)"):
            ada.install("worker", "--start")
        assert not ada.is_active("kueue-worker")
    finally:
        ada.sh("kill $(cat ~/outside); while kill -0 $(cat ~/outside); do sleep 0.05; done 2>&-; true")
        ada.systemctl("start", "kueue-worker")


def test_taken_away_nothing_is_left_but_the_job_goes_on(ada):
    number = ada.start("orphan")
    planned = ada.install("--uninstall", "--dry-run")
    assert "would run systemctl --user disable --now kueue-worker.service" in planned
    assert all(map(ada.is_active, UNITS))
    ada.sh(f"echo '# mine' >> {ada.units}/kueue-server.service")
    with pytest.raises(AssertionError, match=r"Kept .*kueue-server.service: it was changed"):
        ada.install("--uninstall")
    assert not any(map(ada.is_active, UNITS))
    ada.install("--uninstall", "--force")
    assert ada.sh(f"find {ada.units} -name '*kueue*'") == ""
    planned = ada.install("--start", "--dry-run")
    assert f"would write {ada.units}/kueue-worker.service (new)" in planned
    assert "would run systemctl --user enable kueue-server.service kueue-worker.service" in planned
    assert ada.sh(f"find {ada.units} -name '*kueue*'") == ""
    ada.go("orphan")
    ada.install("--start")
    assert ada.ends(number)["outcome"]["code"] == 7


def test_after_a_logout_a_lingering_users_jobs_go_on(ada):
    ada.sh("mkdir ~/jobs/lingers")
    script = f"cd ~/jobs/lingers; {UNTIL_GO}"
    number = int(ada.host.login(USER, f"{ada.bin}/kueue", "cmd", "--", "bash", "-c", script))
    ada.host.until(lambda: ada.exists("~/jobs/lingers/ready"), "it runs")
    ada.host.until(
        lambda: ada.host.root("loginctl", "show-user", USER, "-p", "State", "--value") == "lingering\n", "logged out"
    )
    ada.go("lingers")
    assert ada.ends(number)["outcome"]["code"] == 7


def test_after_a_reboot_all_is_up_again_and_the_jobs_run_a_second_time(ada):
    number = ada.start("rebooted", f"echo $KUEUE_ATTEMPT >> attempts; {UNTIL_GO}")
    ada.host.reboot()
    for unit in UNITS:
        ada.host.until(lambda unit=unit: ada.is_active(unit), f"{unit} is up")
    ada.host.until(lambda: "2" in ada.sh("cat ~/jobs/rebooted/attempts"), "it runs again")
    ada.go("rebooted")
    end = ada.ends(number)
    assert end["outcome"]["code"] == 7
    assert ada.sh("cat ~/jobs/rebooted/attempts").split() == ["1", "2"]


def test_without_lingering_all_ends_at_logout_and_the_next_worker_says_at_once_that_the_jobs_are_gone(ada):
    """The user is told so beforehand."""
    host = ada.host
    guest = Account(host, GUEST, GUEST_UID, 11300)
    said = guest.sh(f"{guest.bin}/kueue_install systemd 2>&1 || echo exit $?")
    assert "No service manager runs for you" in said
    assert f"loginctl enable-linger {GUEST}" in said
    assert said.endswith("exit 1\n")
    script = guest.script("gone", f"echo $KUEUE_ATTEMPT >> attempts; {UNTIL_GO}")
    session = (
        f"{guest.bin}/kueue_install systemd --start 2>&1; {guest.bin}/kueue cmd -- bash -c {shlex.quote(script)}; "
        f"until [ -e ~/jobs/gone/ready ]; do sleep 0.05; done"
    )
    said = host.login(GUEST, "sh", "-c", session)
    assert "Lingering is off" in said

    def manager():
        return host.root("sh", "-c", f"systemctl is-active user@{GUEST_UID}.service || :").strip()

    host.until(lambda: manager() == "inactive", "the user's manager ends", seconds=60)
    assert host.root("sh", "-c", f"pgrep -u {GUEST} || :") == ""
    # The next login starts the services by itself.
    again = "until grep -q 2 ~/jobs/gone/attempts; do sleep 0.05; done; touch ~/jobs/gone/go; "
    number = re.findall(r"^\d+$", said, re.MULTILINE)[-1]
    again += f"{guest.bin}/kueue wait-job {number}; echo code $?; {guest.bin}/kueue show-job --json {number}"
    told, _, shown = host.login(GUEST, "sh", "-c", again).partition("{")
    assert told.endswith("code 7\n")
    (job,) = json.loads("{" + shown)["jobs"]
    # The runner still said so, or was ended before it could.
    assert re.search("lost: .*(has no process of it left|ended with its machine)", job["attempts"][0]["end"])
    assert guest.sh("cat ~/jobs/gone/attempts").split() == ["1", "2"]
