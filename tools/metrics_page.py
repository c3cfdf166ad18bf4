"""Writes the tables of docs/metrics.md from the catalogue."""

from __future__ import annotations

from tools.tables import with_rows

from otel_ddp.vocabulary import catalog


def metrics_page(page: str) -> str:
    """The page with a row for each metric, below the heading of its section."""
    for section in dict.fromkeys(each.section for each in catalog.METRICS):
        rows = [_row(each) for each in catalog.METRICS if each.section == section]
        page = with_rows(page, f"## {section}", rows)
    return page


def _row(metric: catalog.Metric) -> str:
    cells = (
        f"`{metric.name}`, `{metric.prometheus}`",
        f"{metric.kind.value}, `{metric.unit}`" if metric.unit else metric.kind.value,
        ", ".join([metric.labels, *(f"`{attribute}`" for attribute in metric.attributes)]),
        metric.description,
    )
    return f"| {' | '.join(cells)} |"
