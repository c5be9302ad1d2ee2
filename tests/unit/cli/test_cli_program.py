"""The command as a real process: exit codes, streams, locales, pipes, terminals, interrupts, start-up."""

from __future__ import annotations

import base64
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
from peer import answering
from samples import COUNTS, JOBS

from kueue import places
from kueue.identity import identity_of
from tests.support.terminal import Terminal

SECRET = "a secret for these tests alone"
ROOT = Path(__file__).parents[3]
LISTING = {
    "type": "JobList",
    "jobs": json.loads(msgspec.json.encode(JOBS)),
    "counts": json.loads(msgspec.json.encode(COUNTS)),
}


@pytest.fixture(scope="session")
def keys(tmp_path_factory):
    """A cache directory with the key of the secret, which takes a third of a second to derive."""
    directory = tmp_path_factory.mktemp("keys")
    directory.chmod(0o700)
    identity_of(SECRET, str(directory))
    return directory


class Command:
    """A configuration of its own, and the program run with it."""

    def __init__(self, directory: Path, keys: Path) -> None:
        self.directory = directory
        self.config = directory / "config.toml"
        self.state = directory / "state"
        self.cache = Path(places.Places(str(self.state)).cache)
        shutil.copytree(keys, self.cache, dirs_exist_ok=True)
        # Nothing listens on this port of a loopback address that is used by nobody else.
        self.write()
        self.socket = places.Places(str(self.state)).server_socket(9, identity_of(SECRET, str(self.cache)).fingerprint)

    def write(self, text: str = "") -> None:
        self.config.write_text(f'[common_settings]\nshared_secret = "{SECRET}"\nserver_port = 9\n{text}')
        self.config.chmod(0o600)

    def environment(self, **more: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "KUEUE", "COLUMNS"))}
        return {
            **kept,
            "PYTHONPATH": str(ROOT),
            "KUEUE_CONFIG": str(self.config),
            "KUEUE_STATE_DIR": str(self.state),
            "HOME": str(self.directory),
            "TZ": "UTC",
            **more,
        }

    def start(self, *words: str, env: dict[str, str] | None = None, **more) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "kueue.cli.main", *words],
            env=self.environment(**(env or {})),
            **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more},
        )

    def run(self, *words: str, **more) -> tuple[int, str, str]:
        with self.start(*words, **more) as process:
            out, err = process.communicate(timeout=60)
            return process.returncode, (out or b"").decode(), (err or b"").decode()


@pytest.fixture
def command(tmp_path, keys):
    return Command(tmp_path, keys)


@pytest.fixture
def peer(command, peers):
    return lambda script: peers(script, command.socket)


def test_without_a_verb_the_help_goes_to_stderr_and_the_code_is_2(command):
    code, out, err = command.run()
    assert (code, out) == (2, "")
    assert "usage: kueue" in err
    assert "list-jobs" in err


def test_help_and_version_need_no_configuration_and_write_none(command):
    command.config.unlink()
    code, out, _ = command.run("--help")
    assert code == 0
    assert "kueue cmd ./my_script.py" in out
    assert command.run("-V")[1].startswith("kueue ")
    assert not command.config.exists()


def test_a_usage_error_names_the_verb_and_ends_with_2(command):
    code, out, err = command.run("list-jobs", "--nonsense")
    assert (code, out) == (2, "")
    assert "--nonsense" in err
    assert "kueue list-jobs --help" in err
    assert command.run("cmd")[0] == 2


def test_a_server_that_is_away_ends_with_1_naming_host_and_port(command):
    code, out, err = command.run("--patience", "0", "list-jobs")
    assert (code, out) == (1, "")
    assert "localhost:9" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_verb_that_only_looks_gives_a_server_that_is_away_up_within_ten_seconds(command):
    began = time.monotonic()
    code, out, err = command.run("show-job", "999999")
    assert (code, out) == (1, "")
    assert "localhost:9" in err
    assert 4 < time.monotonic() - began < 10


