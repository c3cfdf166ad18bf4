"""Sends prepared OTLP requests through the official exporters, and learns what became of them.

The exporters own the OTEL_* variables: headers, certificates, client keys, compression, credential
providers, channels. They are handed nothing to export: what goes over the wire is put in at their
seam (`over_http.Courier`, `over_grpc.Witness`), and the answer is read there as well, because an
exporter only says success or failure, and counts a redirect as a success.
"""

from __future__ import annotations

import http.client
import logging
import os
from collections.abc import Mapping
from typing import Protocol

from opentelemetry.util.re import parse_env_headers

from otel_ddp.agent.export.otlp.outcome import SIGNALS, Outcome, Signal, said, shown
from otel_ddp.settings import Settings

log = logging.getLogger("otel_ddp.agent")

# What an exporter may throw when a variable, a file or a package is not what it should be.
_UNUSABLE = (ValueError, OSError, RuntimeError, ImportError, LookupError, TypeError)

_ENDPOINTS = tuple(
    f"OTEL_EXPORTER_OTLP_{part}ENDPOINT" for part in ("", "METRICS_", "TRACES_", "LOGS_")
)
_FILES = ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE")


class Line(Protocol):
    """One signal's way to the collector."""

    def send(self, body: bytes) -> Outcome: ...

    def close(self) -> None: ...


class Transport:
    """Sends, for each signal by the protocol and to the address that its variables name.

    Nothing is raised: whatever is wrong is an Outcome. One thread sends at a time for each signal.
    """

    def __init__(self, settings: Settings, env: Mapping[str, str] | None = None) -> None:
        self._settings = settings
        self._env = os.environ if env is None else env
        self._lines: dict[Signal, Line] = {}
        self._said: set[str] = set()
        self._closed = False
        _quiet()

    @property
    def destination(self) -> str:
        """Where metrics go, as it may be shown."""
        return shown(self._url("metrics", self._protocol("metrics")))

    def address(self, signal: Signal) -> str:
        """Where a signal goes, as it may be shown."""
        return shown(self._url(signal, self._protocol(signal)), path=True)

    def send(self, signal: Signal, body: bytes) -> Outcome:
        """One attempt, no longer than the timeout."""
        if self._closed:
            return Outcome("retry", "the transport is closed")
        try:
            line = self._lines.get(signal) or self._open(signal)
            return line.send(body)
        except _UNUSABLE as error:
            return Outcome("retry", f"{signal} cannot be sent: {said(str(error))}")

    def close(self) -> None:
        """Let go of every connection."""
        self._closed = True
        for line in self._lines.values():
            line.close()
        self._lines.clear()

    def _open(self, signal: Signal) -> Line:
        protocol = self._protocol(signal)
        url = self._url(signal, protocol)
        self._check_files(signal, url)
        self._check_headers(signal)
        timeout_s, compression = self._timeout_s(signal), self._compression(signal)
        line: Line
        if protocol == "grpc":
            from otel_ddp.agent.export.otlp.over_grpc import GrpcLine

            line = GrpcLine(signal, url, timeout_s, compression)
        elif protocol == "http/protobuf":
            from otel_ddp.agent.export.otlp.over_http import HttpLine

            line = HttpLine(signal, url, timeout_s, compression)
        else:
            raise ValueError(
                f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL must be http/protobuf or grpc, "
                f"got {protocol!r}"
            )
        self._lines[signal] = line
        return line

    def _variable(self, signal: Signal, name: str) -> tuple[str, str]:
        """The signal's own variable, else the general one: name and text."""
        general = f"OTEL_EXPORTER_OTLP_{name}"
        own = f"OTEL_EXPORTER_OTLP_{signal.upper()}_{name}"
        text = self._env.get(own, "").strip()
        return (own, text) if text else (general, self._env.get(general, "").strip())

    def _protocol(self, signal: Signal) -> str:
        own = self._env.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", "").strip().lower()
        return own or self._settings.protocol

    def _url(self, signal: Signal, protocol: str) -> str:
        if own := self._env.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "").strip():
            return own
        if protocol == "grpc":
            return self._settings.endpoint or "http://localhost:4317"
        base = self._settings.endpoint or "http://localhost:4318"
        return f"{base.rstrip('/')}/v1/{signal}"

    def _timeout_s(self, signal: Signal) -> float:
        variable = f"OTEL_EXPORTER_OTLP_{signal.upper()}_TIMEOUT"
        text = self._env.get(variable, "").strip()
        if not text:
            return self._settings.timeout_s
        try:
            # Milliseconds, as the specification says; the exporters would read seconds.
            timeout_s = float(text) / 1000.0
        except ValueError:
            timeout_s = -1.0
        if 0 < timeout_s < 1e9:
            return timeout_s
        self._say_once(
            f"{variable} must be a number of milliseconds above 0, got {text!r}; "
            f"{self._settings.timeout_s * 1000:g} is used."
        )
        return self._settings.timeout_s

    def _compression(self, signal: Signal) -> str:
        variable, text = self._variable(signal, "COMPRESSION")
        word = text.lower() or "none"
        if word in ("none", "gzip", "deflate"):
            return word
        self._say_once(
            f"{variable} must be none, gzip or deflate, got {text!r}; nothing is compressed."
        )
        return "none"

    def _check_files(self, signal: Signal, url: str) -> None:
        """A missing file may appear later; the exporters do not say clearly that one is missing."""
        if url.startswith("http://"):
            return
        for name in _FILES:
            variable, path = self._variable(signal, name)
            if path:
                try:
                    with open(path, "rb"):
                        pass
                except OSError as error:
                    raise OSError(f"{variable}: {path}: {error.strerror}") from error

    def _check_headers(self, signal: Signal) -> None:
        variable, text = self._variable(signal, "HEADERS")
        for number, entry in enumerate(text.split(","), start=1):
            if entry.strip() and not parse_env_headers(entry, liberal=True):
                # Never the entry itself: it may be a token that lost its name.
                self._say_once(f"{variable}: entry {number} is not name=value and is left out.")

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            log.warning("%s", text)


