"""otel-ddp doctor: checks the installation, and suggests fixes."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from importlib import metadata
from typing import Any, Literal, NamedTuple

from otel_ddp import __version__, errors, plain, settings
from otel_ddp.agent.export.otlp.variables import (
    NO_COLLECTOR,
    Variables,
    exported_signals,
    signals_with_endpoint,
)
from otel_ddp.cli.command import add_directory_option, cell, print_answer
from otel_ddp.cli.picture import NO_AGENT, unserved
from otel_ddp.errors import ConfigError
from otel_ddp.identity import identity
from otel_ddp.journal import place
from otel_ddp.journal.survey import Survey, survey
from otel_ddp.torch.models import too_old

# How long to wait for a collector's answer.
_ANSWER_S = 5.0

Level = Literal["ok", "warn", "fail"]
Results = Iterator[tuple[Level, str]]
Check = Callable[["Inputs"], Results]


class Finding(NamedTuple):
    level: Level
    subject: str
    sentence: str


class Inputs:
    """The environment, settings and processes that are checked."""

    def __init__(self, directory: str = "", env: Mapping[str, str] = os.environ) -> None:
        self.refused = settings.refused(env)
        """For each invalid variable, the reason why a training would not start."""
        self.env = {name: text for name, text in env.items() if name not in self.refused}
        self.conf = settings.read(self.env, directory=directory or None)
        try:
            # Each variable is valid by itself. These calls check them in combination.
            identity.Choice(self.conf.strategy)
            identity.resolve(env=self.env)
        except ConfigError as error:
            self.refused[""] = str(error)

    @cached_property
    def survey(self) -> Survey:
        return survey(place.existing(self.conf.directory, self.env))

    @property
    def agents(self) -> list[Mapping[str, Any]]:
        """The living agents."""
        return [each for each in self.survey.agents if each["alive"]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_directory_option(parser)


def run(options: argparse.Namespace) -> int:
    found: list[Finding] = []
    for each in examine(Inputs(options.dir)):
        found.append(each)
        # Print each finding at once, because some checks take seconds.
        if print_answer(f"{each.level:<5} {each.subject:<10} {cell(each.sentence)}"):
            return 1
    failed = sum(each.level == "fail" for each in found)
    warned = sum(each.level == "warn" for each in found)
    sums = f"{failed} failed, {warned} to look at." if failed or warned else "All is well."
    return print_answer(f"\n{sums}") or int(failed > 0)


def examine(inputs: Inputs, checks: Sequence[Check] | None = None) -> Iterator[Finding]:
    """The findings of all checks; never raises."""
    for check in CHECKS if checks is None else checks:
        subject = check.__name__
        try:
            for level, sentence in check(inputs):
                yield Finding(level, subject, sentence)
        except errors.ANY_ERROR as why:
            sentence = f"could not be checked: {type(why).__name__}: {why}"
            yield Finding("fail", subject, sentence)


# -- the checks


def python(inputs: Inputs) -> Results:
    yield "ok", f"otel_ddp {__version__} on Python {platform.python_version()} ({sys.executable})"


def torch(inputs: Inputs) -> Results:
    # Read the version without importing torch, as the import takes seconds and may crash.
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        yield (
            "warn",
            "torch is not installed for this Python: values can be logged, but no training is "
            "measured: pip install 'torch>=2.4'; if torch is elsewhere, call `python -m otel_ddp "
            "doctor` with that Python",
        )
        return
    doubt = too_old(version)
    yield ("warn", f"torch {version}: {doubt}") if doubt else ("ok", f"torch {version}")


def variables(inputs: Inputs) -> Results:
    yield from (("fail", sentence) for sentence in inputs.refused.values())
    for sentence in (*settings.doubts(inputs.env), *settings.unknown(inputs.env)):
        yield "warn", sentence
    if inputs.conf.disabled:
        yield "warn", "OTEL_SDK_DISABLED=true: nothing is recorded; unset it"
    given = sorted(name for name in settings.names() if inputs.env.get(name, "").strip())
    # Print only the names of variables, because a value may be a secret token.
    yield "ok", f"set: {', '.join(given)}" if given else "none is set, so the defaults hold"


def journals(inputs: Inputs) -> Results:
    """Check the directory of journals.

    Creates the default directory if needed, as the next training process would, but never the one
    that OTEL_DDP_DIR or --dir names.
    """
    conf = inputs.conf
    if conf.directory and not os.path.lexists(conf.directory):
        yield "warn", f"{conf.directory} does not exist: nothing has recorded there yet"
        return
    try:
        places, remark = place.find(conf.directory, inputs.env, offline=conf.offline)
    except ConfigError as error:
        yield "fail", str(error)
        return
    if remark:
        yield "warn" if places else "fail", remark
    if places:
        yield "ok", f"{places[0].directory} can be written to"


def agent(inputs: Inputs) -> Results:
    for each in inputs.agents:
        if each.get("starting") is True:
            yield "ok", f"pid {cell(each.get('pid'), '?')} is starting; run this again in a moment"
        else:
            yield from _of_agent(each)
    starts_agent = inputs.conf.starts_agent
    without_agent = list(unserved(inputs.survey)) if starts_agent else []
    for sentence in without_agent:
        yield "fail", sentence
    if not inputs.agents and not without_agent:
        yield "ok" if starts_agent else "warn", NO_AGENT[inputs.conf.agent]


def _of_agent(each: Mapping[str, Any]) -> Results:
    pid, version = cell(each.get("pid"), "?"), cell(each.get("version"), "?")
    if version == __version__:
        yield "ok", f"pid {pid}, version {version}; OTLP: {cell(each.get('export'), 'unknown')}"
    else:
        yield (
            "warn",
            f"pid {pid} has version {version}, this is {__version__}: end it, and the training "
            "starts another one",
        )
    if remark := cell(each.get("remark")):
        yield "warn", remark
    if not each.get("scrape"):
        yield "fail", "the agent has no endpoint: see its remark above, or its log agent.log"
    if unseen := plain.list_of(object, each.get("unseen")):
        yield (
            "warn",
            f"the agent cannot see the process of rank {', '.join(map(cell, unseen))}, so there "
            "are no process_* series for it. If it runs in another container, let them share "
            "process ids (shareProcessNamespace, hostPID, --pid=host); if on another node, "
            "OTEL_DDP_DIR must name a directory that each node has for itself, such as one in "
            "/dev/shm",
        )


def collector(inputs: Inputs) -> Results:
    """Send an empty request for each signal: metrics, traces, logs."""
    # Imported here, since it is slow, and since the other checks must run even if a package is
    # broken.
    from otel_ddp.agent.export.otlp.transport import Transport

    env, spools = inputs.env, shlex.quote(inputs.conf.spools)
    if not exported_signals(env):
        yield "ok", "switched off by OTEL_*_EXPORTER=none: scrape only"
        return
    if inputs.conf.offline:
        yield "ok", f"OTEL_DDP_AGENT=offline: nothing is sent before `otel-ddp replay {spools}`"
        return
    if not (signals := signals_with_endpoint(inputs.conf, env)):
        yield "ok", f"{NO_COLLECTOR}: scrape only"
        return
    conf = replace(inputs.conf, timeout_s=min(inputs.conf.timeout_s, _ANSWER_S))
    # Ignore the timeouts that are configured for exports: they are long, and a user waits.
    without_timeouts = {name: text for name, text in env.items() if not name.endswith("_TIMEOUT")}
    transport = Transport(conf, without_timeouts)
    try:
        # An empty body is a valid request for each signal.
        outcomes = {each: transport.send(each, b"") for each in signals}
    finally:
        transport.close()
    for each, outcome in outcomes.items():
        if outcome.kind == "delivered":
            yield "ok", f"{transport.destination} accepts {each}"
            continue
        variable = Variables(each, conf, env).endpoint_variable
        # Many collectors accept no traces or no logs, so this is only a warning. Metrics are
        # required.
        level: Level = "warn" if "not taken there" in outcome.why and each != "metrics" else "fail"
        yield (
            level,
            f"{each}: {outcome.why}; start the collector, correct {variable} (usually port 4318 "
            f"for http/protobuf, 4317 for grpc), or set OTEL_{each.upper()}_EXPORTER=none",
        )


CHECKS: tuple[Check, ...] = (python, torch, variables, journals, agent, collector)
