"""Lays out what a look has found in lines of a given width, which are the same on any terminal."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from otel_ddp.cli.node.gpus import gpu_row, gpu_user
from otel_ddp.cli.node.status import ago
from otel_ddp.cli.node.top.order import Choice, Section, sections
from otel_ddp.cli.node.top.watch import RankView, Value, View
from otel_ddp.cli.text import cell

_MOST_VALUES = 8
_LEAST_BARS, _MOST_BARS = 8, 120
_LATE = 1.15


class Part(NamedTuple):
    """A piece of a line, and what it means: a word that a terminal has a style for."""

    text: str
    style: str = ""


class Line(NamedTuple):
    """One line."""

    parts: tuple[Part, ...]
    rank: str = ""
    """The key of the rank that it is about; empty for any other line."""

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)


class _Column(NamedTuple):
    head: str
    width: int
    from_width: int
    """Of the terminal: below it, the column is left out."""


_COLUMNS = (
    _Column("RANK", 5, 0),
    _Column("LOCAL", 5, 140),
    _Column("NODE", 14, 100),
    _Column("PID", 8, 120),
    _Column("PHASE", 10, 0),
    _Column("FOR", 7, 26),
    _Column("STEP", 9, 36),
    _Column("STEP TIME", 9, 110),
    _Column("WORK", 8, 46),
)


def title(view: View, width: int, at: str) -> Line:
    """Where this is, how much there is, and when."""
    ranks = view.ranks
    alive = sum(not each.over for each in ranks)
    agent = "no agent" if not view.agents else f"{view.agents} agents" if view.agents > 1 else ""
    names = sorted({each.text("node", "?") for each in ranks})
    nodes = f"{len(names)} nodes" if len(names) > 1 else "".join(names)
    parts = ("otel-ddp top", nodes, f"{alive} of {len(ranks)} ranks", agent)
    text = "  ".join(filter(None, parts))
    room = width - cells(text) - len(at)
    return _line(f"{text}{' ' * room}{at}" if room > 1 else text, "title", width)


def head(width: int) -> Line:
    """The names of the columns."""
    cells = [_fit(column.head, column) for column in _shown(width)]
    bars = _bars(width)
    if bars:
        cells.append(f"WORK OF THE LAST {bars} STEPS" if bars >= 26 else "WORK")
    return _line(" ".join(cells), "head", width)


_RIGHT = {"RANK", "LOCAL", "PID", "FOR", "STEP", "STEP TIME", "WORK"}


def body(view: View, choice: Choice, width: int) -> list[Line]:
    """All lines below the head."""
    lines: list[Line] = []
    for note in view.notes:
        lines += _wrapped(f"note: {note}", "note", width)
    if choice.group != "run":
        for run in view.runs:
            lines += _verdicts(run.verdicts, width)
    found = sections(view, choice)
    for section in found:
        lines += _section(section, view, width)
    if not found:
        nothing = "nothing matches the filter" if any(view.runs) else "no runs"
        lines.append(_line(nothing, "dim", width))
    if view.free_gpus and not choice.filter:
        lines.append(_line("GPUs of no rank", "title", width))
        several = len(view.runs) > 1
        for gpu in view.free_gpus:
            lines.append(_line(_gpu_text(gpu, several, width), "gpu", width))
    return lines


def _section(section: Section, view: View, width: int) -> Iterator[Line]:
    if section.title:
        alive = sum(not each.over for each in section.ranks)
        ended = len(section.ranks) - alive
        counts = [f"{alive} alive" if alive else "", f"{ended} ended" if ended else ""]
        title = ", ".join(filter(None, (section.title, *counts)))
        yield _line(title, "title", width)
    run = section.run
    yield from _verdicts(run.verdicts if run else (), width)
    if run and run.values:
        shown = "  ".join(value_text(each) for each in run.values[:_MOST_VALUES])
        more = len(run.values) - _MOST_VALUES
        yield _line(shown + (f"  and {more} more" if more > 0 else ""), "value", width)
    works = [each.work_ns for each in section.ranks if each.work_ns is not None and not each.over]
    usual = sorted(works)[(len(works) - 1) // 2] if works else None
    last = max((rank.steps[-1].number for rank in section.ranks if rank.steps), default=0)
    for rank in section.ranks:
        yield _rank_line(rank, section, view.now_ns, width, usual, last)
        for gpu in rank.gpus:
            text = " " * 6 + _gpu_text(gpu, False, width)
            yield _line(text, "gpu", width)._replace(rank=rank.key)


def _rank_line(
    rank: RankView, section: Section, now_ns: int, width: int, usual_ns: float | None, last: int
) -> Line:
    for_s = max(0, now_ns - rank.process.phase_since_ns) / 1e9
    phase = rank.text("state" if rank.over else "phase", "-")
    took_ns = rank.steps[-1].took_ns if rank.steps else None
    texts = {
        "RANK": ("!" if rank.named else "") + rank.text("rank", "?"),
        "LOCAL": rank.text("local_rank", "-"),
        "NODE": rank.text("node", "?"),
        "PID": rank.text("pid", "?"),
        "PHASE": phase,
        "FOR": "-" if rank.over else ago(for_s),
        "STEP": rank.text("step", "-"),
        "STEP TIME": duration(took_ns),
        "WORK": duration(rank.work_ns),
    }
    late = not rank.over and usual_ns and rank.work_ns and rank.work_ns > _LATE * usual_ns
    row = "over" if rank.over else "late" if rank.named else ""
    styles = {
        "PHASE": row or ("wait" if phase == "comm_wait" else ""),
        "WORK": row or ("high" if late else ""),
    }
    parts = []
    for column in _shown(width):
        text = _fit(texts[column.head], column)
        parts += [Part(text, styles.get(column.head, row)), Part(" ")]
    if bars := _bars(width):
        by_number = {step.number: step.work_ns for step in rank.steps}
        numbers: Sequence[int | None] = [
            by_number.get(number) for number in range(last - bars + 1, last + 1)
        ]
        if by_number and not any(each is not None for each in numbers):
            # It counts its steps from elsewhere, or stopped long before the others.
            numbers = [step.work_ns for step in rank.steps[-bars:]]
        text = sparkline(numbers, section.most_ns)
        parts.append(Part(text, row or ("high" if late else "bars")))
    return Line(_cut(parts, width).parts, rank.key)


def _shown(width: int) -> list[_Column]:
    return [column for column in _COLUMNS if width >= column.from_width]


def _bars(width: int) -> int:
    """How many steps the sparkline has room for; 0: too little."""
    left = width - sum(column.width + 1 for column in _shown(width))
    return min(left, _MOST_BARS) if left >= _LEAST_BARS else 0


def _gpu_text(gpu: Mapping[str, Any], several_runs: bool, width: int) -> str:
    index, name, _, busy, memory, power, celsius, throttled = gpu_row(gpu, several_runs)
    user = gpu_user(gpu, several_runs)
    parts = [f"gpu {index}", busy.rjust(4), memory, power, celsius]
    if width >= 110:
        parts.insert(1, name)
    if throttled != "-":
        parts.append(f"throttled: {throttled}")
    if not cell(gpu.get("labels")) or user in ("free", "others"):
        parts.append(user)
    return "  ".join(parts)


def value_text(value: Value) -> str:
    """A name and its last value."""
    split = f" ({value.split})" if value.split not in ("", "train") else ""
    return f"{value.name}{split} {value.value:.5g}"


def duration(nanoseconds: float | None) -> str:
    """A duration in three figures."""
    if nanoseconds is None:
        return "-"
    for unit, size in (("s", 1e9), ("ms", 1e6)):
        if nanoseconds >= size:
            figures = ".3g" if nanoseconds < 1000 * size else ".0f"
            return f"{nanoseconds / size:{figures}} {unit}"
    return f"{nanoseconds / 1e3:.0f} us"


def _verdicts(sentences: Iterable[str], width: int) -> Iterator[Line]:
    for sentence in sentences:
        yield from _wrapped(sentence, verdict_style(sentence), width)


def verdict_style(sentence: str) -> str:
    """Of a sentence behind its mark: only trouble is red."""
    return "verdict" if sentence.startswith("!") else "dim"


def _wrapped(text: str, style: str, width: int) -> Iterable[Line]:
    wide = max(10, width)
    for line in textwrap.wrap(text, wide, subsequent_indent="  " if wide > 30 else ""):
        yield _line(line, style, width)


def _fit(text: str, column: _Column) -> str:
    """As much as there is room for, and filled up."""
    if cells(text) > column.width:
        text = _start(text, column.width - 1) + "…"
    room = " " * (column.width - cells(text))
    return room + text if column.head in _RIGHT else text + room


def _cut(parts: Iterable[Part], width: int) -> Line:
    """No line is wider than the terminal."""
    left, kept = width, []
    for part in parts:
        if left <= 0:
            break
        text = _start(part.text, left)
        kept.append(Part(text, part.style))
        left -= cells(text)
    return Line(tuple(kept))


def cells(text: str) -> int:
    """How many columns of a terminal a text takes: an ideograph takes two."""
    if text.isascii():
        return len(text)
    return sum(_cells_of(letter) for letter in text)


def _cells_of(letter: str) -> int:
    if unicodedata.combining(letter):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def _start(text: str, width: int) -> str:
    """The start of a text that takes no more columns than this."""
    if cells(text) <= width:
        return text
    at = taken = 0
    while at < len(text) and taken + _cells_of(text[at]) <= width:
        taken += _cells_of(text[at])
        at += 1
    return text[:at]


def sparkline(numbers: Sequence[float | None], most: float) -> str:
    """A bar for each number, as a share of *most*; a blank for None."""
    bars = "▁▂▃▄▅▆▇█"
    top = len(bars) - 1
    return "".join(
        " " if each is None or most <= 0 else bars[min(top, max(0, round(each / most * top)))]
        for each in numbers
    )


# -- one rank

_FIELDS = (
    *("group", "run", "job_type", "node", "host", "local_rank", "world_size", "pid", "launcher"),
    *("state", "reason", "step", "phase", "journal"),
)


def details(view: View, key: str, width: int) -> list[Line]:
    """All that is known of a rank. Lines may be longer than the width: the screen cuts them."""
    found = next(((run, r) for run in view.runs for r in run.ranks if r.key == key), None)
    if found is None:
        return [_line("this rank is not shown any more", "dim")]
    run, rank = found
    lines = [_line(f"rank {rank.text('rank', '?')}", "title"), _line("")]
    lines += [_line(sentence, verdict_style(sentence)) for sentence in run.verdicts]
    lines += [_line(f"{name:<12} {text}") for name in _FIELDS if (text := rank.text(name))]
    if not rank.over:
        for_s = max(0, view.now_ns - rank.process.phase_since_ns) / 1e9
        lines.append(_line(f"{'for':<12} {ago(for_s)}"))
    if rank.steps:
        lines += _steps(rank, width)
    if rank.gpus:
        lines += [_line(""), _line("GPUs", "title")]
        lines += [_line("  ".join(gpu_row(each, False)), "gpu") for each in rank.gpus]
    if view.chosen:
        lines += [_line(""), _line("last values", "title")]
        widest = min(40, max(len(each.name) for each in view.chosen))
        for each in view.chosen:
            at = "" if each.step is None else f"  step {each.step}"
            split = f"  {each.split}" if each.split else ""
            lines.append(_line(f"{each.name:<{widest}}  {each.value:<12.6g}{split}{at}", "value"))
    return lines


def _steps(rank: RankView, width: int) -> Iterator[Line]:
    works = [step.work_ns for step in rank.steps]
    last, shown = rank.steps[-1], max(10, min(width - 2, len(works)))
    yield _line("")
    title = f"own time of the last {min(shown, len(works))} steps, without waits"
    yield _line(title, "title")
    yield _line(sparkline(works[-shown:], max(works)), "bars")
    for name, text in (
        ("shortest", duration(min(works))),
        ("median", duration(rank.work_ns)),
        ("longest", duration(max(works))),
        ("step time", f"{duration(last.took_ns)}, the last one"),
    ):
        yield _line(f"{name:<12} {text}")
    if rank.phases_ns:
        yield _line("")
        yield _line(f"step {last.number}, by phase", "title")
    for word, span_ns in rank.phases_ns.items():
        share = span_ns / last.took_ns
        bar = "█" * round(share * 30)
        yield _line(f"{word:<12} {duration(span_ns):>8} {share:>4.0%} {bar}")


def _line(text: str, style: str = "", width: int = 0) -> Line:
    """A line of one style; *width*: it is cut there, unless the screen does that."""
    return Line((Part(_start(text, width) if width else text, style),))
