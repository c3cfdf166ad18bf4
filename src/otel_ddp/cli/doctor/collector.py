"""Checks that the collector accepts each signal, and its clock."""

from __future__ import annotations

import contextlib
import functools
import http.client
import re
import shlex
import ssl
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from otel_ddp.agent.export.otlp.addresses import without_credentials
from otel_ddp.agent.export.otlp.outcome import Outcome, Signal, exported_signals
from otel_ddp.cli.doctor.inputs import DoctorInputs, Finding, Findings
from otel_ddp.cli.doctor.port_protocol import PortProtocol, protocol_of

if TYPE_CHECKING:
    from otel_ddp.agent.export.otlp.variables import Route

_PATHS = ("/v1/metrics", "/v1/traces", "/v1/logs")
_CLOCKS_S = 2.0
_PORT_S = 1.0

_ADVICE = (
    ("connection refused", "nothing listens there; start the collector, or correct {variable}"),
    ("no answer from", "the address is not routed, a firewall drops what is sent, or it hangs"),
    ("does not resolve", "correct the name in {variable}, or see to DNS"),
    ("has expired", "renew the collector's certificate, if the clock here is right"),
    ("verify failed", "name the authority that signed it in OTEL_EXPORTER_OTLP_CERTIFICATE"),
    ("TLS to", "does it speak TLS on this port? If not, {variable} begins with http://"),
    ("token rejected", "renew the token in it, or set one: authorization=Bearer%20<token>"),
    ("connection closed", "it may speak TLS (https://) or the other protocol on this port"),
    ("a redirect", "set {variable} to where it leads"),
    ("is no address", "correct {variable}"),
    ("no way to", "see to the network, or correct {variable}"),
)

# Errors behind which a port may speak another protocol; a second address may refuse.
_UNCLEAR = ("UNAVAILABLE", "TLS to", "connection refused", "connection closed", "no way to")


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
    conf = conf._replace(timeout_s=min(conf.timeout_s, inputs.answer_s))
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
    routes = {each: route(each, conf, env) for each in signals}
    receivers = {routes[each].endpoint for each in accepted}
    ask_port = functools.cache(
        functools.partial(protocol_of, limit_s=min(_PORT_S, inputs.answer_s))
    )
    for (there, why), failed in _failures(outcomes, routes).items():
        not_taken = "not taken there" in why or why[:3] in ("405", "501")
        if not_taken:
            advice = _advise_address(there, failed, there.endpoint in receivers, ask_port)
        elif (
            any(words in why for words in _UNCLEAR)
            and "verify failed" not in why
            and (mismatch := _protocol_mismatch(there, ask_port(there.endpoint)))
        ):
            why, advice = mismatch
        else:
            found_advice = (advice for words, advice in _ADVICE if words in why)
            advice = next(found_advice, "").format(variable=there.endpoint_variable)
        # Many collectors accept no traces or logs; one without metrics is of no use.
        only_warn = not_taken and "metrics" not in failed and "metrics" in accepted
        sentence = f"{_and(failed)} cannot be sent: {why}{f'; {advice}' if advice else ''}"
        yield Finding("warn" if only_warn else "fail", "collector", sentence)
    answered = accepted or any(outcome.why[:3].isdigit() for outcome in outcomes.values())
    if answered:
        yield from _clocks(transport.destination, inputs)


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _failures(
    outcomes: Mapping[Signal, Outcome], routes: Mapping[Signal, Route]
) -> dict[tuple[Route, str], list[str]]:
    """The signals that cannot be sent, by route and reason: each reason is shown once."""
    whys = {
        each: _common(outcome.why, each)
        for each, outcome in outcomes.items()
        if outcome.kind != "delivered"
    }
    failures: dict[tuple[Route, str], list[str]] = defaultdict(list)
    for each, why in whys.items():
        if "connection refused" in why:
            # A name may have two addresses, and gRPC reports the failure of either. If another
            # signal got an answer, something listens there.
            same = [whys[other] for other in whys if routes[other] == routes[each]]
            why = min(same, key=lambda reason: "connection refused" in reason)
        failures[routes[each], why].append(each)
    return failures


