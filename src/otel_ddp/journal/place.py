"""The private directory in which the processes of a node and their agent meet."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2s
from itertools import chain
from pathlib import Path
from typing import Any

from otel_ddp import files
from otel_ddp.errors import ConfigError
from otel_ddp.journal import layout
from otel_ddp.journal.writer import JournalWriter, open_journals

# The text between time and message in each line of an agent's log.
LOG_FORM = " otel-ddp agent: "
# How many bytes of the agent's log are read. A larger log is truncated when an agent starts.
_MOST_LOG_BYTES = 1 << 20
_LONGEST_HOLD_S = 120.0
_SHARED_MEMORY = Path("/dev/shm")
# Functions of `os` without which no journal is written. They allocate a journal before it is
# mapped, and stop a forked child from writing into it, for example. Without one of them, a journal
# could crash the training, or have wrong content.
_CALLS = ("posix_fallocate", "register_at_fork", "mkfifo", "pread", "geteuid")


class Place:
    """The files of a journal directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # The agent of this directory locks this file as long as it lives.
        self.agent_lock = directory / "agent.lock"
        self.agent_file = directory / "agent.json"
        self.agent_log = directory / "agent.log"
        # A rank locks this file while it starts an agent, so that eight ranks do not start eight.
        self.start_lock = directory / "start.lock"
        # Before this time no process starts an agent. The time is not written into `start.lock`:
        # closing any descriptor of a locked file drops the lock.
        self._start_delay = directory / "start.after"
        # The name that the agent has given to each node of each run, as JSON.
        self.nodes_file = directory / "nodes.json"
        # A fifo. A process writes a byte into it to wake the agent, e.g. at its end.
        self.doorbell = directory / "doorbell"

    def delay_start(self, seconds: float) -> None:
        """Keep all processes from starting an agent for *seconds*; 0 ends the delay."""
        with contextlib.suppress(OSError):
            files.replace(self._start_delay, f"{time.monotonic() + seconds:.3f}")

    def start_not_before(self) -> float:
        """Before this time on the monotonic clock, no process may start an agent."""
        try:
            moment = float(files.read_own(self._start_delay, 32))
        except (OSError, ValueError):
            return 0.0
        # Ignore a time in the far future: it was written before the last boot, which has reset the
        # monotonic clock.
        return moment if moment < time.monotonic() + _LONGEST_HOLD_S else 0.0

    def journals(self) -> list[Path]:
        try:
            with files.own_directory(self.directory) as folder:
                names = sorted(os.listdir(folder))
        except OSError:
            return []
        return [
            self.directory / name
            for name in names
            if name.endswith(layout.SUFFIX) and not name.startswith(".")
        ]

    def agent_is_alive(self) -> bool:
        """Whether an agent holds the lock, in any PID namespace."""
        return self.agent_pid() is not None

    def agent_pid(self) -> int | None:
        """The agent's pid; 0 if it is in another PID namespace, None if there is no agent."""
        return files.lock_holder(self.agent_lock)

    def last_line(self) -> str:
        """The last line of the log that the agents of this directory write."""
        try:
            lines = files.read_own(self.agent_log, _MOST_LOG_BYTES).decode(errors="replace")
        except OSError:
            return ""
        return next(filter(None, map(str.strip, reversed(lines.split("\n")))), "")

    def wake_agent(self) -> None:
        """Wake the agent, if there is one."""
        try:
            # Open the fifo for reading as well: otherwise a write after the agent has ended raises
            # SIGPIPE, which kills a process that has reset Python's handler.
            fd = files.open_own(self.doorbell, os.O_RDWR)
        except OSError:
            return
        try:
            os.write(fd, b"!")
        except OSError:
            pass  # the fifo is full, so other bytes wake the agent already
        finally:
            os.close(fd)


def candidates(env: Mapping[str, str], *, offline: bool = False) -> Iterator[Path]:
    """The default directories, best first.

    Offline runs have separate directories, so that no agent that exports reads their journals.
    """
    apart = "-offline" if offline else ""
    own = f"otel_ddp-{os.geteuid()}{apart}"
    yield _SHARED_MEMORY / own
    try:
        # Make the path absolute: the agent runs in another working directory.
        yield Path(env.get("TMPDIR") or tempfile.gettempdir()).absolute() / own
    except FileNotFoundError:
        return  # there is no writable temporary directory


