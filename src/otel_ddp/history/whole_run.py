"""A run: joins its histories of all nodes and the steps of all ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

from otel_ddp import plain
from otel_ddp.history.buckets import FAR, FIRST, STEPS, Bucket, Row, StepBucket
from otel_ddp.history.newest_attempt import (
    are_redundant,
    first_rank,
    newest_attempt,
    of_node,
    rank_order,
)
from otel_ddp.history.reader import DAMAGE, History, Series, damaged
from otel_ddp.history.terminal import where_to_look
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.words import UNUSUAL_PHASES

_Of = tuple[History, Series]
_EMPTY: tuple[Any, ...] = (None, "", {}, [])


_WORDS = re.compile(r"[\W_]+")
_VALIDATION = {"val", "valid", "validation", "eval", "test", "dev"}


class Cell(NamedTuple):
    """Neighbouring steps of all ranks."""

    steps: float
    took_s: float
    """The mean duration of a step. `phases_s` has the mean time in each phase per step."""
    work: float
    """Tokens or samples of all ranks together, per step."""
    usual: bool
    phases_s: dict[str, float]


class WholeRun:
    """One run, from those histories of its nodes that were found."""

    def __init__(self, histories: Sequence[History]) -> None:
        found = [of_node(each.about, each.ranks) for each in histories]
        twice = are_redundant(found)
        nodes = {
            each: of for each, of, more in zip(histories, found, twice, strict=True) if not more
        }
        self.of_nodes = [*nodes.values()]
        self.newest = newest_attempt(self.of_nodes)
        # The first history is then that of rank 0's node.
        self.histories = sorted(nodes, key=lambda each: first_rank(self.newest, nodes[each]))
        self._opened = histories
        self.paths = [each.path for each in histories]

    def __enter__(self) -> WholeRun:
        return self

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        for each in self._opened:
            each.close()
        if isinstance(error, DAMAGE):
            raise damaged(self.histories, error) from error

    @property
    def group(self) -> str:
        return self.word("group")

    @property
    def name(self) -> str:
        return str(self.about.get("run") or self.histories[0].path.stem)

    @property
    def began_ns(self) -> int:
        """The start of the run; 0 if unknown."""
        return plain.whole(self.about.get("began_ns")) or 0

    @property
    def seen_ns(self) -> int:
        """When its histories were last written; 0 if unknown."""
        return plain.whole(self.about.get("seen_ns")) or 0

    @property
    def shift(self) -> int:
        """See `History.shift`."""
        return self.histories[0].shift

    def head(self) -> dict[str, Any]:
        """The keys that the list of runs, the page of a run, and a report share."""
        return {
            "group": self.group,
            "run": self.name,
            "project": self.word("project"),
            "nodes": self.nodes,
            "state": self.state,
            "began_ns": self.began_ns,
            "seen_ns": self.seen_ns,
        }

    def word(self, key: str) -> str:
        """A text of `about`, such as `project`; empty if unknown."""
        return str(self.about.get(key) or "")

    def section(self, key: str) -> Mapping[str, Any]:
        """`config`, `texts` or `environment`. A user's change of a text takes precedence."""
        changed = plain.mapping(self.about.get("changed")) if key == "texts" else {}
        return {**plain.mapping(self.about.get(key)), **changed}

    @cached_property
    def about(self) -> dict[str, Any]:
        """The properties of the run, each from the first history that has it.

        But `began_ns` is the earliest, and `seen_ns` the latest, of all histories.
        """
        found: dict[str, Any] = {}
        for each in reversed(self.histories):
            found |= {key: value for key, value in each.about.items() if value not in _EMPTY}
        for key, choose in (("began_ns", min), ("seen_ns", max)):
            if times := [each.about[key] for each in self.histories if each.about.get(key)]:
                found[key] = choose(times)
        return found

    @property
    def own_summary(self) -> list[dict[str, Any]]:
        """The agents' summaries of logged values, merged."""
        rows = [plain.list_of(dict, each.about.get("summary")) for each in self.histories]
        return _merged(chain(*rows))

    @cached_property
    def summary(self) -> list[Mapping[str, Any]]:
        """For each logged value its last and its best value, or only the last if that is known."""
        found = {(str(row.get("name")), str(row.get("split"))): row for row in self.own_summary}
        for each, series in self.series("value"):
            name, split = _name_and_split(series)
            if (name, split) not in found and (newest := each.newest(series)):
                last = {"value": newest.last, "step": newest.until, "time_ns": newest.last_ns}
                row = {"name": name, "split": split, "direction": "", "last": last}
                found[name, split] = {**row, "min": None, "max": None}
        return [*found.values()]

    @property
    def cost(self) -> dict[str, float | None]:
        """The time that hooks took in the newest attempt, and its share of the steps' time."""
        totals = [plain.mapping(each.get("totals")) for each in self.ranks.values()]
        hook_s, steps_s = (
            sum(plain.number(each.get(metric.name)) or 0.0 for each in totals)
            for metric in (catalog.OTEL_DDP_HOOK_TIME, catalog.TRAINING_STEP_DURATION)
        )
        return {"hook_s": hook_s, "hook_share": hook_s / steps_s if steps_s else None}

    @property
    def ranks(self) -> Mapping[str, Mapping[str, Any]]:
        """The processes of the newest attempt, by rank."""
        return self.newest.ranks

    @property
    def world_size(self) -> Any:
        """The number of ranks that train together; None if unknown."""
        known = [self.section("environment"), *self.ranks.values()]
        return next(filter(None, (each.get("world_size") for each in known)), None)

    @property
    def step(self) -> int | None:
        """The last step of any rank."""
        steps = [plain.whole(each.get("step")) for each in self.ranks.values()]
        return max((step for step in steps if step is not None), default=None)

    @property
    def state(self) -> str:
        return self.newest.state

    @property
    def nodes(self) -> list[str]:
        own = (_node(each) for each in self.histories)
        others = (node for each in self.of_nodes for node in each.others)
        return [*dict.fromkeys([*own, *others])]

    def node_of(self, history: History, rank: str) -> str:
        """The node of a rank, according to *history*."""
        return str(history.ranks.get(rank, {}).get("node") or _node(history))

    def has_events_of(self, history: History, rank: str) -> bool:
        """Whether to use the events of this rank in *history*.

        Not if there is also a history of the rank's own node, since it has the same events.
        """
        node = self.node_of(history, rank)
        return all(node != _node(each) for each in self.histories if each is not history)

    @property
    def look(self) -> str:
        """A hint where to find the other ranks; empty if these histories have all ranks."""
        led_by = self.word("led_by")
        own = {_node(each) for each in self.histories}
        return "" if led_by in own else where_to_look(led_by)

    def verdicts(self) -> list[dict[str, Any]]:
        """The verdicts of all nodes, sorted by their start, without duplicates."""
        found: dict[str, dict[str, Any]] = {}
        for each in self.histories:
            for verdict in each.verdicts():
                found.setdefault(_identity(verdict), verdict)
        return sorted(found.values(), key=lambda verdict: verdict.get("since_ns") or 0)

    # -- series

    def series(self, kind: str) -> Iterator[tuple[History, Series]]:
        """The series of a kind on all nodes."""
        for each in self.histories:
            for series in each.series(kind):
                yield each, series

    def by_rank(self, found: Iterable[_Of]) -> list[_Of]:
        """Sort series by rank. If a rank moved to another node, its newest series comes first."""

        def order(one: _Of) -> Any:
            history, rank = one[0], one[1].key.rank
            return rank_order(rank), history.ranks.get(rank) is not self.ranks.get(rank)

        return sorted(found, key=order)

    @cached_property
    def values(self) -> dict[tuple[str, str], list[Bucket]]:
        """Logged values by name and split, each from the lowest rank that logged it."""
        found: dict[tuple[str, str], tuple[str, list[Bucket]]] = {}
        for each, series in self.by_rank(self.series("value")):
            key, rank = _name_and_split(series), series.key.rank
            known = found.get(key)
            if known is None:
                found[key] = rank, each.sums(series)
            elif known[0] == rank:
                found[key] = rank, _joined(each.sums(series), known[1])
        return {key: buckets for key, (_, buckets) in found.items()}

    def step_series(self) -> list[_Of]:
        """The series of each rank's steps on every node, sorted by `by_rank`."""
        return self.by_rank(
            (each, one) for each in self.histories for one in each.step_series.values()
        )

    def steps(
        self, wide: int, first: int = -FAR, until: int = FAR, rank: str = ""
    ) -> dict[int, StepBucket]:
        """Buckets of *wide* steps over all ranks, or of one *rank*.

        The key of a bucket is its first step divided by *wide*, rounded down. If a rank moved to
        another node and repeated steps there, only the repetitions count.
        """
        found: dict[int, list[Row]] = {}
        begins: dict[str, int] = {}
        for history, one in self.step_series():
            own = one.key.rank
            if rank in ("", own):
                end = min(until, begins.get(own, FAR) - 1)
                columns = history.columns(one, first, end)
                begins[own] = min([begins.get(own, FAR), *columns[FIRST][:1]])
                for at, row in STEPS.sum_up(columns, wide).items():
                    found.setdefault(at, []).append(row)
        return {at: StepBucket.of(STEPS.together(rows), len(rows)) for at, rows in found.items()}

    def cells(self) -> list[Cell]:
        """The steps of all ranks: mean times over the ranks, and the sum of their work."""
        wide = max((one.width for _, one in self.step_series()), default=1)
        steps = self.steps(wide)
        found = [_cell(steps[at]) for at in sorted(steps)]
        if wide > 1 and sum(not each.usual for each in found) > len(found) / 4:
            # More than a quarter of the buckets include an unusual step. To exclude these buckets
            # would hide much of the run, so only the time of unusual phases is removed from them.
            found = [_without_special(each) for each in found]
        return found


