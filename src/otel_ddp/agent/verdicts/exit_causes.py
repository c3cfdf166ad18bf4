"""Why a process is gone, as far as the kernel, its memory cgroup or its launcher told us."""

from __future__ import annotations

import collections
import contextlib
import fcntl
import json
import os
import re
import select
import signal
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from otel_ddp import containment
from otel_ddp.agent.node.host.cgroup import Cgroups, Group
from otel_ddp.agent.node.kernel_files import KernelFiles

# A process may take a while to die: its memory is given back before its journal's lock.
_REMEMBERED_S = 30.0
_SAMPLE_S = 1.0
_MOST_LINES = 2000
_MOST_KILLS = 1000
_MOST_XIDS = 100
_MOST_EVIDENCE = 3
_LONGEST_TEXT = 300
_LONGEST_FILE = 64 * 1024
_LONGEST_ENVIRON = 256 * 1024
# A cgroup of version 1 without a limit says so with a number near 2^63.
_NO_LIMIT = 1 << 60
_PAGE = os.sysconf("SC_PAGE_SIZE")

_KERNEL_LINE = re.compile(r"\d+,\d+,\d+,[^;]*;(.*)")
_OOM_KILL = re.compile(r"((?:Memory cgroup o|O)ut of memory).*?: Kill(?:ed)? process (\d+) \(")
_OOM_RESIDENT = re.compile(r"(?:anon|file|shmem)-rss:(\d+)kB")
_XID = re.compile(r"NVRM: Xid \(.*?\): (\d+)")
_XID_PROCESS = re.compile(r"\bpid=(\d+)")

# include/uapi/linux/pidfd.h: _IOWR(0xFF, 11, struct pidfd_info), whose first version has 64 bytes.
_PIDFD_GET_INFO = (3 << 30) | (64 << 16) | (0xFF << 8) | 11
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_INFO = struct.Struct("<Q52xi")

# Processes that are in the first PID namespace have the numbers that the kernel's log has.
_FIRST_PID_NAMESPACE = f"pid:[{0xEFFFFFFC}]"


class _Kill(NamedTuple):
    """The kernel's log says that this process was killed for want of memory."""

    scope: str
    resident_bytes: int | None


class Memory(NamedTuple):
    """What a process holds, and how much there is for it."""

    private_bytes: int
    """Its own alone: pages of files that it maps are given back when others need the room."""
    limit_bytes: int


