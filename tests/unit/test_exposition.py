"""The formats of figures, histograms, and the file for node_exporter."""

from __future__ import annotations

import subprocess
import sys

import pytest

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


def test_a_file_that_cannot_be_written_leaves_no_draft(tmp_path):
    (tmp_path / "kueue.prom").mkdir()
    with pytest.raises(OSError):
        exposition.write_file(tmp_path / "kueue.prom", b"new\n")
    assert [entry.name for entry in tmp_path.iterdir()] == ["kueue.prom"]


def test_the_command_does_not_load_prometheus_client():
    code = "import sys, kueue.cli.main, kueue.server.main, kueue.worker.program; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
