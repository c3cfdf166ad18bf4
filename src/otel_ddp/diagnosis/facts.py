"""What the verdicts on speed need to know of one step of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple, Protocol

from otel_ddp.catalog import PHASES, RUN_LABELS
from otel_ddp.diagnosis.verdict import Who

# The phases of an ordinary step that are work; all of them are in every StepFacts.
WORK_PHASES = ("data", "forward", "backward", "optimizer", "other")
# A step with one of these is no ordinary one, and not compared with others.
UNUSUAL_PHASES = ("compile", "checkpoint", "eval")

# Above these bits the journal says what it is that is waited for.
_PHASE_CODE = 0x3F
_WORD = {code: word for word, code in PHASES.items()}
_NOTHING: Mapping[str, int] = {}
# Python's small collections take a fraction of this, and are in nearly every step.
_SMALL_GC_S = 0.0005
_LONG_GC_S = 0.005
_GC_SHARE = 0.01


class _Parts(Protocol):
    """The stretches of a step, one after the other."""

    @property
    def codes(self) -> bytes: ...
    @property
    def spans_ns(self) -> Sequence[int]: ...


class _Step(Protocol):
    """A step as the agent puts it together."""

    @property
    def number(self) -> int | None: ...
    @property
    def ended_ns(self) -> int: ...
    @property
    def began_ns(self) -> int: ...
    @property
    def parts(self) -> _Parts: ...
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


class StepFacts(NamedTuple):
    """One step of one rank; nanoseconds, as the journal has them, need no arithmetic."""

    number: int
    ended_ns: int
    took_ns: int
    wait_ns: int
    """Waiting for other ranks, for whatever they wait."""
    phases_ns: tuple[int, ...]
    """In each of WORK_PHASES, what it waits for other ranks left out."""
    unusual_ns: Mapping[str, int]
    """In those of UNUSUAL_PHASES that it had, by word."""
    tagged: bool
    """Not an ordinary step: it compiled, saved, evaluated, was skipped, or collected garbage."""
    work: int
    """Tokens, or samples where there are none; 0 where neither is known."""

    @property
    def work_ns(self) -> int:
        """Its own time, which does not depend on how late the others are."""
        return self.took_ns - self.wait_ns


class Run(NamedTuple):
    """Steps in a row that have the same parts: what is done with one is done with all at once."""

    codes: bytes
    """Of each part, and then of each rest."""
    spans_ns: Sequence[Sequence[int]]
    """Of each part, and then of each rest, in every step."""
    steps: Sequence[_Step]

    def longest_ns(self) -> dict[int, int]:
        """By phase, the longest stretch of it."""
        found: dict[int, int] = {}
        # A rest is many stretches, of which nobody knows how long each was.
        parts = len(self.steps[0].parts.codes)
        for code, span_ns in zip(self.codes[:parts], map(max, self.spans_ns), strict=False):
            phase = code & _PHASE_CODE
            if span_ns > found.get(phase, 0):
                found[phase] = span_ns
        return found


# The agent does what follows for every step of every rank: in columns, where that is cheaper.


def alike(steps: Sequence[_Step]) -> list[Run]:
    """The steps in runs: of one training nearly all are of one kind."""
    parts = [step.parts for step in steps]
    kinds = [each.codes for each in parts]
    rows = [each.spans_ns for each in parts]
    for at in [at for at, step in enumerate(steps) if step.rest]:
        rest = steps[at].rest
        kinds[at] += bytes([code for code, _ in rest])
        rows[at] = (*rows[at], *[span_ns for _, span_ns in rest])
    found = []
    first = 0
    for codes, same in groupby(kinds):
        end = first + len(list(same))
        found.append(Run(codes, list(zip(*rows[first:end], strict=True)), steps[first:end]))
        first = end
    return found


@lru_cache(256)
def _places(codes: bytes) -> dict[str, list[int]]:
    """Of steps of these parts: what to add up for each phase that they have."""
    places: dict[str, list[int]] = {}
    for at, code in enumerate(codes):
        places.setdefault(_WORD.get(code & _PHASE_CODE, "other"), []).append(at)
    return places


def _spent_ns(run: Run, phase: str) -> Sequence[int]:
    """How long each of its steps was in this phase."""
    places = _places(run.codes).get(phase)
    if not places:
        return [0] * len(run.steps)
    if len(places) == 1:
        return run.spans_ns[places[0]]
    return list(map(sum, zip(*[run.spans_ns[at] for at in places], strict=True)))


def _unusual_ns(run: Run) -> list[Mapping[str, int]]:
    """What its steps had that ordinary ones have not."""
    words = [word for word in UNUSUAL_PHASES if word in _places(run.codes)]
    if not words:
        return [_NOTHING] * len(run.steps)
    columns = zip(*[_spent_ns(run, word) for word in words], strict=True)
    return [dict(zip(words, spent_ns, strict=True)) for spent_ns in columns]


def facts_of(run: Run) -> list[StepFacts]:
    """The facts of its steps; nothing of one that has no number or took no time."""
    found = []
    for step, wait_ns, phases_ns, unusual_ns in zip(
        run.steps,
        _spent_ns(run, "comm_wait"),
        zip(*[_spent_ns(run, word) for word in WORK_PHASES], strict=True),
        _unusual_ns(run),
        strict=True,
    ):
        number, ended_ns, gc_s = step.number, step.ended_ns, step.gc_s
        took_ns = ended_ns - step.began_ns
        if number is None or took_ns <= 0:
            continue
        tagged = (
            bool(unusual_ns)
            or step.skipped
            or (gc_s > _SMALL_GC_S and gc_s > min(_GC_SHARE * took_ns / 1e9, _LONG_GC_S))
        )
        found.append(
            StepFacts(number, ended_ns, took_ns, wait_ns, phases_ns, unusual_ns, tagged, step.work)
        )
    return found


def run_of(who: Who) -> Who:
    """The run of a process, whatever its role: whom a verdict about all its ranks is about."""
    return tuple(label for label in who if label[0] in RUN_LABELS)


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
