"""Checks the agent and its endpoint."""

from __future__ import annotations

import contextlib
import errno
import http.client
import socket
from urllib.parse import urlsplit

from otel_ddp import __version__
from otel_ddp.cli.doctor.scene import DoctorInputs, Finding, Findings
from otel_ddp.cli.status import NO_AGENT, cell, unserved

_LONGEST_ANSWER = 64 * 1024 * 1024


def agent(scene: DoctorInputs) -> Findings:
    for each in scene.agents:
        pid, version = cell(each.get("pid"), "?"), cell(each.get("version"), "?")
        if each.get("starting") is True:
            yield Finding("ok", "agent", f"pid {pid} is starting; ask again in a moment")
            continue
        export = cell(each.get("export"), "unknown")
        if version == __version__:
            yield Finding("ok", "agent", f"pid {pid}, version {version}; OTLP: {export}")
        else:
            # A number of another PID namespace is a stranger's here.
            ours = each.get("pid") == each.get("pid_here")
            how = f"with `kill {pid}`" if ours else "where it runs"
            sentence = (
                f"pid {pid} is of version {version}, this is {__version__}: end it {how}, and the "
                "training starts another one"
            )
            yield Finding("warn", "agent", sentence)
        if remark := cell(each.get("remark")):
            yield Finding("warn", "agent", remark)
    conf = scene.conf.agent
    in_vain = list(unserved(scene.survey)) if scene.conf.starts_agent else []
    for sentence in in_vain:
        yield Finding("fail", "agent", sentence)
    if scene.agents or in_vain:
        return
    yield Finding("ok" if scene.conf.starts_agent else "warn", "agent", NO_AGENT[conf])


def endpoint(scene: DoctorInputs) -> Findings:
    for each in scene.agents:
        url = each.get("scrape")
        if isinstance(url, str) and url.startswith("http://"):
            yield _scraped(url, scene.answer_s)
        elif each.get("starting") is not True:
            sentence = "the agent has no endpoint; see its remark above, or its log agent.log"
            yield Finding("fail", "endpoint", sentence)
    if not scene.agents:
        yield _to_be_bound(scene.conf.scrape_host, scene.conf.scrape_port)


def _scraped(url: str, answer_s: float) -> Finding:
    from otel_ddp.agent.scrape.exposition import parse

    try:
        host = urlsplit(url).hostname or ""
        for path in ("/healthz", "/metrics"):
            # Without a proxy, as whoever scrapes does it.
            connection = http.client.HTTPConnection(host, urlsplit(url).port, timeout=answer_s)
            with contextlib.closing(connection):
                connection.request("GET", path)
                response = connection.getresponse()
                body = response.read(_LONGEST_ANSWER)
            if response.status != 200:
                sentence = f"{path} of {url} answers {response.status}: is it another program's?"
                return Finding("fail", "endpoint", sentence)
        count = sum(1 for _ in parse(body.decode()))
    except (OSError, http.client.HTTPException) as error:
        why = "no answer in time" if isinstance(error, TimeoutError) else str(error)
        sentence = (
            f"{url} does not answer ({why}): the agent hangs, or is in another container with a "
            "network of its own"
        )
        return Finding("fail", "endpoint", sentence)
    except ValueError as error:
        return Finding("fail", "endpoint", f"what {url} answers cannot be read ({error})")
    return Finding("ok", "endpoint", f"{url} answers with {count} samples")


def _to_be_bound(host: str, port: int) -> Finding:
    where = f"{host}:{port}"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # As the agent chooses where a name has addresses of both kinds.
        family, kind, _, _, address = min(found, key=lambda each: each[0] is not socket.AF_INET)
        with socket.socket(family, kind) as bound:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
    except (OSError, UnicodeError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EADDRINUSE, errno.EACCES):
            sentence = (
                f"{where} is taken or not allowed, so an agent will use the next free port: tell "
                "the scraper, or choose another one in OTEL_EXPORTER_PROMETHEUS_PORT"
            )
            return Finding("warn", "endpoint", sentence)
        why = getattr(error, "strerror", None) or error
        sentence = f"{where} cannot be bound ({why}): correct OTEL_EXPORTER_PROMETHEUS_HOST"
        return Finding("fail", "endpoint", sentence)
    return Finding("ok", "endpoint", f"an agent can serve /metrics on {where}")
