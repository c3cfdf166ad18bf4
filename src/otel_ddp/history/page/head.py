"""What stands above a run's pictures: state, ranks, verdicts, gaps, configuration."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from otel_ddp.history.card import cost_words
from otel_ddp.history.page.runs import (
    is_harmless,
    listed,
    mapping,
    whole,
    worst_first,
)
from otel_ddp.history.reader import is_silent, rank_order
from otel_ddp.history.whole_run import WholeRun
from otel_ddp.journal.process_state import ProcessState
from otel_ddp.vocabulary import catalog

_MOST_SUMMARY = 200
# What /metrics tells as well. Reasons of an end hold texts of errors, and sentences may.
_PUBLIC_RANK = (
    *("group", "run", "job_type", "node", "rank", "local_rank", "world_size", "pid", "state"),
    *("step", "phase", "phase_since_ns", "started_ns", "seen_alive_ns"),
)
_PUBLIC_VERDICT = ("kind", "who", "phase", "step", "since_step", "since_ns", "until_ns")
_PRIVATE_RANK = (
    *_PUBLIC_RANK,
    "reason",
    "host",
    "launcher",
    "strategy",
    "lost",
    "settled",
    "journal",
)
_PRIVATE_VERDICT = (*_PUBLIC_VERDICT, "sentence", "board", "evidence")


def head(run: WholeRun, live: Mapping[str, Any] | None, private: bool) -> dict[str, Any]:
    """Of a run. *live*: what the agent knows at this moment."""
    about, of_run, state = run.about, (run.group, run.name), run.state
    abouts = [each.about for each in run.histories]
    seen_ns = whole(about.get("seen_ns"))
    ranks = {**run.ranks}
    for process in living(live):
        key = process.rank_key(str(about.get("job_type") or ""))
        before = whole(mapping(ranks.get(key)).get("started_ns"))
        if process.of_run == of_run and process.started_ns >= before:
            ranks[key] = process.to_json()
    shown = _PRIVATE_RANK if private else _PUBLIC_RANK
    found_verdicts = verdicts(run.verdicts(), private)
    found: dict[str, Any] = {
        "now_ns": time.time_ns(),
        "group": run.group,
        "run": run.name,
        "project": str(about.get("project") or ""),
        "nodes": run.nodes,
        "state": state,
        "silent": is_silent(state, seen_ns),
        "began_ns": whole(about.get("began_ns")),
        "seen_ns": seen_ns,
        "ranks": [
            {key: each[key] for key in shown if key in each} | {"rank": rank}
            for rank, each in sorted(ranks.items(), key=lambda one: rank_order(one[0]))
        ],
        "verdicts": found_verdicts,
        "worst": next((v for v in worst_first(found_verdicts) if not v["harmless"]), None),
        "gaps": [
            {"node": node, **gap}
            for node, of_node in zip(run.nodes, abouts, strict=True)
            for gap in listed(of_node.get("gaps"))
            if isinstance(gap, Mapping)
        ],
        "summary": [row for of_node in abouts for row in listed(of_node.get("summary"))][
            :_MOST_SUMMARY
        ],
        "agent": live is not None,
        "not_kept_since_ns": whole(mapping(mapping(live).get("history")).get("since_ns")),
    }
    if private:
        for key in ("config", "texts", "environment"):
            found[key] = mapping(about.get(key))
        found["config_note"] = _not_in_labels(found["config"])
        found["telemetry"] = cost_words(run.cost)
        found["insufficient"] = [
            str(each.get("why"))
            for each in listed(mapping(live).get("insufficient"))
            if isinstance(each, Mapping) and (each.get("group") or "", each.get("run")) == of_run
        ]
    return found


def _not_in_labels(config: Mapping[str, Any]) -> str:
    """Where this page shows more of a configuration than Prometheus has."""
    most, longest = catalog.MOST_CONFIG_LABELS, catalog.LONGEST_LABEL
    if len(config) <= most and all(len(str(value)) <= longest for value in config.values()):
        return ""
    return (
        f"All {len(config)} settings are here and in the log record {catalog.RUN_CONFIG_EVENT}. "
        f"The labels of training_run_info have the first {most}, and {longest} characters of each."
    )


def processes(live: Mapping[str, Any] | None, private: bool) -> list[dict[str, Any]]:
    """Each process that the agent knows at this moment."""
    shown = _PRIVATE_RANK if private else _PUBLIC_RANK
    return [{key: getattr(each, key) for key in shown} for each in living(live)]


def living(live: Mapping[str, Any] | None) -> list[ProcessState]:
    """The same, as the agent hands them over."""
    return list(mapping(live).get("processes", ()))


def verdicts(found: Iterable[Any], private: bool) -> list[dict[str, Any]]:
    """Without their sentences for those who may not read them; with what colours them."""
    shown = _PRIVATE_VERDICT if private else _PUBLIC_VERDICT
    return [
        {key: each[key] for key in shown if key in each} | {"harmless": is_harmless(each)}
        for each in found
        if isinstance(each, Mapping)
    ]
