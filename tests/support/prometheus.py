"""A real Prometheus that scrapes a laboratory as ops/prometheus says, faster; and what dashboards and rules ask of it."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.support.lab import Lab
from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
DASHBOARDS = sorted((ROOT / "ops/grafana").glob("*.json"))
SCRAPES = ROOT / "ops/prometheus/kueue.scrape.yml"
RULES = ROOT / "ops/prometheus/kueue.rules.yml"
RULE_TESTS = ROOT / "ops/prometheus/kueue.rules.test.yml"

THRESHOLD = re.compile(r"\s*(?:>=|<=|==|!=|>|<)\s*(?:bool\s*)?-?[0-9][0-9.e+]*")
STRING = re.compile(r'"(?:\\.|[^"\\])*"')


class Prometheus:
    """Started in the folder of `lab` and ended with it. `url` is where it answers."""

    def __init__(self, lab: Lab, server_port: int, workers: Mapping[str, tuple[str, str]]) -> None:
        """`workers`: address → (its label; empty: none is given)."""
        folder = lab.folder / "prometheus"
        folder.mkdir()
        # A scrape of every 15 s and alerts after minutes would make the test wait; all else is as it is shipped.
        scrapes = SCRAPES.read_text().replace('"127.0.0.1:11237"', f'"127.0.0.1:{server_port}"').replace("15s", "1s")
        rules = re.sub(r"(?m)^        for: .*\n", "", RULES.read_text())
        (folder / "kueue.rules.yml").write_text(rules)
        (folder / "kueue.workers.yml").write_text(json.dumps([_target(*each) for each in workers.items()]))
        config = folder / "prometheus.yml"
        config.write_text("global:\n  evaluation_interval: 1s\nrule_files: [kueue.rules.yml]\n" + scrapes)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        with (lab.folder / "prometheus.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={config}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                    "--log.level=warn",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=lab.environment(),
                cwd=folder,
                start_new_session=True,
            )
        lab.processes.append(self.process)
        lab.until(self.is_ready, "Prometheus answers", seconds=60, process=self.process)

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def get(self, path: str, **parameters: str) -> Any:
        """`data` of an answer of the API; an error is raised with what it says."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{parameters}: {error.read().decode()}") from None

    def values(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """(labels, value) of each series; those without a number are left out."""
        found = self.get("query", query=expr)
        rows = (
            [({}, found["result"])]
            if found["resultType"] == "scalar"
            else [(one["metric"], one["value"]) for one in found["result"]]
        )
        return [(labels, float(value)) for labels, (_, value) in rows if value != "NaN"]

    def labels(self, name: str, selector: str) -> list[str]:
        """Values of a label; what ``label_values(selector, name)`` of a dashboard gives."""
        return [str(value) for value in self.get(f"label/{name}/values", **{"match[]": selector})]

    def firing(self) -> dict[str, dict[str, Any]]:
        """Alerts that fire, by name; of several of one name one of them."""
        alerts = self.get("alerts")["alerts"]
        return {one["labels"]["alertname"]: one for one in alerts if one["state"] == "firing"}

    def alert_rules(self) -> list[dict[str, Any]]:
        groups = self.get("rules", type="alert")["groups"]
        return [rule for group in groups for rule in group["rules"]]


def _target(address: str, label: str) -> dict[str, object]:
    return {"targets": [address], **({"labels": {"worker": label}} if label else {})}


# --- what is asked ---------------------------------------------------------------------------------------------------


def expressions(dashboard: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(title of the panel, expression), and the expressions of annotations."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for annotation in dashboard["annotations"]["list"]:
        yield f"annotation {annotation['name']}", annotation["expr"]


def variables(dashboard: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(name, selector, label) of each variable that is filled by a query."""
    for one in dashboard["templating"]["list"]:
        if one["type"] == "query":
            found = re.fullmatch(r"label_values\((.+), (\w+)\)", one["query"]["query"])
            assert found, one
            yield one["name"], found[1], found[2]


def substituted(expr: str, chosen: Mapping[str, str]) -> str:
    """An expression as Grafana sends it."""
    for name, value in chosen.items():
        expr = re.sub(rf"\${name}\b|\${{{name}}}", lambda _, value=value: value, expr)
    assert "$" not in expr, expr
    return expr


def without_threshold(expr: str) -> str:
    """What an alert compares, whatever it is compared to."""
    strings = STRING.findall(expr)
    bare = THRESHOLD.sub("", STRING.sub("\0", expr))
    for text in strings:
        bare = bare.replace("\0", text, 1)
    return bare


def metrics_in(expr: str) -> set[str]:
    """Names of kueue and of processes, as they are written in an expression."""
    return set(re.findall(r"\b(?:kueue|process)_[a-z0-9_]+", STRING.sub('""', expr)))


def rule_expressions(text: str) -> dict[str, str]:
    """Alert → expression, of a file of rules in the layout of ours."""
    found = {}
    for block in re.split(r"(?m)^      - alert: ", text)[1:]:
        name, _, rest = block.partition("\n")
        expr = re.search(r"(?ms)^        expr: (?:>-\n)?(.*?)^        (?:for|labels):", rest)
        assert expr, name
        found[name.strip()] = " ".join(expr[1].split())
    return found
