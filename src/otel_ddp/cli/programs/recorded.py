"""What each machine has cost the ranks of its runs, by the rules of a Prometheus."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from otel_ddp.cli.programs.prometheus import Prometheus
from otel_ddp.cli.text import mapping
from otel_ddp.history.fleet import LAST_DAYS, LAST_RUNS, Fleet, LateIn, NodeRecord, ordered

_LOST = "node_cause:training_lost_gpus:rate2m"
# A sample of these is worth so many seconds: the interval of their rules.
_EVERY_S = 30
_SEEN = "max by (group, run, node) (last_over_time(node:training_seen:timestamp[{days}d]))"
_SEEN_LAST = _SEEN.replace("{days}", "{last_days}")
# It is recorded each 5 minutes.
_LATE = "last_over_time(node:training_late:share30d[10m])"
# What is asked, and the label that it is told by beside `node`.
_ASKED = {
    "lost_s": (f"sum by (node, cause) (sum_over_time({_LOST}[{{days}}d])) * {_EVERY_S}", "cause"),
    "runs": (f"count by (node) ({_SEEN})", ""),
    "last_runs": (f"count by (node) ({_SEEN_LAST})", ""),
    "deaths": (
        "sum by (node, cause) (max_over_time(node_cause:training_deaths:sum[{days}d]))",
        "cause",
    ),
    "xids": (
        "count by (node, code) (last_over_time(gpu_code:otel_ddp_gpu_xid_errors:last[{days}d]))",
        "code",
    ),
    "held_back_s": (
        "sum by (node) (max by (node, hw_id) (sum by (node, hw_id, reason) "
        f"(sum_over_time(gpu_reason:otel_ddp_gpu_throttle_active:last[{{days}}d])))) * {_EVERY_S}",
        "",
    ),
    "gpus": (
        "sum by (node, hw_id) "
        f"(sum_over_time(gpu:training_straggler_lost_time:rate2m[{{days}}d])) * {_EVERY_S}",
        "hw_id",
    ),
    # Every fourth sample is enough: what is lost is a rate of two minutes.
    "since_s": (f"min by (node) (min_over_time(timestamp({_LOST})[{{days}}d:2m]))", ""),
}


def recorded_by(server: Prometheus, days: int) -> Fleet:
    """Of the runs that were seen in these days; raises fetch.NoAnswer."""

    def query(expr: str) -> list[Mapping[str, Any]]:
        return server.query(expr.format(days=days, last_days=min(days, LAST_DAYS)))

    told = {what: _by_node(query(expr), label) for what, (expr, label) in _ASKED.items()}
    late_in: dict[str, list[LateIn]] = {}
    for each in query(f"{_LATE} and on (group, run, node) {_SEEN_LAST}"):
        labels = mapping(each.get("metric"))
        late = LateIn(str(labels.get("group", "")), str(labels.get("run", "")), _value(each))
        late_in.setdefault(str(labels.get("node", "")), []).append(late)
    counted = query(f"count(count by (group, run) ({_SEEN}))")
    nodes = []
    for node in sorted(set().union(*told.values(), late_in)):
        of = {what: by_node.get(node, {}) for what, by_node in told.items()}
        record = NodeRecord(
            node,
            of["lost_s"],
            round(of["runs"].get("", 0.0)),
            min(round(of["last_runs"].get("", 0.0)), LAST_RUNS),
            sorted(late_in.get(node, ()), key=lambda each: -each.share),
            {cause: round(times) for cause, times in of["deaths"].items()},
            sorted(of["xids"], key=lambda code: (len(code), code)),
            of["held_back_s"].get("", 0.0),
            dict(sorted(of["gpus"].items(), key=lambda each: -each[1])),
            round(of["since_s"].get("", 0.0) * 1e9),
        )
        nodes.append(record)
    lacks = f"{server.name} has recorded no run on any node: load deploy/prometheus/rules"
    return Fleet(round(sum(map(_value, counted))), ordered(nodes), [] if told["runs"] else [lacks])


def _by_node(found: list[Mapping[str, Any]], label: str) -> dict[str, dict[str, float]]:
    """The values of each node, by a label of theirs."""
    by_node: dict[str, dict[str, float]] = {}
    for each in found:
        labels = mapping(each.get("metric"))
        of_node = by_node.setdefault(str(labels.get("node", "")), {})
        of_node[str(labels.get(label, ""))] = _value(each)
    return by_node


def _value(series: Mapping[str, Any]) -> float:
    told = series.get("value")
    try:
        value = float(told[1]) if isinstance(told, list) else 0.0
    except (LookupError, TypeError, ValueError):
        return 0.0
    return value if math.isfinite(value) else 0.0
