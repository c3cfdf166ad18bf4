"""Tells waits inside forward and backward from work, by how long each collective took each device.

A collective takes the last rank what its transfer takes, and the others their wait as well. So no
clocks have to be compared. Whether work hid a wait, delays show.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from operator import mul
from typing import NamedTuple

from otel_ddp.diagnosis.medians import median
from otel_ddp.diagnosis.step_facts import StepFacts, TimedStep
from otel_ddp.diagnosis.verdict import Labels
from otel_ddp.vocabulary.words import PHASE_CODE, PHASES, TIME_COLLECTIVES, WORK_PHASES

# The most steps of one sample: a verdict takes two samples at least.
_MOST_STEPS = 60
NOTHING_NEW = "no step is new since the ranks were last asked"
# Between two ranks, one number does not say which rank waits for which.
_PAIRS = ("send", "recv")
NOT_TIMED = f"torch does not time collectives: {TIME_COLLECTIVES}"
_INDEX = {PHASES[word]: at for at, word in enumerate(WORK_PHASES)}
_BACKWARD = WORK_PHASES.index("backward")

_Key = tuple[str, int]
"""A process group, and the number of a collective in it."""
_PhaseWaits = dict[int, list[int]]
"""By the number of a step: the waits that were launched in each of WORK_PHASES."""
# When one rank is later than usual, the others lose all of that where they wait, and nothing where
# they do not. The measured share must be this many standard deviations away from one half.
_CLEARLY = 3.0
# Where no rank varies in its lateness: waits are there if that makes the ranks so much more alike.
_MORE_ALIKE = 1.3
# Values that are further out than so many times the usual are taken as this far.
_FAR = 4.0
# A wait that is longer than the phase speaks against waiting there, where it exceeds the clock's
# grain in more than this share of cases.
_GRAIN_NS = 50_000
_EXCEPTIONS = 0.02
# What varies by less than this does not vary.
_TICK_NS = 1_000
# Where so small a share could be waiting, it makes no difference whether it is.
_HARMLESS = 0.01


class Arrival(NamedTuple):
    """When the host of one rank put one collective in line, and how long it took the device."""

    group: str
    number: int
    op: str
    at_ns: int
    """On the clock of its steps."""
    took_ns: int | None = None
    """Waits included; None where torch does not time that, or the collective is under way."""


class Sample(NamedTuple):
    """What the flight recorder of one rank remembers."""

    arrivals: Sequence[Arrival]
    """In the order in which the rank put them in line."""
    sizes: Mapping[str, int]
    """By process group: how many ranks it has, on all nodes."""


class Comparison(NamedTuple):
    """What the samples of all ranks say."""

    facts: Mapping[Labels, Sequence[StepFacts]]
    """The same steps of all ranks, with the waits taken out of their work."""
    why: str = ""
    """Why there are no facts."""


def compare(
    samples: Mapping[Labels, Sample],
    steps: Mapping[Labels, Sequence[TimedStep]],
    on_device: Mapping[Labels, Sequence[StepFacts]],
    after: int = -1,
) -> Comparison:
    """The work of each rank by its device's clock, in steps whose collectives are all known.

    *steps*: on the host's clock, which says in which phase a collective was launched; *after*:
    the last step that was compared before. Recorders remember that one, too.
    """
    if why := _why_not_comparable(samples):
        return Comparison({}, why)
    ranks = sorted(samples)
    waits_ns = _waited_ns([samples[labels].arrivals for labels in ranks])
    waited = [
        _by_step(samples[labels].arrivals, steps.get(labels, ()), waits_ns[at])
        for at, labels in enumerate(ranks)
    ]
    timed = [{each.number: each for each in on_device.get(labels, ())} for labels in ranks]
    common = set.intersection(*(set(a) & set(b) for a, b in zip(waited, timed, strict=True)))
    if not common:
        return Comparison({}, "no step is complete in the flight recorders of all ranks")
    numbers = sorted(common)
    for number in numbers:
        _leave_out_known([w[number] for w in waited], [facts[number] for facts in timed])
    taken_out, unclear = _find_waits(
        {
            at: _segments(at, numbers, waited, timed)
            for at in range(len(WORK_PHASES))
            if any(w[n][at] for w in waited for n in numbers)
        }
    )
    if unclear:
        return Comparison({}, f"it is not clear whether ranks wait in {unclear}")
    wanted = newest(common, after)
    if not wanted:
        return Comparison({}, NOTHING_NEW)
    return Comparison(
        {
            labels: [_without_waits(by_number[n], waits[n], taken_out) for n in wanted]
            for labels, by_number, waits in zip(ranks, timed, waited, strict=True)
        }
    )


def newest(numbers: Collection[int], after: int) -> list[int]:
    """The last of these steps that came after this one; of those that count anew, all."""
    if max(numbers) < after:
        after = -1
    return sorted(number for number in numbers if number > after)[-_MOST_STEPS:]


def _why_not_comparable(samples: Mapping[Labels, Sample]) -> str:
    arrivals = [each for sample in samples.values() for each in sample.arrivals]
    if any(not sample.arrivals for sample in samples.values()):
        return "a flight recorder of torch is empty: set TORCH_FR_BUFFER_SIZE=2000"
    if not all(any(e.took_ns is not None for e in each.arrivals) for each in samples.values()):
        return NOT_TIMED
    if any(each.op.partition(":")[2].startswith(_PAIRS) for each in arrivals):
        return "ranks wait for each other in sends and receives, which are not compared"
    members: Counter[str] = Counter()
    sizes: dict[str, int] = {}
    for sample in samples.values():
        members.update({each.group for each in sample.arrivals})
        sizes.update(sample.sizes)
    for group, count in members.items():
        # A rank that waits there for another node is late afterwards, through no fault of its own.
        # Where all ranks of the node wait like that, they are all late.
        if count not in (sizes.get(group, 0), len(samples)):
            return "a process group has only some of the ranks here, and ranks that are not here"
    return ""


def _waited_ns(ranks: Sequence[Sequence[Arrival]]) -> list[dict[_Key, int]]:
    """For each rank: how long it waited in each collective that all ranks of its group have timed.

    Where ranks of other nodes are in it, all wait for the last of those as well. That is equal on
    all ranks here, and no difference between them.
    """
    members: Counter[str] = Counter()
    took_ns: defaultdict[_Key, dict[int, int]] = defaultdict(dict)
    for rank, arrivals in enumerate(ranks):
        members.update({each.group for each in arrivals})
        for each in arrivals:
            if each.took_ns is not None:
                took_ns[each.group, each.number][rank] = each.took_ns
    found: list[dict[_Key, int]] = [{} for _ in ranks]
    for key, by_rank in took_ns.items():
        if len(by_rank) == members[key[0]]:
            least_ns = min(by_rank.values())
            for rank, each_ns in by_rank.items():
                found[rank][key] = each_ns - least_ns
    return found


def _by_step(
    arrivals: Sequence[Arrival], steps: Sequence[TimedStep], waits_ns: Mapping[_Key, int]
) -> _PhaseWaits:
    """What the waits of each step add up to, of steps whose collectives are all known."""
    # Of a step with a rest not all parts are known.
    steps = [each for each in steps if not each.rest]
    began_ns = [each.began_ns for each in steps]
    found: _PhaseWaits = {
        # Collectives may be missing of the steps with which the recorder begins and ends, and steps
        # go on after it was read.
        each.number: [0] * len(WORK_PHASES)
        for each in steps
        if each.number is not None
        and (arrivals[0].at_ns < each.began_ns and each.ended_ns < arrivals[-1].at_ns)
    }
    for each in arrivals:
        at = bisect_right(began_ns, each.at_ns) - 1
        if at < 0 or each.at_ns >= steps[at].ended_ns:
            continue
        step, number = steps[at], steps[at].number
        wait_ns = waits_ns.get((each.group, each.number))
        if number not in found:
            continue
        if wait_ns is None:
            del found[number]
        else:
            found[number][_phase_at(step, each.at_ns)] += wait_ns
    return found


def _leave_out_known(waits: Sequence[list[int]], step: Sequence[StepFacts]) -> None:
    """Leave out, of the waits of one step, what the devices are known to have waited.

    Gradients are put in line in backward, and waited for after it, in `comm_wait`.
    """
    least_ns = min(facts.wait_ns for facts in step)
    for waits_ns, facts in zip(waits, step, strict=True):
        waits_ns[_BACKWARD] = max(0, waits_ns[_BACKWARD] - (facts.wait_ns - least_ns))


def _phase_at(step: TimedStep, at_ns: int) -> int:
    """In which of WORK_PHASES the host was at this time."""
    until_ns = step.began_ns
    for code, span_ns in zip(step.parts.codes, step.parts.spans_ns, strict=True):
        until_ns += span_ns
        if at_ns < until_ns:
            return _INDEX.get(code & PHASE_CODE, _INDEX[PHASES["other"]])
    return _INDEX[PHASES["other"]]


def _segments(
    at: int,
    numbers: Sequence[int],
    waited: Sequence[_PhaseWaits],
    timed: Sequence[Mapping[int, StepFacts]],
) -> list[_Segment]:
    """One phase of all these steps. What waits there were may be hidden behind work."""
    segments = []
    for number in numbers:
        latest = min(range(len(waited)), key=lambda rank: waited[rank][number][at])
        delay_ns = timed[latest][number].phases_ns[at]
        segments += [
            _Segment(rank, at, facts[number].phases_ns[at], waits[number][at], delay_ns)
            for rank, (waits, facts) in enumerate(zip(waited, timed, strict=True))
        ]
    return segments


def _without_waits(facts: StepFacts, waits_ns: Sequence[int], phases: Sequence[int]) -> StepFacts:
    """The step with the waits in these phases taken out of its work."""
    phases_ns, wait_ns = list(facts.phases_ns), facts.wait_ns
    for at in phases:
        more_ns = min(waits_ns[at], phases_ns[at])
        phases_ns[at] -= more_ns
        wait_ns += more_ns
    return facts._replace(phases_ns=tuple(phases_ns), wait_ns=wait_ns)


# -- where ranks wait at all


class _Segment(NamedTuple):
    """One phase of one rank, in one step."""

    rank: int
    phase: int
    gap_ns: int
    """How long it took the device."""
    wait_ns: int
    """How long the rank waited in its collectives, if work did not hide that."""
    delay_ns: int
    """How long the phase took the rank that came last."""


def _find_waits(phases: Mapping[int, Sequence[_Segment]]) -> tuple[list[int], str]:
    """In which phases ranks wait; or the name of one for which that is unclear."""
    found = {at: _waits(segments) for at, segments in phases.items()}
    clear = set(found.values()) - {None}
    unclear = [at for at, waits in found.items() if waits is None]
    if unclear:
        # Such a phase is like all others. Where those disagree, the unclear ones are judged
        # together.
        together = [each for at in unclear for each in phases[at]]
        waits = clear.pop() if len(clear) == 1 else _waits(together)
        found.update(dict.fromkeys(unclear, waits))
        all_ns = sum(each.gap_ns for segments in phases.values() for each in segments)
        most_ns = sum(each.wait_ns for each in together)
        if waits is None and most_ns > _HARMLESS * all_ns:
            return [], WORK_PHASES[unclear[0]]
    return [at for at, waits in found.items() if waits], ""


def _waits(segments: Sequence[_Segment]) -> bool | None:
    """Whether ranks wait here; None: that is unclear."""
    refuted = sum(each.wait_ns > each.gap_ns + _GRAIN_NS for each in segments)
    if refuted > _EXCEPTIONS * len(segments):
        return False
    lose = _lose([each for each in segments if each.wait_ns > 0])
    return _are_level(segments) if lose is None else lose


def _lose(segments: Sequence[_Segment]) -> bool | None:
    """Whether these ranks lose what the latest rank needed more than usual; None: unclear.

    The delay of the latest rank alone decides. The wait says nothing by itself: a rank that
    is early is often a fast one, so what it waits more it needs less afterwards.
    """
    gaps = _unusual([(each.rank, each.phase, each.gap_ns) for each in segments])
    waits = _unusual([(each.rank, each.phase, each.wait_ns) for each in segments])
    delays = _unusual([(each.rank, each.phase, each.delay_ns) for each in segments])
    common = sum(map(mul, waits, delays))
    if common <= len(segments) * _TICK_NS**2:
        return None
    lost = sum(map(mul, gaps, delays)) / common
    left = [
        (gap - lost * wait) * delay for gap, wait, delay in zip(gaps, waits, delays, strict=True)
    ]
    deviation = math.sqrt(sum(map(mul, left, left))) / common
    if abs(lost - 0.5) < _CLEARLY * deviation:
        return None
    return bool(lost > 0.5)


def _unusual(found: Sequence[tuple[int, int, int]]) -> list[float]:
    """Values of (rank, phase, value), less what is usual for this rank and phase."""
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, phase, value in found:
        groups[rank, phase].append(value)
    usual = {key: median(values) for key, values in groups.items()}
    values = [value - usual[rank, phase] for rank, phase, value in found]
    far = _FAR * median([abs(each) for each in values]) if values else 0.0
    return [max(-far, min(each, far)) for each in values]


def _are_level(segments: Sequence[_Segment]) -> bool | None:
    """Whether all ranks need the same once such waits are taken out; None: unclear."""
    by_phase: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for each in segments:
        by_phase[each.phase].append((each.gap_ns, max(each.gap_ns - each.wait_ns, 0)))
    columns = [zip(*each, strict=True) for each in by_phase.values()]
    with_waits, without = (sum(map(_spread, each)) for each in zip(*columns, strict=True))
    return True if with_waits > _MORE_ALIKE * without else None


def _spread(values: Sequence[float]) -> float:
    center = median(values)
    return sum(abs(each - center) for each in values)
