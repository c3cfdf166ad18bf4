"""Writes the report as one page for people: no script, nothing from elsewhere, all text escaped."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from statistics import median
from typing import Any

from otel_ddp.history.quantities import shown_bytes, shown_number, shown_s
from otel_ddp.history.report import svg
from otel_ddp.history.report.run_card import cost_words
from otel_ddp.history.report.style import STYLE
from otel_ddp.words import shown_phase

_MOST_CURVES, _MOST_ROWS, _MOST_TABLE = 60, 200, 40
# Numbers and times, which stay in one line.
_SHORT = 24
# A cell of the heatmap is full where a rank works half as long again as the others.
_FULL = 0.5


def page(report: Mapping[str, Any]) -> Iterator[str]:
    """The lines of the page."""
    run = report["run"]
    title = f"{run['group']}/{run['run']}" if run["group"] else str(run["run"])
    yield "<!doctype html>"
    yield '<html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    # A name that were markup after all could load nothing, either.
    yield (
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    )
    yield f"<title>{escape(title)} - report</title><style>{STYLE}</style></head><body><main>"
    yield f"<h1>{escape(title)} <span class='state {_word(run['state'])}'>{_word(run['state'])}"
    yield "</span></h1>"
    yield from _head(report)
    for heading, part in (
        ("Findings", _findings(report)),
        ("Values", _values(report)),
        ("Where the time went", _time(report)),
        ("Work of each rank", _work(report)),
        ("Profiles", _profiles(report)),
        ("GPUs", _gpus(report)),
        ("Curves", _curves(report)),
        ("Ranks", _ranks(report)),
        ("Configuration", _config(report)),
    ):
        if lines := list(part):
            yield f"<section><h2>{heading}</h2>"
            yield from lines
            yield "</section>"
    yield f"<footer>otel_ddp {_word(report['otel_ddp'])}, written {_at(report['written_ns'])}"
    yield "</footer></main></body></html>"


def _head(report: Mapping[str, Any]) -> Iterator[str]:
    run, environment = report["run"], report["environment"]
    steps = f"{run['steps']}"
    if report["time"]["step_s"] is not None:
        steps += f", {shown_s(report['time']['step_s'])} each"
    pairs = [
        ("began", _at(run["began_ns"])),
        ("took", shown_s(run["duration_s"])),
        ("ranks", f"{run['world_size'] or len(report['ranks'])} on {', '.join(run['nodes'][:8])}"),
        ("steps", steps),
        ("reason", "; ".join(run["reasons"])),
        *((key, environment.get(key)) for key in ("gpus", "model", "script", "git_sha")),
        ("telemetry", cost_words(report["cost"])),
        *(("post-mortem", each["path"]) for each in report["postmortems"]),
        *(
            (
                "gap",
                f"{_at(each.get('since_ns'))} to {_at(each.get('until_ns'))}: {each.get('why')}",
            )
            for each in report["gaps"][:5]
            if isinstance(each, dict)
        ),
    ]
    yield "<dl>"
    yield from (f"<dt>{_word(key)}</dt><dd>{_word(text)}</dd>" for key, text in pairs if text)
    yield "</dl>"


def _findings(report: Mapping[str, Any]) -> Iterator[str]:
    verdicts = report["verdicts"]
    if not verdicts:
        yield (
            "<p>The agents found no rank that is late, stands still or has died; or they could not "
            "compare the ranks.</p>"
        )
        return
    lost = {
        (each["kind"], each["rank"], each["since_ns"]): each["lost_s"] for each in report["late"]
    }
    rows = []
    for each in verdicts[:_MOST_ROWS]:
        rank = (each.get("who") or {}).get("rank")
        rows.append(
            (
                *(_at(each.get("since_ns")), _at(each.get("until_ns")) or "goes on"),
                each.get("since_step"),
                each.get("sentence"),
                shown_s(lost.get((each.get("kind"), rank, each.get("since_ns")))),
            )
        )
    yield from _table(("since", "until", "step", "what", "cost to the others"), rows)


def _values(report: Mapping[str, Any]) -> Iterator[str]:
    rows = []
    for each in report["values"][:_MOST_ROWS]:
        points = [each.get(key) or {} for key in ("best", "last", "min", "max")]
        cells = [shown_number(point.get("value")) for point in points]
        rows.append((each["name"], each["split"], cells[0], points[0].get("step"), *cells[1:]))
    if rows:
        heads = ("name", "split", "best", "at step", "last", "lowest", "highest")
        yield from _table(heads, rows)


def _time(report: Mapping[str, Any]) -> Iterator[str]:
    phases_s = report["time"]["phases_s"]
    total_s = sum(phases_s.values())
    if not total_s:
        return
    ordered = sorted(phases_s.items(), key=lambda item: -item[1])
    shares = {
        word: (seconds / total_s, f"{shown_phase(word)}: {seconds / total_s * 100:.1f} %")
        for word, seconds in ordered
    }
    yield svg.bar(
        "Where the time went: " + ", ".join(words for _, words in shares.values()), shares
    )
    steps = report["run"]["steps"] or 1
    yield "<table><thead><tr>"
    yield "".join(f"<th scope='col'>{head}</th>" for head in ("phase", "share", "in all", "a step"))
    yield "</tr></thead><tbody>"
    for number, (word, seconds) in enumerate(ordered):
        yield (
            f'<tr><td><i class="key p{number % 9}"></i>{_word(shown_phase(word))}</td>'
            f"<td>{seconds / total_s * 100:.1f} %</td><td>{shown_s(seconds)}</td>"
            f"<td>{shown_s(seconds / steps)}</td></tr>"
        )
    yield "</tbody></table>"


def _work(report: Mapping[str, Any]) -> Iterator[str]:
    work = report["work"]
    ranks, rows = work["ranks"], work["work_s"]
    if len(ranks) < 2 or not work["first_steps"]:
        return
    usual = [
        median(known) if (known := [each for each in column if each is not None]) else None
        for column in zip(*rows, strict=True)
    ]
    heats = [[_heat(each, of) for each, of in zip(row, usual, strict=True)] for row in rows]
    few = f" {work['left_out']} ranks with less work are left out." if work["left_out"] else ""
    yield (
        "<p>The stronger the red, the longer a rank worked than the others did in these steps: "
        f"full is {_FULL * 100:.0f} % more. Waiting for others is no work.{few}</p>"
    )
    named = [(f"rank {rank}", heat) for rank, heat in zip(ranks, heats, strict=True)]
    yield svg.heatmap(
        "Work of each rank, step by step", named, [str(step) for step in work["first_steps"]]
    )
    means = [[each for each in row if each is not None] for row in rows]
    cells = [
        (rank, shown_s(sum(row) / len(row)), shown_s(max(row)))
        for rank, row in zip(ranks, means, strict=True)
        if row
    ]
    yield from _behind(("rank", "work a step", "most"), cells)


def _heat(work_s: float | None, usual_s: float | None) -> float | None:
    if work_s is None or not usual_s:
        return None
    return (work_s / usual_s - 1) / _FULL


def _profiles(report: Mapping[str, Any]) -> Iterator[str]:
    for each in report["profiles"]:
        yield f"<p>{_at(each['asked_ns'])}: {_word(each['why'])}.</p><p>Traces:</p><ul>"
        yield "".join(f"<li><code>{_word(path)}</code></li>" for path in each["traces"])
        yield "</ul>"
        rows = [(row["operator"], *map(shown_s, row["times_s"])) for row in each["operators"]]
        ranks = [f"rank {rank}" for rank in each["ranks"]]
        yield from _table(("operator, its own time of a step", *ranks), rows)


def _gpus(report: Mapping[str, Any]) -> Iterator[str]:
    rows = [
        (
            *(each["node"], each["rank"], each["model"], each["gpu"]),
            _percent(each.get("busy_ratio_mean")),
            shown_bytes(each["used_bytes_max"]) if "used_bytes_max" in each else "",
            f"{each['power_w_mean']:.0f} W" if "power_w_mean" in each else "",
            f"{each['temperature_c_max']:.0f} °C" if "temperature_c_max" in each else "",
        )
        for each in report["gpus"][:_MOST_ROWS]
    ]
    if rows:
        heads = ("node", "rank", "model", "gpu", "busy", "memory, most", "power", "hottest")
        yield from _table(heads, rows)


def _curves(report: Mapping[str, Any]) -> Iterator[str]:
    for each in report["curves"][:_MOST_CURVES]:
        points = [(p[0], p[1], p[2], p[3]) for p in each["points"]]
        name = f"{each['name']} ({each['split']})" if each["split"] else str(each["name"])
        bad = f"; {each['not_finite']} values were not finite" if each["not_finite"] else ""
        yield f"<h3>{_word(name)}</h3>"
        if not points:
            yield f"<p>No finite value{escape(bad)}.</p>"
            continue
        yield svg.curve(f"{name} by step, with its lowest and highest{bad}", points)
        if bad:
            yield f"<p>{escape(bad[2:])}.</p>"
        by = -(-len(points) // _MOST_TABLE)
        rows = [(p[0], *map(shown_number, p[1:])) for p in points[::by]]
        yield from _behind(("step", "lowest", "mean", "highest"), rows)
    if (more := len(report["curves"]) - _MOST_CURVES) > 0:
        yield f"<p>{more} more names are in report.json.</p>"


def _ranks(report: Mapping[str, Any]) -> Iterator[str]:
    keys = ("rank", "node", "local_rank", "state", "step", "pid", "reason")
    rows = [[each.get(key) for key in keys] for each in report["ranks"][:_MOST_ROWS]]
    yield from _table([key.replace("_", " ") for key in keys], rows)
    if (more := len(report["ranks"]) - _MOST_ROWS) > 0:
        yield f"<p>{more} more ranks are in report.json.</p>"


def _config(report: Mapping[str, Any]) -> Iterator[str]:
    pairs = [
        *report["texts"].items(),
        *((f"config.{key}", value) for key, value in report["config"].items()),
        *report["environment"].items(),
    ]
    if pairs:
        yield from _table(("setting", "value"), pairs)


# -- pieces


def _table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    yield "<div class='wide'><table><thead><tr>"
    yield "".join(f"<th scope='col'>{_word(head)}</th>" for head in heads)
    yield "</tr></thead><tbody>"
    for row in rows:
        yield "<tr>" + "".join(map(_cell, row)) + "</tr>"
    yield "</tbody></table></div>"


def _cell(value: Any) -> str:
    word = _word(value)
    return f"<td class='short'>{word}</td>" if len(word) <= _SHORT else f"<td>{word}</td>"


def _behind(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    """The numbers behind a picture."""
    yield "<details><summary>As a table</summary>"
    yield from _table(heads, rows)
    yield "</details>"


def _word(value: Any) -> str:
    return "" if value is None else escape(str(value)[:2000])


def _at(time_ns: Any) -> str:
    if not isinstance(time_ns, int) or not 0 < time_ns < 2**62:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(time_ns / 1e9))


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share * 100:.0f} %"
