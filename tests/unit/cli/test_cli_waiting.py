"""What a waiter is told while nothing happens, against a peer on a real socket."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from peer import answering

from kueue.cli import job_text, waiting
from kueue.core.placement import Obstacle

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
    waits, ended_so = done.err.splitlines()
    assert waits == f"Job 4 waits: {BUSY}. `kueue explain 4` says more."
    assert ended_so.startswith("Job 4 exited with code 3. ")


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


def test_of_many_jobs_one_is_told_if_none_runs(run, peers):
    rows = [row(4, "pending", BUSY), row(5, "pending", BUSY)]
    done = run(peers(lab(rows, [ended(4), ended(5)])), "wait-job", "4-5")
    assert done.err == f"None of the jobs runs now; job 5 waits: {BUSY}. `kueue explain 5` says more.\n"


@pytest.mark.parametrize(
    ("held", "said"),
    [([6], "Job 6 waits: it is held. "), ([6, 7], "None of the jobs runs now; job 7 waits: it is held. ")],
)
def test_those_that_have_ended_are_not_said_to_wait(run, peers, held, said):
    def script(talk):
        talk.greet()
        watch = talk.hear()[0]["seq"]
        talk.say({"seq": watch, **WATCHING, "missing": [[3, 3]]}, *({"seq": watch, **ended(job)} for job in (4, 5)))
        for question in [*talk.hear()]:
            rows = [row(job, "held") for job in held] if "held" in question["states"] else []
            talk.say({"type": "JobList", "seq": question["seq"], "jobs": rows[-1:]})
        talk.say(*({"seq": watch, **ended(job)} for job in held))
        talk.hear()

    done = run(peers(script), "wait-job", "3-5", *map(str, held))
    assert done.err.splitlines()[1].startswith(said)


@pytest.mark.parametrize(
    ("asked", "over", "named"),
    [
        ([(3, 5)], [], "the jobs go on. `kueue wait-job 3-5` waits again, `kueue remove-job --kill 3-5` ends them."),
        ([(3, 5)], [(4, 4), (3, 3)], "the job goes on. `kueue wait-job 5` waits again, `kueue remove-job --kill 5`"),
        ([(3, 9)], [(4, 4), (7, 7)], "`kueue wait-job 3,5-6,8-9` waits again"),
        ([(0, 99)], [(job, job) for job in range(0, 99, 2)], "`kueue wait-job 1-99` waits again"),
    ],
)
def test_after_an_interrupt_what_is_left_is_named(pty_screen, asked, over, named):
    screen = pty_screen[0]()
    waiting.tell_how_to_go_on(SimpleNamespace(screen=screen), asked, over)
    assert named in screen._err.getvalue()


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


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        ({"type": "exited", "code": 3}, "exited with code 3."),
        ({"type": "signaled", "signal": 9}, "was ended by signal 9 (SIGKILL)."),
        ({"type": "signaled", "signal": 99}, "was ended by signal 99."),
        ({"type": "timed_out", "after_seconds": 10.0}, "was stopped after its time limit of 10 s."),
        ({"type": "canceled"}, "was canceled."),
        ({"type": "lost", "reason": "w1, w2"}, "was lost: w1, w2."),
        (
            {"type": "not_started", "reason": "./nosuch.sh: No such file or directory", "cause": "not_found"},
            "could not start: ./nosuch.sh: No such file or directory.",
        ),
    ],
)
@pytest.mark.parametrize("verb", ["cmd", "wait-job"])
def test_a_waiter_is_told_on_stderr_how_a_job_ended_that_did_not_succeed(run, peers, verb, outcome, said):
    end = {"type": "JobEnded", "id": 7, "outcome": outcome, "return_code": -1, "exit_code": 9}
    submitted = {"type": "Submitted", "ids": [[7, 7]]}
    words = ("cmd", "--wait", "x") if verb == "cmd" else ("wait-job", "7")
    done = run(peers(answering({"Submit": submitted, "WatchJobs": [WATCHING, end]})), *words)
    assert done.err.startswith(f"Job 7 {said} `kueue ")
    assert done.err.count("\n") == 1
    assert done.out == ("-1\n" if verb == "cmd" and outcome["type"] != "canceled" else "")
    quiet = run(peers(answering({"Submit": submitted, "WatchJobs": [WATCHING, end]}), "2.sock"),
        words[0], "-q", *words[1:])  # fmt: skip
    assert (quiet.out, quiet.err) == (done.out, "")


def test_a_command_line_given_as_one_word_is_told_with_the_way_to_run_it(run, peers):
    outcome = {"type": "not_started", "reason": "echo it's: command not found", "cause": "not_found"}
    end = {"type": "JobEnded", "id": 7, "outcome": outcome, "return_code": -43, "exit_code": 127}
    done = run(peers(answering({"WatchJobs": [WATCHING, end]})), "wait-job", "7")
    hint = done.err.splitlines()[1]
    assert hint == """Hint: 'echo it's' was taken as one word; use a shell: sh -c 'echo it'"'"'s'"""


def test_of_very_many_bad_ends_only_the_first_are_told_one_by_one(run, peers):
    done = run(peers(answering({"WatchJobs": [WATCHING, *(ended(job, 1) for job in range(25))]})), "wait-job", "0-24")
    assert done.err.count("exited with code 1") == 10
    assert done.err.splitlines()[-1] == "15 more did not end well: `kueue list-jobs --failed --canceled`."


@pytest.mark.parametrize(("what", "advice"), [("cpus", "-c 0"), ("MB of memory", "-r N")])
def test_who_waits_for_the_work_of_others_is_told_what_to_do(run, peers, what, advice):
    sentence = Obstacle("busy", what, 1, 0, others=8, total=8).sentence()
    assert job_text.OTHER_WORK in sentence
    done = run(peers(lab([row(4, "pending", f"worker w1 {sentence}")], [ended(4)])), "wait-job", "4")
    _, hint = done.err.splitlines()
    assert advice in hint
    assert "dynamic_check_free_resources = false" in hint
    answer = {"type": "Explanation", "id": 4, "verdict": f"worker w1 {sentence}", "workers": [], "counters": []}
    said = run(peers(answering({"ExplainJob": answer}), "2.sock"), "explain", "4").out
    assert "what to do:\n" in said
    assert advice in said
