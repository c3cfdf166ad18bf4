"""Checks that the collector accepts each signal: sends an empty request, and shows its answer."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

from otel_ddp.agent.export.otlp.outcome import Outcome, Signal, exported_signals
from otel_ddp.cli.doctor.inputs import DoctorInputs, Finding, Findings


def collector(inputs: DoctorInputs) -> Findings:
    # Imported here: it takes long, and a broken package must not end the other checks.
    from otel_ddp.agent.export.otlp.transport import Transport, why_none, with_endpoint
    from otel_ddp.agent.export.otlp.variables import route

    env = inputs.env
    signals = exported_signals(env)
    if not signals:
        yield Finding("ok", "collector", "switched off by OTEL_*_EXPORTER=none: scrape only")
        return
    if inputs.conf.offline:
        sentence = (
            "OTEL_DDP_AGENT=offline: nothing is sent before "
            f"`otel-ddp replay {shlex.quote(inputs.conf.spools)}`"
        )
        yield Finding("ok", "collector", sentence)
        return
    conf = with_endpoint(inputs.conf, env)
    if conf is None:
        sentence = f"{why_none()}: scrape only; to export as well, set OTEL_EXPORTER_OTLP_ENDPOINT"
        yield Finding("ok", "collector", sentence)
        return
    named = conf is inputs.conf
    conf = replace(conf, timeout_s=min(conf.timeout_s, inputs.answer_s))
    # A person waits for the answer, so the long timeouts of an export do not count.
    without_timeouts = {name: text for name, text in env.items() if not name.endswith("_TIMEOUT")}
    transport = Transport(conf, without_timeouts)
    try:
        # An empty body is a request with nothing in it, for each of the signals.
        outcomes = {each: transport.send(each, b"") for each in signals}
    finally:
        transport.close()
    accepted = [each for each, outcome in outcomes.items() if outcome.kind == "delivered"]
    if accepted:
        by_itself = "" if named else ", which was found on loopback"
        sentence = f"{transport.destination} accepts {_and(accepted)}{by_itself}"
        yield Finding("ok", "collector", sentence)
    for why, failed in _failures(outcomes).items():
        variable = route(failed[0], conf, env).endpoint_variable
        # Many collectors accept no traces or logs; one without metrics is of no use.
        only_warn = "not taken there" in why and "metrics" in accepted
        switches = ", ".join(f"OTEL_{each.upper()}_EXPORTER=none" for each in failed)
        advice = f"set {switches}, or " if only_warn else "start the collector, or "
        sentence = (
            f"{_and(failed)} cannot be sent: {why}; {advice}correct {variable} (usually port 4318 "
            "for http/protobuf, 4317 for grpc)"
        )
        yield Finding("warn" if only_warn else "fail", "collector", sentence)


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _failures(outcomes: Mapping[Signal, Outcome]) -> dict[str, list[Signal]]:
    """The signals that cannot be sent, by reason: each reason is shown once."""
    failures: dict[str, list[Signal]] = {}
    for signal, outcome in outcomes.items():
        if outcome.kind != "delivered":
            why = outcome.why.removeprefix(f"{signal} cannot be sent: ")
            why = re.sub(rf"/v1/{signal}(?=[: ]|$)", "", why)
            why = why.replace(f": {signal} are", ": they are")
            failures.setdefault(why, []).append(signal)
    return failures
