"""Figures of real programs over real sockets: what is served, what survives, and that nothing here ever stops them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parsed_open
from prometheus_client.parser import text_string_to_metric_families as parsed

from tests.e2e.test_kills_disk import disk  # noqa: F401  a fixture
from tests.support.kill_lab import SMALL, KillLab
from tests.support.ports import free_port

pytestmark = pytest.mark.slow


class Watched(KillLab):
    """A laboratory whose figures are looked at."""

    def __init__(self, folder) -> None:
        super().__init__(folder)
        self.port_of_figures = free_port()
        self.settings["metrics_settings"] = {"server_bind": f"127.0.0.1:{self.port_of_figures}"}

    def begin(self, **sections: dict[str, object]) -> None:
        """Start the server, and wait until its figures can be had."""
        self.start_server(**sections)
        self.until(lambda: self.get("/healthz")[0] == 200, "the figures are served", process=self.server)

    def get(self, path: str = "/metrics", port: int = 0, accept: str = "*/*") -> tuple[int, str]:
        """(status, body); status 0: nobody answers."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{port or self.port_of_figures}{path}", headers={"Accept": accept}
        )
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def figures(self, port: int = 0) -> dict[str, float]:
        status, text = self.get(port=port)
        return series(text) if status == 200 else {}

    def until_figures(self, holds: Callable[[dict[str, float]], object], what: str, port: int = 0) -> dict[str, float]:
        found: dict[str, float] = {}

        def look() -> object:
            nonlocal found
            found = self.figures(port)
            return found and holds(found)

        self.until(look, what)
        return found


def series(text: str) -> dict[str, float]:
    return {
        sample.name + json.dumps(sample.labels, sort_keys=True): sample.value
        for family in parsed(text)
        for sample in family.samples
    }


def of(found: dict[str, float], name: str, **labels: str) -> float:
    return found.get(name + json.dumps(labels, sort_keys=True), -1.0)


@pytest.fixture
def lab(tmp_path):
    with Watched(tmp_path) as lab:
        yield lab


def promtool_says(text: str) -> str:
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    return f"{done.returncode} {done.stdout}{done.stderr}".strip()


def test_the_figures_tell_of_jobs_and_workers_and_survive_a_restart_of_the_server(lab):
    lab.begin(global_resources={"genus": 3})
    lab.start_worker("w1")
    good, bad = lab.submit(*SMALL, "true"), lab.submit(*SMALL, "sh", "-c", "exit 3")
    lab.until(lambda: lab.states([good, bad]) == ["succeeded", "failed"], "both are done")
    found = lab.figures()
    assert of(found, "kueue_jobs_finished_total", outcome="succeeded") == 1
    assert of(found, "kueue_jobs_finished_total", outcome="failed") == 1
    assert of(found, "kueue_attempts_started_total") == 2
    assert of(found, "kueue_job_run_seconds_count") == 2
    assert of(found, "kueue_worker_up", worker="w1") == 1
    assert of(found, "kueue_worker_cpus", worker="w1") == 16
    assert of(found, "kueue_resource_limit", resource="genus") == 3
    assert of(found, "kueue_connections", kind="worker") == 1
    assert of(found, "kueue_worker_connects_total") == 1
    assert of(found, "kueue_store_bytes") > 0
    assert of(found, "kueue_disk_free_bytes", of="state") > 0
    assert of(found, "kueue_store_commit_seconds_count") > 0
    assert of(found, "process_cpu_seconds_total") > 0
    assert lab.get("/healthz") == (200, '{"status": "ok"}\n')

    assert lab.server is not None
    lab.server.kill()
    lab.server.wait()
    lab.begin()
    found = lab.until_figures(lambda found: of(found, "kueue_worker_up", worker="w1") == 1, "the worker is back")
    assert of(found, "kueue_jobs_submitted_total") == 2
    assert of(found, "kueue_jobs_finished_total", outcome="succeeded") == 1
    assert of(found, "kueue_jobs_finished_total", outcome="failed") == 1
    assert of(found, "kueue_attempts_started_total") == 0


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_nothing_to_say_about_server_and_worker_and_both_formats_can_be_read(lab):
    port = free_port()
    lab.settings["metrics_settings"]["worker_bind"] = f"127.0.0.1:{port}"
    lab.begin()
    lab.start_worker("w1", resources="gpu=2")
    job = lab.submit(*SMALL, "true")
    lab.until(lambda: lab.state(job) == "succeeded", "the job is done")
    for place in (0, port):
        status, text = lab.get(port=place)
        assert (status, promtool_says(text)) == (200, "0")
        status, text = lab.get(port=place, accept="application/openmetrics-text; version=1.0.0")
        assert status == 200
        assert len(list(parsed_open(text))) > 5


