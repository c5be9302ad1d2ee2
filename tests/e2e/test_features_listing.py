"""What is shown of jobs and workers: states, tables, pages, sums, and the same for programs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import termios
import time

import pytest

from kueue.cli.text import width
from kueue.protocol import messages as m
from tests.support.feature_lab import SMALL, FeatureLab
from tests.support.server_program import end_record

MINUTE = r"today \d\d:\d\d:\d\d"


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with FeatureLab(tmp_path_factory.mktemp("listing")) as lab:
        lab.start_server(global_resources={"genus": 3, "primelib": 31})
        lab.start_worker("w1", kill_grace_seconds=2)
        yield lab


@pytest.fixture
def lab(shared):
    yield shared
    shared.settle()


@pytest.fixture
def one_of_each(lab):
    """Ids by state: a job in each state that lasts."""
    lab.kueue("clean-jobs", "--all")
    gate = lab.gate()
    ids = {
        "succeeded": lab.run(*SMALL, "echo", "out")["id"],
        "failed": lab.run(*SMALL, "sh", "-c", "echo trouble >&2; exit 2")["id"],
        "held": lab.submit(*SMALL, "--hold", "true"),
        "canceled": lab.submit(*SMALL, "--hold", "true"),
        "running": lab.submit("-c", "16", "-r", "1", *gate.command),
        "pending": lab.submit("-c", "16", "-r", "1", "--resource", "genus", "--resource", "primelib=4", "true"),
    }
    lab.kueue("remove-job", str(ids["canceled"]))
    lab.until(lambda: gate.begun, "it runs")
    return ids


def on_terminal(lab, *words, columns=110, lines=24, **environment):
    """Exit code and text of the command with its stdout on a terminal of that size."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    env = {k: v for k, v in lab.environment(TERM="xterm").items() if k not in {"COLUMNS", "LINES", "NO_COLOR"}}
    process = subprocess.Popen(
        [lab.python, "-m", "kueue.cli.main", "-c", str(lab.folder / "lab.toml"), *words],
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=subprocess.PIPE,
        cwd=lab.folder,
        env={**env, **environment},
    )
    os.close(slave)
    pieces = []
    with contextlib.suppress(OSError):  # the terminal's other end is closed
        while piece := os.read(master, 65536):
            pieces.append(piece)
    os.close(master)
    assert process.stderr.read() == b""
    process.stderr.close()
    text = b"".join(pieces).decode().replace("\r\n", "\n")
    return process.wait(20), text


