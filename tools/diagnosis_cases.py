"""Simulates training with and without stragglers, and writes tables of the verdicts.

    python -m tools.diagnosis_cases

prints the tables on hosts and writes them into docs/internals/diagnosis.md. The work of each rank
is simulated, and its waiting follows. The steps go through the real detector.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from tools.cases import NOW_NS, Found, Replay, labels_of, main, row, shares, soon

from otel_ddp.diagnosis.detector import RankState
from otel_ddp.diagnosis.step_facts import facts_of
from otel_ddp.diagnosis.steps import Parts, Step
from otel_ddp.vocabulary.words import PHASES, UNMEASURED

SEED = 5
MS = 1_000_000
GOLDEN, WORDS = 0x9E3779B97F4A7C15, 1 << 64
BEFORE_OPTIMIZER = ("data", "other", "checkpoint", "forward", "backward")
COMPUTE = ("forward", "backward", "optimizer")
# Milliseconds; also percent, as a step takes 100 ms.
PROFILES = (
    {"data": 5, "other": 4, "forward": 25, "backward": 50, "optimizer": 10},
    {"data": 20, "other": 15, "forward": 20, "backward": 30, "optimizer": 9},
    {"data": 2, "other": 30, "forward": 15, "backward": 42, "optimizer": 5},
)
COMMUNICATION = 6
PHASE_CASES = ("data", "forward", "backward", "optimizer", "other", "compute", "imbalance")
BEGINS = 200
LASTS = 400


class Case(NamedTuple):
    """One run."""

    ranks: int
    jitter: float
    """Log-normal, of a rank's whole step; half of it in addition for each phase."""
    late: tuple[int, ...] = ()
    """The ranks that become slower at step BEGINS."""
    phase: str = ""
    """The phase in which they do; `imbalance`: with more tokens; `all`: all ranks."""
    excess: float = 0.0
    """As a share of the step of 100 ms."""
    disturbances: bool = True
    """Pauses, garbage collections, checkpoints, batches of unequal length."""
    profile: int = 0
    seed: int = 0
    steps: int = BEGINS + LASTS
    sluggish: float = 0.0
    """The autocorrelation of a rank's jitter."""
    nodes: int = 1
    """The ranks are divided evenly among them."""
    late_nodes: tuple[int, ...] = ()
    """All of their ranks are late."""
    slower: float = 1
    """A factor for all durations."""
    one_of: int = 1
    """One in this many steps is measured; `steps` counts measured ones."""
    begins: int = BEGINS
    """The measured step after which ranks are late."""

    def measures(self, number: int) -> bool:
        """Whether this step is measured, as in a training process."""
        return number * GOLDEN % WORDS < WORDS // self.one_of

    def node_of(self, rank: int) -> int:
        """The node of a rank."""
        return rank * self.nodes // self.ranks


