"""Where the handler listens: at the loggers of the program, not at those of libraries."""

from __future__ import annotations

import logging
import sys
import sysconfig
import time
from collections.abc import Collection, Iterator

_OURS = ("otel_ddp", "opentelemetry")
_LIBRARIES = tuple(
    path
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
    if (path := sysconfig.get_paths().get(name))
)
# How often a line looks for loggers that came since: a program may have thousands of them.
LOOK_EVERY_S = 3.0


def is_ours(name: str) -> bool:
    """Whether a logger is ours or OpenTelemetry's, whose lines must not come back to us."""
    return name.partition(".")[0] in _OURS


def _own() -> Iterator[logging.Logger]:
    """The uppermost loggers of the program: `__main__`, and those of its modules and words."""
    known = logging.root.manager.loggerDict
    for name, logger in list(known.items()):
        if not isinstance(logger, logging.Logger) or is_ours(name):
            continue
        if logger.parent is logging.root and not _is_library(name.partition(".")[0]):
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


def _depth(logger: logging.Logger) -> int:
    return 0 if logger is logging.root else 1 + logger.name.count(".")


class Loggers:
    """The loggers that one handler is attached to."""

    def __init__(self, handler: logging.Handler, named: Collection[logging.Logger]) -> None:
        """*named*: where it listens; none means the loggers of the program."""
        self.attached: list[logging.Logger] = []
        self._handler = handler
        self._named = list(named)
        self._waits_for_root = self._started = False
        self._seen = -1
        self._looked_at = -LOOK_EVERY_S

    @property
    def look_is_due(self) -> bool:
        """Whether it is time to look for loggers that came since."""
        return time.monotonic() - self._looked_at >= LOOK_EVERY_S

    def attach(self, *, started: bool) -> bool:
        """Listen where it is to listen; whether the program has started since the last call.

        *started*: the program has set up what it needs. Before that a root logger without handlers
        is left alone: with one of ours `logging.basicConfig` would do nothing.
        """
        self._looked_at = time.monotonic()
        known = len(logging.root.manager.loggerDict)
        is_first = started and not self._started
        # `basicConfig(force=True)` and `dictConfig` take handlers away.
        in_place = all(self._handler in logger.handlers for logger in self.attached)
        if in_place and known == self._seen and not (self._waits_for_root or is_first):
            return False
        self._seen = known
        self._started |= started
        wanted = self._named or list(_own())
        self._waits_for_root = logging.root in wanted and not (started or logging.root.handlers)
        # The upper ones first: what they hear, those below them need not tell again.
        for logger in sorted(wanted, key=_depth):
            waits = logger is logging.root and self._waits_for_root
            if not waits and not self._hears(logger):
                logger.addHandler(self._handler)
                if logger not in self.attached:
                    self.attached.append(logger)
        return is_first

    def _hears(self, logger: logging.Logger | None) -> bool:
        while logger is not None:
            if self._handler in logger.handlers:
                return True
            logger = logger.parent if logger.propagate else None
        return False

    def detach(self) -> None:
        """Listen no more."""
        for logger in self.attached:
            logger.removeHandler(self._handler)
        self.attached.clear()
