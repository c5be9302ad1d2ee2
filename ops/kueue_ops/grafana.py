"""What Grafana reads at its start: where the dashboards lie, and where Prometheus answers. Pure."""

from __future__ import annotations

import json

DATA_SOURCE = "kueue-prometheus"


def dashboards(folder: str) -> str:
    """Provisioning of the dashboards in `folder`, an absolute path as Grafana's machine sees it."""
    # A string of JSON is one of YAML, whatever is in it.
    return f"""\
# Made by `kueue_install grafana`. Grafana reads it at its start from /etc/grafana/provisioning/dashboards.
apiVersion: 1
providers:
  - name: kueue
    folder: kueue
    type: file
    updateIntervalSeconds: 60
    allowUiUpdates: false
    options:
      path: {json.dumps(folder)}
"""


def data_source(url: str) -> str:
    """Provisioning of the Prometheus that scrapes kueue; `url` as Grafana's machine sees it."""
    return f"""\
# Made by `kueue_install grafana`. Grafana reads it at its start from /etc/grafana/provisioning/datasources.
# Leave it out if your Grafana knows that Prometheus already: the dashboards let you choose.
apiVersion: 1
datasources:
  - name: Prometheus (kueue)
    uid: {DATA_SOURCE}
    type: prometheus
    access: proxy
    url: {json.dumps(url)}
"""
