"""What a waiter is told while nothing happens, against a peer on a real socket."""

from __future__ import annotations

import pytest
from peer import answering

from kueue.cli import waiting

WATCHING = {"type": "Watching", "missing": []}
BUSY = "worker w1 has 0 cpus free, 1 asked for"


@pytest.fixture(autouse=True)
def _looks_soon(monkeypatch):
    monkeypatch.setattr(waiting, "_LOOK_SECONDS", 0.05)


def ended(job, code=0):
    return {"type": "JobEnded", "id": job, "outcome": {"type": "exited", "code": code}, "exit_code": code}


def row(job, state, note=""):
    return {"id": job, "state": state, "note": note}


def lab(rows, ends):
    """A server that says nothing of its own accord before it was asked for the jobs that wait; then they end."""

    def script(talk):
        watched = None
        talk.greet()
        while True:
            for question in talk.hear():
                if question["type"] == "WatchJobs":
                    watched = question["seq"]
                    talk.say({"seq": watched, **WATCHING})
                    continue
                assert question["type"] == "ListJobs"
                assert question["limit"] == 1
                found = [one for one in rows if one["state"] in question["states"]]
                talk.say({"type": "JobList", "seq": question["seq"], "jobs": found[-1:]})
                if "pending" in question["states"]:
                    talk.say(*({"seq": watched, **end} for end in ends))

    return script


def test_a_waiter_is_told_once_why_its_job_waits(run, peers):
    done = run(peers(lab([row(4, "pending", BUSY)], [ended(4, 3)])), "wait-job", "4")
    assert (done.code, done.out) == (3, "")
    assert done.err == f"Job 4 waits: {BUSY}. `kueue explain 4` says more.\n"


def test_cmd_that_waits_is_told_as_well(run, peers):
    watching = lab([row(0, "pending", BUSY)], [ended(0)])

    def script(talk):
        hear = talk.hear

        def hear_all():
            said = hear()
            while said[0]["type"] == "Submit":
                talk.say({"type": "Submitted", "seq": said[0]["seq"], "ids": [[0, 0]]})
                said = hear()
            return said

        talk.hear = hear_all
        watching(talk)

    done = run(peers(script), "cmd", "--wait", "x")
    assert (done.code, done.out) == (0, "0\n")
    assert done.err == f"Job 0 waits: {BUSY}. `kueue explain 0` says more.\n"


def test_a_held_job_that_is_waited_for_is_told_with_the_way_to_let_it_start(run, peers):
    done = run(peers(lab([row(4, "held")], [ended(4)])), "wait-job", "4")
    assert done.err == "Job 4 waits: it is held. `kueue release 4` lets it start.\n"


def test_of_many_jobs_one_is_told_if_none_has_started(run, peers):
    rows = [row(4, "pending", BUSY), row(5, "pending", BUSY)]
    done = run(peers(lab(rows, [ended(4), ended(5)])), "wait-job", "4-5")
    assert done.err == f"No job has started yet; job 5 waits: {BUSY}. `kueue explain 5` says more.\n"


@pytest.mark.parametrize("rows", [[row(4, "running")], [row(4, "running"), row(5, "pending", BUSY)]])
def test_nothing_is_said_while_a_job_runs(run, peers, rows):
    done = run(peers(lab(rows, [ended(one["id"]) for one in rows])), "wait-job", *[str(one["id"]) for one in rows])
    assert (done.code, done.out, done.err) == (0, "", "")


def test_a_quiet_waiter_asks_and_says_nothing(run, peers):
    peer = peers(answering({"WatchJobs": [WATCHING, ended(4)]}))
    assert run(peer, "wait-job", "-q", "4").err == ""
    assert b"ListJobs" not in b"".join(frame for talk in peer.talks for frame in talk.frames)


def test_an_escape_sequence_in_a_reason_does_not_reach_the_terminal(run, peers):
    done = run(peers(lab([row(4, "pending", "directory /\x1b[2J")], [ended(4)])), "wait-job", "4")
    assert "\x1b" not in done.err
