"""All that is known of one rank, in lines, for the details of `otel-ddp top`."""

from __future__ import annotations

from collections.abc import Sequence

from otel_ddp.cli.gpus import gpu_row
from otel_ddp.cli.status import ago
from otel_ddp.cli.text import cell, integer
from otel_ddp.cli.top.frame import Line, Part, duration, verdict_style
from otel_ddp.cli.top.sparkline import sparkline
from otel_ddp.cli.top.watch import RankView, Value, View
from otel_ddp.words import PHASE_CODE, phase_word

_FIELDS = (
    *("group", "run", "job_type", "node", "host", "local_rank", "world_size", "pid", "launcher"),
    *("state", "reason", "step", "phase", "journal"),
)


def details(
    view: View, rank: RankView, values: Sequence[Value], width: int, *, plain: bool = False
) -> list[Line]:
    """One rank. The lines may be longer than the width: the screen scrolls or cuts."""
    lines = [_line(f"rank {rank.text('rank', '?')}", "title"), _line("")]
    for run in view.runs:
        if any(each.key == rank.key for each in run.ranks):
            lines += [_line(sentence, verdict_style(sentence)) for sentence in run.verdicts]
    for name in _FIELDS:
        if text := rank.text(name):
            lines.append(_line(f"{name:<12} {text}"))
    since_ns = integer(rank.described.get("phase_since_ns"))
    if since_ns is not None and not rank.over:
        lines.append(_line(f"{'for':<12} {ago(max(0, view.now_ns - since_ns) / 1e9)}"))
    if rank.steps:
        lines += _steps(rank, width, plain)
    if rank.gpus:
        lines += [_line(""), _line("GPUs", "title")]
        lines += [_line("  ".join(gpu_row(each, False)), "gpu") for each in rank.gpus]
    if values:
        lines += [_line(""), _line("last values", "title")]
        widest = min(40, max(len(each.name) for each in values))
        for each in values:
            at = "" if each.step is None else f"  step {each.step}"
            split = f"  {each.split}" if each.split else ""
            lines.append(_line(f"{each.name:<{widest}}  {each.value:<12.6g}{split}{at}", "value"))
    return lines


def _steps(rank: RankView, width: int, plain: bool) -> list[Line]:
    works = [step.work_ns for step in rank.steps]
    took = [step.took_ns for step in rank.steps]
    shown = max(10, min(width - 2, len(works)))
    lines = [
        _line(""),
        _line(f"own time of the last {min(shown, len(works))} steps, without waits", "title"),
        _line(sparkline(works[-shown:], max(works), plain=plain), "bars"),
        _line(f"{'shortest':<12} {duration(min(works))}"),
        _line(f"{'median':<12} {duration(rank.work_ns)}"),
        _line(f"{'longest':<12} {duration(max(works))}"),
        _line(f"{'step time':<12} {duration(took[-1])}, the last one"),
    ]
    if (step := rank.last_step) is not None:
        spent: dict[str, int] = {}
        spans = (*zip(step.parts.codes, step.parts.spans_ns, strict=True), *step.rest)
        for code, span_ns in spans:
            word = phase_word(code & PHASE_CODE)
            spent[word] = spent.get(word, 0) + span_ns
        lines += [_line(""), _line(f"step {cell(step.number, '?')}, by phase", "title")]
        for word, span_ns in sorted(spent.items(), key=lambda item: -item[1]):
            share = span_ns / step.took_ns
            bar = "#" * round(share * 30) if plain else "█" * round(share * 30)
            lines.append(_line(f"{word:<12} {duration(span_ns):>8} {share:>4.0%} {bar}"))
    return lines


def _line(text: str, style: str = "") -> Line:
    return Line((Part(text, style),))
