"""Says at the end of a run how it went: on stderr of its first rank, without waiting for anything.

The rank reads its own journal, and two small files that the agent has written by then.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from otel_ddp import errors, files
from otel_ddp.history.terminal import Card, CardValue, lines, shown_s, when
from otel_ddp.journal.place import Place
from otel_ddp.journal.process_state import ProcessState
from otel_ddp.journal.reader import JournalReader, Unreadable
from otel_ddp.journal.values import chosen_directions, direction, last_values, read_extremes
from otel_ddp.run.announcements import say
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.words import HARMLESS_VERDICTS, STATES

# Shorter runs say nothing: tests, and sweeps of thousands.
SHORTEST_S = 10.0
_LARGEST_FILE = 512 * 1024


# Of a program that trains: others have no steps.
_NO_STEP = (
    "otel_ddp: run %s has recorded no step: pass the model to otel_ddp.instrument(model), which "
    "opens the run as well, or call run.log({'loss': loss}, step=step)\n"
)


@errors.contained()
def show(
    journal: Path,
    place: Place,
    state: str,
    *,
    always: bool,
    look: list[str],
    now_ns: Callable[[], int] = time.time_ns,
) -> None:
    """Print the card of a run whose end is recorded, or that it has no step.

    A process that closes its own journal loses the lock on it, and counts as gone from then on.
    """
    try:
        reader = JournalReader(journal)
    except Unreadable:
        return
    try:
        lasted_s = (now_ns() - reader.created_ns) / 1e9
        is_long = lasted_s >= SHORTEST_S
        found = _card(reader, place, state, lasted_s, look) if always or is_long else None
        if found is not None:
            say("\n".join(lines(found)) + "\n")
        elif is_long and "torch" in sys.modules and reader.identity.get("job_type") == "train":
            say(_NO_STEP % reader.identity.get("run"))
    finally:
        reader.close()


def _card(
    reader: JournalReader, place: Place, state: str, lasted_s: float, look: list[str]
) -> Card | None:
    totals = _Totals(reader)
    steps = round(totals.sum_of(catalog.TRAINING_STEPS))
    values, last_step = _values(reader)
    if not steps and last_step < 0:
        return None
    process = ProcessState.read(reader, STATES[state])
    group, run = process.group, process.run or "?"
    world, rank = process.world_size, process.rank
    hook_s = totals.sum_of(catalog.OTEL_DDP_HOOK_TIME)
    phases_s = totals.phases_s()
    return Card(
        title=f"run {group}/{run}" if group else f"run {run}",
        state=state,
        duration_s=lasted_s,
        reason=process.reason,
        where=f"{world} ranks" if world and world > 1 else "",
        steps=steps or last_step + 1,
        step_s=totals.mean_of(catalog.TRAINING_STEP_DURATION),
        phases_s=phases_s,
        of_rank=f"rank {rank}" if world and world > 1 and rank is not None else "",
        values=values,
        sentences=list(_verdicts(place.agent_file, group, run)),
        cost=f"hooks {shown_s(hook_s)} of this rank" if hook_s else "",
        look=look,
    )


class _Totals:
    """What the process has counted."""

    def __init__(self, reader: JournalReader) -> None:
        self._totals = reader.totals()

    def sum_of(self, metric: catalog.Metric) -> float:
        """Over all its attributes."""
        return sum(each.values[0] for each in self._totals if each.metric == metric.name)

    def mean_of(self, metric: catalog.Metric) -> float | None:
        """Of a histogram: its sum, then the count of each bucket."""
        for each in self._totals:
            counted = float(sum(each.values[1:]))
            if each.metric == metric.name and counted:
                return each.values[0] / counted
        return None

    def phases_s(self) -> dict[str, float]:
        """By the device's clock where it has counted: the host's phases only launch there."""
        by_clock: dict[str, dict[str, float]] = {}
        for each in self._totals:
            if each.metric == catalog.TRAINING_PHASE_TIME.name:
                phases = by_clock.setdefault(each.attributes.get("clock", ""), {})
                word = str(each.attributes.get("phase"))
                phases[word] = phases.get(word, 0.0) + each.values[0]
        return by_clock.get("device") or by_clock.get("host") or {}


def _values(reader: JournalReader) -> tuple[list[CardValue], int]:
    """The logged values, those with a best one first; and the last step of any of them."""
    chosen, extremes = chosen_directions(reader), dict(read_extremes(reader))
    values, last_step = [], -1
    for name, last in last_values(reader).items():
        way = direction(name.text, chosen)
        best = extremes[name].best(way) if way and name in extremes else None
        shown = (best.value, best.step) if best is not None else (None, None)
        values.append(CardValue(name.text, name.split, last.value, *shown))
        last_step = max(last_step, -1 if last.step is None else last.step)
    return sorted(values, key=lambda value: value.best is None), last_step


def _verdicts(agent_file: Path, group: str, run: str) -> Iterator[str]:
    """What the agent has found of this run; what goes on comes first."""
    about = files.read_mapping(agent_file, _LARGEST_FILE)
    for key in ("verdicts", "past"):
        found = about.get(key)
        for each in found if isinstance(found, list) else ():
            who = each.get("who") if isinstance(each, dict) else None
            if not isinstance(who, dict):
                continue
            mine = (who.get("group") or "", who.get("run")) == (group, run)
            if mine and each.get("kind") not in HARMLESS_VERDICTS:
                yield when(each, time.time_ns()) + str(each.get("sentence"))
