"""Histories of runs that never were, written by the product's own writer."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from otel_ddp.diagnosis.steps import Collective
from otel_ddp.history.buckets import STEPS, Row, StepBucket, step_row, value_row
from otel_ddp.history.directory import file_name
from otel_ddp.history.reader import History, Series
from otel_ddp.history.run_file import RunFile
from otel_ddp.history.tables import Event, SeriesKey
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.words import PHASES

S = 10**9
# Of a step of 20 ms, when nobody is late.
_PHASES_S = {
    "data": 0.001,
    "forward": 0.006,
    "backward": 0.009,
    "optimizer": 0.002,
    "other": 0.0005,
}
_JITTER = 0.02
# What telemetry has cost each rank, and all of its steps.
_TOTALS = {catalog.OTEL_DDP_HOOK_TIME.name: 0.5, catalog.TRAINING_STEP_DURATION.name: 100.0}


def value_rows(points: list[tuple[int, int, float]]) -> list[Row]:
    """The points of a series: step, time, value."""
    return [value_row(step, time_ns, value, step / 100) for step, time_ns, value in points]


def kept_steps(history: History, series: Series) -> list[StepBucket]:
    """The steps of a series, as its history has them."""
    return [*map(StepBucket.of, STEPS.in_pieces(history.columns(series), 1))]


def summary(name: str, split: str, points: Sequence[tuple[int, int, float]]) -> dict[str, Any]:
    """The row of a value in `about`, whose least is its best one; *points* as of `value_rows`."""
    told = [{"value": value, "step": step, "time_ns": ns} for step, ns, value in points]
    low, high = (choose(told, key=lambda each: each["value"]) for choose in (min, max))
    row = {"name": name, "split": split, "direction": "min"}
    return {**row, "last": told[-1], "min": low, "max": high}


def write_history(
    directory: Path,
    run: str = "lr-0.3",
    *,
    group: str = "sweep",
    node: str = "node-0",
    ranks: int = 4,
    first_rank: int = 0,
    steps: int = 300,
    late: int | None = None,
    late_in: range | None = None,
    logged_by: int = 1,
    slower: Mapping[str, float] = {},
    names: tuple[str, ...] = ("loss", "accuracy"),
    state: str = "finished",
    began_ns: int | None = None,
    seed: int = 0,
    about: Mapping[str, Any] = {},
    bound: str = "",
    verdicts: Sequence[Mapping[str, Any]] = (),
    waits_s: Mapping[Collective, Mapping[int, float]] = {},
) -> Path:
    """A run: of *late*, forward takes 1.5 times as long; *slower* are factors of all, by phase.

    *late_in*: it is so in these steps alone, by a verdict that is over unless the run goes on.
    *logged_by*: so many ranks log the values.

    *bound*: the sentence of a verdict that nothing is wrong.
    *verdicts*: further ones. *waits_s*: of each collective, what these ranks wait in a step.
    """
    chance, late_steps = random.Random(seed), late_in or range(steps)
    now_ns = time.time_ns() if began_ns is None else began_ns
    path = directory / file_name(group, run, node)
    directory.mkdir(parents=True, exist_ok=True)
    file = RunFile(path)
    own: dict[int, list[dict[str, float]]] = {}
    for rank in range(ranks):
        own[rank] = [
            {
                phase: took_s
                * slower.get(phase, 1.0)
                * (1.5 if rank == late and phase == "forward" and step in late_steps else 1.0)
                * chance.uniform(1 - _JITTER, 1 + _JITTER)
                for phase, took_s in _PHASES_S.items()
            }
            for step in range(steps)
        ]
    at_ns = [now_ns]
    rows: dict[SeriesKey, list[Row]] = {}
    told: dict[str, Any]
    for step in range(steps):
        longest_s = max(sum(own[rank][step].values()) for rank in range(ranks))
        at_ns.append(at_ns[-1] + int(longest_s * S))
    for rank in range(ranks):
        label = str(first_rank + rank)
        of_steps = rows[SeriesKey("steps", "host", label)] = []
        for step in range(steps):
            began, ended = at_ns[step], at_ns[step + 1]
            codes = bytes([*(PHASES[phase] for phase in own[rank][step]), PHASES["comm_wait"]])
            spans_ns = [int(s * S) for s in own[rank][step].values()]
            spans_ns.append(max(ended - began - sum(spans_ns), 0))
            of_steps.append(step_row(step, began, ended, codes, spans_ns, 32, False))
        for name in names if rank < logged_by and first_rank == 0 else ():
            for split in ("train", "val"):
                key = SeriesKey("value", name, label, (("split", split),))
                points = [
                    (step, at_ns[step + 1], 2 * math.exp(-step / 100) + chance.uniform(0, 0.1))
                    for step in range(0, steps, 1 if split == "train" else 10)
                ]
                rows[key] = value_rows(points)
        device = (("gpu", str(rank)), ("hw.id", f"GPU-{rank}"), ("hw.model", "H100"))
        key = SeriesKey(
            "node", "hw.gpu.utilization", label, (*device, ("hw.type", "gpu"), ("node", node))
        )
        seconds = range(now_ns // S, at_ns[-1] // S + 1)
        rows[key] = value_rows([(s, s * S, chance.uniform(0.7, 0.9)) for s in seconds])
    for (dimension, operation), of_ranks in waits_s.items():
        labels = ("dimension", dimension), ("operation", operation), ("node", node)
        for rank, wait_s in of_ranks.items():
            name = catalog.TRAINING_COLLECTIVE_STEP_WAIT.name
            points = [(s, s * S, wait_s) for s in range(now_ns // S, at_ns[-1] // S + 1)]
            rows[SeriesKey("node", name, str(rank), labels)] = value_rows(points)
    attempts = about.get("attempts") or [{"began_ns": now_ns}]
    described = {
        str(first_rank + rank): {
            "run": run,
            "group": group,
            "job_type": "train",
            "node": node,
            "rank": first_rank + rank,
            "local_rank": rank,
            "state": state,
            "step": steps - 1,
            "pid": 1000 + rank,
            "started_ns": attempts[-1]["began_ns"],
            "seen_alive_ns": at_ns[-1],
            "world_size": ranks,
            "totals": _TOTALS,
        }
        for rank in range(ranks)
    }
    who = {"group": group, "run": run, "node": node}
    told_in_all = [{"phase": "", "step": None, "sentence": "", **each} for each in verdicts]
    if late is not None:
        rank = first_rank + late
        sentence = f"rank {rank} is slow in forward: 3.0 ms more than others"
        told = {"kind": "straggler", "phase": "forward", "step": 100, "sentence": sentence}
        told["who"], told["since_ns"] = {**who, "rank": str(rank)}, at_ns[min(61, steps)]
        if late_in is not None:
            took_s = [(at_ns[step + 1] - at_ns[step]) / S for step in late_in]
            excess_s = _PHASES_S["forward"] / 2
            told["since_ns"] = at_ns[late_in[0]] + 1
            if state != "running":
                told["until_ns"] = at_ns[late_in[-1] + 1]
            told["evidence"] = {
                "excess_s": excess_s,
                "step_s": sum(took_s) / len(took_s),
                "step_without_s": sum(took_s) / len(took_s) - excess_s,
                "lost_s": excess_s * len(took_s) * (ranks - 1),
            }
        told_in_all.append(told)
    if bound:
        told = {"kind": "bound", "phase": "compute", "step": 200, "sentence": bound}
        told_in_all.append({**told, "who": who, "since_ns": at_ns[min(200, steps)]})
    events = [
        Event(at_ns[1], 1, "0", "log", "INFO", "training begins", {}),
        Event(at_ns[-1], steps - 1, "0", "log", "WARN", "<b>loss</b> & more", {"logger": "train"}),
    ]
    file.write(
        rows=rows,
        ranks=described,
        about={
            "group": group,
            "run": run,
            "job_type": "train",
            "node": node,
            "project": "demo",
            "began_ns": now_ns,
            "seen_ns": at_ns[-1],
            "config": {"lr": 0.3, "batch": 32},
            "texts": {"tags": "baseline"},
            "environment": {"world_size": ranks, "torch": "2.9", "script": "mnist/train.py"},
            "summary": [],
            "gaps": [],
            "version": "0",
            **about,
        },
        events=events,
        verdicts=told_in_all,
    )
    file.close()
    return path


SPENT_S = {"productive": 60.0, "start": 20.0, "late_rank": 5.0, "repeated": 12.0, "unknown": 3.0}
"""What `two_attempts` has of each cause."""


def two_attempts(began_ns: int, why: str = "rank 1 (node-0) left without a word") -> dict[str, Any]:
    """Of `about`: a run that was killed after 10 s, at step 99; 7 s later it was there again."""
    killed_ns = began_ns + 10 * S
    first = {"attempt": 1, "began_ns": began_ns, "first_step": 0, "last_step": 99}
    first |= {"ended_ns": killed_ns, "state": "killed", "why": why}
    second = {"attempt": 2, "began_ns": killed_ns + 2 * S, "first_step": 60, "last_step": 199}
    second["new_ns"] = killed_ns + 7 * S
    late = {"rank 2 (node-0)": 5.0}
    return {
        "time": {"seconds": SPENT_S, "late": late, "ranks": {}},
        "attempts": [first, {**second, "repeated_steps": 40}],
    }
