"""What the verdicts on speed need to know of one step of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from otel_ddp.catalog import PHASES
from otel_ddp.diagnosis.verdict import Who

# The phases of an ordinary step that are work; all of them are in every StepFacts.
WORK_PHASES = ("data", "forward", "backward", "optimizer", "other")
# A step with one of these is no ordinary one, and not compared with others.
UNUSUAL_PHASES = ("compile", "checkpoint", "eval")

_WORD = {code: word for word, code in PHASES.items()}
_NO_TIME = dict.fromkeys(WORK_PHASES, 0.0)
# Python's small collections take a fraction of this, and are in nearly every step.
_SMALL_GC_S = 0.0005
_LONG_GC_S = 0.005
_GC_SHARE = 0.01
_RUN_LABELS = ("group", "run", "job_type")


class _Part(Protocol):
    """A stretch of one phase."""

    @property
    def phase(self) -> int: ...
    @property
    def began_ns(self) -> int: ...
    @property
    def ended_ns(self) -> int: ...


class _Step(Protocol):
    """A step as the agent puts it together."""

    @property
    def number(self) -> int | None: ...
    @property
    def ended_ns(self) -> int: ...
    @property
    def took_ns(self) -> int: ...
    @property
    def parts(self) -> Sequence[_Part]: ...
    @property
    def rest(self) -> Sequence[tuple[int, int]]:
        """Of a step of very many parts: what lies after the last of them."""
        ...

    @property
    def gc_s(self) -> float: ...
    @property
    def skipped(self) -> bool: ...
    @property
    def work(self) -> int: ...
    def seconds(self, phase: int, /) -> float: ...
    def phases(self) -> set[int]: ...


class StepFacts(NamedTuple):
    """One step of one rank."""

    number: int
    ended_ns: int
    took_s: float
    wait_s: float
    """Waiting for other ranks, for whatever they wait."""
    phases: Mapping[str, float]
    """Seconds of everything but waiting: the phases of work, and what was unusual, by word."""
    tagged: bool
    """Not an ordinary step: it compiled, saved, evaluated, was skipped, or collected garbage."""
    work: int
    """Tokens, or samples where there are none; 0 where neither is known."""

    @property
    def work_s(self) -> float:
        """Its own time, which does not depend on how late the others are."""
        return self.took_s - self.wait_s


def facts_of(step: _Step) -> StepFacts | None:
    """The facts of a step; nothing of one that has no number or took no time."""
    took_s = step.took_ns / 1e9
    if step.number is None or took_s <= 0:
        return None
    wait_s = 0.0
    phases = _NO_TIME.copy()
    long_gc_s = min(max(_GC_SHARE * took_s, _SMALL_GC_S), _LONG_GC_S)
    tagged = step.skipped or step.gc_s > long_gc_s
    spent: dict[int, float] = {}
    if step.rest:
        spent = {phase: step.seconds(phase) for phase in step.phases()}
    else:
        # In one go: this is done for every step of every rank.
        for part in step.parts:
            phase = part.phase
            spent[phase] = spent.get(phase, 0.0) + (part.ended_ns - part.began_ns) / 1e9
    for phase, seconds in spent.items():
        word = _WORD.get(phase, "other")
        if word == "comm_wait":
            wait_s = seconds
            continue
        phases[word] = phases.get(word, 0.0) + seconds
        tagged = tagged or word in UNUSUAL_PHASES
    return StepFacts(step.number, step.ended_ns, took_s, wait_s, phases, tagged, step.work)


def run_of(who: Who) -> Who:
    """Whom a verdict about all ranks of a run is about."""
    return tuple(label for label in who if label[0] in _RUN_LABELS)


def called(who: Who) -> str:
    """What people call a rank: `rank 3 (node-1)`."""
    labels = dict(who)
    return f"rank {labels.get('rank', '?')} ({labels.get('node', '?')})"


def span(seconds: float) -> str:
    """A length of time for people: three digits, in the unit that fits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def percent(share: float) -> str:
    """A share for people: `32 %`."""
    return f"{share * 100:.0f} %"


def middle(values: Sequence[float]) -> float:
    """The median; the statistics module's is ten times slower."""
    ordered = sorted(values)
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2


def ratios(values: Mapping[str, Any]) -> dict[str, float]:
    """Numbers as evidence shows them: more digits than these would be noise."""
    return {word: round(value, 4) for word, value in values.items()}
