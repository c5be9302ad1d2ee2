"""What the doctor measures: the mount table, the place of state, shells, and probes that hang."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kueue import places
from kueue.cli.doctor import file_facts, host_facts

ROOT = Path(__file__).parents[3]
TABLE = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
40 22 0:44 / /home rw shared:2 - autofs /etc/auto.home rw,fd=5
41 40 0:45 / /home rw shared:3 - nfs4 fileserver:/home rw,vers=4.2
42 22 8:2 / /data\\0401 rw - xfs /dev/mapper/big\\040disk rw
43 22 0:50 / /mnt rw - fuse.sshfs ada@host: rw
broken line
"""


@pytest.mark.parametrize(
    ("path", "fstype", "source", "mount", "network"),
    [
        ("/home/ada", "nfs4", "fileserver:/home", "/home", True),
        ("/homework", "ext4", "/dev/sda1", "/", False),
        ("/data 1/x", "xfs", "/dev/mapper/big disk", "/data 1", False),
        ("/mnt", "fuse.sshfs", "ada@host:", "/mnt", True),
    ],
)
def test_the_mount_table_says_where_a_path_comes_from(tmp_path, path, fstype, source, mount, network):
    table = tmp_path / "mountinfo"
    table.write_text(TABLE)
    facts = file_facts.mount_facts(path, str(table))
    assert facts == {"fstype": fstype, "source": source, "mount": mount, "network": network}


