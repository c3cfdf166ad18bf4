"""Process descriptors: they become readable when a process ends, and tell how it ended."""

from __future__ import annotations

import fcntl
import os
import select
import struct
from collections.abc import Callable

# include/uapi/linux/pidfd.h: _IOWR(0xFF, 11, struct pidfd_info), whose first version has 64 bytes.
_PIDFD_GET_INFO = (3 << 30) | (64 << 16) | (0xFF << 8) | 11
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_INFO = struct.Struct("<Q52xi")


def open_pidfd(pid: int) -> int | None:
    """A descriptor of this process; -1: there is no such process; None: it cannot be had."""
    opened: Callable[[int], int] | None = getattr(os, "pidfd_open", None)
    try:
        return None if opened is None else opened(pid)
    except ProcessLookupError:
        return -1
    except OSError:
        return None


def has_ended(pidfd: int) -> bool:
    """Whether the process has ended, reaped or not."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def exit_status(pidfd: int) -> int | None:
    """How the process ended: Linux tells this from 6.15 on, once its parent has reaped it."""
    if pidfd < 0:
        return None
    answer = bytearray(_PIDFD_INFO.size)
    _PIDFD_INFO.pack_into(answer, 0, _PIDFD_INFO_EXIT, 0)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, answer)
    except OSError:
        return None
    mask, status = _PIDFD_INFO.unpack(answer)
    return int(status) if mask & _PIDFD_INFO_EXIT else None
