"""Makes the dashboards in ops/grafana: ``python tests/support/dashboards.py`` writes them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from tests.support import dashboard_lab, dashboard_worker  # noqa: E402  the path must be known first
from tests.support.grafana import Json  # noqa: E402  as above


def text_of(whole: Json) -> str:
    return json.dumps(whole, indent=2, ensure_ascii=False) + "\n"


FILES: Mapping[str, Callable[[], Json]] = {
    "ops/grafana/kueue-lab.json": dashboard_lab.lab,
    "ops/grafana/kueue-worker.json": dashboard_worker.worker,
}

if __name__ == "__main__":
    for file, made in FILES.items():
        (ROOT / file).write_text(text_of(made()), encoding="utf-8")
