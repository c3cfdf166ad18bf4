"""Reads a side of a comparison from a Prometheus: what agents have exported of a run."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from otel_ddp import catalog
from otel_ddp.history.compare.side import Side, Value
from otel_ddp.history.find_run import NotFound
from otel_ddp.history.group_steps import Cell, without_special

# Asks a path of the API, such as `/api/v1/query`, and returns the result of its answer.
Ask = Callable[[str, Mapping[str, str]], list[Any]]
_Points = dict[float, float]
_Labels = Mapping[str, str]

_LOOKED_BACK = "90d"
_MOST_POINTS = 2000
_MOST_OF_ALL = 64_000
# Agents export every ten seconds, or are asked that often.
_SHORTEST_S = 5.0


def read(ask: Ask, words: str, now_s: float | None = None) -> Side:
    """The run of this name, `run` or `group/run`; raises NotFound."""
    now_s = time.time() if now_s is None else now_s
    labels, start_s = _find(ask, words, now_s)
    chosen = ",".join(f"{name}={json.dumps(labels[name])}" for name in catalog.RUN_LABELS)
    asked = _Asked(ask, chosen, start_s, now_s)
    cells = _cells(asked)
    info = next(iter(asked.instant(catalog.TRAINING_RUN_INFO)), {})
    config = {
        name.removeprefix("config_"): text
        for name, text in info.items()
        if name.startswith("config_")
    }
    keys = ("nodes", "model", "backend", "precision", "strategy", "torch", "cuda")
    conditions = {
        "ranks": info.get("world_size", ""),
        **{key: info.get(key, "") for key in keys},
        **{key: text for key, text in config.items() if "batch" in key.lower()},
    }
    return Side(
        "/".join(filter(None, (labels.get("group"), labels["run"]))),
        {key: text for key, text in conditions.items() if text},
        config,
        cells,
        list(_values(asked)),
    )


def _find(ask: Ask, words: str, now_s: float) -> tuple[dict[str, str], float]:
    """The labels of the run that is meant, and when it began."""
    group, _, run = words.rpartition("/")
    tried = [{"run": words}, *([{"group": group, "run": run}] if group else [])]
    for wanted in tried:
        chosen = ",".join(f"{name}={json.dumps(text)}" for name, text in wanted.items())
        name = catalog.TRAINING_RUN_START_TIMESTAMP.prometheus
        promql = f"last_over_time({name}{{{chosen}}}[{_LOOKED_BACK}])"
        result = ask("/api/v1/query", {"query": promql, "time": f"{now_s:.3f}"})
        found = [(_run_of(each.get("metric") or {}), each["value"][1]) for each in result]
        titles = {(labels["group"], labels["run"]) for labels, _ in found}
        if len(titles) > 1:
            names = ", ".join(sorted("/".join(each) for each in titles))
            raise NotFound(f"Several runs are called {words!r}: {names}. Give one of these.")
        if found:
            return found[0][0], min(float(start) for _, start in found)
    raise NotFound(f"That Prometheus has no run {words!r} in the last {_LOOKED_BACK}.")


def _run_of(labels: _Labels) -> dict[str, str]:
    return {name: labels.get(name, "") for name in catalog.RUN_LABELS}


class _Asked:
    """One run, over the time in which it trained."""

    def __init__(self, ask: Ask, chosen: str, start_s: float, now_s: float) -> None:
        self._ask, self._chosen = ask, chosen
        self._start_s, self._end_s = start_s, now_s
        # It may be over for weeks. A sample is seen for five minutes: none is missed by this step.
        steps = catalog.TRAINING_STEPS.prometheus
        span_s = max(round(now_s - start_s), 1)
        promql = f"max_over_time(timestamp({steps}{{{chosen}}})[{span_s}s:4m])"
        ends = [float(each["value"][1]) for each in self._query(promql)]
        self._end_s = min(max(ends, default=start_s), now_s)
        # Answers stay below what is read of them, however many ranks there are.
        points = min(_MOST_POINTS, max(_MOST_OF_ALL // max(len(ends), 1), 100))
        self._step_s = max((self._end_s - start_s) / points, _SHORTEST_S)

    def _query(self, promql: str) -> list[Any]:
        return self._ask("/api/v1/query", {"query": promql, "time": f"{self._end_s:.3f}"})

    def instant(self, metric: catalog.Metric) -> list[_Labels]:
        """The labels of each series at the end."""
        promql = f"last_over_time({metric.prometheus}{{{self._chosen}}}[{_LOOKED_BACK}])"
        return [each.get("metric") or {} for each in self._query(promql)]

    def over_time(self, metric: catalog.Metric) -> list[tuple[_Labels, _Points]]:
        """Each series, at times that all series have in common."""
        asked = {
            "query": f"{metric.prometheus}{{{self._chosen}}}",
            "start": f"{self._start_s:.3f}",
            "end": f"{self._end_s:.3f}",
            "step": f"{self._step_s:.3f}",
        }
        return [
            (each.get("metric") or {}, {float(at): float(text) for at, text in each["values"]})
            for each in self._ask("/api/v1/query_range", asked)
        ]

    def grown(self, metric: catalog.Metric) -> dict[tuple[str, ...], _Points]:
        """How much each counter grew up to each time, by rank and attributes."""
        found: dict[tuple[str, ...], _Points] = {}
        for labels, points in self.over_time(metric):
            key = (labels.get("rank", ""), *(labels.get(name, "") for name in metric.attributes))
            # A node that is scraped and pushed has each series twice.
            if len(points) > len(found.get(key, ())):
                found[key] = points
        return {key: dict(_growth(points)) for key, points in found.items()}


def _growth(points: _Points) -> Iterator[tuple[float, float]]:
    before = None
    for at, value in sorted(points.items()):
        # A counter that falls has begun anew: what lies between is unknown.
        if before is not None and value >= before:
            yield at, value - before
        before = value


def _cells(asked: _Asked) -> list[Cell]:
    steps = asked.grown(catalog.TRAINING_STEPS)
    work = asked.grown(catalog.TRAINING_TOKENS) or asked.grown(catalog.TRAINING_SAMPLES)
    phases = asked.grown(catalog.TRAINING_PHASE_TIME)
    clocks = {clock for _, _, clock, _ in phases}
    clock = "device" if "device" in clocks else "host"
    by_rank: dict[str, dict[str, list[_Points]]] = {}
    for (rank, phase, of_clock, _), points in phases.items():
        if of_clock == clock and phase in catalog.PHASES:
            by_rank.setdefault(rank, {}).setdefault(phase, []).append(points)
    cells, passed = [], 0.0
    for at in sorted({at for points in steps.values() for at in points}):
        made = {rank: points[at] for (rank,), points in steps.items() if points.get(at)}
        parts = [_phases_s(by_rank.get(rank, {}), at, count) for rank, count in made.items()]
        if not parts:
            continue
        phases_s = {word: sum(part[word] for part in parts) / len(parts) for word in catalog.PHASES}
        count = sum(made.values()) / len(made)
        amount = sum(points.get(at, 0.0) for points in work.values()) / count
        cells.append(
            without_special(
                Cell(
                    *(round(passed), count, sum(phases_s.values()), amount),
                    *(True, phases_s, int(at * 1e9)),
                )
            )
        )
        passed += count
    return cells


def _phases_s(of_rank: Mapping[str, list[_Points]], at: float, steps: float) -> dict[str, float]:
    return {
        word: sum(points.get(at, 0.0) for points in of_rank.get(word, ())) / steps
        for word in catalog.PHASES
    }


def _values(asked: _Asked) -> Iterator[Value]:
    steps = {_logged(labels): points for labels, points in asked.over_time(_STEP)}
    best = {_logged(labels)[:2]: points for labels, points in asked.over_time(_BEST)}
    best_step = {_logged(labels)[:2]: points for labels, points in asked.over_time(_BEST_STEP)}
    found: dict[tuple[str, str], tuple[int, Value]] = {}
    for labels, points in asked.over_time(catalog.TRAINING_SCALAR):
        name, split, rank = key = _logged(labels)
        numbers = steps.get(key, {})
        # A value stays until the next one: each counts once.
        by_step = {
            int(numbers[at]): value
            for at, value in sorted(points.items())
            if at in numbers and math.isfinite(value) and math.isfinite(numbers[at])
        }
        number = int(rank) if rank.isdecimal() else 1 << 31
        if not by_step or number >= found.get((name, split), (1 << 32, None))[0]:
            continue
        ordered = sorted(by_step)
        lowest, at_step = (_last(each.get((name, split))) for each in (best, best_step))
        found[name, split] = (
            number,
            Value(
                *(name, split, ""),
                ordered,
                [by_step[step] for step in ordered],
                by_step[ordered[-1]],
                lowest,
                None if at_step is None else int(at_step),
            ),
        )
    yield from (value for _, value in found.values())


_STEP, _BEST = catalog.TRAINING_SCALAR_STEP, catalog.TRAINING_SCALAR_BEST
_BEST_STEP = catalog.TRAINING_SCALAR_BEST_STEP


def _logged(labels: _Labels) -> tuple[str, str, str]:
    return labels.get("name", ""), labels.get("split", ""), labels.get("rank", "")


def _last(points: _Points | None) -> float | None:
    return points[max(points)] if points else None