def test_a_missing_configuration_is_written_once_and_privately(command):
    command.config.unlink()
    _, _, err = command.run("list-jobs")
    assert str(command.config) in err
    assert command.config.stat().st_mode & 0o777 == 0o600
    text = command.config.read_text()
    command.run("--patience", "0", "list-jobs")
    assert command.config.read_text() == text


def test_config_on_the_command_line_wins(command, tmp_path):
    other = tmp_path / "other.toml"
    _, _, err = command.run("-c", str(other), "list-jobs")
    assert "localhost:11236" in err
    assert other.exists()


def test_a_listing_over_the_local_socket_is_the_golden_one(command, peer):
    peer(answering({"ListJobs": LISTING}))
    code, out, err = command.run("list-jobs")
    assert (code, err) == (0, "")
    assert "| finished after 0h:00m:10s" in out
    assert "pending: 1, running: 1, succeeded: 1, failed: 1" in out


def test_warnings_go_to_stderr_and_ids_stay_clean(command, peer):
    command.write("[client_settings]\njob_default_cpu = 3\n")
    peer(answering({"Submit": {"type": "Submitted", "ids": [[4, 4]]}, "ListJobs": LISTING}))
    code, out, err = command.run("cmd", "true")
    assert (code, out) == (0, "4\n")
    assert "job_default_cpus" in err
    assert json.loads(command.run("list-jobs", "--json")[1])["counts"]["pending"] == 1


@pytest.mark.parametrize(
    "env", [{"LC_ALL": "C", "PYTHONUTF8": "0"}, {"LC_ALL": "C.UTF-8"}, {"PYTHONIOENCODING": "ascii"}]
)
def test_no_locale_breaks_a_submission_or_a_listing(command, peer, env):
    name = "Grüße ☃"
    sent = []

    def submit(question):
        payload = question["ranges"][0]["payload"]
        sent.append((payload["name"], payload["argv"]))
        return [{"type": "Submitted", "ids": [[4, 4]]}]

    row = {**LISTING["jobs"][3], "payload": {"argv": ["echo", name]}}
    peer(answering({"Submit": submit, "ListJobs": {**LISTING, "jobs": [row]}}))
    assert command.run("cmd", "--name", name, "--", "echo", name, env=env)[:2] == (0, "4\n")
    assert sent == [(name, ["echo", name])]
    code, out, err = command.run("list-jobs", env=env)
    assert (code, err) == (0, "")
    assert "| echo Gr" in out
    assert len(out.splitlines()) == 4


def test_a_reader_that_leaves_is_no_error(command, peer):
    rows = [{**LISTING["jobs"][3], "id": number} for number in range(5000)]
    peer(answering({"ListJobs": {**LISTING, "jobs": rows}}))
    with command.start("list-jobs") as process:
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 141


