"""Records the lines of Python's logging, and the exception that ends a process, as events."""

from __future__ import annotations

import json
import logging
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from functools import cache
from typing import Any

from otel_ddp import errors
from otel_ddp.journal import layout
from otel_ddp.recording import values
from otel_ddp.recording.recorder import Recorder
from otel_ddp.recording.secrets import without_secrets
from otel_ddp.recording.spans import moment
from otel_ddp.settings import LogChoice
from otel_ddp.vocabulary import catalog

# A line costs as much as it takes in the journal, and this much at least.
_LEAST_BYTES = 512
# How fast lines may come in the long run: 32 short ones a second.
_BYTES_A_SECOND = 16 * 1024
# At once: this share of the journal, so that lines never push values out.
_SHARE_OF_RING = 0.25
# Of that, what is kept for errors.
_FOR_ERRORS = 0.25

_OURS = ("otel_ddp", "opentelemetry")
_LIBRARIES = tuple(
    path
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
    if (path := sysconfig.get_paths().get(name))
)


# -- the loggers of the program, and those of libraries


@cache
def _is_of_program(name: str) -> bool:
    """Whether a logger is the program's: named like no module that was installed."""
    if name == "__main__":
        return True
    if name == "root" or name in sys.stdlib_module_names:
        return False
    module = sys.modules.get(name)
    # A package without a file of its own is a folder in several places.
    paths = [getattr(module, "__file__", None), *(getattr(module, "__path__", None) or ())]
    return not any(
        path.startswith(_LIBRARIES) or "site-packages" in path or "dist-packages" in path
        for path in paths
        if isinstance(path, str)
    )


# -- where lines are heard

# What every line of every logger comes through once its logger has let it pass, on its way to the
# handlers. No handler of ours is on any logger: so `basicConfig` works as ever, Python prints what
# has no handler, and a configuration that takes all handlers away takes nothing of ours.
_logger: Any = logging.Logger
_call_handlers, _is_in_place = _logger.callHandlers, False
_listening: tuple[LogLines, ...] = ()


def _heard(logger: logging.Logger, record: logging.LogRecord) -> None:
    _call_handlers(logger, record)
    for each in _listening:
        each.hear(record)


def _listen(to: tuple[LogLines, ...]) -> None:
    global _listening, _call_handlers, _is_in_place
    _listening = to
    if to and not _is_in_place:
        _call_handlers, _logger.callHandlers, _is_in_place = _logger.callHandlers, _heard, True
    # Another one may have taken our place, and calls us.
    elif not to and _logger.callHandlers is _heard:
        _logger.callHandlers, _is_in_place = _call_handlers, False


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


class LogLines:
    """One a run. It never waits, never raises, and has no lock of its own."""

    def __init__(
        self, recorder: Recorder, choice: LogChoice, is_rank_0: Callable[[], bool]
    ) -> None:
        self._recorder = recorder
        self._level, self._others, self._loggers = choice
        self._is_rank_0 = is_rank_0
        self._here = threading.local()
        self._rate = _Rate(recorder.writer.ring_bytes * _SHARE_OF_RING)
        self._checked = False
        _listen((*_listening, self))

    def close(self) -> None:
        """Hear no more."""
        _listen(tuple(each for each in _listening if each is not self))

    def check_levels(self) -> None:
        """Say once, on rank 0, if no line of the asked level can come."""
        if self._checked or not self._is_rank_0():
            return
        self._checked = True
        known = [
            e for e in logging.root.manager.loggerDict.values() if isinstance(e, logging.Logger)
        ]
        asked = [*map(logging.getLogger, self._loggers)] or [
            each for each in known if self._is_asked_for(each.name)
        ]
        if all(each.getEffectiveLevel() > self._level for each in asked):
            name = logging.getLevelName(self._level)
            errors.warn_once(
                "log levels",
                "Log lines are asked for from %s on, and no logger of this program makes them: "
                'logging.basicConfig(level="%s") lets them, OTEL_DDP_LOGS=%s,root hears every '
                "logger.",
                *(name, name, name.lower()),
            )

    @errors.contained()
    def hear(self, record: logging.LogRecord) -> None:
        """Write one line into the journal, if it was asked for and there is room for it."""
        least = self._level if self._is_rank_0() else self._others
        if record.levelno < least or not self._is_asked_for(record.name):
            return
        if getattr(self._here, "busy", False):
            # The text of what is logged logs by itself, or a signal handler logs in between.
            self._recorder.totals.count(catalog.OTEL_DDP_VALUES_REFUSED, why="reentered")
            return
        self._here.busy = True
        try:
            self._write(record)
        finally:
            self._here.busy = False

    def _is_asked_for(self, name: str) -> bool:
        first = name.partition(".")[0]
        if first in _OURS:
            return False
        if not self._loggers:
            return _is_of_program(first)
        return any(each == "root" or f"{name}.".startswith(f"{each}.") for each in self._loggers)

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
        self._rate.written(len(json.dumps(content)))
        self._recorder.documents.append(layout.EVENT, content | moment(self._recorder))

    def _content(self, record: logging.LogRecord) -> dict[str, Any]:
        try:
            return _from_line(record)
        except errors.ANY_ERROR:
            errors.reraise_foreign()
            # The program's own handlers report it.
            bare = errors.attempt(lambda: str(record.msg), type(record.msg).__name__)
            plain = logging.makeLogRecord({**vars(record), "args": (), "msg": bare})
            return _from_line(plain)


