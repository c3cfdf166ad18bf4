"""Late ranks where waits lie inside forward and backward, by arrivals at collectives."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import pytest

from make import labels_of
from otel_ddp.diagnosis.arrivals import (
    Arrival,
    Comparison,
    HostStep,
    Sample,
    _find_waits,
    _Interval,
    _Segment,
    compare,
)
from otel_ddp.diagnosis.detector import Observation, RankState
from otel_ddp.diagnosis.step_facts import batches_of, facts_of
from otel_ddp.diagnosis.straggler.detector import Stragglers
from otel_ddp.diagnosis.verdict import Change, Labels
from otel_ddp.vocabulary.words import PHASES

MS = 1_000_000
RING = 2000
TRANSFER_NS = 100_000


class Late(NamedTuple):
    """Which rank needs more, where, and how much: a share of the step."""

    rank: int
    phase: str
    share: float


class Instruction(NamedTuple):
    """`work` for so long in a phase, `issue` a collective, or `wait` for one."""

    what: str
    phase: str = ""
    spent_ns: float = 0.0
    op: str = ""
    number: int = 0


class Parts(NamedTuple):
    codes: bytes
    spans_ns: Sequence[int]


class Step(NamedTuple):
    number: int
    began_ns: int
    ended_ns: int
    parts: Parts
    rest: tuple[tuple[int, int], ...] = ()
    gc_s: float = 0.0
    skipped: bool = False
    profiled: bool = False
    work: int = 0


class Rank:
    """What one rank does, and when it did it."""

    def __init__(self) -> None:
        self.now_ns = 0.0
        self.arrivals: list[Arrival] = []
        self.steps: list[HostStep] = []
        self.began_ns = 0
        self.parts: list[tuple[str, int]] = []

    def be_in(self, phase: str) -> None:
        if not self.parts or self.parts[-1][0] != phase:
            self.parts.append((phase, round(self.now_ns)))

    def end_step(self) -> None:
        ended_ns = round(self.now_ns)
        starts = [at_ns for _, at_ns in self.parts] + [ended_ns]
        spans_ns = [after - before for before, after in pairwise(starts)]
        codes = bytes(PHASES[phase] for phase, _ in self.parts)
        number = len(self.steps)
        step = Step(number, self.began_ns, ended_ns, Parts(codes, spans_ns))
        ((facts,),) = [facts_of(run) for run in batches_of([step])]
        self.steps.append(HostStep(facts, self.began_ns, codes, spans_ns))
        self.began_ns, self.parts = ended_ns, []


class Job:
    """A synchronous training on one node, of blocks whose parameters are gathered.

    `blocks`: each collective is waited for at once. `ahead`: in backward the next one is put in
    line first. `never`: no rank waits for another.
    """

    STEP_MS: Mapping[str, float] = {
        "data": 4.0,
        "forward": 30.0,
        "backward": 60.0,
        "optimizer": 4.0,
        "other": 2.0,
    }

    def __init__(
        self,
        ranks: int,
        *,
        jitter: float = 0.05,
        late: Late | None = None,
        waits: str = "blocks",
        layers: int = 4,
        seed: int = 1,
    ) -> None:
        self.random = random.Random(f"{ranks} {jitter} {late} {waits} {layers} {seed}")
        self.jitter, self.late, self.waits, self.layers = jitter, late, waits, layers
        self.ranks = [Rank() for _ in range(ranks)]
        self.number = 0

    def _program(self) -> Iterator[Instruction]:
        """One step, the same on all ranks."""
        step_ms, layers, number = self.STEP_MS, self.layers, self.number

        def issue(op: str) -> Instruction:
            nonlocal number
            number += 1
            return Instruction("issue", op=f"gloo:{op}", number=number)

        def wait(which: Instruction) -> Iterator[Instruction]:
            if self.waits != "never":
                yield which._replace(what="wait")

        yield Instruction("work", "data", step_ms["data"] * MS)
        for _ in range(layers):
            gathered = issue("all_gather")
            yield from (Instruction("work", "forward", 0.0), gathered, *wait(gathered))
            yield Instruction("work", "forward", step_ms["forward"] / layers * MS)
        yield Instruction("work", "backward", 0.0)
        gathered = issue("all_gather")
        yield gathered
        for left in reversed(range(layers)):
            current = gathered
            if self.waits == "ahead" and left:
                gathered = issue("all_gather")
                yield gathered
            yield from wait(current)
            yield Instruction("work", "backward", step_ms["backward"] / layers * MS)
            scattered = issue("reduce_scatter")
            yield from (scattered, *wait(scattered))
            if self.waits != "ahead" and left:
                gathered = issue("all_gather")
                yield gathered
        yield Instruction("work", "optimizer", step_ms["optimizer"] * MS)
        yield Instruction("work", "other", step_ms["other"] * MS)
        self.number = number

    def _needs(self, rank: int, instruction: Instruction, factor: float) -> float:
        phase, late = instruction.phase, self.late
        if late and late.rank == rank:
            step_ms = sum(self.STEP_MS.values())
            compute_ms = self.STEP_MS["forward"] + self.STEP_MS["backward"]
            if late.phase == "compute" and phase in ("forward", "backward"):
                factor *= 1 + late.share * step_ms / compute_ms
            elif late.phase == phase:
                factor *= 1 + late.share * step_ms / self.STEP_MS[phase]
        # Of each stretch alone half as much again as of the step.
        return instruction.spent_ns * factor * self._noise(self.jitter / 2)

    def _noise(self, sigma: float) -> float:
        return self.random.lognormvariate(0.0, sigma) if sigma else 1.0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self._one_step()

    def _one_step(self) -> None:
        program = list(self._program())
        issued: dict[int, list[float]] = {}
        places = [0] * len(self.ranks)
        slow = [self._noise(self.jitter) for _ in self.ranks]
        while any(at < len(program) for at in places):
            for index, rank in enumerate(self.ranks):
                while (at := places[index]) < len(program):
                    each = program[at]
                    if each.what == "work":
                        rank.be_in(each.phase)
                        rank.now_ns += self._needs(index, each, slow[index])
                    elif each.what == "issue":
                        issued.setdefault(each.number, []).append(rank.now_ns)
                        reported = Arrival("0", each.number, each.op, round(rank.now_ns))
                        rank.arrivals.append(reported)
                        rank.now_ns += 20_000
                    elif len(issued[each.number]) == len(self.ranks):
                        complete_ns = max(issued[each.number]) + TRANSFER_NS
                        rank.now_ns = max(rank.now_ns, complete_ns)
                    else:
                        break
                    places[index] += 1
        if self.waits == "never":
            # As where a device takes longer than its host: what the host does is hidden by it.
            for rank in self.ranks:
                rank.now_ns = 1.5 * MS * sum(self.STEP_MS.values()) * (len(rank.steps) + 1)
        for rank in self.ranks:
            rank.end_step()

    def samples(self) -> dict[Labels, Sample]:
        return {
            labels_of(index): Sample(rank.arrivals[-RING:], {"0": len(self.ranks)})
            for index, rank in enumerate(self.ranks)
        }

    def steps(self) -> dict[Labels, list[HostStep]]:
        return {labels_of(index): rank.steps[-300:] for index, rank in enumerate(self.ranks)}

    def compared(self, after: int = -1) -> Comparison:
        return compare(self.samples(), self.steps(), after)


def judged(job: Job, samples: int, steps_between: int = 100) -> list[Change]:
    """All changes in a training that is sampled so often."""
    stragglers = Stragglers(every_step=False)
    reported = []
    for rank in range(len(job.ranks)):
        stragglers.expect(labels_of(rank))
    last = -1
    for _ in range(samples):
        job.train(steps_between)
        for rank, facts in job.compared(last).facts.items():
            stragglers.feed(RankState(rank), Observation(facts=facts))
            last = facts[-1].number
        reported += stragglers.poll(0)
    return reported


def named(reported: Sequence[Change]) -> list[tuple[str, str, str]]:
    return [
        (each.verdict.kind, dict(each.verdict.labels)["rank"], each.verdict.phase)
        for each in reported
        if each.opened
    ]


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "compute"])
@pytest.mark.parametrize(
    ("ranks", "jitter", "waits"), [(2, 0.05, "blocks"), (4, 0.1, "blocks"), (2, 0.05, "ahead")]
)
def test_a_late_rank_is_named_with_its_phase(
    ranks: int, jitter: float, waits: str, phase: str
) -> None:
    late = Late(ranks // 2, phase, 0.2)

    reported = judged(Job(ranks, jitter=jitter, late=late, waits=waits), 6, steps_between=50)

    assert named(reported) == [("straggler", str(late.rank), phase)]


def test_where_it_is_unclear_which_ranks_wait_none_is_named() -> None:
    # Much is put in line ahead of time, and all vary a lot.
    job = Job(8, jitter=0.15, late=Late(7, "data", 0.25), waits="ahead")

    assert judged(job, 5, steps_between=40) == []
    assert "it is not clear whether ranks wait in all_gather" in job.compared().why


def test_a_tenth_of_a_step_is_seen_among_eight() -> None:
    reported = judged(Job(8, jitter=0.05, late=Late(5, "forward", 0.1)), 10, steps_between=40)

    assert named(reported) == [("straggler", "5", "forward")]


def test_it_takes_several_samples_to_name_a_rank() -> None:
    job = Job(2, late=Late(1, "forward", 0.5))

    assert judged(job, 1, steps_between=300) == []
    assert len(named(judged(job, 2))) == 1


def test_steps_that_were_compared_before_are_not_compared_again() -> None:
    job = Job(2)
    job.train(50)
    first = [each.number for each in job.compared().facts[labels_of(0)]]
    again = job.compared(first[-1])
    job.train(7)
    more = [each.number for each in job.compared(first[-1]).facts[labels_of(0)]]

    assert again == ({}, "no step is new since the ranks were last asked")
    assert more == [first[-1] + each for each in range(1, 8)]
    # A training that counts anew has lower numbers.
    assert job.compared(1_000_000).facts[labels_of(0)]


@pytest.mark.parametrize("collectives", [20_000, pytest.param(100_000, marks=pytest.mark.stress)])
def test_no_rank_is_named_in_balanced_collectives(collectives: int) -> None:
    job = Job(2, jitter=0.1, layers=16)
    reported = judged(job, collectives // 2_000, steps_between=42)

    assert job.number > collectives
    assert reported == []


def test_ranks_that_do_not_wait_in_collectives_are_not_compared_by_them() -> None:
    # The late one is early enough for all others: no rank loses a moment.
    late = Late(1, "forward", 0.15)

    assert judged(Job(2, late=late, waits="never"), 6) == []


def test_waits_for_other_ranks_are_taken_out_of_the_phase_that_they_were_in() -> None:
    job = Job(2, jitter=0.01, late=Late(1, "forward", 0.2))
    job.train(100)

    facts, why = job.compared()

    assert why == ""
    early, latest = facts[labels_of(0)], facts[labels_of(1)]
    assert [each.number for each in early] == [each.number for each in latest]
    assert len(early) == 60
    # 20 ms of the 100 are in forward, and rank 0 waits for them there: in data it is level.
    waited = [each.wait_ns / MS for each in early]
    assert sum(waited) / len(waited) == pytest.approx(20, rel=0.15)
    data, forward, *_ = (
        sum(column) / len(early) / MS for column in zip(*[e.phases_ns for e in early], strict=True)
    )
    assert data == pytest.approx(4, rel=0.1)
    assert forward == pytest.approx(30 + 4 * 0.12, rel=0.05)
    for each in (*early, *latest):
        assert sum(each.phases_ns) + each.wait_ns == each.took_ns


# -- when there is nothing to say


@pytest.fixture
def trained() -> Job:
    job = Job(2)
    job.train(60)
    return job


def test_an_empty_recorder_and_sends_are_not_compared(trained: Job) -> None:
    samples = trained.samples()
    empty = {**samples, labels_of(1): Sample((), {})}
    sends = {
        rank: sample._replace(arrivals=[each._replace(op="gloo:send") for each in sample.arrivals])
        for rank, sample in samples.items()
    }

    recorder = "a flight recorder has no collectives that a host waits in"
    assert compare(empty, trained.steps()) == ({}, recorder)
    facts, why = compare(sends, trained.steps())
    assert not facts
    assert "sends and receives" in why


def test_a_group_that_shares_only_some_ranks_with_this_node_is_not_judged(trained: Job) -> None:
    # Rank 1 may have waited for another node in a group of its own: late through no fault of its.
    samples = trained.samples()
    for rank in (0, 1):
        elsewhere = [
            each._replace(group=f"{rank + 1}") for each in samples[labels_of(rank)].arrivals
        ]
        samples[labels_of(rank)] = Sample(elsewhere, {"1": 4, "2": 4})

    facts, why = compare(samples, trained.steps())

    assert facts == {}
    assert why == "a process group has only some ranks of this node, and ranks of other nodes"


def test_a_group_of_all_ranks_here_and_more_elsewhere_is_compared(trained: Job) -> None:
    samples = {rank: sample._replace(sizes={"0": 16}) for rank, sample in trained.samples().items()}

    assert compare(samples, trained.steps()).facts


def test_steps_that_no_recorder_holds_any_more_are_not_compared(trained: Job) -> None:
    samples = {
        rank: sample._replace(arrivals=sample.arrivals[-11:])
        for rank, sample in trained.samples().items()
    }

    facts, why = compare(samples, trained.steps())

    assert (facts, why) == ({}, "no step is complete in the flight recorders of all ranks")


def test_a_rank_that_is_ahead_or_remembers_less_is_compared_in_what_all_know(trained: Job) -> None:
    samples = trained.samples()
    samples[labels_of(0)] = samples[labels_of(0)]._replace(
        arrivals=samples[labels_of(0)].arrivals[:-7]
    )
    samples[labels_of(1)] = samples[labels_of(1)]._replace(
        arrivals=samples[labels_of(1)].arrivals[100:]
    )

    facts = compare(samples, trained.steps()).facts

    numbers = [[each.number for each in steps] for steps in facts.values()]
    assert numbers[0] == numbers[1]
    # The last step is not whole on rank 0.
    assert numbers[0][-1] == 58
    assert len(numbers[0]) == 50


def test_steps_with_other_collectives_than_usual_are_left_out(trained: Job) -> None:
    # An evaluation in the midst of a step, on all ranks.
    samples = {}
    for rank, sample in trained.samples().items():
        step = trained.steps()[rank][50]
        at_ns = step.began_ns + 1
        more = Arrival("1", 1, "gloo:broadcast", at_ns)
        arrivals = sorted([*sample.arrivals, more], key=lambda each: each.at_ns)
        samples[rank] = Sample(arrivals, {"0": 2, "1": 2})

    facts = compare(samples, trained.steps()).facts

    assert 50 not in [each.number for each in facts[labels_of(0)]]
    assert 51 in [each.number for each in facts[labels_of(0)]]


def test_a_rank_that_goes_on_before_the_last_arrives_has_not_waited() -> None:
    early = _Segment(rank=0, interval=0, gap_ns=4 * MS, wait_ns=10 * MS, delay_ns=5 * MS)
    latest = _Segment(rank=1, interval=0, gap_ns=4 * MS, wait_ns=0, delay_ns=5 * MS)

    assert _find_waits([_Interval(("gloo:a", "gloo:b"), [early, latest] * 20)]) == ([False], "")


def test_a_wait_that_begins_at_the_end_of_a_step_counts_in_the_next() -> None:
    chance = random.Random(1)
    ranks = [Rank(), Rank()]
    released_ns = 0.0
    for number in range(60):
        for rank, own_ms in zip(ranks, (80.0, 100 + chance.gauss(0, 2)), strict=True):
            rank.be_in("forward")
            arrives_ns = released_ns + (own_ms + chance.gauss(0, 0.5)) * MS
            rank.arrivals.append(Arrival("0", number, "gloo:all_reduce", round(arrives_ns)))
            rank.now_ns = arrives_ns + 10_000
            rank.end_step()
        released_ns = max(rank.arrivals[-1].at_ns for rank in ranks)
    samples = {labels_of(at): Sample(rank.arrivals, {"0": 2}) for at, rank in enumerate(ranks)}

    facts = compare(samples, {labels_of(at): rank.steps for at, rank in enumerate(ranks)}).facts

    waited = [each.wait_ns / MS for each in facts[labels_of(0)]]
    assert sum(waited) / len(waited) == pytest.approx(20, rel=0.1)
    assert not any(each.wait_ns for each in facts[labels_of(1)])
