"""What each machine has cost the ranks of its runs, over weeks: which one is it again?"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
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
LAST_RUNS, TIMES_LATE, GROUPS = 10, 3, 2
# The ordinary limit under load is none.
_HELD_BACK = frozenset(("hw_slowdown", "hw_thermal", "hw_power_brake", "sw_thermal"))
_LATE, _HANGS = frozenset(("straggler", "recurring")), frozenset(("stall", "silence"))


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
    late_in: Sequence[LateIn]
    """Of the last ten of these."""
    deaths: Mapping[str, int]
    """Ends of its ranks that were the first of their run, by cause."""
    xids: Sequence[str]
    """Codes of the faults that the driver of its GPUs has told."""
    held_back_s: float
    """Of all its GPUs together."""
    gpus: Mapping[str, float]
    """Seconds that other ranks lost to the rank on each, by its id; the worst first."""
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

    def record(self, node: str) -> NodeRecord:
        last = [each for _, each in sorted(self.runs, key=lambda e: -e[0])[:LAST_RUNS]]
        late_in = [each for each in last if each.share >= LATE_SHARE]
        xids = sorted(self.xids, key=lambda code: (len(code), code))
        gpus = dict(sorted(self.gpus.items(), key=lambda each: -each[1]))
        sums = (self.deaths, xids, self.held_back_s, gpus)
        return NodeRecord(node, self.lost_s, len(self.runs), late_in, *sums, self.since_ns)


_Nodes = defaultdict[str, _Node]


def fleet_of(folder: Path, since_ns: int) -> Fleet:
    """From the histories in a folder, of the runs that were seen since then."""
    runs, nodes, faults = defaultdict[RunKey, list[Path]](list), _Nodes(_Node), list[str]()
    for path in sorted(directory.histories(folder)):
        _attempt(partial(_find, path, since_ns, runs), faults)
    for paths in runs.values():
        _attempt(partial(_add, paths, nodes), faults)
    return Fleet(len(runs), ordered(each.record(node) for node, each in nodes.items()), faults)


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
    with WholeRun([History(path) for path in paths]) as run:
        ranks, total_s = _size(run)
        late_s = _add_verdicts(run, ranks, nodes)
        for history in run.histories:
            name = str(history.about.get("node") or "?")
            share = min(late_s.get(name, 0.0) / total_s, 1.0) if total_s else 0.0
            late_in = LateIn(run.group, run.name, round(share, 6))
            nodes[name].runs.append((whole(history.about.get("seen_ns")), late_in))
            nodes[name].xids.update(_xids(history))
            nodes[name].held_back_s += _held_back_s(history)


def _add_verdicts(run: WholeRun, ranks: int, nodes: _Nodes) -> dict[str, float]:
    """What was said of its nodes, and of ranks on them; by how much each was late."""
    late_s: dict[str, float] = {}
    hangs = defaultdict[str, list[tuple[int, int]]](list)
    for verdict in run.verdicts():
        who, evidence = mapping(verdict.get("who")), mapping(verdict.get("evidence"))
        name, rank = str(who.get("node") or ""), str(who.get("rank") or "")
        kind, since_ns = verdict.get("kind"), whole(verdict.get("since_ns"))
        if not name:
            continue
        if kind in _LATE:
            nodes[name].begin(since_ns)
            lost_s = float(evidence.get("lost_s") or 0.0)
            late_s[name] = late_s.get(name, 0.0) + lost_s
            if gpu := _gpu(run, name, rank):
                nodes[name].gpus[gpu] = nodes[name].gpus.get(gpu, 0.0) + lost_s
        elif kind in _HANGS and len(run.nodes) > 1:
            # Of a run on one node, a hang says nothing of the machine.
            nodes[name].begin(since_ns)
            until_ns = whole(verdict.get("until_ns")) or whole(run.about.get("seen_ns"))
            hangs[name].append((since_ns, until_ns))
        elif kind == "death" and rank and not evidence.get(TAKEN_BACK):
            nodes[name].deaths[str(evidence.get("cause") or "unknown")] += 1
    hung_s = {name: _union_s(spans) * ranks for name, spans in hangs.items()}
    for cause, by_node in (("late", late_s), ("hang", hung_s)):
        for name, lost_s in by_node.items():
            nodes[name].lost_s[cause] = nodes[name].lost_s.get(cause, 0.0) + lost_s
    return late_s


def _size(run: WholeRun) -> tuple[int, float]:
    """Its ranks, and all their time."""
    ranks = whole(run.world_size) or len(run.ranks)
    if (found := goodput_of(run)) is not None:
        return ranks, found.total_s
    took_ns = whole(run.about.get("seen_ns")) - whole(run.about.get("began_ns"))
    return ranks, max(took_ns, 0) / 1e9 * ranks


def _union_s(spans: Iterable[tuple[int, int]]) -> float:
    """A hang may be told twice at a time: of the node, and of the run."""
    total_ns = last_ns = 0
    for since_ns, until_ns in sorted(spans):
        total_ns += max(until_ns - max(since_ns, last_ns), 0)
        last_ns = max(last_ns, until_ns)
    return total_ns / 1e9


def _gpu(run: WholeRun, node: str, rank: str) -> str:
    """The id of the GPU that the rank used; empty if that is not known."""
    for history in run.histories if rank else ():
        if history.about.get("node") == node:
            for series in history.series("node", catalog.HW_GPU_UTILIZATION.name):
                if series.key.rank == rank:
                    return str(dict(series.key.labels).get("hw.id") or "")
    return ""


def _xids(history: History) -> Iterator[str]:
    for series in history.series("counter", catalog.OTEL_DDP_GPU_XID_ERRORS.name):
        yield str(dict(series.key.labels).get("code") or "?")


def _held_back_s(history: History) -> float:
    """Of each GPU by the reason that held it back for longest: several hold at a time."""
    longest_s: dict[str, float] = {}
    for series in history.series("node", catalog.OTEL_DDP_GPU_THROTTLE_ACTIVE.name):
        labels = dict(series.key.labels)
        buckets = history.sums(series)
        if labels.get("reason") not in _HELD_BACK or not buckets:
            continue
        seen_s = (max(each.last_ns for each in buckets) - buckets[0].first_ns) / 1e9
        known = sum(each.finite for each in buckets)
        held_s = seen_s * sum(each.total for each in buckets) / known if known else 0.0
        gpu = str(labels.get("hw.id") or "")
        longest_s[gpu] = max(longest_s.get(gpu, 0.0), held_s)
    return sum(longest_s.values())
