"""Looks at a node again and again for `otel-ddp top`: the status, and each rank's own work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from otel_ddp.agent.reading.node_status import survey
from otel_ddp.agent.reading.recent_steps import RecentSteps, StepWork
from otel_ddp.agent.reading.steps import Step
from otel_ddp.cli.gpus import gpu_labels
from otel_ddp.cli.text import cell, integer, mappings, marked
from otel_ddp.journal.place import Place
from otel_ddp.journal.reader import JournalReader, Scalars, Unreadable
from otel_ddp.words import ENDED_STATES, HARMLESS_VERDICTS

# Of processes that have ended and that no file names any more.
_MOST_REMEMBERED = 500
# The state of a process that no file names any more, and whose end none has told.
_ENDED = "ended"
_RunKey = tuple[str, str]
# The places, and a sentence where one is missing.
FindPlaces = Callable[[], tuple[list[Place], str]]


class Value(NamedTuple):
    """The last value of a name."""

    name: str
    split: str
    value: float
    step: int | None


class RankView(NamedTuple):
    """One process, as it is shown."""

    key: str
    """The same at each look."""
    described: Mapping[str, Any]
    """As in `otel-ddp status --json`."""
    steps: tuple[StepWork, ...]
    work_ns: float | None
    """Its own time in a step: the median of the last ones."""
    last_step: Step | None
    gpus: tuple[Mapping[str, Any], ...]
    named: bool
    """An open verdict is about it."""

    @property
    def rank(self) -> int | None:
        return integer(self.described.get("rank"))

    @property
    def over(self) -> bool:
        return _is_over(self.described)

    def text(self, name: str, otherwise: str = "") -> str:
        """One of the words of its description, printable."""
        return cell(self.described.get(name), otherwise)


class RunView(NamedTuple):
    """One run."""

    group: str
    name: str
    ranks: tuple[RankView, ...]
    verdicts: tuple[str, ...]
    values: tuple[Value, ...]


class View(NamedTuple):
    """All that one look has found."""

    now_ns: int
    agents: int
    nodes: tuple[str, ...]
    runs: tuple[RunView, ...]
    free_gpus: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...]


class _Journal:
    """One journal that stays open, for its steps and values, until its file is deleted."""

    def __init__(self, reader: JournalReader) -> None:
        self._reader = reader
        self._last_values: tuple[Value, ...] = ()
        self.recent = RecentSteps(reader)

    def values(self) -> tuple[Value, ...]:
        return self._last_values or self._read_values()

    def close(self) -> None:
        """What was read by now stays known."""
        self.recent.poll()
        self._last_values = self._read_values() or self._last_values
        self._reader.close()

    def _read_values(self) -> tuple[Value, ...]:
        newest: dict[int, tuple[float, Scalars]] = {}
        for record in self._reader.latest():
            newest.update({number: (value, record) for number, value in record.values})
        names = self._reader.names
        return tuple(
            Value(cell(names[number].text), cell(names[number].split), value, record.step)
            for number, (value, record) in newest.items()
            if number in names
        )


class Watch:
    """Keeps journals open between two looks. It only reads, and waits for no process."""

    def __init__(self, find: FindPlaces) -> None:
        self._find = find
        self._journals: dict[str, _Journal] = {}
        self._gone: dict[str, Mapping[str, Any]] = {}
        # The processes of the last look.
        self._known: dict[str, Mapping[str, Any]] = {}
        # The live picture looks in a thread, and asks for the values of a rank in another.
        self._lock = threading.Lock()
        self._closed = False

    def look(self, now_ns: int | None = None) -> View:
        """What is there now. Only a place that was named and is not readable raises."""
        with self._lock:
            return self._look(now_ns)

    def _look(self, now_ns: int | None) -> View:
        now_ns = time.time_ns() if now_ns is None else now_ns
        if self._closed:
            return View(now_ns, 0, (), (), (), ())
        places, missing = self._find()
        found = survey(places, now_ns).to_json()
        described = {_key(each): each for each in mappings(found["processes"])}
        self._remember(described)
        self._follow(places)
        agents = [each for each in mappings(found["agents"]) if each.get("alive")]
        gpus = [gpu for agent in agents for gpu in mappings(agent.get("gpus"))]
        verdicts = mappings(found["verdicts"])
        runs: dict[_RunKey, list[RankView]] = {}
        for key, each in {**self._gone, **described}.items():
            view = self._rank(key, each, gpus, verdicts)
            runs.setdefault(_run(each), []).append(view)
        used = {id(gpu) for ranks in runs.values() for rank in ranks for gpu in rank.gpus}
        notes = [missing, *found["unreadable"], *(cell(each.get("remark")) for each in agents)]
        return View(
            now_ns,
            len(agents),
            tuple(sorted({cell(each.get("node"), "?") for each in described.values()})),
            tuple(
                RunView(*run, tuple(ranks), _sentences(verdicts, run, now_ns), self._values(ranks))
                # Living runs first; within these the order in which they started.
                for run, ranks in sorted(runs.items(), key=lambda item: _order(item[1]))
            ),
            tuple(gpu for gpu in gpus if id(gpu) not in used),
            tuple(filter(None, notes)),
        )

    def values_of(self, rank: RankView) -> tuple[Value, ...]:
        """The last values that this rank has logged."""
        with self._lock:
            return self._values_of(rank)

    def _values_of(self, rank: RankView) -> tuple[Value, ...]:
        journal = self._journals.get(rank.text("journal"))
        return () if journal is None else journal.values()

    def close(self) -> None:
        """Close all journals, and open none any more: a look may be under way."""
        with self._lock:
            self._closed = True
            for each in self._journals.values():
                each.close()
            self._journals.clear()

    def _remember(self, described: Mapping[str, Mapping[str, Any]]) -> None:
        """A process that no file names any more stays shown, as ended."""
        for key, each in self._known.items():
            if key not in described:
                self._gone[key] = each if _is_over(each) else {**each, "state": _ENDED}
        for key in described.keys() & self._gone.keys():
            del self._gone[key]
        while len(self._gone) > _MOST_REMEMBERED:
            del self._gone[next(iter(self._gone))]
        self._known = dict(described)

    def _follow(self, places: Iterable[Place]) -> None:
        paths = {path.name: path for place in places for path in place.journals()}
        shown = {
            cell(each.get("journal")) for each in (*self._known.values(), *self._gone.values())
        }
        for name in self._journals.keys() - paths.keys():
            self._journals[name].close()
            if name not in shown:
                del self._journals[name]
        for name, path in paths.items():
            if name not in self._journals:
                try:
                    self._journals[name] = _Journal(JournalReader(path))
                except Unreadable:
                    continue  # the survey says why
            self._journals[name].recent.poll()

    def _rank(
        self,
        key: str,
        described: Mapping[str, Any],
        gpus: Iterable[Mapping[str, Any]],
        verdicts: Iterable[Mapping[str, Any]],
    ) -> RankView:
        journal = self._journals.get(cell(described.get("journal")))
        recent = None if journal is None else journal.recent
        return RankView(
            key,
            described,
            () if recent is None else tuple(recent.steps),
            None if recent is None else recent.work_ns(),
            None if recent is None else recent.last,
            tuple(gpu for gpu in gpus if _is_of(gpu_labels(gpu), described)),
            any(
                _is_of(each.get("who"), described)
                for each in verdicts
                if each.get("kind") not in HARMLESS_VERDICTS
            ),
        )

    def _values(self, ranks: Iterable[RankView]) -> tuple[Value, ...]:
        """Those of the first rank that logs any."""
        for each in sorted(ranks, key=lambda one: (one.over, one.rank is None, one.rank or 0)):
            if found := self._values_of(each):
                return found
        return ()


def _is_over(described: Mapping[str, Any]) -> bool:
    return described.get("state") in (*ENDED_STATES, _ENDED)


def _order(ranks: Collection[RankView]) -> tuple[bool, int]:
    started_ns = [integer(each.described.get("started_ns")) or 0 for each in ranks]
    return all(each.over for each in ranks), min(started_ns)


def _key(described: Mapping[str, Any]) -> str:
    return cell(described.get("journal")) or repr(
        [described.get(name) for name in ("run", "group", "rank", "pid", "started_ns")]
    )


def _run(labels: Mapping[str, Any]) -> _RunKey:
    return cell(labels.get("group")), cell(labels.get("run"), "?")


def _sentences(verdicts: Iterable[Mapping[str, Any]], run: _RunKey, now_ns: int) -> tuple[str, ...]:
    return tuple(
        marked(each, now_ns)
        for each in verdicts
        if isinstance(who := each.get("who"), Mapping) and _run(who) == run
    )


def _is_of(labels: Any, described: Mapping[str, Any]) -> bool:
    """Whether labels with a rank are those of this process."""
    if not isinstance(labels, Mapping) or not cell(labels.get("rank")):
        return False
    return (*_run(labels), cell(labels.get("rank"))) == (
        *_run(described),
        cell(described.get("rank")),
    )
