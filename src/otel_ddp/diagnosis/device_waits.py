"""Tells waits from work by how long each collective took the device of each rank.

On the rank that comes last a collective takes what its transfer takes. On the others it takes their
wait as well. So no clocks have to be compared.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from otel_ddp.diagnosis.arrivals import (
    NOTHING_NEW,
    Arrival,
    Comparison,
    Sample,
    TimedStep,
    newest,
)
from otel_ddp.diagnosis.step_facts import StepFacts
from otel_ddp.diagnosis.verdict import Labels
from otel_ddp.diagnosis.waits import Interval, Segment, find_waits
from otel_ddp.words import PHASE_CODE, PHASES, WORK_PHASES

NOT_TIMED = (
    "torch does not time collectives: set TORCH_NCCL_ENABLE_TIMING=1 before the process group is "
    "made"
)
_INDEX = {PHASES[word]: at for at, word in enumerate(WORK_PHASES)}
_BACKWARD = WORK_PHASES.index("backward")

_Key = tuple[str, int]
_Waits = dict[int, list[int]]
"""By the number of a step: the waits that were launched in each of WORK_PHASES."""


def compare_on_device(
    samples: Mapping[Labels, Sample],
    steps: Mapping[Labels, Sequence[TimedStep]],
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
    waits_ns = _waits_ns([samples[labels].arrivals for labels in ranks])
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
    exposed, unclear = find_waits([_interval(at, numbers, waited, timed) for at in phases])
    if unclear:
        return Comparison({}, f"it is not clear whether ranks wait in {unclear}")
    taken_out = [at for at, waits in zip(phases, exposed, strict=True) if waits]
    wanted = newest(common, after)
    if not wanted:
        return Comparison({}, NOTHING_NEW)
    return Comparison(
        {
            labels: [_without_waits(by_number[n], waits[n], taken_out) for n in wanted]
            for labels, by_number, waits in zip(ranks, timed, waited, strict=True)
        }
    )


def _waits_ns(ranks: Sequence[Sequence[Arrival]]) -> list[dict[_Key, int]]:
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
) -> _Waits:
    """What the waits of each step add up to, of steps whose collectives are all known."""
    if not arrivals:
        return {}
    began_ns = [each.began_ns for each in steps]
    found: _Waits = {
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


def _phase_at(step: TimedStep, at_ns: int) -> int:
    """In which of WORK_PHASES the host was at this time."""
    until_ns = step.began_ns
    for code, span_ns in zip(step.codes, step.spans_ns, strict=True):
        until_ns += span_ns
        if at_ns < until_ns:
            return _INDEX.get(code & PHASE_CODE, _INDEX[PHASES["other"]])
    return _INDEX[PHASES["other"]]


def _interval(
    at: int,
    numbers: Sequence[int],
    waited: Sequence[_Waits],
    timed: Sequence[Mapping[int, StepFacts]],
) -> Interval:
    """One phase of all these steps. What waits there were may be hidden behind work."""
    segments = []
    for number in numbers:
        latest = min(range(len(waited)), key=lambda rank: waited[rank][number][at])
        delay_ns = timed[latest][number].phases_ns[at]
        segments += [
            Segment(rank, at, facts[number].phases_ns[at], waits[number][at], delay_ns)
            for rank, (waits, facts) in enumerate(zip(waited, timed, strict=True))
        ]
    return Interval((WORK_PHASES[at], WORK_PHASES[at]), segments)


def _without_waits(facts: StepFacts, waits_ns: Sequence[int], phases: Sequence[int]) -> StepFacts:
    """The step with the waits in these phases taken out of its work."""
    phases_ns, wait_ns = list(facts.phases_ns), facts.wait_ns
    for at in phases:
        more_ns = min(waits_ns[at], phases_ns[at])
        phases_ns[at] -= more_ns
        wait_ns += more_ns
    return facts._replace(phases_ns=tuple(phases_ns), wait_ns=wait_ns)
