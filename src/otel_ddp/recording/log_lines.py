"""Records the lines of Python's logging: of which loggers, from which level on, and how fast."""

from __future__ import annotations

import logging
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from otel_ddp import errors
from otel_ddp.errors import ConfigError
from otel_ddp.journal import layout
from otel_ddp.recording import log_records
from otel_ddp.recording.recorder import Recorder
from otel_ddp.recording.spans import moment
from otel_ddp.settings import log_level
from otel_ddp.vocabulary import catalog

# A line costs as much as it takes in the journal, and this much at least.
_LEAST_BYTES = 512
# How fast lines may come in the long run: 32 short ones a second.
_BYTES_A_SECOND = 16 * 1024
# At once: this share of the journal, so that lines never push values out.
_SHARE_OF_RING = 0.25
# Of that, what is kept for errors.
_FOR_ERRORS = 0.25
# How often a line looks for loggers that came since: a program may have thousands of them.
LOOK_EVERY_S = 3.0

_OURS = ("otel_ddp", "opentelemetry")
_LIBRARIES = tuple(
    path
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
    if (path := sysconfig.get_paths().get(name))
)


# -- what is asked for


class Choice(NamedTuple):
    """From which level on, and of which loggers; without any, those of the program."""

    level: int
    others: int
    loggers: tuple[logging.Logger, ...]


def chosen(level: Any, others: Any, logger: Any) -> Choice:
    """What `run.logs` was given; raises ConfigError for what cannot be."""
    numbers = []
    for name, given in (("level", level), ("others", others)):
        number = log_level(given)
        if number is None:
            raise ConfigError(
                f'{name} must be a level of logging, such as "info" or logging.INFO; got {given!r}.'
            )
        numbers.append(number)
    one = logger is not None and not isinstance(logger, Collection)
    several = [logger] if one or isinstance(logger, str) else list(logger or ())
    found = [logging.getLogger(e.strip()) if isinstance(e, str) else e for e in several]
    if not all(isinstance(each, logging.Logger) for each in found):
        raise ConfigError(f"logger must be a logger, its name, or several; got {logger!r}.")
    return Choice(numbers[0], numbers[1], tuple(found))


def asked(words: str) -> Choice:
    """What OTEL_DDP_LOGS asks for: a level, maybe that of the others, maybe names of loggers."""
    level, *rest = words.split(",")
    of_others = bool(rest) and log_level(rest[0]) is not None
    return chosen(level, rest[0] if of_others else "warning", rest[of_others:])


# -- the loggers of the program, and those of libraries


def _is_ours(name: str) -> bool:
    """Whether a logger is ours or OpenTelemetry's, whose lines must not come back to us."""
    return name.partition(".")[0] in _OURS


def _own() -> Iterator[logging.Logger]:
    """The uppermost loggers of the program: `__main__`, and those of its modules and words."""
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if not isinstance(logger, logging.Logger) or _is_ours(name):
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
    return any(
        path.startswith(_LIBRARIES) or "site-packages" in path or "dist-packages" in path
        for path in paths
        if isinstance(path, str)
    )


def _depth(logger: logging.Logger) -> int:
    return 0 if logger is logging.root else 1 + logger.name.count(".")


# -- what is recorded


class _Rate:
    """How many bytes of lines there is room for."""

    def __init__(self, most_bytes: float) -> None:
        self._most_bytes = self._room_bytes = most_bytes
        self._filled_at = time.monotonic()

    def has_room(self, is_error: bool) -> bool:
        """Whether a line may be written."""
        now = time.monotonic()
        room = self._room_bytes + (now - self._filled_at) * _BYTES_A_SECOND
        self._room_bytes, self._filled_at = min(room, self._most_bytes), now
        kept = 0.0 if is_error else self._most_bytes * _FOR_ERRORS
        return self._room_bytes - _LEAST_BYTES >= kept

    def written(self, size_bytes: int) -> None:
        """A line of this size was written."""
        self._room_bytes -= max(_LEAST_BYTES, size_bytes)


