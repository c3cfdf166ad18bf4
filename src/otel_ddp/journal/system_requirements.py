"""Checks that the operating system has what a journal needs; Linux does."""

from __future__ import annotations

import os

# A journal's blocks are allocated before it is mapped, a lock shows that its writer lives, and a
# forked child stops writing. Without one of these a journal would hurt the training or be wrong.
_CALLS = ("posix_fallocate", "register_at_fork", "mkfifo", "pread", "geteuid")


def missing() -> str:
    """The needed calls that this system lacks, in words; empty if it has all."""
    lacking = [f"os.{name}" for name in _CALLS if not hasattr(os, name)]
    try:
        import fcntl  # noqa: F401
    except ImportError:
        lacking.insert(0, "fcntl")
    return ", ".join(lacking)
