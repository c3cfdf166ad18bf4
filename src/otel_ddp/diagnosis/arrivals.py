"""Tells waits from work by when each rank arrived at each collective, or how long each took it.

A host that waits in a collective does so until the last rank has arrived. Where devices wait
instead, a collective takes the last one what its transfer takes, and the others their wait as well:
so no clocks have to be compared. Between which collectives ranks wait at all, delays show.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from operator import mul
from typing import NamedTuple

from otel_ddp.diagnosis.medians import median
from otel_ddp.diagnosis.step_facts import StepFacts
from otel_ddp.diagnosis.verdict import Labels
from otel_ddp.vocabulary.words import PHASE_CODE, PHASES, WORK_PHASES, phase_word

# The most steps of one sample: a verdict takes two samples at least.
_MOST_STEPS = 60
# More of the same interval says nothing new.
_MOST_PER_INTERVAL = 400
# A collective that is put in line ahead of time comes right after another one. So a delay is taken
# over this many collectives: the time of several together does vary.
_BEFORE = 2
NOTHING_NEW = "no step is new since the ranks were last asked"
# Between two ranks, one number does not say which rank waits for which.
_PAIRS = ("send", "recv")
NOT_TIMED = (
    "torch does not time collectives: set TORCH_NCCL_ENABLE_TIMING=1 before the process group is "
    "made"
)
_INDEX = {PHASES[word]: at for at, word in enumerate(WORK_PHASES)}
_BACKWARD = WORK_PHASES.index("backward")

_Key = tuple[str, int]
_PhaseWaits = dict[int, list[int]]
"""By the number of a step: the waits that were launched in each of WORK_PHASES."""
# When one rank is later than usual, the others lose all of that where they wait, and nothing where
# they do not. The measured share must be this many standard deviations away from one half.
_CLEARLY = 3.0
# Where no rank varies in its lateness: waits are there if that makes the ranks so much more alike.
_MORE_ALIKE = 1.3
# Values that are further out than so many times the usual are taken as this far.
_FAR = 4.0
# A rank does not wait for one that was there already. So a wait that is longer than the gap speaks
# against waiting, where it exceeds the clock's grain in more than this share of cases.
_GRAIN_NS = 50_000
_EXCEPTIONS = 0.02
# What varies by less than this does not vary.
_TICK_NS = 1_000
# Where so small a share could be waiting, it makes no difference whether it is.
_HARMLESS = 0.01


class Arrival(NamedTuple):
    """When one rank put one collective in line."""

    group: str
    number: int
    op: str
    at_ns: int
    """On a clock that all ranks of the node share, like all times here."""
    took_ns: int | None = None
    """How long it took the device, waits included, where torch times that."""


class Sample(NamedTuple):
    """What the flight recorder of one rank remembers."""

    arrivals: Sequence[Arrival]
    """In the order in which the rank put them in line."""
    sizes: Mapping[str, int]
    """By process group: how many ranks it has, on all nodes."""
    on_device: bool = False
    """Whether devices wait in these collectives, and hosts go on."""


class HostStep(NamedTuple):
    """One step of one rank as in its journal: waits are still inside its work."""

    facts: StepFacts
    began_ns: int
    codes: bytes
    spans_ns: Sequence[int]

    @property
    def ended_ns(self) -> int:
        return self.began_ns + sum(self.spans_ns)


class Comparison(NamedTuple):
    """What the samples of all ranks say."""

    facts: Mapping[Labels, Sequence[StepFacts]]
    """The same steps of all ranks, with the waits taken out of their work."""
    why: str = ""
    """Why there are no facts."""


def compare(
    samples: Mapping[Labels, Sample], steps: Mapping[Labels, Sequence[HostStep]], after: int = -1
) -> Comparison:
    """The work of each rank, in the steps that all recorders still remember.

    Of those, the ones after step number *after*: recorders remember what was compared before.
    """
    if why := _why_not_comparable(samples):
        return Comparison({}, why)
    ranks = sorted(samples)
    trails = _trails([samples[labels].arrivals for labels in ranks])
    covered = [
        trail.covered(steps.get(labels, ())) for labels, trail in zip(ranks, trails, strict=True)
    ]
    counts = Counter(len(each.collectives) for found in covered for each in found)
    usual = counts.most_common(1)[0][0] if counts else 0
    last = -max(_MOST_PER_INTERVAL // len(ranks), _MOST_STEPS)
    usuals = [
        [each for each in found if len(each.collectives) == usual][last:] for found in covered
    ]
    common = set.intersection(*({each.step.facts.number for each in found} for found in usuals))
    if not usual or not common:
        return Comparison({}, "no step is complete in the flight recorders of all ranks")
    waits, unclear = _find_waits(_intervals(trails, usuals))
    if unclear:
        return Comparison({}, f"it is not clear whether ranks wait in {unclear}")
    wanted = newest(common, after)
    if not wanted:
        return Comparison({}, NOTHING_NEW)
    facts = {}
    for labels, trail, found in zip(ranks, trails, usuals, strict=True):
        by_number = {each.step.facts.number: each for each in found}
        facts[labels] = [_host_step(trail, by_number[number], waits) for number in wanted]
    return Comparison(facts)


def newest(numbers: Collection[int], after: int) -> list[int]:
    """The last of these steps that came after this one; of those that count anew, all."""
    if max(numbers) < after:
        after = -1
    return sorted(number for number in numbers if number > after)[-_MOST_STEPS:]


def _why_not_comparable(samples: Mapping[Labels, Sample]) -> str:
    arrivals = [each for sample in samples.values() for each in sample.arrivals]
    if any(not sample.arrivals for sample in samples.values()):
        return "a flight recorder has no collectives that a host waits in"
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
            return "a process group has only some ranks of this node, and ranks of other nodes"
    return ""


class _Release(NamedTuple):
    """When the last rank arrived at a collective."""

    at_ns: int
    delay_ns: int
    """The time that this rank had needed for its last collectives."""


class _Covered(NamedTuple):
    """A step that lies within what all recorders remember."""

    step: HostStep
    collectives: range
    """The indices of its collectives in its rank's trail."""


