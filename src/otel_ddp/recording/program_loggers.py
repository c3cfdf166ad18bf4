"""Finds the loggers of the program itself: those that are not named like a library."""

from __future__ import annotations

import logging
import sys
import sysconfig
from collections.abc import Iterator

_OURS = ("otel_ddp", "opentelemetry")
_LIBRARIES = tuple(
    path
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
    if (path := sysconfig.get_paths().get(name))
)


def is_ours(name: str) -> bool:
    """Whether a logger is ours or OpenTelemetry's, whose lines must not come back to us."""
    return name.partition(".")[0] in _OURS


def own() -> Iterator[logging.Logger]:
    """The uppermost loggers of the program: `__main__`, and those of its modules and words."""
    known = logging.root.manager.loggerDict
    for name, logger in list(known.items()):
        if not isinstance(logger, logging.Logger) or is_ours(name):
            continue
        first = name.partition(".")[0]
        above = logger.parent
        if above is logging.root and not _is_library(first):
            yield logger


def _is_library(name: str) -> bool:
    """Whether a module of this name was installed, or belongs to Python."""
    if name == "__main__":
        return False
    if name in sys.stdlib_module_names:
        return True
    module = sys.modules.get(name)
    # A package without a file of its own is a folder in several places.
    paths = [getattr(module, "__file__", None), *(getattr(module, "__path__", None) or ())]
    found = [path for path in paths if isinstance(path, str)]
    return any("site-packages" in p or "dist-packages" in p for p in found) or any(
        path.startswith(_LIBRARIES) for path in found
    )
