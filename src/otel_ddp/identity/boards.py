"""The boards in Grafana, and the address of one that shows a run."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlencode, urlsplit, urlunsplit

# As in deploy/grafana/dashboards, by their titles.
UIDS = {
    "Runs": "otel-ddp-runs",
    "Run": "otel-ddp-run",
    "Ranks": "otel-ddp-ranks",
    "GPUs & nodes": "otel-ddp-gpus",
    "Compare": "otel-ddp-compare",
    "Pipeline": "otel-ddp-pipeline",
}
# A board begins this long before what it is to show.
_BEFORE_S = 600


def address(grafana: str, title: str, labels: Mapping[str, str], since_ns: int = 0) -> str:
    """Where a board shows this run, from that time on; empty where no Grafana is named."""
    if not grafana:
        return ""
    parts = urlsplit(grafana)
    chosen = {f"var-{name}": labels.get(name, "") for name in ("group", "run")}
    if since_ns:
        chosen |= {"from": str(since_ns // 10**6 - _BEFORE_S * 1000), "to": "now"}
    # It may name an organisation: ?orgId=2
    query = "&".join(filter(None, (parts.query, urlencode(chosen))))
    path = f"{parts.path.rstrip('/')}/d/{UIDS[title]}"
    return urlunsplit((parts.scheme, parts.netloc, path, query, ""))
