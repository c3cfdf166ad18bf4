"""Checks the agent, its endpoint and the collector that it sends to."""

from __future__ import annotations

import shlex
import socket
from dataclasses import replace
from http import HTTPStatus

from otel_ddp import __version__
from otel_ddp.agent.export.otlp import (
    NO_COLLECTOR,
    Signal,
    Variables,
    exported_signals,
    signals_with_endpoint,
)
from otel_ddp.agent.notify.addresses import Address
from otel_ddp.cli import fetch
from otel_ddp.cli.node.doctor.machine import Inputs, Level, Said
from otel_ddp.cli.node.status import NO_AGENT, unserved
from otel_ddp.cli.text import cell


def agent(inputs: Inputs) -> Said:
    for each in inputs.agents:
        pid, version = cell(each.get("pid"), "?"), cell(each.get("version"), "?")
        if each.get("starting") is True:
            yield "ok", f"pid {pid} is starting; run this again in a moment"
            continue
        if version == __version__:
            export = cell(each.get("export"), "unknown")
            yield "ok", f"pid {pid}, version {version}; OTLP: {export}"
        else:
            # A process id of another PID namespace belongs to another process here.
            ours = each.get("pid") == each.get("pid_here")
            how = f"with `kill {pid}`" if ours else "where it runs"
            yield (
                "warn",
                f"pid {pid} has version {version}, this is {__version__}: end it {how}, and the "
                "training starts another one",
            )
        if remark := cell(each.get("remark")):
            yield "warn", remark
    starts_agent = inputs.conf.starts_agent
    without_agent = list(unserved(inputs.survey)) if starts_agent else []
    for sentence in without_agent:
        yield "fail", sentence
    if not inputs.agents and not without_agent:
        yield "ok" if starts_agent else "warn", NO_AGENT[inputs.conf.agent]


def endpoint(inputs: Inputs) -> Said:
    for each in inputs.agents:
        url = each.get("scrape")
        if isinstance(url, str) and url.startswith(("http://", "https://")):
            yield _scraped(url, inputs.answer_s)
        elif each.get("starting") is not True:
            yield "fail", "the agent has no endpoint: see its remark above, or its log agent.log"
    if not inputs.agents:
        yield _bound(inputs)


def _scraped(url: str, answer_s: float) -> tuple[Level, str]:
    try:
        status, _ = fetch.get(url, answer_s=answer_s)
    except fetch.NoAnswer as why:
        return "fail", (
            f"{url} does not answer ({why}): the agent hangs, or is in another container with a "
            "network of its own"
        )
    if status == HTTPStatus.UNAUTHORIZED:
        return "ok", f"{url} answers those who have its token"
    if status != HTTPStatus.OK:
        return "fail", f"{url} answers {status}: does it belong to another program?"
    return "ok", f"{url} answers"


def _bound(inputs: Inputs) -> tuple[Level, str]:
    from otel_ddp.agent.scrape import access

    host, port = inputs.conf.scrape_host, inputs.conf.scrape_port
    try:
        access.find_token(inputs.conf.scrape_token_file, host)
    except access.Refused as refused:
        return "fail", f"/metrics will not be served: {refused}"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except (OSError, UnicodeError) as error:
        return "warn", (
            f"{host}:{port} cannot be bound ({error}): an agent uses the next free port; name "
            "another one in OTEL_EXPORTER_PROMETHEUS_PORT or _HOST"
        )
    return "ok", f"an agent can serve /metrics on {host}:{port}"


def notify(inputs: Inputs) -> Said:
    addresses = [*map(Address, inputs.conf.notify)]
    for each in inputs.agents:
        if told := cell(each.get("notify")):
            yield "warn" if "last failure" in told else "ok", told
    if not inputs.agents:
        shown = ", ".join(each.shown for each in addresses)
        off = "off: OTEL_DDP_NOTIFY names no address"
        yield "ok", f"an agent tells {shown}; `otel-ddp notify` tries it" if addresses else off
    for address in addresses:
        if address.problem:
            yield "fail", f"{address.shown}: {address.problem}"


def collector(inputs: Inputs) -> Said:
    """Sends an empty request for each signal, and shows the answers."""
    # Imported here: it takes long, and a broken package must not end the other checks.
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
    conf = replace(inputs.conf, timeout_s=min(inputs.conf.timeout_s, inputs.answer_s))
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
        yield "ok", f"{transport.destination} accepts {', '.join(accepted)}"
    failed: dict[str, list[Signal]] = {}
    for each, outcome in outcomes.items():
        if each not in accepted:
            failed.setdefault(outcome.why, []).append(each)
    for why, them in failed.items():
        variable = Variables(them[0], conf, env).endpoint_variable
        # Many collectors accept no traces or logs; one without metrics is of no use.
        only_warn = "not taken there" in why and "metrics" in accepted
        switches = ", ".join(f"OTEL_{each.upper()}_EXPORTER=none" for each in them)
        yield (
            "warn" if only_warn else "fail",
            f"{', '.join(them)}: {why}; {f'set {switches}' if only_warn else 'start the collector'}"
            f", or correct {variable} (usually port 4318 for http/protobuf, 4317 for grpc)",
        )
