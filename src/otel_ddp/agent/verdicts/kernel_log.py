"""Reads from the kernel's log which processes ran out of memory, and errors of NVIDIA GPUs."""

from __future__ import annotations

import collections
import contextlib
import os
import re
from pathlib import Path
from typing import NamedTuple

from otel_ddp import files

_MOST_LINES = 2000
_MOST_KILLS = 1000
_MOST_XIDS = 100
_LONGEST_TEXT = 300

_LINE = re.compile(r"\d+,\d+,\d+,[^;]*;(.*)")
_OOM_KILL = re.compile(r"((?:Memory cgroup o|O)ut of memory).*?: Kill(?:ed)? process (\d+) \(")
_OOM_RESIDENT = re.compile(r"(?:anon|file|shmem)-rss:(\d+)kB")
_XID = re.compile(r"NVRM: Xid \(.*?\): (\d+)")
_XID_PROCESS = re.compile(r"\bpid=(\d+)")


class OutOfMemoryKill(NamedTuple):
    """The kernel killed a process because memory ran out."""

    scope: str
    resident_bytes: int | None


class Xid(NamedTuple):
    """An error that the GPU driver logged."""

    at: float
    pid: int | None
    text: str


class KernelLog:
    """The lines of the log since it was opened. Process ids are those of the first namespace."""

    def __init__(self, path: Path) -> None:
        self.kills: dict[int, OutOfMemoryKill] = {}
        self.xids: collections.deque[Xid] = collections.deque(maxlen=_MOST_XIDS)
        self._handle = _open(path)

    @property
    def is_open(self) -> bool:
        """Whether the log can be read."""
        return self._handle >= 0

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def poll(self, now: float) -> None:
        """Read the lines that are new."""
        for _ in range(_MOST_LINES if self._handle >= 0 else 0):
            try:
                block = os.read(self._handle, 8192)
            except BrokenPipeError:
                continue  # lines were overwritten: the next read is at the oldest one
            except OSError:
                return
            if not block:
                return
            for line in block.decode("utf-8", "replace").splitlines():
                if match := _LINE.match(line):
                    self._parse(match[1], now)

    def _parse(self, text: str, now: float) -> None:
        if kill := _OOM_KILL.search(text):
            sizes = [int(size) * 1024 for size in _OOM_RESIDENT.findall(text)]
            scope = "node" if kill[1].startswith("Out") else "memory cgroup"
            if len(self.kills) >= _MOST_KILLS:
                self.kills.pop(next(iter(self.kills)))
            self.kills[int(kill[2])] = OutOfMemoryKill(scope, sum(sizes) if sizes else None)
        elif _XID.search(text):
            process = _XID_PROCESS.search(text)
            pid = int(process[1]) if process else None
            self.xids.append(Xid(now, pid, text[:_LONGEST_TEXT]))


def _open(path: Path) -> int:
    try:
        handle = files.open_private(path)
    except OSError:
        return -1
    # Older lines are about processes that this agent has never watched.
    with contextlib.suppress(OSError):
        os.lseek(handle, 0, os.SEEK_END)
    return handle
