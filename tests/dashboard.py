"""The Grafana dashboard of launch/observability, and its queries as Grafana sends them."""

from __future__ import annotations

import json
import re

from sglang_dflash.testing.server import ROOT

OBSERVABILITY = ROOT / "launch" / "observability"
DASHBOARD = json.loads((OBSERVABILITY / "grafana-dashboard.json").read_text())
PANELS = DASHBOARD["panels"]
VARIABLE = re.compile(r"\$(model|instance|replica)\b")


def filled(expr: str) -> str:
    """Return a query with "All" chosen, and the least range."""
    return VARIABLE.sub(".*", expr).replace("$__rate_interval", "1m")
