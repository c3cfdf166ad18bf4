"""Asks processes for their stacks, the kernel for their state, and NCCL for unreachable peers."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from otel_ddp import files, plain
from otel_ddp.diagnosis.stall.evidence import (
    Collective,
    Evidence,
    Frame,
    Group,
    Kernel,
    Question,
)
from otel_ddp.journal.layout import ANSWER_SUFFIX, ASK_SUFFIX
from otel_ddp.journal.parser import Unreadable
from otel_ddp.journal.reader import JournalReader
from otel_ddp.vocabulary.words import PHASES, phase_word

_LARGEST_ANSWER = 4 * 1024 * 1024
_MOST_FRAMES = 64
# Wait at least the first time before reading a thread's kernel state again. Compute the CPU use
# from two readings only if they are at most the second time apart.
_OFTEN_NS, _LONG_AGO_NS = 200_000_000, 10_000_000_000
_TICKS = os.sysconf("SC_CLK_TCK")


class Answers:
    """The questions to one process, and its answers. Only the agent's loop calls it.

    A poll reads files of /proc, so the agent polls only processes that are suspected of hanging,
    or that a user asks about.
    """

    def __init__(
        self, journal: Path, pid: int, start_ticks: int, proc: Path = Path("/proc")
    ) -> None:
        self._ask = journal.with_suffix(ASK_SUFFIX)
        self._answer = journal.with_suffix(ANSWER_SUFFIX)
        self._process = proc / str(pid)
        # The thread whose state is read: the main one, until an answer names the training thread.
        self._task = str(pid)
        self._start_ticks = start_ticks
        self._number = 0
        # When the oldest unanswered question was asked; None if all are answered.
        self._asked_ns: int | None = None
        self._known = Evidence()
        self.content: dict[str, Any] = {}
        """The last answer, unparsed."""
        self._before: tuple[int, int, str] | None = None
        self._last: Kernel | None = None

    def ask(self, question: Question, now_ns: int) -> bool:
        """Send a question; returns whether the process can receive it."""
        # Number the questions by time, so that the number is greater than that of any question that
        # an earlier agent has sent to this process.
        self._number = max(self._number + 1, now_ns)
        try:
            files.write_to_fifo(self._ask, f"{self._number} {question}\n")
        except BlockingIOError:
            pass  # the fifo is full of unread questions
        except OSError:
            return False  # the process has no fifo, or none of its threads reads it
        if self._asked_ns is None:
            self._asked_ns = now_ns
        return True

    def poll(self, now_ns: int) -> Evidence:
        """The evidence so far. *now_ns*: the current time on the clock that `ask` uses."""
        if self._asked_ns is not None:
            self._read_answer(now_ns)
        silent_s = None if self._asked_ns is None else (now_ns - self._asked_ns) / 1e9
        return self._known._replace(silent_s=silent_s, kernel=self._kernel(now_ns))

    # -- the answer of the process

    def _read_answer(self, now_ns: int) -> None:
        content = files.read_mapping(self._answer, _LARGEST_ANSWER)
        # Accept the answer to a question with a greater number, too: another program has asked
        # later, and its answer is as good.
        if (plain.whole(content.get("question")) or 0) < self._number:
            return
        self._asked_ns = None
        self.content = content
        main, trains = _main_and_training(content)
        self._choose_thread(main.get("id"), trains.get("id"))
        self._known = evidence_of(content, now_ns)

    def _choose_thread(self, main: Any, trains: Any) -> None:
        """Choose the thread whose kernel state is read."""
        # If the process is in another PID namespace, the thread ids in its answer are unusable.
        ours = str(main) == self._process.name and plain.whole(trains) is not None
        task = str(trains) if ours else self._process.name
        if task != self._task:
            self._task, self._before = task, None

    # -- the kernel

    def _kernel(self, now_ns: int) -> Kernel | None:
        status = _status(self._process)
        # A different start time means another process: the pid was reused, or the journal's pid is
        # from another PID namespace.
        if status is None or not self._start_ticks or status[2] != self._start_ticks:
            self._before = self._last = None
            return None
        before = self._before
        if before is not None and now_ns - before[0] > _LONG_AGO_NS:
            before = None
        elif before is not None and now_ns - before[0] < _OFTEN_NS:
            return self._last
        # Read the thread's own `stat`: the process's `stat` has the state of the first thread and
        # the time of all threads.
        state, ticks, _ = _status(self._process / "task" / self._task) or status
        self._before = now_ns, ticks, state
        busy = None
        if before is not None:
            busy = (ticks - before[1]) / _TICKS / ((now_ns - before[0]) / 1e9)
        lasting = before is not None and before[2] == state
        self._last = Kernel(state, lasting, busy, self._waits_in())
        return self._last

    def _waits_in(self) -> str:
        name = (files.read_text(self._process / "wchan") or "").strip()
        return "" if name == "0" else name[:100]


def _status(task: Path) -> tuple[str, int, int] | None:
    """The state letter, the used CPU ticks, and the start time in ticks since boot."""
    fields = files.stat_fields(task)
    try:
        return fields[0], int(fields[11]) + int(fields[12]), int(fields[19])
    except (ValueError, IndexError):
        return None


# Check every value of an answer: it is read from a file or comes from another node, so it may
# contain anything.


def evidence_of(content: Mapping[str, Any], answered_ns: int) -> Evidence:
    """Parse an answer."""
    device = plain.mapping(content.get("device"))
    phase = plain.whole(device.get("phase"))
    return Evidence(
        answered=True,
        kind="what" if content.get("kind") == "what" else "where",
        answered_ns=answered_ns,
        groups=tuple(map(_group, plain.list_of(dict, content.get("groups")))),
        collectives=tuple(_collectives(content)),
        stack=frames(_main_and_training(content)[1]),
        device_phase="" if phase is None else phase_word(phase),
        device_step=plain.whole(device.get("step")),
    )


def content_of(evidence: Evidence, most: int) -> dict[str, Any]:
    """Evidence as an answer, the inverse of `evidence_of`. *most*: the length limit of lists."""
    return {
        "kind": evidence.kind,
        "groups": [each._asdict() for each in evidence.groups[:most]],
        "collectives": [each._asdict() for each in evidence.collectives[:most]],
        "threads": [{"main": True, "frames": [list(each) for each in evidence.stack]}],
        "device": {"phase": PHASES.get(evidence.device_phase), "step": evidence.device_step},
    }


def _main_and_training(content: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    threads = plain.list_of(dict, content.get("threads"))
    main = next((each for each in threads if each.get("main") is True), {})
    return main, next((each for each in threads if each.get("trains") is True), main)


def _group(each: dict[str, Any]) -> Group:
    return Group(
        str(each.get("name")),
        plain.whole(each.get("size")) or 0,
        plain.whole(each.get("enqueued")),
        plain.whole(each.get("completed")),
        str(each.get("backend") or ""),
        str(each.get("description") or ""),
        plain.whole(each.get("sends")),
    )


def _collectives(content: Mapping[str, Any]) -> Iterator[Collective]:
    for each in plain.list_of(dict, content.get("collectives")):
        if (number := plain.whole(each.get("number"))) is not None:
            words = (str(each.get(word) or "") for word in ("op", "sizes", "state"))
            yield Collective(str(each.get("group")), number, *words)


def frames(thread: dict[str, Any]) -> tuple[Frame, ...]:
    """The stack of one thread in an answer, the innermost frame first."""
    return tuple(
        Frame(str(each[0]), plain.whole(each[1]), str(each[2]))
        for each in plain.list_of(list, thread.get("frames"))[:_MOST_FRAMES]
        if len(each) == 3
    )


# -- the stacks of several processes, for people

ANSWER_S = 2.0
_STATES = {"T": "stopped by a signal", "t": "held by a debugger", "D": "in uninterruptible I/O"}


class AskedProcess:
    """A living process that was asked for its stacks."""

    def __init__(self, reader: JournalReader) -> None:
        self.rank = plain.whole(reader.identity.get("global_rank"))
        self.run = reader.identity.get("run")
        self.group = reader.identity.get("group")
        self.pid = reader.pid
        self._answers = Answers(reader.path, reader.pid, reader.start_ticks)
        self.can_answer = self._answers.ask("where", time.time_ns())
        self.evidence = Evidence()

    def is_done(self) -> bool:
        """Whether the process has answered, or cannot answer."""
        self.evidence = self._answers.poll(time.time_ns())
        return self.evidence.answered or not self.can_answer

    @property
    def stacks(self) -> list[tuple[str, tuple[Frame, ...]]]:
        """Each thread with its frames, the innermost first."""
        found = []
        for thread in plain.list_of(dict, self._answers.content.get("threads")):
            trains = thread.get("trains") is True and thread.get("main") is not True
            name = str(thread.get("name") or "?") + ", which trains" * trains
            found.append((name, frames(thread)))
        return found

    def to_json(self) -> dict[str, Any]:
        """The stacks as JSON, for the page."""
        return {
            "rank": self.rank,
            "pid": self.pid,
            "why": self.why_no_answer,
            "threads": [
                {"name": name, "frames": [frame._asdict() for frame in frames]}
                for name, frames in self.stacks
            ],
        }

    @property
    def state(self) -> str:
        """The process's state in the kernel if it can't answer in this state; else empty."""
        return _state(self.evidence.kernel)

    @property
    def why_no_answer(self) -> str:
        """Why the process has not answered, as a sentence; empty if it has."""
        if self.evidence.answered:
            return ""
        if not self.can_answer:
            return "it does not answer: it has not called otel_ddp.instrument, or is about to end"
        return why_silent(self.evidence.kernel)


def why_silent(kernel: Kernel | None) -> str:
    """The reason why a process has not answered, in a sentence."""
    if state := _state(kernel):
        return f"it cannot answer: it is {state}"
    return f"no answer within {ANSWER_S:g} s: C code holds Python's lock (the GIL)"


def _state(kernel: Kernel | None) -> str:
    return _STATES.get(kernel.state, "") if kernel else ""


def ask(journals: Iterable[Path], ranks: Collection[int] | None = None) -> list[AskedProcess]:
    """Ask living processes for their stacks, and wait for the answers; sorted by rank.

    *ranks*: ask only the processes of these ranks.
    """
    found = []
    for path in journals:
        with contextlib.suppress(Unreadable), contextlib.closing(JournalReader(path)) as reader:
            wanted = not ranks or reader.identity.get("global_rank") in ranks
            if wanted and reader.writer_is_alive():
                found.append(AskedProcess(reader))
    # All processes were asked at once, so that their stacks are of the same moment.
    waiting, deadline = found, time.monotonic() + ANSWER_S
    while waiting and time.monotonic() < deadline:
        time.sleep(0.01)
        waiting = [each for each in waiting if not each.is_done()]
    return sorted(found, key=lambda one: (one.rank is None, one.rank or 0))


# -- NCCL's RAS service: threads within NCCL answer for all nodes, even if Python hangs. Any program
#    may listen on the port, so answers are checked like foreign data.

# The environment variable with the address of NCCL's RAS service, and the default address.
_VARIABLE, _DEFAULT = "NCCL_RAS_ADDR", "localhost:28028"
# JSON came with NCCL 2.28.7; older versions send text, which is ignored.
_RAS_QUESTION = b"set format json\nverbose status\n"
_CONNECT_S = 0.2
# How long to wait for the answer: much longer than the five seconds that RAS waits for a peer.
_RAS_ANSWER_NS = 30_000_000_000
_LARGEST_OF_RAS = 16 * 1024 * 1024
_MOST_NAMED = 8
_LONGEST_HOST = 100


class Ras:
    """Asks NCCL's RAS service once per stall. The agent's loop calls it, and is not blocked."""

    def __init__(self, env: Mapping[str, str]) -> None:
        host, _, port = (env.get(_VARIABLE) or _DEFAULT).rpartition(":")
        self._address = host.strip("[]"), int(port) if port.isdigit() else 0
        self._socket: socket.socket | None = None
        self._asked_ns: int | None = None
        self._content = bytearray()

    def forget(self) -> None:
        """Forget the answer and the connection, after a stall."""
        self._close()
        self._asked_ns = None

    def poll(self, now_ns: int) -> Mapping[str, Any]:
        """Go on asking, without blocking. Only the call that completes the answer returns it; all
        other calls return nothing."""
        found: Any = None
        try:
            if self._asked_ns is None:
                self._asked_ns, self._content = now_ns, bytearray()
                if self._address[0] != "localhost":
                    # Raises ValueError unless the host is an IP address: resolving a name could
                    # block the agent.
                    ipaddress.ip_address(self._address[0])
                self._socket = socket.create_connection(self._address, _CONNECT_S)
                self._socket.sendall(_RAS_QUESTION)
                self._socket.setblocking(False)
            elif self._socket is not None and self._is_whole(self._socket):
                self._close()
                # Skip the acknowledgements of the two commands, which come before the JSON.
                _, begins, rest = self._content.partition(b"{")
                found = files.parse_json(bytes(begins + rest))
            elif now_ns - self._asked_ns > _RAS_ANSWER_NS:
                self._close()
        except (OSError, ValueError):
            self._close()
        return plain.mapping(found)

    def _is_whole(self, answers: socket.socket) -> bool:
        while len(self._content) < _LARGEST_OF_RAS:
            try:
                more = answers.recv(65536)
            except BlockingIOError:
                return False
            if not more:
                return True
            self._content += more
        raise ValueError("an answer of RAS has no end")

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def remark(content: Mapping[str, Any], pids: Collection[int], world_size: int) -> str:
    """The peers that NCCL does not reach, in a sentence.

    Empty if NCCL reaches all peers, or if the answer is about another job. *pids*: the pids of the
    ranks on this node.
    """
    found = plain.list_of(dict, content.get("communicators"))
    members = [plain.list_of(dict, each.get("ranks")) for each in found]
    missing = [plain.list_of(dict, each.get("missing_ranks")) for each in found]
    if not any(each.get("pid") in pids for several in members for each in several):
        return ""
    # Take rank numbers only from the communicator of all ranks: in the others, they are not global.
    ranks = {
        _member(each): each.get("rank")
        for one, *of_one in zip(found, members, missing, strict=True)
        if one.get("size") == world_size
        for several in of_one
        for each in several
    }

    def name(process: str) -> str:
        return f"rank {ranks[process]} ({process})" if process in ranks else process

    if lost := {_member(each): _member_state(each) for several in missing for each in several}:
        return f"NCCL does not reach {_listed([f'{name(e)}, {lost[e]}' for e in lost])}"
    return ""


def _member(member: Mapping[str, Any]) -> str:
    host = str(member.get("host"))[:_LONGEST_HOST]
    return f"process {plain.whole(member.get('pid'))} on {host}"


def _member_state(member: Mapping[str, Any]) -> str:
    is_dead = plain.mapping(member.get("status")).get("considered_dead") is True
    return "which it takes for dead" if is_dead else "which does not respond"


def _listed(several: list[str]) -> str:
    more = len(several) - _MOST_NAMED
    return "; ".join(several[:_MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
