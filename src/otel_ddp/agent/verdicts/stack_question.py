"""Asks a process where it hangs: its witness, and the kernel, and never waits for either."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from otel_ddp.diagnosis.evidence import (
    Collective,
    Evidence,
    Frame,
    Group,
    Kernel,
    Question,
    Thread,
)
from otel_ddp.journal.layout import ANSWER_SUFFIX, ASK_SUFFIX

# As the witness has them: beside the journal.

_LARGEST_ANSWER = 4 * 1024 * 1024
_MOST_FRAMES = 64
# The kernel is asked this often at most, and compared with what it said this long ago at most.
_OFTEN_NS, _LONG_AGO_NS = 200_000_000, 10_000_000_000
_TICKS = os.sysconf("SC_CLK_TCK")


class StackQuestion:
    """One process. Called from the agent's loop alone; whatever is found there, nothing raises.

    Looking costs a file for each of its threads: only where there is a suspicion.
    """

    def __init__(
        self, journal: Path, pid: int, start_ticks: int, proc: Path = Path("/proc")
    ) -> None:
        self._ask = journal.with_suffix(ASK_SUFFIX)
        self._answer = journal.with_suffix(ANSWER_SUFFIX)
        self._process = proc / str(pid)
        # The thread that is looked at: the first one, until it is known which one trains.
        self._task = str(pid)
        self._start_ticks = start_ticks
        self._number = 0
        # Of the question that is open: when it was put.
        self._asked_ns: int | None = None
        self._heard = Evidence()
        self.answer: dict[str, Any] = {}
        """The last answer as it was written, for whoever shows stacks."""
        self._before: tuple[int, dict[str, int], str] | None = None
        self._last: Kernel | None = None

    def ask(self, question: Question, now_ns: int) -> bool:
        """Put a question; whether anybody is there to hear it."""
        # Not one that an agent before us has put, or will have answered.
        self._number = max(self._number + 1, now_ns)
        try:
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(self._ask, flags)
        except OSError:
            return False  # no fifo, or nobody reads it
        try:
            os.write(fd, f"{self._number} {question}\n".encode())
        except BlockingIOError:
            pass  # it is full of questions that nobody has read
        except OSError:
            return False
        finally:
            os.close(fd)
        if self._asked_ns is None:
            self._asked_ns = now_ns
        return True

    def poll(self, now_ns: int) -> Evidence:
        """What is known by now. *now_ns* is on the clock that `ask` was given."""
        if self._asked_ns is not None:
            self._listen(now_ns)
        silent_s = None if self._asked_ns is None else (now_ns - self._asked_ns) / 1e9
        return self._heard._replace(silent_s=silent_s, kernel=self._kernel(now_ns))

    # -- the witness

    def _listen(self, now_ns: int) -> None:
        said = _read(self._answer)
        # Somebody else may have asked since: numbers are times, and a later answer is as good.
        if said is None or (_whole(said.get("question")) or 0) < self._number:
            return
        self._asked_ns = None
        self.answer = said
        threads = _members(said, "threads")
        main = _first(threads, "main")
        trains = _first(threads, "trains") or main
        self._look_at(main.get("id"), trains.get("id"))
        self._heard = Evidence(
            heard=True,
            kind="what" if said.get("kind") == "what" else "where",
            answered_ns=now_ns,
            groups=tuple(_groups(said)),
            collectives=tuple(_collectives(said)),
            stack=frames(trains),
            helpers=tuple(
                Thread(str(each.get("name")), frames(each))
                for each in threads
                if each.get("daemon") is False and each is not trains and each is not main
            ),
            package=str(said.get("package") or ""),
        )

    def _look_at(self, main: Any, trains: Any) -> None:
        """Which thread the kernel is asked about."""
        # Where it sees other numbers than we do, its threads cannot be found by them.
        ours = str(main) == self._process.name and _whole(trains) is not None
        task = str(trains) if ours else self._process.name
        if task != self._task:
            self._task, self._before = task, None

    # -- the kernel

    def _kernel(self, now_ns: int) -> Kernel | None:
        status = _status(self._process / "stat")
        # Another process may have the number by now, or in our namespace.
        if status is None or not self._start_ticks or status[2] != self._start_ticks:
            self._before = self._last = None
            return None
        before = self._before
        if before is not None and now_ns - before[0] > _LONG_AGO_NS:
            before = None
        elif before is not None and now_ns - before[0] < _OFTEN_NS:
            return self._last
        # The process's own state and time are those of its first thread and of all together.
        own = _status(self._process / "task" / self._task / "stat")
        state = status[0] if own is None else own[0]
        ticks = self._thread_ticks()
        self._before = now_ns, ticks, state
        busy, busy_threads = None, 0
        if before is not None:
            grown = {each: ticks[each] - before[1].get(each, ticks[each]) for each in ticks}
            busy = grown.pop(self._task, 0) / _TICKS / ((now_ns - before[0]) / 1e9)
            busy_threads = sum(each > 0 for each in grown.values())
        lasting = before is not None and before[2] == state
        self._last = Kernel(state, lasting, busy, self._waits_in(), busy_threads)
        return self._last

    def _thread_ticks(self) -> dict[str, int]:
        found: dict[str, int] = {}
        with contextlib.suppress(OSError):
            for name in os.listdir(self._process / "task"):
                status = _status(self._process / "task" / name / "stat")
                if status is not None:
                    found[name] = status[1]
        return found

    def _waits_in(self) -> str:
        try:
            said = (self._process / "wchan").read_text(errors="replace").strip()
        except OSError:
            return ""
        return "" if said == "0" else said[:100]


def _status(path: Path) -> tuple[str, int, int] | None:
    """State letter, ticks of processor time, and ticks from boot to the start."""
    try:
        # The name may hold anything, a parenthesis too.
        fields = path.read_text(errors="replace").rpartition(")")[2].split()
        return fields[0], int(fields[11]) + int(fields[12]), int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


# An answer is a file: anybody with this user's rights may have put anything there.


def _read(path: Path) -> dict[str, Any] | None:
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with os.fdopen(os.open(path, flags), "rb") as file:
            content = json.loads(file.read(_LARGEST_ANSWER))
    except (OSError, ValueError, RecursionError, TypeError):
        return None
    return content if isinstance(content, dict) else None


def _members(said: dict[str, Any], name: str) -> list[dict[str, Any]]:
    found = said.get(name)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _groups(said: dict[str, Any]) -> list[Group]:
    return [
        Group(
            str(each.get("name")),
            _whole(each.get("size")) or 0,
            _whole(each.get("enqueued")),
            _whole(each.get("completed")),
            str(each.get("backend") or ""),
            str(each.get("description") or ""),
        )
        for each in _members(said, "groups")
    ]


def _collectives(said: dict[str, Any]) -> list[Collective]:
    return [
        Collective(str(each.get("group")), number, str(each.get("op")), str(each.get("sizes")))
        for each in _members(said, "collectives")
        if (number := _whole(each.get("number"))) is not None
    ]


def _first(threads: list[dict[str, Any]], mark: str) -> dict[str, Any]:
    """The thread that has this mark; nothing if there is none."""
    return next((each for each in threads if each.get(mark) is True), {})


def frames(thread: dict[str, Any]) -> tuple[Frame, ...]:
    """The stack of one thread of an answer, the innermost frame first."""
    stack = thread.get("frames")
    return tuple(
        Frame(str(each[0]), _whole(each[1]), str(each[2]))
        for each in (stack[:_MOST_FRAMES] if isinstance(stack, list) else ())
        if isinstance(each, list) and len(each) == 3
    )


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
