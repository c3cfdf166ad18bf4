"""Checks the agent, its endpoint and the collector that it sends to."""

from __future__ import annotations

import contextlib
import errno
import http.client
import re
import shlex
import socket
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from urllib.parse import urlsplit

from otel_ddp import __version__
from otel_ddp.agent.export.otlp import Outcome, Signal, Variables, exported_signals
from otel_ddp.cli.node.status import NO_AGENT, unserved
from otel_ddp.cli.setup.doctor.inputs import DoctorInputs, Finding, Findings, Level
from otel_ddp.cli.text import cell
from otel_ddp.settings import Settings

_LONGEST_RESPONSE = 64 * 1024 * 1024


def agent(inputs: DoctorInputs) -> Findings:
    for each in inputs.agents:
        pid, version = cell(each.get("pid"), "?"), cell(each.get("version"), "?")
        if each.get("starting") is True:
            yield Finding("ok", "agent", f"pid {pid} is starting; run this again in a moment")
            continue
        export = cell(each.get("export"), "unknown")
        if version == __version__:
            yield Finding("ok", "agent", f"pid {pid}, version {version}; OTLP: {export}")
        else:
            # A process id of another PID namespace belongs to another process here.
            ours = each.get("pid") == each.get("pid_here")
            how = f"with `kill {pid}`" if ours else "where it runs"
            sentence = (
                f"pid {pid} has version {version}, this is {__version__}: end it {how}, and the "
                "training starts another one"
            )
            yield Finding("warn", "agent", sentence)
        if remark := cell(each.get("remark")):
            yield Finding("warn", "agent", remark)
    starts_agent = inputs.conf.starts_agent
    without_agent = list(unserved(inputs.survey)) if starts_agent else []
    for sentence in without_agent:
        yield Finding("fail", "agent", sentence)
    if not inputs.agents and not without_agent:
        level: Level = "ok" if starts_agent else "warn"
        yield Finding(level, "agent", NO_AGENT[inputs.conf.agent])


def endpoint(inputs: DoctorInputs) -> Findings:
    for each in inputs.agents:
        url = each.get("scrape")
        if isinstance(url, str) and url.startswith(("http://", "https://")):
            yield _check_scrape(url, inputs.answer_s)
        elif each.get("starting") is not True:
            sentence = "the agent has no endpoint: see its remark above, or its log agent.log"
            yield Finding("fail", "endpoint", sentence)
    if not inputs.agents:
        yield _check_bind(inputs.conf)


def _check_scrape(url: str, answer_s: float) -> Finding:
    from otel_ddp.agent.scrape.endpoint import parse

    try:
        for path in ("/healthz", "/metrics"):
            with contextlib.closing(_connection(url, answer_s)) as connection:
                connection.request("GET", path)
                response = connection.getresponse()
                body = response.read(_LONGEST_RESPONSE)
            if response.status == HTTPStatus.UNAUTHORIZED and path == "/metrics":
                sentence = f"{url} answers those who have its token"
                return Finding("ok", "endpoint", sentence)
            if response.status != HTTPStatus.OK:
                sentence = (
                    f"{path} of {url} answers {response.status}: does it belong to another program?"
                )
                return Finding("fail", "endpoint", sentence)
        count = sum(1 for _ in parse(body.decode()))
    except ssl.SSLError as error:
        return Finding("fail", "endpoint", f"{url} does not speak TLS as it should ({error})")
    except (OSError, http.client.HTTPException) as error:
        why = "no answer in time" if isinstance(error, TimeoutError) else str(error)
        sentence = (
            f"{url} does not answer ({why}): the agent hangs, or is in another container with a "
            "network of its own"
        )
        return Finding("fail", "endpoint", sentence)
    except ValueError as error:
        return Finding("fail", "endpoint", f"the answer of {url} cannot be read ({error})")
    return Finding("ok", "endpoint", f"{url} answers with {count} samples")


def _connection(url: str, answer_s: float) -> http.client.HTTPConnection:
    """A connection without a proxy, as a scraper makes it."""
    where = urlsplit(url)
    if where.scheme == "http":
        return http.client.HTTPConnection(where.hostname or "", where.port, timeout=answer_s)
    # Our own agent; whether scrapers trust its certificate is their matter.
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection(
        where.hostname or "", where.port, timeout=answer_s, context=context
    )


def _check_bind(conf: Settings) -> Finding:
    from otel_ddp.agent.scrape import web_config

    host, port = conf.scrape_host, conf.scrape_port
    where = f"{host}:{port}"
    try:
        web_config.find(conf.web_config, host)
    except web_config.Refused as refused:
        return Finding("fail", "endpoint", f"/metrics will not be served: {refused}")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # The agent's choice where a name has addresses of both kinds.
        family, kind, _, _, address = min(found, key=lambda each: each[0] is not socket.AF_INET)
        with socket.socket(family, kind) as bound:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
    except (OSError, UnicodeError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EADDRINUSE, errno.EACCES):
            sentence = (
                f"{where} is taken or not allowed, so an agent will use the next free port: "
                "configure the scraper for it, or name another port in "
                "OTEL_EXPORTER_PROMETHEUS_PORT"
            )
            return Finding("warn", "endpoint", sentence)
        why = getattr(error, "strerror", None) or error
        sentence = f"{where} cannot be bound ({why}): correct OTEL_EXPORTER_PROMETHEUS_HOST"
        return Finding("fail", "endpoint", sentence)
    return Finding("ok", "endpoint", f"an agent can serve /metrics on {where}")


def collector(inputs: DoctorInputs) -> Findings:
    """Sends an empty request for each signal, and shows the answers."""
    # Imported here: it takes long, and a broken package must not end the other checks.
    from otel_ddp.agent.export.otlp.transport import Transport, why_none, with_endpoint

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
        variable = Variables(failed[0], conf, env).endpoint_variable
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
