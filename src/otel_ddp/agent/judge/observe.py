"""Observes processes of this node: pidfd, exit status, memory, cgroup, kernel log.

Facts that vanish with a process are sampled while it lives. Unreadable facts are absent.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import re
import select
import signal
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from otel_ddp import errors, files
from otel_ddp.agent.judge.answers import Answers
from otel_ddp.agent.node.cgroups import Cgroups, Group
from otel_ddp.agent.node.source import KernelFiles, numbers
from otel_ddp.agent.reading.process import Host
from otel_ddp.diagnosis.stall.evidence import Evidence, Question
from otel_ddp.journal import process_state
from otel_ddp.journal.reader import JournalReader

# An out-of-memory kill may explain a death that is noticed up to this much later: the kernel frees
# the memory of a dying process first, and the lock on its journal later.
_REMEMBERED_S = 30.0
_SAMPLE_EVERY_S = 2.0

# The initial PID namespace. The kernel's log uses the pids of this namespace.
_FIRST_PID_NAMESPACE = f"pid:[{0xEFFFFFFC}]"
_MOST_LINES = 2000
_MOST_KILLS = 1000

_LINE = re.compile(r"\d+,\d+,\d+,[^;]*;(.*)")
_OOM_KILL = re.compile(r"((?:Memory cgroup o|O)ut of memory).*?: Kill(?:ed)? process (\d+) \(")
_PAGE = os.sysconf("SC_PAGE_SIZE")
# The ioctl that reads the exit status through a pidfd. In Linux's include/uapi/linux/pidfd.h it is
# _IOWR(0xFF, 11, struct pidfd_info); the first version of this struct has 64 bytes.
_PIDFD_GET_INFO = (3 << 30) | (64 << 16) | (0xFF << 8) | 11
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_INFO = struct.Struct("<Q52xi")


class _Watched:
    """Samples of a living process."""

    def __init__(self, pidfd: int) -> None:
        self.pidfd = pidfd
        self.sampled_at: float | None = None
        self.has_ended = False
        self.group: Group | None = None
        # Pairs of a time and the cgroup's count of out-of-memory kills at that time.
        self.kills: collections.deque[tuple[float, int]] = collections.deque()
        self.resident_bytes: int | None = None


class ExitCauses:
    """Collects evidence on why processes end. One per node; only the agent's loop calls it."""

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._clock = clock
        # The keys are pid and start time: a pid alone may be reused, or belong to another process
        # in this PID namespace.
        self._watched: dict[tuple[int, int], _Watched] = {}
        self._log = KernelLog(root / "dev/kmsg")
        self._files = KernelFiles()
        self._cgroups = Cgroups(self._files, proc=root / "proc", root=root)
        self._in_first_namespace = False
        with contextlib.suppress(OSError):
            namespace = os.readlink(root / "proc/self/ns/pid")
            self._in_first_namespace = namespace == _FIRST_PID_NAMESPACE

    def close(self) -> None:
        for pid, start_ticks in list(self._watched):
            self.forget(pid, start_ticks)
        self._log.close()

    # -- while a process lives

    @errors.contained()
    def watch(self, pid: int, start_ticks: int) -> None:
        """Sample facts that vanish with the process, every two seconds at most."""
        watched = self._watched.get((pid, start_ticks))
        if watched is None:
            watched = _Watched(open_pidfd(pid) if self._root == Path("/") else -1)
            self._watched[pid, start_ticks] = watched
            # Check the start time after opening the pidfd: before, the pid could be reused.
            if self._started(pid) != start_ticks:
                self.forget(pid, start_ticks)
                return
            self._log.kills.pop(pid, None)
        now = self._clock()
        if watched.sampled_at is None or now - watched.sampled_at >= _SAMPLE_EVERY_S:
            watched.sampled_at = now
            self._sample(pid, watched, now)

    def handles(self) -> list[int]:
        """Descriptors that become readable when a process dies, for the agent's poll."""
        return [
            each.pidfd for each in self._watched.values() if each.pidfd >= 0 and not each.has_ended
        ]

    def is_there(self, pid: int, start_ticks: int) -> bool:
        """Whether the process certainly still exists, even if it has already recorded its end."""
        watched = self._watched.get((pid, start_ticks))
        return watched is not None and watched.pidfd >= 0 and not has_ended(watched.pidfd)

    def watches(self, pid: int, start_ticks: int) -> bool:
        """Whether this process is still observed, so that its exit status may become known."""
        return (pid, start_ticks) in self._watched

    def goes_on(self, pid: int, start_ticks: int) -> bool:
        """Whether this process still runs, although it no longer holds the lock on its journal.

        Such a process has called exec, or has closed all its descriptors, as daemons do. A dying
        process has no command line any more: the kernel frees its memory before its locks.
        """
        command = files.read_text(self._root / f"proc/{pid}/cmdline")
        return bool(command) and self._started(pid) == start_ticks

    @errors.contained()
    def forget(self, pid: int, start_ticks: int) -> None:
        """Stop observing a process."""
        watched = self._watched.pop((pid, start_ticks), None)
        if watched is not None and watched.pidfd >= 0:
            os.close(watched.pidfd)

    def _sample(self, pid: int, watched: _Watched, now: float) -> None:
        self._log.poll()
        resident_bytes = self._files.read(f"{self._root}/proc/{pid}/statm", _resident, "statm")
        if not resident_bytes:
            return  # a dying process has freed its memory: keep the last sample
        watched.resident_bytes = resident_bytes
        group = self._cgroups.group(pid)
        if group != watched.group:
            watched.group = group
            watched.kills.clear()
        count = None if group is None else self._count_kills(group)
        if count is not None:
            watched.kills.append((now, count))
            # Keep one older entry as the baseline for counting new kills.
            while len(watched.kills) > 1 and now - watched.kills[1][0] >= _REMEMBERED_S:
                watched.kills.popleft()

    def _count_kills(self, group: Group) -> int | None:
        """The cgroup's count of out-of-memory kills."""
        return (self._files.read(f"{group.path}/memory.events", numbers) or {}).get("oom_kill")

    # -- after a process has ended

    @errors.contained(default={})
    def why(self, pid: int, start_ticks: int) -> dict[str, Any]:
        """Evidence on the end of a process; more may follow once its parent has reaped it."""
        watched = self._watched.get((pid, start_ticks))
        status = self._zombie_status(pid, start_ticks)
        if status is None and watched is not None:
            status = exit_status(watched.pidfd)
        evidence: dict[str, Any] = {}
        if status is not None and os.WIFSIGNALED(status):
            evidence["signal"] = _signal_name(os.WTERMSIG(status))
        elif status is not None:
            evidence["exit_code"] = os.WEXITSTATUS(status)
        if watched is None:
            return evidence
        watched.has_ended = True
        now = self._clock()
        self._log.poll()
        # Look for an out-of-memory kill only after SIGKILL: the kernel sends no other signal when
        # memory runs out.
        if status is None or evidence.get("signal") == "SIGKILL":
            evidence.update(self._out_of_memory(pid, watched, now))
        if watched.resident_bytes is not None:
            evidence["resident_bytes"] = watched.resident_bytes
        return evidence

    def _out_of_memory(self, pid: int, watched: _Watched, now: float) -> dict[str, Any]:
        kill = self._log.kills.get(pid) if self._in_first_namespace else None
        if kill is not None:
            return kill
        if self._in_first_namespace and self._log.is_open:
            return {}  # the log lists every out-of-memory kill, and this process isn't listed
        if not watched.kills or watched.group is None:
            return {}
        count = self._count_kills(watched.group)
        last = watched.kills[-1][1] if count is None else count
        rise = last - watched.kills[0][1]
        if rise <= 0:
            return {}
        return {
            "out_of_memory": "cgroup events",
            "out_of_memory_kills": rise,
            "out_of_memory_within_s": round(now - watched.kills[0][0], 1),
            "out_of_memory_group": watched.group.path,
        }

    # -- /proc

    def _started(self, pid: int) -> int | None:
        fields = files.stat_fields(self._root / f"proc/{pid}")
        return int(fields[19]) if len(fields) > 19 and fields[19].isdigit() else None

    def _zombie_status(self, pid: int, start_ticks: int) -> int | None:
        """The exit status of a process that its parent has not reaped."""
        fields = files.stat_fields(self._root / f"proc/{pid}")
        if len(fields) < 50 or fields[0] != "Z" or fields[19] != str(start_ticks):
            return None
        with contextlib.suppress(OSError, ValueError):
            # Read it only of our user's processes: of others, the kernel shows 0 instead.
            if os.stat(self._root / f"proc/{pid}").st_uid == os.geteuid():
                return int(fields[49])
        return None


