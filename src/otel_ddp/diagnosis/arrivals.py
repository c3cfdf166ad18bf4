"""Tells waiting from work by when the ranks of a node arrived at each of their collectives."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from otel_ddp.catalog import PHASES
from otel_ddp.diagnosis.facts import WORK_PHASES, StepFacts
from otel_ddp.diagnosis.verdict import Who
from otel_ddp.diagnosis.waiting import Place, Segment, who_waits

# Of one sample, so that a verdict takes several of them.
_MOST_STEPS = 30
# More of the same place says nothing new.
_MOST_IN_A_PLACE = 400
# What is put in line ahead of time comes right after another one: of so many together the time that
# they took varies.
_BEFORE = 2
# Between two ranks: who waits for whom is not told by one number.
_PAIRS = ("send", "recv")
_PHASE_CODE = 0x3F
_WORD = {code: word for word, code in PHASES.items()}


class Arrival(NamedTuple):
    """One collective as one rank has put it in line."""

    group: str
    number: int
    op: str
    at_ns: int
    """On a clock that all ranks of the node have in common, as all times here."""


class Sample(NamedTuple):
    """What one rank's recorder remembers."""

    arrivals: Sequence[Arrival]
    """In the order in which it put them in line."""
    sizes: Mapping[str, int]
    """Of its process groups: how many ranks they have, on whatever nodes."""


class ToldStep(NamedTuple):
    """One step of one rank as its journal tells it, its waits among its work."""

    facts: StepFacts
    began_ns: int
    codes: bytes
    spans_ns: Sequence[int]

    @property
    def ended_ns(self) -> int:
        return self.began_ns + sum(self.spans_ns)


class Comparison(NamedTuple):
    """What the samples say."""

    facts: Mapping[Who, Sequence[StepFacts]]
    """The same steps of all ranks, with what they waited for each other taken out of their work."""
    why: str = ""
    """Why there is nothing in it."""


