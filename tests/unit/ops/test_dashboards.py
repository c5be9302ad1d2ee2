"""Dashboards and rules are what Grafana and Prometheus take, and name what kueue shows, all of it."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

import kueue.server.metrics
import kueue.worker.metrics
from kueue.cli import arguments
from kueue.server.metrics import Disk, Sight, families
from tests.support import dashboards
from tests.support.large_lab import LargeLab
from tests.support.prometheus import (
    DASHBOARDS,
    RULE_TESTS,
    RULES,
    SCRAPES,
    expressions,
    metrics_in,
    rule_expressions,
    variables,
)

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
each_dashboard = pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
SUFFIX = re.compile(r"_(total|bucket|sum|count)$")


def read(path: Path):
    return json.loads(path.read_text(encoding="utf-8"))


def panels(path: Path):
    return [panel for panel in read(path)["panels"] if panel["type"] != "row"]


def promtool(*words: object) -> tuple[int, str]:
    done = subprocess.run(["promtool", *map(str, words)], capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, done.stdout + done.stderr


# --- dashboards ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", dashboards.FILES)
def test_a_dashboard_is_what_its_description_makes(file):
    text = (dashboards.ROOT / file).read_text(encoding="utf-8")
    assert text == dashboards.text_of(dashboards.FILES[file]()), "run: python tests/support/dashboards.py"


def test_there_is_no_other_dashboard():
    assert [str(path.relative_to(dashboards.ROOT)) for path in DASHBOARDS] == sorted(dashboards.FILES)


@each_dashboard
def test_a_dashboard_can_be_provisioned_as_well_as_imported(path):
    text, found = path.read_text(encoding="utf-8"), read(path)
    assert found["id"] is None
    assert found["uid"] == path.stem
    assert found["timezone"] == "browser"
    assert found["refresh"]
    # The first with panels and data sources as they are written here is that of Grafana 9.0; 39 came in Grafana 10.
    assert 36 <= found["schemaVersion"] <= 39
    assert not {"__inputs", "__requires", "__elements"} & found.keys()
    assert "${DS_" not in text
    source = found["templating"]["list"][0]
    assert (source["type"], source["name"], source["query"]) == ("datasource", "datasource", "prometheus")
    places = [*panels(path), *found["annotations"]["list"], *found["templating"]["list"][1:]]
    places += [target for panel in panels(path) for target in panel["targets"]]
    assert [place for place in places if place["datasource"] != {"type": "prometheus", "uid": "${datasource}"}] == []


@each_dashboard
def test_every_panel_tells_what_it_shows_in_which_unit_and_what_to_do(path):
    known = {"timeseries", "stat", "bargauge", "table"}
    for panel in panels(path):
        field = panel["fieldConfig"]["defaults"]
        assert panel["type"] in known, panel["title"]
        assert panel["title"], panel
        assert panel["description"].endswith("."), panel["title"]
        assert field["unit"], panel["title"]
        steps = field["thresholds"]["steps"]
        assert steps[0]["value"] is None, panel["title"]
        assert all(one["value"] < two["value"] for one, two in pairwise(steps[1:])), panel["title"]
        assert panel["targets"], panel["title"]
        assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters), panel["title"]


@each_dashboard
def test_panels_lie_side_by_side_and_have_numbers_of_their_own(path):
    everything = read(path)["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    cells = [
        (x, y)
        for panel in everything
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


@each_dashboard
def test_only_variables_that_there_are_are_used_and_all_of_them(path):
    found = read(path)
    names = {one["name"] for one in found["templating"]["list"]}
    used = {
        name for _, expr in expressions(found) for name in re.findall(r"\$\{?(\w+)", expr) if not name.startswith("__")
    }
    used |= {name for _, selector, _ in variables(found) for name in re.findall(r"\$\{?(\w+)", selector)}
    assert used == names - {"datasource"}


@each_dashboard
def test_links_lead_to_dashboards_that_there_are_and_bring_their_variables(path):
    found = read(path)
    by_uid = {read(one)["uid"]: read(one) for one in DASHBOARDS}
    assert any(link["type"] == "dashboards" and link["tags"] == found["tags"] for link in found["links"])
    for uid, words in re.findall(r'"/d/([\w-]+)\?([^"]*)"', path.read_text(encoding="utf-8")):
        names = {one["name"] for one in by_uid[uid]["templating"]["list"]}
        assert set(re.findall(r"var-(\w+)=", words)) == names


def test_the_table_of_workers_leads_to_each_worker():
    assert "/d/kueue-worker?var-worker=${__value.raw}" in DASHBOARDS[0].read_text(encoding="utf-8")


# --- names -----------------------------------------------------------------------------------------------------------


def used_by_dashboards_and_rules() -> set[str]:
    found = [expr for path in DASHBOARDS for _, expr in expressions(read(path))]
    found += [selector for path in DASHBOARDS for _, selector, _ in variables(read(path))]
    found += rule_expressions(RULES.read_text(encoding="utf-8")).values()
    return {SUFFIX.sub("", name) for expr in found for name in metrics_in(expr) if name.startswith("kueue_")}


def names_in(module) -> set[str]:
    """Names of families in the source of a module; what a real program shows is looked at by the test with one."""
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and re.fullmatch(r"kueue_[a-z0-9_]+[a-z0-9]", str(node.value))
    }


def test_dashboards_and_rules_use_what_is_shown_and_all_of_it():
    lab = LargeLab(1)
    shown = {family.name for family in families(Sight(lab.engine, lab.now, lab.measures, disk=Disk(1, 1)))}
    assert shown == names_in(kueue.server.metrics)
    shown |= names_in(kueue.worker.metrics)
    assert used_by_dashboards_and_rules() == shown


def test_every_command_that_is_advised_is_one():
    texts = [panel["description"] for path in DASHBOARDS for panel in panels(path)]
    texts.append(RULES.read_text(encoding="utf-8"))
    commands = {
        re.sub(r"NAME|\{\{.*?\}\}", "ralab01", command).replace("ID", "1")
        for text in texts
        for command in re.findall(r"`kueue ([^`]+)`", text)
    }
    assert len(commands) > 10
    for command in commands:
        arguments.parse(command.split())  # raises for one that is not


# --- rules -----------------------------------------------------------------------------------------------------------


def test_every_alert_tells_what_it_means_and_what_to_type():
    for block in re.split(r"(?m)^      - alert: ", RULES.read_text(encoding="utf-8"))[1:]:
        name = block.partition("\n")[0]
        assert re.fullmatch(r"Kueue\w+", name)
        assert re.search(r"(?m)^          severity: (critical|warning|info)$", block), name
        keys = re.findall(r"(?m)^          (\w+): ", block)
        assert keys == ["severity", "summary", "description", "action"], name


@needs_promtool
def test_promtool_finds_nothing_wrong_with_rules_and_scrape_configuration():
    code, text = promtool("check", "rules", "--lint=all", "--lint-fatal", RULES)
    assert code == 0, text
    code, text = promtool("check", "config", SCRAPES)
    assert code == 0, text
    assert "WARNING" not in text


def test_the_scrape_configuration_can_be_named_in_another_one():
    # A file that is named under scrape_config_files may hold that one key alone.
    keys = re.findall(r"(?m)^(\w+):", SCRAPES.read_text(encoding="utf-8"))
    assert keys == ["scrape_configs"]


@needs_promtool
@pytest.mark.slow
def test_every_alert_fires_when_it_should_and_only_then():
    code, text = promtool("test", "rules", RULE_TESTS)
    assert code == 0, text


@needs_promtool
@pytest.mark.slow
def test_the_tests_of_the_rules_miss_every_alert_that_never_fires(tmp_path):
    text = RULES.read_text(encoding="utf-8")
    names = set(rule_expressions(text))
    shutil.copy(RULE_TESTS, tmp_path)
    dead = re.sub(r"(?ms)^        expr: .*?(?=^        (?:for|labels):)", "        expr: vector(0) > 1\n", text)
    (tmp_path / RULES.name).write_text(dead)
    code, text = promtool("test", "rules", tmp_path / RULE_TESTS.name)
    assert code != 0
    missed = [line for line in text.splitlines() if line.lstrip().startswith("exp:")]
    assert {name for line in missed for name in re.findall(r'alertname="(\w+)"', line)} == names