def _resident(statm: str) -> int:
    return int(statm.split()[1]) * _PAGE


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# -- the kernel's log


class KernelLog:
    """Out-of-memory kills in the kernel's log since it was opened.

    Pids are of the initial PID namespace.
    """

    def __init__(self, path: Path) -> None:
        self.kills: dict[int, dict[str, Any]] = {}
        self._handle = _open(path)

    @property
    def is_open(self) -> bool:
        """Whether the log is readable."""
        return self._handle >= 0

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def poll(self) -> None:
        """Read new lines."""
        for _ in range(_MOST_LINES if self._handle >= 0 else 0):
            try:
                block = os.read(self._handle, 8192)
            except BrokenPipeError:
                continue  # lines were overwritten: the next read continues at the oldest one
            except OSError:
                return
            if not block:
                return
            for line in block.decode("utf-8", "replace").splitlines():
                if (match := _LINE.match(line)) and (kill := _OOM_KILL.search(match[1])):
                    scope = "node" if kill[1].startswith("Out") else "memory cgroup"
                    found = {"out_of_memory": "kernel log", "out_of_memory_in": scope}
                    self.kills[int(kill[2])] = found
                    if len(self.kills) > _MOST_KILLS:
                        del self.kills[next(iter(self.kills))]


def _open(path: Path) -> int:
    try:
        handle = files.open_private(path)
    except OSError:
        return -1
    # Skip older lines: they are about processes that this agent has not observed.
    with contextlib.suppress(OSError):
        os.lseek(handle, 0, os.SEEK_END)
    return handle


