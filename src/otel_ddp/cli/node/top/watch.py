"""Asks the agents of a node what their pages ask, and sorts the answers by run and rank."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from otel_ddp.agent.reading.steps import StepWork
from otel_ddp.cli.node.agent_page import ask, credentials
from otel_ddp.cli.options import find_places
from otel_ddp.cli.text import cell, integer, mapping, mappings, marked, named_ranks, number
from otel_ddp.journal.place import Place
from otel_ddp.journal.process_state import ProcessState
from otel_ddp.journal.survey import of_run
from otel_ddp.vocabulary.words import HARMLESS_VERDICTS

STEPS = 120


class Value(NamedTuple):
    """The last value of a name."""

    name: str
    split: str
    value: float
    step: int | None


class Rank(NamedTuple):
    """One process, as it is shown."""

    process: ProcessState
    place: Place
    steps: tuple[StepWork, ...] = ()
    work_ns: float | None = None
    """Its own time in a step: the median of the last ones."""
    phases_ns: Mapping[str, int] = {}
    """Its last step, the longest phase first."""
    gpus: tuple[Mapping[str, Any], ...] = ()
    named: bool = False
    """An open verdict is about it."""

    def text(self, name: str, otherwise: str = "") -> str:
        """One of the words of its state, printable."""
        return cell(getattr(self.process, name), otherwise)


class Run(NamedTuple):
    """One run."""

    group: str
    name: str
    ranks: tuple[Rank, ...]
    verdicts: tuple[str, ...] = ()
    values: tuple[Value, ...] = ()
    """Those of its first rank."""
    look: str = ""
    """Where all of its ranks are shown; empty: here."""


class View(NamedTuple):
    """All that one look has found."""

    now_ns: int
    agents: int = 0
    runs: tuple[Run, ...] = ()
    free_gpus: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ranks(self) -> list[Rank]:
        return [rank for run in self.runs for rank in run.ranks]


class Watch:
    """Looks again and again, as the user of the agents. It reads no journal."""

    def __init__(self, directory: str = "") -> None:
        self._directory = directory
        self._credentials: Mapping[str, str] = {}
        self._last = View(0)

    def look(self) -> View:
        """What is there now, or what was while no agent answers.

        Raises ConfigError where a place that was named cannot be read.
        """
        conf, places, missing = find_places(self._directory)
        self._credentials = credentials(conf.scrape_token_file)
        found: list[tuple[Place, Mapping[str, Any]]] = []
        notes = [missing]
        for place in places:
            answer = ask(place, self._credentials, "now", steps=str(STEPS))
            if isinstance(answer, str):
                notes.append(answer)
                continue
            found.append((place, answer))
            told = answer.get("unreadable")
            notes += [cell(answer.get("hidden")), cell(answer.get("remark"))]
            notes += [cell(each) for each in told] if isinstance(told, list) else []
        now_ns, said = time.time_ns(), tuple(filter(None, dict.fromkeys(notes)))
        if not found:
            return self._last._replace(now_ns=now_ns, agents=0, notes=said)
        verdicts = [v for _, answer in found for v in mappings(answer.get("verdicts"))]
        gpus = [gpu for _, answer in found for gpu in mappings(answer.get("gpus"))]
        ranks = [
            _rank(process, place, told, gpus, verdicts)
            for place, answer in found
            for told in mappings(answer.get("processes"))
            if (process := ProcessState.from_json(told)) is not None
        ]
        used = {id(gpu) for rank in ranks for gpu in rank.gpus}
        free = tuple(gpu for gpu in gpus if id(gpu) not in used)
        looks = {
            of_run(link): cell(link.get("look"))
            for _, answer in found
            for link in mappings(answer.get("links"))
        }
        runs = tuple(self._runs(ranks, verdicts, looks, now_ns))
        self._last = View(now_ns, len(found), runs, free, said)
        return self._last

    def values(self, rank: Rank) -> tuple[Value, ...]:
        """What it has logged last; nothing once its journal is gone."""
        answer = ask(rank.place, self._credentials, "process", journal=rank.process.journal)
        told = [] if isinstance(answer, str) else mappings(answer.get("values"))
        return tuple(map(_value, told))

    def _runs(
        self,
        ranks: Iterable[Rank],
        verdicts: Iterable[Mapping[str, Any]],
        looks: Mapping[tuple[str, str], str],
        now_ns: int,
    ) -> list[Run]:
        """Living runs first; within these in the order in which they started."""
        runs: dict[tuple[str, str], list[Rank]] = {}
        for each in sorted(ranks, key=lambda one: one.process.started_ns):
            runs.setdefault(each.process.of_run, []).append(each)
        found = []
        for (group, name), members in runs.items():
            # Rank 0 logs; the living stand before others.
            first = min(
                members,
                key=lambda one: (one.process.ended, one.process.rank is None, one.process.rank),
            )
            said = [
                marked(v, now_ns)
                for v in verdicts
                if of_run(mapping(v.get("who"))) == (group, name)
            ]
            values = self.values(first)
            look = looks.get((group, name), "")
            shown = cell(group), cell(name, "?")
            found.append(Run(*shown, tuple(members), tuple(said), values, look))
        return sorted(found, key=lambda run: all(each.process.ended for each in run.ranks))


def _rank(
    process: ProcessState,
    place: Place,
    told: Mapping[str, Any],
    gpus: Iterable[Mapping[str, Any]],
    verdicts: Iterable[Mapping[str, Any]],
) -> Rank:
    trouble = [each for each in verdicts if each.get("kind") not in HARMLESS_VERDICTS]
    return Rank(
        process,
        place,
        tuple(StepWork(*each) for each in told.get("steps") or ()),
        told.get("work_ns"),
        told.get("phases_ns") or {},
        tuple(gpu for gpu in gpus if _is_of(mapping(gpu.get("labels")), process)),
        any(
            of_run(mapping(each.get("who"))) == process.of_run
            and str(process.rank) in named_ranks(each)
            for each in trouble
        ),
    )


def _value(told: Mapping[str, Any]) -> Value:
    value = number(told.get("value"))
    shown = float("nan") if value is None else value
    return Value(cell(told.get("name")), cell(told.get("split")), shown, integer(told.get("step")))


def _is_of(labels: Mapping[str, Any], process: ProcessState) -> bool:
    """Whether labels with a rank are those of this process."""
    rank = labels.get("rank")
    return rank is not None and (*of_run(labels), str(rank)) == (*process.of_run, str(process.rank))
