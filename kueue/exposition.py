"""Figures as Prometheus reads them: rendered in slices for a page, or written to a file for node_exporter.

Rules
- Figures are collected at one moment; rendering them waits between families, so that a large lab never holds the loop.
- A file appears whole or not at all, readable for everybody.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import trio
from prometheus_client import PlatformCollector, ProcessCollector, exposition
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics

from kueue import __version__, whole_file
from kueue.tally import Histogram

_PLAIN = exposition.CONTENT_TYPE_PLAIN_0_0_4
_OPEN = openmetrics.CONTENT_TYPE_LATEST
_EOF = b"# EOF\n"


class _One:
    """A collector of one family."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return (self._family,)


def wants_open_metrics(accept: str) -> bool:
    """Does an ``Accept`` header name OpenMetrics, and not only to refuse it?"""
    for entry in accept.lower().split(","):
        kind, *parameters = (word.strip() for word in entry.split(";"))
        if kind == "application/openmetrics-text":
            weight = next((word[2:] for word in parameters if word.startswith("q=")), "1")
            return bool(weight.strip("0."))
    return False


async def rendered(families: Sequence[Metric], accept: str = "") -> tuple[str, bytes]:
    """(content type, body) in the format that an ``Accept`` header asks for."""
    is_open = wants_open_metrics(accept)
    parts = []
    for family in families:
        if is_open:
            body: bytes = openmetrics.generate_latest(_One(family), version="1.0.0")  # type: ignore[no-untyped-call]
            parts.append(body.removesuffix(_EOF))
        else:
            parts.append(exposition.generate_latest(_One(family)))
        await trio.lowlevel.checkpoint()
    if is_open:
        parts.append(_EOF)
    return (_OPEN if is_open else _PLAIN), b"".join(parts)


class Program:
    """Figures of this process: processor, memory, descriptors, Python."""

    def __init__(self) -> None:
        self._collectors = (ProcessCollector(registry=None), PlatformCollector(registry=None))

    def families(self) -> Iterator[Metric]:
        for collector in self._collectors:
            yield from collector.collect()


def build_info(name: str) -> Metric:
    """Always 1; its labels tell what runs."""
    family = GaugeMetricFamily(name, "Always 1; the labels tell which version runs.", labels=("version", "python"))
    family.add_metric((__version__, platform.python_version()), 1)
    return family


def histogram(name: str, text: str, figures: Histogram) -> Metric:
    return HistogramMetricFamily(name, text, buckets=figures.cumulated(), sum_value=figures.sum)


def label(text: str) -> str:
    """A label value that can be written as UTF-8, whatever a peer calls itself."""
    return text.encode("utf-8", "replace").decode("utf-8")


def write_file(path: Path, body: bytes) -> None:
    """Replace the file in one step, mode 0644. Raises `OSError`; then nothing is left behind and the old one stays."""
    # The collector of node_exporter reads all that ends in .prom, so the draft must not. One name for all: what a
    # killed program left is swept up by the next.
    whole_file.write(path, body, 0o644, draft=str(path.with_name(f".{path.name}.draft")))
