"""Weeks of many runs on a cluster with one bad machine, as the rules of Prometheus record them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

HOUR_S, DAY_S = 3600, 86_400
# The rules of fleet.yml record what is lost each 30 s, and who was seen each 5 min.
_LOST_EVERY_S, _SEEN_EVERY_S = 30, 300
GPUS = 8
# Which of its GPUs is the slow one, and how much longer the others wait for it, as a share.
BAD_GPU, WAITS = 5, 0.12
# How long after its beginning a run that hangs does so.
HANGS_AT_S = 1800
GROUPS = ("pretrain", "sweep", "sft")
_LOST = "node_cause:training_lost_gpus:rate2m"
_HELD_BACK = "gpu_reason:otel_ddp_gpu_throttle_active:last"


class Run(NamedTuple):
    """One of them."""

    group: str
    name: str
    nodes: tuple[str, ...]
    began_s: int
    ended_s: int
    late: tuple[str, int, int] | None
    """A node of it, and from when to when it was late."""
    hangs: tuple[str, int] | None
    """A node of it, and for how long the run stood still for it."""
    dies: str
    """The node whose rank was killed in the end; empty: none."""

    @property
    def ranks(self) -> int:
        return GPUS * len(self.nodes)

    def lost_gpus(self) -> float:
        """While its node is late: all others wait for that share of their time."""
        return WAITS * (self.ranks - 1)


class Weeks(NamedTuple):
    """All of them, and what is true of each node."""

    runs: list[Run]
    bad: str
    began_s: int
    ended_s: int


def played(ended_s: int, *, nodes: int = 50, days: int = 21, of_run: int = 6) -> Weeks:
    """Each node is in one run after the other. The bad one is late in most of its own; any may be
    late for a while, be blamed for a hang, or lose a rank."""
    chance = random.Random(7)
    names = [f"gpu-{number:04d}" for number in range(nodes)]
    bad = names[17]
    began_s = ended_s - days * DAY_S
    runs: list[Run] = []
    free_s = dict.fromkeys(names, began_s)
    while min(free_s.values()) < ended_s - 2 * HOUR_S:
        # Those that have been free for longest, which come in another order each time.
        chosen = sorted(names, key=lambda each: (free_s[each], chance.random()))[:of_run]
        start_s = max(free_s[each] for each in chosen) // 300 * 300 + 300
        end_s = min(start_s + chance.randrange(6, 40) * HOUR_S, ended_s)
        if end_s - start_s < HOUR_S:
            break
        free_s |= dict.fromkeys(chosen, end_s)
        length_s, late, hangs = end_s - start_s, None, None
        if bad in chosen and chance.random() < 0.8:
            late = bad, start_s + 600, end_s
        elif chance.random() < 0.15:
            # A neighbour on its cores, for some minutes.
            late = chance.choice(chosen), start_s + length_s // 2, start_s + length_s // 2 + 300
        if chance.random() < 0.1:
            hangs = chance.choice(chosen), 1200
        dies = chance.choice(chosen) if chance.random() < 0.2 else ""
        group = chance.choice(GROUPS)
        runs.append(
            Run(group, f"r{len(runs)}", tuple(sorted(chosen)), start_s, end_s, late, hangs, dies)
        )
    return Weeks(runs, bad, began_s, ended_s)


class _Recorded:
    """Lines by metric: promtool takes one after the other."""

    def __init__(self) -> None:
        self.lines: dict[str, list[str]] = {}

    def add(
        self, name: str, labels: Mapping[str, str], times: Iterable[int], value: float | None
    ) -> None:
        """*value*: None for the time itself."""
        where = ",".join(f'{label}="{text}"' for label, text in labels.items())
        lines = self.lines.setdefault(name, [])
        lines += [f"{name}{{{where}}} {at_s if value is None else value} {at_s}" for at_s in times]


def openmetrics(weeks: Weeks) -> Iterator[str]:
    """What the rules have recorded, as promtool takes it."""
    recorded = _Recorded()
    for run in weeks.runs:
        of_run, span = {"group": run.group, "run": run.name}, (run.began_s, run.ended_s)
        seen = range(*span, _SEEN_EVERY_S)
        recorded.add(
            "run:training_ranks_together:count", of_run, range(*span, _LOST_EVERY_S), run.ranks
        )
        for node in run.nodes:
            recorded.add("node:training_seen:timestamp", {**of_run, "node": node}, seen, None)
        if run.late:
            node, *at_s = run.late
            of_node, times = {**of_run, "node": node}, range(*at_s, _LOST_EVERY_S)
            late, gpu = {**of_node, "cause": "late"}, {**of_node, "hw_id": f"GPU-{BAD_GPU}"}
            recorded.add(_LOST, late, times, run.lost_gpus())
            recorded.add("gpu:training_straggler_lost_time:rate2m", gpu, times, run.lost_gpus())
            # The slow GPU is hot: at first so much that its own hardware slows it down as well.
            for reason, of_these in (("sw_thermal", times), ("hw_thermal", times[:9])):
                recorded.add(_HELD_BACK, {**gpu, "reason": reason}, of_these, 1)
        if run.hangs:
            node, took_s = run.hangs
            hang, start_s = {**of_run, "node": node, "cause": "hang"}, run.began_s + HANGS_AT_S
            recorded.add(_LOST, hang, range(start_s, start_s + took_s, _LOST_EVERY_S), run.ranks)
        if run.dies:
            death = {**of_run, "node": run.dies, "cause": "signal"}
            last = range(run.ended_s - 300, run.ended_s, _LOST_EVERY_S)
            recorded.add("node_cause:training_deaths:sum", death, last, 1)
    for name, lines in recorded.lines.items():
        yield f"# TYPE {name} gauge"
        yield from lines
    yield "# EOF"