def compare(samples: Mapping[Who, Sample], steps: Mapping[Who, Sequence[ToldStep]]) -> Comparison:
    """The work of each rank in the steps that all recorders still know."""
    if why := _unfit(samples):
        return Comparison({}, why)
    ranks = sorted(samples)
    trails = _trails([samples[who].arrivals for who in ranks])
    covered = [trail.covered(steps.get(who, ())) for who, trail in zip(ranks, trails, strict=True)]
    counts = Counter(len(each.places) for found in covered for each in found)
    usual = counts.most_common(1)[0][0] if counts else 0
    last = -max(_MOST_IN_A_PLACE // len(ranks), _MOST_STEPS)
    usuals = [[each for each in found if len(each.places) == usual][last:] for found in covered]
    common = set.intersection(*({each.step.facts.number for each in found} for found in usuals))
    if not usual or not common:
        return Comparison({}, "no step is whole in the flight recorders of all ranks")
    places = _places(trails, usuals)
    waits, unsure = who_waits(places)
    if unsure:
        return Comparison({}, f"it cannot be told whether ranks wait in {unsure}")
    wanted = sorted(common)[-_MOST_STEPS:]
    facts = {}
    for who, trail, found in zip(ranks, trails, usuals, strict=True):
        by_number = {each.step.facts.number: each for each in found}
        facts[who] = [_without_waits(trail, by_number[number], waits) for number in wanted]
    return Comparison(facts)


def _unfit(samples: Mapping[Who, Sample]) -> str:
    arrivals = [each for sample in samples.values() for each in sample.arrivals]
    if any(not sample.arrivals for sample in samples.values()):
        return "a flight recorder tells of no collectives that a host waits in"
    if any(each.op.partition(":")[2].startswith(_PAIRS) for each in arrivals):
        return "ranks wait for one another in sends and receives, which are not compared"
    members: Counter[str] = Counter()
    sizes: dict[str, int] = {}
    for sample in samples.values():
        members.update({each.group for each in sample.arrivals})
        sizes.update(sample.sizes)
    for group, count in members.items():
        # Who waits there for another node is late afterwards, through no fault of its own. Where
        # all ranks of the node do so, they are all late.
        if count not in (sizes.get(group, 0), len(samples)):
            return "a process group has some ranks of this node, and others elsewhere"
    return ""


class _Release(NamedTuple):
    """The moment in which the last rank arrived at a collective."""

    at_ns: int
    delay_ns: int
    """What that rank had needed for its last collectives."""


class _Covered(NamedTuple):
    """A step that lies within what all recorders know."""

    step: ToldStep
    places: range
    """Its collectives, in its rank's trail."""


class _Trail:
    """The collectives of one rank that are known of all, and when they were complete."""

    def __init__(
        self, arrivals: Sequence[Arrival], releases: Mapping[tuple[str, int], _Release]
    ) -> None:
        self.ops = [each.op for each in arrivals]
        self.at_ns = [each.at_ns for each in arrivals]
        self.releases = [releases[each.group, each.number] for each in arrivals]

    def covered(self, steps: Sequence[ToldStep]) -> list[_Covered]:
        """The steps before and after which there are collectives that are known as well."""
        found = []
        for step in steps:
            first = bisect_left(self.at_ns, step.began_ns)
            last = bisect_left(self.at_ns, step.ended_ns)
            if first > 0 and last < len(self.at_ns):
                found.append(_Covered(step, range(first, last)))
        return found

    def wait_ns(self, place: int) -> int:
        """How long it waited before its next one, if it did, for those who were not there yet."""
        return self.releases[place].at_ns - self.at_ns[place]


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
        # At either end are some that others have forgotten, or have yet to reach.
        end = len(arrivals)
        while end and (arrivals[end - 1].group, arrivals[end - 1].number) not in releases:
            end -= 1
        start = end
        while start and (arrivals[start - 1].group, arrivals[start - 1].number) in releases:
            start -= 1
        trails.append(_Trail(arrivals[start:end], releases))
    return trails


def _places(trails: Sequence[_Trail], covered: Sequence[Sequence[_Covered]]) -> list[Place]:
    """The places of a usual step, in their order."""
    found: dict[int, list[Segment]] = defaultdict(list)
    ops: dict[int, tuple[str, str]] = {}
    for rank, (trail, steps) in enumerate(zip(trails, covered, strict=True)):
        at_ns = trail.at_ns
        for each in steps:
            for place, at in enumerate(each.places):
                ops[place] = trail.ops[at], trail.ops[at + 1]
                segment = Segment(
                    rank,
                    place,
                    at_ns[at + 1] - at_ns[at],
                    trail.wait_ns(at),
                    trail.releases[at].delay_ns,
                )
                found[place].append(segment)
    return [Place(ops[place], found[place]) for place in range(len(found))]


def _without_waits(trail: _Trail, covered: _Covered, waits: Sequence[bool]) -> StepFacts:
    """The step with its waits taken out of the phases that they were in."""
    step, places = covered
    edges = [step.began_ns]
    for span_ns in step.spans_ns:
        edges.append(edges[-1] + span_ns)
    waited_ns: Counter[str] = Counter()
    # What is waited for at its beginning belongs to the last collective before it.
    for at in range(places.start - 1, places.stop):
        if not waits[(at - places.start) % len(waits)]:
            continue
        began_ns = trail.at_ns[at]
        ended_ns = min(began_ns + trail.wait_ns(at), trail.at_ns[at + 1])
        part = max(bisect_left(edges, began_ns) - 1, 0)
        while part < len(step.codes) and edges[part] < ended_ns:
            inside_ns = min(ended_ns, edges[part + 1]) - max(began_ns, edges[part])
            waited_ns[_WORD.get(step.codes[part] & _PHASE_CODE, "other")] += max(inside_ns, 0)
            part += 1
    facts = step.facts
    phases_ns = dict(zip(WORK_PHASES, facts.phases_ns, strict=True))
    wait_ns = facts.wait_ns
    for word in WORK_PHASES:
        more_ns = min(waited_ns[word], phases_ns[word])
        phases_ns[word] -= more_ns
        wait_ns += more_ns
    return facts._replace(wait_ns=wait_ns, phases_ns=tuple(phases_ns.values()))
