"""Writes a post-mortem for people: where every rank was, why it ended, what to look at."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Plain = Mapping[str, Any]

_LONGEST_TEXT = 2000
_MOST_RANKS_SHOWN = 64
_MOST_VALUES_SHOWN = 40
_MOST_VERDICTS_SHOWN = 20
_LONGEST_CELL = 60
_LONGEST_REASON = 300

_ENDED = ("finished", "failed", "killed")


def as_text(report: Plain) -> str:
    """The whole text; *report* is what the `.json` has."""
    now_ns, verdict = report["written_ns"], report["verdict"]
    processes = sorted(report["processes"], key=_order)
    lines = [
        _line(verdict.get("sentence") or "an incident"),
        "",
        f"run {_line(report['run'])}, {_moment(verdict.get('since_ns') or now_ns)}, "
        f"by the agent of one node: {len(processes)} of {_world(processes)} processes",
        "",
        "Where every rank was",
        *_table(_HEADS, [_row(each, now_ns) for each in processes[:_MOST_RANKS_SHOWN]]),
    ]
    if len(processes) > _MOST_RANKS_SHOWN:
        lines.append(f"  and {len(processes) - _MOST_RANKS_SHOWN} more, in the .json")
    if reasons := [
        f"  {_name(each)}: {_line(each['reason'])[:_LONGEST_REASON]}"
        for each in processes
        if each.get("reason")
    ]:
        lines += ["", "What they reported", *reasons[:_MOST_RANKS_SHOWN]]
    if report["gpus"]:
        lines += ["", "Its GPUs", *_gpus(report["gpus"])]
    if report["values"]:
        lines += ["", "Last values", *_values(report["values"])]
    if report["open_verdicts"]:
        lines += ["", "Also open at that moment"]
        lines += [
            f"  {_line(each.get('sentence'))}"
            for each in report["open_verdicts"][:_MOST_VERDICTS_SHOWN]
        ]
    lines += ["", "What to look at", *(f"  {hint}" for hint in _advice(verdict, processes))]
    return "\n".join(lines) + "\n"


_HEADS = ("rank", "node", "state", "step", "phase", "for", "last seen")


def _row(each: Plain, now_ns: int) -> tuple[str, ...]:
    ended = each.get("state") in _ENDED
    seen_ns = each.get("seen_alive_ns") if ended else now_ns
    since_ns = each.get("phase_since_ns")
    spent = ""
    if seen_ns and since_ns:
        spent = _duration(max(0, seen_ns - since_ns) / 1e9)
    seen = "now"
    if ended:
        seen = f"{_duration(max(0, now_ns - seen_ns) / 1e9)} ago" if seen_ns else "?"
    rank = each.get("rank")
    return (
        f"p{_cell(each.get('pid'))}" if rank is None else _cell(rank),
        _cell(each.get("node")),
        _cell(each.get("state")),
        _cell(each.get("step")),
        _cell(each.get("phase")),
        spent,
        seen,
    )


def _gpus(gpus: Sequence[Plain]) -> list[str]:
    rows = []
    for each in gpus[:_MOST_RANKS_SHOWN]:
        labels, throttled = each.get("labels"), each.get("throttled")
        labels = labels if isinstance(labels, Mapping) else {}
        rows.append(
            (
                _cell(each.get("index")),
                _cell(labels.get("rank")),
                _number(each.get("busy_ratio"), 100, " %"),
                f"{_number(each.get('used_bytes'), 2**-30)} of "
                f"{_number(each.get('limit_bytes'), 2**-30)} GiB",
                _number(each.get("power_w"), 1, " W"),
                _number(each.get("temperature_c"), 1, " C"),
                ", ".join(map(_cell, throttled)) if isinstance(throttled, list) else "",
            )
        )
    return _table(("gpu", "rank", "busy", "memory", "power", "temp", "held back by"), rows)


def _number(given: Any, times: float, unit: str = "") -> str:
    return f"{given * times:.0f}{unit}" if isinstance(given, (int, float)) else "?"


def _values(values: Sequence[Plain]) -> list[str]:
    by_name: dict[tuple[str, str], list[Plain]] = {}
    for each in values:
        by_name.setdefault((_cell(each.get("name")), _cell(each.get("split"))), []).append(each)
    rows = []
    for (name, split), found in list(by_name.items())[:_MOST_VALUES_SHOWN]:
        numbers = [float(each["value"]) for each in found]
        finite = [number for number in numbers if math.isfinite(number)]
        low, high = min(finite, default=math.nan), max(finite, default=math.nan)
        shown = f"{low:.6g}" if low == high else f"{low:.6g} to {high:.6g}"
        odd = [
            f"{number} on rank {_cell(each.get('rank'))}"
            for each, number in zip(found, numbers, strict=True)
            if not math.isfinite(number)
        ]
        if not finite:
            shown, odd = odd[0], odd[1:]
        steps = [each["step"] for each in found if each.get("step") is not None]
        at = f"step {max(steps)}" if steps else ""
        ranks = f"{len(found)} ranks" if len(found) > 1 else f"rank {_cell(found[0].get('rank'))}"
        rows.append((name, split, ", ".join([shown, *odd[:3]]), at, ranks))
    lines = _table(("name", "split", "value", "at", "of"), rows)
    if len(by_name) > _MOST_VALUES_SHOWN:
        lines.append(f"  and {len(by_name) - _MOST_VALUES_SHOWN} more, in the .json")
    return lines


def _advice(verdict: Plain, processes: Sequence[Plain]) -> list[str]:
    evidence = verdict.get("evidence")
    evidence = evidence if isinstance(evidence, Mapping) else {}
    labels = verdict.get("who")
    rank = labels.get("rank") if isinstance(labels, Mapping) else None
    owner = f"rank {rank}" if rank else "each rank"
    if verdict.get("kind") == "stall":
        culprits = evidence.get("culprits")
        named = list(map(str, culprits)) if isinstance(culprits, (list, tuple)) else []
        ranks, wait = f"rank{'s' * (len(named) > 1)} {', '.join(named)}", ""
        if any(str(each["rank"]) not in named for each in evidence.get("ranks") or ()):
            wait = ": the others wait"
        return [
            *([f"{ranks}{wait}"] if named else []),
            "`otel-ddp stacks` while the processes are still there",
        ]
    world = _world(processes)
    whole = world.isdigit() and len({each.get("rank") for each in processes}) >= int(world)
    hints = {
        "out_of_memory": [
            "host memory: batches kept in lists, data loader workers and their prefetching, "
            "data that every rank loads instead of one",
            "the limit of its container or job, if the memory is needed",
        ],
        "signal": [
            f"the last lines that {owner} printed; PYTHONFAULTHANDLER=1 shows where it crashes",
            "the launcher's and the scheduler's log: time limits, preemption, memory limits",
        ],
        "exception": [f"the traceback in the output of {owner}"],
        "lost_peer": [
            "the output of the ranks that had ended before, and the network between the ranks",
        ]
        if whole
        else [
            "the output and the post-mortems of the ranks that are not in the table: one of them "
            "ended first",
            "the network between the nodes, if no rank of any node reports another cause",
        ],
        "exit": [f"the last lines that {owner} printed: it left by itself"],
    }
    unknown = [
        "the launcher's and the scheduler's log: they know the exit code",
        "the kernel's log, if you may read it: `dmesg -T | grep -i -e 'killed process' -e xid`",
    ]
    found = hints.get(str(evidence.get("cause")), unknown)
    return found if whole else [*found, "the post-mortems of the other nodes, if the run has any"]


def _order(each: Plain) -> tuple[str, bool, int, int]:
    rank, started_ns = each.get("rank"), int(each.get("started_ns") or 0)
    return str(each.get("node")), rank is None, int(rank or 0), started_ns


def _name(each: Plain) -> str:
    rank = each.get("rank")
    return f"process {_cell(each.get('pid'))}" if rank is None else f"rank {_cell(rank)}"


def _world(processes: Iterable[Plain]) -> str:
    sizes = [each["world_size"] for each in processes if isinstance(each.get("world_size"), int)]
    return str(max(sizes)) if sizes else "?"


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    whole = [heads, *rows]
    widths = [max(map(len, column)) for column in zip(*whole, strict=True)]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in whole]


def _cell(given: Any) -> str:
    return "" if given is None else _line(given)[:_LONGEST_CELL]


def _line(given: Any) -> str:
    """One line of text: names and reasons may contain control codes, which terminals obey."""
    text = "".join(c if c.isprintable() else " " for c in str(given)[:_LONGEST_TEXT])
    return " ".join(text.split())


def _duration(seconds: float) -> str:
    if seconds >= 120:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def _moment(at_ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at_ns / 1e9))
