"""Prints the output of a command, and reads values of unknown type safely."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Collection, Mapping
from typing import Any

from otel_ddp.history.page.exchange import json_text
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


# Journals and agent.json are files: another version, or any program of this user, may have written
# them. So a value may be of any type.


def mappings(value: Any) -> list[Mapping[str, Any]]:
    """The dictionaries of a list; empty for anything else."""
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def mapping(value: Any) -> Mapping[str, Any]:
    """A dictionary; an empty one for anything else."""
    return value if isinstance(value, Mapping) else {}


def named_ranks(verdict: Mapping[str, Any]) -> Collection[str]:
    """The ranks that a verdict is about: one, or those of a late node."""
    several = mapping(verdict.get("evidence")).get("ranks")
    one = mapping(verdict.get("who")).get("rank")
    return {
        str(each)
        for each in (one, *(several if isinstance(several, list) else ()))
        if each is not None
    }


def integer(value: Any) -> int | None:
    """An integer of 64 bits, or None."""
    return value if isinstance(value, int) and abs(value) < 2**63 else None


def number(value: Any) -> float | None:
    """A number that can be shown, or None."""
    sane = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e18
    return float(value) if sane else None


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