def simulated(case: Case, own: bool = False) -> Iterator[list[Step]]:
    """The steps of all ranks, one after the other.

    *own*: with an all-reduce of the user after forward, in phase `other`.
    """
    chance = random.Random(f"{repr(case).rpartition(', one_of=')[0]})")
    ms_ns = MS * case.slower
    late = {
        *case.late,
        *(rank for rank in range(case.ranks) if case.node_of(rank) in case.late_nodes),
    }
    profile = PROFILES[case.profile]
    total = sum(profile.values()) + COMMUNICATION
    fresh = (1 - case.sluggish**2) ** 0.5
    mood = [0.0] * case.ranks
    ends = [NOW_NS] * case.ranks
    for number in range(1, case.steps * case.one_of + 1):
        begun, measured = number > case.begins * case.one_of, case.measures(number)
        needs, amounts, collected = [], [], []
        for rank in range(case.ranks):
            mood[rank] = case.sluggish * mood[rank] + fresh * chance.gauss(0, case.jitter)
            whole = 2.718281828459045 ** mood[rank]
            is_late = begun and (rank in late or case.phase == "all")
            if not measured:
                # Only its duration is recorded.
                work = (total - COMMUNICATION) * whole + case.excess * total * is_late
                pause = chance.uniform(30, 200) * (case.disturbances and chance.random() < 0.01)
                needs.append({"forward": work + pause, "optimizer": 0.0})
                amounts.append(0)
                collected.append(0.0)
                continue
            need = {
                word: ms * whole * 2.718281828459045 ** chance.gauss(0, case.jitter / 2)
                for word, ms in profile.items()
            }
            amount, garbage = 1000, 0.0
            if case.disturbances:
                batch = chance.uniform(0.95, 1.05)
                amount = round(amount * batch)
                for word in ("forward", "backward"):
                    need[word] *= batch
                if chance.random() < 0.01:
                    need[chance.choice(list(profile))] += chance.uniform(30, 200)
                if chance.random() < 0.02:
                    garbage = chance.uniform(2, 60)
                    need["other"] += garbage
                if number % 150 == 0 and rank == 0:
                    need["checkpoint"] = 400.0
            if is_late:
                more = case.excess * total
                words = COMPUTE if case.phase in ("compute", "all") else COMPUTE[:2]
                if case.phase in ("compute", "imbalance", "all"):
                    factor = 1 + more / sum(profile[word] for word in words)
                    for word in words:
                        need[word] *= factor
                    if case.phase == "imbalance":
                        # The work of the optimizer does not depend on the batch.
                        amount = round(amount * factor)
                else:
                    need[case.phase] += more
            needs.append(need)
            amounts.append(amount)
            collected.append(garbage * case.slower / 1000)
        arrivals = [
            ends[rank] + round(ms_ns * (sum(need.values()) - need["optimizer"]))
            for rank, need in enumerate(needs)
        ]
        inside_ns = [0] * case.ranks
        if own:
            entered = [
                at - round(ms_ns * needs[rank]["backward"]) for rank, at in enumerate(arrivals)
            ]
            inside_ns = [max(entered) + ms_ns - at for at in entered]
            arrivals = [at + inside_ns[rank] for rank, at in enumerate(arrivals)]
        synced = max(arrivals) + COMMUNICATION * ms_ns
        steps = []
        for rank, need in enumerate(needs):
            parts = [word for word in BEFORE_OPTIMIZER if word in need]
            spans_ns = [round(ms_ns * need[word]) for word in parts]
            if own:
                parts.insert(-1, "other")
                spans_ns.insert(-1, inside_ns[rank])
            spans_ns.append(synced - ends[rank] - sum(spans_ns))
            spans_ns.append(round(ms_ns * need["optimizer"]))
            codes = bytes([PHASES[word] for word in (*parts, "comm_wait", "optimizer")])
            until = synced + spans_ns[-1]
            if not measured:
                codes, spans_ns = bytes([UNMEASURED]), [sum(spans_ns)]
            steps.append(
                Step(
                    number,
                    ends[rank],
                    until,
                    Parts(ends[rank], codes, spans_ns),
                    collected[rank],
                    False,
                    0,
                    amounts[rank],
                )
            )
            ends[rank] = until
        yield steps


def replayed(case: Case, own: bool = False) -> Found:
    """The verdicts of the detector."""
    phases = ("other",) if own else ()
    states = [
        RankState(labels_of(rank, case.node_of(rank)), case.ranks, own_collectives=phases)
        for rank in range(case.ranks)
    ]
    replay = Replay(states, case.begins * case.one_of)
    read: list[list[Step]] = []
    for steps in simulated(case, own):
        read.append(steps)
        if steps[0].measured:
            replay.feed([facts_of(of_rank) for of_rank in zip(*read, strict=True)])
            read.clear()
    return replay.found()


def right_rank(case: Case, found: Found) -> bool:
    """Whether all late ranks and nodes have a verdict, after the fault, and no others have."""
    late = {*case.late, *(f"node-{node}" for node in case.late_nodes)}
    return set(found.named) == late and all(each.step > 0 for each in found.named.values())


def right_phase(case: Case, found: Found) -> bool:
    """Whether the phase and the kind of verdict are right."""
    unequal = case.phase == "imbalance"
    kind, phases = (
        ("imbalance", ("compute", "backward")) if unequal else ("straggler", (case.phase,))
    )
    return all(
        named.kind == kind and named.phase in phases
        for who, named in found.named.items()
        if who in case.late or isinstance(who, str)
    )


def one_late(excesses: tuple[float, ...], every: int = 1) -> list[Case]:
    """One late rank, for each phase, jitter and number of ranks."""
    chance = random.Random(SEED)
    every_case = [
        Case(
            ranks,
            jitter,
            (chance.randrange(ranks),),
            phase,
            excess,
            chance.random() < 0.7,
            chance.randrange(len(PROFILES)),
            SEED,
        )
        for excess, jitter, ranks, phase in product(
            excesses, (0.0, 0.05, 0.1, 0.15), (2, 3, 4, 8), PHASE_CASES
        )
    ]
    chance.shuffle(every_case)
    return every_case[::every]