def test_a_worker_shows_its_own_figures(lab):
    port = free_port()
    lab.settings["metrics_settings"]["worker_bind"] = f"127.0.0.1:{port}"
    lab.begin()
    lab.start_worker("w1")
    gate = lab.gate()
    job = lab.submit(*SMALL, *gate.command)
    lab.until(lambda: lab.state(job) == "running", "the job runs")
    found = lab.until_figures(
        lambda found: of(found, "kueue_worker_attempts", state="running") == 1, "the attempt is seen", port
    )
    assert of(found, "kueue_worker_connected") == 1
    assert of(found, "kueue_worker_sessions_total") == 1
    assert of(found, "kueue_worker_runners") == 1
    assert 0 < of(found, "kueue_worker_lease_remaining_seconds") <= 300
    assert of(found, "kueue_worker_spool_bytes") > 0
    assert of(found, "kueue_worker_disk_free_bytes", of="spool") > 0
    assert lab.get("/healthz", port=port) == (200, '{"status": "ok"}\n')
    both = {name.partition("{")[0] for name in found} & {name.partition("{")[0] for name in lab.figures()}
    assert not [name for name in both if name.startswith("kueue_")]
    assert lab.server is not None
    lab.server.kill()
    lab.until(lambda: lab.get("/healthz", port=port)[0] == 503, "the worker says that it is alone")
    gate.open()


def test_many_jobs_make_no_more_series_than_few(lab):
    lab.begin()
    lab.start_worker("w1", worker_max_parallel_jobs=50)
    few = [lab.submit(*SMALL, "true") for _ in range(3)]
    lab.until(lambda: lab.states(few) == ["succeeded"] * 3, "three are done")
    before = lab.figures()
    commands = lab.folder / "commands"
    commands.write_text("".join(f"echo a-word-of-its-own-{number}\n" for number in range(300)))
    done = lab.kueue("cmd", *SMALL, "--each-line", str(commands))
    assert done.returncode == 0, done.stderr
    lab.until_figures(lambda found: of(found, "kueue_jobs_finished_total", outcome="succeeded") == 303, "all are done")
    _, text = lab.get()
    after = series(text)
    ours = [{name for name in found if name.startswith("kueue_")} for found in (before, after)]
    assert ours[0] == ours[1]
    assert "a-word-of-its-own" not in text
    assert str(lab.folder) not in text


def test_a_worker_that_is_gone_longer_than_the_time_out_has_no_series(lab):
    lab.begin(server_settings={"worker_timeout_seconds": 10})
    worker = lab.start_worker("w1", system_update_interval_seconds=2)
    assert of(lab.figures(), "kueue_worker_up", worker="w1") == 1
    worker.kill()
    worker.wait()
    lab.until_figures(lambda found: of(found, "kueue_worker_up", worker="w1") == 0, "it is seen to be down")
    found = lab.until_figures(lambda found: of(found, "kueue_worker_up", worker="w1") == -1, "it is forgotten")
    assert not [name for name in found if '"worker": "w1"' in name]


def test_a_port_that_is_taken_is_said_and_the_server_works_all_the_same(lab):
    with socket.create_server(("127.0.0.1", lab.port_of_figures)):
        lab.start_server()
        lab.start_worker("w1")
        job = lab.submit(*SMALL, "true")
        lab.until(lambda: lab.state(job) == "succeeded", "the job is done")
    line = next(line for line in lab.log("server").splitlines() if "cannot listen" in line)
    assert f"127.0.0.1:{lab.port_of_figures}" in line
    assert "Address already in use" in line