class _Trail:
    """The collectives of one rank that all ranks remember, and when the last rank arrived."""

    def __init__(
        self, arrivals: Sequence[Arrival], releases: Mapping[tuple[str, int], _Release]
    ) -> None:
        self.ops = [each.op for each in arrivals]
        self.at_ns = [each.at_ns for each in arrivals]
        self.releases = [releases[each.group, each.number] for each in arrivals]

    def covered(self, steps: Sequence[HostStep]) -> list[_Covered]:
        """The steps with remembered collectives both before and after them."""
        found = []
        for step in steps:
            first = bisect_left(self.at_ns, step.began_ns)
            last = bisect_left(self.at_ns, step.ended_ns)
            if first > 0 and last < len(self.at_ns):
                found.append(_Covered(step, range(first, last)))
        return found

    def wait_ns(self, i: int) -> int:
        """How long after this rank the last rank arrived at collective *i*."""
        return self.releases[i].at_ns - self.at_ns[i]


def _trails(ranks: Sequence[Sequence[Arrival]]) -> list[_Trail]:
    arrived: dict[tuple[str, int], list[_Release]] = defaultdict(list)
    members: Counter[str] = Counter()
    for arrivals in ranks:
        members.update({each.group for each in arrivals})
        for at, each in enumerate(arrivals):
            delay_ns = each.at_ns - arrivals[max(at - _BEFORE, 0)].at_ns
            arrived[each.group, each.number].append(_Release(each.at_ns, delay_ns))
    releases = {key: max(each) for key, each in arrived.items() if len(each) == members[key[0]]}
    trails = []
    for arrivals in ranks:
        # At both ends are collectives that other ranks have forgotten, or have yet to reach.
        end = len(arrivals)
        while end and (arrivals[end - 1].group, arrivals[end - 1].number) not in releases:
            end -= 1
        start = end
        while start and (arrivals[start - 1].group, arrivals[start - 1].number) in releases:
            start -= 1
        trails.append(_Trail(arrivals[start:end], releases))
    return trails


def _intervals(trails: Sequence[_Trail], covered: Sequence[Sequence[_Covered]]) -> list[_Interval]:
    """The intervals between the collectives of a usual step, in their order."""
    found: dict[int, list[_Segment]] = defaultdict(list)
    ops: dict[int, tuple[str, str]] = {}
    for rank, (trail, steps) in enumerate(zip(trails, covered, strict=True)):
        at_ns = trail.at_ns
        for each in steps:
            for interval, at in enumerate(each.collectives):
                ops[interval] = trail.ops[at], trail.ops[at + 1]
                segment = _Segment(
                    rank,
                    interval,
                    at_ns[at + 1] - at_ns[at],
                    trail.wait_ns(at),
                    trail.releases[at].delay_ns,
                )
                found[interval].append(segment)
    return [_Interval(ops[i], found[i]) for i in range(len(found))]