def late_elsewhere(cases: list[Case]) -> list[Case]:
    """The cases without a late rank in phase `other`."""
    return [case for case in cases if case.phase != "other"]


def two_late(every: int = 1) -> list[Case]:
    """Two ranks late in the same phase."""
    chance = random.Random(SEED)
    return [
        Case(ranks, jitter, tuple(chance.sample(range(ranks), 2)), phase, excess, True, 0, SEED)
        for excess, jitter, ranks, phase in product(
            (0.25, 0.4), (0.0, 0.05, 0.1), (4, 6, 8), PHASE_CASES
        )
    ][::every]


# Nodes, ranks on each, and late nodes.
NODES = ((2, 2, 1), (2, 4, 1), (2, 8, 1), (3, 2, 1), (4, 2, 1), (4, 4, 1), (4, 2, 2), (8, 2, 2))


def nodes_late(excesses: tuple[float, ...], every: int = 1) -> list[Case]:
    """One or two late nodes, for each phase and jitter."""
    chance = random.Random(SEED)
    cases = []
    for excess, jitter, shape, phase in product(
        excesses, (0.0, 0.05, 0.1, 0.15), NODES, PHASE_CASES
    ):
        nodes, ranks, late = shape
        case = Case(
            nodes * ranks,
            jitter,
            phase=phase,
            excess=excess,
            disturbances=chance.random() < 0.7,
            profile=chance.randrange(len(PROFILES)),
            seed=SEED,
            nodes=nodes,
            late_nodes=tuple(chance.sample(range(nodes), late)),
        )
        cases.append(case)
    chance.shuffle(cases)
    return cases[::every]


def one_late_among_nodes(excesses: tuple[float, ...], every: int = 1) -> list[Case]:
    """One late rank on a node with healthy ones."""
    chance = random.Random(SEED)
    return [
        Case(
            nodes * ranks,
            jitter,
            (chance.randrange(nodes * ranks),),
            phase,
            excess,
            chance.random() < 0.7,
            chance.randrange(len(PROFILES)),
            SEED,
            nodes=nodes,
        )
        for excess, jitter, (nodes, ranks, _), phase in product(
            excesses, (0.0, 0.05, 0.1, 0.15), NODES[:6], PHASE_CASES
        )
    ][::every]


def pairs_late(every: int = 1) -> list[Case]:
    """Two of a node's four or eight ranks late: each gets a verdict, but not their node."""
    return [
        Case(nodes * ranks, jitter, (0, 1), phase, excess, True, 0, SEED, nodes=nodes)
        for excess, jitter, (nodes, ranks), phase in product(
            (0.25, 0.4), (0.0, 0.05, 0.1), ((1, 4), (1, 8), (2, 4)), PHASE_CASES
        )
    ][::every]


def all_late(every: int = 1) -> list[Case]:
    """All ranks become slower together, so none waits."""
    return [
        Case(ranks, jitter, (), "all", excess, True, 0, SEED)
        for excess, jitter, ranks in product((0.2, 0.5), (0.0, 0.05, 0.1, 0.15), (2, 3, 4, 8))
    ][::every]


def balanced(steps: int, ranks: tuple[int, ...], nodes: tuple[int, ...] = (1,)) -> list[Case]:
    """No late rank. *steps*: the total. *ranks*: on each node."""
    kinds = list(product(nodes, ranks, (0.0, 0.05, 0.1, 0.15)))
    return [
        Case(
            many * each,
            jitter,
            disturbances=i % 3 > 0,
            profile=i % 3,
            seed=SEED,
            steps=steps // len(kinds),
            nodes=many,
        )
        for i, (many, each, jitter) in enumerate(kinds)
    ]


# One in how many steps is measured, the duration of a step in 100 ms, excess of a rank, of nodes.
SPARSE = ((1, 1, 0.15, 0.25), (4, 0.2, 0.15, 0.25), (16, 0.05, 0.15, 0.25), (64, 0.02, 0.3, 0.4))


