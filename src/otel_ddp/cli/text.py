"""Prints the output of a command; values of unknown type as safe text."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from otel_ddp.history.page.http import json_text
from otel_ddp.history.terminal import printable, when
from otel_ddp.vocabulary.words import HARMLESS_VERDICTS

_PLAIN_BARS = str.maketrans("█░", "#.")


def encodable(text: str) -> str:
    """The text with only characters of stdout's encoding."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        plain = text.translate(_PLAIN_BARS)
        return plain.encode(encoding, "backslashreplace").decode(encoding)
    return text


def print_answer(text: str) -> int:
    """Print text in the terminal's encoding; returns the exit status."""
    try:
        print(encodable(text))
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        # At exit Python would flush the buffer again, and report the same error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 0  # closed by the reader, as in `| head`
        print(f"The answer could not be written: {error.strerror}.", file=sys.stderr)
        return 1
    return 0


def end_by_signals() -> None:
    """Let SIGTERM and SIGHUP raise SystemExit, to clean up."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))


def print_json(document: Any) -> int:
    """Print a document for programs; returns the exit status."""
    return print_answer(json_text(document, indent=2))


def cell(value: Any, otherwise: str = "") -> str:
    """Any value as one printable line, with control characters escaped."""
    if value is None or value == "":
        return otherwise
    text = json.dumps(value, default=repr) if isinstance(value, (dict, list)) else str(value)
    return printable(text)


def dated(verdict: Mapping[str, Any], now_ns: int) -> str:
    """A verdict's sentence with its time."""
    return when(verdict, now_ns) + cell(verdict.get("sentence"), "?")


def marked(verdict: Mapping[str, Any], now_ns: int) -> str:
    """The same with the prefix `!`, or `i` for a harmless verdict."""
    mark = "i" if verdict.get("kind") in HARMLESS_VERDICTS else "!"
    return f"{mark} {dated(verdict, now_ns)}"
