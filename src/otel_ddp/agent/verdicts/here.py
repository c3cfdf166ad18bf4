"""What this node knows of a process: by its answers and the kernel."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from otel_ddp.agent.reading.process import Host
from otel_ddp.agent.verdicts.answers import Answers
from otel_ddp.agent.verdicts.ends import Parents
from otel_ddp.agent.verdicts.observe import ExitCauses
from otel_ddp.diagnosis.detector import Memory
from otel_ddp.diagnosis.stall.evidence import Evidence, Question
from otel_ddp.journal.reader import JournalReader


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

    def memory(self) -> Memory | None:
        return self._causes.memory(*self._process)

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