def plain(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def ids_of(done):
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


def test_each_state_can_be_asked_for_and_two_are_a_union(lab, one_of_each):
    ids = one_of_each
    # A held job is listed as "pending (held)".
    assert ids_of(lab.kueue("list-jobs", "-p", "--quiet")) == sorted([ids["pending"], ids["held"]])
    for flag, state in (
        ("-r", "running"),
        ("-s", "succeeded"),
        ("-f", "failed"),
        ("-c", "canceled"),
    ):
        assert ids_of(lab.kueue("list-jobs", flag, "--quiet")) == [ids[state]], flag
    assert ids_of(lab.kueue("list-jobs", "--offered", "--quiet")) == []
    assert ids_of(lab.kueue("list-jobs", "--held", "--quiet")) == [ids["held"]]
    assert ids_of(lab.kueue("list-jobs", "-s", "-f", "-q")) == [ids["succeeded"], ids["failed"]]
    assert ids_of(lab.kueue("list-jobs", "-q")) == sorted(ids.values())


def test_the_most_recent_of_those_selected_are_shown(lab):
    lab.kueue("clean-jobs", "--all")
    held = [lab.submit(*SMALL, "--hold", "true") for _ in range(6)]
    assert ids_of(lab.kueue("list-jobs", "-n", "5", "-q")) == held[1:]
    assert ids_of(lab.kueue("list-jobs", "-n", "1", "-q")) == held[5:]
    assert ids_of(lab.kueue("list-jobs", "-n", "5", "-s", "-q")) == []


def test_programs_get_all_jobs_and_a_pipe_is_told_of_those_it_does_not_get(lab):
    lab.kueue("clean-jobs", "--all")
    made = lab.kueue("cmd", *SMALL, "--hold", "--each-line", "-", stdin="true\n" * 1000).stdout
    assert lab.kueue("list-jobs", "-q").stdout == made
    found = json.loads(lab.kueue("list-jobs", "--json").stdout)["jobs"]
    assert [row["id"] for row in found] == [int(line) for line in made.split()]
    plain = lab.kueue("list-jobs")
    assert plain.stdout.count("pending (held)") == 996
    assert plain.stderr == "996 of 1000 jobs are shown; -n N shows more.\n"


def test_the_table_has_the_documented_columns_and_texts(lab, one_of_each):
    ids = one_of_each
    lines = lab.kueue("list-jobs").stdout.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[:-2]]
    assert cells[0] == ["id", "working directory", "command", "cpus", "memory", "other", "worker", "status"]
    by_id = {int(row[0]): row for row in cells[1:]}
    where = str(lab.folder)
    assert by_id[ids["succeeded"]] == [
        str(ids["succeeded"]), where, "echo out", "1 x", "1 MB", "---", "w1", "finished after 0h:00m:00s",
    ]  # fmt: skip
    assert by_id[ids["failed"]][6:] == ["w1", "failed with code 2"]
    assert by_id[ids["pending"]][3:7] == ["16 x", "1 MB", "1x genus, 4x primelib", "---"]
    assert re.match(f"pending since {MINUTE} \\(.+\\)$", by_id[ids["pending"]][7])
    assert re.match(f"canceled on {MINUTE}$", by_id[ids["canceled"]][7])
    assert by_id[ids["canceled"]][6] == "---"
    assert re.match(r"running for 0h:00m:\d\ds$", by_id[ids["running"]][7])
    assert lines[-2].startswith("--- job status summary ---")
    assert lines[-2].endswith("average job runtime: 0h:00m:00s")
    assert lines[-1].startswith("pending: 1, held: 1, running: 1, succeeded: 1, failed: 1, canceled: 1 ")
    assert "\x1b" not in "".join(lines)


def test_the_table_fits_the_terminal_also_with_wide_characters(lab, one_of_each):
    wide = lab.folder / "データ" / "Meßreihe mit einem langen Namen für die Grüße" / "ende"
    wide.mkdir(parents=True)
    lab.submit(*SMALL, "--hold", "echo", "Grüße ☃ " * 20, cwd=wide)
    code, text = on_terminal(lab, "list-jobs")
    assert code == 0
    lines = plain(text).splitlines()
    assert len(lines) == 1 + 7 + 2
    assert {width(line) for line in lines} == {110}
    assert "ende" in text
    assert "..." in text
    assert "\x1b[" in text
    assert "\x1b[" not in on_terminal(lab, "list-jobs", NO_COLOR="1")[1]


@pytest.mark.parametrize("columns", [0, 1, 10, 79])
def test_no_size_of_a_terminal_is_an_error(lab, columns):
    lab.run(*SMALL, "true")
    for verb in (("list-jobs",), ("list-workers",), ("show-worker", "0")):
        code, text = on_terminal(lab, *verb, columns=columns, lines=columns)
        assert code == 0
        assert text
        assert lab.kueue(*verb, COLUMNS=str(columns)).returncode == 0


def test_a_terminal_shows_as_many_jobs_as_it_has_room_for(lab):
    jobs = [lab.submit(*SMALL, "--hold", "true") for _ in range(8)]
    lines = plain(on_terminal(lab, "list-jobs", lines=10)[1]).splitlines()
    assert len(lines) == 9  # header, six jobs, two lines of summary; the tenth is for the prompt
    assert lines[-3].split("|")[1].strip() == str(jobs[-1])


def test_text_of_any_alphabet_is_listed_in_any_locale(lab):
    job = lab.run(*SMALL, "echo", "Grüße ☃")
    assert lab.output(job["id"]) == "Grüße ☃\n"
    for locale in ({"LC_ALL": "C", "PYTHONUTF8": "0"}, {"LC_ALL": "POSIX", "PYTHONIOENCODING": "latin-1"}):
        done = lab.kueue("list-jobs", str(job["id"]), **locale)
        assert done.returncode == 0, done.stderr
        assert "| echo " in done.stdout