@pytest.mark.parametrize("buffered", ["", "1"])
@pytest.mark.parametrize("redirection", [">&-", ">/dev/full"])
@pytest.mark.parametrize("words", ["list-jobs", "list-jobs --json", "--help", "cmd --help", "--version", "log --raw 3"])
def test_results_that_cannot_be_written_are_a_failure_with_one_sentence(command, peer, words, redirection, buffered):
    output = [{"type": "Output", "offset": 0, "data": "eA==", "source": "stored", "note": ""}]
    peer(answering({"ListJobs": LISTING, "ReadOutput": output}))
    done = subprocess.run(
        ["sh", "-c", f'"$0" -m kueue.cli.main {words} {redirection}', sys.executable],
        env=command.environment(PYTHONUNBUFFERED=buffered),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    *remarks, sentence = done.stderr.splitlines()
    assert sentence.startswith(b"Error: The results cannot be written: ")
    assert all(remark.startswith(b"Job 3: ") for remark in remarks)


@pytest.mark.parametrize("wait", ["", "--wait"])
def test_a_submission_whose_id_cannot_be_printed_is_not_made_or_named(command, peer, wait):
    submissions = []
    ends = [{"type": "JobEnded", "id": n, "outcome": {"type": "exited", "code": 0}} for n in (4, 5)]

    def submit(question):
        submissions.append(question)
        return [{"type": "Submitted", "ids": [[4, 5]]}]

    peer(answering({"Submit": submit, "WatchJobs": [{"type": "Watching", "missing": []}, *ends]}))
    script = f'printf "%s\\n" a b | "$0" -m kueue.cli.main cmd {wait} --each-line - '
    full, closed = (
        subprocess.run(
            ["bash", "-c", script + end, sys.executable],
            env=command.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
            check=False,
        )
        for end in (">/dev/full", ">&-")
    )
    assert full.returncode == closed.returncode == 1
    assert full.stderr.splitlines()[0] == b"Submitted as 4-5, but then something went wrong."
    assert full.stderr.splitlines()[1].startswith(b"Error: The results cannot be written: ")
    assert closed.stderr.startswith(b"Error: No job was made: stdout is closed")
    assert len(submissions) == 1


def test_a_submission_whose_id_nobody_reads_is_named(command, peer):
    has_left = threading.Event()

    def submit(_):
        assert has_left.wait(60)
        return [{"type": "Submitted", "ids": [[4, 5]]}]

    peer(answering({"Submit": submit}))
    with command.start("cmd", "true") as process:
        process.stdout.close()
        has_left.set()
        assert process.stderr.read() == b"Submitted as 4-5, but its reader has left.\n"
        assert process.wait(60) == 141


def test_a_closed_stderr_is_borne(command, peer):
    peer(answering({"ListJobs": LISTING}))
    script = '"$0" -m kueue.cli.main list-jobs 2>&- && "$0" -m kueue.cli.main list-jobs --nonsense 2>&-'
    done = subprocess.run(
        ["sh", "-c", script, sys.executable],
        env=command.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert b"pending: 1" in done.stdout


def _on_terminal(command, words, env):
    """Exit code and all that appears on a pseudo terminal."""
    outer, inner = pty.openpty()
    process = command.start(*words, env=env, stdin=inner, stdout=inner, stderr=inner)
    os.close(inner)
    shown = bytearray()
    while True:
        try:
            piece = os.read(outer, 65536)
        except OSError:  # the other end was closed by the last process that had it
            break
        if not piece:
            break
        shown += piece
    os.close(outer)
    return process.wait(60), shown.decode()


@pytest.mark.parametrize("columns", ["110", "1", "10", "0", None])
def test_every_width_of_a_terminal_works(command, peer, columns):
    peer(answering({"ListJobs": LISTING}))
    env = {"TERM": "xterm"} if columns is None else {"TERM": "xterm", "COLUMNS": columns}
    code, shown = _on_terminal(command, ["list-jobs"], env)
    assert code == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown).replace("\r\n", "\n").splitlines()
    assert len(lines) == 7
    if columns == "110":
        assert {len(line) for line in lines} == {110}
        assert "\x1b[32m" in shown


def test_no_name_of_a_job_reaches_the_terminal_as_an_escape_sequence(command, peer):
    row = {**LISTING["jobs"][3], "payload": {"argv": ["\x1b]0;owned\x07", "\x9b2J"], "name": "\x1b[2J"}}
    peer(answering({"ListJobs": {**LISTING, "jobs": [row]}}))
    _, shown = _on_terminal(command, ["list-jobs"], {"NO_COLOR": "1", "TERM": "xterm", "COLUMNS": "200"})
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "\\x1b]0;owned\\x07" in shown


@pytest.mark.parametrize("words", [[], ["--raw"]])
def test_a_log_on_a_terminal_shows_how_a_progress_bar_ended(command, peer, words):
    bar = b"".join(b"\x1b[32m%d%%\x1b[0m\r" % percent for percent in range(100))
    written = b"begun\n" + bar + b"100%\nplain\n" + bar

    def read(question):
        piece = written[question["offset"] :][:150]
        data = base64.b64encode(piece).decode()
        return [{"type": "Output", "offset": question["offset"], "data": data, "source": "worker"}]

    peer(answering({"ReadOutput": read}))
    code, shown = _on_terminal(command, ["log", *words, "3"], {"TERM": "xterm"})
    assert code == 0
    first, *lines = shown.splitlines() if not words else shown.split("\r\n")
    assert first == "Job 3: stdout from its worker."
    if words:
        assert "\n".join(lines).encode() == written
    else:
        assert lines[:3] == ["begun", "100%", "plain"]
        assert lines[3:] == ["99%", "Job 3: shown as far as it can be read; --raw shows every byte."]


@pytest.mark.parametrize("pieces", [[b"an error\rok"], [b"an error\r", b"ok"], [b"an error\ro", b"k\n"]])
def test_a_log_on_a_terminal_says_that_something_was_written_over(command, peer, pieces):
    starts = [sum(map(len, pieces[:number])) for number in range(len(pieces) + 1)]

    def read(question):
        piece = b"" if question["offset"] == starts[-1] else pieces[starts.index(question["offset"])]
        data = base64.b64encode(piece).decode()
        return [{"type": "Output", "offset": question["offset"], "data": data, "source": "worker"}]

    peer(answering({"ReadOutput": read}))
    code, shown = _on_terminal(command, ["log", "3"], {"TERM": "xterm"})
    assert code == 0
    assert shown.splitlines()[1:] == ["ok", "Job 3: shown as far as it can be read; --raw shows every byte."]


def test_a_log_on_a_terminal_breaks_a_line_that_does_not_end(command, peer):
    piece = base64.b64encode(b"x" * 250_000).decode()

    def read(question):
        is_over = question["offset"] >= 2_000_000
        return [{"type": "Output", "offset": question["offset"], "data": "" if is_over else piece, "source": "worker"}]

    peer(answering({"ReadOutput": read}))
    code, shown = _on_terminal(command, ["log", "3"], {"TERM": "xterm"})
    assert code == 0
    assert [len(line) for line in shown.splitlines() if set(line) == {"x"}] == [1_250_000, 750_000]
    assert shown.splitlines()[-1] == "Job 3: shown as far as it can be read; --raw shows every byte."


def test_an_interrupted_waiter_leaves_the_job_and_says_how_to_go_on(command, peer):
    heard = []

    def script(talk):
        talk.greet()
        heard.extend(talk.hear())
        talk.say({"type": "Watching", "seq": heard[-1]["seq"], "missing": []})
        heard.extend(talk.hear())

    peer(script)
    with command.start("wait-job", "7") as process:
        _wait_until(lambda: heard)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (-signal.SIGINT, b"")
    assert b"kueue wait-job 7" in err
    assert b"Traceback" not in err
    assert [message["type"] for message in heard] == ["WatchJobs"]


@pytest.mark.parametrize("words", ["cmd --wait true", "wait-job 7", "follow 7", "list-jobs", "--patience 60 cmd true"])
def test_ctrl_c_ends_the_loop_of_a_shell_in_which_a_command_waits(command, peer, words):
    heard = []

    def script(talk):
        talk.greet()
        while True:
            question = talk.hear()[0]
            if question["type"] == "Submit" and "--wait" in words:
                talk.say({"type": "Submitted", "seq": question["seq"], "ids": [[7, 7]]})
                continue
            heard.append(question)

    peer(script)
    loop = f'for i in 1 2 3; do "$0" -m kueue.cli.main {words}; done; echo over'
    terminal = Terminal(["bash", "-c", loop, sys.executable], command.environment(), command.directory)
    try:
        _wait_until(lambda: heard)
        terminal.type("\x03")
        assert terminal.process.wait(60) == -signal.SIGINT
        terminal.settle()
        assert "over" not in terminal.text
        assert "Traceback" not in terminal.text
        assert len(heard) == 1
    finally:
        terminal.close()


def test_what_was_printed_before_an_interrupt_is_there(command, peer):
    def script(talk):
        talk.greet()
        while True:
            for question in talk.hear():
                if question["type"] == "ExplainJob" and question["id"] == 3:
                    talk.say({"type": "Explanation", "seq": question["seq"], "id": 3, "verdict": "it is held"})
                else:
                    heard.append(question)

    heard = []
    peer(script)
    with command.start("explain", "3", "4") as process:
        _wait_until(lambda: heard)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (-signal.SIGINT, b"job 3:\nit is held\n", b"")


def test_a_waiter_outlives_its_server_and_tells_so_once(command, peer):
    def script(talk):
        talk.greet()
        (question,) = talk.hear()
        talk.say({"type": "Watching", "seq": question["seq"], "missing": []})
        if talk.number < 2:
            return
        talk.say(
            {
                "type": "JobEnded",
                "seq": question["seq"],
                "id": 7,
                "outcome": {"type": "exited", "code": 4},
                "exit_code": 4,
            }
        )
        talk.hear()

    peer(script)
    code, out, err = command.run("wait-job", "7")
    assert (code, out) == (4, "")
    assert err.count("Waiting for the server") == 1


def test_progress_of_many_is_one_line_and_only_on_a_terminal(command, peer):
    ends = [{"type": "JobEnded", "id": n, "outcome": {"type": "exited", "code": 0}} for n in range(3)]
    peer(answering({"WatchJobs": [{"type": "Watching", "missing": []}, *ends]}))
    assert command.run("wait-job", "0-2") == (0, "", "")
    code, shown = _on_terminal(command, ["wait-job", "0-2"], {"TERM": "xterm"})
    assert code == 0
    assert "\r\x1b[K3 of 3 jobs ended" in shown
    assert shown.endswith("\r\x1b[K")
    assert "\n" not in shown


def test_lines_of_stdin_become_jobs(command, peer):
    sent = []

    def submit(question):
        sent.extend(question["ranges"][0]["argvs"])
        return [{"type": "Submitted", "ids": [[0, 1]]}]

    peer(answering({"Submit": submit}))
    with command.start("cmd", "--each-line", "-", "gzip", "{}", stdin=subprocess.PIPE) as process:
        out, _ = process.communicate(b"a\nb\n", timeout=60)
    assert out == b"0\n1\n"
    assert sent == [["gzip", "a"], ["gzip", "b"]]


@pytest.mark.parametrize("words", [["--help"], ["cmd", "true"], ["list-jobs"], ["wait-job", "7"]])
def test_what_is_used_all_day_starts_without_heavy_modules(command, peer, words):
    ended = {"type": "JobEnded", "id": 7, "outcome": {"type": "exited", "code": 0}}
    peer(
        answering(
            {
                "Submit": {"type": "Submitted", "ids": [[4, 4]]},
                "ListJobs": LISTING,
                "WatchJobs": [{"type": "Watching", "missing": []}, ended],
            }
        )
    )
    # The parsed configuration is kept once the file is two seconds old.
    os.utime(command.config, (time.time() - 60, time.time() - 60))
    command.run("--patience", "0", "list-jobs")
    with subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "kueue.cli.main", *words],
        env=command.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0
    loaded = {line.rpartition("|")[2].strip() for line in err.decode().splitlines() if "|" in line}
    heavy = {"trio", "rich", "ssl", "_ssl", "cryptography", "msgspec", "tomllib", "tomli", "typing", "subprocess"}
    heavy |= {"dataclasses", "inspect", "asyncio", "logging", "pathlib", "hashlib", "kueue.model", "kueue.core"}
    assert "kueue.cli.arguments" in loaded
    assert not loaded & heavy


def _wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        select.select([], [], [], 0.01)