class _Watched:
    """What is remembered of a process while it lives."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.sampled_at: float | None = None
        self.gone = False
        self.group: Group | None = None
        # When, and how many out-of-memory kills its cgroup had counted by then.
        self.kills: collections.deque[tuple[float, int]] = collections.deque()
        self.resident_bytes: int | None = None
        self.private_bytes = 0
        self.resident_at = 0.0
        self.limit_bytes: int | None = None
        self.limit_of = ""
        self.error_file = ""


class ExitCauses:
    """Called from the agent's loop alone. What cannot be read is not said."""

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._clock = clock
        # By process id and start: a number of another PID namespace may be somebody else's here.
        self._watched: dict[tuple[int, int], _Watched] = {}
        self._kills: dict[int, _Kill] = {}
        self._xids: collections.deque[tuple[float, int | None, str]] = collections.deque(
            maxlen=_MOST_XIDS
        )
        self._log = self._open_log()
        self._numbers_agree = self._link("proc/self/ns/pid") == _FIRST_PID_NAMESPACE
        self._cgroups = Cgroups(KernelFiles(), proc=root / "proc", root=root)

    def close(self) -> None:
        for pid, start_ticks in list(self._watched):
            self.forget(pid, start_ticks)
        if self._log >= 0:
            os.close(self._log)
            self._log = -1

    # -- while it lives

    @containment.contained()
    def watch(self, pid: int, start_ticks: int) -> None:
        """Remember what will not be there any more when this process is gone; cheap, each tick."""
        watched = self._watched.get((pid, start_ticks))
        if watched is None:
            watched = self._watched[pid, start_ticks] = _Watched(self._open_handle(pid))
            # Looked at after it was opened: the number may have had another owner until then.
            if self._started(pid) != start_ticks:
                self.forget(pid, start_ticks)
                return
            self._kills.pop(pid, None)
            watched.error_file = self._error_file(pid)
        now = self._clock()
        if watched.sampled_at is None or now - watched.sampled_at >= _SAMPLE_S:
            watched.sampled_at = now
            self._sample(pid, watched, now)

    def memory(self, pid: int, start_ticks: int) -> Memory | None:
        """As it was when the process was last watched; None where that is not known."""
        watched = self._watched.get((pid, start_ticks))
        if watched is None or watched.resident_bytes is None or watched.limit_bytes is None:
            return None
        return Memory(watched.private_bytes, watched.limit_bytes)

    def handles(self) -> list[int]:
        """Descriptors that become readable when a process dies: the agent sleeps on them."""
        return [
            each.handle for each in self._watched.values() if each.handle >= 0 and not each.gone
        ]

    def is_there(self, pid: int, start_ticks: int) -> bool:
        """Whether this process is surely still there, whatever it has told of its end."""
        watched = self._watched.get((pid, start_ticks))
        if watched is None or watched.handle < 0:
            return False
        asked = select.poll()
        asked.register(watched.handle, select.POLLIN)
        return not asked.poll(0)

    @containment.contained()
    def forget(self, pid: int, start_ticks: int) -> None:
        """Nobody will ask about this process any more."""
        watched = self._watched.pop((pid, start_ticks), None)
        if watched is not None and watched.handle >= 0:
            os.close(watched.handle)

    def _sample(self, pid: int, watched: _Watched, now: float) -> None:
        self._read_log(now)
        held = self._held(pid)
        if held is None:
            return  # gone, or about to: what we know is the last there was
        watched.resident_bytes, watched.private_bytes = held
        watched.resident_at = now
        group = self._group(pid)
        if group != watched.group:
            watched.group = group
            watched.kills.clear()
        watched.limit_bytes, watched.limit_of = self._limit(group)
        count = None if group is None else self._count_kills(group)
        if count is not None:
            watched.kills.append((now, count))
            # The first that stays is the last one older than what we look back on.
            while len(watched.kills) > 1 and now - watched.kills[1][0] >= _REMEMBERED_S:
                watched.kills.popleft()

    # -- when it is gone

    @containment.contained(default={})
    def why(self, pid: int, start_ticks: int) -> dict[str, Any]:
        """What is known of its end; more may be known a moment later, when it has been reaped."""
        watched = self._watched.get((pid, start_ticks))
        if watched is None:
            return {}
        watched.gone = True
        now = self._clock()
        self._read_log(now)
        evidence: dict[str, Any] = {}
        status = exit_status(watched.handle)
        if status is not None and os.WIFSIGNALED(status):
            evidence["signal"] = _signal_name(os.WTERMSIG(status))
        elif status is not None:
            evidence["exit_code"] = os.WEXITSTATUS(status)
        # The out-of-memory killer kills with SIGKILL and with nothing else.
        if status is None or evidence.get("signal") == "SIGKILL":
            evidence.update(self._out_of_memory(pid, watched, now))
        # What the kernel says it held when it was killed is better than what we read before.
        if watched.resident_bytes is not None and "resident_bytes" not in evidence:
            evidence["resident_bytes"] = watched.resident_bytes
            evidence["resident_age_s"] = round(now - watched.resident_at, 1)
        if watched.limit_bytes is not None:
            evidence["memory_limit_bytes"] = watched.limit_bytes
            evidence["memory_limit_of"] = watched.limit_of
        if said := self._launcher_error(watched.error_file):
            evidence["launcher_error"] = said
        if xids := self._xids_about(pid, now):
            evidence["xid"] = xids
        return evidence

    def _out_of_memory(self, pid: int, watched: _Watched, now: float) -> dict[str, Any]:
        kill = self._kills.get(pid) if self._numbers_agree else None
        if kill is not None:
            found = {"out_of_memory": "kernel log", "out_of_memory_in": kill.scope}
            if kill.resident_bytes is None:
                return found
            return {**found, "resident_bytes": kill.resident_bytes}
        if self._numbers_agree and self._log >= 0:
            return {}  # the kernel's log names whom it kills, and it was not this one
        if not watched.kills or watched.group is None:
            return {}
        count = self._count_kills(watched.group)
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
            text
            for at, about, text in self._xids
            if now - at <= _REMEMBERED_S
            and (about is None or not self._numbers_agree or about == pid)
        ]
        return found[-_MOST_EVIDENCE:]

    def _launcher_error(self, named: str) -> str:
        """What torch's elastic agent was told by the worker: JSON of an exception."""
        text = _read_at_once(self._under(named)) if named.startswith("/") else None
        if text is None:
            return ""
        try:
            said = json.loads(text)
        except (ValueError, RecursionError):
            return ""
        message = said.get("message") if isinstance(said, dict) else None
        if isinstance(message, dict):
            message = message.get("message")
        lines = message.strip().splitlines() if isinstance(message, str) else []
        return lines[0][:_LONGEST_TEXT] if lines else ""

    # -- /proc

    def _started(self, pid: int) -> int | None:
        text = self._read(f"proc/{pid}/stat")
        # The name in parentheses may hold anything, parentheses too.
        fields = text.rpartition(")")[2].split() if text else []
        return int(fields[19]) if len(fields) > 19 and fields[19].isdigit() else None

    def _held(self, pid: int) -> tuple[int, int] | None:
        """Bytes in memory, and those of them that are nobody else's."""
        fields = (self._read(f"proc/{pid}/statm") or "").split()[:3]
        # A process that is dying has given its memory back already.
        if len(fields) < 3 or not all(map(str.isdigit, fields)) or fields[1] == "0":
            return None
        resident, shared = int(fields[1]), int(fields[2])
        return resident * _PAGE, max(resident - shared, 0) * _PAGE

    def _error_file(self, pid: int) -> str:
        content = self._read(f"proc/{pid}/environ", _LONGEST_ENVIRON) or ""
        for variable in content.split("\0"):
            name, _, value = variable.partition("=")
            if name == "TORCHELASTIC_ERROR_FILE":
                return value
        return ""

    def _open_handle(self, pid: int) -> int:
        opened: Callable[[int], int] | None = getattr(os, "pidfd_open", None)
        if opened is None or self._root != Path("/"):
            return -1
        try:
            return opened(pid)
        except OSError:
            return -1

    # -- the memory cgroup

    def _group(self, pid: int) -> Group | None:
        for group in self._cgroups.groups(pid, "memory"):
            if self._count_kills(group) is not None:
                return group
        return None

    def _count_kills(self, group: Group) -> int | None:
        name = "memory.oom_control" if group.version == 1 else "memory.events"
        counters = _pairs(_text(Path(group.path, name)))
        return counters.get("oom_kill")

    def _limit(self, group: Group | None) -> tuple[int | None, str]:
        """The smallest limit above this process, and whose it is."""
        found: list[tuple[int, str]] = []
        total = _pairs((self._read("proc/meminfo") or "").replace(":", "")).get("MemTotal")
        if total is not None:
            found.append((total * 1024, "node"))
        if group is not None:
            name = "memory.limit_in_bytes" if group.version == 1 else "memory.max"
            for path in group.upward():
                limit = (_text(Path(path, name)) or "").strip()
                if limit.isdigit() and int(limit) < _NO_LIMIT:
                    found.append((int(limit), "memory cgroup"))
        return min(found) if found else (None, "")

    # -- the kernel's log

    def _open_log(self) -> int:
        try:
            log = os.open(
                self._root / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
            )
        except OSError:
            return -1
        # What was said before we came is about processes that we never watched.
        with contextlib.suppress(OSError):
            os.lseek(log, 0, os.SEEK_END)
        return log

    def _read_log(self, now: float) -> None:
        for _ in range(_MOST_LINES if self._log >= 0 else 0):
            try:
                block = os.read(self._log, 8192)
            except BrokenPipeError:
                continue  # it was faster than we: the next reading is at its oldest line
            except OSError:
                return
            if not block:
                return
            for line in block.decode("utf-8", "replace").splitlines():
                if match := _KERNEL_LINE.match(line):
                    self._understand(match[1], now)

    def _understand(self, text: str, now: float) -> None:
        if kill := _OOM_KILL.search(text):
            sizes = [int(size) * 1024 for size in _OOM_RESIDENT.findall(text)]
            scope = "node" if kill[1].startswith("Out") else "memory cgroup"
            if len(self._kills) >= _MOST_KILLS:
                self._kills.pop(next(iter(self._kills)))
            self._kills[int(kill[2])] = _Kill(scope, sum(sizes) if sizes else None)
        elif _XID.search(text):
            about = _XID_PROCESS.search(text)
            self._xids.append((now, int(about[1]) if about else None, text[:_LONGEST_TEXT]))

    # -- files under the root

    def _under(self, path: str) -> Path:
        return self._root / path.lstrip("/")

    def _read(self, path: str, most: int = _LONGEST_FILE) -> str | None:
        return _text(self._under(path), most)

    def _link(self, path: str) -> str:
        try:
            return os.readlink(self._under(path))
        except OSError:
            return ""


