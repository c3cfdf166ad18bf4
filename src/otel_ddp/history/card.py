"""The card: the summary of at most twenty lines that a run prints at its end."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import NamedTuple

from otel_ddp import shown
from otel_ddp.history.terminal import printable
from otel_ddp.journal.parser import Journal, Name
from otel_ddp.journal.process_state import ProcessState
from otel_ddp.journal.values import Extremes, Point, chosen_directions, direction, last_values
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.words import STATES, shown_phase

_MOST_VALUES, _MOST_SENTENCES = 5, 4
_WIDTH = 100
_LEAST_SHARE = 0.005


class CardValue(NamedTuple):
    """A logged value at the end of a run."""

    name: str
    split: str
    last: str
    best: float | None = None
    best_step: int | None = None


class Card(NamedTuple):
    """What the card shows of a run that has ended. Unknown fields are empty."""

    title: str
    state: str
    duration_s: float | None
    reason: str = ""
    where: str = ""
    steps: int = 0
    last_step: int | None = None
    """The last step by the program's own count: above `steps` if the run resumed a training."""
    step_s: float | None = None
    phases_s: Mapping[str, float] = {}
    goodput: str = ""
    of_rank: str = ""
    """The rank whose phases `phases_s` has; empty if `phases_s` is the mean over all ranks."""
    values: Sequence[CardValue] = ()
    sentences: Sequence[str] = ()
    gpus: Sequence[str] = ()
    cost: str = ""
    look: Sequence[str] = ()


def lines(card: Card) -> Iterator[str]:
    """The lines of the card, at most twenty."""
    took = "" if card.duration_s is None else f" after {shown.seconds(card.duration_s)}"
    yield _cut(f"otel_ddp: {card.title} {card.state}{took}{_after(', ', card.where)}")
    if card.reason:
        yield _row("reason", card.reason)
    if card.steps:
        last = card.last_step or 0
        until = f", the last is step {last}" if last > card.steps else ""
        mean = "" if card.step_s is None else f", mean {shown.seconds(card.step_s)}"
        yield _row("steps", f"{card.steps}{until}{mean}")
    if time := "  ".join(_time(card.phases_s)):
        yield _row("time", f"{time}{_after('  of ', card.of_rank)}")
    if card.goodput:
        yield _row("goodput", card.goodput)
    for value in card.values[:_MOST_VALUES]:
        yield _row(shown.name(value.name, value.split), _value(value))
    if (more := len(card.values) - _MOST_VALUES) > 0:
        yield _row("", f"and {more} more")
    for sentence in card.sentences[:_MOST_SENTENCES]:
        yield _row("!", sentence)
    if (more := len(card.sentences) - _MOST_SENTENCES) > 0:
        yield _row("", f"and {more} more")
    for gpu in card.gpus[:2]:
        yield _row("gpus", gpu)
    if card.cost:
        yield _row("telemetry", card.cost)
    for words in card.look[:3]:
        yield _row("look", words)


def _time(phases_s: Mapping[str, float]) -> Iterator[str]:
    total_s = sum(phases_s.values())
    for word, seconds in sorted(phases_s.items(), key=lambda item: -item[1]):
        if total_s and seconds >= _LEAST_SHARE * total_s:
            yield f"{shown_phase(word)} {shown.share(seconds / total_s)}"


def _value(value: CardValue) -> str:
    step = "" if value.best_step is None else f" at step {value.best_step}"
    best = "" if value.best is None else f"best {shown.number(value.best)}{step}, "
    return f"{best}last {value.last}"


def _row(head: str, words: str) -> str:
    return _cut(f"  {printable(head):<18} {words}", 4 * _WIDTH if head == "!" else 2 * _WIDTH)


def _cut(words: str, most: int = 2 * _WIDTH) -> str:
    clean = printable(words)
    return clean if len(clean) <= most else f"{clean[: most - 1]}…"


def _after(before: str, words: str) -> str:
    return f"{before}{words}" if words else ""


# -- from the journal of the run's first rank


def card_of(
    reader: Journal,
    state: str,
    lasted_s: float,
    extremes: Mapping[Name, Extremes],
    sentences: Sequence[str] = (),
    look: Sequence[str] = (),
) -> Card | None:
    """The card of a run that has just ended, from a rank's journal; None if it made no step."""
    steps = round(_sum_of(reader, catalog.TRAINING_STEPS))
    values, last_step = _values(reader, extremes)
    if not steps and last_step < 0:
        return None
    process = ProcessState.read(reader, STATES[state])
    group, run = process.group, process.run or "?"
    world, rank = process.world_size, process.rank
    hook_s = _sum_of(reader, catalog.OTEL_DDP_HOOK_TIME)
    # The values of a histogram are the sum and then the count of each bucket.
    durations = [each.values for each in reader.totals(catalog.TRAINING_STEP_DURATION.name)]
    timed = sum(sum(each[1:]) for each in durations)
    return Card(
        title=f"run {group}/{run}" if group else f"run {run}",
        state=state,
        duration_s=lasted_s,
        reason=process.reason,
        where=f"{world} ranks" if world and world > 1 else "",
        steps=steps or last_step + 1,
        last_step=process.step,
        step_s=sum(each[0] for each in durations) / timed if timed else None,
        phases_s=_phases_s(reader),
        of_rank=f"rank {rank}" if world and world > 1 and rank is not None else "",
        values=values,
        sentences=sentences,
        cost=f"hooks {shown.seconds(hook_s)} of this rank" if hook_s else "",
        look=look,
    )


def _sum_of(reader: Journal, metric: catalog.Metric) -> float:
    return sum(each.values[0] for each in reader.totals(metric.name))


def _phases_s(reader: Journal) -> dict[str, float]:
    """The time in each phase, measured on the GPU if there is one, else on the CPU.

    With a GPU, the CPU's times are no use: the CPU only launches the work of a phase.
    """
    by_clock: dict[str, dict[str, float]] = {}
    for each in reader.totals(catalog.TRAINING_PHASE_TIME.name):
        phases = by_clock.setdefault(each.attributes.get("clock", ""), {})
        word = str(each.attributes.get("phase"))
        phases[word] = phases.get(word, 0.0) + each.values[0]
    return by_clock.get("device") or by_clock.get("host") or {}


def _values(reader: Journal, extremes: Mapping[Name, Extremes]) -> tuple[list[CardValue], int]:
    """The logged values and the last logged step. Values whose best is known come first."""
    chosen, values, last_step = chosen_directions(reader), [], -1
    for name, last in last_values(reader).items():
        way = direction(name.text, chosen)
        best = _with(last, extremes[name]).best(way) if way and name in extremes else None
        found = (best.value, best.step) if best is not None else (None, None)
        values.append(CardValue(name.text, name.split, shown.number(last.value), *found))
        last_step = max(last_step, -1 if last.step is None else last.step)
    return sorted(values, key=lambda value: value.best is None), last_step


def _with(last: Point, extremes: Extremes) -> Extremes:
    """The extremes including *last*, since the agent may not have seen the last value yet."""
    points = [*extremes, *([last] if isfinite(last.value) else [])]
    by_value = operator.attrgetter("value")
    return Extremes(min(points, key=by_value), max(points, key=by_value))
