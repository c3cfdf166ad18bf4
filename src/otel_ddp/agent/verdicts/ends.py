"""What this node knows of a process by the kernel: how it is, and whether it ended well."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from otel_ddp import errors, files
from otel_ddp.agent.reading.process import Host, Process
from otel_ddp.agent.verdicts.answers import Answers
from otel_ddp.agent.verdicts.observe import ExitCauses
from otel_ddp.diagnosis.death.cause import EndedProcess
from otel_ddp.diagnosis.stall.evidence import Evidence, Question
from otel_ddp.diagnosis.verdict import Labels
from otel_ddp.journal import process_state
from otel_ddp.journal.reader import JournalReader

# The kernel reports how a worker ended once its parent has asked; by then that may end as well.
_PATIENCE_S = 2.0
# The kernel drops the locks of a dying process a moment before it says how that ended.
_KERNEL_FOLLOWS_S = 0.5
# When an end is looked at again. Other ranks report theirs soon after. The kernel knows the cause
# once the process has left, which takes Python seconds, and once its launcher has looked, which may
# take 5 s more.
_LOOK_AGAIN_AFTER_NS = (500_000_000, 2_000_000_000, 6_000_000_000, 20_000_000_000)


class _Exit:
    """The end of a process, and when it is looked at again."""

    def __init__(self, ended: EndedProcess, now_ns: int) -> None:
        self.ended = ended
        self.found_ns = now_ns
        self.looks_ns = [now_ns + after for after in _LOOK_AGAIN_AFTER_NS]


class Exits:
    """The processes of one run that have ended."""

    def __init__(self) -> None:
        self.new: list[Labels] = []
        """Those whose end the last poll has found."""
        self._ended: set[Labels] = set()
        self._exits: dict[Process, _Exit] = {}

    def add(self, source: Process, now_ns: int) -> EndedProcess:
        """How this process ended, as far as that is known at once."""
        ended = source.end()
        self.new.append(ended.labels)
        self._ended.add(ended.labels)
        self._exits[source] = _Exit(ended, now_ns)
        return ended

    def note_at_work(self, labels: Labels) -> None:
        """A process with these labels is at work. If an earlier one had ended, the run restarts."""
        if labels in self._ended:
            self._ended.remove(labels)
            self.forget_all()

    def poll(self, now_ns: int) -> list[EndedProcess]:
        """The ends, where more may be known of one by now."""
        looked = False
        for source, each in self._exits.items():
            # One that reported its end may still exist.
            if each.ended.state != "killed" and (present_ns := source.host.present_ns()):
                each.ended = each.ended._replace(last_present_ns=present_ns)
            if now_ns >= each.looks_ns[0]:
                looked, known_for_s = True, (now_ns - each.found_ns) / 1e9
                each.ended = each.ended._replace(cause=source.host.cause(), known_for_s=known_for_s)
                each.looks_ns = [at for at in each.looks_ns if at > now_ns]
        found = [each.ended for each in self._exits.values()] if looked else []
        for source in [source for source, each in self._exits.items() if not each.looks_ns]:
            source.host.forget()
            del self._exits[source]
        # A verdict on one end depends on when the other processes left, too.
        return found

    def forget_all(self) -> None:
        """No end is looked at again."""
        for source in self._exits:
            source.host.forget()
        self._exits.clear()


class Here(Host):
    """One a process of this node."""

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
        # When its end was seen.
        self._ended_s: float | None = None

    @errors.contained(default=False)
    def ended_well(self) -> bool | None:
        """Whether this process, which recorded no end, has ended well; None: not known yet.

        It left with exit code 0, replaced its program, or is a worker that its parent ended.
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
        # In another PID namespace the number belongs to some other process.
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
