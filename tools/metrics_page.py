"""Writes the tables of docs/metrics.md from the catalogue."""

from __future__ import annotations

from tools.tables import with_rows

from otel_ddp.vocabulary import catalog


def metrics_page(page: str) -> str:
    """The page with a row for each metric, below the heading of its section."""
    for section in dict.fromkeys(each.section for each in catalog.METRICS):
        metrics = [each for each in catalog.METRICS if each.section == section]
        # The text above a table lists what all its rows carry.
        shared = set.intersection(*(set(each.attributes) for each in metrics))
        page = with_rows(page, f"## {section}", [_row(each, shared) for each in metrics])
    return page


def _row(metric: catalog.Metric, shared: set[str]) -> str:
    # The name in Prometheus ends with the unit, and a series has the labels of a rank by default.
    labels = [] if metric.labels == "rank" else [metric.labels]
    own = [f"`{each}`" for each in metric.attributes if each not in shared]
    cells = (
        f"`{metric.name}`, `{metric.prometheus}`",
        ", ".join([metric.kind.value, *labels, *own]),
        metric.description,
    )
    return f"| {' | '.join(cells)} |"
