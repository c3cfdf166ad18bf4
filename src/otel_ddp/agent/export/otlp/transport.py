"""Sends prepared OTLP requests as the variables OTEL_* say, and learns each outcome."""

from __future__ import annotations

import http.client
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from ipaddress import IPv4Address
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from otel_ddp import errors
from otel_ddp.agent.export.otlp import (
    HTTP,
    STANDARD_PORTS,
    Outcome,
    Signal,
    Variables,
    one_line,
    without_credentials,
)
from otel_ddp.agent.node import socket_owners
from otel_ddp.settings import SIGNALS, Settings, value

if TYPE_CHECKING:
    from otel_ddp.agent.export.otlp.over_grpc import GrpcSender
    from otel_ddp.agent.export.otlp.over_http import HttpSender

# What is raised when a variable, a file or a package is wrong.
_UNUSABLE = (ValueError, OSError, RuntimeError, ImportError, LookupError, TypeError)

_PROC = Path("/proc/net")
_LOOPBACK = IPv4Address("127.0.0.1")
_ENDPOINTS = tuple(f"OTEL_EXPORTER_OTLP_{part}ENDPOINT" for part in SIGNALS)


class Transport:
    """Sends each signal by the protocol and to the address that its variables name.

    Nothing is raised: every failure is an Outcome. One thread sends at a time for each signal.
    """

    def __init__(
        self,
        settings: Settings,
        env: Mapping[str, str] | None = None,
        *,
        ports: Mapping[str, int] = STANDARD_PORTS,
    ) -> None:
        """*ports*: of this machine, for a signal whose endpoint is not configured."""
        self._settings = settings
        self._ports = ports
        self._env = os.environ if env is None else env
        self._senders: dict[Signal, HttpSender | GrpcSender] = {}
        _silence_libraries()

    @property
    def destination(self) -> str:
        """Where metrics go, without credentials."""
        return without_credentials(self._variables("metrics").url)

    def _variables(self, signal: Signal) -> Variables:
        return Variables(signal, self._settings, self._env, self._ports)

    def send(self, signal: Signal, body: bytes) -> Outcome:
        """Make one attempt, which takes no longer than the timeout."""
        try:
            there = self._variables(signal)
            # Asked each time: the program may have ended, and another one may have its port.
            if not there.named and not is_trusted(urlsplit(there.endpoint).port or 0):
                return Outcome("retry", f"no collector of ours or of root at {there.endpoint}")
            if signal not in self._senders:
                self._senders[signal] = self._open(there)
            return self._senders[signal].send(body)
        except _UNUSABLE as error:
            return Outcome("retry", f"{signal} cannot be sent: {one_line(str(error))}")

    def close(self) -> None:
        """Close every connection."""
        for sender in self._senders.values():
            sender.close()
        self._senders.clear()

    def _open(self, there: Variables) -> HttpSender | GrpcSender:
        if doubt := there.doubt():
            errors.warn_once(doubt, "%s", doubt)
        if there.protocol == "grpc":
            from otel_ddp.agent.export.otlp.over_grpc import GrpcSender

            return GrpcSender(there)
        from otel_ddp.agent.export.otlp.over_http import HttpSender

        return HttpSender(there)


def with_endpoint(settings: Settings, env: Mapping[str, str] = os.environ) -> Settings | None:
    """The settings with a collector that was named or answers on loopback; None: there is none."""
    if any(env.get(name, "").strip() for name in _ENDPOINTS):
        return settings
    # A server of HTTP on the standard port would not understand gRPC.
    found = value("OTEL_EXPORTER_OTLP_PROTOCOL", env) != "grpc" and answers_on_loopback()
    return replace(settings, endpoint="", protocol=HTTP) if found else None


def why_none(port: int = STANDARD_PORTS[HTTP]) -> str:
    """Why there is no collector where none is configured."""
    if is_foreign(port):
        return (
            f"no collector is configured, and what listens on 127.0.0.1:{port} belongs to another "
            f"user (OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:{port} would use it)"
        )
    return "no collector is configured and none answers on loopback"


def answers_on_loopback(port: int = STANDARD_PORTS[HTTP], timeout_s: float = 0.5) -> bool:
    """Whether a collector of ours or of root answers on this port.

    Any user may listen there, so a collector of another user has to be named.
    """
    if not is_trusted(port):
        return False
    # Never through a proxy and without our headers: any program may listen on the port.
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        # An empty body is an ExportMetricsServiceRequest with nothing in it.
        connection.request(
            "POST", "/v1/metrics", body=b"", headers={"Content-Type": "application/x-protobuf"}
        )
        response = connection.getresponse()
        kind = response.getheader("Content-Type", "")
        return response.status == 200 and kind.startswith("application/x-protobuf")
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _silence_libraries() -> None:
    """They log lines for each failure, some with credentials; we log one."""
    for name in ("opentelemetry.util.re", "urllib3"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    # Read when grpc is imported: its core prints a line of its own for each failed handshake.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def is_trusted(port: int, proc: Path = _PROC) -> bool:
    """Whether root or our own user listens there, and no other user; False where it cannot be told.

    Every user may listen on a port above 1023, and would get what is sent there.
    """
    owners = set(_owners(port, proc))
    return bool(owners) and owners <= socket_owners.trusted()


def is_foreign(port: int, proc: Path = _PROC) -> bool:
    """Whether another user listens there."""
    return not set(_owners(port, proc)) <= socket_owners.trusted()


def _owners(port: int, proc: Path) -> Iterator[int]:
    # Only those that get connections to 127.0.0.1.
    for each in socket_owners.rows(proc, only_listeners=True):
        if each.port == port and (each.address.is_unspecified or each.address == _LOOPBACK):
            yield each.uid
