"""Compares a program's bare run with its measured runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tools.programs.program import Program
from tools.programs.trial import BARE, LATE, RUN, TWO_LINES, Seen

# Kinds of verdicts that are no fault.
_HARMLESS = ("bound",)


@dataclass(frozen=True, kw_only=True)
class Result:
    """A row of the table, and its faults."""

    faults: list[str]
    steps: int
    values: list[str]
    late: str
    cost: dict[str, float]
    said: list[str]


def judged(program: Program, seen: dict[str, Seen]) -> Result:
    """The result of a program that was started in all ways."""
    bare = seen[BARE]
    faults = []
    if program.optimizer_steps and len(bare.weights) != program.ranks:
        faults.append(f"bare: {len(bare.weights)} ranks made steps, not {program.ranks}")
    for way in (TWO_LINES, RUN):
        faults += [f"{way}: {each}" for each in _faults(program, bare, seen[way])]
    late = ""
    if program.late:
        late, wrong = _late(program, seen[LATE])
        faults += [f"{LATE}: {each}" for each in wrong]
    reports = seen[RUN].reports
    return Result(
        faults=faults,
        steps=sum(seen[RUN].steps.values()),
        values=sorted({_named(each) for report in reports for each in report["values"]}),
        late=late,
        cost={
            way: each.step_s / bare.step_s
            for way, each in seen.items()
            if way not in (BARE, LATE) and each.step_s and bare.step_s
        },
        said=seen[RUN].said,
    )


def _faults(program: Program, bare: Seen, seen: Seen) -> list[str]:
    faults = []
    if seen.exit_code != bare.exit_code:
        faults.append(f"it ended with {seen.exit_code}")
    if seen.weights != bare.weights:
        faults.append(f"the weights differ: {_difference(bare.weights, seen.weights)}")
    if seen.printed != bare.printed:
        faults.append(f"it printed other losses: {seen.printed[:3]}, bare {bare.printed[:3]}")
    if program.printed and not bare.printed:
        faults.append("no loss was found in what it printed")
    if len(seen.reports) != 1:
        return [*faults, f"{len(seen.reports)} runs were kept"]
    (report,) = seen.reports
    if report["run"]["state"] != "finished":
        faults.append(f"the run is told as {report['run']['state']}: {report['run']['reasons']}")
    if len(report["ranks"]) != program.ranks:
        faults.append(f"{len(report['ranks'])} ranks are shown")
    made = {
        rank: len(each) // program.optimizer_steps if program.optimizer_steps else 0
        for rank, each in bare.weights.items()
    }
    if {k: v for k, v in seen.steps.items() if v} != {k: v for k, v in made.items() if v}:
        faults.append(f"steps by rank are counted as {seen.steps}, and were {made}")
    if program.samples is not None and set(seen.samples.values()) != {program.samples}:
        faults.append(f"samples are counted as {seen.samples}, and were {program.samples}")
    there = {_named(each) for each in report["values"]}
    if lacking := sorted(set(program.values) - there):
        faults.append(f"values are not there: {lacking}; there are {sorted(there)}")
    if program.loss_within:
        faults += _strange_losses(report, [float(each) for each in seen.printed], program)
    if lacking := sorted(set(program.config) - set(report["config"])):
        faults.append(f"settings are not there: {lacking}; there are {sorted(report['config'])}")
    faults += [
        f"it says: {each['sentence']}"
        for each in report["verdicts"]
        if each["kind"] not in _HARMLESS
    ]
    return faults


def _strange_losses(
    report: dict[str, Any], printed: list[float], program: Program
) -> Iterator[str]:
    """The recorded losses that the program has not printed."""
    for each in report["values"]:
        for key in ("last", "min", "max") if _named(each) == "loss" else ():
            value = each[key]["value"]
            if min(abs(one - value) for one in printed) > program.loss_within * abs(value):
                yield f"{key} of the recorded losses is {value}, which was not printed"


def _late(program: Program, seen: Seen) -> tuple[str, list[str]]:
    """The phase of the verdict on rank 1, and faults of the verdicts."""
    named = ""
    wrong = [f"it ended with {seen.exit_code}"] if seen.exit_code else []
    for report in seen.reports:
        for each in report["verdicts"]:
            if each["kind"] == "straggler" and str(each["who"].get("rank")) == "1":
                named = each["phase"]
            elif each["kind"] not in _HARMLESS:
                wrong.append(f"it says: {each['sentence']}")
    if not named:
        wrong.append("rank 1 was not named")
    elif program.late_phase not in named:
        wrong.append(f"rank 1 was named for {named}, and was late in {program.late_phase}")
    return named, wrong


def _named(value: dict[str, Any]) -> str:
    split = value["split"]
    return value["name"] if split in ("", "train") else f"{split}/{value['name']}"


def _difference(bare: dict[int, list[str]], seen: dict[int, list[str]]) -> str:
    for rank, steps in bare.items():
        others = seen.get(rank, [])
        if len(others) != len(steps):
            return f"rank {rank} made {len(others)} steps, bare {len(steps)}"
        for number, (one, other) in enumerate(zip(steps, others, strict=True), 1):
            if one != other:
                return f"rank {rank} from step {number} on"
    return f"ranks {sorted(seen)}, bare {sorted(bare)}"