def test_the_page_of_a_job_follows_its_state(lab, one_of_each):
    ids = one_of_each

    def page(state):
        done = lab.kueue("show-job", str(ids[state]))
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    assert re.fullmatch(
        rf"""=== job information ===
job id: {ids["succeeded"]}
command: echo out
working directory: {lab.folder}
required job slots: 1
required CPU cores: 1
required RAM: 1 megabytes

job status: finished
   issued on: {MINUTE}
   started on: {MINUTE}
   finished on: {MINUTE}
   return code: 0
   executed on: w1
   runtime: 0h:00m:00s
   comment: Job finished orderly.

=== stdout ===
out
""",
        page("succeeded"),
    )
    failed = page("failed")
    assert "\njob status: failed\n" in failed
    assert "\n   return code: 2\n" in failed
    assert failed.endswith("\n\n=== stderr ===\ntrouble\n")
    assert re.search(f"\n   canceled on: {MINUTE}\n", page("canceled"))
    running = page("running")
    assert re.search(
        f"\njob status: running\n   issued on: {MINUTE}\n   started on: {MINUTE}\n   running on: w1\n", running
    )
    pending = page("pending")
    assert re.search(f"\njob status: pending.*\n   issued on: {MINUTE}\n", pending)
    assert "\nadditional resources:\n   1x genus\n   4x primelib\n\n" in pending
    assert re.search(r"\n   waits: .*16", pending)
    assert "\njob status: pending (held)" in page("held")


def test_the_page_of_an_offered_job_names_the_worker(tmp_path):
    with FeatureLab(tmp_path) as lab:
        lab.start_server()
        with lab.peer("mute"):
            job = lab.submit(*SMALL, "true")
            lab.until_state(job, "offered")
            assert ids_of(lab.kueue("list-jobs", "-o", "-q")) == [job]
            shown = lab.kueue("show-job", str(job)).stdout
            assert re.search(
                f"\njob status: offered\n   issued on: {MINUTE}\n   offered on: {MINUTE}\n   offered to: mute\n", shown
            )
            assert f"offered on {time.strftime('today %H:')}" in lab.kueue("list-jobs").stdout


def test_average_and_remaining_time_follow_the_documented_sums(tmp_path):
    with FeatureLab(tmp_path) as lab:
        lab.start_server()
        with lab.peer("clockwork", slots=4) as peer:
            for finished, running, pending, average, remaining in (
                ((), (), 3, 0, {0}),
                ((10, 20), (30,), 1, 20, {20}),
                ((10, 20), (30,), 5, 20, {100}),
                ((), (7, 12), 1, 12, {12 + 5}),
                ((100,), (10,), 0, 100, {90}),
                ((60,), (), 4, 60, {240}),
            ):
                begin = time.monotonic()
                offers = []
                for _ in (*finished, *running):
                    lab.submit(*SMALL, "true")
                    offers.append(peer.hear_a(m.Offer))
                now = time.time()
                for offer, seconds in zip(offers, (*finished, *running), strict=True):
                    peer.say(m.AttemptStarted(offer=offer.offer, started_wall=now - seconds - 0.01))
                for offer, seconds in zip(offers, finished, strict=False):
                    record = end_record()
                    peer.say(
                        m.AttemptEnded(offer=offer.offer, end=type(record)(record.outcome, now - seconds, now, seconds))
                    )
                if pending:
                    lines = "\n".join(["true"] * pending)
                    assert (
                        lab.kueue("cmd", "-c", "99", "-r", "1", "-q", "--each-line", "-", stdin=lines).returncode == 0
                    )
                wanted = ["running"] * len(running) + ["pending"] * pending + ["succeeded"] * len(finished)
                lab.until(lambda: sorted(row["state"] for row in lab.rows()) == sorted(wanted), "all are there")  # noqa: B023
                told = json.loads(lab.kueue("list-jobs", "--json").stdout)
                late = int(time.monotonic() - begin)  # whole seconds that the running ones may have grown by
                assert average <= told["average_seconds"] <= average + (late if running else 0)
                low, high = min(remaining) - 2 * late, max(remaining) + late * (1 + pending)
                assert low <= told["eta_seconds"] <= high, (finished, running, pending)
                shown = lab.kueue("list-jobs").stdout
                assert "average job runtime: " in shown
                for offer in offers[len(finished) :]:
                    peer.end(offer)
                lab.kueue("remove-job", *[str(row["id"]) for row in lab.rows("pending")])
                lab.until(lambda: not lab.rows("running", "pending"), "nothing is left")
                lab.kueue("clean-jobs", "--all")
                assert json.loads(lab.kueue("list-jobs", "--json").stdout)["average_seconds"] == 0


