"""Checks that the collector is there and takes what is sent, and its clock."""

from __future__ import annotations

import contextlib
import http.client
import re
import ssl
import time
from collections import defaultdict
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

from otel_ddp.cli.doctor.scene import Finding, Findings, Scene

_ENDPOINTS = tuple(
    f"OTEL_EXPORTER_OTLP_{part}ENDPOINT" for part in ("", "METRICS_", "TRACES_", "LOGS_")
)
_PATHS = ("/v1/metrics", "/v1/traces", "/v1/logs")
_CLOCKS_S = 2.0

_ADVICE = (
    ("connection refused", "nothing listens there; start the collector, or correct {variable}"),
    ("no answer from", "the address is not routed, a firewall drops what is sent, or it hangs"),
    ("does not resolve", "correct the name in {variable}, or see to DNS"),
    ("has expired", "renew the collector's certificate, if the clock here is right"),
    ("verify failed", "name the authority that signed it in OTEL_EXPORTER_OTLP_CERTIFICATE"),
    ("TLS to", "does it speak TLS on this port? If not, {variable} begins with http://"),
    ("token rejected", "renew the token in it, or set one: authorization=Bearer%20<token>"),
    ("connection closed", "it may speak TLS (https://) or the other protocol on this port"),
    ("not taken there", "correct the path, or switch off what it does not take: {switch}"),
    ("a redirect", "set {variable} to where it leads"),
    ("is no address", "correct {variable}"),
    ("no way to", "see to the network, or correct {variable}"),
)


def collector(scene: Scene) -> Findings:
    # These packages take long to import, and one that is broken must not end the other checks.
    from otel_ddp.agent.otlp.transport import SIGNALS, Transport, probe

    env = scene.env
    signals = [
        each
        for each in SIGNALS
        if env.get(f"OTEL_{each.upper()}_EXPORTER", "").strip().lower() != "none"
    ]
    if not signals:
        yield Finding("ok", "collector", "switched off by OTEL_*_EXPORTER=none: scrape only")
        return
    conf = scene.conf._replace(timeout_s=min(scene.conf.timeout_s, scene.answer_s))
    named = any(env.get(name, "").strip() for name in _ENDPOINTS)
    if not named:
        found = probe(env)
        if found is None:
            sentence = (
                "none is configured and none answers on loopback: scrape only; to export as "
                "well, set OTEL_EXPORTER_OTLP_ENDPOINT"
            )
            yield Finding("ok", "collector", sentence)
            return
        conf = conf._replace(endpoint=found, protocol="http/protobuf")
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
    refused: dict[str, list[str]] = defaultdict(list)
    for each, outcome in outcomes.items():
        if outcome.kind != "delivered":
            refused[_common(outcome.why, each)].append(each)
    for why, those in refused.items():
        # A collector without traces or logs is a common thing; without metrics it is of no use.
        spared = "not taken there" in why and "metrics" not in those and "metrics" in taken
        sentence = f"{_and(those)} cannot be sent: {why}{_advice(why, those, conf.endpoint)}"
        yield Finding("warn" if spared else "fail", "collector", sentence)
    spoke = taken or any(outcome.why[:3].isdigit() for outcome in outcomes.values())
    if spoke:
        yield from _clocks(transport.destination, scene)


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _common(why: str, signal: str) -> str:
    """The reason without what names the signal: one for all is told once."""
    why = why.removeprefix(f"{signal} cannot be sent: ")
    return re.sub(rf"/v1/{signal}(?=[: ])", "", why).replace(f": {signal} are", ": they are")


def _advice(why: str, signals: Sequence[str], endpoint: str) -> str:
    advice = next((advice for words, advice in _ADVICE if words in why), "")
    path = urlsplit(endpoint).path.rstrip("/")
    if "not taken there" in why and path.endswith(_PATHS):
        advice = "leave /v1/... out of {variable}: it is added"
    switch = ", ".join(f"OTEL_{each.upper()}_EXPORTER=none" for each in signals)
    told = advice.format(variable="OTEL_EXPORTER_OTLP_ENDPOINT", switch=switch)
    return f"; {told}" if told else ""


def _connection(url: str, scene: Scene) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme != "https":
        return http.client.HTTPConnection(host, parts.port, timeout=scene.answer_s)
    authority = scene.env.get("OTEL_EXPORTER_OTLP_CERTIFICATE", "").strip() or None
    context = ssl.create_default_context(cafile=authority)
    return http.client.HTTPSConnection(host, parts.port, timeout=scene.answer_s, context=context)


def _clocks(destination: str, scene: Scene) -> Findings:
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
