"""Writes docs/metrics.md from the catalogue."""

from __future__ import annotations

from otel_ddp.vocabulary import catalog

INTRODUCTION = """\
<!-- Generated from src/otel_ddp/vocabulary/catalog.py by `make docs`: change it there. -->

# Metrics

Generated from `src/otel_ddp/vocabulary/catalog.py` by `make docs`.

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

# Below the heading of each section.
SECTIONS = {
    "Run": ("What was launched. Sent by global rank 0 alone."),
    "Progress and state": (
        "Where each rank stands and whether it still moves. Sent for every exported rank."
    ),
    "Speed": (
        "How fast each rank works and where its time goes. Times are running totals, not those "
        "of the last step: take a rate and divide by that of the steps, but for "
        "`training.phase.step_time`. `comm_wait` is time blocked on other ranks, the rest is "
        "the rank's own work. Sent for every exported rank."
    ),
    "Learning": (
        "Every value that was logged, each with the time at which it was logged. `name` is "
        "spelt as in the training script; `split` is `train`, `val`, `test` or the script's own"
        " word."
    ),
    "Summary": (
        "The best value so far of each name that gets better in one direction: `direction` is "
        "`min` or `max`, guessed from the name (a loss falls, an accuracy grows) or given by "
        "`best=`. The first 200 names, sent by global rank 0 alone. `name` and `split` are as "
        "under Learning."
    ),
    "Artifacts": (
        "What went into a run and came out of it, as `run.artifact()` says: of each name and "
        "direction the newest one, of 100 names a rank at most. `digest` is a SHA-256, empty "
        "where the agent could not work it out, and `uri` says where it lies. The series begin "
        "once the agent has read the files, and has stored them where it was told to."
    ),
    "Diagnosis": (
        "What the agent of the node concludes from all ranks on it, whichever of them are exported."
    ),
    "Process": (
        "What each training process takes from its node. Read by the agent, not by the process "
        "itself."
    ),
    "GPU": (
        "Every GPU of a node, sent once per node under every strategy. `hw.id` is its UUID, "
        "`gpu` its index, `hw.model` its model."
    ),
    "Host": (
        "The node around the training, sent once per node under every strategy. Inside a "
        "container, processors and memory are those of its cgroup."
    ),
    "Ourselves": (
        "What watching costs and what it missed. A value other than 0 under lost, dropped or "
        "refused means that the pictures above have gaps."
    ),
}


def metrics_page() -> str:
    """Return docs/metrics.md as a whole."""
    parts = [INTRODUCTION]
    for title, intro in SECTIONS.items():
        parts.append(f"\n## {title}\n\n{intro}\n\n")
        parts.append(
            "| OpenTelemetry | Prometheus | kind, unit | labels | attributes | meaning |\n"
        )
        parts.append("|---|---|---|---|---|---|\n")
        parts.extend(_row(metric) for metric in catalog.METRICS if metric.section == title)
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
