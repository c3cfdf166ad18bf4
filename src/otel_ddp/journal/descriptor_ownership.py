"""Checks that a file descriptor is still ours: some programs close all that they find."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_LAST_STANDARD = 2


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


@contextlib.contextmanager
def off_standard_streams() -> Iterator[None]:
    """Keeps what is opened here off 0, 1 and 2: C libraries write there, also if all are closed."""
    taken: list[tuple[int, tuple[int, int] | None]] = []
    try:
        # Where there is no /dev/null, nothing can be held in their place.
        with contextlib.suppress(OSError):
            while (fd := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= _LAST_STANDARD:
                taken.append((fd, file_of(fd)))
            os.close(fd)
        yield
    finally:
        # Another thread may have opened a stream of its own there meanwhile.
        for fd, file in taken:
            close_ours(fd, file)