class LogHandler(logging.Handler):
    """One a run. It never waits, never raises, and has no lock of its own."""

    def __init__(self, recorder: Recorder, choice: Choice, is_rank_0: Callable[[], bool]) -> None:
        # As low as Python's last resort, which it stands in for.
        super().__init__(min(choice.level, choice.others, logging.WARNING))
        self._recorder = recorder
        self._choice = choice
        self._is_rank_0 = is_rank_0
        self._here = threading.local()
        self._rate = _Rate(recorder.writer.ring_bytes * _SHARE_OF_RING)
        self._attached: list[logging.Logger] = []
        self._waits_for_root = self._started = False
        # How many loggers there were when it looked for them, and when it did.
        self._seen, self._looked_at = -1, -LOOK_EVERY_S

    # -- where it listens

    def attach(self, *, started: bool) -> None:
        """Listen where it is to listen; called again, to the loggers that came since.

        *started*: the program has set up what it needs. Before that a root logger without handlers
        is left alone: with one of ours `logging.basicConfig` would do nothing.
        """
        self._looked_at = time.monotonic()
        known = len(logging.root.manager.loggerDict)
        is_first = started and not self._started
        # `basicConfig(force=True)` and `dictConfig` take handlers away.
        in_place = all(self in logger.handlers for logger in self._attached)
        if in_place and known == self._seen and not (self._waits_for_root or is_first):
            return
        self._seen = known
        self._started |= started
        wanted = self._choice.loggers or list(_own())
        self._waits_for_root = logging.root in wanted and not (started or logging.root.handlers)
        # The upper ones first: what they hear, those below them need not tell again.
        for logger in sorted(wanted, key=_depth):
            waits = logger is logging.root and self._waits_for_root
            if not waits and not self._hears(logger):
                logger.addHandler(self)
                if logger not in self._attached:
                    self._attached.append(logger)
        if is_first and self._is_rank_0():
            self._check_levels()

    def _hears(self, logger: logging.Logger | None) -> bool:
        while logger is not None:
            if self in logger.handlers:
                return True
            logger = logger.parent if logger.propagate else None
        return False

    def _check_levels(self) -> None:
        """Says once if no line of the asked level can come."""
        if not self._attached:
            errors.warn_once(
                "log levels",
                "Log lines are asked for, and this program has no logger of its own: "
                "OTEL_DDP_LOGS=info,root hears every logger.",
            )
            return
        lowest = min(each.getEffectiveLevel() for each in self._attached)
        if lowest > self._choice.level:
            level, made = map(logging.getLevelName, (self._choice.level, lowest))
            errors.warn_once(
                "log levels",
                "Log lines are asked for from %s on, and the loggers of this program make them "
                'from %s on: logging.basicConfig(level="%s") makes the others.',
                *(level, made, level),
            )

    def detach(self) -> None:
        """Listen no more."""
        for logger in self._attached:
            logger.removeHandler(self)
        self._attached.clear()

    # -- without a lock: one of ours around the journal's could wait for it the other way round

    def createLock(self) -> None:
        """Python's handlers have a lock; this one needs none."""
        self.lock = None

    def _at_fork_reinit(self) -> None:
        pass

    @errors.contained(default=False)
    def handle(self, record: logging.LogRecord) -> bool:
        """Record one line; without the lock that other handlers take."""
        if _is_ours(record.name) or not self.filter(record):
            return False
        self._last_resort(record)
        if time.monotonic() - self._looked_at >= LOOK_EVERY_S:
            self.attach(started=False)
        if record.levelno < (self._choice.level if self._is_rank_0() else self._choice.others):
            return False
        self.emit(record)
        return True

    def _last_resort(self, record: logging.LogRecord) -> None:
        """Python prints warnings of loggers without any handler: it must not miss them for us."""
        last, logger = logging.lastResort, logging.getLogger(record.name)
        if last is None or record.levelno < last.level:
            return
        found: logging.Logger | None = logger
        while found is not None:
            if any(each is not self for each in found.handlers):
                return
            found = found.parent if found.propagate else None
        last.handle(record)

    # -- what it writes

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line into the journal, if there is room for it."""
        if getattr(self._here, "busy", False):
            # The text of what is logged logs by itself, or a signal handler logs in between.
            self._recorder.totals.count(catalog.OTEL_DDP_VALUES_REFUSED, why="reentered")
            return
        self._here.busy = True
        try:
            self._write(record)
        finally:
            self._here.busy = False

    def _write(self, record: logging.LogRecord) -> None:
        # Asked before the line is formatted: a line in every iteration must stay cheap.
        if not self._rate.has_room(record.levelno >= logging.ERROR):
            errors.warn_once(
                "log rate",
                "Log lines are left out of what is recorded: they come faster than %d a second. "
                "They are counted, and a higher level (OTEL_DDP_LOGS) makes them fewer.",
                _BYTES_A_SECOND // _LEAST_BYTES,
            )
            self._recorder.totals.count(catalog.OTEL_DDP_VALUES_REFUSED, why="log_rate")
            return
        content = self._content(record)
        self._rate.written(log_records.size_bytes(content))
        self._recorder.documents.append(layout.EVENT, content | moment(self._recorder))

    def _content(self, record: logging.LogRecord) -> dict[str, Any]:
        try:
            return log_records.from_line(record)
        except errors.ANY_ERROR:
            errors.reraise_foreign()
            # As every handler does: prints, if `logging.raiseExceptions` is set, and goes on.
            self.handleError(record)
            bare = errors.attempt(lambda: str(record.msg), type(record.msg).__name__)
            plain = logging.makeLogRecord({**vars(record), "args": (), "msg": bare})
            return log_records.from_line(plain)
