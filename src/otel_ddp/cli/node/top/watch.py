"""Looks at a node again and again for `otel-ddp top`: it asks its agents, and reads no journal."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from otel_ddp.agent.reading.steps import StepWork
from otel_ddp.cli.node.gpus import gpu_labels
from otel_ddp.cli.node.top.agents import Agents
from otel_ddp.cli.text import cell, integer, mappings, marked, number
from otel_ddp.journal.place import Place
from otel_ddp.journal.process_state import ProcessState
from otel_ddp.vocabulary.words import HARMLESS_VERDICTS

# Of processes that have ended and that no agent tells of any more.
_MOST_REMEMBERED = 500
# The state of a process that no agent tells of any more, and whose end none has told.
_ENDED = "ended"
STEPS = 120
# Those that know who asks; and the places, with a sentence where one is missing.
Find = Callable[[], tuple[Agents, list[Place], str]]


class Value(NamedTuple):
    """The last value of a name."""

    name: str
    split: str
    value: float
    step: int | None


class RankView(NamedTuple):
    """One process, as it is shown."""

    process: ProcessState
    steps: tuple[StepWork, ...] = ()
    work_ns: float | None = None
    """Its own time in a step: the median of the last ones."""
    phases_ns: Mapping[str, int] = {}
    """Its last step, the longest phase first."""
    gpus: tuple[Mapping[str, Any], ...] = ()
    named: bool = False
    """An open verdict is about it."""

    @property
    def key(self) -> str:
        return self.process.key

    @property
    def rank(self) -> int | None:
        return self.process.rank

    @property
    def over(self) -> bool:
        return self.process.ended or self.process.state == _ENDED

    def text(self, name: str, otherwise: str = "") -> str:
        """One of the words of its state, printable."""
        return cell(getattr(self.process, name), otherwise)


class RunView(NamedTuple):
    """One run."""

    group: str
    name: str
    ranks: tuple[RankView, ...]
    verdicts: tuple[str, ...] = ()
    values: tuple[Value, ...] = ()
    """Those of its first rank."""


class View(NamedTuple):
    """All that one look has found."""

    now_ns: int
    agents: int = 0
    runs: tuple[RunView, ...] = ()
    free_gpus: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    chosen: tuple[Value, ...] = ()
    """The values of the rank that was chosen for details."""

    @property
    def ranks(self) -> list[RankView]:
        return [rank for run in self.runs for rank in run.ranks]


class Watch:
    """Remembers, between two looks, what no agent tells any more."""

    def __init__(self, find: Find) -> None:
        self._find = find
        self._known: dict[str, RankView] = {}
        self._places: dict[str, Place] = {}
        self._values: dict[str, tuple[Value, ...]] = {}

    def look(self, chosen: str = "") -> View:
        """What is there now. Only a place that was named and is not readable raises.

        *chosen*: the key of the rank whose values are wanted.
        """
        agents, places, missing = self._find()
        found: list[tuple[Place, Mapping[str, Any]]] = []
        notes = [missing]
        for place in places:
            answer = agents.ask(place, "now", steps=str(STEPS))
            if isinstance(answer, str):
                notes.append(answer)
                continue
            found.append((place, answer))
            told = answer.get("unreadable")
            notes += [cell(answer.get("hidden")), cell(answer.get("remark"))]
            notes += [cell(each) for each in told] if isinstance(told, list) else []
        verdicts = [v for _, answer in found for v in mappings(answer.get("verdicts"))]
        gpus = [gpu for _, answer in found for gpu in mappings(answer.get("gpus"))]
        if found:
            self._update(found, gpus, verdicts)
        now_ns = time.time_ns()
        used = {id(gpu) for view in self._known.values() for gpu in view.gpus}
        return View(
            now_ns,
            len(found),
            tuple(self._runs(agents, verdicts, now_ns)),
            tuple(gpu for gpu in gpus if id(gpu) not in used),
            tuple(filter(None, notes)),
            self._values_of(agents, self._known.get(chosen)),
        )

    def _runs(
        self, agents: Agents, verdicts: Collection[Mapping[str, Any]], now_ns: int
    ) -> Iterator[RunView]:
        """Living runs first; within these in the order in which they started."""
        runs: dict[tuple[str, str], list[RankView]] = {}
        for view in self._known.values():
            runs.setdefault(view.process.of_run, []).append(view)
        for run, ranks in sorted(runs.items(), key=lambda item: _order(item[1])):
            group, name = map(cell, run)
            sentences = tuple(marked(v, now_ns) for v in verdicts if _run(v.get("who")) == run)
            values = self._values_of(agents, _first(ranks))
            yield RunView(group, name or "?", tuple(ranks), sentences, values)

    def _update(
        self,
        found: Iterable[tuple[Place, Mapping[str, Any]]],
        gpus: Collection[Mapping[str, Any]],
        verdicts: Collection[Mapping[str, Any]],
    ) -> None:
        """A process that no agent tells any more stays shown, as ended."""
        told: dict[str, RankView] = {}
        for place, answer in found:
            for each in mappings(answer.get("processes")):
                if (process := ProcessState.from_json(each)) is not None:
                    before = self._known.get(process.key)
                    told[process.key] = _view(process, each, before, gpus, verdicts)
                    self._places[process.key] = place
        gone = {
            key: each if each.over else each._replace(process=replace(each.process, state=_ENDED))
            for key, each in self._known.items()
            if key not in told
        }
        for key in list(gone)[:-_MOST_REMEMBERED]:
            del gone[key]
        self._known = {**gone, **told}

    def _values_of(self, agents: Agents, view: RankView | None) -> tuple[Value, ...]:
        """What it has logged last; what is known of it once its journal is gone."""
        if view is None or view.key not in self._places:
            return ()
        answer = agents.ask(self._places[view.key], "process", journal=view.process.journal)
        told = [] if isinstance(answer, str) else mappings(answer.get("values"))
        if values := tuple(map(_value, told)):
            self._values[view.key] = values
        return self._values.get(view.key, ())


def _view(
    process: ProcessState,
    told: Mapping[str, Any],
    before: RankView | None,
    gpus: Iterable[Mapping[str, Any]],
    verdicts: Iterable[Mapping[str, Any]],
) -> RankView:
    seen = before or RankView(process)
    if steps := told.get("steps"):
        phases = told["phases_ns"]
        seen = RankView(process, tuple(StepWork(*each) for each in steps), told["work_ns"], phases)
    return seen._replace(
        process=process,
        gpus=tuple(gpu for gpu in gpus if _is_of(gpu_labels(gpu), process)),
        named=any(
            _is_of(each.get("who"), process)
            for each in verdicts
            if each.get("kind") not in HARMLESS_VERDICTS
        ),
    )


def _value(told: Mapping[str, Any]) -> Value:
    value = number(told.get("value"))
    shown = float("nan") if value is None else value
    return Value(cell(told.get("name")), cell(told.get("split")), shown, integer(told.get("step")))


def _first(ranks: Iterable[RankView]) -> RankView:
    """Rank 0, which logs; the living before others."""
    return min(ranks, key=lambda each: (each.over, each.rank is None, each.rank or 0))


def _order(ranks: Collection[RankView]) -> tuple[bool, int]:
    return all(each.over for each in ranks), min(each.process.started_ns for each in ranks)


def _run(labels: Any) -> tuple[str, str]:
    found = labels if isinstance(labels, Mapping) else {}
    return str(found.get("group") or ""), str(found.get("run") or "")


def _is_of(labels: Any, process: ProcessState) -> bool:
    """Whether labels with a rank are those of this process."""
    if not isinstance(labels, Mapping) or labels.get("rank") is None:
        return False
    return (*_run(labels), str(labels["rank"])) == (*process.of_run, str(process.rank))