# -- as events

# In characters of JSON, so that a record fits into the smallest journal, whatever its letters are.
_LONGEST_BODY = 4000
_LONGEST_TRACE = 8000
_LONGEST_MESSAGE = 1000
_MOST_EXTRAS = 24
_LONGEST_EXTRA = 200
# A traceback of more frames is that of an endless recursion.
_MOST_FRAMES = 40

# What Python's logging puts into every record: anything else in one is the user's `extra`.
_OF_EVERY_RECORD = frozenset(
    {
        *vars(logging.LogRecord("", 0, "", 0, "", (), None)),
        *("message", "asctime", "taskName"),
    }
)


def severity_number(level: int) -> int:
    """The number of OpenTelemetry's severity for a level of Python: 10 is DEBUG, 5 there."""
    # Python counts in tens, the specification in fours. A level in between is one in between.
    return max(1, min(24, 5 + (level - 10) * 4 // 10))


def _from_line(record: logging.LogRecord) -> dict[str, Any]:
    """A line of a logger."""
    extras = {key: v for key, v in vars(record).items() if key not in _OF_EVERY_RECORD}
    attributes = values.attributes(extras, _LONGEST_EXTRA, _MOST_EXTRAS)
    attributes["code.file.path"] = record.pathname
    attributes["code.line.number"] = record.lineno
    attributes["code.function.name"] = record.funcName
    if record.threadName != "MainThread":
        attributes["thread.name"] = record.threadName
    error = record.exc_info[1] if record.exc_info else None
    if error is not None:
        attributes |= _of_exception(error)
    return {
        "name": "",
        "time": int(record.created * 1e9),
        "body": _bounded(_message(record), _LONGEST_BODY),
        "severity": str(record.levelname),
        "severity_number": severity_number(record.levelno),
        "scope": record.name[:200],
        "attributes": attributes,
    }


def from_exception(error: BaseException) -> dict[str, Any]:
    """The exception that ends a process."""
    return {
        "name": "exception",
        "time": time.time_ns(),
        "body": values.error_line(error),
        "severity": "FATAL",
        "severity_number": severity_number(logging.CRITICAL),
        "attributes": _of_exception(error),
    }


def _message(record: logging.LogRecord) -> str:
    args = record.args
    if isinstance(args, tuple) and any(values.is_device_tensor(each) for each in args):
        # Its text would make training wait for the device.
        shown = tuple(values.shown(e) if values.is_device_tensor(e) else e for e in args)
        return errors.attempt(lambda: str(record.msg) % shown, str(record.msg))
    return record.getMessage()


def _of_exception(error: BaseException) -> dict[str, Any]:
    words = errors.attempt(lambda: str(error), "")
    return {
        "exception.type": values.exception_names(error)[1],
        "exception.message": _bounded(words, _LONGEST_MESSAGE),
        "exception.stacktrace": _bounded(_stacktrace(error), _LONGEST_TRACE),
    }


def _stacktrace(error: BaseException) -> str:
    def walk() -> str:
        return "".join(traceback.format_exception(error, limit=-_MOST_FRAMES))

    # An exception's own text may raise.
    return errors.attempt(walk, type(error).__qualname__)


def _bounded(text: str, longest: int) -> str:
    """The text without secrets; of a long one its beginning and its end."""
    if len(text) > 4 * longest:
        # Cut first: looking through megabytes takes time.
        text = f"{text[: 2 * longest]}\n[...]\n{text[-2 * longest :]}"
    text = without_secrets(text.encode("utf-8", "replace").decode())
    size = len(text) if text.isascii() and text.isprintable() else len(json.dumps(text))
    if size <= longest:
        return text
    kept = max(1, int(len(text) * longest / size) - 10)
    # The last lines of a stack trace say most.
    return f"{text[: kept // 3]}\n[...]\n{text[-(kept - kept // 3) :]}"
