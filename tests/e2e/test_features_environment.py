"""What a job finds: variables, directory, umask, input, priority."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.support.feature_lab import SMALL, FeatureLab
from tests.support.lab import SECRET


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with FeatureLab(tmp_path_factory.mktemp("environment")) as lab:
        lab.start_server()
        lab.start_worker("w1", job_nice=3)
        yield lab


@pytest.fixture
def lab(shared):
    yield shared
    shared.settle()


def printed(lab, *words, **more):
    job = lab.run(*words, **more)
    assert job["state"] == "succeeded", job
    return lab.output(job["id"])


def test_what_travels_is_the_submitters_and_more_on_request(lab):
    own = {
        "PATH": f"{lab.folder}/bin:{os.environ['PATH']}",
        "LC_TIME": "C",
        "VIRTUAL_ENV": "/venv",
        "FOO": "1",
        "BAR": "2",
    }
    for words, expected in (
        (("sh", "-c", "echo $PATH"), own["PATH"]),
        (("sh", "-c", "echo $LC_TIME $VIRTUAL_ENV"), "C /venv"),
        (("--env", "FOO", "sh", "-c", "echo $FOO $BAR"), "1"),
        (("--env", "FOO", "--env", "BAR=x=y", "sh", "-c", "echo $FOO $BAR"), "1 x=y"),
        (("sh", "-c", 'echo "<$FOO>"'), "<>"),
    ):
        assert printed(lab, *SMALL, *words, **own) == expected + "\n"
    missing = lab.kueue("cmd", "--env", "NOT_THERE", "true")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "NOT_THERE" in missing.stderr


def test_a_program_is_found_on_the_submitters_path(lab, tmp_path):
    tool = tmp_path / "my-tool"
    tool.write_text("#!/bin/sh\necho mine\n")
    tool.chmod(0o755)
    assert printed(lab, *SMALL, "my-tool", PATH=f"{tmp_path}:{os.environ['PATH']}") == "mine\n"


def test_a_job_is_told_what_it_got(lab):
    job = lab.run("-c", "3", "-r", "200", "-j", "2", "env")
    told = dict(line.partition("=")[::2] for line in lab.output(job["id"]).splitlines())
    assert {key: value for key, value in told.items() if key.startswith("KUEUE_")} == {
        "KUEUE_JOB_ID": str(job["id"]),
        "KUEUE_ATTEMPT": "1",
        "KUEUE_CPUS": "3",
        "KUEUE_RAM_MB": "200",
        "KUEUE_SLOTS": "2",
        "KUEUE_WORKER": "w1",
    }
    assert told["HOME"]
    assert told["USER"]
    assert told["LOGNAME"]


def test_no_job_sees_the_secret(lab):
    assert SECRET not in printed(lab, *SMALL, "env")
    script = (
        "for one in /proc/[0-9]*; do tr '\\0' ' ' < $one/cmdline; tr '\\0' ' ' < $one/environ; done 2>/dev/null; true"
    )
    assert SECRET not in printed(lab, *SMALL, "sh", "-c", script)


def test_the_directory_is_spelled_as_the_submitter_wrote_it(lab, tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    assert printed(lab, *SMALL, "sh", "-c", "echo $PWD", cwd=link, PWD=str(link)) == f"{link}\n"
    printed(lab, *SMALL, "-o", "out.txt", "echo", "x", cwd=link, PWD=str(link))
    assert (real / "out.txt").read_text() == "x\n"
    # The link may not be there on the machine that runs the job.
    job = lab.submit(*SMALL, "--hold", "sh", "-c", "echo $PWD", cwd=link, PWD=str(link))
    link.unlink()
    lab.kueue("release", str(job))
    lab.end_of(job)
    assert lab.output(job) == f"{real}\n"


def test_a_directory_name_that_is_no_text_works(lab, tmp_path):
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/odd\xff\n name")
    os.mkdir(odd)
    job = lab.run(*SMALL, "-o", "out.txt", "pwd", cwd=odd, PWD=odd)
    assert job["state"] == "succeeded"
    with open(odd + "/out.txt", "rb") as file:
        assert file.read() == os.fsencode(odd) + b"\n"


def test_a_command_that_reads_finds_the_end_of_its_input(lab):
    assert printed(lab, *SMALL, "cat", stdin="not for the job") == ""
    assert printed(lab, *SMALL, "sh", "-c", "read x || echo eof") == "eof\n"


@pytest.mark.parametrize(("mask", "mode"), [("027", 0o640), ("002", 0o664), ("077", 0o600)])
def test_files_of_a_job_get_the_submitters_umask(lab, tmp_path, mask, mode):
    words = [lab.python, "-m", "kueue.cli.main", "-c", f"{lab.folder}/lab.toml", "cmd", "--wait", *SMALL]
    done = subprocess.run(
        ["sh", "-c", f'umask {mask}; exec "$@"', "sh", *words, "-o", "out", "touch", "file"],
        cwd=tmp_path, env=lab.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("file", "out")] == [mode, mode]


def test_jobs_are_nicer_than_the_worker(lab):
    expected = os.getpriority(os.PRIO_PROCESS, lab.workers["w1"].pid) + 3
    assert printed(lab, *SMALL, "nice") == f"{expected}\n"


def test_a_job_inherits_no_descriptor_but_the_three(lab):
    listing = printed(lab, *SMALL, "ls", "/proc/self/fd").split()
    assert listing == ["0", "1", "2", "3"]  # the fourth is the listing's own
