"""Checks that the collector is there and takes what is sent, and its clock."""

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
from typing import NamedTuple
from urllib.parse import urlsplit

from otel_ddp.agent.export.otlp.outcome import (
    Outcome,
    Signal,
    exported_signals,
    without_credentials,
)
from otel_ddp.cli.doctor.port import Spoken, spoken
from otel_ddp.cli.doctor.scene import DoctorInputs, Finding, Findings
from otel_ddp.settings import Settings

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

# What a port says that speaks something else, with an address of it that nobody listens on as well.
_UNCLEAR = ("UNAVAILABLE", "TLS to", "connection refused", "connection closed", "no way to")


class Way(NamedTuple):
    """Where a signal goes, and which variables say so."""

    url: str
    protocol: str
    endpoint_variable: str
    protocol_variable: str


def collector(scene: DoctorInputs) -> Findings:
    # These packages take long to import, and one that is broken must not end the other checks.
    from otel_ddp.agent.export.otlp.transport import Transport, with_endpoint

    env = scene.env
    signals = exported_signals(env)
    if not signals:
        yield Finding("ok", "collector", "switched off by OTEL_*_EXPORTER=none: scrape only")
        return
    if scene.conf.offline:
        sentence = (
            "OTEL_DDP_AGENT=offline: nothing is sent before "
            f"`otel-ddp replay {shlex.quote(scene.conf.spools)}`"
        )
        yield Finding("ok", "collector", sentence)
        return
    conf = with_endpoint(scene.conf, env)
    if conf is None:
        sentence = (
            "none is configured and none answers on loopback: scrape only; to export as well, set "
            "OTEL_EXPORTER_OTLP_ENDPOINT"
        )
        yield Finding("ok", "collector", sentence)
        return
    named = conf is scene.conf
    conf = conf._replace(timeout_s=min(conf.timeout_s, scene.answer_s))
    # Nobody who looks on waits as long as an export may.
    patient = {name: text for name, text in env.items() if not name.endswith("_TIMEOUT")}
    transport = Transport(conf, patient)
    try:
        # No bytes are a request with nothing in it, for each of the signals.
        outcomes = {each: transport.send(each, b"") for each in signals}
    finally:
        transport.close()
    taken = [each for each, outcome in outcomes.items() if outcome.kind == "delivered"]
    if taken:
        by_itself = "" if named else ", which was found on loopback by itself"
        sentence = f"{transport.destination} takes {_and(taken)}{by_itself}"
        yield Finding("ok", "collector", sentence)
    ways = {each: _way(each, conf, env) for each in signals}
    receivers = {ways[each].url for each in taken}
    look = functools.cache(functools.partial(spoken, limit_s=min(_PORT_S, scene.answer_s)))
    for (way, why), those in _refused(outcomes, ways).items():
        not_taken = "not taken there" in why or why[:3] in ("405", "501")
        if not_taken:
            advice = _where_else(way, those, way.url in receivers, look)
        elif (
            any(words in why for words in _UNCLEAR)
            and "verify failed" not in why
            and (told := _another(way, look(way.url)))
        ):
            why, advice = told
        else:
            found_advice = (advice for words, advice in _ADVICE if words in why)
            advice = next(found_advice, "").format(variable=way.endpoint_variable)
        # A collector without traces or logs is a common thing; without metrics it is of no use.
        spared = not_taken and "metrics" not in those and "metrics" in taken
        sentence = f"{_and(those)} cannot be sent: {why}{f'; {advice}' if advice else ''}"
        yield Finding("warn" if spared else "fail", "collector", sentence)
    spoke = taken or any(outcome.why[:3].isdigit() for outcome in outcomes.values())
    if spoke:
        yield from _clocks(transport.destination, scene)


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _way(signal: str, conf: Settings, env: Mapping[str, str]) -> Way:
    general, own = "OTEL_EXPORTER_OTLP_", f"OTEL_EXPORTER_OTLP_{signal.upper()}_"
    named = env.get(f"{own}ENDPOINT", "").strip()
    spoken_by_it = env.get(f"{own}PROTOCOL", "").strip().lower()
    protocol = spoken_by_it or conf.protocol
    usual = f"http://localhost:{4317 if protocol == 'grpc' else 4318}"
    return Way(
        named or conf.endpoint or usual,
        protocol,
        f"{own if named else general}ENDPOINT",
        f"{own if spoken_by_it else general}PROTOCOL",
    )


