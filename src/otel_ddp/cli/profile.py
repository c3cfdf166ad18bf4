"""otel-ddp profile: traces the same steps of a suspect and of a healthy rank."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from otel_ddp import files
from otel_ddp.cli.command import add_directory_option, cell, find_places, print_answer
from otel_ddp.errors import ConfigError, OtelDdpError
from otel_ddp.history.verdicts import named_ranks
from otel_ddp.journal.layout import ASK_SUFFIX, MOST_PROFILED_STEPS, PROFILE_SUFFIX
from otel_ddp.journal.place import Place
from otel_ddp.journal.process_state import ProcessState
from otel_ddp.journal.survey import survey

# How long to wait until the ranks start their profiles.
_WAIT_S = 120.0
# How much longer to wait until the profiled steps end.
_LONGEST_STEP_S = 600.0
_POLL_S = 0.05
_LARGEST_ANSWER = 64 * 1024
_LONGEST_NAME = 80


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Record some steps of a rank with torch's profiler while it trains, and the same steps of "
        "a healthy rank: two traces to open side by side."
    )
    parser.add_argument(
        "--rank",
        type=int,
        action="append",
        help="profile this rank, and a healthy one (default: the rank that a verdict names)",
    )
    parser.add_argument(
        "--steps",
        type=_steps,
        default=5,
        help=f"how many steps, up to {MOST_PROFILED_STEPS} (default: 5)",
    )
    parser.add_argument(
        "--run", dest="of_run", default="", metavar="RUN", help="if several have such a rank"
    )
    parser.add_argument("--out", type=Path, help=f"where the folder is made (default: {_root()})")
    add_directory_option(parser)


def _steps(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= MOST_PROFILED_STEPS:
        raise argparse.ArgumentTypeError(f"must be 1 to {MOST_PROFILED_STEPS}, got {text!r}")
    return int(text)


def run(options: argparse.Namespace) -> int:
    ranks = options.rank or [None]
    if len(ranks) > 1:
        raise ConfigError("--rank takes one rank; a healthy one is traced beside it.")
    _, places, missing = find_places(options.dir)
    try:
        chosen, why = _choose(places, missing, ranks[0], options.of_run)
        folder = _make_folder(options.out, chosen[0].process.run)
    except OSError as error:
        raise ConfigError(f"No folder for the traces: {error}.") from None
    windows = [Window(each, folder) for each in chosen]
    print(f"profile of run {cell(chosen[0].process.run)}: {why}", flush=True)
    _record(windows, options.steps)
    return _report(folder, windows)


def _root() -> Path:
    """The default folder of traces. It is on a disk, as traces are too large for memory."""
    return files.default_root() / "profiles"


def _make_folder(out: Path | None, run_name: str) -> Path:
    root = _root()
    if out is None:
        files.make_kept(root)
    else:
        root = out.expanduser().absolute()
        root.mkdir(parents=True, exist_ok=True)
    at = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    safe = re.sub(r"[^\w.-]+", "-", run_name).strip(".-")[:_LONGEST_NAME]
    return Path(tempfile.mkdtemp(prefix=f"{safe or 'run'}-{at}-", dir=root))


def _record(windows: Sequence[Window], steps: int) -> None:
    for each in windows:
        each.ask(steps, _WAIT_S)
    began_s = time.monotonic()
    while open_ := [each for each in windows if not each.is_over]:
        waited_s = time.monotonic() - began_s
        for each in open_:
            each.poll()
            # The process has the same timeout. Wait one second more, so that it can report it
            # itself.
            if each.state == "waiting" and waited_s > _WAIT_S + 1:
                each.refuse(f"no step ended within {_WAIT_S:g} s")
            elif waited_s > _WAIT_S + _LONGEST_STEP_S:
                each.refuse("its steps did not end")
        time.sleep(_POLL_S)
    for each in windows:
        print(f"  rank {each.rank.rank}: {_outcome(each)}")


def _outcome(window: Window) -> str:
    answer = {key: cell(each, "?") for key, each in window.answer.items()}
    if window.state == "written":
        return f"{answer.get('steps')} steps from step {answer.get('first_step')} on"
    return f"{'failed' if window.state == 'failed' else 'not profiled'}: {answer.get('why')}"


def _report(folder: Path, windows: Sequence[Window]) -> int:
    written = [each for each in windows if each.state == "written"]
    if not written:
        shutil.rmtree(folder, ignore_errors=True)
        return 1
    opened = "Open them side by side" if len(written) > 1 else "Open it"
    late = "; what takes longer in the first makes its rank late" if len(written) > 1 else ""
    shown = [str(folder), *(f"  {each.trace.name}" for each in written)]
    shown.append(f"{opened} in https://ui.perfetto.dev or chrome://tracing{late}.")
    print_answer("\n".join(["", *shown]))
    return 0 if len(written) == len(windows) else 1


# -- the ranks


class Candidate(NamedTuple):
    """A living rank of this node."""

    journal: Path
    process: ProcessState

    @property
    def rank(self) -> int:
        return self.process.rank or 0

    @property
    def takes_questions(self) -> bool:
        return self.journal.with_suffix(ASK_SUFFIX).exists()


def _choose(
    places: Sequence[Place], missing: str, rank: int | None, run: str
) -> tuple[list[Candidate], str]:
    """The suspect rank and a healthy rank of the same run, and why these were chosen.

    *missing*: the remark of `find_places`. Raises OtelDdpError if there is nothing to profile.
    """
    found: list[Candidate] = []
    verdicts: list[Mapping[str, Any]] = []
    looks: list[str] = []
    for place in places:
        here = survey([place])
        verdicts += here.verdicts
        looks += here.looks(run)
        for each in here.processes:
            if each.ended or each.rank is None or run not in ("", each.run):
                continue
            if (journal := place.directory / each.journal).exists():
                found.append(Candidate(journal, each))
            elif each.rank == rank:
                looks.append(f"Rank {each.rank} runs on {each.node}: use this command there.")
    # If several processes have the same rank, the last one in this list is chosen. So put processes
    # that take requests at the end: they train, while the others only evaluate.
    found.sort(key=lambda each: each.takes_questions)
    suspects = [each for one in verdicts for each in reversed(found) if _is_named(each, one)]
    named = [each for each in reversed(found) if each.rank == rank]
    if not (fitting := suspects if rank is None else named):
        what = "No open verdict names a rank" if rank is None else "The rank does not run"
        known = ", ".join(sorted(f"{each.rank} of {cell(each.process.run)}" for each in found))
        if known:
            advice = f"{what} on this node; choose one by --rank: {known}."
        else:
            advice = f"No rank{run and f' of run {cell(run)}'} runs on this node."
        raise OtelDdpError("\n".join((f"{advice} {missing}".strip(), *map(cell, looks))))
    suspect, why = fitting[0], "named"
    if rank is None:
        why = f"rank {suspect.rank} is named by a verdict"
    of_run = {each.rank: each for each in found if each.process.of_run == suspect.process.of_run}
    others = [each for each in of_run.values() if each.takes_questions and each != suspect]
    if not others:
        return [suspect], why
    # Prefer a rank without a verdict.
    healthy = min(others, key=lambda each: each in suspects)
    return [suspect, healthy], f"{why}; rank {healthy.rank} beside it"


def _is_named(each: Candidate, verdict: Mapping[str, Any]) -> bool:
    who = verdict["who"]
    run = cell(who.get("group")), cell(who.get("run"))
    return run == each.process.of_run and str(each.rank) in named_ranks(verdict)


# -- the profile of one rank


class Window:
    """The profile of some steps of one rank, requested through the fifo beside its journal."""

    def __init__(self, rank: Candidate, folder: Path) -> None:
        self.rank = rank
        self.answer: Mapping[str, Any] = {"state": "waiting"}
        """`state`: `waiting`, then `recording`, and finally `written`, `refused` or `failed`."""
        self.trace = folder / f"rank-{rank.rank}.json"
        # When the profile was requested. This time is also the id of the request.
        self.asked_ns = 0

    def ask(self, steps: int, wait_s: float) -> None:
        """Request a trace of this many steps, which must begin within *wait_s*."""
        self.asked_ns = time.time_ns()
        question = {
            "number": self.asked_ns,
            "steps": steps,
            "trace": str(self.trace),
            "until_ns": self.asked_ns + int(wait_s * 1e9),
        }
        try:
            # The request is a single write to the fifo, which is atomic, so two requests do not
            # mix.
            line = f"profile {json.dumps(question)}\n"
            files.write_to_fifo(self.rank.journal.with_suffix(ASK_SUFFIX), line)
        except OSError:
            self.refuse(
                "it takes no questions: it has not called otel_ddp.instrument, or is about to end"
            )

    def poll(self) -> None:
        """Update the state from the answer file of the process; refuse if the process has ended."""
        answer = files.read_mapping(self.rank.journal.with_suffix(PROFILE_SUFFIX), _LARGEST_ANSWER)
        if not self.is_over and answer.get("number") == self.asked_ns:
            self.answer = answer
        elif self.state == "waiting" and answer.get("state") == "recording":
            self.refuse("another profile of this rank is under way")
        if files.lock_holder(self.rank.journal) is None:
            self.refuse("it ended")

    def refuse(self, why: str) -> None:
        """Mark the request as refused, unless its outcome is known already."""
        if not self.is_over:
            self.answer = {"state": "refused", "why": why}

    @property
    def state(self) -> str:
        return str(self.answer.get("state"))

    @property
    def is_over(self) -> bool:
        return self.state not in ("waiting", "recording")
