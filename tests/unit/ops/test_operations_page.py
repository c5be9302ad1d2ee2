"""What docs/operations.md and README.md tell people to type, set and watch is there, and what is there to watch is told."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import kueue.server.metrics
import kueue.worker.metrics
from kueue import config
from kueue.cli import arguments, verbs
from kueue.errors import KueueError
from kueue.server import main as server_program
from kueue.server.metrics import Disk, Sight, families
from kueue.settings import SECTIONS
from kueue.worker import main as worker_program
from kueue_ops import install, restart_workers
from kueue_ops.systemd import PARTS
from tests.support.large_lab import LargeLab
from tests.support.prometheus import RULES, metrics_in, rule_expressions

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/operations.md"
README = ROOT / "README.md"
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
PARSERS = {
    "kueue_server": server_program._parser,
    "kueue_worker": worker_program._parser,
    "kueue_restart_workers": restart_workers._parser,
    "kueue_install": install._parser,
}
PROGRAMS = (*PARSERS, "kueue")
UNITS = {part.unit.removesuffix(".service") for part in PARTS.values()} | {"kueue-backup"}  # the page itself makes that
each_page = pytest.mark.parametrize("page", [PAGE, README], ids=lambda page: page.name)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def code_of(page: Path) -> Iterator[str]:
    """Every line of a fenced block without a language or in ini, and every span of code; without comments."""
    text = text_of(page).replace(r"\|", "|")  # as it is written within a table
    for language, block in FENCE.findall(text):
        if language in {"", "ini"}:
            yield from (line.split("  #")[0].strip() for line in block.splitlines() if not line.startswith("#"))
    yield from SPAN.findall(FENCE.sub("", text))


def calls_of(page: Path) -> list[tuple[str, ...]]:
    """Words of each call of one of our programs, the program's bare name first."""
    calls = []
    for line in code_of(page):
        if "…" in line or '"$(' in line:
            continue
        for part in re.split(r"[|;&]+|\bscreen (?:-dmS \w+ )?|ExecStart=|^worker_command = ", line.replace("'", "")):
            try:
                words = shlex.split(part)
            except ValueError:  # half of a quoted text
                words = part.split()
            name = words[0].rpartition("/")[2] if words else ""
            if name in PROGRAMS:
                calls.append((name, *words[1:]))
    return calls


def fault(call: tuple[str, ...]) -> str:
    """What the program says against a call; empty: nothing. A name and a verb alone are no call, but a mention."""
    name, *words = call
    if len(words) == 1 and words[0] in verbs.VERBS:
        return ""
    words = [{"ID": "7", "VERB": "list-jobs"}.get(word, word) for word in words]
    try:
        with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
            if words:
                PARSERS[name]().parse_args(words) if name in PARSERS else arguments.parse(words)
    except (SystemExit, KueueError) as error:
        if getattr(error, "code", 1) != 0:  # 0: --help and the like
            return said.getvalue().strip() or str(error)
    return ""


@each_page
def test_every_command_that_is_printed_can_be_typed(page):
    calls = calls_of(page)
    assert len(calls) > 30
    assert {call[0] for call in calls} == set(PROGRAMS)
    assert [f"{' '.join(call)}: {wrong}" for call in calls if (wrong := fault(call))] == []


@pytest.mark.parametrize(
    "line",
    [
        "kueue_server --backup --force FILE",
        "kueue_server --back-up",
        "kueue_install systemd --begin",
        "kueue explode 7",
        "kueue secret rotates",
        "kueue cmd --nicer ls",
    ],
)
def test_a_command_that_cannot_be_typed_would_be_found(line):
    assert fault(tuple(line.split())) != ""


def test_every_part_of_the_install_program_and_every_mode_of_the_restart_manager_is_told():
    calls = calls_of(PAGE)
    assert {call[1] for call in calls if call[0] == "kueue_install" and len(call) > 1} >= {
        "systemd",
        "completion",
        "grafana",
        "prometheus",
    }
    modes = {word for call in calls if call[0] == "kueue_restart_workers" for word in call[1:]}
    assert modes >= {"--once", "--status", "--check", "--stop", "--push-config"}