def sparsely(cases: list[Case], one_of: int, slower: float) -> list[Case]:
    """The cases with unmeasured steps between the measured ones."""
    return [
        case._replace(
            one_of=one_of, slower=slower, begins=100, steps=420 if case.excess < 0.2 else 300
        )
        for case in cases
    ]


def slowly(cases: list[Case]) -> list[Case]:
    """Some of the cases, with steps of a second and a jitter of 2 %."""
    return [case._replace(slower=10, jitter=0.02) for case in cases if case.jitter == 0.05]


def cells(cases: list[Case], own: bool = False, seconds: bool = False) -> list[str]:
    """Cells: the number of cases, how many are right, and how soon."""
    found = [(case, replayed(case, own)) for case in cases]
    right = [each for each in found if right_rank(*each)]
    named = [each for each in right if each[1].named]
    after: list[float] = []
    for _, each in named:
        after += each.after_s if seconds else [name.step for name in each.named.values()]
    return [
        str(len(cases)),
        shares([each in right for each in found], [right_phase(*each) for each in named]),
        soon(after),
    ]


def false_verdicts(
    steps: int,
    ranks: tuple[int, ...] = (2, 3, 4, 8),
    nodes: tuple[int, ...] = (1,),
    own: bool = False,
    slower: int = 1,
) -> int:
    """The number of verdicts in balanced steps."""
    cases = [case._replace(slower=slower) for case in balanced(steps, ranks, nodes)]
    return sum(len(replayed(case, own).kinds) for case in cases)


def host_table() -> Iterator[str]:
    """The table of late ranks and nodes."""
    yield "| late | runs | rank, phase right (%) | steps until named |"
    yield "|---|---|---|---|"
    lines: list[tuple[str, list[Case]]] = [
        (f"one rank, {excess * 100:.0f} %", one_late((excess,), every=2))
        for excess in (0.1, 0.15, 0.25, 0.5)
    ]
    own = "one rank, 25 %, own all-reduce in `other`"
    lines += [
        (own, late_elsewhere(one_late((0.25,), every=2))),
        ("two of 4 to 8 ranks, 25 or 40 %", two_late()),
        ("all ranks, 20 or 50 %: nobody named", all_late()),
    ]
    lines += [
        (f"one or two nodes, {excess * 100:.0f} %", nodes_late((excess,), every=4))
        for excess in (0.1, 0.15, 0.3)
    ]
    lines += [
        ("one rank of several nodes, 25 %", one_late_among_nodes((0.25,), every=4)),
        ("two ranks of a node, 25 or 40 %", pairs_late(every=2)),
        ("one rank, 30 %, 1-s steps", slowly(one_late((0.3,)))),
        ("one or two nodes, 30 %, 1-s steps", slowly(nodes_late((0.3,)))),
    ]
    for title, cases in lines:
        yield row(title, *cells(cases, own=title == own))
    steps = 200_000
    false, of_nodes = false_verdicts(steps), false_verdicts(steps, (2, 4), (2, 3, 4))
    slow = false_verdicts(steps // 2, slower=10)
    slow += false_verdicts(steps // 2, (2, 4), (2, 3, 4), slower=10)
    yield ""
    yield (
        f"Verdicts in {steps:,} balanced steps of one node: {false}; of two to four nodes: "
        f"{of_nodes}; of a second each: {slow}."
    )


def sparse_table() -> Iterator[str]:
    """The table of runs that measure one of so many steps."""
    steps = 6_000
    yield "| measured | late | runs | rank, phase right (%) | seconds until named |"
    yield "|---|---|---|---|---|"
    false = 0
    for one_of, slower, excess, of_nodes in SPARSE:
        cases = [
            (f"one rank, {excess * 100:.0f} %", one_late((excess,), every=8)),
            (f"one or two nodes, {of_nodes * 100:.0f} %", nodes_late((of_nodes,), every=32)),
        ]
        false += sum(
            len(replayed(case._replace(one_of=one_of, slower=slower)).kinds)
            for case in balanced(steps, (2, 3, 4))
        )
        for late, several in cases:
            found = cells(sparsely(several, one_of, slower), seconds=True)
            yield row(f"1 of {one_of}, {slower * 100:.0f} ms", late, *found)
    yield ""
    yield f"Verdicts in {len(SPARSE) * steps:,} balanced measured steps: {false}."


if __name__ == "__main__":
    main({"cases": host_table, "sparse cases": sparse_table})
