"""otel-ddp doctor: checks the whole installation, and tells in plain sentences what to do."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from otel_ddp.cli.options import add_directory_option
from otel_ddp.cli.setup.doctor.agent import agent, collector, endpoint
from otel_ddp.cli.setup.doctor.inputs import DoctorInputs, Finding, Findings
from otel_ddp.cli.setup.doctor.machine import (
    directories,
    gpus,
    journals,
    owners,
    packages,
    processes,
    python,
    torch,
    variables,
)
from otel_ddp.cli.text import cell, print_answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the same as JSON, for programs")
    add_directory_option(parser)


def run(options: argparse.Namespace) -> int:
    found: list[Finding] = []
    for each in examine(DoctorInputs(options.dir)):
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


def examine(inputs: DoctorInputs, checks: Sequence[Check] | None = None) -> Findings:
    """The findings of all checks, in their order; nothing is raised."""
    warnings = _CollectWarnings()
    logs = [logging.getLogger(name) for name in ("otel_ddp", "opentelemetry")]
    for log in logs:
        log.addHandler(warnings)
    try:
        for check in CHECKS if checks is None else checks:
            subject = check.__name__
            yield from _without_raising(subject, check, inputs)
            for sentence in warnings.pop_all():
                yield Finding("warn", subject, sentence)
    finally:
        for log in logs:
            log.removeHandler(warnings)


def _without_raising(subject: str, check: Check, inputs: DoctorInputs) -> Findings:
    found: list[Finding] = []

    def collect() -> None:
        for each in check(inputs):
            found.append(each)  # noqa: PERF402  findings before an exception count as well

    # A thread's exception, of any class, comes back as a value.
    with ThreadPoolExecutor(1) as pool:
        why = pool.submit(collect).exception()
    yield from found
    if why is not None:
        yield Finding("fail", subject, f"could not be checked: {type(why).__name__}: {why}")


class _CollectWarnings(logging.Handler):
    """Collects warnings, which would otherwise be printed between the findings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._sentences: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        sentence = record.getMessage()
        # The check `variables` reports this one, and names the entry.
        if not sentence.startswith("Invalid key value resource attribute pair"):
            self._sentences.append(sentence)

    def pop_all(self) -> list[str]:
        sentences, self._sentences = self._sentences, []
        return sentences


Check = Callable[[DoctorInputs], Findings]

CHECKS: tuple[Check, ...] = (
    python,
    packages,
    # Before the checks that read the settings, so that warnings about them belong to this one.
    variables,
    torch,
    gpus,
    owners,
    journals,
    agent,
    endpoint,
    collector,
    directories,
    processes,
)
