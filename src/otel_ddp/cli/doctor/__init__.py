"""otel-ddp doctor: checks the whole installation, and says in plain sentences what to do."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from otel_ddp.cli import where
from otel_ddp.cli.doctor.agent import agent, endpoint
from otel_ddp.cli.doctor.collector import collector
from otel_ddp.cli.doctor.installation import packages, python, torch, variables
from otel_ddp.cli.doctor.node import directories, gpus, journals, owners, processes
from otel_ddp.cli.doctor.scene import DoctorInputs, Finding, Findings
from otel_ddp.cli.status import cell, tell


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the same, for programs")
    where.argument(parser)


def run(asked: argparse.Namespace) -> int:
    found: list[Finding] = []
    for each in examine(DoctorInputs(asked.dir)):
        found.append(each)
        # At once: some checks take seconds.
        line = f"{each.level:<5} {each.subject:<12} {cell(each.sentence)}"
        if not asked.json and tell(line):
            return 1
    failed = sum(each.level == "fail" for each in found)
    warned = sum(each.level == "warn" for each in found)
    if asked.json:
        plain = [each._asdict() for each in found]
        trouble = tell(json.dumps({"ok": not failed, "findings": plain}, indent=2))
    elif failed or warned:
        trouble = tell(f"\n{failed} failed, {warned} to look at.")
    else:
        trouble = tell("\nAll is well.")
    return 1 if failed or trouble else 0


def examine(scene: DoctorInputs, checks: Sequence[Check] | None = None) -> Findings:
    """What all checks find, in their order; nothing is raised."""
    heard = _Heard()
    logs = [logging.getLogger(name) for name in ("otel_ddp", "opentelemetry")]
    for log in logs:
        log.addHandler(heard)
    try:
        for check in CHECKS if checks is None else checks:
            subject = check.__name__
            yield from _without_raising(subject, check, scene)
            for sentence in heard.take():
                yield Finding("warn", subject, sentence)
    finally:
        for log in logs:
            log.removeHandler(heard)


def _without_raising(subject: str, check: Check, scene: DoctorInputs) -> Findings:
    found: list[Finding] = []

    def collect() -> None:
        for each in check(scene):
            found.append(each)  # noqa: PERF402  what was found before it raised counts as well

    # Out of a thread whatever is raised comes back as a value.
    with ThreadPoolExecutor(1) as pool:
        why = pool.submit(collect).exception()
    yield from found
    if why is not None:
        yield Finding("fail", subject, f"could not be checked: {type(why).__name__}: {why}")


class _Heard(logging.Handler):
    """Warnings that would otherwise stand between the findings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._sentences: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        sentence = record.getMessage()
        # `variables` has said that, and which one it is.
        if not sentence.startswith("Invalid key value resource attribute pair"):
            self._sentences.append(sentence)

    def take(self) -> list[str]:
        taken, self._sentences = self._sentences, []
        return taken


Check = Callable[[DoctorInputs], Findings]

CHECKS: tuple[Check, ...] = (
    python,
    packages,
    # Before whatever goes by the settings, so that what is said of them is said here.
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