def _host_step(trail: _Trail, covered: _Covered, waits: Sequence[bool]) -> StepFacts:
    """The step with its waits taken out of the phases that they were in."""
    step, collectives = covered
    edges = [step.began_ns]
    for span_ns in step.spans_ns:
        edges.append(edges[-1] + span_ns)
    waited_ns: Counter[str] = Counter()
    # A wait at the beginning of a step belongs to the last collective before it.
    for at in range(collectives.start - 1, collectives.stop):
        if not waits[(at - collectives.start) % len(waits)]:
            continue
        began_ns = trail.at_ns[at]
        ended_ns = min(began_ns + trail.wait_ns(at), trail.at_ns[at + 1])
        part = max(bisect_left(edges, began_ns) - 1, 0)
        while part < len(step.codes) and edges[part] < ended_ns:
            inside_ns = min(ended_ns, edges[part + 1]) - max(began_ns, edges[part])
            waited_ns[phase_word(step.codes[part] & PHASE_CODE)] += max(inside_ns, 0)
            part += 1
    facts = step.facts
    phases_ns = dict(zip(WORK_PHASES, facts.phases_ns, strict=True))
    wait_ns = facts.wait_ns
    for word in WORK_PHASES:
        more_ns = min(waited_ns[word], phases_ns[word])
        phases_ns[word] -= more_ns
        wait_ns += more_ns
    return facts._replace(wait_ns=wait_ns, phases_ns=tuple(phases_ns.values()))


# -- on the clocks of devices


def compare_on_device(
    samples: Mapping[Labels, Sample],
    steps: Mapping[Labels, Sequence[HostStep]],
    on_device: Mapping[Labels, Sequence[StepFacts]],
    after: int = -1,
) -> Comparison:
    """The work of each rank by its device's clock, in steps whose collectives are all known.

    *steps*: on the host's clock, which says in which phase a collective was launched; *after*:
    the last step that was compared before.
    """
    if not all(any(each.took_ns is not None for each in s.arrivals) for s in samples.values()):
        return Comparison({}, NOT_TIMED)
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
    phases = [
        at for at in range(len(WORK_PHASES)) if any(w[n][at] for w in waited for n in numbers)
    ]
    exposed, unclear = _find_waits([_phase_interval(at, numbers, waited, timed) for at in phases])
    if unclear:
        return Comparison({}, f"it is not clear whether ranks wait in {unclear}")
    taken_out = [at for at, waits in zip(phases, exposed, strict=True) if waits]
    wanted = newest(common, after)
    if not wanted:
        return Comparison({}, NOTHING_NEW)
    return Comparison(
        {
            labels: [_device_step(by_number[n], waits[n], taken_out) for n in wanted]
            for labels, by_number, waits in zip(ranks, timed, waited, strict=True)
        }
    )


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
    arrivals: Sequence[Arrival], steps: Sequence[HostStep], waits_ns: Mapping[_Key, int]
) -> _PhaseWaits:
    """What the waits of each step add up to, of steps whose collectives are all known."""
    if not arrivals:
        return {}
    began_ns = [each.began_ns for each in steps]
    found: _PhaseWaits = {
        # Collectives may be missing of the steps with which the recorder begins and ends, and steps
        # go on after it was read.
        each.facts.number: [0] * len(WORK_PHASES)
        for each in steps
        if arrivals[0].at_ns < each.began_ns and each.ended_ns < arrivals[-1].at_ns
    }
    for each in arrivals:
        at = bisect_right(began_ns, each.at_ns) - 1
        if at < 0 or each.at_ns >= steps[at].began_ns + sum(steps[at].spans_ns):
            continue
        step = steps[at]
        number = step.facts.number
        wait_ns = waits_ns.get((each.group, each.number))
        if wait_ns is None:
            found.pop(number, None)
        elif number in found:
            found[number][_phase_at(step, each.at_ns)] += wait_ns
    return found


def _leave_out_known(waits: Sequence[list[int]], step: Sequence[StepFacts]) -> None:
    """Leave out, of the waits of one step, what the devices are known to have waited.

    Gradients are put in line in backward, and waited for after it, in `comm_wait`.
    """
    least_ns = min(facts.wait_ns for facts in step)
    for waits_ns, facts in zip(waits, step, strict=True):
        waits_ns[_BACKWARD] = max(0, waits_ns[_BACKWARD] - (facts.wait_ns - least_ns))


def _phase_at(step: HostStep, at_ns: int) -> int:
    """In which of WORK_PHASES the host was at this time."""
    until_ns = step.began_ns
    for code, span_ns in zip(step.codes, step.spans_ns, strict=True):
        until_ns += span_ns
        if at_ns < until_ns:
            return _INDEX.get(code & PHASE_CODE, _INDEX[PHASES["other"]])
    return _INDEX[PHASES["other"]]