@each_page
def test_every_unit_that_is_named_is_one(page):
    named = {
        word.removesuffix(".service").removesuffix(".timer")
        for line in code_of(page)
        for call in re.findall(r"systemctl --user \S+((?: [\w.-]+)*)|journalctl --user -u (\S+)", line)
        for word in " ".join(call).split()
        if word.startswith("kueue")
    }
    assert named <= UNITS
    if page == PAGE:
        assert named == UNITS


@each_page
def test_every_setting_that_is_named_is_one(page):
    known = {key for section in SECTIONS.values() for key in section.settings} | set(SECTIONS) | {"global_resources"}
    blocks = [block for language, block in FENCE.findall(text_of(page)) if language == "toml"]
    spans = [span for span in SPAN.findall(FENCE.sub("", text_of(page))) if re.match(r"\w+ = [^…]*$", span)]
    named = set(re.findall(r"^(\w+) =", "\n".join([*blocks, *spans]), re.MULTILINE))
    named |= set(re.findall(r"^\[(\w+)\]$", "\n".join(blocks), re.MULTILINE))
    assert len(named) > 4
    assert named - {"genus"} <= known  # a licence of the example
    words = {span for span in SPAN.findall(FENCE.sub("", text_of(page))) if re.fullmatch(r"[a-z]+(_[a-z]+)+", span)}
    settings = {word for word in words if not word.startswith("kueue_")}
    assert settings - {"scrape_config_files", "scrape_configs"} <= known  # settings of Prometheus


@pytest.mark.parametrize("block", [block for language, block in FENCE.findall(text_of(PAGE)) if language == "toml"])
def test_every_piece_of_settings_is_taken(block, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('common_settings.shared_secret = "' + "x" * 40 + '"\n' if "[common" not in block else "")
    with path.open("a") as file:
        file.write(block.replace("[common_settings]", '[common_settings]\nshared_secret = "' + "x" * 40 + '"'))
    path.chmod(0o600)
    sections = [name for name in SECTIONS if f"[{name}]" in block]
    assert not config.load(str(path), sections).warnings


def names_in(module) -> set[str]:
    """Names of figures in the source of a module, as Prometheus gets them."""
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and re.fullmatch(r"kueue_[a-z0-9_]+[a-z0-9]", str(node.value))
    }


def test_the_page_names_every_figure_and_no_other():
    table = text_of(PAGE).partition("### Figures")[2].partition("### Alerts")[0]
    rows = metrics_in(" ".join(line for line in table.splitlines() if line.startswith("| ")))
    shown = names_in(kueue.server.metrics) | names_in(kueue.worker.metrics)
    assert {name.removesuffix("_total") for name in rows} == shown
    counters = {name.removesuffix("_total") for name in rows if name.endswith("_total")}
    queue = LargeLab(1)
    kinds = {one.name: one.type for one in families(Sight(queue.engine, queue.now, queue.measures, disk=Disk(1, 1)))}
    assert {name for name in counters if name in kinds} == {name for name, kind in kinds.items() if kind == "counter"}
    anywhere = {name for span in SPAN.findall(text_of(PAGE)) if "/" not in span for name in metrics_in(span)}
    figures = {name for name in anywhere if name not in PROGRAMS}
    assert {name.removesuffix("_total") for name in figures} <= shown


def test_the_page_names_every_alert_and_no_other():
    named = set(re.findall(r"^\| `(Kueue\w+)` \|", text_of(PAGE), re.MULTILINE))
    assert named == set(rule_expressions(RULES.read_text(encoding="utf-8")))


def anchors_of(page: Path) -> set[str]:
    """As GitHub makes them: lower case, without punctuation, blanks become hyphens."""
    heads = re.findall(r"^#+ (.*)$", FENCE.sub("", text_of(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize(
    "page", sorted([README, ROOT / "ARCHITECTURE.md", *(ROOT / "docs").glob("*.md")]), ids=lambda page: page.name
)
def test_every_link_leads_somewhere(page):
    links = [link for link in LINK.findall(FENCE.sub("", text_of(page))) if "://" not in link]
    broken = []
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(link)
    assert broken == []
