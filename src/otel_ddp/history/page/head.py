"""What stands above a run's pictures: state, ranks, verdicts, gaps, configuration."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from otel_ddp import catalog
from otel_ddp.history.page.runs import (
    is_harmless,
    listed,
    mapping,
    state_of,
    whole,
    worst_first,
)
from otel_ddp.history.reader import History, is_silent, rank_order
from otel_ddp.journal.process_state import ProcessState

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


def head(histories: list[History], live: Mapping[str, Any] | None, private: bool) -> dict[str, Any]:
    """Of a run. *live*: what the agent knows at this moment."""
    abouts = [each.about for each in histories]
    first = abouts[0]
    group, run = str(first.get("group") or ""), str(first.get("run") or histories[0].path.stem)
    seen_ns = max(whole(each.get("seen_ns")) for each in abouts)
    state = state_of(histories)
    ranks = {rank: about for each in histories for rank, about in each.ranks.items()}
    job_type = str(first.get("job_type") or "")
    for process in living(live):
        key = process.rank_key(job_type)
        before = whole(mapping(ranks.get(key)).get("started_ns"))
        if process.of_run == (group, run) and process.started_ns >= before:
            ranks[key] = process.to_json()
    shown = _PRIVATE_RANK if private else _PUBLIC_RANK
    found_verdicts = verdicts((v for each in histories for v in each.verdicts()), private)
    found: dict[str, Any] = {
        "now_ns": time.time_ns(),
        "group": group,
        "run": run,
        "project": str(first.get("project") or ""),
        "nodes": [str(each.get("node") or "") for each in abouts],
        "state": state,
        "silent": is_silent(state, seen_ns),
        "began_ns": min(filter(None, (whole(a.get("began_ns")) for a in abouts)), default=0),
        "seen_ns": seen_ns,
        "ranks": [
            {key: each[key] for key in shown if key in each} | {"rank": rank}
            for rank, each in sorted(ranks.items(), key=lambda one: rank_order(one[0]))
            if isinstance(each, Mapping)
        ],
        "verdicts": found_verdicts,
        "worst": next((v for v in worst_first(found_verdicts) if not v["harmless"]), None),
        "gaps": [
            {"node": str(about.get("node") or ""), **gap}
            for about in abouts
            for gap in listed(about.get("gaps"))
            if isinstance(gap, Mapping)
        ],
        "summary": [row for about in abouts for row in listed(about.get("summary"))][
            :_MOST_SUMMARY
        ],
        "agent": live is not None,
        "not_kept_since_ns": whole(mapping(mapping(live).get("history")).get("since_ns")),
    }
    if private:
        config = found["config"] = _first_filled(abouts, "config")
        found["config_note"] = _not_in_labels(config)
        found["texts"] = _first_filled(abouts, "texts")
        found["environment"] = _first_filled(abouts, "environment")
        found["insufficient"] = [
            str(each.get("why"))
            for each in listed(mapping(live).get("insufficient"))
            if isinstance(each, Mapping)
            and (each.get("group") or "", each.get("run")) == (group, run)
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


def _first_filled(abouts: list[dict[str, Any]], key: str) -> Mapping[str, Any]:
    return next((found for each in abouts if (found := mapping(each.get(key)))), {})