def find(
    named: str, env: Mapping[str, str] | None = None, *, offline: bool = False
) -> tuple[list[Place], str]:
    """The usable directories, best first, and a remark for the user, which may be empty.

    *named*: the directory that the user chose; raises ConfigError if it is not usable.
    """
    env = os.environ if env is None else env
    if not named:
        return _find_default(env, offline)
    path = Path(named).absolute()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.private_directory(path, named=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(13, "is not writable", str(path))
    except OSError as error:
        raise ConfigError(
            f"OTEL_DDP_DIR or --dir must be a directory that this user can write to, got {named!r} "
            f"({error.strerror}). Name another one, or none for the default."
        ) from None
    return [Place(path)], ""


def _find_default(env: Mapping[str, str], offline: bool) -> tuple[list[Place], str]:
    found: list[Place] = []
    problems: list[str] = []
    for path in dict.fromkeys(candidates(env, offline=offline)):
        found += _usable(path, problems)
    if not found:
        return [], (
            f"{problems[0]}: this process is not recorded; name a writable directory in "
            "OTEL_DDP_DIR"
        )
    if not found[0].directory.is_relative_to(_SHARED_MEMORY):
        why = f"no shared memory for the journal ({problems[0]})"
        return found, f"{why}, so it lies in {found[0].directory}"
    return found, ""


def existing(named: str, env: Mapping[str, str]) -> list[Place]:
    """The directory that the user named, or the default directories, if they exist. For commands
    that only read."""
    here = (candidates(env, offline=offline) for offline in (False, True))
    paths: Iterable[Path] = chain.from_iterable(here)
    if named:
        paths = [Path(named).absolute()]
    # Don't use `path.is_dir()`, which raises if this user may not read the parent directory.
    return [
        Place(each) for each in dict.fromkeys(paths) if os.path.isdir(each) and files.is_kept(each)
    ]


def _usable(path: Path, problems: list[str]) -> list[Place]:
    try:
        return [Place(files.private_directory(path))]
    except OSError as error:
        problems.append(f"{path} cannot be used: {error.strerror}")
        return []


def missing_calls() -> str:
    """The system calls that a journal needs and this platform lacks; empty if it has all."""
    lacking = [f"os.{name}" for name in _CALLS if not hasattr(os, name)]
    try:
        import fcntl  # noqa: F401
    except ImportError:
        lacking.insert(0, "fcntl")
    return ", ".join(lacking)


# -- a new journal


def open_journal(
    directories: Sequence[Path], size: int, identity: Mapping[str, Any]
) -> tuple[JournalWriter | None, str]:
    """Open a journal in the first directory with room; a smaller one if no directory has room.

    Returns the writer, or None if there is no room at all; and a remark for the user if directory
    or size are not the requested ones.
    """
    first_why = why = ""
    for directory in directories:
        for attempt in _sizes(size):
            try:
                if not _has_room(directory, attempt):
                    _remove_dead_journals(directory, attempt)
                if not _has_room(directory, attempt):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                writer = JournalWriter(directory, attempt, identity)
            except OSError as error:
                why = f"{directory}: {error.strerror or error}"
                first_why = first_why or why
                continue
            if attempt < size:
                return writer, (
                    f"little room in {directory}: the journal is {attempt // 1024} KiB instead of "
                    f"{size // 1024} KiB, so it bridges a shorter absence of the agent"
                )
            if directory != directories[0]:
                return writer, f"no journal in {first_why}, so it lies in {directory}"
            return writer, ""
    return None, f"no room for a journal ({why}): this process is not recorded"


def _sizes(size: int) -> Iterator[int]:
    """The sizes to try: the requested size, then half of the previous one each time."""
    while size > layout.SMALLEST_FILE:
        yield size
        size //= 2
    yield layout.SMALLEST_FILE


def _has_room(directory: Path, size: int) -> bool:
    room = os.statvfs(directory)
    # Take at most an eighth of the free memory: data loaders and NCCL need shared memory too. A
    # tmpfs without a limit has 0 blocks.
    return not room.f_blocks or room.f_bavail * room.f_frsize >= 8 * size


def _remove_dead_journals(directory: Path, size: int) -> None:
    """Make room: remove journals of dead processes, the oldest first.

    An agent removes the journal of a dead process after reading it. So a journal that is left waits
    for an agent, which may never start.
    """
    dead: list[tuple[float, Path]] = []
    for path in directory.glob(f"*{layout.SUFFIX}"):
        # Skip this process's own journals: to open and close one would drop the lock on it.
        if path in open_journals or files.lock_holder(path) is not None:
            continue
        with contextlib.suppress(OSError):
            dead.append((path.stat().st_mtime, path))
    for _, path in sorted(dead):
        if _has_room(directory, size):
            return
        files.remove(path, *map(path.with_suffix, layout.COMPANION_SUFFIXES))


# -- the environment variables that configure the agent

_OF_AGENT = re.compile(
    "OTEL_(EXPORTER_|METRIC|TRACES_|LOGS_|RESOURCE_ATTRIBUTES|SERVICE_NAME|DDP_(LINGER_S|NODE|"
    "SPOOL_|SOURCES|STALL_TIMEOUT_S|SCRAPE_TOKEN_FILE|HISTORY_|ARTIFACTS|NOTIFY))"
)


def agent_digest(env: Mapping[str, str], *, offline: bool) -> str:
    """A digest of the environment variables that configure the agent. The variables themselves are
    not stored, since they may contain tokens."""
    variables = sorted(pair for pair in env.items() if _OF_AGENT.match(pair[0]))
    content = repr((variables, offline)).encode("utf-8", "replace")
    return blake2s(content, digest_size=8).hexdigest()
