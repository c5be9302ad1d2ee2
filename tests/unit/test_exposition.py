"""The formats of figures, histograms, and the file for node_exporter."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import trio
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.openmetrics import parser as openmetrics

from kueue import exposition
from kueue.tally import Histogram


@pytest.mark.parametrize(
    ("accept", "is_open"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain;version=0.0.4", False),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1", True),
        ("text/html, Application/OpenMetrics-Text; version=0.0.1; q=0.75", True),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=0.000, text/plain", False),
        ("application/openmetrics-text;version=nonsense;q=x;;,", True),
    ],
)
def test_the_format_is_the_one_that_was_asked_for(accept, is_open):
    assert exposition.wants_open_metrics(accept) is is_open


def test_a_histogram_counts_what_lies_at_or_below_each_bound():
    histogram = Histogram((1, 10))
    for value in (-5.0, 0.5, 1.0, 1.5, 10.0, 11.0):
        histogram.observe(value)
    assert histogram.cumulated() == [("1.0", 3), ("10.0", 5), ("+Inf", 6)]
    assert histogram.sum == 24.0


def test_a_file_is_replaced_whole_and_readable_for_everybody(tmp_path):
    path = tmp_path / "kueue.prom"
    path.write_bytes(b"old")
    exposition.write_file(path, b"new\n")
    assert path.read_bytes() == b"new\n"
    assert path.stat().st_mode & 0o777 == 0o644
    assert [entry.name for entry in tmp_path.iterdir()] == ["kueue.prom"]


def test_no_link_is_followed_and_what_a_killed_program_left_is_swept_up(tmp_path):
    precious = tmp_path / "precious"
    precious.write_bytes(b"mine")
    (tmp_path / ".kueue.prom.draft").symlink_to(precious)
    exposition.write_file(tmp_path / "kueue.prom", b"new\n")
    assert precious.read_bytes() == b"mine"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["kueue.prom", "precious"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here")
@pytest.mark.parametrize("accept", ["", "application/openmetrics-text"])
def test_whatever_a_worker_calls_itself_the_page_can_be_read(accept):
    names = ['a"b', "a\\", "a\nb", "a\rb", "\x00", "\u2028", "é😀", "{}", "\ud800", "", "\ufeff", "x" * 5000]
    family = GaugeMetricFamily("kueue_worker_up", 'With "quotes" and \\.', labels=("worker",))
    for name in names:
        family.add_metric((exposition.label(name),), 1)
    _, body = trio.run(exposition.rendered, [family], accept)
    if accept:
        (read,) = openmetrics.text_string_to_metric_families(body.decode())
        assert [sample.labels["worker"] for sample in read.samples] == [exposition.label(name) for name in names]
    else:
        done = subprocess.run(["promtool", "check", "metrics"], input=body, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr


def test_a_file_that_cannot_be_written_leaves_no_draft(tmp_path):
    (tmp_path / "kueue.prom").mkdir()
    with pytest.raises(OSError):
        exposition.write_file(tmp_path / "kueue.prom", b"new\n")
    assert [entry.name for entry in tmp_path.iterdir()] == ["kueue.prom"]


def test_the_command_does_not_load_prometheus_client():
    code = "import sys, kueue.cli.main, kueue.server.main, kueue.worker.program; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
