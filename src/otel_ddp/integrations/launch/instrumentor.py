"""For the command `opentelemetry-instrument`, and for programs that name their instrumentors."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from opentelemetry.instrumentation.instrumentor import (  # type: ignore[attr-defined]
    BaseInstrumentor,
)

from otel_ddp.integrations.launch import this_process


class OtelDdpInstrumentor(BaseInstrumentor):  # type: ignore[misc]
    """`OtelDdpInstrumentor().instrument()` does in this process what `otel-ddp run` does.

    Providers that it is given are not used: the node's agent exports.
    """

    def instrumentation_dependencies(self) -> Collection[str]:
        # Torch may be imported late, or never.
        return []

    def _instrument(self, **kwargs: Any) -> None:
        this_process.begin()

    def _uninstrument(self, **kwargs: Any) -> None:
        this_process.end()
