"""Finds out why a process ended, from the kernel, its memory cgroup and its launcher."""

from __future__ import annotations

import collections
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from otel_ddp import files
from otel_ddp.agent.node.host.limits import Group
from otel_ddp.agent.verdicts.kernel_log import KernelLog
from otel_ddp.agent.verdicts.pidfd import exit_status, has_ended, open_pidfd
from otel_ddp.agent.verdicts.process_memory import ProcessMemory
from otel_ddp.errors import containment

# A process may take a while to die: it gives back its memory before its journal's lock.
_REMEMBERED_S = 30.0
_SAMPLE_EVERY_S = 1.0
_MOST_XIDS = 3
_LONGEST_TEXT = 300
_LONGEST_FILE = 64 * 1024
_LONGEST_ENVIRON = 256 * 1024

# Process ids in the first PID namespace are those of the kernel's log.
_FIRST_PID_NAMESPACE = f"pid:[{0xEFFFFFFC}]"


class Memory(NamedTuple):
    """What a process holds, and its limit."""

    private_bytes: int
    """Without shared pages: the kernel takes back pages of mapped files when memory is short."""
    limit_bytes: int


class _Watched:
    """What is remembered of a process while it lives."""

    def __init__(self, pidfd: int) -> None:
        self.pidfd = pidfd
        self.sampled_at: float | None = None
        self.has_ended = False
        self.group: Group | None = None
        # Times, and how many out-of-memory kills its cgroup had counted by then.
        self.kills: collections.deque[tuple[float, int]] = collections.deque()
        self.resident_bytes: int | None = None
        self.private_bytes = 0
        self.resident_at = 0.0
        self.limit_bytes: int | None = None
        self.limit_of = ""
        self.error_file = ""


