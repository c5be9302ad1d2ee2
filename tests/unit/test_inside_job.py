"""Whether a service may be started here: not inside of a job, with which it would be ended."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kueue.runner.tree import RLIMIT_LOCKS, tag_of

TAG = tag_of("queue", "identity", 17)
REFUSE = """
import resource, sys
from kueue import inside_job
from kueue.errors import KueueError
resource.setrlimit({limit}, ({soft}, {hard}))
try:
    inside_job.refuse("A worker", "elsewhere", dict(word.split("=") for word in sys.argv[1:]))
except KueueError as error:
    print(error, error.hint, sep="|")
"""


def said(soft, hard=-1, *environ):
    code = REFUSE.format(limit=RLIMIT_LOCKS, soft=soft, hard=hard)
    done = subprocess.run([sys.executable, "-c", code, *environ], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout.strip()


def test_a_process_with_the_mark_of_a_job_may_not_start_a_service():
    assert said(TAG, -1, "KUEUE_JOB_ID=17") == (
        "A worker cannot be started inside of a job of kueue (job 17): it would be ended with the job.|"
        "Start it outside of any job: elsewhere. Only for one that may end with the job: KUEUE_INSIDE_JOB=1."
    )


def test_the_mark_decides_and_not_the_environment():
    assert said(TAG).startswith("A worker cannot be started inside of a job of kueue: ")
    assert said(-1, -1, "KUEUE_JOB_ID=17") == ""


def test_whoever_knows_better_may():
    assert said(TAG, -1, "KUEUE_JOB_ID=17", "KUEUE_INSIDE_JOB=1") == ""
    assert said(TAG, -1, "KUEUE_INSIDE_JOB=0") != ""


@pytest.mark.parametrize(("soft", "hard"), [(1000, -1), (1 << 31, 1 << 31), (1 << 40, 1 << 40)])
def test_a_limit_that_an_administrator_has_set_is_no_mark(soft, hard):
    assert said(soft, hard) == ""
