"""What the verdicts on speed need to know of one step of one rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from otel_ddp.catalog import PHASES
from otel_ddp.diagnosis.verdict import Who

# The phases of an ordinary step that are work; all of them are in every StepFacts.
WORK_PHASES = ("data", "forward", "backward", "optimizer", "other")
# A step with one of these is no ordinary one, and not compared with others.
UNUSUAL_PHASES = ("compile", "checkpoint", "eval")

# Above these bits the journal says what it is that is waited for.
_PHASE_CODE = 0x3F
_WORD = {code: word for word, code in PHASES.items()}
_SUMMED = (*WORK_PHASES, "comm_wait", *UNUSUAL_PHASES)
# Python's small collections take a fraction of this, and are in nearly every step.
_SMALL_GC_S = 0.0005
_LONG_GC_S = 0.005
_GC_SHARE = 0.01
_RUN_LABELS = ("group", "run", "job_type")


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


def alike(steps: Sequence[_Step]) -> list[Run]:
    """The steps in runs: of one training nearly all are of one kind."""
    found: list[tuple[bytes, list[Sequence[int]], list[_Step]]] = []
    before = b""
    for step in steps:
        codes, spans_ns = step.parts.codes, step.parts.spans_ns
        if step.rest:
            codes += bytes([code for code, _ in step.rest])
            spans_ns = (*spans_ns, *[span_ns for _, span_ns in step.rest])
        if not found or codes != before:
            before = codes
            found.append((codes, [], []))
        _, rows, run = found[-1]
        rows.append(spans_ns)
        run.append(step)
    return [Run(codes, list(zip(*rows, strict=True)), run) for codes, rows, run in found]


@lru_cache(256)
def _places(codes: bytes) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """Of steps of these parts: what to add up for each sum, and what is unusual in them."""
    words = [_WORD.get(code & _PHASE_CODE, "other") for code in codes]
    places = [tuple(at for at, each in enumerate(words) if each == word) for word in _SUMMED]
    return tuple(places), tuple(word for word in UNUSUAL_PHASES if word in words)


def facts_of(run: Run) -> list[StepFacts]:
    """The facts of its steps; nothing of one that has no number or took no time."""
    places, unusual = _places(run.codes)
    zeros = [0.0] * len(run.steps)
    sums_s = []
    for each in places:
        spans_ns: Iterable[int]
        if not each:
            sums_s.append(zeros)
            continue
        if len(each) == 1:
            spans_ns = run.spans_ns[each[0]]
        else:
            spans_ns = map(sum, zip(*[run.spans_ns[at] for at in each], strict=True))
        sums_s.append([span_ns / 1e9 for span_ns in spans_ns])
    data, forward, backward, optimizer, other, waits = sums_s[:6]
    found = []
    for at, step in enumerate(run.steps):
        number, began_ns, ended_ns = step.number, step.began_ns, step.ended_ns
        if number is None or ended_ns <= began_ns:
            continue
        took_s = (ended_ns - began_ns) / 1e9
        phases = {
            "data": data[at],
            "forward": forward[at],
            "backward": backward[at],
            "optimizer": optimizer[at],
            "other": other[at],
        }
        for word in unusual:
            phases[word] = sums_s[_SUMMED.index(word)][at]
        gc_s = step.gc_s
        tagged = (
            bool(unusual)
            or step.skipped
            or (gc_s > _SMALL_GC_S and gc_s > min(_GC_SHARE * took_s, _LONG_GC_S))
        )
        found.append(StepFacts(number, ended_ns, took_s, waits[at], phases, tagged, step.work))
    return found


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
