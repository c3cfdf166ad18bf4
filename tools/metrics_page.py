"""Writes docs/metrics.md from the catalogue."""

from __future__ import annotations

from otel_ddp import catalog

INTRODUCTION = """\
<!-- Generated from src/otel_ddp/catalog.py by `make docs`: change it there. -->

# Metrics

Generated from `src/otel_ddp/catalog.py` by `make docs`.

Every metric has one OpenTelemetry name and one Prometheus name. The Prometheus name is the same
whether the data came through a collector or from the agent's own `/metrics`.

- Times are in seconds, sizes in bytes, shares go from 0 to 1.
- A counter of events starts at 0, so that the first event already shows as an increase;
  `otel_ddp_values_refused_total` alone appears with the first refusal of its kind.
- A number that could not be read is absent. It is never reported as 0, -1 or NaN.
- An `updown` is a sum that may fall; Prometheus shows it as a gauge.
- A histogram comes to Prometheus as `_bucket`, `_sum` and `_count` behind the name given here.

## Labels

They are attributes of each data point, so no backend has to be told to promote anything.

| label | what it says |
|---|---|
| `group` | Which experiment: the same for all processes, or all runs, that belong together. \
May be empty. |
| `run` | Which launch: the same on all ranks and over the launcher's restarts, and a new one at \
the next launch. |
| `job_type` | Which role a process has in its run: `train` unless told otherwise. Ranks that \
train together may have different ones. |
| `node` | Which machine, by its host name; where two nodes of a run share a host at the same \
time, the second one has its node rank behind it. |
| `rank` | Which process of the whole run, counted from 0: the global rank; or `p<process id>` \
where a process never learned its rank. |
| `local_rank` | Which process on its node, counted from 0. |

The column *labels* of the tables says which of them a series carries:

| labels | carried |
|---|---|
| rank | All six. |
| run | All six; there is one series a run, that of rank 0. |
| node | `node`; also `group` and `run` where the number belongs to one run, or one run alone is \
active on the node. |
| gpu | All six while one rank uses the GPU; `group`, `run` and `node` while ranks of one run \
share it; `node` alone while it is free. |

Attributes are written as OpenTelemetry has them. In Prometheus their dots are underscores:
`cpu.mode` is the label `cpu_mode`. A scraper that sets a `node` label of its own needs
`honor_labels: true`.
"""


def metrics_page() -> str:
    """Return docs/metrics.md as a whole."""
    parts = [INTRODUCTION]
    for section in catalog.SECTIONS:
        parts.append(f"\n## {section.title}\n\n{section.intro}\n\n")
        parts.append(
            "| OpenTelemetry | Prometheus | kind, unit | labels | attributes | meaning |\n"
        )
        parts.append("|---|---|---|---|---|---|\n")
        parts.extend(_row(metric) for metric in catalog.METRICS if metric.section == section.title)
    return "".join(parts)


def _row(metric: catalog.Metric) -> str:
    cells = (
        f"`{metric.name}`",
        f"`{metric.prometheus}`",
        f"{metric.kind.value}, `{metric.unit}`" if metric.unit else metric.kind.value,
        metric.labels,
        ", ".join(f"`{attribute}`" for attribute in metric.attributes),
        metric.description,
    )
    return "| " + " | ".join(cells) + " |\n"
