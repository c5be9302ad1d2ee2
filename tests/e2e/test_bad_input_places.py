"""Directories that vanish under running programs, and ids without end on the command line."""

import shutil

import pytest

from tests.support.feature_lab import SMALL, FeatureLab
from tests.support.removal import remove_tree


@pytest.fixture
def lab(tmp_path):
    with FeatureLab(tmp_path) as lab:
        lab.start_server()
        yield lab


@pytest.mark.parametrize("victim", ["spool/*", "spool"])
def test_a_job_that_removes_the_spool_ends_all_the_same(lab, victim):
    lab.start_worker()
    spool = lab.folder / "state/workers/w1"
    job = lab.submit(*SMALL, "sh", "-c", f"rm -rf {spool}/{victim}; exit 3")
    assert lab.end_of(job, "failed")["return_code"] == 3
    assert lab.run(*SMALL, "true")["state"] == "succeeded"


def test_a_server_whose_state_was_removed_acknowledges_nothing_and_says_so(lab):
    assert lab.submit(*SMALL, "true") == 0
    remove_tree(lab.folder / "state/server")
    refused = lab.kueue("--patience", "1s", "cmd", *SMALL, "true")
    assert refused.returncode != 0
    assert refused.stdout == ""
    assert lab.server.wait(30) != 0
    assert "was removed or replaced" in lab.log("server")
    assert "Traceback" not in lab.log("server")


def test_a_worker_whose_state_was_removed_takes_no_job_ends_with_a_sentence_and_can_be_started_again(lab):
    worker = lab.start_worker()
    remove_tree(lab.folder / "state/workers/w1")
    job = lab.submit(*SMALL, "true")
    assert worker.wait(30) == 1
    assert "was removed or replaced while the worker w1 ran: it ends" in lab.log("w1")
    assert "Traceback" not in lab.log("w1")
    assert lab.state(job) == "pending"
    lab.start_worker()
    lab.end_of(job)


def test_a_copied_worker_is_refused_and_touches_no_job_of_the_first(lab):
    lab.start_worker()
    gate = lab.gate()
    job = lab.submit(*SMALL, *gate.command)
    lab.until(lambda: gate.begun == [job], "the job runs")
    state = lab.folder / "state"
    shutil.copytree(state / "workers", lab.folder / "copy/workers", ignore=shutil.ignore_patterns("socket"))
    (lab.folder / "copy").chmod(0o700)
    config = str(lab.folder / "w1.toml")
    copy = lab.start("kueue.worker.main", "-c", config, log="copy", KUEUE_STATE_DIR=str(lab.folder / "copy"))
    assert copy.wait(30) != 0
    assert "is a copy of another" in lab.log("copy")
    assert lab.state(job) == "running"
    gate.open()
    assert len(lab.end_of(job)["attempts"]) == 1


@pytest.mark.parametrize("verb", ["show-job", "wait-job", "log", "explain", "remove-job", "hold", "release"])
def test_a_range_without_end_is_answered_at_once(lab, verb):
    done = lab.kueue(verb, "0-99999999999", timeout=20)
    assert done.returncode == 1
    assert "not found" in done.stderr


@pytest.mark.parametrize(
    ("setting", "word"), [({"worker_name": "n" * 256}, "worker_name"), ({"resources": "gpu=5000"}, "gpu=5000")]
)
def test_a_worker_with_settings_that_no_server_takes_says_which(lab, setting, word):
    path = lab.config("odd", worker_settings=setting)
    assert lab.start("kueue.worker.main", "-c", str(path), log="odd").wait(30) != 0
    assert word in lab.log("odd")
    assert "Traceback" not in lab.log("odd")
