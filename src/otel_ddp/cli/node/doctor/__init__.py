"""otel-ddp doctor: checks the whole installation, and tells in plain sentences what to do."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from otel_ddp import errors
from otel_ddp.cli.node.doctor import agent, machine
from otel_ddp.cli.node.doctor.machine import Check, Inputs, Level
from otel_ddp.cli.options import add_directory_option
from otel_ddp.cli.text import cell, print_answer

CHECKS: tuple[Check, ...] = (
    machine.python,
    machine.packages,
    machine.variables,
    machine.torch,
    machine.gpus,
    machine.journals,
    agent.agent,
    agent.endpoint,
    agent.collector,
    agent.notify,
    machine.directories,
    machine.processes,
)


class Finding(NamedTuple):
    """One line of the answer."""

    level: Level
    subject: str
    sentence: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the same as JSON, for programs")
    add_directory_option(parser)


def run(options: argparse.Namespace) -> int:
    found: list[Finding] = []
    for each in examine(Inputs(options.dir)):
        found.append(each)
        # Each at once: some checks take seconds.
        line = f"{each.level:<5} {each.subject:<12} {cell(each.sentence)}"
        if not options.json and print_answer(line):
            return 1
    failed = sum(each.level == "fail" for each in found)
    warned = sum(each.level == "warn" for each in found)
    if options.json:
        plain = [each._asdict() for each in found]
        not_printed = print_answer(json.dumps({"ok": not failed, "findings": plain}, indent=2))
    elif failed or warned:
        not_printed = print_answer(f"\n{failed} failed, {warned} to look at.")
    else:
        not_printed = print_answer("\nAll is well.")
    return 1 if failed or not_printed else 0


def examine(inputs: Inputs, checks: Sequence[Check] | None = None) -> Iterator[Finding]:
    """The findings of all checks, in their order; nothing is raised."""
    for check in CHECKS if checks is None else checks:
        subject = check.__name__
        try:
            for level, sentence in check(inputs):
                yield Finding(level, subject, sentence)
        except errors.ANY_ERROR as why:
            sentence = f"could not be checked: {type(why).__name__}: {why}"
            yield Finding("fail", subject, sentence)
