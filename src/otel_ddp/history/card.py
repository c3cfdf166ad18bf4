"""The card of a run: how it ended, in twenty lines or fewer, for a terminal or a job's log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from otel_ddp.history.quantities import printable, shown_bytes, shown_number, shown_s
from otel_ddp.vocabulary.words import HARMLESS_VERDICTS, shown_phase

_MOST_VALUES, _MOST_SENTENCES = 5, 4
_WIDTH = 100
_LEAST_SHARE = 0.005


class CardValue(NamedTuple):
    """A logged value at the end."""

    name: str
    split: str
    last: float | None
    best: float | None = None
    best_step: int | None = None


class Card(NamedTuple):
    """What is known at the end of a run; what is not known is empty."""

    title: str
    state: str
    duration_s: float | None
    reason: str = ""
    where: str = ""
    """On how many ranks and nodes."""
    steps: int = 0
    step_s: float | None = None
    phases_s: Mapping[str, float] = {}
    """Of one rank, or of all on average."""
    of_rank: str = ""
    """Whose phases these are, if they are not those of all."""
    values: Sequence[CardValue] = ()
    sentences: Sequence[str] = ()
    """Verdicts."""
    gpus: Sequence[str] = ()
    cost: str = ""
    look: Sequence[str] = ()
    """Where there is more to see."""


def lines(card: Card) -> Iterator[str]:
    """Twenty lines at most."""
    took = "" if card.duration_s is None else f" after {shown_s(card.duration_s)}"
    yield _cut(f"otel_ddp: {card.title} {card.state}{took}{_after(', ', card.where)}")
    if card.reason:
        yield _row("reason", card.reason)
    if card.steps:
        each = "" if card.step_s is None else f", {shown_s(card.step_s)} each"
        yield _row("steps", f"{card.steps}{each}")
    if time := "  ".join(_time(card.phases_s)):
        yield _row("time", f"{time}{_after('  of ', card.of_rank)}")
    for value in card.values[:_MOST_VALUES]:
        yield _row(_shown(value), _value(value))
    if (more := len(card.values) - _MOST_VALUES) > 0:
        yield _row("", f"and {more} more values")
    for sentence in card.sentences[:_MOST_SENTENCES]:
        yield _row("!", sentence)
    if (more := len(card.sentences) - _MOST_SENTENCES) > 0:
        yield _row("", f"and {more} more findings")
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
            yield f"{shown_phase(word)} {seconds / total_s * 100:.0f} %"


def _shown(value: CardValue) -> str:
    return f"{value.name} ({value.split})" if value.split else value.name


def _value(value: CardValue) -> str:
    step = "" if value.best_step is None else f" at step {value.best_step}"
    best = "" if value.best is None else f"best {shown_number(value.best)}{step}, "
    return f"{best}last {shown_number(value.last)}"


def _row(head: str, words: str) -> str:
    return _cut(f"  {printable(head):<18} {words}", 4 * _WIDTH if head == "!" else 2 * _WIDTH)


def _cut(words: str, most: int = 2 * _WIDTH) -> str:
    clean = printable(words)
    return clean if len(clean) <= most else f"{clean[: most - 1]}…"


def _after(before: str, words: str) -> str:
    return f"{before}{words}" if words else ""


# -- of a run that is over


def of_report(report: Mapping[str, Any], look: Sequence[str] = ()) -> Card:
    """The same lines that a run shows at its end, with what only a history knows."""
    run, time = report["run"], report["time"]
    ranks, nodes = run["world_size"] or len(report["ranks"]), len(run["nodes"])
    return Card(
        title=f"run {run['group']}/{run['run']}" if run["group"] else f"run {run['run']}",
        state=run["state"],
        duration_s=run["duration_s"],
        reason="; ".join(run["reasons"][:2]),
        where=f"{ranks} rank{'s' * (ranks != 1)} on {nodes} node{'s' * (nodes != 1)}",
        steps=run["steps"],
        step_s=time["step_s"],
        phases_s=time["phases_s"],
        values=[
            CardValue(
                str(each["name"]),
                str(each["split"] or ""),
                *(
                    _of(each["last"], "value"),
                    _of(each["best"], "value"),
                    _of(each["best"], "step"),
                ),
            )
            for each in sorted(report["values"], key=lambda each: not each["best"])
        ],
        sentences=[
            str(each.get("sentence"))
            for each in report["verdicts"]
            if each.get("kind") not in HARMLESS_VERDICTS
        ],
        gpus=list(gpu_words(report["gpus"])),
        cost=cost_words(report["cost"]),
        look=[*look, *(f"post-mortem {each['path']}" for each in report["postmortems"][:1])],
    )


def gpu_words(gpus: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """All GPUs in one line."""
    if not gpus:
        return
    busy = [each["busy_ratio_mean"] for each in gpus if "busy_ratio_mean" in each]
    used = [each["used_bytes_max"] for each in gpus if "used_bytes_max" in each]
    hot = [each["temperature_c_max"] for each in gpus if "temperature_c_max" in each]
    models = sorted({str(each["model"]) for each in gpus if each["model"]})
    parts = [
        f"{len(gpus)} x {', '.join(models)}" if models else f"{len(gpus)}",
        f"busy {sum(busy) / len(busy) * 100:.0f} % (least {min(busy) * 100:.0f} %)" if busy else "",
        f"memory up to {shown_bytes(max(used))}" if used else "",
        f"up to {max(hot):.0f} °C" if hot else "",
    ]
    yield ", ".join(filter(None, parts))


def cost_words(cost: Mapping[str, Any]) -> str:
    """Telemetry's own."""
    parts = []
    if isinstance(cost.get("hook_s"), (int, float)):
        share = cost.get("hook_share")
        of = "" if share is None else f" ({share * 100:.2g} % of the steps)"
        parts.append(f"hooks {shown_s(cost['hook_s'])} on all ranks{of}")
    if isinstance(cost.get("agent_cpu_s"), (int, float)):
        parts.append(f"agents {shown_s(cost['agent_cpu_s'])} of a core")
    return ", ".join(parts)


def _of(point: Any, key: str) -> Any:
    return point.get(key) if isinstance(point, dict) else None
