"""Words for describing dashboards of Grafana: panels, their queries, and the grid they lie on; makes plain JSON values.

Rules
- The same file is imported by hand and provisioned: ``id`` is null, the data source is a variable, and there are no
  inputs that only the import dialogue would fill in.
- A panel is described, has a unit, and every one of its series has a name.

The shapes are those of Grafana 9.3 (`SCHEMA`); newer ones lift them to their own when they load the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SCHEMA = 37
COLUMNS = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}

GREEN, YELLOW, ORANGE, RED, BLUE, GREY = "green", "yellow", "orange", "red", "blue", "text"

Json = dict[str, Any]
Steps = Sequence[tuple[float | None, str]]
"""(from this value on, colour); the first begins at None."""


@dataclass(frozen=True)
class Query:
    """An expression and the name of its series; ``{{label}}`` in a name is the value of a label."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """`unit` is a word of Grafana: ``short``, ``s``, ``bytes``, ``percentunit``, ``suffix:/min``."""

    kind: str
    title: str
    description: str
    queries: Sequence[Query]
    unit: str = "short"
    width: int = 8
    height: int = 8
    steps: Steps = ((None, GREEN),)
    options: Json = field(default_factory=dict)
    custom: Json = field(default_factory=dict)
    defaults: Json = field(default_factory=dict)
    overrides: Sequence[Json] = ()
    transformations: Sequence[Json] = ()
    is_table: bool = False
    is_instant: bool = False

    def as_json(self, number: int, x: int, y: int) -> Json:
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": SOURCE,
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "fieldConfig": {
                "defaults": {
                    "unit": self.unit,
                    "thresholds": {
                        "mode": "absolute",
                        "steps": [{"value": value, "color": color} for value, color in self.steps],
                    },
                    **({"custom": self.custom} if self.custom else {}),
                    **self.defaults,
                },
                "overrides": list(self.overrides),
            },
            "options": self.options,
            "targets": [self._target(letter, one) for letter, one in zip("ABCDEFGHIJKL", self.queries, strict=False)],
            **({"transformations": list(self.transformations)} if self.transformations else {}),
        }

    def _target(self, letter: str, query: Query) -> Json:
        return {
            "refId": letter,
            "datasource": SOURCE,
            "editorMode": "code",
            "expr": query.expr,
            "legendFormat": query.legend,
            "instant": self.is_instant,
            "range": not self.is_instant,
            **({"format": "table"} if self.is_table else {}),
        }


def number(
    title: str, description: str, query: Query, *, words: Mapping[str, tuple[str, str]] | None = None, **more: Any
) -> Panel:
    """One big figure; `words`: value → (word, colour) to show in its place."""
    mapping = {
        value: {"text": text, "color": color, "index": index}
        for index, (value, (text, color)) in enumerate((words or {}).items())
    }
    return Panel(
        kind="stat",
        title=title,
        description=description,
        queries=(query,),
        is_instant=True,
        options={
            "colorMode": "value",
            "graphMode": "none",
            "justifyMode": "auto",
            "orientation": "auto",
            "textMode": more.pop("text_mode", "auto"),
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        },
        defaults={
            "noValue": more.pop("no_value", "-"),
            "mappings": [{"type": "value", "options": mapping}] if mapping else [],
        },
        **{"width": 4, "height": 4, **more},
    )


def lines(
    title: str,
    description: str,
    *queries: Query,
    is_stacked: bool = False,
    as_bars: bool = False,
    most: float | None = None,
    colors: Mapping[str, str] | None = None,
    **more: Any,
) -> Panel:
    """Values over time, from 0 up; `most`: the top of the axis; `colors`: name of a series → colour."""
    has_limits = len(more.get("steps", ())) > 1
    return Panel(
        kind="timeseries",
        title=title,
        description=description,
        queries=queries,
        options={
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        custom={
            "drawStyle": "bars" if as_bars else "line",
            "fillOpacity": 40 if is_stacked or as_bars else 8,
            "lineWidth": 1,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if is_stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "dashed" if has_limits else "off"},
        },
        defaults={
            "min": 0,
            **({"max": most} if most is not None else {}),
            "color": {"mode": "palette-classic"},
        },
        overrides=[_colored(name, color) for name, color in (colors or {}).items()],
        **more,
    )


def bars(title: str, description: str, *queries: Query, most: float, **more: Any) -> Panel:
    """One bar for each series, as it is now."""
    return Panel(
        kind="bargauge",
        title=title,
        description=description,
        queries=queries,
        is_instant=True,
        options={
            "displayMode": "gradient",
            "orientation": "horizontal",
            "showUnfilled": True,
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        },
        defaults={"min": 0, "max": most},
        **more,
    )


@dataclass(frozen=True)
class Column:
    """`expr` has one value for each row, with no label but that of the row."""

    title: str
    expr: str
    unit: str = "short"
    steps: Steps = ()
    words: Mapping[str, str] | None = None


def table(title: str, description: str, key: str, link: str, *columns: Column, **more: Any) -> Panel:
    """One row for each value of the label `key`, which leads to the address `link`."""
    names = {f"Value #{letter}": one.title for letter, one in zip("ABCDEFGHIJKL", columns, strict=False)}
    return Panel(
        kind="table",
        title=title,
        description=description,
        queries=[Query(one.expr, one.title) for one in columns],
        is_table=True,
        is_instant=True,
        options={"showHeader": True, "sortBy": [{"displayName": key, "desc": False}]},
        custom={"align": "auto", "displayMode": "auto", "filterable": True},
        transformations=[
            {"id": "merge", "options": {}},
            {
                "id": "organize",
                "options": {
                    "excludeByName": {"Time": True},
                    "indexByName": {key: 0, **{value: index for index, value in enumerate(names, 1)}},
                    "renameByName": names,
                },
            },
        ],
        overrides=[
            {
                "matcher": {"id": "byName", "options": key},
                "properties": [{"id": "links", "value": [{"title": "This one alone", "url": link}]}],
            },
            *(_column(one) for one in columns),
        ],
        **more,
    )


def _column(column: Column) -> Json:
    properties: list[Json] = [{"id": "unit", "value": column.unit}]
    if column.steps:
        steps = [{"value": value, "color": color} for value, color in column.steps]
        properties += [
            {"id": "thresholds", "value": {"mode": "absolute", "steps": steps}},
            {"id": "custom.displayMode", "value": "color-text"},
        ]
    if column.words:
        options = {value: {"text": text, "index": index} for index, (value, text) in enumerate(column.words.items())}
        properties.append({"id": "mappings", "value": [{"type": "value", "options": options}]})
    return {"matcher": {"id": "byName", "options": column.title}, "properties": properties}


def _colored(name: str, color: str) -> Json:
    return {
        "matcher": {"id": "byName", "options": name},
        "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": color}}],
    }


# --- the whole -------------------------------------------------------------------------------------------------------


def variable(name: str, label: str, query: str, description: str) -> Json:
    """A choice that is filled by `query` when the dashboard is opened or its time changes."""
    return {
        "type": "query",
        "name": name,
        "label": label,
        "description": description,
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": f"variable-{name}"},
        "refresh": 2,
        "sort": 5,
        "multi": False,
        "includeAll": False,
        "hide": 0,
        "options": [],
        "regex": "",
        "skipUrlSync": False,
    }


def dashboard(
    uid: str,
    title: str,
    description: str,
    variables: Sequence[Json],
    alerts: str,
    rows: Sequence[tuple[str, Sequence[Panel]]],
) -> Json:
    """All of a file. `alerts`: an expression whose series are marked in every panel over time."""
    return {
        "id": None,
        "uid": uid,
        "title": title,
        "description": description,
        "tags": ["kueue"],
        "schemaVersion": SCHEMA,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "timezone": "browser",
        "refresh": "30s",
        "time": {"from": "now-24h", "to": "now"},
        "timepicker": {},
        "links": [
            {
                "type": "dashboards",
                "title": "kueue",
                "tags": ["kueue"],
                "asDropdown": False,
                "includeVars": True,
                "keepTime": True,
                "targetBlank": False,
                "icon": "external link",
                "tooltip": "",
                "url": "",
            }
        ],
        "annotations": {
            "list": [
                {
                    "name": "Alerts",
                    "datasource": SOURCE,
                    "enable": True,
                    "hide": False,
                    "iconColor": RED,
                    "expr": alerts,
                    "step": "60s",
                    "titleFormat": "{{alertname}}",
                    "textFormat": "{{worker}}{{resource}}",
                    "tagKeys": "severity",
                    "useValueForTime": False,
                }
            ]
        },
        "templating": {
            "list": [
                {
                    "type": "datasource",
                    "name": "datasource",
                    "label": "Prometheus",
                    "description": "The Prometheus that scrapes kueue.",
                    "query": "prometheus",
                    "refresh": 1,
                    "multi": False,
                    "includeAll": False,
                    "hide": 0,
                    "options": [],
                    "regex": "",
                    "skipUrlSync": False,
                },
                *variables,
            ]
        },
        "panels": _laid_out(rows),
    }


def _laid_out(rows: Sequence[tuple[str, Sequence[Panel]]]) -> list[Json]:
    found: list[Json] = []
    y = 0
    for title, panels in rows:
        found.append(
            {
                "id": len(found) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"h": 1, "w": COLUMNS, "x": 0, "y": y},
                "panels": [],
            }
        )
        x, y, height = 0, y + 1, 0
        for panel in panels:
            if x + panel.width > COLUMNS:
                x, y, height = 0, y + height, 0
            found.append(panel.as_json(len(found) + 1, x, y))
            x, height = x + panel.width, max(height, panel.height)
        y += height
    return found


# --- of kueue --------------------------------------------------------------------------------------------------------

AT = 'instance="$server"'
"""The server that was chosen: whose figures these are."""
FREE_BELOW = ((None, RED), (1e9, YELLOW), (10e9, GREEN))

SERVER = variable(
    "server", "Server", "label_values(kueue_build_info, instance)", "The kueue server, by its address in Prometheus."
)
