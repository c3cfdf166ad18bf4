"""Descriptors that may be someone else's by now: there is code that closes all that it finds."""

from __future__ import annotations

import os


def file_of(fd: int) -> tuple[int, int] | None:
    """The file that is open under this number; None: there is none."""
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def close_ours(fd: int, file: tuple[int, int] | None) -> None:
    """Close a descriptor if it is still the one of this file."""
    if file is not None and file_of(fd) == file:
        os.close(fd)
