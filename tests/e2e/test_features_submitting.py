"""A command goes in front of a command: what is printed, where and how the job runs, and how much it takes."""

from __future__ import annotations

import os

import pytest

from tests.support.feature_lab import SMALL, FeatureLab


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with FeatureLab(tmp_path_factory.mktemp("submitting")) as lab:
        lab.start_server()
        lab.start_worker("w1")  # 16 cores, 64000 MB, 10 slots
        yield lab


@pytest.fixture
def lab(shared):
    yield shared
    shared.settle()


def counted(lab, jobs, state):
    return lab.states(jobs).count(state)


def test_a_prefix_runs_the_command_once_and_prints_the_id_alone(tmp_path):
    with FeatureLab(tmp_path) as lab:
        lab.start_server()
        lab.start_worker("w1")
        script = tmp_path / "my_script.py"
        script.write_text("#!/bin/sh\necho ran >> ran\n")
        script.chmod(0o755)
        done = lab.kueue("cmd", "./my_script.py")
        assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
        lab.end_of(0)
        assert (tmp_path / "ran").read_text() == "ran\n"
        assert lab.kueue("cmd", "./my_script.py").stdout == "1\n"
        lab.end_of(1)


def test_a_job_runs_in_the_directory_of_its_submitter(lab, tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    job = lab.run(*SMALL, "/bin/pwd", cwd=link)
    assert job["cwd"] == str(real)
    assert lab.output(job["id"]) == f"{real}\n"


def test_no_shell_touches_the_arguments(lab):
    job = lab.run(*SMALL, "echo", "$HOME", "*", "a  b", "`id`")
    assert lab.output(job["id"]) == "$HOME * a  b `id`\n"


def test_all_after_the_first_word_belongs_to_the_command(lab):
    gate = lab.gate()
    done = lab.kueue("cmd", *SMALL, *gate.command, "--wait", "-c", "--json")
    assert done.returncode == 0  # it did not wait: nobody has opened the gate
    job = int(done.stdout)
    assert lab.job(job)["argv"] == [*gate.command, "--wait", "-c", "--json"]


def test_two_dashes_end_the_options(lab):
    job = lab.run(*SMALL, "--", "printf", "%s", "-x")
    assert job["argv"] == ["printf", "%s", "-x"]
    assert lab.output(job["id"]) == "-x"


@pytest.mark.parametrize(
    ("options", "fit"),
    [
        (("-c", "9", "-r", "1"), 1),
        (("--cpus", "4", "--ram-mb", "1"), 4),
        (("-c", "1", "-r", "40000"), 1),
        (("-c", "1", "--ram-mb", "16000"), 4),
        (("-c", "1", "-r", "1", "-j", "4"), 2),
        (("-c", "1", "-r", "1", "--job-slots", "5"), 2),
    ],
)
def test_a_job_takes_the_cores_memory_and_slots_it_asked_for(lab, options, fit):
    gate = lab.gate()
    jobs = [lab.submit(*options, *gate.command) for _ in range(fit + 1)]
    lab.until(lambda: len(gate.begun) == fit, f"{fit} jobs run")
    lab.remains(lambda: counted(lab, jobs, "running") <= fit, 0.3)
    lab.until(lambda: lab.states(jobs) == ["running"] * fit + ["pending"], "the server knows it too")
    gate.open()
    lab.until(lambda: len(gate.begun) == fit + 1, "the last one takes the room")
    gate.open()
    lab.end_of(jobs[-1])


def test_without_sizes_a_job_wishes_for_the_defaults(lab):
    job = lab.run("true")
    assert (job["cores"], job["ram_mb"], job["cores_are_default"], job["ram_is_default"]) == (8, 8192, True, True)
    shown = lab.kueue("show-job", str(job["id"])).stdout
    assert "required job slots: 1\nrequired CPU cores: 8\nrequired RAM: 8192 megabytes\n" in shown


def test_the_defaults_come_from_the_submitters_settings(lab):
    path = lab.config("own", client_settings={"job_default_cpus": 3, "job_default_ram_mb": 300})
    done = lab.kueue("-c", str(path), "cmd", "true")
    assert done.returncode == 0, done.stderr
    job = lab.end_of(int(done.stdout))
    assert (job["cores"], job["ram_mb"], job["taken_cores"], job["taken_ram_mb"]) == (3, 300, 3, 300)


def test_each_line_becomes_a_job(lab):
    done = lab.kueue("cmd", *SMALL, "--each-line", "-", "echo", "<{}>", stdin="a b\n\n$c\n")
    assert done.returncode == 0, done.stderr
    ids = [row["id"] for row in lab.rows()][-2:]
    for job in ids:
        lab.end_of(job)
    assert [lab.output(job) for job in ids] == ["<a b>\n", "<$c>\n"]


def test_each_lines_job_writes_a_file_of_its_own(lab, tmp_path):
    words = ("cmd", *SMALL, "--each-line", "-", "--name", "of {}")
    refused = lab.kueue(*words, "-o", "out.txt", "echo", "{}", stdin="a\nb c\n", cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "lines 1 and 2 would both write out.txt" in refused.stderr
    done = lab.kueue(*words, "-o", "out-{}.txt", "-e", "null", "echo", "{}", stdin="a\nb c\n", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ids = [int(word) for word in done.stdout.split()]
    assert [lab.end_of(job)["name"] for job in ids] == ["of a", "of b c"]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"out-a.txt": "a\n", "out-b c.txt": "b c\n"}


def test_a_job_for_which_no_machine_has_a_gpu_is_told_how_one_is_named(lab):
    done = lab.kueue("cmd", "--refuse-impossible", *SMALL, "--gpus", "1", "true")
    assert done.returncode == 1
    assert 'resources = "gpu=1"' in done.stderr
    assert "waits" not in done.stderr


def test_a_held_job_waits_for_its_release(lab):
    job = lab.submit(*SMALL, "--hold", "true")
    assert lab.state(job) == "held"
    lab.run(*SMALL, "true")  # others pass it
    assert lab.state(job) == "held"
    assert lab.kueue("release", str(job)).returncode == 0
    lab.end_of(job)


def test_a_time_limit_ends_a_job_with_the_code_of_timeout(lab):
    done = lab.kueue("cmd", "--wait", *SMALL, "--timeout", "0.5s", "sleep", "600")
    assert done.returncode == 124
    job = lab.rows()[-1]
    assert job["outcome"]["type"] == "timed_out"
    assert "timed out after 0.5 s" in lab.kueue("show-job", str(job["id"])).stdout


def test_a_name_is_shown(lab):
    job = lab.run(*SMALL, "--name", "night run", "true")
    assert f"name: {job['name']}\n" in lab.kueue("show-job", str(job["id"])).stdout
    assert "[night run] true" in lab.kueue("list-jobs", str(job["id"])).stdout


def test_a_job_that_fits_nowhere_is_told_of_at_submission_and_can_be_refused(lab):
    done = lab.kueue("cmd", "-c", "64", "-r", "1", "true")
    assert done.returncode == 0
    assert done.stdout.strip().isdigit()
    assert "64" in done.stderr
    job = done.stdout.strip()
    assert "64" in lab.kueue("list-jobs", job).stdout.splitlines()[1].partition("pending since")[2]
    assert "64" in lab.kueue("explain", job).stdout
    before = len(lab.rows())
    refused = lab.kueue("cmd", "--refuse-impossible", "-c", "64", "-r", "1", "true")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "Error: Job rejected by server: " in refused.stderr
    assert len(lab.rows()) == before


@pytest.mark.parametrize("words", [(), ("--",), ("--", ""), ("",)])
def test_an_empty_command_is_a_usage_error(lab, words):
    before = len(lab.rows())
    done = lab.kueue("cmd", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr
    assert len(lab.rows()) == before


def test_long_arguments_travel_and_impossible_ones_are_refused(lab):
    long = "x" * 120_000
    job = lab.run(*SMALL, "echo", long)
    assert lab.output(job["id"]) == long + "\n"
    before = len(lab.rows())
    # A command line of this length cannot be typed here either; a file of lines can hold it.
    (lab.folder / "lines").write_text("y" * 2_000_000 + "\n")
    done = lab.kueue("cmd", "--each-line", "lines", "echo", "{}")
    assert (done.returncode, done.stdout) == (1, "")
    assert "2000000 bytes" in done.stderr
    assert len(lab.rows()) == before


def test_words_that_are_no_text_reach_the_job_unchanged(lab):
    job = lab.run(*SMALL, "printf", "%s", "Gr\udcfc\udcdfe ☃")
    raw = lab.kueue("log", "--raw", str(job["id"])).stdout
    assert os.fsencode(raw) == b"Gr\xfc\xdfe \xe2\x98\x83"
