"""Finds the files that come with kueue and are no code: units, completions, dashboards, scrape and alert rules."""

from __future__ import annotations

from pathlib import Path

from kueue.errors import KueueError

_HERE = Path(__file__).resolve().parent
_IN_CHECKOUT = {
    "completions": _HERE.parents[1] / "completions",
    "systemd-user": _HERE.parents[1] / "systemd-user",
    "grafana": _HERE.parent / "grafana",
    "prometheus": _HERE.parent / "prometheus",
}
FOLDERS = tuple(_IN_CHECKOUT)


def folder(name: str) -> Path:
    """The folder of one kind (`FOLDERS`), whether kueue runs from an installed wheel or from a checkout.

    Raises `KueueError` when it is not there: the installation is damaged.
    """
    for place in (_HERE / "assets" / name, _IN_CHECKOUT[name]):
        if place.is_dir():
            return place
    raise KueueError(
        f"The files of {name} did not come with this installation of kueue.",
        hint="Install it again: pip install --force-reinstall kueue-lab",
    )
