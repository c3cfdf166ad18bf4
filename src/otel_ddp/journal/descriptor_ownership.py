"""Checks that a file descriptor is still ours: some programs close all that they find."""

from __future__ import annotations

import os


def file_of(fd: int) -> tuple[int, int] | None:
    """The file that is open under this descriptor; None if there is none."""
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def close_ours(fd: int, file: tuple[int, int] | None) -> None:
    """Closes a descriptor if it still belongs to this file."""
    if file is not None and file_of(fd) == file:
        os.close(fd)
