"""otel-ddp nodes: tells what each machine has cost the ranks of its runs: which one is it again?"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from otel_ddp.cli import fetch
from otel_ddp.cli.options import history_directory
from otel_ddp.cli.programs.prometheus import Prometheus
from otel_ddp.cli.programs.recorded import recorded_by
from otel_ddp.cli.text import cell, padded, print_answer, print_json
from otel_ddp.diagnosis.say import plural
from otel_ddp.history.directory import NotFound, why_not_ours
from otel_ddp.history.fleet import DAY_NS, fleet_of
from otel_ddp.history.terminal import shown_s, shown_time

SCHEMA = 1
"""It rises with every change of the keys."""
DAYS = 30
_MOST_SHOWN = 20
_HEADS = (
    *("node", "lost", "late", "hang", "late in", "runs", "deaths", "Xid", "held back"),
    *("worst GPU", "since"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "List the machines by the time that other ranks lost to them, over all runs of the last "
        "weeks, and name those that are late again and again. From the histories in a folder, or "
        "from the rules of a Prometheus."
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "folder",
        nargs="?",
        default="",
        metavar="FOLDER",
        help="with the histories of all nodes (default: those that are kept here)",
    )
    source.add_argument(
        "--prometheus",
        default="",
        metavar="URL",
        help="ask this server, which has deploy/prometheus/rules; a token is in PROMETHEUS_TOKEN",
    )
    parser.add_argument(
        "--days",
        type=_days,
        default=DAYS,
        metavar="N",
        help=f"of runs that were seen within so many days (default: {DAYS})",
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON, for programs")


def _days(text: str) -> int:
    days = int(text) if text.isdecimal() else 0
    if not 1 <= days <= 3650:
        raise argparse.ArgumentTypeError(f"not a number of days: {text!r}")
    return days


def run(options: argparse.Namespace) -> int:
    try:
        found = document(options.folder, options.prometheus, options.days)
    except (NotFound, ValueError, fetch.NoAnswer) as why:
        print(f"otel-ddp nodes: {why}", file=sys.stderr)
        return 2
    return print_json(found) if options.json else print_answer("\n".join(_lines(found)))


def document(folder: str, prometheus: str, days: int) -> dict[str, Any]:
    """For programs; raises NotFound, ValueError or fetch.NoAnswer."""
    now_ns = time.time_ns()
    if prometheus:
        server = Prometheus.at(prometheus, "--prometheus")
        source, found = server.name, recorded_by(server, days)
    else:
        place = _folder(folder)
        source, found = str(place), fleet_of(place, now_ns, days)
    return {
        "schema": SCHEMA,
        "now_ns": now_ns,
        "since_ns": now_ns - days * DAY_NS,
        "source": source,
        "runs": found.runs,
        "nodes": [each.to_json() for each in found.nodes],
        "faults": [*found.faults],
    }


def _folder(named: str) -> Path:
    if not named:
        place = history_directory()
        if why := why_not_ours(place):
            raise NotFound(f"no history is read: {why}")
        return place
    place = Path(named).expanduser()
    if not place.is_dir():
        raise NotFound(f"{named} is no folder.")
    return place


# -- for people


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    now_ns, nodes = found["now_ns"], found["nodes"]
    since = time.strftime("%Y-%m-%d", time.localtime(found["since_ns"] / 1e9))
    runs = range(found["runs"])
    yield (
        f"{len(nodes)} node{plural(nodes)} in {len(runs)} run{plural(runs)} since {since}, by what "
        f"the other ranks lost to each ({cell(found['source'])})"
    )
    troubled = [each for each in nodes if _is_troubled(each)]
    if troubled:
        yield ""
        rows = [_HEADS, *(_row(each, now_ns) for each in troubled[:_MOST_SHOWN])]
        yield from padded(rows, right=_HEADS[1:7])
    if len(troubled) > _MOST_SHOWN:
        yield f"and {len(troubled) - _MOST_SHOWN} more: --json lists all"
    if quiet := len(nodes) - len(troubled):
        yield ""
        yield f"{quiet} {'nodes have' if quiet > 1 else 'node has'} cost nothing."
    for each in nodes:
        if each["suspect"]:
            groups = len({late["group"] for late in each["late_in"]})
            yield ""
            yield (
                f"! {cell(each['node'])} was late in {len(each['late_in'])} of its last "
                f"{each['last_runs']} runs, of {groups} groups: drain it and test it "
                "(docs/runbooks/NodeLateAgain.md)."
            )
    yield from (f"! {cell(why)}" for why in found["faults"])


def _is_troubled(node: Mapping[str, Any]) -> bool:
    return any(node[key] for key in ("lost_s", "late_in", "deaths", "xids", "held_back_s"))


def _row(node: Mapping[str, Any], now_ns: int) -> tuple[str, ...]:
    lost_s, gpus, late = node["lost_s"], node["gpus"], len(node["late_in"])
    total_s = sum(lost_s.values())
    deaths = ", ".join(f"{times} {cell(cause)}" for cause, times in node["deaths"].items())
    gpu, its_s = next(iter(gpus.items()), ("", 0.0))
    share = its_s / sum(gpus.values()) if its_s else 0.0
    return (
        cell(node["node"], "?"),
        shown_s(total_s) if total_s else "-",
        *(shown_s(lost_s[cause]) if lost_s.get(cause) else "-" for cause in ("late", "hang")),
        f"{late} of {node['last_runs']}" if late else "-",
        str(node["runs"]),
        deaths.replace("_", " ") or "-",
        ", ".join(map(cell, node["xids"])) or "-",
        shown_s(node["held_back_s"]) if node["held_back_s"] else "-",
        f"{cell(gpu)} {share:.0%}" if gpu else "-",
        shown_time(node["since_ns"], now_ns) if node["since_ns"] else "-",
    )
