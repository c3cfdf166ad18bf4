"""otel-ddp profile: traces the same steps of a suspect and of a healthy rank."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from otel_ddp import __version__, files
from otel_ddp.cli.node.profile.choice import Chosen, NotFound, choose
from otel_ddp.cli.node.profile.window import Window
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
_POLL_S = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Record some steps of a rank with torch's profiler while it trains, and the same steps of "
        "a healthy rank: two traces to open side by side."
    )
    parser.add_argument(
        *("--rank", "-r"),
        type=int,
        action="append",
        help="this rank (default: the one that a verdict names), and one that no verdict names; "
        "given twice, these two",
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
    add_directory_option(parser)


def _steps(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= MOST_PROFILED_STEPS:
        raise argparse.ArgumentTypeError(f"must be 1 to {MOST_PROFILED_STEPS}, got {text!r}")
    return int(text)


def run(options: argparse.Namespace) -> int:
    ranks = options.rank or []
    if len(set(ranks)) > _MOST_RANKS:
        raise ConfigError(f"At most {_MOST_RANKS} ranks are profiled at once.")
    _, places, missing = find_places(options.dir)
    try:
        chosen = choose(places, ranks, options.of_run)
        asked_ns = time.time_ns()
        folder = _make_folder(options.out, chosen.ranks[0].process.run, asked_ns)
    except NotFound as error:
        raise NotFound(f"{error} {missing}".strip()) from None
    except OSError as error:
        raise ConfigError(f"No folder for the traces: {error}.") from None
    windows = [Window(each, folder) for each in chosen.ranks]
    print(f"profile of run {cell(chosen.ranks[0].process.run)}: {chosen.why}")
    _record(windows, options.steps)
    return _report(folder, chosen, windows, options.steps, asked_ns)


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


def _record(windows: Sequence[Window], steps: int) -> None:
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
                print(f"  rank {each.rank.rank}: {_said(each)}", flush=True)
        time.sleep(_POLL_S)


def _said(window: Window) -> str:
    if window.state == "recording":
        return "its steps are being recorded"
    if window.state == "written":
        return f"{window.steps} steps from step {window.first_step} on"
    return f"{'failed' if window.state == 'failed' else 'not profiled'}: {window.why}"


def _report(
    folder: Path, chosen: Chosen, windows: Sequence[Window], steps: int, asked_ns: int
) -> int:
    written = [each for each in windows if each.state == "written"]
    if not written:
        shutil.rmtree(folder, ignore_errors=True)
        return 1
    try:
        kept = {each: each.keep() for each in written}
    except OSError as error:
        print(f"A trace in {folder} cannot be compressed: {error}.", file=sys.stderr)
        return 1
    content = {
        "version": __version__,
        "run": chosen.ranks[0].process.run,
        "group": chosen.ranks[0].process.group,
        "asked_ns": asked_ns,
        "asked_steps": steps,
        "why": chosen.why,
        "ranks": [{**each.answer(), "file": kept.get(each)} for each in windows],
        "files": list(kept.values()),
    }
    # Whole at once: page and report may look at any moment.
    files.replace(folder / beside.PROFILE, json.dumps(content, indent=1))
    opened = "Open them side by side" if len(kept) > 1 else "Open it"
    late = "; what takes longer in the first makes its rank late" if len(kept) > 1 else ""
    shown = [str(folder), *(f"  {name}" for name in kept.values())]
    shown.append(f"{opened} in https://ui.perfetto.dev or chrome://tracing{late}.")
    print_answer("\n".join(["", *shown]))
    return 0 if len(written) == len(windows) else 1