class ExitCauses:
    """Called from the agent's loop alone. What cannot be read is left out."""

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._clock = clock
        # By process id and start: in another PID namespace the id may be another process's.
        self._watched: dict[tuple[int, int], _Watched] = {}
        self._log = KernelLog(root / "dev/kmsg")
        self._memory = ProcessMemory(root)
        self._in_first_namespace = self._link("proc/self/ns/pid") == _FIRST_PID_NAMESPACE

    def close(self) -> None:
        for pid, start_ticks in list(self._watched):
            self.forget(pid, start_ticks)
        self._log.close()

    # -- while it lives

    @containment.contained()
    def watch(self, pid: int, start_ticks: int) -> None:
        """Remember what cannot be read any more once the process has ended; cheap, every round."""
        watched = self._watched.get((pid, start_ticks))
        if watched is None:
            watched = self._watched[pid, start_ticks] = _Watched(self._open_pidfd(pid))
            # Checked after it was opened: until then the number may have had another owner.
            if self._started(pid) != start_ticks:
                self.forget(pid, start_ticks)
                return
            self._log.kills.pop(pid, None)
            watched.error_file = self._error_file(pid)
        now = self._clock()
        if watched.sampled_at is None or now - watched.sampled_at >= _SAMPLE_EVERY_S:
            watched.sampled_at = now
            self._sample(pid, watched, now)

    def memory(self, pid: int, start_ticks: int) -> Memory | None:
        """The memory when the process was last watched; None where that is not known."""
        watched = self._watched.get((pid, start_ticks))
        if watched is None or watched.resident_bytes is None or watched.limit_bytes is None:
            return None
        return Memory(watched.private_bytes, watched.limit_bytes)

    def handles(self) -> list[int]:
        """Descriptors that become readable when a process dies: the agent sleeps on them."""
        return [
            each.pidfd for each in self._watched.values() if each.pidfd >= 0 and not each.has_ended
        ]

    def is_there(self, pid: int, start_ticks: int) -> bool:
        """Whether this process surely still exists, even if it has reported its end."""
        watched = self._watched.get((pid, start_ticks))
        return watched is not None and watched.pidfd >= 0 and not has_ended(watched.pidfd)

    def watches(self, pid: int, start_ticks: int) -> bool:
        """Whether it may still become known how this process ended."""
        return (pid, start_ticks) in self._watched

    def goes_on(self, pid: int, start_ticks: int) -> bool:
        """Whether this process runs a program: then it has replaced the one of its journal.

        The kernel takes a dying process's memory, its command line too, before its locks.
        """
        return self._started(pid) == start_ticks and bool(self._read(f"proc/{pid}/cmdline"))

    @containment.contained()
    def forget(self, pid: int, start_ticks: int) -> None:
        """The process is of no interest any more."""
        watched = self._watched.pop((pid, start_ticks), None)
        if watched is not None and watched.pidfd >= 0:
            os.close(watched.pidfd)

    def _sample(self, pid: int, watched: _Watched, now: float) -> None:
        self._log.poll(now)
        held = self._memory.held(pid)
        if held is None:
            return  # it has ended or is about to: the last sample is the last there was
        watched.resident_bytes, watched.private_bytes = held
        watched.resident_at = now
        group = self._memory.group(pid)
        if group != watched.group:
            watched.group = group
            watched.kills.clear()
        watched.limit_bytes, watched.limit_of = self._memory.limit(group)
        count = None if group is None else self._memory.count_kills(group)
        if count is not None:
            watched.kills.append((now, count))
            # The first entry that stays is the last one before the time that is remembered.
            while len(watched.kills) > 1 and now - watched.kills[1][0] >= _REMEMBERED_S:
                watched.kills.popleft()

    # -- when it has ended

    @containment.contained(default={})
    def why(self, pid: int, start_ticks: int) -> dict[str, Any]:
        """What is known of its end. More may be known a moment later, when it has been reaped."""
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
        self._log.poll(now)
        # The out-of-memory killer kills with SIGKILL and with nothing else.
        if status is None or evidence.get("signal") == "SIGKILL":
            evidence.update(self._out_of_memory(pid, watched, now))
        # The kernel's own figure, from the moment of the kill, is better than the last sample.
        if watched.resident_bytes is not None and "resident_bytes" not in evidence:
            evidence["resident_bytes"] = watched.resident_bytes
            evidence["resident_age_s"] = round(now - watched.resident_at, 1)
        if watched.limit_bytes is not None:
            evidence["memory_limit_bytes"] = watched.limit_bytes
            evidence["memory_limit_of"] = watched.limit_of
        if error := self._launcher_error(watched.error_file):
            evidence["launcher_error"] = error
        if xids := self._xids_about(pid, now):
            evidence["xid"] = xids
        return evidence

    def _out_of_memory(self, pid: int, watched: _Watched, now: float) -> dict[str, Any]:
        kill = self._log.kills.get(pid) if self._in_first_namespace else None
        if kill is not None:
            found = {"out_of_memory": "kernel log", "out_of_memory_in": kill.scope}
            if kill.resident_bytes is None:
                return found
            return {**found, "resident_bytes": kill.resident_bytes}
        if self._in_first_namespace and self._log.is_open:
            return {}  # the log names every process that the kernel kills, and not this one
        if not watched.kills or watched.group is None:
            return {}
        count = self._memory.count_kills(watched.group)
        last = watched.kills[-1][1] if count is None else count
        rise = last - watched.kills[0][1]
        if rise <= 0:
            return {}
        since_s = round(now - watched.kills[0][0], 1)
        return {
            "out_of_memory": "cgroup events",
            "out_of_memory_kills": rise,
            "out_of_memory_within_s": since_s,
            "out_of_memory_group": watched.group.path,
        }

    def _xids_about(self, pid: int, now: float) -> list[str]:
        found = [
            xid.text
            for xid in self._log.xids
            if now - xid.at <= _REMEMBERED_S
            and (xid.pid is None or not self._in_first_namespace or xid.pid == pid)
        ]
        return found[-_MOST_XIDS:]

    def _launcher_error(self, path: str) -> str:
        """The exception that the worker has written for torch's elastic agent, as JSON."""
        # It may be anything, a fifo too: the agent never waits for it.
        content = files.read_mapping(self._under(path)) if path.startswith("/") else {}
        message = content.get("message")
        if isinstance(message, dict):
            message = message.get("message")
        lines = message.strip().splitlines() if isinstance(message, str) else []
        return lines[0][:_LONGEST_TEXT] if lines else ""

    # -- /proc

    def _stat(self, pid: int) -> list[str]:
        """The fields from the third on."""
        text = self._read(f"proc/{pid}/stat")
        # The name in parentheses may contain anything, parentheses too.
        return text.rpartition(")")[2].split() if text else []

    def _started(self, pid: int) -> int | None:
        fields = self._stat(pid)
        return int(fields[19]) if len(fields) > 19 and fields[19].isdigit() else None

    def _zombie_status(self, pid: int, start_ticks: int) -> int | None:
        """How the process ended, as long as its parent has not asked."""
        fields = self._stat(pid)
        if len(fields) < 50 or fields[0] != "Z" or fields[19] != str(start_ticks):
            return None
        try:
            # The kernel shows 0 to other users.
            ours = os.stat(self._under(f"proc/{pid}")).st_uid == os.geteuid()
        except OSError:
            return None
        return int(fields[49]) if ours and fields[49].isdigit() else None

    def _error_file(self, pid: int) -> str:
        content = self._read(f"proc/{pid}/environ", _LONGEST_ENVIRON) or ""
        for variable in content.split("\0"):
            name, _, value = variable.partition("=")
            if name == "TORCHELASTIC_ERROR_FILE":
                return value
        return ""

    def _open_pidfd(self, pid: int) -> int:
        pidfd = open_pidfd(pid) if self._root == Path("/") else None
        return -1 if pidfd is None else pidfd

    def _under(self, path: str) -> Path:
        return self._root / path.lstrip("/")

    def _read(self, path: str, most: int = _LONGEST_FILE) -> str | None:
        return files.read_text(self._under(path), most)

    def _link(self, path: str) -> str:
        try:
            return os.readlink(self._under(path))
        except OSError:
            return ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
