"""Reads the OTEL_EXPORTER_OTLP_* variables: those of one signal first, then the general ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from opentelemetry.util.re import parse_env_headers

from otel_ddp.agent.export.otlp.outcome import Signal
from otel_ddp.settings import Settings

_GENERAL = "OTEL_EXPORTER_OTLP_"
_FILES = ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE")


class Route(NamedTuple):
    """Where a signal goes, and which variables say so."""

    endpoint: str
    """As the variable has it: a general endpoint has no path yet."""
    protocol: str
    endpoint_variable: str
    protocol_variable: str

    @property
    def is_general(self) -> bool:
        """Whether the endpoint is that of all signals."""
        return self.endpoint_variable == f"{_GENERAL}ENDPOINT"

    def url(self, signal: Signal) -> str:
        """Where requests of this signal are sent to."""
        if self.is_general and self.protocol != "grpc":
            return f"{self.endpoint.rstrip('/')}/v1/{signal}"
        return self.endpoint


def route(signal: Signal, settings: Settings, env: Mapping[str, str]) -> Route:
    """Where a signal goes; a variable of its own wins over the general one."""
    own = f"{_GENERAL}{signal.upper()}_"
    own_endpoint = env.get(f"{own}ENDPOINT", "").strip()
    own_protocol = env.get(f"{own}PROTOCOL", "").strip().lower()
    protocol = own_protocol or settings.protocol
    default = f"http://localhost:{4317 if protocol == 'grpc' else 4318}"
    return Route(
        own_endpoint or settings.endpoint or default,
        protocol,
        f"{own if own_endpoint else _GENERAL}ENDPOINT",
        f"{own if own_protocol else _GENERAL}PROTOCOL",
    )


class SignalVariables:
    """What the exporters of one signal are told, checked where they would fail without a word.

    *warn* is called with a sentence for a value that is not used.
    """

    def __init__(
        self,
        signal: Signal,
        settings: Settings,
        env: Mapping[str, str],
        warn: Callable[[str], None],
    ) -> None:
        self._signal = signal
        self._settings = settings
        self._env = env
        self._warn = warn

    def timeout_s(self) -> float:
        """The time that one attempt may take."""
        variable = f"{_GENERAL}{self._signal.upper()}_TIMEOUT"
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
        self._warn(
            f"{variable} must be a number of milliseconds above 0, got {text!r}; "
            f"{self._settings.timeout_s * 1000:g} is used."
        )
        return self._settings.timeout_s

    def compression(self) -> str:
        """none, gzip or deflate."""
        variable, text = self._read("COMPRESSION")
        word = text.lower() or "none"
        if word in ("none", "gzip", "deflate"):
            return word
        self._warn(
            f"{variable} must be none, gzip or deflate, got {text!r}; nothing is compressed."
        )
        return "none"

    def check_files(self, url: str) -> None:
        """Raises OSError for a missing file, which the exporters do not name; it may come later."""
        if url.startswith("http://"):
            return
        for name in _FILES:
            variable, path = self._read(name)
            if path:
                try:
                    with open(path, "rb"):
                        pass
                except OSError as error:
                    raise OSError(f"{variable}: {path}: {error.strerror}") from error

    def check_headers(self) -> None:
        """Warn of each header that the exporters leave out."""
        variable, text = self._read("HEADERS")
        for number, entry in enumerate(text.split(","), start=1):
            if entry.strip() and not parse_env_headers(entry, liberal=True):
                # Never show the entry itself: it may be a token that lost its name.
                self._warn(f"{variable}: entry {number} is not name=value and is left out.")

    def _read(self, name: str) -> tuple[str, str]:
        """The variable that counts, and its text."""
        own = f"{_GENERAL}{self._signal.upper()}_{name}"
        if text := self._env.get(own, "").strip():
            return own, text
        return f"{_GENERAL}{name}", self._env.get(f"{_GENERAL}{name}", "").strip()