def addressed(settings: Settings, env: Mapping[str, str] | None = None) -> Settings | None:
    """The settings with the collector that was named or answers on loopback; None: neither."""
    env = os.environ if env is None else env
    if any(env.get(name, "").strip() for name in _ENDPOINTS):
        return settings
    found = probe(env)
    if found is None:
        return None
    return settings._replace(endpoint=found, protocol="http/protobuf")


def probe(
    env: Mapping[str, str] | None = None, *, port: int = 4318, timeout_s: float = 0.5
) -> str | None:
    """The address of a collector on this machine's standard port, if one answers there."""
    env = os.environ if env is None else env
    if env.get("OTEL_EXPORTER_OTLP_PROTOCOL", "").strip().lower() == "grpc":
        # What answers HTTP on this port would not understand us.
        return None
    # Never through a proxy and without our headers: whoever sits on the port may be anybody.
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        # No body is an ExportMetricsServiceRequest with nothing in it.
        connection.request(
            "POST", "/v1/metrics", body=b"", headers={"Content-Type": "application/x-protobuf"}
        )
        response = connection.getresponse()
        kind = response.getheader("Content-Type", "")
        if response.status == 200 and kind.startswith("application/x-protobuf"):
            return f"http://127.0.0.1:{port}"
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return None


def _quiet() -> None:
    """The exporters write two to four lines a failure, with credentials in some; we write one."""
    for name in ("opentelemetry.exporter.otlp", "opentelemetry.util.re", "urllib3"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    # Read when grpc is imported: its core writes a line of its own for each failed handshake.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


__all__ = ["SIGNALS", "Outcome", "Signal", "Transport", "addressed", "probe"]
