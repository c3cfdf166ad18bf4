"""OpenTelemetry-native observability for distributed PyTorch training."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from otel_ddp.errors import ConfigError, MissingDependency, OtelDdpError
    from otel_ddp.identity.identity import Identity
    from otel_ddp.run.api import (
        alert,
        artifact,
        config,
        current,
        data,
        event,
        finish,
        init,
        instrument,
        log,
        phase,
        span,
        uninstrument,
    )
    from otel_ddp.run.run import Run

__version__ = "0.1.0"

# Names are imported at first use, so that a bare `import otel_ddp` takes about a millisecond. This
# table has the modules of all names that are not in `run.api`.
_HOME = {
    "ConfigError": "errors",
    "Identity": "identity.identity",
    "MissingDependency": "errors",
    "OtelDdpError": "errors",
    "Run": "run.run",
}

__all__ = [
    "ConfigError",
    "Identity",
    "MissingDependency",
    "OtelDdpError",
    "Run",
    "__version__",
    "alert",
    "artifact",
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
    # Type checkers must not see this function: they would accept any name in this module.

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = import_module(f"{__name__}.{_HOME.get(name, 'run.api')}")
        value = globals()[name] = getattr(home, name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