def test_the_place_of_state_is_the_one_that_the_programs_take_and_is_not_made(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    cases = [
        ("", {}),
        ("", {"XDG_STATE_HOME": str(tmp_path / "xdg")}),
        ("", {"XDG_STATE_HOME": "relative"}),
        (str(tmp_path / "named"), {}),
        ("~/named", {"KUEUE_STATE_DIR": str(tmp_path / "variable")}),
    ]
    for setting, environ in cases:
        before = sorted(tmp_path.rglob("*"))
        root, _ = file_facts.chosen_state(setting, environ)
        assert sorted(tmp_path.rglob("*")) == before
        assert root == places.find(setting, environ).root


def test_a_place_of_state_that_cannot_be_used_is_left_for_var_tmp_with_the_reason(tmp_path):
    (tmp_path / "kueue").write_text("")
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    root, reason = file_facts.chosen_state("", environ)
    assert root == f"/var/tmp/kueue-{os.getuid()}"
    assert reason == f"{tmp_path}/kueue is not a directory"
    there = Path(root).exists()
    assert places.find("", environ).root == root
    if not there:
        shutil.rmtree(root)


def test_a_directory_that_is_not_there_yet_is_judged_by_the_one_above_it(tmp_path):
    facts = file_facts.directory_facts(str(tmp_path / "a/b"), lambda *_, **__: None)
    assert facts["exists"] is False
    assert facts["inode"] == tmp_path.stat().st_ino
    assert facts["writable"]
    assert facts["total_mb"] > 0


STARTUP = {
    "bash": (".bashrc", "echo noise"),
    "zsh": (".zshenv", "echo noise"),
    "tcsh": (".tcshrc", "echo noise"),
    "fish": (".config/fish/config.fish", "echo noise"),
    "dash": ("", ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("shell", STARTUP)
def test_every_shell_runs_the_question_and_its_noise_is_heard(tmp_path, monkeypatch, shell):
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    monkeypatch.setenv("HOME", str(tmp_path))
    facts = host_facts.shell_facts(lambda *_, **__: None, path)
    assert facts["reached"]
    assert facts["noise"] == 0, facts["said"]
    assert facts["search_path"].endswith("/usr/games") or "/usr/bin" in facts["search_path"]
    name, text = STARTUP[shell]
    if name:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
        facts = host_facts.shell_facts(lambda *_, **__: None, path)
        assert facts["reached"]
        assert facts["noise"] >= len("noise")
        assert "noise" in facts["said"]


@pytest.mark.slow
@pytest.mark.parametrize("shell", STARTUP)
def test_every_shell_finds_the_program_in_its_place_without_a_path(tmp_path, monkeypatch, shell):
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert host_facts.shell_facts(lambda *_, **__: None, path)["placed_worker"] == ""
    program = tmp_path / ".local/share/kueue/bin/kueue_worker"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    assert host_facts.shell_facts(lambda *_, **__: None, path)["placed_worker"] == str(program)


def test_a_login_shell_that_refuses_is_not_reached():
    path = shutil.which("false")
    facts = host_facts.shell_facts(lambda *_, **__: None, path)
    assert (facts["reached"], facts["code"]) == (False, 1)
    facts = host_facts.shell_facts(lambda *_, **__: None, "/no/such/shell")
    assert facts["said"] == "it is not there"


def probing(script: str) -> str:
    """What a program that probes prints; of its own, since probes are forked and tests may have threads."""
    begin = "import os, time, subprocess\nfrom kueue.cli.doctor.probes import Probes, run\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", begin + textwrap.dedent(script)],
        capture_output=True, text=True, check=True, timeout=60, cwd=ROOT,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout


def test_a_probe_that_hangs_is_ended_with_all_it_started_and_what_it_knew_is_kept():
    out = probing(
        """
        def hang(note):
            child = subprocess.Popen(["sleep", "300"])
            note("sleeping", child=child.pid)
            time.sleep(300)
        with Probes() as probes:
            probes.start("quick", 30, lambda note: {"x": 1})
            probes.start("hang", 1.5, hang)
            quick = probes.answer("quick")
            answer = probes.answer("hang")
        child = answer.facts["child"]
        for _ in range(500):
            try:
                with open(f"/proc/{child}/stat") as file:
                    ended = file.read().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                ended = True
            if ended:
                break
            time.sleep(0.02)
        print(quick.facts, quick.trouble == "", answer.trouble, answer.stage, ended)
        """
    )
    assert out == "{'x': 1} True does not answer sleeping True\n"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user without an account")
def test_an_account_that_nobody_knows_is_said_to_be_one():
    out = probing(
        """
        from kueue.cli.doctor import host_facts
        os.setuid(54321)
        with Probes() as probes:
            probes.start("shell", 30, host_facts.shell_facts)
            probes.start("linger", 30, host_facts.linger_facts)
            print(probes.answer("shell").trouble)
            print(probes.answer("linger").trouble)
        """
    )
    assert out.count("no account has the number 54321: is the directory service") == 2


@pytest.mark.skipif(os.getuid() != 0, reason="limits of processes do not bind root, so only root can try them safely")
def test_where_no_process_or_file_can_be_had_each_finding_says_so():
    out = probing(
        """
        import resource
        from kueue.cli.doctor.probes import Probes
        def measured():
            with Probes() as probes:
                probes.start("a", 30, lambda note: {})
                probes.start("b", 30, lambda note: {})
                return probes.answer("a"), probes.answer("b")
        files = len(os.listdir("/proc/self/fd")) + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, 1000))
        print(*measured(), sep="\\n")
        resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 1000))
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        os.setuid(54321)
        print(*measured(), sep="\\n")
        """
    )
    lines = out.splitlines()
    assert len(lines) == 4
    assert "no more files can be opened" in lines[1]
    assert all("this account may have no more processes" in line for line in lines[2:])


def test_a_probe_that_fails_or_dies_says_how():
    out = probing(
        """
        def fail(note):
            raise OSError(5, "Input/output error")
        def die(note):
            note("dying", x=1)
            os.kill(os.getpid(), 9)
        with Probes() as probes:
            probes.start("fail", 30, fail)
            probes.start("die", 30, die)
            print(probes.answer("fail").trouble)
            print(probes.answer("die"))
        """
    )
    assert out.splitlines() == [
        "fails: OSError: [Errno 5] Input/output error",
        "Answer(facts={'x': 1}, trouble='ended without an answer', stage='dying')",
    ]


def test_programs_that_probes_ask_are_awaited_no_longer_than_their_limit():
    out = probing(
        """
        print(run(["sh", "-c", "echo out; echo err >&2; exit 3"], 30))
        begin = time.monotonic()
        print(run(["sleep", "300"], 0.2), time.monotonic() - begin < 20, run(["no-such-program"], 1))
        """
    )
    assert out.splitlines() == ["Said(code=3, out='out\\n', err='err\\n')", "None True None"]
