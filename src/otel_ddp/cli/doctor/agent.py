"""Checks the agent and its endpoint."""

from __future__ import annotations

import contextlib
import errno
import http.client
import socket
import ssl
from http import HTTPStatus
from urllib.parse import urlsplit

from otel_ddp import __version__
from otel_ddp.cli.doctor.inputs import DoctorInputs, Finding, Findings, Level
from otel_ddp.cli.status import NO_AGENT, unserved
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
    from otel_ddp.agent.scrape.families import parse

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
