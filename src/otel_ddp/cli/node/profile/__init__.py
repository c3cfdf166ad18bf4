"""otel-ddp profile: traces some steps of a suspect and a healthy rank, and names the culprit."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from otel_ddp import __version__, files
from otel_ddp.cli.node import agent_page
from otel_ddp.cli.node.profile.choice import Candidate, Chosen, NotFound, choose
from otel_ddp.cli.node.profile.elsewhere import WindowElsewhere
from otel_ddp.cli.node.profile.operators import Row, Totals, compared, culprit
from otel_ddp.cli.node.profile.window import Window, WindowHere
from otel_ddp.cli.options import add_directory_option, find_places
from otel_ddp.cli.text import cell, print_answer
from otel_ddp.errors import ConfigError
from otel_ddp.history import beside
from otel_ddp.journal.layout import MOST_PROFILED_STEPS

_MOST_RANKS = 2
# A question that is open holds up the next one.
_WAIT_S = 120.0
# A step that takes longer than this hangs.
_LONGEST_STEP_S = 600.0
# Of the agent of this node, which waits for no other one.
_ANSWER_S = 15.0
_SHOWN_ROWS = 12
_KEPT_ROWS = 100
_WIDEST_NAME = 44
_POLL_S = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Record some steps of a rank with torch's profiler while it trains, and the same steps of "
        "a healthy rank; show the operators whose times differ most, and name the culprit."
    )
    parser.add_argument(
        *("--rank", "-r"),
        type=int,
        action="append",
        help="this rank (default: the one that a verdict names), compared with one that no verdict "
        "names; given twice, these two. On the node of rank 0 also one of another node",
    )
    parser.add_argument(
        "--steps",
        type=_steps,
        default=5,
        help=f"how many steps, up to {MOST_PROFILED_STEPS} (default: 5)",
    )
    parser.add_argument(
        "--run", dest="of_run", default="", help="the run, if several have such a rank"
    )
    parser.add_argument(
        "--out", type=Path, help=f"where the folder is made (default: {beside.profile_directory()})"
    )
    # For the agent of another node, which sends what is printed to the one that asks.
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    add_directory_option(parser)


def _steps(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= MOST_PROFILED_STEPS:
        raise argparse.ArgumentTypeError(f"must be 1 to {MOST_PROFILED_STEPS}, got {text!r}")
    return int(text)


def run(options: argparse.Namespace) -> int:
    ranks = options.rank or []
    if len(set(ranks)) > _MOST_RANKS:
        print(f"At most {_MOST_RANKS} ranks are profiled at once.", file=sys.stderr)
        return 2
    missing = ""
    try:
        conf, places, missing = find_places(options.dir)
        chosen = choose(places, ranks, options.of_run, alone=options.alone)
        asked_ns = time.time_ns()
        folder = _make_folder(options.out, chosen.ranks[0].process.run, asked_ns)
    except (ConfigError, NotFound) as error:
        print(" ".join(filter(None, (str(error), missing))), file=sys.stderr)
        return 2
    except OSError as error:
        print(f"No folder for the traces: {error}.", file=sys.stderr)
        return 2
    allowed = agent_page.credentials(conf.scrape_token_file)
    windows = [_window(each, folder, allowed) for each in chosen.ranks]
    if not options.json:
        print(f"profile of run {cell(chosen.ranks[0].process.run)}: {chosen.why}")
    _record(windows, options.steps, quiet=options.json)
    return _report(folder, chosen, windows, options.steps, asked_ns, as_json=options.json)


def _window(rank: Candidate, folder: Path, allowed: Mapping[str, str]) -> Window:
    if rank.is_here:
        return WindowHere(rank, folder)
    ask = partial(agent_page.ask, rank.place, allowed, "profile", post=True, answer_s=_ANSWER_S)
    return WindowElsewhere(rank, ask)


def _make_folder(out: Path | None, run_name: str, asked_ns: int) -> Path:
    root = beside.profile_directory()
    if out is None:
        files.make_kept(root)
    else:
        root = out.expanduser().absolute()
        root.mkdir(parents=True, exist_ok=True)
    at = time.strftime("%Y%m%dT%H%M%S", time.gmtime(asked_ns / 1e9))
    name = beside.profile_name(run_name, f"{at}-{asked_ns // 1_000_000 % 1000:03}")
    folder = root / name
    folder.mkdir(0o700)
    return folder


def _record(windows: Sequence[Window], steps: int, *, quiet: bool) -> None:
    said = dict.fromkeys(windows, "waiting")
    for each in windows:
        each.ask(steps, _WAIT_S)
    began_s = time.monotonic()
    while any(said[each] in ("waiting", "recording") for each in windows):
        waited_s = time.monotonic() - began_s
        for each in windows:
            each.poll()
            # The process may notice the same a moment later: then its answer counts.
            if each.state == "waiting" and waited_s > _WAIT_S + 1:
                each.refuse(f"no step ended within {_WAIT_S:g} s")
            elif waited_s > _WAIT_S + _LONGEST_STEP_S:
                each.refuse("its steps did not end")
            if said[each] != each.state:
                said[each] = each.state
                if not quiet:
                    print(f"  {each.rank.label}: {_said(each)}", flush=True)
        time.sleep(_POLL_S)


def _said(window: Window) -> str:
    if window.state == "recording":
        return "its steps are being recorded"
    if window.state == "written":
        return f"{window.steps} steps from step {window.first_step} on"
    return f"{'failed' if window.state == 'failed' else 'not profiled'}: {window.why}"


def _report(
    folder: Path,
    chosen: Chosen,
    windows: Sequence[Window],
    steps: int,
    asked_ns: int,
    *,
    as_json: bool,
) -> int:
    written = [each for each in windows if each.state == "written"]
    totals: list[Totals] = []
    kept: list[str] = []
    try:
        for each in written:
            totals.append(each.totals())
            kept.append(each.keep())
    except (OSError, ValueError) as error:
        print(f"A trace in {folder} cannot be read or compressed: {error}.", file=sys.stderr)
        return 1
    if not written:
        shutil.rmtree(folder, ignore_errors=True)
        if as_json:
            print(windows[0].why, file=sys.stderr)
        return 1
    rows = compared(totals)
    ranks = [each.rank.rank for each in written]
    sentence = culprit(ranks, totals[0].step_s, rows)
    step_s = dict(zip(ranks, (each.step_s for each in totals), strict=True))
    trace = dict(zip(ranks, kept, strict=True))
    here = [trace[each.rank.rank] for each in written if each.rank.is_here]
    content = {
        "version": __version__,
        "run": chosen.ranks[0].process.run,
        "group": chosen.ranks[0].process.group,
        "asked_ns": asked_ns,
        "asked_steps": steps,
        "why": chosen.why,
        "culprit": sentence,
        "ranks": [
            {
                "rank": each.rank.rank,
                "node": each.rank.process.node,
                "pid": each.rank.process.pid,
                **each.answer(),
                "step_s": step_s.get(each.rank.rank),
                "file": trace.get(each.rank.rank),
            }
            for each in windows
        ],
        "files": here,
        "table": [row.to_json() for row in rows[:_KEPT_ROWS]],
    }
    # Whole at once: page and report may look at any moment.
    files.replace(folder / beside.PROFILE, json.dumps(content, indent=1))
    if as_json:
        whole = {**content, "folder": str(folder), "table": [row.to_json() for row in rows]}
        print_answer(json.dumps(whole))
    else:
        shown = [*_table(ranks, totals, rows), *(("", sentence) if sentence else ()), ""]
        print_answer("\n".join([*shown, *_places(folder, written, trace)]))
    return 0 if len(written) == len(windows) else 1


def _places(folder: Path, written: Sequence[Window], trace: Mapping[int, str]) -> Iterator[str]:
    """Where the traces lie."""
    yield str(folder)
    for each in written:
        where = "" if each.rank.is_here else f"on {cell(each.rank.process.node)}: "
        name = trace[each.rank.rank]
        yield f"  {where}{name}: open it in https://ui.perfetto.dev or chrome://tracing"


def _table(ranks: Sequence[int], totals: Sequence[Totals], rows: Sequence[Row]) -> Iterator[str]:
    heads = [f"rank {rank}" for rank in ranks]
    heads += ["difference"] if len(ranks) > 1 else []
    for on_device in (False, True):
        shown = [row for row in rows if row.on_device == on_device]
        if not shown:
            break
        yield ""
        title = f"own time on the {'device' if on_device else 'host'}, ms of a step"
        yield title.ljust(_WIDEST_NAME) + "".join(f"{each:>12}" for each in heads)
        for row in shown[:_SHOWN_ROWS]:
            yield _row(row)
        if rest := shown[_SHOWN_ROWS:]:
            sums = (sum(times) for times in zip(*(row.times_s for row in rest), strict=True))
            yield _row(Row(f"{len(rest)} more", on_device, tuple(sums)))
        yield _row(Row("the whole step", on_device, tuple(each.step_s for each in totals)))


def _row(row: Row) -> str:
    name = cell(row.name)
    if len(name) > _WIDEST_NAME:
        name = f"{name[: _WIDEST_NAME - 3]}..."
    cells = [f"{each * 1e3:12.3f}" for each in row.times_s]
    if len(cells) > 1:
        cells.append(f"{row.difference_s * 1e3:+12.3f}")
    return f"{name:<{_WIDEST_NAME}}" + "".join(cells)
