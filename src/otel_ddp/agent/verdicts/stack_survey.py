"""Asks processes of this node for their stacks, all at once, and waits a moment for the answers."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from otel_ddp.agent.verdicts.stack_question import StackQuestion, frames
from otel_ddp.diagnosis.stall.evidence import Evidence, Frame
from otel_ddp.journal.reader import JournalReader, Unreadable

ANSWER_S = 2.0
_STATES = {"T": "stopped by a signal", "t": "held by a debugger", "D": "in uninterruptible I/O"}


class AskedProcess:
    """A living process that was asked for its stacks."""

    def __init__(self, reader: JournalReader) -> None:
        rank = reader.identity.get("global_rank")
        self.rank = rank if isinstance(rank, int) else None
        self.run = reader.identity.get("run")
        self.group = reader.identity.get("group")
        self.pid = reader.pid
        self._question = StackQuestion(reader.path, reader.pid, reader.start_ticks)
        self.can_answer = self._question.ask("where", time.time_ns())
        self.evidence = Evidence()

    def is_done(self) -> bool:
        """Whether it has answered, or will not."""
        self.evidence = self._question.poll(time.time_ns())
        return self.evidence.answered or not self.can_answer

    @property
    def threads(self) -> list[Any]:
        found = self._question.answer.get("threads")
        return found if isinstance(found, list) else []

    @property
    def stacks(self) -> list[tuple[str, tuple[Frame, ...]]]:
        """Each thread, and its frames, the innermost first."""
        found = []
        for thread in self.threads:
            if isinstance(thread, Mapping):
                trains = thread.get("trains") is True and thread.get("main") is not True
                name = str(thread.get("name") or "?") + ", which trains" * trains
                found.append((name, frames(dict(thread))))
        return found

    @property
    def state(self) -> str:
        """What keeps it from answering, as the kernel sees it."""
        kernel = self.evidence.kernel
        return _STATES.get(kernel.state, "") if kernel else ""

    @property
    def why_no_answer(self) -> str:
        """Empty where it has answered."""
        if self.evidence.answered:
            return ""
        if not self.can_answer:
            return "it does not answer: it has not called otel_ddp.instrument, or is about to end"
        if self.state:
            return f"it cannot answer: it is {self.state}"
        return f"no answer within {ANSWER_S:g} s: C code holds Python's lock (the GIL)"


def ask(journals: Iterable[Path], ranks: Collection[int] | None = None) -> list[AskedProcess]:
    """The living processes among these, or of these ranks, by rank, with their answers."""
    found = list(_ask(journals, ranks))
    deadline = time.monotonic() + ANSWER_S
    # All were asked at once, so that the stacks are those of one moment.
    waiting = found
    while waiting and time.monotonic() < deadline:
        time.sleep(0.01)
        waiting = [each for each in waiting if not each.is_done()]
    return sorted(found, key=lambda one: (one.rank is None, one.rank or 0))


def _ask(journals: Iterable[Path], ranks: Collection[int] | None) -> Iterator[AskedProcess]:
    for path in journals:
        try:
            reader = JournalReader(path)
        except Unreadable:
            continue
        try:
            if reader.writer_is_alive() and (
                not ranks or reader.identity.get("global_rank") in ranks
            ):
                yield AskedProcess(reader)
        finally:
            reader.close()