def _refused(
    outcomes: Mapping[Signal, Outcome], ways: Mapping[Signal, Way]
) -> dict[tuple[Way, str], list[str]]:
    """The signals that do not get through, by their way and the reason: each is told once."""
    whys = {
        each: _common(outcome.why, each)
        for each, outcome in outcomes.items()
        if outcome.kind != "delivered"
    }
    refused: dict[tuple[Way, str], list[str]] = defaultdict(list)
    for each, why in whys.items():
        if "connection refused" in why:
            # A name may have two addresses, and gRPC tells what became of either. Where another
            # signal met somebody, somebody is there.
            same = [whys[other] for other in whys if ways[other] == ways[each]]
            why = min(same, key=lambda said: "connection refused" in said)
        refused[ways[each], why].append(each)
    return refused


def _common(why: str, signal: str) -> str:
    """The reason without what names the signal: one for all is told once."""
    why = why.removeprefix(f"{signal} cannot be sent: ")
    return re.sub(rf"/v1/{signal}(?=[: ]|$)", "", why).replace(f": {signal} are", ": they are")


def _another(way: Way, seen: Spoken) -> tuple[str, str] | None:
    """Reason and advice where something else is spoken there than on this way."""
    grpc = way.protocol == "grpc"
    plain = way.url.lower().startswith("http://")
    begin = f"begin {way.endpoint_variable} with http://"
    also = "" if plain else f", and {begin}"
    where = without_credentials(way.url)
    if seen == "gRPC" and not grpc:
        return f"{where} speaks gRPC, not HTTP", f"set {way.protocol_variable}=grpc{also}"
    if seen == "gRPC" and not plain:
        return f"{where} speaks gRPC without TLS", begin
    if seen and seen != "gRPC" and grpc:
        advice = f"set {way.protocol_variable}=http/protobuf{also}, or name its port for gRPC"
        return f"{where} speaks HTTP, not gRPC", advice
    return None


def _where_else(
    way: Way, signals: Sequence[str], receiver: bool, look: Callable[[str], Spoken]
) -> str:
    """What to do where somebody answers who does not take them."""
    general = way.endpoint_variable == "OTEL_EXPORTER_OTLP_ENDPOINT"
    if general and urlsplit(way.url).path.rstrip("/").endswith(_PATHS):
        return f"leave /v1/... out of {way.endpoint_variable}: it is added"
    if receiver:
        switch = ", ".join(_off(signals))
        return f"correct the path, or switch off what it does not take: {switch}"
    if look(way.url) != "Prometheus":
        return (
            "what answers there is no OTLP receiver: correct the host, the port (usually 4318 "
            f"for http/protobuf, 4317 for grpc) or the path in {way.endpoint_variable}"
        )
    path = f"/api/v1/otlp{'' if general else '/v1/metrics'}"
    steps = ["start it with --web.enable-otlp-receiver"]
    if "metrics" in signals:
        steps.append(f"set {way.endpoint_variable}={without_credentials(way.url)}{path}")
    steps += [f"set {each}" for each in _off(signals) if "METRICS" not in each]
    return f"a Prometheus answers there, which takes metrics only: {', '.join(steps)}"


def _off(signals: Sequence[str]) -> list[str]:
    return [f"OTEL_{each.upper()}_EXPORTER=none" for each in signals]


def _connection(url: str, scene: DoctorInputs) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme != "https":
        return http.client.HTTPConnection(host, parts.port, timeout=scene.answer_s)
    authority = scene.env.get("OTEL_EXPORTER_OTLP_CERTIFICATE", "").strip() or None
    context = ssl.create_default_context(cafile=authority)
    return http.client.HTTPSConnection(host, parts.port, timeout=scene.answer_s, context=context)


def _clocks(destination: str, scene: DoctorInputs) -> Findings:
    try:
        connection = _connection(destination, scene)
        with contextlib.closing(connection):
            asked_at = time.time()
            # Without our headers: any answer has the time.
            connection.request("HEAD", "/v1/metrics")
            said = connection.getresponse().getheader("Date")
            answered_at = time.time()
        # It has whole seconds, cut off.
        there = parsedate_to_datetime(said or "").timestamp() + 0.5
    except (OSError, ValueError, TypeError, http.client.HTTPException):
        return  # it has no time to tell, as with gRPC, or not to us
    ahead_s = there - (asked_at + answered_at) / 2
    if abs(ahead_s) <= _CLOCKS_S:
        yield Finding("ok", "clocks", "the collector's clock and ours agree within 2 s")
        return
    way = "ahead of" if ahead_s > 0 else "behind"
    sentence = (
        f"the collector's clock is {abs(ahead_s):.0f} s {way} ours: points are drawn at the wrong "
        "time, or dropped as too old or too new; let NTP set both"
    )
    yield Finding("warn", "clocks", sentence)