def test_workers_are_listed_and_shown(lab):
    gate = lab.gate()
    job = lab.submit("-c", "4", "-r", "16000", "-j", "2", *gate.command)
    lab.until(lambda: gate.begun, "it runs")
    header, row = lab.kueue("list-workers").stdout.splitlines()
    assert [cell.strip() for cell in header.strip("|").split(" | ")] == [
        "id", "name", "operating system", "cpus", "avg freq", "memory", "jobs", "busy", "load 1/5/15m", "uptime",
    ]  # fmt: skip
    cells = [cell.strip() for cell in row.strip("|").split(" | ")]
    assert cells[:2] + cells[3:4] + cells[5:8] == ["0", "w1", "16 x", "64000 MB", str(job), "25 %"]
    assert re.fullmatch(r"\d+ MHz", cells[4])
    assert re.fullmatch(r"\d+\.\d +\d+\.\d +\d+\.\d", cells[8])
    assert cells[9] == "0d 00h"
    shown = lab.kueue("show-worker", "0").stdout
    assert re.fullmatch(
        rf"""=== worker information ===
worker id: 0
name: w1
connected since: {MINUTE}

system information
   kernel: \S+
   distribution: .+
   cpu cores: 16
   cpu frequency: \d+ megahertz
   total memory: 64000 megabytes
last updated: {MINUTE}

system load and resources
   load: \d+\.\d / \d+\.\d / \d+\.\d
   jobs offered: ---
   jobs running: {job}
   free jobs slots: 8
   free cpus: 12 / 16
   free ram: 48000 / 64000 megabytes
total occupation: 25.00 %
""",
        shown,
    )
    unknown = lab.kueue("show-worker", "99")
    assert (unknown.returncode, unknown.stdout, unknown.stderr) == (1, "", "Worker not found!\n")


def test_without_workers_and_jobs_the_lists_say_so(tmp_path):
    with FeatureLab(tmp_path) as lab:
        lab.start_server()
        done = lab.kueue("list-workers")
        assert (done.returncode, done.stdout) == (0, "No workers registered on server!\n")
        done = lab.kueue("list-jobs")
        assert (done.returncode, done.stdout.splitlines()[1].split(" ")[:2]) == (0, ["pending:", "0"])
        assert len(done.stdout) < 300  # nothing is padded for nobody


def test_every_listing_speaks_json(lab, one_of_each):
    for verb, key in (
        ("list-jobs", "jobs"), ("list-workers", "workers"), ("list-resources", "resources"), ("show-job 0-9999", "jobs"),
        ("show-worker 0", "workers"), (f"explain {one_of_each['pending']}", "jobs"), ("version", "server"),
    ):  # fmt: skip
        done = lab.kueue(*verb.split(), "--json")
        assert json.loads(done.stdout)[key], verb
    states = {row["id"]: row["state"] for row in json.loads(lab.kueue("list-jobs", "--json").stdout)["jobs"]}
    assert states == {job: state for state, job in one_of_each.items()}


def test_warnings_never_stand_between_results(lab):
    path = lab.folder / "odd.toml"
    path.write_text((lab.folder / "lab.toml").read_text() + "[client_settings]\njob_default_cpu = 3\n")
    path.chmod(0o600)
    done = lab.kueue("-c", str(path), "cmd", "-r", "1", "true")
    assert re.fullmatch(r"\d+\n", done.stdout)
    assert "job_default_cpu" in done.stderr
    assert "job_default_cpus" in done.stderr
    assert json.loads(lab.kueue("-c", str(path), "list-jobs", "--json").stdout)


def test_it_says_why_a_job_waits(lab, one_of_each):
    lines = lab.kueue("explain", str(one_of_each["pending"])).stdout.splitlines()
    assert lines[1] == "workers:"
    assert re.match(r"   - w1  .*16", lines[2])
    assert lines[3] == "resources:"
    assert [line.split()[:2] for line in lines[4:]] == [
        ["+", "genus"],
        ["+", "primelib"],
        ["+", "global_max_parallel_jobs"],
    ]
