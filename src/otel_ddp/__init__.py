"""OpenTelemetry-native observability for distributed PyTorch training."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from otel_ddp.errors import ConfigError, MissingDependency, OtelDdpError
    from otel_ddp.identity import Identity
    from otel_ddp.instrumentation import data, instrument, uninstrument
    from otel_ddp.run import Run
    from otel_ddp.session import config, current, event, finish, init, log, phase, span

__version__ = "0.1.0"

# Nothing is imported before it is asked for: a bare `import otel_ddp` costs about a millisecond.
_HOME = {
    "ConfigError": "errors",
    "Identity": "identity",
    "MissingDependency": "errors",
    "OtelDdpError": "errors",
    "Run": "run",
    "config": "session",
    "current": "session",
    "data": "instrumentation",
    "event": "session",
    "finish": "session",
    "init": "session",
    "instrument": "instrumentation",
    "log": "session",
    "phase": "session",
    "span": "session",
    "uninstrument": "instrumentation",
}

__all__ = [
    "ConfigError",
    "Identity",
    "MissingDependency",
    "OtelDdpError",
    "Run",
    "__version__",
    "config",
    "current",
    "data",
    "event",
    "finish",
    "init",
    "instrument",
    "log",
    "phase",
    "span",
    "uninstrument",
]


if not TYPE_CHECKING:
    # Hidden from type checkers: to them a name that is not listed above is a mistake.

    def __getattr__(name: str) -> object:
        try:
            home = _HOME[name]
        except KeyError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
        value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