# -- pidfds


def open_pidfd(pid: int) -> int:
    """Open a pidfd, which becomes readable when the process ends; -1 if that fails."""
    opened: Callable[[int], int] | None = getattr(os, "pidfd_open", None)
    try:
        return -1 if opened is None else opened(pid)
    except OSError:
        return -1


def has_ended(pidfd: int) -> bool:
    """Whether the process has ended, reaped or not."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def exit_status(pidfd: int) -> int | None:
    """The exit status of a reaped process; None before Linux 6.15."""
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


# -- one process, for the judge

# How long to wait for the exit status of a worker process. It becomes known when the parent reaps
# the worker, which may happen only just before the parent itself ends.
_PATIENCE_S = 2.0
# How long to wait for the exit status of any other process: the kernel drops the locks of a dying
# process a moment before its exit status is known.
_KERNEL_FOLLOWS_S = 0.5


class LocalHost(Host):
    """The facts that this node has about one of its processes."""

    reader: JournalReader

    def __init__(
        self,
        reader: JournalReader,
        causes: ExitCauses,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(reader)
        self._causes, self._clock = causes, clock
        self._process = self.pid, reader.start_ticks
        self._answers = Answers(reader.path, *self._process)
        # When the end of the process was first noticed.
        self._ended_s: float | None = None

    @errors.contained(default=False)
    def ended_well(self) -> bool | None:
        """Whether this process ended well, although it recorded no end; None if not known yet.

        It ended well if its exit code is 0, if it called exec, or if it is a worker that its parent
        terminated.
        """
        if self._causes.goes_on(*self._process):
            return True
        now_s = self._clock()
        self._ended_s = now_s if self._ended_s is None else self._ended_s
        cause, is_idle = self.cause(), process_state.is_idle(self.reader)
        known = cause.keys() & {"signal", "exit_code", "out_of_memory"}
        may_follow = is_idle or self._causes.watches(*self._process)
        patience_s = _PATIENCE_S if is_idle else _KERNEL_FOLLOWS_S
        if not known and may_follow and now_s - self._ended_s < patience_s:
            return None
        if not is_idle:
            return cause.get("exit_code") == 0
        return process_state.ended_by_parent(self.reader, cause, self._parent_lives())

    def _parent_lives(self) -> bool | None:
        parent = process_state.parent(self.reader)
        # If the process is in another PID namespace, the pid of its parent is unusable here: it may
        # belong to another process. So it is unknown whether the parent lives.
        if parent is None or self.pid != self.reader.pid:
            return None
        fields = files.stat_fields(Path("/proc") / str(parent))
        return bool(fields) and fields[0] not in ("Z", "X")

    def watch(self) -> None:
        self._causes.watch(*self._process)

    def ask(self, question: Question, now_ns: int) -> None:
        self._answers.ask(question, now_ns)

    def evidence(self, now_ns: int) -> Evidence:
        return self._answers.poll(now_ns)

    def cause(self) -> Mapping[str, Any]:
        return self._causes.why(*self._process)

    def present_ns(self) -> int:
        return time.time_ns() if self._causes.is_there(*self._process) else 0

    def forget(self) -> None:
        self._causes.forget(*self._process)
