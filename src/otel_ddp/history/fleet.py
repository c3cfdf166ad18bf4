"""What each machine has cost the ranks of its runs, over weeks: which one is it again?"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from otel_ddp.history import directory
from otel_ddp.history.goodput import goodput_of
from otel_ddp.history.reader import History, Unreadable, mapping, whole
from otel_ddp.history.tables import RunKey
from otel_ddp.history.whole_run import WholeRun
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.words import TAKEN_BACK

# A node was late in a run that lost this share of all its time to it. The machine is suspected
# where that happened so often in its last runs, and in so many groups: in one alone, it may be what
# its programs do. In deploy/prometheus, fleet.yml of rules and of alerts have the same numbers.
LATE_SHARE = 0.01
LAST_RUNS, LAST_DAYS, TIMES_LATE, GROUPS = 10, 30, 3, 2
DAY_NS = 86_400 * 10**9
# The ordinary limit under load is none.
_HELD_BACK = frozenset(("hw_slowdown", "hw_thermal", "hw_power_brake", "sw_thermal"))
# A history is written each few seconds: where nothing is for longer, nothing ran.
_LONGEST_GAP_NS = 60 * 10**9
_LATE = frozenset(("straggler", "recurring"))


class LateIn(NamedTuple):
    """A run in which a node was late."""

    group: str
    run: str
    share: float
    """Of all time of the run."""


class NodeRecord(NamedTuple):
    """One machine."""

    node: str
    lost_s: Mapping[str, float]
    """Seconds of other ranks, by cause: `late`, `hang`."""
    runs: int
    """How many it was part of."""
    last_runs: int
    """Of these the last ten within 30 days, or as many as there are."""
    late_in: Sequence[LateIn]
    """Those among them in which it was late."""
    deaths: Mapping[str, int]
    """Ends of its ranks that were the first of their run, by cause."""
    xids: Sequence[str]
    """Codes of the faults that the driver of its GPUs has told."""
    held_back_s: float
    """Of all its GPUs together."""
    gpus: Mapping[str, float]
    """Seconds that other ranks lost to those on each, by its id; the worst first."""
    since_ns: int
    """When it first cost anything; 0: it has not."""

    @property
    def cost_s(self) -> float:
        return sum(self.lost_s.values())

    @property
    def is_suspect(self) -> bool:
        groups = {each.group for each in self.late_in}
        return len(self.late_in) >= TIMES_LATE and len(groups) >= GROUPS

    def to_json(self) -> dict[str, Any]:
        """For programs; docs/json.md describes each key."""
        return {
            "node": self.node,
            "suspect": self.is_suspect,
            "lost_s": {cause: round(s, 3) for cause, s in self.lost_s.items()},
            "runs": self.runs,
            "last_runs": self.last_runs,
            "late_in": [each._asdict() for each in self.late_in],
            "deaths": dict(self.deaths),
            "xids": [*self.xids],
            "held_back_s": round(self.held_back_s, 3),
            "gpus": {each: round(s, 3) for each, s in self.gpus.items()},
            "since_ns": self.since_ns or None,
        }


class Fleet(NamedTuple):
    """All machines that were seen, those that cost most first."""

    runs: int
    nodes: Sequence[NodeRecord]
    faults: Sequence[str] = ()
    """Why something could not be read."""


def ordered(nodes: Iterable[NodeRecord]) -> list[NodeRecord]:
    """Those that cost most first."""

    def place(each: NodeRecord) -> tuple[Any, ...]:
        troubles = len(each.late_in), len(each.xids), sum(each.deaths.values()), each.held_back_s
        return (-each.cost_s, *(-each for each in troubles), each.node)

    return sorted(nodes, key=place)


# -- from histories


class _Node:
    """What is summed up of one machine."""

    def __init__(self) -> None:
        self.lost_s: dict[str, float] = {}
        # When each run was last seen, whether or not the node was late in it.
        self.runs: list[tuple[int, LateIn]] = []
        self.deaths, self.xids = Counter[str](), set[str]()
        self.held_back_s = 0.0
        self.gpus: dict[str, float] = {}
        self.since_ns = 0

    def begin(self, since_ns: int) -> None:
        self.since_ns = min(self.since_ns or since_ns, since_ns)

    def record(self, node: str, last_since_ns: int) -> NodeRecord:
        newest = sorted(self.runs, key=lambda e: -e[0])[:LAST_RUNS]
        last = [each for seen_ns, each in newest if seen_ns >= last_since_ns]
        late_in = [each for each in last if each.share >= LATE_SHARE]
        xids = sorted(self.xids, key=lambda code: (len(code), code))
        gpus = dict(sorted(self.gpus.items(), key=lambda each: -each[1]))
        cost = (late_in, self.deaths, xids, self.held_back_s, gpus, self.since_ns)
        return NodeRecord(node, self.lost_s, len(self.runs), len(last), *cost)


_Nodes = defaultdict[str, _Node]


def fleet_of(folder: Path, now_ns: int, days: int) -> Fleet:
    """From the histories in a folder, of the runs that were seen in these days."""
    since_ns, last_since_ns = (now_ns - each * DAY_NS for each in (days, min(days, LAST_DAYS)))
    runs, nodes, faults = defaultdict[RunKey, list[Path]](list), _Nodes(_Node), list[str]()
    for path in sorted(directory.histories(folder)):
        _attempt(partial(_find, path, since_ns, runs), faults)
    for paths in runs.values():
        _attempt(partial(_add, paths, nodes), faults)
    found = (each.record(node, last_since_ns) for node, each in nodes.items())
    return Fleet(len(runs), ordered(found), faults)


def _attempt(read: Callable[[], None], faults: list[str]) -> None:
    try:
        read()
    except Unreadable as why:
        faults.append(str(why))


def _find(path: Path, since_ns: int, runs: defaultdict[RunKey, list[Path]]) -> None:
    """Which run it is of, if that was seen since then."""
    with History(path) as history:
        about = history.about
        if whole(about.get("seen_ns")) >= since_ns:
            key = str(about.get("group") or ""), str(about.get("run") or path.stem)
            runs[key].append(path)


def _add(paths: Sequence[Path], nodes: _Nodes) -> None:
    """One run, and each of its nodes."""
    with directory.open_run(paths) as run:
        # What may be damaged is read before anything is counted.
        ranks, total_s = _size(run)
        parts = [
            (_names(each), whole(each.about.get("seen_ns")), set(_xids(each)), _held_back_s(each))
            for each in run.histories
        ]
        late_s = _add_verdicts(run, ranks, {name for names, *_ in parts for name in names}, nodes)
        # The history of a late node may be lost.
        seen_ns = dict.fromkeys(late_s, whole(run.about.get("seen_ns")))
        for names, last_ns, xids, held_back_s in parts:
            seen_ns |= dict.fromkeys(names, last_ns)
            nodes[names[0]].xids |= xids
            nodes[names[0]].held_back_s += held_back_s
        for name, last_ns in seen_ns.items():
            share = min(late_s.get(name, 0.0) / total_s, 1.0) if total_s else 0.0
            nodes[name].runs.append((last_ns, LateIn(run.group, run.name, round(share, 6))))


def _names(history: History) -> list[str]:
    """The machine, as its ranks are told to call it; or several on one host, its own name first."""
    own = str(history.about.get("node") or "?")
    found = {str(mapping(each).get("node") or own) for each in history.ranks.values()} or {own}
    return sorted(found, key=lambda name: (name != own, name))


def _add_verdicts(run: WholeRun, ranks: int, known: set[str], nodes: _Nodes) -> dict[str, float]:
    """What was said of its nodes, and of ranks on them; by how much each was late."""
    late_s: dict[str, float] = {}
    hangs: list[_Hang] = []
    for verdict in run.verdicts():
        who, evidence = mapping(verdict.get("who")), mapping(verdict.get("evidence"))
        name, rank = str(who.get("node") or ""), str(who.get("rank") or "")
        kind, since_ns = verdict.get("kind"), whole(verdict.get("since_ns"))
        if kind == "stall":
            # It is about all ranks. Who holds them up is another question.
            name = str(evidence.get("node") or "")
        if not name:
            continue
        if kind in _LATE:
            nodes[name].begin(since_ns)
            lost_s = _seconds(evidence.get("lost_s"))
            late_s[name] = late_s.get(name, 0.0) + lost_s
            gpus, by_gpu = _gpus(run, name, rank), nodes[name].gpus
            for gpu in gpus:
                by_gpu[gpu] = by_gpu.get(gpu, 0.0) + lost_s / len(gpus)
        elif kind in ("stall", "silence") and known - {name}:
            # Of a run on one node, a hang says nothing of the machine.
            until_ns = whole(verdict.get("until_ns")) or whole(run.about.get("seen_ns"))
            hangs.append(_Hang(since_ns, min(until_ns, _moves_ns(run, since_ns)), name))
        elif kind == "death" and rank and not evidence.get(TAKEN_BACK):
            nodes[name].deaths[str(evidence.get("cause") or "unknown")] += 1
    for each in (hangs := [each for each in hangs if each.is_alone(hangs)]):
        nodes[each.node].begin(each.since_ns)
    hung_s = {
        name: _union_s(each for each in hangs if each.node == name) * ranks
        for name in {each.node for each in hangs}
    }
    for cause, by_node in (("late", late_s), ("hang", hung_s)):
        for name, lost_s in by_node.items():
            nodes[name].lost_s[cause] = nodes[name].lost_s.get(cause, 0.0) + lost_s
    return late_s


def _size(run: WholeRun) -> tuple[int, float]:
    """Its ranks, and all their time; between two attempts there are none."""
    ranks = whole(run.world_size) or len(run.ranks)
    if (found := goodput_of(run)) is not None:
        gaps_s = (found.seconds.get(each, 0.0) for each in ("between_attempts", "between_launches"))
        ran_s = found.total_s - sum(gaps_s)
        # Nodes whose histories are not here have taken as long.
        return ranks, ran_s * max(ranks / max(len(run.ranks), 1), 1.0)
    took_ns = whole(run.about.get("seen_ns")) - whole(run.about.get("began_ns"))
    return ranks, max(took_ns, 0) / 1e9 * ranks


def _moves_ns(run: WholeRun, since_ns: int) -> float:
    """When a run that stood still makes steps again: an agent that was killed has not told it."""
    # The clocks of its nodes may be seconds apart, and these steps some from before.
    after_ns = since_ns + _LONGEST_GAP_NS
    began_ns = (each.first_ns for *_, steps in run.step_buckets.values() for each in steps)
    return min((each for each in began_ns if each > after_ns), default=math.inf)


def _seconds(found: Any) -> float:
    is_sane = isinstance(found, (int, float)) and 0 < found < math.inf
    return float(found) if is_sane else 0.0


class _Hang(NamedTuple):
    """When a node held up its run."""

    since_ns: int
    until_ns: float
    node: str

    def is_alone(self, hangs: Iterable[_Hang]) -> bool:
        """Whether no other node did so meanwhile: two say nothing of either."""
        return all(
            each.node == self.node
            or each.until_ns <= self.since_ns
            or self.until_ns <= each.since_ns
            for each in hangs
        )


def _union_s(hangs: Iterable[_Hang]) -> float:
    """A hang may be told twice at a time: of the node, and of the run."""
    total_ns = last_ns = 0.0
    for since_ns, until_ns, _ in sorted(hangs):
        total_ns += max(until_ns - max(since_ns, last_ns), 0)
        last_ns = max(last_ns, until_ns)
    return total_ns / 1e9


def _gpus(run: WholeRun, node: str, rank: str) -> set[str]:
    """The ids of the GPUs that the rank used, or all ranks of the node; empty if not known."""
    late = {rank} if rank else {e for e, about in run.ranks.items() if about.get("node") == node}
    found = {
        str(dict(series.key.labels).get("hw.id") or "")
        for history in run.histories
        for series in history.series("node", catalog.HW_GPU_UTILIZATION.name)
        if series.key.rank in late
    }
    return found - {""}


def _xids(history: History) -> Iterator[str]:
    for series in history.series("counter", catalog.OTEL_DDP_GPU_XID_ERRORS.name):
        yield str(dict(series.key.labels).get("code") or "?")


def _held_back_s(history: History) -> float:
    """Of each GPU by the reason that held it back for longest: several hold at a time."""
    longest_s: dict[str, float] = {}
    for series in history.series("node", catalog.OTEL_DDP_GPU_THROTTLE_ACTIVE.name):
        labels = dict(series.key.labels)
        if labels.get("reason") not in _HELD_BACK:
            continue
        buckets = history.sums(series)
        held_s = 0.0
        for each, after in pairwise(buckets):
            # The run may have gone on days later.
            until_ns = min(after.first_ns, each.last_ns + _LONGEST_GAP_NS)
            held_s += (until_ns - each.first_ns) / 1e9 * each.total / max(each.finite, 1)
        gpu = str(labels.get("hw.id") or "")
        longest_s[gpu] = max(longest_s.get(gpu, 0.0), held_s)
    return sum(longest_s.values())
