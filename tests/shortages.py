"""What a machine may run short of, and files that another process has, for tests."""

from __future__ import annotations

import contextlib
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def no_threads() -> Iterator[None]:
    """No thread can be started meanwhile: there is no room for its stack."""
    before = threading.stack_size(1 << 46)
    try:
        yield
    finally:
        threading.stack_size(before)


@contextlib.contextmanager
def descriptors_below(number: int) -> Iterator[None]:
    """No file can be opened meanwhile under this number or a higher one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != hard < number:
        pytest.skip(f"{hard} files may be open here, and this needs {number}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


_HOLD = """
import fcntl, os, sys
exec(sys.argv[2])
fcntl.lockf(os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600), fcntl.LOCK_EX)
print(flush=True); sys.stdin.read()
"""


@contextlib.contextmanager
def locked_elsewhere(lock: Path, code: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs this, and then holds the lock until it is ended."""
    command = [sys.executable, "-c", _HOLD, str(lock), code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        yield holder
        holder.communicate()
