"""Every listing and page, held against texts written by hand in tests/golden/cli."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from peer import answering
from samples import COUNTS, FINISHED, JOBS, MAKE, NOON, WORKERS, job

from kueue.model import Canceled, Payload, Raw, Request, TimedOut
from kueue.protocol.messages import AttemptRow, ResourceRow

GOLDEN = Path(__file__).parents[2] / "golden" / "cli"


def wire(value):
    return json.loads(msgspec.json.encode(value))


def golden(name):
    return (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


def listing(jobs=JOBS, counts=COUNTS, average=20, eta=20):
    return {
        "type": "JobList",
        "jobs": wire(jobs),
        "counts": wire(counts),
        "average_seconds": average,
        "eta_seconds": eta,
    }


def details(*jobs, missing=()):
    return {"type": "JobDetails", "jobs": wire(jobs), "missing": wire(missing)}


@pytest.mark.parametrize("columns", [None, 110, 80, 1])
def test_list_jobs(run, peers, columns):
    done = run(peers(answering({"ListJobs": listing()})), "list-jobs", columns=columns)
    assert done.code == 0
    assert done.out == golden(f"list_jobs_{columns or 'plain'}")
    assert done.err == ""


def test_list_jobs_without_jobs_prints_the_summary_alone(run, peers):
    peer = peers(answering({"ListJobs": listing((), (("pending", 0),), 0, 0)}))
    assert run(peer, "list-jobs").out == golden("list_jobs_empty")
    wide = run(peer, "list-jobs", columns=70).out.splitlines()
    assert [len(line) for line in wide] == [70, 70]


def test_list_jobs_says_what_stands_beside_a_state(run, peers):
    jobs = (
        job(0, ["a"], "pending", note="no worker has 64 cores"),
        job(1, ["b"], "held"),
        job(2, ["c"], "offered", offered_wall=NOON - 86400),
        job(3, ["d"], "running", worker="r4", started_wall=NOON + 5, note="worker r4 silent since 14:02"),
        job(4, ["e"], "running", worker="r4", started_wall=NOON - 5, stopping=True),
        job(5, ["f"], "canceled", worker="r4", ended_wall=NOON - 86400 * 60, outcome=Canceled()),
        job(6, ["g"], "failed", worker="r4", return_code=-48, outcome=TimedOut(5.0)),
    )
    counts = (("pending", 1), ("held", 1), ("offered", 1), ("running", 2), ("canceled", 1), ("failed", 1))
    done = run(peers(answering({"ListJobs": listing(jobs, counts)})), "list-jobs")
    assert done.out == golden("list_jobs_states")


def test_list_jobs_shows_odd_names_without_harm(run, peers):
    jobs = (
        job(0, [], "pending", payload=Payload(("echo", "Grüße ☃", "\x1b[2J\n"), name="日本\x07"), cwd="/tmp/Grüße"),
        job(1, [], "pending", payload=Payload((Raw("b2v/b2s="),)), cwd=Raw("L3RtcC//")),
    )
    peer = peers(answering({"ListJobs": listing(jobs, (("pending", 2),))}))
    assert run(peer, "list-jobs").out == golden("list_jobs_odd")
    assert "\x1b" not in run(peer, "list-jobs", columns=40).out
    # A terminal that knows ASCII alone still gets every line.
    assert len(run(peer, "list-jobs", encoding="ascii").out.splitlines()) == 5


def test_list_jobs_shows_what_a_wish_took(run, peers):
    jobs = (job(0, ["a"], "running", started_wall=NOON, worker="r4", taken_cores=4, taken_ram_mb=3000),)
    out = run(peers(answering({"ListJobs": listing(jobs)})), "list-jobs").out
    assert "|  4 x | 3000 MB |" in out


def test_list_jobs_asks_for_what_was_chosen(run, peers):
    peer = peers(answering({"ListJobs": listing(())}))
    run(peer, "list-jobs", "-f", "-p", "-n", "5", "3-7")
    (question,) = json.loads(peer.talks[0].frames[1][4:])
    assert question["states"] == ["failed", "held", "pending"]
    assert question["limit"] == 5
    assert question["ids"] == [[3, 7]]


def test_list_jobs_for_a_pipe_asks_for_the_996_most_recent(run, peers):
    peer = peers(answering({"ListJobs": listing(())}))
    run(peer, "list-jobs")
    assert json.loads(peer.talks[0].frames[1][4:])[0]["limit"] == 996


def test_list_jobs_for_a_pipe_says_when_it_leaves_jobs_out(run, peers):
    jobs = tuple(job(number, ["a"], "pending") for number in range(996))
    peer = peers(answering({"ListJobs": listing(jobs, (("pending", 1000), ("failed", 200)))}))
    done = run(peer, "list-jobs")
    assert done.out.count("pending since") == 996
    assert done.err == "996 of 1200 jobs are shown; -n N shows more.\n"
    assert run(peer, "list-jobs", "-p").err == "996 of 1000 jobs are shown; -n N shows more.\n"
    assert run(peer, "list-jobs", "-n", "996").err == ""


@pytest.mark.parametrize("words", [["--json"], ["-q"], ["-q", "--failed"]])
def test_list_jobs_gives_all_jobs_to_programs(run, peers, words):
    peer = peers(answering({"ListJobs": listing(())}))
    run(peer, "list-jobs", *words)
    run(peer, "list-jobs", *words, "-n", "5")
    assert [json.loads(sent[4:])[0]["limit"] for sent in peer.talks[0].frames[1:]] == [None]
    assert [json.loads(sent[4:])[0]["limit"] for sent in peer.talks[1].frames[1:]] == [5]


def test_list_jobs_quiet_prints_ids(run, peers):
    assert run(peers(answering({"ListJobs": listing()})), "list-jobs", "-q").out == "0\n1\n2\n3\n"


def test_list_jobs_json_is_stable(run, peers):
    out = run(peers(answering({"ListJobs": listing((MAKE,))})), "list-jobs", "--json").out
    assert json.loads(out) == json.loads(golden("list_jobs_json"))


def test_list_jobs_puts_the_parts_of_a_long_answer_together(run, peers):
    parts = [
        {**listing(JOBS[:2], ()), "end": False},
        {**listing(JOBS[2:]), "end": True},
    ]
    assert run(peers(answering({"ListJobs": parts})), "list-jobs").out == golden("list_jobs_plain")


def test_show_job_of_a_finished_job(run, peers):
    done = run(peers(answering({"ShowJobs": details(FINISHED)})), "show-job", "7")
    assert done.out == golden("show_job_finished")
    assert done.code == 0


def _shown(state, **more):
    terms, attempts = more.pop("terms", FINISHED.terms), more.pop("attempts", ())
    waits, comment = more.pop("waits", ()), more.pop("comment", "")
    row = job(7, ["sleep", "600"], state, issued_wall=NOON - 60, **more)
    return msgspec.structs.replace(
        FINISHED, row=row, terms=terms, attempts=attempts, waits=waits, comment=comment, end=None
    )


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("pending", _shown("pending", waits=("no worker has 64 cores", "all 3 genus are in use"))),
        ("held", _shown("held", payload=Payload(("sleep", "600"), name="nap"))),
        ("offered", _shown("offered", offered_wall=NOON, worker="ralab04")),
        (
            "canceled",
            _shown("canceled", ended_wall=NOON, outcome=Canceled(), comment="Job killed!", worker="ralab04"),
        ),
        (
            "failed",
            _shown(
                "failed",
                started_wall=NOON - 30,
                ended_wall=NOON,
                run_seconds=30.9,
                worker="rax11",
                return_code=2,
                comment="Job finished orderly.",
                request=Request(cores=8, ram_mb=8192, cores_are_wish=True, ram_is_wish=True, named=(("gpu", 2),)),
                taken_cores=4,
                taken_ram_mb=8192,
                terms=msgspec.structs.replace(
                    FINISHED.terms, timeout_seconds=90.0, max_attempts=5, on_lost="wait", keep_background=True
                ),
                attempts=(
                    AttemptRow(
                        number=1,
                        offer=3,
                        worker="ralab04",
                        offered_wall=NOON - 50,
                        started_wall=NOON - 50,
                        end="lost: given away after ralab04 was silent",
                    ),
                    AttemptRow(number=None, offer=4, worker="r5", offered_wall=NOON - 40, end="declined: no room"),
                    AttemptRow(number=2, offer=5, worker="rax11", offered_wall=NOON - 31, started_wall=NOON - 30),
                ),
            ),
        ),
    ],
)
def test_show_job_by_state(run, peers, name, detail):
    done = run(peers(answering({"ShowJobs": details(detail)})), "show-job", "7")
    assert done.out == golden(f"show_job_{name}")


def test_show_job_of_a_killed_job_says_where_and_how_long_it_ran(run, peers):
    detail = _shown("canceled", started_wall=NOON - 30, ended_wall=NOON, run_seconds=30.2, worker="ralab04",
        outcome=Canceled(), comment="Job killed!")  # fmt: skip
    done = run(peers(answering({"ShowJobs": details(detail)})), "show-job", "7")
    assert (
        "job status: canceled\n   issued on: today 11:59:00\n   started on: today 11:59:30\n"
        "   canceled on: today 12:00:00\n   executed on: ralab04\n   runtime: 0h:00m:30s\n   comment: Job killed!\n"
    ) in done.out


def test_show_job_shows_where_an_argument_ends(run, peers):
    words = ("sh", "-c", "echo a  b", "", "it's", "new\nline", "plain")
    detail = _shown("pending", payload=Payload(words))
    done = run(peers(answering({"ShowJobs": details(detail)})), "show-job", "7")
    assert """command: sh -c 'echo a  b' '' 'it'"'"'s' 'new\\nline' plain\n""" in done.out


def test_show_job_of_a_running_job_shows_the_output_so_far(run, peers):
    def read(question):
        data = "aGFsZiBhIGxpbmU=" if question["stream"] == "stdout" else ""
        return [{"type": "Output", "offset": 0, "data": data}]

    running = _shown("running", started_wall=NOON - 30, worker="ralab04")
    done = run(peers(answering({"ShowJobs": details(running), "ReadOutput": read})), "show-job", "7")
    assert done.out == golden("show_job_running")


def test_show_job_of_an_unknown_job_says_so_on_stderr_and_fails(run, peers):
    peer = peers(answering({"ShowJobs": details(missing=((7, 7),))}))
    done = run(peer, "show-job", "7")
    assert (done.code, done.out, done.err) == (1, "", "Job not found!\n")
    peer = peers(answering({"ShowJobs": details(FINISHED, missing=((8, 9),))}), "two.sock")
    done = run(peer, "show-job", "7-9")
    assert (done.code, done.err) == (1, "Job not found! (ID=8-9)\n")
    assert done.out == golden("show_job_finished")


def test_show_job_json_holds_all_that_is_known(run, peers):
    done = run(peers(answering({"ShowJobs": details(FINISHED)})), "show-job", "--json", "7")
    (shown,) = json.loads(done.out)["jobs"]
    assert shown["id"] == 7
    assert shown["output"]["stdout"] == {
        "size": 6,
        "head_b64": "aGVsbG8K",
        "tail_b64": "",
        "redirected": None,
        "discarded": False,
    }


@pytest.mark.parametrize("columns", [None, 100, 1])
def test_list_workers(run, peers, columns):
    peer = peers(answering({"ListWorkers": {"type": "WorkerList", "workers": wire(WORKERS)}}))
    assert run(peer, "list-workers", columns=columns).out == golden(f"list_workers_{columns or 'plain'}")


def test_list_workers_without_workers_says_so(run, peers):
    peer = peers(answering({"ListWorkers": {"type": "WorkerList", "workers": []}}))
    assert run(peer, "list-workers").out == "No workers registered on server!\n"


def test_list_workers_json_names_every_field(run, peers):
    peer = peers(answering({"ListWorkers": {"type": "WorkerList", "workers": wire(WORKERS[:1])}}))
    assert json.loads(run(peer, "list-workers", "--json").out) == json.loads(golden("list_workers_json"))


def test_show_worker(run, peers):
    peer = peers(answering({"ListWorkers": {"type": "WorkerList", "workers": wire(WORKERS[:1])}}))
    assert run(peer, "show-worker", "0").out == golden("show_worker")


def test_show_worker_of_an_unknown_worker_fails(run, peers):
    peer = peers(answering({"ListWorkers": {"type": "WorkerList", "workers": [], "missing": [[9, 9]]}}))
    done = run(peer, "show-worker", "9")
    assert (done.code, done.out, done.err) == (1, "", "Worker not found!\n")


def test_list_resources(run, peers):
    rows = (ResourceRow(name="genus", used=1, total=3), ResourceRow(name="primelib", used=4, total=31))
    peer = peers(answering({"ListResources": {"type": "ResourceList", "resources": wire(rows)}}))
    assert run(peer, "list-resources").out == golden("list_resources")
    assert run(peer, "list-resources", "-q").out == "genus\nprimelib\n"
    assert json.loads(run(peer, "list-resources", "--json").out) == {"resources": wire(rows)}


def test_list_resources_without_any_says_so(run, peers):
    peer = peers(answering({"ListResources": {"type": "ResourceList", "resources": []}}))
    assert run(peer, "list-resources").out == "No resources configured on the server.\n"


def test_explain(run, peers):
    answer = {
        "type": "Explanation",
        "id": 7,
        "verdict": "Job 7 waits: no worker has room for 8 cores.",
        "workers": [["ralab04", False, "2 of 32 cores are free"], ["r5", True, ""]],
        "counters": [["genus", False, "3 of 3 are in use"]],
    }
    peer = peers(answering({"ExplainJob": answer}))
    assert run(peer, "explain", "7").out == golden("explain")


def test_colours_follow_states_on_a_terminal(pty_screen, monkeypatch, utc):
    from kueue.cli import job_text, worker_text

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("NO_COLOR", raising=False)
    make, _ = pty_screen
    lines = job_text.listing(make(), listing(), NOON)
    assert "\x1b[32mfinished after 0h:00m:10s   \x1b[0m" in lines[1]
    assert "\x1b[31mfailed with code 2" in lines[2]
    assert "\x1b[34mrunning for 0h:00m:30s" in lines[3]
    assert "\x1b" not in lines[4]
    workers = worker_text.listing(make(), wire(WORKERS), NOON)
    assert "\x1b[33m62 %\x1b[0m" in workers[1]
    assert "\x1b[33m17.6\x1b[0m \x1b[33m18.9\x1b[0m \x1b[33m19.6\x1b[0m" in workers[1]
    assert "\x1b[32m 0.0\x1b[0m \x1b[31m 3.1\x1b[0m \x1b[31m10.0\x1b[0m" in workers[2]