def _text(path: Path, most: int = _LONGEST_FILE) -> str | None:
    try:
        with path.open("rb", buffering=0) as file:
            pieces = []
            # A file of /proc comes in pieces of a page.
            while most > 0 and (piece := file.read(most)):
                pieces.append(piece)
                most -= len(piece)
        return b"".join(pieces).decode("utf-8", "replace")
    except OSError:
        return None


def _read_at_once(path: Path) -> str | None:
    """A file whose name somebody else gave: whatever it is, nobody waits for it."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        return os.read(handle, _LONGEST_FILE).decode("utf-8", "replace")
    except OSError:
        return None
    finally:
        os.close(handle)


def _pairs(text: str | None) -> Mapping[str, int]:
    """Lines of a word and a number."""
    rows = (line.split() for line in (text or "").splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def exit_status(handle: int) -> int | None:
    """How a process ended, which Linux tells from 6.15 on, once its parent has asked for it."""
    if handle < 0:
        return None
    answer = bytearray(_PIDFD_INFO.size)
    _PIDFD_INFO.pack_into(answer, 0, _PIDFD_INFO_EXIT, 0)
    try:
        fcntl.ioctl(handle, _PIDFD_GET_INFO, answer)
    except OSError:
        return None
    mask, status = _PIDFD_INFO.unpack(answer)
    return int(status) if mask & _PIDFD_INFO_EXIT else None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
