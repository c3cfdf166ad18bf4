"""What this node knows of a process by the kernel: how it is, and whether it ended well."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from otel_ddp import errors
from otel_ddp.agent.reading.process import Host, Process
from otel_ddp.agent.verdicts.answers import Answers
from otel_ddp.agent.verdicts.observe import ExitCauses, exit_status, has_ended, open_pidfd
from otel_ddp.diagnosis.death.cause import FOLLOWS_S, EndedProcess
from otel_ddp.diagnosis.stall.evidence import Evidence, Question
from otel_ddp.diagnosis.verdict import Labels
from otel_ddp.journal import process_state
from otel_ddp.journal.parser import Journal
from otel_ddp.journal.reader import JournalReader
from otel_ddp.vocabulary.words import STATES

# The kernel reports how a worker ended once its parent has asked; and by then the parent of failed
# ranks has failed as well.
_PATIENCE_S = 2.0
# The kernel drops the locks of a dying process a moment before it says how that ended.
_KERNEL_FOLLOWS_S = 0.5
# When an end is looked at again. Other ranks report theirs soon after. The kernel knows the cause
# once the process has left, which takes Python seconds, and once its launcher has looked, which may
# take 5 s more.
_LOOK_AGAIN_AFTER_NS = (500_000_000, 2_000_000_000, 6_000_000_000, 20_000_000_000)


class _Ended(NamedTuple):
    """A child that has ended."""

    parent: int
    at: float
    state: int
    process: tuple[int, int]
    """Its process id and start."""


class Parents:
    """One per node. Called from the agent's loop alone."""

    def __init__(self, causes: ExitCauses, clock: Callable[[], float] = time.monotonic) -> None:
        self._causes = causes
        self._clock = clock
        # By parent; -1 if it was dead already.
        self._handles: dict[int, int] = {}
        # The parent of each worker that was alive at the last call of `watch`.
        self._living: list[int] = []
        # By journal: when the end of this worker was seen.
        self._seen_ended: dict[Path, float] = {}
        self._ended: dict[Path, _Ended] = {}

    @errors.contained()
    def watch(self, processes: Collection[Process]) -> None:
        """Open handles of workers and of their parents while they live."""
        now = self._clock()
        wanted: set[int] = set()
        self._living = []
        for each in processes:
            reader = each.reader
            parent = process_state.parent(reader)
            if parent is None:
                continue
            if each.is_at_work:
                # In another PID namespace the number belongs to some other process.
                wanted |= {parent} if each.pid == reader.pid else set()
                # At once: it may end before its rank is known.
                if not each.life.gone_ns:
                    self._living.append(parent)
                    each.host.watch()
            elif reader.path not in self._ended:
                process = each.pid, reader.start_ticks
                self._ended[reader.path] = _Ended(parent, now, each.life.state, process)
        here = {each.reader.path for each in processes}
        self._seen_ended = {path: at for path, at in self._seen_ended.items() if path in here}
        self._ended = {
            path: each
            for path, each in self._ended.items()
            if path in here or now - each.at < FOLLOWS_S
        }
        self._hold(wanted)

    def _hold(self, wanted: set[int]) -> None:
        for parent in self._handles.keys() - wanted:
            handle = self._handles.pop(parent)
            if handle >= 0:
                os.close(handle)
        for parent in wanted - self._handles.keys():
            if (opened := open_pidfd(parent)) is not None:
                self._handles[parent] = opened

    @errors.contained(default=False)
    def ended_well(self, host: Host) -> bool | None:
        """Whether this process, which recorded no end, has ended well; None: not known yet.

        It left with exit code 0, replaced its program, or is a worker that its parent ended.
        """
        reader = host.reader
        process = host.pid, reader.start_ticks
        if self._causes.goes_on(*process):
            return True
        waited_s = self._clock() - self._seen_ended.setdefault(reader.path, self._clock())
        cause = self._causes.why(*process)
        if not process_state.is_idle(reader):
            known = cause.keys() & {"signal", "exit_code", "out_of_memory"}
            if not known and self._causes.watches(*process) and waited_s < _KERNEL_FOLLOWS_S:
                return None
            return cause.get("exit_code") == 0
        requested = cause.get("signal") == "SIGTERM"
        settled = not requested and cause.keys() & {"signal", "exit_code", "out_of_memory"}
        if not settled and waited_s < _PATIENCE_S:
            return None
        return process_state.ended_by_parent(reader, self._end(reader, cause))

    def _end(self, reader: Journal, cause: Mapping[str, Any]) -> process_state.End:
        parent = process_state.parent(reader) or 0
        now = self._clock()
        handle = self._handles.get(parent)
        status = None if handle is None else exit_status(handle)
        code = 0 if status is None or not os.WIFEXITED(status) else os.WEXITSTATUS(status)
        failed = any(
            each.parent == parent and now - each.at < FOLLOWS_S and self._failed(each)
            for path, each in self._ended.items()
            if path != reader.path
        )
        return process_state.End(
            cause=cause,
            parent_lives=None if handle is None else handle >= 0 and not has_ended(handle),
            parent_was_killed=status is not None and os.WIFSIGNALED(status),
            others_live=parent in self._living,
            others_failed=failed or code > 0,
        )

    def _failed(self, ended: _Ended) -> bool:
        if ended.state == STATES["killed"]:
            return self._causes.why(*ended.process).get("signal") != "SIGTERM"
        return ended.state == STATES["failed"]


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

    def __init__(self, reader: JournalReader, causes: ExitCauses, parents: Parents) -> None:
        super().__init__(reader)
        self._causes, self._parents = causes, parents
        self._process = self.pid, reader.start_ticks
        self._answers = Answers(reader.path, *self._process)

    def ended_well(self) -> bool | None:
        return self._parents.ended_well(self)

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
