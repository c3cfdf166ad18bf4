"""What the operating system must have for anything to be recorded: Linux has it."""

from __future__ import annotations

import os

# A journal's blocks are allocated before it is mapped, its writer is known to live by a lock, and
# a forked child falls silent. Without one of these a journal would hurt the training or tell lies.
_CALLS = ("posix_fallocate", "register_at_fork", "mkfifo", "pread", "geteuid")


def missing() -> str:
    """What of it this system lacks, in words; empty where it has all."""
    lacking = [f"os.{name}" for name in _CALLS if not hasattr(os, name)]
    try:
        import fcntl  # noqa: F401
    except ImportError:
        lacking.insert(0, "fcntl")
    return ", ".join(lacking)
