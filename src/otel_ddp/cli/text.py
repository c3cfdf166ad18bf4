"""Prints the output of a command, and shows values of unknown type safely."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Collection, Mapping
from typing import Any

from otel_ddp import plain
from otel_ddp.history.page.http import json_text
from otel_ddp.history.terminal import printable, when
from otel_ddp.vocabulary.words import HARMLESS_VERDICTS

_PLAIN_BARS = str.maketrans("█░", "#.")


def encodable(text: str) -> str:
    """The same with the letters that stdout's encoding has."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        plain = text.translate(_PLAIN_BARS)
        return plain.encode(encoding, "backslashreplace").decode(encoding)
    return text


def print_answer(text: str) -> int:
    """Print text in the terminal's encoding; the exit status."""
    try:
        print(encodable(text))
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        # At its end Python would write the buffered rest again, and report the same error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 0  # the reader has closed the pipe, as `| head` does
        print(f"The answer could not be written: {error.strerror}.", file=sys.stderr)
        return 1
    return 0


def end_by_signals() -> None:
    """Let SIGTERM and SIGHUP clean up too, as Ctrl-C does."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))


def print_json(document: Any) -> int:
    """Print a document for programs; the exit status."""
    return print_answer(json_text(document, indent=2))


def named_ranks(verdict: Mapping[str, Any]) -> Collection[str]:
    """The ranks that a verdict is about: one, or those of a late node."""
    several = plain.mapping(verdict.get("evidence")).get("ranks")
    one = plain.mapping(verdict.get("who")).get("rank")
    found = [one, *plain.list_of(object, several)]
    return {str(each) for each in found if each is not None}


def cell(value: Any, otherwise: str = "") -> str:
    """Any value as one printable line: ESC and newlines are written out."""
    if value is None or value == "":
        return otherwise
    text = json.dumps(value, default=repr) if isinstance(value, (dict, list)) else str(value)
    return printable(text)


def dated(verdict: Mapping[str, Any], now_ns: int) -> str:
    """A verdict's sentence, and since when it holds or has held."""
    return when(verdict, now_ns) + cell(verdict.get("sentence"), "?")


def marked(verdict: Mapping[str, Any], now_ns: int) -> str:
    """The same behind `!`, or behind `i` where nothing is wrong: it says what bounds the run."""
    mark = "i" if verdict.get("kind") in HARMLESS_VERDICTS else "!"
    return f"{mark} {dated(verdict, now_ns)}"