def _common(why: str, signal: str) -> str:
    """The reason without the name of the signal, so that equal reasons are shown once."""
    why = why.removeprefix(f"{signal} cannot be sent: ")
    return re.sub(rf"/v1/{signal}(?=[: ]|$)", "", why).replace(f": {signal} are", ": they are")


def _protocol_mismatch(there: Route, seen: PortProtocol) -> tuple[str, str] | None:
    """Reason and advice where the port speaks another protocol than this route."""
    grpc = there.protocol == "grpc"
    plain = there.endpoint.lower().startswith("http://")
    begin = f"begin {there.endpoint_variable} with http://"
    also = "" if plain else f", and {begin}"
    where = without_credentials(there.endpoint)
    if seen == "gRPC" and not grpc:
        return f"{where} speaks gRPC, not HTTP", f"set {there.protocol_variable}=grpc{also}"
    if seen == "gRPC" and not plain:
        return f"{where} speaks gRPC without TLS", begin
    if seen and seen != "gRPC" and grpc:
        advice = f"set {there.protocol_variable}=http/protobuf{also}, or name its port for gRPC"
        return f"{where} speaks HTTP, not gRPC", advice
    return None


def _advise_address(
    there: Route, signals: Sequence[str], receiver: bool, ask_port: Callable[[str], PortProtocol]
) -> str:
    """What to do where a server answers that does not accept these signals."""
    if there.is_general and urlsplit(there.endpoint).path.rstrip("/").endswith(_PATHS):
        return f"leave /v1/... out of {there.endpoint_variable}: it is added"
    if receiver:
        switch = ", ".join(_off(signals))
        return f"correct the path, or switch off what it does not accept: {switch}"
    if ask_port(there.endpoint) != "Prometheus":
        return (
            "the server there is no OTLP receiver: correct the host, the port (usually 4318 for "
            f"http/protobuf, 4317 for grpc) or the path in {there.endpoint_variable}"
        )
    path = f"/api/v1/otlp{'' if there.is_general else '/v1/metrics'}"
    steps = ["start it with --web.enable-otlp-receiver"]
    if "metrics" in signals:
        steps.append(f"set {there.endpoint_variable}={without_credentials(there.endpoint)}{path}")
    steps += [f"set {each}" for each in _off(signals) if "METRICS" not in each]
    return f"a Prometheus answers there, which accepts metrics only: {', '.join(steps)}"


def _off(signals: Sequence[str]) -> list[str]:
    return [f"OTEL_{each.upper()}_EXPORTER=none" for each in signals]


def _connection(url: str, inputs: DoctorInputs) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme != "https":
        return http.client.HTTPConnection(host, parts.port, timeout=inputs.answer_s)
    authority = inputs.env.get("OTEL_EXPORTER_OTLP_CERTIFICATE", "").strip() or None
    context = ssl.create_default_context(cafile=authority)
    return http.client.HTTPSConnection(host, parts.port, timeout=inputs.answer_s, context=context)


def _clocks(destination: str, inputs: DoctorInputs) -> Findings:
    try:
        connection = _connection(destination, inputs)
        with contextlib.closing(connection):
            began_at = time.time()
            # Without our headers: every answer has the time.
            connection.request("HEAD", "/v1/metrics")
            date = connection.getresponse().getheader("Date")
            ended_at = time.time()
        # The header has whole seconds, rounded down.
        collectors_s = parsedate_to_datetime(date or "").timestamp() + 0.5
    except (OSError, ValueError, TypeError, http.client.HTTPException):
        return  # no time in the answer, as with gRPC, or no answer
    ahead_s = collectors_s - (began_at + ended_at) / 2
    if abs(ahead_s) <= _CLOCKS_S:
        yield Finding("ok", "clocks", "the collector's clock and ours agree within 2 s")
        return
    relation = "ahead of" if ahead_s > 0 else "behind"
    sentence = (
        f"the collector's clock is {abs(ahead_s):.0f} s {relation} ours: points are drawn at "
        "the wrong time, or dropped as too old or too new; set both by NTP"
    )
    yield Finding("warn", "clocks", sentence)
