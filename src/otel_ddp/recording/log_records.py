"""Turns a line of Python's logging, or an exception, into an event of the journal."""

from __future__ import annotations

import json
import logging
import time
import traceback
from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import Any

from otel_ddp import errors
from otel_ddp.recording import values
from otel_ddp.recording.secrets import without_secrets

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


def from_line(record: logging.LogRecord) -> dict[str, Any]:
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
        attributes |= _of_exception(error, error.__traceback__)
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
        "attributes": _of_exception(error, error.__traceback__),
    }


def size_bytes(content: Mapping[str, Any]) -> int:
    """About what a record takes in the journal."""
    return len(json.dumps(content))


def _message(record: logging.LogRecord) -> str:
    args = record.args
    if isinstance(args, tuple) and any(values.is_device_tensor(each) for each in args):
        # Its text would make training wait for the device.
        shown = (values.shown(e) if values.is_device_tensor(e) else e for e in args)
        return errors.attempt(partial(_formatted, record.msg, tuple(shown)), str(record.msg))
    return record.getMessage()


def _formatted(message: Any, args: tuple[Any, ...]) -> str:
    return str(message) % args


def _of_exception(error: BaseException, trace: TracebackType | None) -> dict[str, Any]:
    words = errors.attempt(lambda: str(error), "")
    return {
        "exception.type": values.exception_names(error)[1],
        "exception.message": _bounded(words, _LONGEST_MESSAGE),
        "exception.stacktrace": _bounded(_stacktrace(error, trace), _LONGEST_TRACE),
    }


def _stacktrace(error: BaseException, trace: TracebackType | None) -> str:
    def walk() -> str:
        return "".join(traceback.format_exception(type(error), error, trace, limit=-_MOST_FRAMES))

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
