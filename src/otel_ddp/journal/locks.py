"""Locks on files, which the kernel drops when their process dies."""

from __future__ import annotations

import os
import struct

# fcntl.fcntl wants a struct flock: type, whence, start, length, pid.
_FLOCK = struct.Struct("hhqqi4x")

# Each imports fcntl by itself: Windows has none, and what imports this module is imported there.


def take(fd: int) -> None:
    """Lock a file for this process; OSError where another process holds it."""
    import fcntl

    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def holder(fd: int) -> int | None:
    """The process that holds a lock on this file, 0 for one of another PID namespace."""
    import fcntl

    answer = fcntl.fcntl(fd, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    kind, _, _, _, pid = _FLOCK.unpack(answer)
    return None if kind == fcntl.F_UNLCK else max(0, pid)
