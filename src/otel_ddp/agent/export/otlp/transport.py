"""Sends prepared OTLP requests as the variables OTEL_* say, and learns each outcome."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from otel_ddp import errors
from otel_ddp.agent.export.otlp.variables import (
    Variables,
    one_line,
    signals_with_endpoint,
    without_credentials,
)
from otel_ddp.agent.queue.delivery import Outcome
from otel_ddp.settings import Settings

if TYPE_CHECKING:
    from otel_ddp.agent.export.otlp.over_grpc import GrpcSender
    from otel_ddp.agent.export.otlp.over_http import HttpSender

# What is raised when a variable, a file or a package is wrong.
_UNUSABLE = (ValueError, OSError, RuntimeError, ImportError, LookupError, TypeError)


class Transport:
    """Sends each signal by the protocol and to the address that its variables name.

    Nothing is raised: every failure is an Outcome. One thread sends at a time for each signal.
    """

    def __init__(
        self,
        settings: Settings,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._settings = settings
        self._env = os.environ if env is None else env
        self._senders: dict[str, HttpSender | GrpcSender] = {}
        silence_libraries()

    @property
    def destination(self) -> str:
        """Where the first signal goes that is sent, without credentials."""
        (first, *_) = signals_with_endpoint(self._settings, self._env)
        return without_credentials(self._variables(first).url)

    def _variables(self, signal: str) -> Variables:
        return Variables(signal, self._settings, self._env)

    def send(self, signal: str, body: bytes) -> Outcome:
        """Make one attempt, which takes no longer than the timeout."""
        try:
            if signal not in self._senders:
                self._senders[signal] = self._open(self._variables(signal))
            outcome = self._senders[signal].send(body)
        except _UNUSABLE as error:
            outcome = Outcome("retry", f"{signal} cannot be sent: {one_line(str(error))}")
        if outcome.kind == "retry" and signal in self._senders:
            # The next attempt reads the certificates again, which may have come, and connects
            # anew: a channel of gRPC would wait up to two minutes before it does.
            self._senders.pop(signal).close()
        return outcome

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


def silence_libraries() -> None:
    """They log lines for each failure, some with credentials; we log one."""
    logging.getLogger("opentelemetry.util.re").setLevel(logging.CRITICAL + 1)
    # Read when grpc is imported: its core prints a line of its own for each failed handshake.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