def column_width(chosen: Iterable[_Of], first: int, until: int, most: int) -> int:
    """The number of steps per column, so that there are at most *most* columns.

    It is a multiple of the width of the buckets of each series, so no bucket is split.
    """
    kept = math.lcm(*(series.width for _, series in chosen))
    return kept * max(math.ceil((until - first + 1) / most / kept), 1)


def main_values(summary: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Name and split of the main values: a training loss, and a validation loss."""
    rows = [(str(row.get("name")), str(row.get("split") or "")) for row in summary]
    words = {row: {*_WORDS.split(row[0].lower())} for row in rows}
    losses = [row for row in rows if "loss" in words[row]] or rows
    checked = [row for row in rows if row[1] in _VALIDATION or words[row] & _VALIDATION]
    checked.sort(key=lambda row: row not in losses)
    trained = [row for row in losses if row not in checked]
    found = [*trained[:1], *checked[:1]]
    return [{"name": name, "split": split} for name, split in found]


def _cell(steps: StepBucket) -> Cell:
    each_s = 1 / (steps.steps or 1) / 1e9
    return Cell(
        steps.steps / steps.ranks,
        steps.took_ns * each_s,
        steps.work * each_s * 1e9 * steps.ranks,
        not steps.unusual,
        {word: ns * each_s for word, ns in steps.phases_ns.items()},
    )


def _name_and_split(series: Series) -> tuple[str, str]:
    return series.key.name, dict(series.key.labels).get("split", "")


def _node(history: History) -> str:
    """The node whose agent wrote the history."""
    return str(history.about.get("node") or "?")


def _identity(verdict: Mapping[str, Any]) -> str:
    return repr([verdict.get(key) for key in ("kind", "who", "since_ns")])


def _without_special(cell: Cell) -> Cell:
    """The cell without the time of unusual phases, so that it counts as usual."""
    special_s = sum(cell.phases_s[word] for word in UNUSUAL_PHASES)
    phases_s = {**cell.phases_s, **dict.fromkeys(UNUSUAL_PHASES, 0.0)}
    return cell._replace(took_s=cell.took_s - special_s, phases_s=phases_s, usual=True)


def _merged(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each name and split: the last value from the first row, the extremes of all."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        key = plain.text(row.get("name")), plain.text(row.get("split"))
        known = found.setdefault(key, dict(row))
        for way, choose in (("min", min), ("max", max)):
            points: list[Any] = [
                each for each in (known.get(way), row.get(way)) if _has_value(each)
            ]
            known[way] = choose(points, key=itemgetter("value"), default=None)
    return [*found.values()]


def _has_value(point: Any) -> bool:
    return plain.number(plain.mapping(point).get("value"), -math.inf, math.inf) is not None


def _joined(earlier: list[Bucket], later: list[Bucket]) -> list[Bucket]:
    """The values of a rank that moved to another node; for a repeated step, the later value."""
    from_step = min((each.first for each in later), default=2**63)
    return [each for each in earlier if each.until < from_step] + later
