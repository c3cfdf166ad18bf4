"""What tests are made of: labels, facts of steps, and journals as training processes write them."""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from otel_ddp.diagnosis.step_facts import StepFacts
from otel_ddp.diagnosis.steps import Parts, Step
from otel_ddp.diagnosis.verdict import Labels
from otel_ddp.journal import layout
from otel_ddp.journal.process_state import ProcessState, state_of
from otel_ddp.journal.reader import JournalReader
from otel_ddp.journal.writer import JournalWriter, Shape
from otel_ddp.vocabulary.words import PHASE_CODE, PHASES, STATES, UNUSUAL_PHASES, WORK_PHASES

MS = 1_000_000


class Clock:
    """A clock that the test moves."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def labels_of(rank: int | str, run: str = "r", node: str = "n1") -> Labels:
    """What tells a rank apart from others."""
    return (
        *(("group", "g"), ("run", run), ("job_type", "train"), ("node", node)),
        *(("rank", str(rank)), ("local_rank", str(rank))),
    )


def step_of(
    number: int | None, began_ns: int, pieces: Sequence[tuple[int, int]], **more: Any
) -> Step:
    """A step of these pieces, each with the code of its phase and its nanoseconds."""
    spans_ns = [span_ns for _, span_ns in pieces]
    parts = Parts(began_ns, bytes([code for code, _ in pieces]), spans_ns)
    given = {"gc_s": 0.0, "skipped": False, "retries": 0, **more}
    return Step(number, began_ns, began_ns + sum(spans_ns), parts, **given)


def seconds_in(step: Step, phase: int) -> float:
    """The time of a step in a phase."""
    return sum(each_ns for code, each_ns in step.spans() if code & PHASE_CODE == phase) / 1e9


def phases_of(step: Step) -> set[int]:
    """The codes of the phases that occur in a step."""
    return {code & PHASE_CODE for code in step.parts.codes}


def step_facts(
    number: int, ended_ns: int, phases_ms: Mapping[str, float], took_ms: float = 0.0, **more: Any
) -> StepFacts:
    """A step of these phases; what is left of *took_ms* the rank waits for others."""
    spent_ns = {word: round(ms * MS) for word, ms in phases_ms.items()}
    phases_ns = tuple(spent_ns.get(word, 0) for word in WORK_PHASES)
    took_ns = round(took_ms * MS) or sum(spent_ns.values())
    rest_ns = took_ns - sum(phases_ns)
    given = {
        "wait_ns": rest_ns if took_ms else spent_ns.get("comm_wait", 0),
        "unusual_ns": {word: spent_ns[word] for word in UNUSUAL_PHASES if word in spent_ns},
        "unusual": False,
        "work": 0,
    }
    return StepFacts(number, ended_ns, took_ns, phases_ns=phases_ns, **{**given, **more})


def is_measured(number: int, one_of: int) -> bool:
    """Whether a process that measures one of so many steps measures this one."""
    return number * 0x9E3779B97F4A7C15 % 2**64 < 2**64 // one_of


class WrittenRank:
    """The journal of a process that goes on as the test says."""

    def __init__(
        self, folder: Path, rank: int = 0, bytes: int = layout.SMALLEST_FILE, **identity: Any
    ) -> None:
        told = {"group": "g", "run": "r", "job_type": "train", "host": "h", "world_size": 2}
        who = {"global_rank": rank, "local_rank": rank, "strategy": "all", "exported": True}
        self.writer = JournalWriter(folder, bytes, {**told, **who, "settled": True, **identity})
        self.number = self.at_ns = 0
        """Of its last step, and when that ended: since the journal was made."""
        self._words_told = 0
        self._shapes: dict[tuple[str, ...], Shape] = {}

    def state(self, word: str) -> None:
        """It is running, finished, and so on from now on."""
        self.writer.state(STATES[word], time.time_ns() // 1000)

    def enter(self, phase: str) -> None:
        """It is in this phase from now on."""
        since_ns = time.monotonic_ns() - self.writer.created_monotonic_ns
        self.writer.phase(PHASES[phase], 0, max(since_ns, 0))

    def step(self, spent_ms: Mapping[str, float], number: int | None = None) -> None:
        """One more step, of these phases."""
        self.steps([spent_ms], self.number + 1 if number is None else number)

    def steps(self, spent_ms: list[Mapping[str, float]], number: int = 1) -> None:
        """Some more of them, the first of which has this *number*, in one record."""
        pairs = [] if self._words_told else [(layout.STEPS_BEGAN, self.at_ns)]
        for self.number, phases in enumerate(spent_ms, number):
            for phase, spent in phases.items():
                pairs.append((PHASES[phase], self.at_ns))
                self.at_ns += round(spent * MS)
            pairs += [(layout.STEP_NUMBER, self.number), (layout.STEP_ENDED, self.at_ns)]
        words = [code << layout.CODE_SHIFT | value for code, value in pairs]
        payload = struct.pack(f"<{len(words) + 1}Q", self._words_told, *words)
        self.writer.append(layout.STEPS, payload)
        self._words_told += len(words)
        self.writer.step(self.number)

    def log(
        self, values: Mapping[str, float], step: int, at_ns: int | None = None, split: str = "train"
    ) -> None:
        """What `log` records."""
        key = (split, *values)
        if key not in self._shapes:
            self._shapes[key] = Shape([self.writer.name(name, split) for name in values])
        at_ns = time.time_ns() if at_ns is None else at_ns
        self.writer.scalars(self._shapes[key], at_ns, step, float("nan"), list(values.values()))

    def close(self) -> None:
        self.writer.close()


def process_of(path: Path) -> ProcessState:
    """What a journal tells, also without an agent."""
    reader = JournalReader(path)
    try:
        reader.read_definitions()
        progress = reader.progress()
        recorded = None if progress is None else progress.state
        return ProcessState.read(reader, state_of(recorded, reader.writer_is_alive()))
    finally:
        reader.close()
