"""Reads small files: of /proc and of cgroups, and files whose path a user's process has given."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

LONGEST_FILE = 64 * 1024


def read_text(path: Path, most: int = LONGEST_FILE) -> str | None:
    """At most so many bytes as text; None where the file cannot be read."""
    try:
        with path.open("rb", buffering=0) as file:
            pieces = []
            # A file of /proc comes in pieces of a page.
            while most > 0 and (piece := file.read(most)):
                pieces.append(piece)
                most -= len(piece)
        return b"".join(pieces).decode("utf-8", "replace")
    except OSError:
        return None


def read_without_waiting(path: Path) -> str | None:
    """The text of a file that may be anything, a fifo too: the agent never waits for it."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        return os.read(handle, LONGEST_FILE).decode("utf-8", "replace")
    except OSError:
        return None
    finally:
        os.close(handle)


def numbers_by_word(text: str | None) -> Mapping[str, int]:
    """The lines that are a word and a number."""
    rows = (line.split() for line in (text or "").splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
