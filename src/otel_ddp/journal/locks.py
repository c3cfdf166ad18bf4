"""Locks on files, which the kernel drops when their process dies."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

from otel_ddp import files

# fcntl.fcntl wants a struct flock: type, whence, start, length, pid.
_FLOCK = struct.Struct("hhqqi4x")

_TEMPORARY = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

# Each function imports fcntl by itself: Windows has none, but imports this module all the same.


def acquire(fd: int) -> None:
    """Locks a file for this process; raises OSError if another process holds the lock."""
    import fcntl

    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def holder(fd: int) -> int | None:
    """The process that holds a lock on this file; 0 if its PID namespace is another."""
    import fcntl

    answer = fcntl.fcntl(fd, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    kind, _, _, _, pid = _FLOCK.unpack(answer)
    return None if kind == fcntl.F_UNLCK else max(0, pid)


def lock_holder(path: Path) -> int | None:
    """The process that holds a lock on the file of this name; 0 if its PID namespace is another.

    Also 0 if the file cannot be opened for now: that must not make a process count as dead.
    """
    try:
        fd = files.open_private(path)
    except OSError as error:
        return 0 if error.errno in _TEMPORARY else None
    try:
        return holder(fd)
    except OSError:
        return None
    finally:
        os.close(fd)
