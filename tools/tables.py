"""Writes generated rows into the tables of docs/metrics.md and docs/settings.md."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable
from dataclasses import Field, fields
from typing import Any

from otel_ddp import settings
from otel_ddp.vocabulary import catalog


def with_rows(page: str, heading: str, rows: Iterable[str]) -> str:
    """The page with these rows in the first table below a heading; its head stays."""
    before, found, below = f"\n{page}".partition(f"\n{heading}\n")
    above, bar, table = below.partition("\n|---")
    assert bar, f"there is no table below {heading}"
    first, _, after = table.partition("\n\n")
    rule = first.partition("\n")[0]
    behind = f"\n\n{after}" if after else "\n"
    return "".join([before, found, above, bar, "\n".join([rule, *rows]), behind]).removeprefix("\n")


def metrics_page(page: str) -> str:
    """The page with a row for each metric, below the heading of its section."""
    for section in dict.fromkeys(each.section for each in catalog.METRICS):
        metrics = [each for each in catalog.METRICS if each.section == section]
        # The text above a table lists the attributes of all rows.
        shared = set.intersection(*(set(each.attributes) for each in metrics))
        page = with_rows(page, f"## {section}", [_row(each, shared) for each in metrics])
    return page


def _row(metric: catalog.Metric, shared: set[str]) -> str:
    # Prometheus' name includes the unit; a rank's labels are the default.
    labels = [] if metric.labels == "rank" else [metric.labels]
    own = [f"`{each}`" for each in metric.attributes if each not in shared]
    cells = (
        f"`{metric.name}`, `{metric.prometheus}`",
        ", ".join([metric.kind.value, *labels, *own]),
        metric.description,
    )
    return f"| {' | '.join(cells)} |"


def settings_page(page: str) -> str:
    """The page with a row for each setting."""
    texts = _texts()
    rows = (
        f"| `{each.metadata['variable']}` | {_default(each)} | {texts[each.name]} |"
        for each in fields(settings.Settings)
    )
    return with_rows(page, "# Settings", rows)


def _texts() -> dict[str, str]:
    """The text below each field, as one line."""
    (record,) = ast.parse(inspect.getsource(settings.Settings)).body
    assert isinstance(record, ast.ClassDef)
    return {
        each.target.id: " ".join(text.value.value.split())
        for each, text in zip(record.body, record.body[1:], strict=False)
        if isinstance(each, ast.AnnAssign)
        and isinstance(each.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _default(setting: Field[Any]) -> str:
    default = setting.default
    if isinstance(default, bool):
        text = str(default).lower()
    elif isinstance(default, frozenset):
        text = ",".join(sorted(default))
    elif isinstance(default, float):
        standard = not setting.metadata["variable"].startswith("OTEL_DDP_")
        text = f"{default * 1000 if standard else default:g}"
    elif setting.name.endswith("_bytes"):
        text = f"{default // settings.MIB}M"
    else:
        text = str(default or "") if default != () else ""
    return f"`{text}`" if text else ""