def test_another_place_counts_after_a_reload_and_none_is_none(lab):
    lab.begin()
    first, second = lab.port_of_figures, free_port()
    lab.settings["metrics_settings"]["server_bind"] = f"127.0.0.1:{second}"
    lab.config()
    assert lab.server is not None
    lab.server.send_signal(signal.SIGHUP)
    lab.until(lambda: lab.get("/healthz", port=second)[0] == 200, "the second place answers")
    assert lab.get("/healthz", port=first)[0] == 0
    lab.settings["metrics_settings"]["server_bind"] = ""
    lab.config()
    lab.server.send_signal(signal.SIGHUP)
    lab.until(lambda: lab.get("/healthz", port=second)[0] == 0, "nobody answers")
    assert lab.answers()


def test_peers_that_misbehave_do_not_disturb_the_server(lab):
    lab.begin()
    lab.start_worker("w1")
    with contextlib.ExitStack() as stack:
        for number in range(100):  # far more than are served at once; none of them ever says enough
            peer = stack.enter_context(socket.create_connection(("127.0.0.1", lab.port_of_figures), timeout=20))
            with contextlib.suppress(OSError):
                peer.sendall((b"", b"GET /metrics HT", b"\x16\x03\x01", os.urandom(3000))[number % 4])
        assert lab.get()[0] == 200
        job = lab.submit(*SMALL, "true")
        lab.until(lambda: lab.state(job) == "succeeded", "the job is done")
    assert lab.get("/nothing")[0] == 404
    assert "Traceback" not in lab.log("server")


def test_health_and_figures_tell_of_a_full_disk(disk, lab):  # noqa: F811  the fixture
    small = disk(lab.folder / "state" / "server", 64)
    lab.begin()
    small.fill()
    assert lab.kueue("cmd", *SMALL, "true").returncode != 0
    lab.until(lambda: lab.get("/healthz") == (503, '{"status": "read-only"}\n'), "the server says that it is read-only")
    found = lab.figures()
    assert of(found, "kueue_read_only") == 1
    assert of(found, "kueue_disk_free_bytes", of="state") < 2**20
    assert of(found, "kueue_jobs_submitted_total") == 0
    small.free()
    lab.until(lambda: lab.get("/healthz")[0] == 200, "it is back", seconds=60)
    assert of(lab.figures(), "kueue_read_only") == 0


def test_the_file_for_node_exporter_is_written_kept_readable_and_removed_at_the_end(lab):
    path = lab.folder / "collected" / "kueue.prom"
    lab.settings["metrics_settings"] = {"server_bind": "", "server_textfile": str(path)}
    lab.start_server()
    lab.until(lambda: "cannot write the figures" in lab.log("server"), "the missing directory is said")
    path.parent.mkdir()
    lab.config()
    assert lab.server is not None
    # Its turn would come within 15 s; another place and back makes it come at once.
    for place in (str(path) + "x.prom", str(path)):
        lab.settings["metrics_settings"]["server_textfile"] = place
        lab.config()
        lab.server.send_signal(signal.SIGHUP)
        lab.until(lambda place=place: os.path.exists(place), "the file is written")
    text = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o644
    names = {name.partition("{")[0] for name in series(text)}
    assert "kueue_read_only" in names
    # node_exporter has its own of these and refuses everything if two of one name differ.
    assert all(name.startswith("kueue_") for name in names)
    assert [entry.name for entry in path.parent.iterdir()] == ["kueue.prom"]
    lab.server.terminate()
    assert lab.server.wait(20) == 0
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("server_bind", "11237"),
        ("server_bind", "::1:11237"),
        ("server_bind", "127.0.0.1:70000"),
        ("server_bind", "http://127.0.0.1:11237"),
        ("worker_bind", "somewhere"),
        ("server_textfile", "kueue.prom"),
        ("server_textfile", "/tmp/kueue.txt"),
    ],
)
def test_a_mistake_in_the_settings_is_named_with_key_and_line(lab, key, value):
    lab.settings["metrics_settings"] = {key: value}
    path = lab.config()
    server = lab.start("kueue.server.main", "-c", str(path), log="server")
    assert server.wait(30) != 0
    line = path.read_text().splitlines().index(f"{key} = {json.dumps(value)}") + 1
    assert f"{path}, line {line}: metrics_settings.{key} must be" in lab.log("server")
