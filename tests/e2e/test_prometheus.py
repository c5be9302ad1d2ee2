"""A real Prometheus scrapes a laboratory at work, and everything that dashboards and alerts ask of it has an answer."""

from __future__ import annotations

import json
import shutil
import time
import urllib.request
from collections.abc import Mapping

import pytest
from prometheus_client.parser import text_string_to_metric_families as parsed

from tests.support.kill_lab import MORTAL, SMALL, KillLab
from tests.support.ports import free_port
from tests.support.prometheus import (
    DASHBOARDS,
    Prometheus,
    expressions,
    metrics_in,
    substituted,
    variables,
    without_threshold,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
]

LOST = "localhost"
"""The worker that is killed. Prometheus is told no name for it and makes one of the address."""


class Watched(KillLab):
    """Two workers with figures of their own, a licence, and jobs that meet all that jobs meet."""

    def __init__(self, folder) -> None:
        super().__init__(folder)
        self.port_of_figures = free_port()
        self.settings["metrics_settings"] = {"server_bind": f"127.0.0.1:{self.port_of_figures}"}
        self.ports = {"w1": free_port(), LOST: free_port()}

    def begin(self) -> Prometheus:
        """Both workers are there and scraped, and the one that will be lost runs a job that the other can take."""
        self.start_server(server_settings=MORTAL, global_resources={"genus": 1})
        self.start_watched_worker(LOST)
        job = self.submit(*SMALL, *self.gate().command)
        self.until(lambda: self.state(job) == "running", "a job runs on the worker that will be lost")
        self.start_watched_worker("w1", resources="gpu=2")
        addresses = {f"127.0.0.1:{self.ports['w1']}": "w1", f"{LOST}:{self.ports[LOST]}": ""}
        found = Prometheus(self, self.port_of_figures, addresses)
        self.until(lambda: len(found.values("up == 1")) == 3, "all are scraped", seconds=60)
        return found

    def start_watched_worker(self, name: str, **settings: object) -> None:
        self.settings["metrics_settings"]["worker_bind"] = f"127.0.0.1:{self.ports[name]}"
        self.start_worker(name, system_update_interval_seconds=2, **settings)

    def lose_a_worker(self) -> None:
        runners = [*self.runner_processes("keeper", LOST), *self.runner_processes("spawner", LOST)]
        self.kill(self.workers[LOST].pid, *runners)

    def work(self) -> None:
        """Successes, failures, a canceled job; one that holds the licence and one that waits for it; one too large."""
        gate = self.gate()
        holder = self.submit(*SMALL, "--resource", "genus", *gate.command)
        waiter = self.submit(*SMALL, "--resource", "genus", "true")
        self.submit(*SMALL, "--gpus", "1", *gate.command)
        self.submit("-c", "1000", "-r", "1", "true")
        good = [self.submit(*SMALL, "sleep", "0.2") for _ in range(3)]
        bad = self.submit(*SMALL, "sh", "-c", "exit 3")
        gone = self.submit(*SMALL, "--resource", "genus", "true")
        self.kueue("remove-job", str(gone))
        self.until(
            lambda: (
                self.states([holder, waiter, *good, bad, gone])
                == ["running", "pending", *["succeeded"] * 3, "failed", "canceled"]
            ),
            "the jobs are where they should be",
        )

    def load(self) -> None:
        """Two hundred jobs of which the worker runs ten at a time, while Prometheus looks on."""
        lines = self.folder / "lines"
        lines.write_text("true\n" * 200)
        done = self.kueue("cmd", *SMALL, "--each-line", str(lines))
        assert done.returncode == 0, done.stderr

    def shown(self) -> dict[str, str]:
        """Name of each sample that server and worker show → kind of its family."""
        found = {}
        for port in (self.port_of_figures, self.ports["w1"]):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
                for family in parsed(answer.read().decode()):
                    found |= {sample.name: family.type for sample in family.samples}
        return found


@pytest.fixture
def lab(tmp_path):
    with Watched(tmp_path) as lab:
        yield lab


def ask_until_all_have_answers(lab: Watched, prometheus: Prometheus, questions: Mapping[str, list[str]]) -> None:
    """`questions`: what it is for → expressions of which one must have a number; those that never do are told."""
    left = dict(questions)

    def look() -> bool:
        nonlocal left
        left = {what: one for what, one in left.items() if not any(prometheus.values(expr) for expr in one)}
        return not left

    deadline = time.monotonic() + 40
    while not look() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not left, f"{left}\n{lab.logs()}"


def test_every_expression_of_every_panel_and_alert_has_an_answer_and_every_figure_is_used(lab):
    prometheus = lab.begin()
    lab.lose_a_worker()
    lab.work()
    lab.load()
    lab.until(
        lambda: prometheus.values("increase(kueue_attempts_lost_total[1h]) > 0"), "the lost attempt is seen", seconds=60
    )
    server = f"127.0.0.1:{lab.port_of_figures}"
    chosen = {"server": server, "worker": "w1", "__rate_interval": "15s"}
    questions: dict[str, list[str]] = {}
    used: set[str] = set()

    for path in DASHBOARDS:
        dashboard = json.loads(path.read_text())
        for name, selector, label in variables(dashboard):
            found = prometheus.labels(label, substituted(selector, chosen))
            assert chosen[name] in found, (path.stem, name)
            used |= metrics_in(selector)
        for title, expr in expressions(dashboard):
            # Alerts of one worker are marked where there are some.
            where = chosen | {"worker": LOST} if title.startswith("annotation") else chosen
            questions[f"{path.stem}: {title}: {expr}"] = [substituted(expr, where)]
            used |= metrics_in(expr)
    rules = prometheus.alert_rules()
    for rule in rules:
        assert (rule["health"], rule.get("lastError", "")) == ("ok", ""), rule
        questions[rule["name"]] = [rule["query"], without_threshold(rule["query"])]
        used |= metrics_in(rule["query"])
    assert len(questions) > 100
    ask_until_all_have_answers(lab, prometheus, questions)

    shown = lab.shown()
    assert used - shown.keys() == set()
    families = {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in used}
    unused = {
        name
        for name, kind in shown.items()
        if name.startswith("kueue_")
        and not (name in used or (kind == "histogram" and name.rpartition("_")[0] in families))
    }
    assert unused == set()

    expected = {"KueueWorkerLost", "KueueAttemptsLost", "KueueLicenceExhausted", "KueueJobsImpossible"}
    lab.until(lambda: expected <= prometheus.firing().keys(), f"these fire: {expected}")
    firing = prometheus.firing()
    assert not {"KueueReadOnly", "KueueNoWorker"} & firing.keys()
    assert firing["KueueWorkerLost"]["labels"]["worker"] == LOST
    assert firing["KueueLicenceExhausted"]["labels"]["resource"] == "genus"
    for name, alert in firing.items():
        for text in alert["annotations"].values():
            assert not {mark for mark in ("{{", "<no value>", "<error", "%!") if mark in text}, (name, text)
    # A scrape that takes longer than the second between two of them is one that failed; a busy machine has some.
    assert prometheus.values('avg_over_time(up{job="kueue"}[10m]) > 0.8')
    # The name that the relabelling made of the address joins the worker's figures to the server's.
    assert [labels["worker"] for labels, _ in prometheus.values(f'up{{job="kueue-workers",worker="{LOST}"}}')] == [LOST]
