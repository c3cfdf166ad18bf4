"""Answers, when the agent asks, where this process is: its collectives, and what its threads do."""

from __future__ import annotations

import _thread
import atexit
import base64
import contextlib
import json
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from otel_ddp import containment
from otel_ddp.journal.layout import ANSWER_SUFFIX, ASK_SUFFIX
from otel_ddp.journal.ownership import close_ours, file_of

# Beside the journal: a fifo with the questions, a file with the last answer.

_MOST_THREADS = _MOST_FRAMES = 64
_MOST_GROUPS = 256
# Of each process group: more than two ranks can differ by while one of them waits for the other.
_MOST_COLLECTIVES = 20
_LONGEST_TEXT = 300
# Lines of these files are not what anybody looks for.
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_END_S = 0.5
# Arrivals at collectives are told only where that stops training for less than this share of the
# time: torch writes down the whole ring of its recorder, and holds the interpreter's lock. Before
# it is known how long that takes: this much for each entry, of as many as torch remembers.
_MOST_STOPPED = 0.001
_ENTRY_S = 30e-6
_RING = 2000
_RING_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
# Whoever blocks these and makes one of them gets them by no other way than the fault itself.
_FAULTS = {
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP)
}


class _Witness:
    """One fifo, and one thread that is parked in a read of it."""

    def __init__(self, journal: Path, training: Callable[[], int]) -> None:
        """*training*: the thread that trains, as the hooks have noted it; 0 while none has."""
        self.journal = journal
        self._training = training
        self._ask = journal.with_suffix(ASK_SUFFIX)
        self._answer = journal.with_suffix(ANSWER_SUFFIX)
        self._over = False
        # Held while an answer is under way: an exit waits for that, and for nothing else.
        self._answering = threading.Lock()
        os.mkfifo(self._ask, 0o600)
        # For writing as well: it is then never at its end, whoever comes and goes.
        self._fd = os.open(self._ask, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._fifo = file_of(self._fd)
        self._arrivals = _Arrivals()
        self._gone = threading.Event()
        # The thread inherits what is blocked here. A signal that all other threads block is
        # waited for by the user, and must not be delivered to a thread that he knows nothing of.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _FAULTS)
        try:
            # Not a Thread: whoever joins all of those that there are must not wait for this one.
            _thread.start_new_thread(self._park, ())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close(self) -> None:
        """Answer nothing more; waits for an answer that is being written, not for long."""
        self._over = True
        try:
            self._wake()
        except OSError:
            containment.reraise_foreign()
        gone = self._gone.wait(_END_S)
        for path in (self._ask, self._answer):
            _remove(path)
        if gone:
            close_ours(self._fd, self._fifo)

    def _wake(self) -> None:
        if file_of(self._fd) == self._fifo:
            os.set_blocking(self._fd, False)
            os.write(self._fd, b"\n")
            return
        # Closed by whoever closes all there are. The thread is still parked in its read.
        fd = os.open(self._ask, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.write(fd, b"\n")
        finally:
            os.close(fd)

    def leave_to_exit(self) -> None:
        """The interpreter ends: a thread may be parked at that moment, but not be at work."""
        self._over = True
        self._answering.acquire(timeout=_END_S)

    def forget(self) -> None:
        """In a forked child: the thread is not here, and the questions are the parent's."""
        close_ours(self._fd, self._fifo)

    def _park(self) -> None:
        try:
            self._listen()
        finally:
            self._gone.set()

    def _listen(self) -> None:
        # Looked at each time: what is read from another file is taken from somebody.
        while not self._over and file_of(self._fd) == self._fifo:
            try:
                asked = os.read(self._fd, 65536)
            except OSError:
                return
            if self._answering.acquire(blocking=False):
                try:
                    if not self._over:
                        self._reply(asked)
                finally:
                    self._answering.release()

    @containment.contained()
    def _reply(self, asked: bytes) -> None:
        # One answer does for several questions: their numbers grow, and the most is told.
        words = asked.split()
        numbers = [int(word) for word in words if word.isdigit()]
        if not numbers:
            return
        everything = b"what" in words
        answer: dict[str, Any] = {
            "question": max(numbers),
            "kind": "what" if everything else "where",
            "package": _PACKAGE,
            "threads": _threads(threading.get_ident(), self._training()),
            "groups": _groups(),
        }
        if everything:
            answer["collectives"] = _collectives()
        if b"when" in words:
            answer["arrivals"] = self._arrivals.told()
        answer["time_ns"], answer["monotonic_ns"] = time.time_ns(), time.monotonic_ns()
        half = self._answer.with_suffix(f"{ANSWER_SUFFIX}.half")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(half, flags, 0o600)
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                json.dump(answer, file)
            os.replace(half, self._answer)
        except OSError:
            # No room, or no directory any more: nobody is told, nobody is hurt.
            half.unlink(missing_ok=True)


def _remove(path: Path) -> None:
    try:
        path.unlink()
    except OSError:
        containment.reraise_foreign()


_witness: _Witness | None = None


@containment.contained()
def start(journal_path: Path, training: Callable[[], int]) -> None:
    """Be ready to answer questions beside this journal, and no other."""
    global _witness
    if _witness is not None and _witness.journal != journal_path:
        stop()
    if _witness is None:
        try:
            _witness = _Witness(journal_path, training)
        except (OSError, RuntimeError) as error:  # no fifos here, or no more threads
            containment.reraise_foreign()
            containment.log.info("Nobody can ask this process where it hangs: %s", error)


@containment.contained()
def stop() -> None:
    """Be gone without a trace."""
    global _witness
    found, _witness = _witness, None
    if found is not None:
        found.close()


# -- what the threads do


def _threads(own: int, trains: int) -> list[dict[str, Any]]:
    """The stacks of all threads but our own, the main one first; no frame is held on to."""
    known = {each.ident: each for each in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sys._current_frames()
    # Our own would hold all the others, itself included, until the garbage is collected.
    frames.pop(own, None)
    found = []
    first = sorted(frames, key=lambda each: (each != main, each != trains))
    for ident in first[:_MOST_THREADS]:
        thread = known.get(ident)
        found.append(
            {
                "name": "" if thread is None else thread.name[:_LONGEST_TEXT],
                "id": None if thread is None else thread.native_id,
                "main": ident == main,
                "trains": ident == trains,
                "daemon": None if thread is None else thread.daemon,
                "frames": _stack(frames[ident]),
            }
        )
    return found


def _stack(innermost: FrameType) -> list[tuple[str, int | None, str]]:
    """File, line and function of each frame, the innermost first."""
    found: list[tuple[str, int | None, str]] = []
    frame: FrameType | None = innermost
    while frame is not None and len(found) < _MOST_FRAMES:
        code = frame.f_code
        # The end of a path tells more than its beginning.
        found.append(
            (code.co_filename[-_LONGEST_TEXT:], frame.f_lineno, code.co_name[:_LONGEST_TEXT])
        )
        frame = frame.f_back
    return found


# -- what it has put in line. All of it private, and asked for by name.


def _world() -> Any:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return getattr(getattr(torch.distributed, "distributed_c10d", None), "_world", None)


def _groups() -> list[dict[str, Any]]:
    """The process groups, by the names that they have on all ranks, and how far each has come.

    Each group itself counts what was put in line: under its own name, and without the recorder,
    which numbers groups differently on each rank and is not there for all backends.
    """
    found: list[dict[str, Any]] = []
    world = _world()
    configs = getattr(world, "pg_backend_config", {})
    members = getattr(world, "pg_group_ranks", {})
    for group, name in list(getattr(world, "pg_names", {}).items())[:_MOST_GROUPS]:
        count = getattr(group, "_get_sequence_number_for_group", None)
        described = getattr(group, "group_desc", "")
        found.append(
            {
                "name": str(name),
                "description": "" if described == "undefined" else str(described),
                "backend": str(configs.get(group, "")),
                "size": len(members.get(group, ())),
                "enqueued": None if count is None else _asked(count),
                "started": None,
                "completed": None,
            }
        )
    for backend, said in _recorders(includeCollectives=False):
        statuses = said.get("pg_status")
        if isinstance(statuses, dict):
            _put_statuses(backend, statuses, found)
    return found


def _put_statuses(backend: str, statuses: dict[str, Any], groups: list[dict[str, Any]]) -> None:
    """The recorder counts the groups of a backend in the order in which they were made."""
    mine = [each for each in groups if backend in each["backend"]]
    for number, status in statuses.items():
        if not number.isdigit() or int(number) >= len(mine) or not isinstance(status, dict):
            continue
        group = mine[int(number)]
        # Where groups were taken down the order no longer holds: then the numbers differ.
        if _whole(status.get("last_enqueued_collective")) == group["enqueued"]:
            group["started"] = _whole(status.get("last_started_collective"))
            group["completed"] = _whole(status.get("last_completed_collective"))


def _collectives() -> list[dict[str, Any]]:
    """The last collectives of each process group. Slow: on NCCL those under way, on gloo all."""
    found: dict[str, list[dict[str, Any]]] = {}
    for _, said in _recorders(includeCollectives=True, onlyActive=True):
        entries = said.get("entries")
        for entry in entries if isinstance(entries, list) else ():
            name = entry.get("process_group")
            if entry.get("is_p2p") or not isinstance(name, list) or not name:
                continue
            mine = found.setdefault(str(name[0]), [])
            mine.append(
                {
                    "group": str(name[0]),
                    "number": entry.get("collective_seq_id"),
                    "op": str(entry.get("profiling_name"))[:_LONGEST_TEXT],
                    "sizes": str(entry.get("input_sizes"))[:_LONGEST_TEXT],
                }
            )
            del mine[:-_MOST_COLLECTIVES]
    return [each for mine in found.values() for each in mine]


class _Arrivals:
    """When this rank arrived at its collectives, as rarely as its price allows."""

    def __init__(
        self,
        env: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
        works: Callable[[], float] = time.thread_time,
    ) -> None:
        """*works*: a clock of this thread's own work, which others make no longer than it is."""
        rings = [env[name] for name in _RING_VARIABLES if env.get(name, "").isdigit()]
        self._takes_s = (int(rings[0]) if rings else _RING) * _ENTRY_S
        self._clock, self._works = clock, works
        self._told_s = clock()

    def told(self) -> dict[str, Any]:
        """What torch's recorder of gloo holds, as torch packs it, or in how long it may be had."""
        now_s = self._clock()
        pause_s = self._takes_s / _MOST_STOPPED
        if (left_s := self._told_s + pause_s - now_s) > 0:
            return {"in_s": left_s}
        began_s = self._works()
        # On nccl it is the host that arrives, and the device that waits: nothing to compare.
        dump = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace", None)
        said = b""
        if dump is not None and _world() is not None:
            # Stacks would take seconds. Half of the time that the same takes as JSON.
            wanted = {"includeCollectives": True, "includeStackTraces": False, "onlyActive": False}
            said = _asked(lambda: dump(**wanted)) or b""
        self._takes_s = self._works() - began_s
        self._told_s = self._clock()
        packed = base64.b64encode(zlib.compress(said, 1)).decode()
        return {"takes_s": self._takes_s, "in_s": self._takes_s / _MOST_STOPPED, "packed": packed}


def _recorders(**wanted: bool) -> list[tuple[str, dict[str, Any]]]:
    """What the flight recorders say that this torch has."""
    found = []
    c10d = getattr(torch._C, "_distributed_c10d", None)
    for backend, name in (("gloo", "_dump_fr_trace_json"), ("nccl", "_dump_nccl_trace_json")):
        dump = getattr(c10d, name, None)
        said = None if dump is None or _world() is None else _asked(lambda d=dump: d(**wanted))
        with contextlib.suppress(TypeError, ValueError):
            content = json.loads(said or "null")
            if isinstance(content, dict):
                found.append((backend, content))
    return found


def _asked(ask: Any) -> Any:
    return containment.attempt(ask, None)


def _whole(text: Any) -> int | None:
    """-1 stands for: not known."""
    try:
        number = int(text)
    except (TypeError, ValueError):
        return None
    return None if number < 0 else number


# -- the ends of a process


def _at_exit() -> None:
    if _witness is not None:
        _witness.leave_to_exit()


def _after_fork() -> None:
    global _witness
    found, _witness = _witness, None
    if found is not None:
        found.forget()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)
