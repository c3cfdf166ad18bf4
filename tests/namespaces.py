"""A network and a host name for some processes of this machine, by the kernel's namespaces."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

T = TypeVar("T")

# Of the C library's setns.
_KINDS = {"net": 0x40000000, "uts": 0x04000000}
_LIBC = ctypes.CDLL(None, use_errno=True)


@cache
def why_none() -> str:
    """Why no namespaces can be made here; empty where they can."""
    missing = [each for each in ("unshare", "nsenter", "ip") if not shutil.which(each)]
    if missing:
        return f"no command {', '.join(missing)}"
    # As a holder does: a container may grant one of these and refuse the other.
    command = ("unshare", "--net", "--uts", "sh", "-c", _held("somewhere"))
    tried = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return tried.stderr.strip() if tried.returncode else ""


def _held(name: str) -> str:
    named = f"echo {name} > /proc/sys/kernel/hostname"
    # It ends when its input does.
    return f"{named} && ip link set lo up && echo ready && exec cat"


def enter(pid: int) -> None:
    """Move this thread into the network of a process, and under its host name."""
    kinds = 0
    for name, kind in _KINDS.items():
        # A process that is there already needs no privilege for it.
        if os.readlink(f"/proc/{pid}/ns/{name}") != os.readlink(f"/proc/thread-self/ns/{name}"):
            kinds |= kind
    if not kinds:
        return
    there = os.pidfd_open(pid)
    try:
        if _LIBC.setns(there, kinds):
            raise OSError(ctypes.get_errno(), "setns", str(pid))
    finally:
        os.close(there)


class Namespace:
    """The kernel removes it, and all devices in it, with the last process in it."""

    def __init__(self, name: str) -> None:
        self._holder = subprocess.Popen(
            ("unshare", "--net", "--uts", "sh", "-c", _held(name)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.pid = self._holder.pid
        self.command = ("nsenter", "--target", str(self.pid), "--net", "--uts", "--")
        """What a command begins with that is to run in it."""
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"ready\n"

    def ip(self, *commands: str) -> None:
        """As the command `ip` takes them, one after the other."""
        lines = "\n".join(commands)
        subprocess.run((*self.command, "ip", "-batch", "-"), input=lines, text=True, check=True)

    def inside(self, act: Callable[[], T]) -> T:
        """Call it in a thread in this namespace: what it opens belongs there."""

        def entered() -> T:
            enter(self.pid)
            return act()

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(entered).result()

    def close(self) -> None:
        self._holder.communicate()
