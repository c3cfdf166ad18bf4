"""Says in words and bars what a look has found: lines above the table, its rows, one rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from otel_ddp.cli.node.status import ago, gpu_row, gpu_user
from otel_ddp.cli.node.top.watch import Rank, Run, Value, View
from otel_ddp.history.terminal import shown_s
from otel_ddp.vocabulary.words import NOT_HEARD

HEADS = ("RUN", "RANK", "NODE", "PHASE", "FOR", "STEP", "STEP TIME", "WORK", "LAST STEPS", "GPU")
# These are numbers, which end at one edge.
RIGHT = {"RANK", "FOR", "STEP", "STEP TIME", "WORK"}
_MOST_VALUES = 8
_BARS = 20
_FIELDS = (
    *("group", "run", "job_type", "node", "host", "local_rank", "world_size", "pid", "launcher"),
    *("state", "reason", "step", "phase", "journal"),
)
# By its name, what a rank is sorted by.
_KEYS: dict[str, Callable[[Rank], Any]] = {
    "rank": lambda each: 0,
    "work": lambda each: -(each.work_ns or 0.0),
    "phase for": lambda each: (each.process.ended, each.process.phase_since_ns),
    "step": lambda each: each.process.step or 0,
    "state": lambda each: (not each.named, each.process.state),
}
SORTS = tuple(_KEYS)


class Choice(NamedTuple):
    """What a person has chosen by keys."""

    sort: str = "rank"
    filter: str = ""


class Row(NamedTuple):
    """One rank in the table."""

    rank: Rank
    cells: tuple[str, ...]


def above(view: View, choice: Choice) -> list[str]:
    """The lines above the table: where this is, and what is to be said of each run."""
    names = sorted({each.text("node", "?") for each in view.ranks})
    alive = sum(not each.process.ended for each in view.ranks)
    parts = (
        "otel-ddp top",
        f"{len(names)} nodes" if len(names) > 1 else "".join(names),
        f"{alive} of {len(view.ranks)} ranks",
        "" if view.agents else "no agent",
        f"sorted by {choice.sort}" if choice.sort != SORTS[0] else "",
        f"filter: {choice.filter}" if choice.filter else "",
        time.strftime("%H:%M:%S", time.localtime(view.now_ns / 1e9)),
    )
    lines = ["  ".join(filter(None, parts)), *(f"note: {each}" for each in view.notes)]
    for run in view.runs:
        lines += _of_run(run)
    several = len(view.runs) > 1
    for gpu in view.free_gpus:
        index, _, _, busy, memory, *_ = gpu_row(gpu, several)
        known = [each for each in (busy, memory) if each != "-"]
        lines.append(f"gpu {index}: {', '.join((gpu_user(gpu, several), *known))}")
    return lines if view.runs else [*lines, "no runs"]


def _of_run(run: Run) -> Iterator[str]:
    alive = sum(not each.process.ended for each in run.ranks)
    ended = len(run.ranks) - alive
    counts = (f"{alive} alive" if alive else "", f"{ended} ended" if ended else "")
    group = f"group {run.group}" if run.group else ""
    yield ", ".join(filter(None, (f"run {run.name}", group, *counts)))
    if run.look:
        yield run.look
    yield from run.verdicts
    if run.values:
        more = len(run.values) - _MOST_VALUES
        said = [_value_text(each) for each in run.values[:_MOST_VALUES]]
        yield "  ".join((*said, f"and {more} more") if more > 0 else said)


def _value_text(value: Value) -> str:
    split = f" ({value.split})" if value.split not in ("", "train") else ""
    return f"{value.name}{split} {value.value:.5g}"


def heads(view: View) -> tuple[str, ...]:
    """The columns that tell something: names that all ranks share are left out."""
    left_out = set()
    if len(view.runs) < 2:
        left_out.add("RUN")
    if len({each.process.node for each in view.ranks}) < 2:
        left_out.add("NODE")
    if not any(each.gpus for each in view.ranks):
        left_out.add("GPU")
    return tuple(head for head in HEADS if head not in left_out)


def rows(view: View, choice: Choice) -> list[Row]:
    """The ranks that are wanted, in the chosen order within their run."""
    shown = heads(view)
    found = []
    for run in view.runs:
        most_ns = max((step.work_ns for rank in run.ranks for step in rank.steps), default=0)
        last = max((rank.steps[-1].number for rank in run.ranks if rank.steps), default=0)
        ranks = sorted(run.ranks, key=lambda each: (each.process.rank is None, each.process.rank))
        for rank in sorted(ranks, key=_KEYS[choice.sort]):
            if _matches(run, rank, choice):
                texts = _texts(run, rank, view.now_ns, last, most_ns)
                found.append(Row(rank, tuple(texts[head] for head in shown)))
    return found


def _matches(run: Run, rank: Rank, choice: Choice) -> bool:
    texts = [run.name, run.group, f"rank {rank.process.rank}", f"rank={rank.process.rank}"]
    texts += [rank.text(name) for name in ("node", "job_type", "state", "phase", "host")]
    words = choice.filter.lower().split()
    return all(any(word in text.lower() for text in texts) for word in words)


def _texts(run: Run, rank: Rank, now_ns: int, last: int, most_ns: float) -> dict[str, str]:
    over = rank.process.ended
    # A column is the same step on each rank.
    by_number = {step.number: step.work_ns for step in rank.steps}
    works = [by_number.get(number) for number in range(last - _BARS + 1, last + 1)]
    return {
        "RUN": run.name,
        "RANK": ("!" if rank.named else "") + rank.text("rank", "?"),
        "NODE": rank.text("node", "?"),
        "PHASE": rank.text("state" if over or rank.process.state == NOT_HEARD else "phase", "-"),
        "FOR": "-" if over else _for(rank, now_ns),
        "STEP": rank.text("step", "-"),
        "STEP TIME": _shown(rank.steps[-1].took_ns if rank.steps else None),
        "WORK": _shown(rank.work_ns),
        "LAST STEPS": sparkline(works, most_ns),
        "GPU": "; ".join(" ".join(_gpu(gpu)) for gpu in rank.gpus),
    }


def _gpu(gpu: Any) -> Iterator[str]:
    index, _, _, busy, memory, power, celsius, throttled = gpu_row(gpu, False)
    yield f"{index}:"
    # Nothing heads these: a dash would not say what is missing.
    yield from (each for each in (busy, memory, power, celsius) if each != "-")
    if throttled != "-":
        yield f"throttled: {throttled}"


def _for(rank: Rank, now_ns: int) -> str:
    return ago(max(0, now_ns - rank.process.phase_since_ns) / 1e9)


def _shown(nanoseconds: float | None) -> str:
    return shown_s(None if nanoseconds is None else nanoseconds / 1e9)


def sparkline(numbers: Sequence[float | None], most: float) -> str:
    """A bar for each number, as a share of *most*; a blank for None."""
    bars = "▁▂▃▄▅▆▇█"
    top = len(bars) - 1
    return "".join(
        " " if each is None or most <= 0 else bars[min(top, max(0, round(each / most * top)))]
        for each in numbers
    )


def details(view: View, key: str, values: Sequence[Value]) -> list[str]:
    """All that is known of a rank."""
    found = next(((run, r) for run in view.runs for r in run.ranks if r.process.key == key), None)
    if found is None:
        return ["This rank is not shown any more."]
    run, rank = found
    lines = [f"rank {rank.text('rank', '?')}", "", *run.verdicts]
    lines += [f"{name:<12} {text}" for name in _FIELDS if (text := rank.text(name))]
    if not rank.process.ended:
        lines.append(f"{'for':<12} {_for(rank, view.now_ns)}")
    if rank.steps:
        lines += _steps(rank)
    if rank.gpus:
        lines += ["", "GPUs", *("  ".join(gpu_row(each, False)) for each in rank.gpus)]
    if values:
        lines += ["", "last values"]
    for each in values:
        at = "" if each.step is None else f"step {each.step}"
        lines.append(f"{each.name:<24}  {each.value:<12.6g}  {each.split}  {at}".rstrip())
    return lines


def _steps(rank: Rank) -> Iterator[str]:
    works, last = [step.work_ns for step in rank.steps], rank.steps[-1]
    yield ""
    yield f"own time of the last {len(works)} steps, without waits"
    yield sparkline(works, max(works))
    yield f"{'shortest':<12} {_shown(min(works))}"
    yield f"{'median':<12} {_shown(rank.work_ns)}"
    yield f"{'longest':<12} {_shown(max(works))}"
    yield f"{'step time':<12} {_shown(last.took_ns)}, the last one"
    yield ""
    yield f"step {last.number}, by phase"
    for word, span_ns in rank.phases_ns.items():
        share = span_ns / last.took_ns
        yield f"{word:<12} {_shown(span_ns):>8} {share:>4.0%} {'█' * round(share * 30)}"
