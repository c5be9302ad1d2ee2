"""What the verbs send, print and return, against a peer on a real socket."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

import msgspec
import pytest
from peer import answering

from kueue.cli import submit, verbs
from kueue.config import Config
from kueue.errors import UsageError, UserError
from kueue.protocol.messages import FromClient, Submit
from kueue.settings import ClientSettings


def asked(peer, kind=None):
    """All questions that reached the peer, hellos left out, each checked against the table of messages."""
    found = []
    for talk in peer.talks:
        for sent in talk.frames[1:]:
            msgspec.json.decode(sent[4:], type=list[FromClient])
            found += json.loads(sent[4:])
    return [message for message in found if kind is None or message["type"] == kind]


def submitted(*ids, **more):
    return {"type": "Submitted", "ids": ids or [[0, 0]], **more}


def ended(job, outcome, return_code=0, exit_code=0):
    return {
        "type": "JobEnded",
        "id": job,
        "outcome": outcome,
        "return_code": return_code,
        "exit_code": exit_code,
    }


WATCHING = {"type": "Watching", "missing": []}
EXITED_3 = {"type": "exited", "code": 3}


def only_range(peer):
    (question,) = asked(peer, "Submit")
    return msgspec.convert(question, Submit).ranges[0]


def test_cmd_prints_the_id_alone(run, peers):
    done = run(peers(answering({"Submit": submitted([17, 17])})), "cmd", "true")
    assert (done.code, done.out, done.err) == (0, "17\n", "")


def test_cmd_sends_the_command_its_place_and_its_wishes(run, peers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("LC_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("LC_TIME", "de_DE.UTF-8")
    monkeypatch.setenv("VIRTUAL_ENV", "/opt/env")
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setenv("LANG", "C.UTF-8")
    monkeypatch.setenv("SECRET_OF_OURS", "x")
    peer = peers(answering({"Submit": submitted()}))
    run(peer, "cmd", "echo", "$HOME", "*")
    sent = only_range(peer)
    assert sent.payload.argv == ("echo", "$HOME", "*")
    assert sent.place.cwd == os.path.realpath(tmp_path)
    assert dict(sent.place.env) == {
        "HOME": "/home/ann",
        "LANG": "C.UTF-8",
        "LC_TIME": "de_DE.UTF-8",
        "PATH": "/bin",
        "VIRTUAL_ENV": "/opt/env",
    }
    assert (sent.request.cores, sent.request.ram_mb) == (8, 8192)
    assert sent.request.cores_are_wish
    assert sent.request.ram_is_wish
    assert sent.terms.on_lost == "rerun"


def test_cmd_sends_every_option(run, peers):
    peer = peers(answering({"Submit": submitted()}))
    words = "-j 2 -c 3 -r 100 --resource primelib=4 --resource genus --gpus 2 -o out.txt -e NULL --name nap"
    more = "--env A=b=c --timeout 90m --hold --max-attempts 5 --on-lost wait --keep-background sleep 1"
    run(peer, "cmd", *words.split(), *more.split())
    sent = only_range(peer)
    assert (sent.request.slots, sent.request.cores, sent.request.ram_mb) == (2, 3, 100)
    assert not sent.request.cores_are_wish
    assert not sent.request.ram_is_wish
    assert sent.request.counters == (("genus", 1), ("primelib", 4))
    assert sent.request.named == (("gpu", 2),)
    assert (sent.payload.stdout, sent.payload.stderr, sent.payload.name) == ("out.txt", "null", "nap")
    assert dict(sent.place.env)["A"] == "b=c"
    assert sent.terms.timeout_seconds == 5400
    assert (sent.terms.max_attempts, sent.terms.on_lost, sent.terms.keep_background) == (5, "wait", True)
    assert sent.held


def test_cmd_takes_sizes_and_on_lost_from_the_settings(run, peers):
    peer = peers(answering({"Submit": submitted()}))
    settings = ClientSettings(job_default_cpus=2, job_default_ram_mb=300, on_lost="fail")
    run(peer, "cmd", "true", config=Config(client=settings))
    sent = only_range(peer)
    assert (sent.request.cores, sent.request.ram_mb, sent.terms.on_lost) == (2, 300, "fail")


def test_an_argument_that_is_not_utf8_travels_unchanged(run, peers):
    peer = peers(answering({"Submit": submitted()}))
    run(peer, "cmd", "echo", os.fsdecode(b"ok\xff"), "Grüße ☃")
    (question,) = asked(peer)
    assert question["ranges"][0]["payload"]["argv"] == [
        "echo",
        {"b64": base64.b64encode(b"ok\xff").decode()},
        "Grüße ☃",
    ]


def test_the_umask_travels_and_stays(run, peers):
    peer = peers(answering({"Submit": submitted()}))
    before = os.umask(0o027)
    try:
        run(peer, "cmd", "true")
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)
    assert only_range(peer).place.umask == 0o027


def test_the_directory_travels_as_written_beside_its_real_path(run, peers, tmp_path, monkeypatch):
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    monkeypatch.chdir(link)
    monkeypatch.setenv("PWD", str(link))
    peer = peers(answering({"Submit": submitted()}))
    run(peer, "cmd", "true")
    assert (only_range(peer).place.cwd, only_range(peer).place.pwd) == (str(real), str(link))
    monkeypatch.setenv("PWD", str(tmp_path))
    assert submit.place([], os.environ)["pwd"] == ""


def test_a_directory_that_is_gone_is_told(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(UserError, match="current directory cannot be found"):
        submit.place([], {})
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "name", ["👩\u200d🔬 night", "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", "Grüße ☃", "x" * 200]
)
def test_a_name_may_be_all_that_listings_show_as_it_is(run, peers, name):
    peer = peers(answering({"Submit": submitted()}))
    assert run(peer, "cmd", "--name", name, "true").code == 0
    assert only_range(peer).payload.name == name


def test_env_copies_a_name_and_sets_a_value(monkeypatch):
    env = dict(map(tuple, submit.place(["FOO", "BAR=", "HOME=/x"], {"FOO": "1", "HOME": "/h", "OTHER": "2"})["env"]))
    assert env == {"FOO": "1", "BAR": "", "HOME": "/x"}
    for wrong in ("", "=x", "NOT_SET"):
        with pytest.raises(UserError):
            submit.place([wrong], {})


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--resource", "a=b=c", "x"], "Failed to parse resource: a=b=c"),
        (["--resource", "a=x", "x"], "Failed to parse resource: 'a=x'"),
        (["--name", " ", "x"], "Not a name"),
        (["--name", "a\nb", "x"], "Not a name"),
        (["--name", "\u200d", "x"], "Not a name"),
        (["--name", "a\u202eb", "x"], "Not a name"),
        (["-o", "", "x"], "--stdout needs the path"),
        (["x", "a\0b"], "zero byte"),
        (["x", "y" * 131_072], "MAX_ARG_STRLEN"),
        (["x", *["y" * 100_000] * 70], "ARG_MAX"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_sent(run, peers, words, sentence):
    peer = peers(answering({}))
    with pytest.raises(UserError, match=sentence) as caught:
        run(peer, "cmd", *words)
    assert caught.value.exit_code == 1
    assert peer.talks == []


@pytest.mark.parametrize("words", [[], ["--"], ["--", ""], [""]])
def test_an_empty_command_is_a_usage_error(run, peers, words):
    with pytest.raises(UsageError):
        run(peers(answering({})), "cmd", *words)


def test_an_argument_of_120000_letters_is_sent(run, peers):
    peer = peers(answering({"Submit": submitted()}))
    assert run(peer, "cmd", "echo", "x" * 120_000).code == 0


def test_a_rejection_by_the_server_is_named_as_such(run, peers):
    failed = {"type": "Failed", "error": "Required resource not configured on server: foo", "exit_code": 1}
    with pytest.raises(UserError) as caught:
        run(peers(answering({"Submit": failed})), "cmd", "--resource", "foo", "x")
    assert str(caught.value) == "Job rejected by server: Required resource not configured on server: foo"


def test_remarks_of_the_server_go_to_stderr_unless_they_are_not_wanted(run, peers):
    peer = peers(answering({"Submit": submitted(remarks=["No worker can ever run it."])}))
    done = run(peer, "cmd", "x")
    assert (done.out, done.err) == ("0\n", "No worker can ever run it.\n")
    assert run(peer, "cmd", "-q", "x").err == ""


def test_cmd_wait_prints_the_return_code_alone_and_returns_the_exit_code(run, peers):
    signaled = {"type": "signaled", "signal": 9}
    peer = peers(answering({"Submit": submitted([5, 5]), "WatchJobs": [WATCHING, ended(5, EXITED_3, 3, 3)]}))
    done = run(peer, "cmd", "--wait", "x")
    assert (done.code, done.out) == (3, "3\n")
    assert done.err == "Job 5 exited with code 3. `kueue log 5` and `kueue log --stderr 5` show its output.\n"
    peer = peers(answering({"Submit": submitted(), "WatchJobs": [WATCHING, ended(0, signaled, -44, 137)]}), "2.sock")
    done = run(peer, "cmd", "--wait", "x")
    assert (done.code, done.out) == (137, "-44\n")


def test_cmd_wait_prints_nothing_for_a_canceled_job(run, peers):
    peer = peers(answering({"Submit": submitted(), "WatchJobs": [WATCHING, ended(0, {"type": "canceled"}, -46, 130)]}))
    done = run(peer, "cmd", "--wait", "x")
    assert (done.code, done.out) == (130, "")


def test_each_line_becomes_a_job_and_every_id_is_printed(run, peers, tmp_path):
    lines = tmp_path / "lines"
    lines.write_bytes("a b\n\n  \nGrüße\r\nlast \xff".encode("utf-8", "surrogateescape") + b"\xff")
    peer = peers(answering({"Submit": submitted([3, 4], [9, 9])}))
    done = run(peer, "cmd", "--each-line", str(lines), "gzip", "-{}", "{}{}")
    assert done.out == "3\n4\n9\n"
    (question,) = asked(peer)
    argvs = question["ranges"][0]["argvs"]
    assert argvs[0] == ["gzip", "-a b", "a ba b"]
    assert argvs[1] == ["gzip", "-Grüße", "GrüßeGrüße"]
    assert argvs[2][1] == {"b64": base64.b64encode("-last \xff".encode() + b"\xff").decode()}
    assert len(argvs) == 3


def test_each_line_without_a_command_is_run_by_sh(run, peers, tmp_path):
    lines = tmp_path / "lines"
    lines.write_text("echo a | wc\n")
    peer = peers(answering({"Submit": submitted()}))
    run(peer, "cmd", "--each-line", str(lines))
    assert asked(peer)[0]["ranges"][0]["argvs"] == [["sh", "-c", "echo a | wc"]]


@pytest.mark.parametrize(
    ("text", "command", "sentence"),
    [
        ("", ["x", "{}"], "no line that is not empty"),
        ("a\n", ["x"], "needs {}"),
        ("a\nb\0\n", ["x", "{}"], "line 2 holds a zero byte"),
        ("a\n" + "b" * 131_072, ["x", "{}"], "line 2 has an argument of 131072 bytes"),
    ],
)
def test_lines_that_cannot_be_jobs_are_refused_all_together(run, peers, tmp_path, text, command, sentence):
    lines = tmp_path / "lines"
    lines.write_text(text)
    peer = peers(answering({}))
    with pytest.raises(UserError, match=sentence):
        run(peer, "cmd", "--each-line", str(lines), *command)
    assert peer.talks == []


def test_the_line_stands_in_the_name_and_the_paths_of_the_output_too(run, peers, tmp_path):
    lines = tmp_path / "lines"
    lines.write_bytes("a b\n\nin/ü.cfg\nnull".encode() + b"\n\xff\n")
    peer = peers(answering({"Submit": submitted([3, 6])}))
    words = ("-o", "out-{}.txt", "-e", "{}", "--name", "run {}", "sim", "{}")
    done = run(peer, "cmd", "--each-line", str(lines), *words)
    assert done.out == "3\n4\n5\n6\n"
    payloads = [one["payload"] for question in asked(peer) for one in question["ranges"]]
    assert payloads[0] == {"argv": ["sim", "a b"], "name": "run a b", "stdout": "out-a b.txt", "stderr": "a b"}
    assert payloads[1]["stdout"] == "out-in/ü.cfg.txt"
    assert (payloads[2]["argv"], payloads[2]["stderr"]) == (["sim", "null"], "null")
    assert payloads[3]["stderr"] == {"b64": base64.b64encode(b"\xff").decode()}
    assert all("argvs" not in one for question in asked(peer) for one in question["ranges"])


@pytest.mark.parametrize(
    ("text", "options", "clash"),
    [
        ("a\n\nb\n", ("-o", "out.txt"), "lines 1 and 3 would both write out.txt"),
        ("a\nb\n", ("-o", "null", "-e", "err"), "lines 1 and 2 would both write err"),
        ("a\nb\na\n", ("-o", "out-{}"), "lines 1 and 3 would both write out-a"),
        ("a\n./a\n", ("-o", "{}"), "lines 1 and 2 would both write ./a"),
        ("a\nb\n", ("-o", "{}", "-e", "b"), "lines 1 and 2 would both write b"),
    ],
)
def test_lines_whose_jobs_would_write_one_file_are_refused(run, peers, tmp_path, text, options, clash):
    lines = tmp_path / "lines"
    lines.write_text(text)
    peer = peers(answering({}))
    with pytest.raises(UserError, match=clash) as caught:
        run(peer, "cmd", "--each-line", str(lines), *options, "x", "{}")
    assert "-o 'out-{}.txt'" in caught.value.hint
    assert peer.talks == []


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("a\nb\n", ("-o", "null", "-e", " NULL ")),
        ("a\nb\n", ("-o", "/dev/null")),
        ("a\n", ("-o", "out.txt", "-e", "out.txt")),
        ("a\nb\n", ("-o", "{}", "-e", "{}")),
    ],
)
def test_lines_whose_jobs_have_files_of_their_own_or_none_are_taken(run, peers, tmp_path, text, options):
    lines = tmp_path / "lines"
    lines.write_text(text)
    peer = peers(answering({"Submit": submitted([0, 1])}))
    assert run(peer, "cmd", "--each-line", str(lines), *options, "x", "{}").out == "0\n1\n"


def test_a_name_that_a_line_makes_too_long_is_refused_with_its_line(run, peers, tmp_path):
    lines = tmp_path / "lines"
    lines.write_text("a\n" + "b" * 300)
    with pytest.raises(UserError, match=r"line 2"):
        run(peers(answering({})), "cmd", "--each-line", str(lines), "--name", "{}", "x", "{}")


def test_a_file_of_lines_that_is_not_there_is_named(run, peers, tmp_path):
    with pytest.raises(UserError, match="nowhere cannot be read: No such file"):
        run(peers(answering({})), "cmd", "--each-line", str(tmp_path / "nowhere"), "x", "{}")


def test_waiting_for_many_prints_each_with_its_code_and_returns_the_worst(run, peers, tmp_path):
    lines = tmp_path / "lines"
    lines.write_text("a\nb\nc\n")
    ends = [ended(2, EXITED_3, 3, 3), ended(0, {"type": "exited", "code": 0}), ended(1, {"type": "canceled"}, -46, 130)]
    peer = peers(answering({"Submit": submitted([0, 2]), "WatchJobs": [WATCHING, *ends]}))
    done = run(peer, "cmd", "--wait", "--each-line", str(lines))
    assert (done.code, done.out) == (130, "2 3\n0 0\n1 -46\n")


def test_wait_job_prints_nothing_and_returns_the_jobs_code(run, peers):
    peer = peers(answering({"WatchJobs": [WATCHING, ended(5, EXITED_3, 3, 3)]}))
    done = run(peer, "wait-job", "--quiet", "5")
    assert (done.code, done.out, done.err) == (3, "", "")


def test_wait_job_of_an_unknown_job_fails_at_once(run, peers):
    peer = peers(answering({"WatchJobs": {"type": "Watching", "missing": [[5, 5]]}}))
    done = run(peer, "wait-job", "5")
    assert (done.code, done.out, done.err) == (1, "", "Job not found!\n")


def test_wait_job_waits_for_the_others_when_one_does_not_exist(run, peers):
    peer = peers(answering({"WatchJobs": [{"type": "Watching", "missing": [[6, 6]]}, ended(5, EXITED_3, 3, 3)]}))
    done = run(peer, "wait-job", "5-6")
    assert done.code == 3
    assert done.err.startswith("Job not found! (ID=6)\nJob 5 exited with code 3. ")


def test_wait_job_of_a_job_that_was_cleaned_away_says_that_its_end_is_not_known(run, peers):
    done = run(peers(answering({"WatchJobs": [WATCHING, ended(5, None)]})), "wait-job", "5")
    assert done.code == 125
    assert "cleaned away" in done.err


def test_remove_job_prints_what_was_done_and_tells_refusals_on_stderr(run, peers):
    results = [
        {"id": 1, "ok": True, "text": "Canceled job ID=1!"},
        {"id": 2, "ok": False, "text": "Job ID=2 has already started!", "hint": "Use --kill."},
    ]
    peer = peers(answering({"RemoveJobs": {"type": "Results", "results": results}}))
    done = run(peer, "remove-job", "1-2")
    assert (done.code, done.out) == (1, "Canceled job ID=1!\n")
    assert done.err == "Job ID=2 has already started!\nHint: Use --kill.\n"
    (question,) = asked(peer)
    assert (question["kill"], question["force"], question["ids"]) == (False, False, [[1, 2]])


def test_force_implies_kill(run, peers):
    peer = peers(answering({"RemoveJobs": {"type": "Results", "results": []}}))
    run(peer, "remove-job", "--force", "1")
    assert (asked(peer)[0]["kill"], asked(peer)[0]["force"]) == (True, True)


def test_clean_jobs_prints_the_documented_sentence(run, peers):
    peer = peers(answering({"CleanJobs": {"type": "Done"}}))
    assert run(peer, "clean-jobs").out == "Removed finished and canceled jobs!\n"
    run(peer, "clean-jobs", "--all")
    assert [question["failed"] for question in asked(peer)] == [False, True]


@pytest.mark.parametrize(("verb", "kind"), [("hold", "HoldJobs"), ("release", "ReleaseJobs")])
def test_hold_and_release_name_the_jobs(run, peers, verb, kind):
    results = [{"id": 1, "ok": True, "text": "done"}]
    peer = peers(answering({kind: {"type": "Results", "results": results}}))
    done = run(peer, verb, "1", "4-5")
    assert (done.code, done.out) == (0, "done\n")
    assert asked(peer)[0]["ids"] == [[1, 1], [4, 5]]


def test_node_sets_each_worker_and_tells_the_worst(run, peers):
    def set_node(question):
        if question["name"] == "r9":
            return [{"type": "Failed", "error": "No worker r9."}]
        return [{"type": "Results", "results": [{"id": 0, "ok": True, "text": f"{question['name']} is offline."}]}]

    peer = peers(answering({"SetNode": set_node}))
    done = run(peer, "node", "offline", "r4", "r9", "r5")
    assert (done.code, done.out, done.err) == (1, "r4 is offline.\nr5 is offline.\n", "Error: No worker r9.\n")


def test_explain_of_several_goes_on_after_one_that_is_not_there(run, peers):
    def explain(question):
        if question["id"] == 2:
            return [{"type": "Failed", "error": "Job not found!"}]
        return [{"type": "Explanation", "id": question["id"], "verdict": "It runs."}]

    done = run(peers(answering({"ExplainJob": explain})), "explain", "1-3")
    assert (done.code, done.out, done.err) == (1, "job 1:\nIt runs.\njob 3:\nIt runs.\n", "Error: Job not found!\n")


def _output(whole, piece=5, source="worker"):
    def read(question):
        data = whole[question["offset"] : question["offset"] + piece]
        return [
            {
                "type": "Output",
                "offset": question["offset"],
                "data": base64.b64encode(data).decode(),
                "source": source,
                "end": not question.get("follow", False),
            }
        ]

    return read


@pytest.mark.parametrize("raw", [[], ["--raw"]])
def test_log_prints_every_byte_and_says_where_it_came_from(run, peers, raw, tmp_path):
    whole = b"ok\xffok \x1b[31m\r\n" * 7
    done = run(peers(answering({"ReadOutput": _output(whole)})), "log", *raw, "3", encoding="latin-1")
    assert done.out.encode("latin-1") == whole
    assert done.err == "Job 3: stdout from its worker.\n"


def test_log_says_when_only_the_excerpt_is_there(run, peers):
    done = run(peers(answering({"ReadOutput": _output(b"hello\n", source="stored")})), "log", "--stderr", "3")
    assert done.out == "hello\n"
    assert done.err.count("excerpt that the server keeps") == 1


def test_log_calls_a_stream_empty_to_which_nothing_was_written(run, peers):
    done = run(peers(answering({"ReadOutput": _output(b"", source="stored")})), "log", "--stderr", "3")
    assert (done.code, done.out, done.err) == (0, "", "Job 3: its stderr is empty.\n")


def test_log_passes_over_a_gap(run, peers):
    def read(question):
        if question["offset"] == 0:
            return [{"type": "Output", "offset": 0, "data": "YQ==", "source": "stored"}]
        if question["offset"] == 1:
            return [
                {"type": "Output", "offset": 90, "data": "eg==", "source": "stored", "note": "89 bytes are cut out"}
            ]
        return [{"type": "Output", "offset": 91, "source": "stored", "end": True}]

    done = run(peers(answering({"ReadOutput": read})), "log", "3")
    assert done.out == "az"
    assert "89 bytes are cut out\n" in done.err


def test_follow_prints_both_streams_and_returns_the_jobs_code(run, peers):
    def script(talk):
        talk.greet()
        watch, out, err = talk.hear()
        assert (watch["type"], out["stream"], err["stream"]) == ("WatchJobs", "stdout", "stderr")
        talk.say({**WATCHING, "seq": watch["seq"]})
        talk.say({"type": "Output", "seq": out["seq"], "offset": 0, "data": "b25lCg=="})
        talk.say({"type": "Output", "seq": err["seq"], "offset": 0, "data": "ZXJyCg==", "end": True})
        talk.say({**ended(3, EXITED_3, 3, 3), "seq": watch["seq"]})
        talk.say({"type": "Output", "seq": out["seq"], "offset": 4, "data": "dHdvCg==", "end": True})
        talk.hear()

    done = run(peers(script), "follow", "3")
    assert (done.code, done.out, done.err) == (3, "one\ntwo\n", "err\n")


def test_follow_goes_on_where_it_was_after_a_lost_connection(run, peers):
    whole = b"one\ntwo\n"

    def script(talk):
        talk.greet()
        watch, out, *more = talk.hear()
        talk.say({**WATCHING, "seq": watch["seq"]})
        begin = out["offset"]
        data = base64.b64encode(whole[begin : begin + 4]).decode()
        is_last = begin > 0
        talk.say({"type": "Output", "seq": out["seq"], "offset": begin, "data": data, "end": is_last})
        for err in more:
            talk.say({"type": "Output", "seq": err["seq"], "offset": 0, "end": True})
        if is_last:
            talk.say({**ended(3, EXITED_3, 3, 3), "seq": watch["seq"]})
            talk.hear()

    done = run(peers(script), "follow", "3")
    assert (done.code, done.out) == (3, whole.decode())


def test_follow_says_of_which_attempt_it_has_read_so_far(run, peers):
    asked_of = []

    def script(talk):
        talk.greet()
        watch, *streams = talk.hear()
        asked_of.append([one["attempt"] for one in streams])
        talk.say({**WATCHING, "seq": watch["seq"]})
        is_last = len(asked_of) > 1
        for one in streams:
            piece = {"type": "Output", "seq": one["seq"], "offset": 0, "data": "YQ==", "attempt": 2, "end": is_last}
            talk.say(piece)
        if is_last:
            talk.say({**ended(3, EXITED_3, 3, 3), "seq": watch["seq"]})
            talk.hear()

    assert run(peers(script), "follow", "3").code == 3
    assert asked_of == [[0, 0], [2, 2]]


def test_follow_says_once_what_both_streams_say_of_the_job(run, peers):
    def script(talk):
        talk.greet()
        watch, *streams = talk.hear()
        talk.say({**WATCHING, "seq": watch["seq"]})
        for note in ("the job is held", "the job is pending", "the job is held"):
            for one in streams:
                talk.say({"type": "Output", "seq": one["seq"], "offset": 0, "source": "none", "note": note})
        for one in streams:
            talk.say({"type": "Output", "seq": one["seq"], "offset": 0, "note": "3 bytes are cut out", "end": True})
        talk.say({**ended(3, EXITED_3, 3, 3), "seq": watch["seq"]})
        talk.hear()

    done = run(peers(script), "follow", "3")
    assert done.err.splitlines() == [
        "the job is held",
        "the job is pending",
        "the job is held",
        "stdout: 3 bytes are cut out",
        "stderr: 3 bytes are cut out",
    ]


def test_follow_of_an_unknown_job_fails_at_once(run, peers):
    def script(talk):
        talk.greet()
        watch = talk.hear()[0]
        talk.say({"type": "Watching", "seq": watch["seq"], "missing": [[3, 3]]})
        talk.hear()

    done = run(peers(script), "follow", "3")
    assert (done.code, done.out, done.err) == (1, "", "Job not found!\n")


def test_follow_of_several_goes_on_after_one_that_does_not_exist(run, peers):
    def script(talk):
        talk.greet()
        watch, *streams = talk.hear()
        talk.say({"type": "Watching", "seq": watch["seq"], "missing": [[3, 3]]})
        talk.say(*({"type": "Failed", "seq": one["seq"], "error": "Job not found!"} for one in streams))
        watch, *streams = talk.hear()
        talk.say({**WATCHING, "seq": watch["seq"]})
        for one in streams:
            talk.say({"type": "Output", "seq": one["seq"], "offset": 0, "data": "YQ==", "end": True})
        talk.say({**ended(4, EXITED_3, 3, 3), "seq": watch["seq"]})
        talk.hear()

    done = run(peers(script), "follow", "3", "4")
    assert (done.code, done.out) == (3, "a")
    assert done.err == "job 3:\nJob not found!\njob 4:\na"


def test_follow_of_several_goes_on_after_one_that_cannot_be_read(run, peers):
    def script(talk):
        talk.greet()
        watch, *streams = talk.hear()
        talk.say({**WATCHING, "seq": watch["seq"]})
        talk.say(*({"type": "Failed", "seq": one["seq"], "error": "It cannot be read."} for one in streams))
        watch, *streams = talk.hear()
        talk.say({**WATCHING, "seq": watch["seq"]})
        talk.say(*({"type": "Output", "seq": one["seq"], "offset": 0, "end": True} for one in streams))
        talk.say({**ended(4, {"type": "exited", "code": 0}), "seq": watch["seq"]})
        talk.hear()

    done = run(peers(script), "follow", "3", "4")
    assert (done.code, done.err) == (1, "job 3:\nError: It cannot be read.\njob 4:\n")


def test_version_tells_of_both_programs(run, peers):
    info = {"type": "Info", "version": "0.1.0", "protocol": 1, "queue_id": "q", "pid": 7, "started_wall": 1.0}
    done = run(peers(answering({"ServerInfo": info})), "version")
    assert done.code == 0
    assert "server 0.1.0" in done.out
    assert "pid 7" in done.out


def test_version_says_that_no_job_is_given_away(run, peers):
    info = {"type": "Info", "version": "0.1.0", "protocol": 1, "queue_id": "q", "pid": 7, "started_wall": 1.0}
    done = run(peers(answering({"ServerInfo": {**info, "lock_trouble": "The lock is gone"}})), "version")
    assert (done.code, done.err) == (0, "Warning: The lock is gone.\n")


def test_every_verb_that_was_ever_documented_is_there():
    documented = "cmd list-jobs show-job wait-job remove-job clean-jobs list-workers show-worker list-resources"
    assert set(documented.split()) <= set(verbs.VERBS)
    here = Path(submit.__file__).parent
    assert all(
        (here / f"{verb.handler.partition(':')[0].replace('.', '/')}.py").exists() for verb in verbs.VERBS.values()
    )