def _phase_interval(
    at: int,
    numbers: Sequence[int],
    waited: Sequence[_PhaseWaits],
    timed: Sequence[Mapping[int, StepFacts]],
) -> _Interval:
    """One phase of all these steps. What waits there were may be hidden behind work."""
    segments = []
    for number in numbers:
        latest = min(range(len(waited)), key=lambda rank: waited[rank][number][at])
        delay_ns = timed[latest][number].phases_ns[at]
        segments += [
            _Segment(rank, at, facts[number].phases_ns[at], waits[number][at], delay_ns)
            for rank, (waits, facts) in enumerate(zip(waited, timed, strict=True))
        ]
    return _Interval((WORK_PHASES[at], WORK_PHASES[at]), segments)


def _device_step(facts: StepFacts, waits_ns: Sequence[int], phases: Sequence[int]) -> StepFacts:
    """The step with the waits in these phases taken out of its work."""
    phases_ns, wait_ns = list(facts.phases_ns), facts.wait_ns
    for at in phases:
        more_ns = min(waits_ns[at], phases_ns[at])
        phases_ns[at] -= more_ns
        wait_ns += more_ns
    return facts._replace(phases_ns=tuple(phases_ns), wait_ns=wait_ns)


# -- where ranks wait at all


class _Segment(NamedTuple):
    """From one collective of one rank to its next one, in one step."""

    rank: int
    interval: int
    """The index of the collective that it begins with, within its step."""
    gap_ns: int
    wait_ns: int
    """How long it waited for the last rank to arrive, if it did wait."""
    delay_ns: int
    """How long that last rank had needed to get there."""


class _Interval(NamedTuple):
    """What lies between two collectives of a step, in all steps of all ranks."""

    ops: tuple[str, str]
    segments: Sequence[_Segment]


def _find_waits(intervals: Sequence[_Interval]) -> tuple[list[bool], str]:
    """For each interval, whether ranks wait in it; or the name of an operation that is unclear."""
    found = [_waits(segments) for _, segments in intervals]
    # An unclear interval is like those between the same operations, else like all others. Where
    # those are unclear too, or disagree, the unclear ones are judged together.
    by_ops: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i, (ops, _) in enumerate(intervals):
        by_ops[ops].append(i)
    for alike in (*by_ops.values(), range(len(intervals))):
        clear = {found[i] for i in alike} - {None}
        unclear = [i for i in alike if found[i] is None]
        if not unclear:
            continue
        if len(clear) == 1:
            (waits,) = clear
        else:
            waits = _waits([each for i in unclear for each in intervals[i].segments])
        for i in unclear:
            found[i] = waits
    unclear = [i for i, waits in enumerate(found) if waits is None]
    gaps_ns = sum(each.gap_ns for _, segments in intervals for each in segments)
    most_ns = sum(each.wait_ns for i in unclear for each in intervals[i].segments)
    if most_ns > _HARMLESS * gaps_ns:
        return [], intervals[unclear[0]].ops[0].rpartition(":")[2]
    return [bool(waits) for waits in found], ""


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
    gaps = _unusual([(each.rank, each.interval, each.gap_ns) for each in segments])
    waits = _unusual([(each.rank, each.interval, each.wait_ns) for each in segments])
    delays = _unusual([(each.rank, each.interval, each.delay_ns) for each in segments])
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
    """Values of (rank, interval, value), less what is usual for this rank and interval."""
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, interval, value in found:
        groups[rank, interval].append(value)
    usual = {key: median(values) for key, values in groups.items()}
    values = [value - usual[rank, interval] for rank, interval, value in found]
    far = _FAR * median([abs(each) for each in values]) if values else 0.0
    return [max(-far, min(each, far)) for each in values]


def _are_level(segments: Sequence[_Segment]) -> bool | None:
    """Whether all ranks need the same once such waits are taken out; None: unclear."""
    by_interval: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for each in segments:
        by_interval[each.interval].append((each.gap_ns, max(each.gap_ns - each.wait_ns, 0)))
    columns = [zip(*each, strict=True) for each in by_interval.values()]
    with_waits, without = (sum(map(_spread, each)) for each in zip(*columns, strict=True))
    return True if with_waits > _MORE_ALIKE * without else None


def _spread(values: Sequence[float]) -> float:
    center = median(values)
    return sum(abs(each - center) for each in values)
