"""The upgrade of a laboratory of three real hosts, as the manual has it: stop the restart tool, stop the server, install,
start the server, start the restart tool, which renews one worker after the other. Running jobs notice nothing."""

import base64
import re
import time
from itertools import pairwise

import pytest

from tests.lab.cluster import Cluster, NoHost, install
from tests.lab.department import Department
from tests.support import wheel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.xdist_group("three hosts")]

OLDER, NEWER = "7.0.1", "7.0.2"
JOBS = 20


@pytest.fixture
def lab(tmp_path):
    try:
        install()
        cluster = Cluster(tmp_path)
    except NoHost as reason:
        pytest.skip(f"no hosts of its own with systemd and sshd: {reason}")
    try:
        yield Department(cluster, wheel.build(_folder(tmp_path, "older"), OLDER))
    finally:
        cluster.close()


def _folder(parent, name):
    path = parent / name
    path.mkdir()
    return path


def test_all_workers_are_new_and_all_jobs_end_as_if_nothing_had_been(lab, tmp_path):
    newer = wheel.build(_folder(tmp_path, "newer"), NEWER)
    before = lab.all_up()
    assert {row["version"] for row in lab.workers().values()} == {OLDER}
    jobs = lab.start_jobs(JOBS)
    begun = sorted(lab.begun())
    assert {one.worker for one in begun} == set(lab.names), "all hosts have a part in it"

    lab.stop_tool()
    lab.systemctl("stop", "kueue-server")
    lab.install(newer)
    lab.systemctl("start", "kueue-server")
    lab.until(lambda: set(lab.workers()) == set(lab.names), "the old workers serve the new server")
    assert {name: lab.worker(name) for name in lab.names} == before
    start = time.time()
    lab.start_tool()

    def are_new():
        found = lab.workers()
        return set(found) == set(lab.names) and {row["version"] for row in found.values()} == {NEWER}

    end = lab.until(are_new, "all workers are new", seconds=150)
    print("all three renewed after", f"{end - start:.2f} s")

    def renewals():
        return [look for look in lab.looks(start) if "its worker was renewed" in look.text]

    lab.until(lambda: len(renewals()) == 3, "the tool has said so of all three")
    looks, renewed = lab.looks(start), renewals()
    assert sorted(look.host for look in renewed) == lab.names
    # The next one goes only when the server sees the one before it.
    for sooner, later in pairwise(renewed):
        begin = max(look.at for look in looks if look.host == later.host and look.text.endswith("It is renewed."))
        assert sooner.at < begin < later.at
        assert any(look.host == sooner.host and sooner.at < look.at <= begin for look in looks)

    for one in begun:
        lab.cluster[one.worker].root("test", "-d", f"/proc/{one.pid}")
    extra = lab.kueue("cmd", "--wait", "-c", "1", "-r", "64", "--", "true").strip()
    assert extra == "0"
    for row in lab.finish(jobs):
        assert row["outcome"] == {"type": "exited", "code": jobs[row["id"]]}
        assert [(one["number"], one["end"]) for one in row["attempts"]] == [
            (1, f"exited with code {jobs[row['id']]}")
        ], row
        assert base64.b64decode(row["output"]["stdout"]["head_b64"]) == b"before\nafter\n"
    assert sorted(lab.begun()) == begun
    assert lab.ended() == sorted(jobs)
    assert not re.search("Traceback", lab.told())
