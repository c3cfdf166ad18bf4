"""Tells waits from work by when each rank of a node arrived at each collective."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from otel_ddp.diagnosis.step_facts import StepFacts
from otel_ddp.diagnosis.verdict import Labels
from otel_ddp.diagnosis.waits import Interval, Segment, find_waits
from otel_ddp.words import PHASE_CODE, WORK_PHASES, phase_word

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


class TimedStep(NamedTuple):
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
    samples: Mapping[Labels, Sample], steps: Mapping[Labels, Sequence[TimedStep]], after: int = -1
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
    waits, unclear = find_waits(_intervals(trails, usuals))
    if unclear:
        return Comparison({}, f"it is not clear whether ranks wait in {unclear}")
    wanted = newest(common, after)
    if not wanted:
        return Comparison({}, NOTHING_NEW)
    facts = {}
    for labels, trail, found in zip(ranks, trails, usuals, strict=True):
        by_number = {each.step.facts.number: each for each in found}
        facts[labels] = [_without_waits(trail, by_number[number], waits) for number in wanted]
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

    step: TimedStep
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

    def covered(self, steps: Sequence[TimedStep]) -> list[_Covered]:
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


def _intervals(trails: Sequence[_Trail], covered: Sequence[Sequence[_Covered]]) -> list[Interval]:
    """The intervals between the collectives of a usual step, in their order."""
    found: dict[int, list[Segment]] = defaultdict(list)
    ops: dict[int, tuple[str, str]] = {}
    for rank, (trail, steps) in enumerate(zip(trails, covered, strict=True)):
        at_ns = trail.at_ns
        for each in steps:
            for interval, at in enumerate(each.collectives):
                ops[interval] = trail.ops[at], trail.ops[at + 1]
                segment = Segment(
                    rank,
                    interval,
                    at_ns[at + 1] - at_ns[at],
                    trail.wait_ns(at),
                    trail.releases[at].delay_ns,
                )
                found[interval].append(segment)
    return [Interval(ops[i], found[i]) for i in range(len(found))]


def _without_waits(trail: _Trail, covered: _Covered, waits: Sequence[bool]) -> StepFacts:
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
