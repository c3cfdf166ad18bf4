"""Simulates trainings with several kinds of parallelism, and writes a table of the verdicts.

    python -m tools.parallel_cases

prints the table on groups and writes it into docs/internals/diagnosis.md. Each rank has a program
of work and of calls to process groups. The waits follow from these, and the detector must recover
them.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from typing import NamedTuple

from tools.cases import NOW_NS, Found, Replay, labels_of, main, row, shares, soon

from otel_ddp.diagnosis.detector import RankState
from otel_ddp.diagnosis.step_facts import StepFacts
from otel_ddp.diagnosis.steps import Call, Calls
from otel_ddp.vocabulary.words import WORK_PHASES

SEED = 5
BEGINS, LASTS = 60, 200
TRANSFER_MS = 0.1
FORWARD_MS, BACKWARD_MS = 30.0, 55.0
LAYERS, MICRO_BATCHES = 6, 8


class Work(NamedTuple):
    """Computation."""

    phase: str
    ms: float


class Meet(NamedTuple):
    """A call to a process group."""

    group: str
    dimension: str
    op: str
    phase: str
    peer: int = -1
    waited: bool = True
    """Whether the call is synchronous; else the rank waits at the next `Wait`."""


class Wait(NamedTuple):
    """A wait for all asynchronous calls."""

    phase: str


Program = Sequence[Work | Meet | Wait]


def _sharded(forward: Sequence[Meet], backward: Sequence[Meet], after: Program) -> Program:
    """Layers with calls before each, and others after each in backward."""
    steps: list[Work | Meet | Wait] = [Work("data", 4)]
    for _ in range(LAYERS):
        steps += [*forward, Work("forward", FORWARD_MS / LAYERS)]
    for _ in range(LAYERS):
        steps += [
            *(each._replace(phase="backward") for each in forward),
            Work("backward", BACKWARD_MS / LAYERS),
            *backward,
        ]
    return [*steps, *after, Work("optimizer", 5), Work("other", 2)]


def fsdp(rank: int, ranks: int) -> Program:
    """One group."""
    gather = Meet("all", "", "_allgather_base", "forward")
    return _sharded([gather], [Meet("all", "", "_reduce_scatter_base", "backward")], [])


def hsdp(rank: int, ranks: int) -> Program:
    """Shards in pairs, and replicas of them."""
    shard = f"shard{rank // 2}"
    gather = Meet(shard, "shard", "_allgather_base", "forward")
    scatter = Meet(shard, "shard", "_reduce_scatter_base", "backward")
    reduce = Meet(f"dp{rank % 2}", "dp", "allreduce", "backward")
    return _sharded([gather], [scatter, reduce], [])


def tensor(rank: int, ranks: int) -> Program:
    """Tensor parallel in pairs, sharded over the pairs.

    With functional collectives: a layer works before it uses their results.
    """
    reduce = Meet(f"tp{rank // 2}", "tp", "allreduce", "forward", waited=False)
    gather = Meet(f"dp{rank % 2}", "dp", "_allgather_base", "forward")
    scatter = Meet(f"dp{rank % 2}", "dp", "_reduce_scatter_base", "backward")
    used_at_once = reduce._replace(phase="backward", waited=True)
    return _sharded([gather, reduce], [used_at_once, scatter], [])


def experts(rank: int, ranks: int) -> Program:
    """All-to-all before each layer, gradients in asynchronous buckets."""
    swap = Meet("all", "ep", "alltoall_base", "forward")
    bucket = Meet("ddp", "", "allreduce", "backward", waited=False)
    return _sharded([swap], [bucket], [Wait("comm_wait")])


def pipeline(rank: int, ranks: int, stages: int = 2) -> Program:
    """1F1B, and replicas of each stage."""
    stage, many = rank % stages, MICRO_BATCHES
    # The last stage also has the head and the loss.
    heavier = 1.2 if stage == stages - 1 else 1.0
    to = {"group": "pp", "dimension": "pp"}
    program: list[Work | Meet | Wait] = [Work("data", 2)]

    def receive(phase: str, peer: int) -> None:
        if rank // stages * stages <= peer < rank // stages * stages + stages:
            program.append(Meet(op="recv", phase=phase, peer=peer, **to))

    def send(phase: str, peer: int) -> None:
        if rank // stages * stages <= peer < rank // stages * stages + stages:
            program.append(Meet(op="send", phase=phase, peer=peer, waited=False, **to))

    def forward() -> None:
        receive("forward", rank - 1)
        program.append(Work("forward", heavier * FORWARD_MS / many))
        send("forward", rank + 1)

    def backward() -> None:
        receive("backward", rank + 1)
        program.append(Work("backward", heavier * BACKWARD_MS / many))
        send("backward", rank - 1)

    first = min(stages - stage, many)
    for _ in range(first):
        forward()
    for _ in range(many - first):
        backward()
        forward()
    for _ in range(first):
        backward()
    bucket = Meet(f"dp{stage}", "dp", "allreduce", "backward", waited=False)
    return [*program, bucket, Wait("comm_wait"), Work("optimizer", 4), Work("other", 2)]


def four_stages(rank: int, ranks: int) -> Program:
    """The same with four stages."""
    return pipeline(rank, ranks, 4)


class Kind(NamedTuple):
    """A kind of parallelism."""

    title: str
    program: Callable[[int, int], Program]
    ranks: tuple[int, ...]
    where: Mapping[str, str]
    """The calls in which others first wait for a late rank, by its phase."""


KINDS = (
    Kind("FSDP2", fsdp, (2, 4, 8), {"forward": "process group", "backward": "process group"}),
    Kind(
        "HSDP, shards of 2",
        hsdp,
        (4, 8),
        {"forward": "mesh dimension shard", "backward": "mesh dimension shard"},
    ),
    Kind(
        "tensor parallel in pairs x FSDP2",
        tensor,
        (4, 8),
        {"forward": "mesh dimension dp", "backward": "mesh dimension tp"},
    ),
    Kind(
        "pipeline 1F1B of 2 stages x DDP",
        pipeline,
        (4, 8),
        {"forward": "mesh dimension pp", "backward": "mesh dimension pp"},
    ),
    Kind(
        "pipeline 1F1B of 4 stages x DDP",
        four_stages,
        (8, 12),
        {"forward": "mesh dimension pp", "backward": "mesh dimension pp"},
    ),
    Kind(
        "experts by all-to-all, DDP",
        experts,
        (2, 4, 8),
        {"forward": "mesh dimension ep", "backward": "mesh dimension ep"},
    ),
)


class Case(NamedTuple):
    """One run."""

    kind: Kind
    ranks: int
    jitter: float
    late: int = -1
    phase: str = ""
    excess: float = 0.0
    """As a share of the step of 100 ms."""
    steps: int = BEGINS + LASTS
    disturbances: bool = True


class _Rank:
    """The progress of one rank in its program."""

    def __init__(self, program: Program, now_ns: int, factor: Callable[[str], float]) -> None:
        self.program, self.now_ns, self.began_ns = program, now_ns, now_ns
        self.at = 0
        self.factor = factor
        self.spent_ns: defaultdict[str, int] = defaultdict(int)
        self.calls_ns: list[int] = []
        self.waits_ns: list[int] = []
        self.open: list[tuple[str, int]] = []
        self.met: defaultdict[str, int] = defaultdict(int)
        self.is_in = False


class Training:
    """Runs the programs of all ranks, step by step."""

    def __init__(self, programs: Sequence[Program]) -> None:
        """*programs*: by rank, with the calls of every step."""
        self.number = 0
        self._ends_ns = [NOW_NS] * len(programs)
        self._calls = [
            tuple(
                Call(*each[:3], each.peer, each.phase, each.dimension or "other")
                for each in program
                if isinstance(each, Meet)
            )
            for program in programs
        ]
        self._sizes: defaultdict[str, int] = defaultdict(int)
        for program in programs:
            for group in {e.group for e in program if isinstance(e, Meet) and e.peer < 0}:
                self._sizes[group] += 1

    def step(
        self, programs: Sequence[Program], factors: Sequence[Callable[[str], float]]
    ) -> list[StepFacts]:
        """The next step. *factors*: for the work of each rank, by phase."""
        self.number += 1
        ranks = [
            _Rank(program, ended_ns, factor)
            for program, ended_ns, factor in zip(programs, self._ends_ns, factors, strict=True)
        ]
        _run(ranks, self._sizes)
        self._ends_ns = [rank.now_ns for rank in ranks]
        return [self._facts(rank, calls) for rank, calls in zip(ranks, self._calls, strict=True)]

    def _facts(self, rank: _Rank, calls: tuple[Call, ...]) -> StepFacts:
        edges_ns = pairwise([*rank.calls_ns, rank.now_ns])
        idle = bytes(
            min(wait_ns * 256 // max(until_ns - since_ns, 1), 255)
            for wait_ns, (since_ns, until_ns) in zip(rank.waits_ns, edges_ns, strict=True)
        )
        return StepFacts(
            self.number,
            rank.now_ns,
            rank.now_ns - rank.began_ns,
            rank.spent_ns["comm_wait"],
            tuple([rank.spent_ns[word] for word in WORK_PHASES]),
            {},
            False,
            0,
            calls=Calls(calls, rank.calls_ns, idle),
        )


def simulated(case: Case) -> Iterator[list[StepFacts]]:
    """The steps of all ranks, one after the other."""
    chance = random.Random(repr((case.kind.title, *case[1:])))
    programs = [case.kind.program(rank, case.ranks) for rank in range(case.ranks)]
    training = Training(programs)
    for _ in range(case.steps):
        factors = []
        for rank, program in enumerate(programs):
            whole = 2.718281828459045 ** chance.gauss(0, case.jitter)
            if case.disturbances and chance.random() < 0.005:
                whole += chance.uniform(0.3, 2)
            is_late = rank == case.late and training.number >= BEGINS
            total = sum(e.ms for e in program if isinstance(e, Work) and e.phase == case.phase)
            more = {case.phase: case.excess * 100 / total} if is_late else {}

            def factor(phase: str, whole: float = whole, more: Mapping[str, float] = more) -> float:
                own = whole * 2.718281828459045 ** chance.gauss(0, case.jitter / 2)
                return own + more.get(phase, 0.0)

            factors.append(factor)
        yield training.step(programs, factors)


def _run(ranks: Sequence[_Rank], sizes: dict[str, int]) -> None:
    """Run all ranks to the end of their programs."""
    arrived: defaultdict[tuple[str, int], dict[int, int]] = defaultdict(dict)
    open_ranks = set(range(len(ranks)))
    while open_ranks:
        before = [(ranks[i].at, ranks[i].is_in) for i in open_ranks]
        seen = list(open_ranks)
        for i in seen:
            rank = ranks[i]
            while rank.at < len(rank.program) and _advance(i, rank, arrived, sizes):
                rank.at += 1
                rank.is_in = False
            if rank.at == len(rank.program):
                open_ranks.discard(i)
        if before == [(ranks[i].at, ranks[i].is_in) for i in seen]:
            raise RuntimeError("deadlock")


def _advance(
    i: int,
    rank: _Rank,
    arrived: defaultdict[tuple[str, int], dict[int, int]],
    sizes: dict[str, int],
) -> bool:
    """Try the rank's next item; returns whether it is done."""
    what = rank.program[rank.at]
    if isinstance(what, Work):
        ns = round(what.ms * 1e6 * rank.factor(what.phase))
        rank.now_ns += ns
        rank.spent_ns[what.phase] += ns
        return True
    if isinstance(what, Meet) and not rank.is_in:
        rank.is_in = True
        rank.calls_ns.append(rank.now_ns)
        rank.waits_ns.append(0)
        name = what.group
        if what.peer >= 0:
            ends = (i, what.peer) if what.op == "send" else (what.peer, i)
            name = f"{what.group} {ends}"
        number = rank.met[name]
        rank.met[name] += 1
        if what.op != "recv":
            arrived[name, number][i] = rank.now_ns
        rank.open.append((name, number))
        if what.op == "send":
            rank.open.pop()
    if isinstance(what, Meet) and not what.waited:
        return True
    for name, number in rank.open:
        if len(arrived[name, number]) < sizes.get(name, 1):
            return False
    ends_ns = [max(arrived[key].values()) + round(TRANSFER_MS * 1e6) for key in rank.open]
    wait_ns = max(0, *ends_ns, rank.now_ns) - rank.now_ns if ends_ns else 0
    rank.open.clear()
    rank.now_ns += wait_ns
    rank.spent_ns[what.phase] += wait_ns
    rank.waits_ns[-1] += wait_ns
    return True


def replayed(case: Case) -> Found:
    """The verdicts of the detector."""
    states = [
        RankState(labels_of(rank), case.ranks, waits_known=False, calls_noted=True)
        for rank in range(case.ranks)
    ]
    replay = Replay(states, BEGINS)
    for facts in simulated(case):
        replay.feed([[each] for each in facts])
    return replay.found()


def late(kind: Kind, excess: float) -> list[Case]:
    """One late rank, for each jitter, in forward or backward."""
    chance = random.Random(SEED)
    cases = [
        Case(kind, ranks, jitter, chance.randrange(ranks), phase, excess)
        for ranks, jitter, phase in product(
            kind.ranks, (0.0, 0.02, 0.05, 0.1), ("forward", "backward")
        )
    ]
    chance.shuffle(cases)
    return cases


def balanced(kind: Kind, steps: int) -> list[Case]:
    """No late rank. *steps*: the total."""
    kinds = list(product(kind.ranks, (0.0, 0.02, 0.05, 0.1)))
    return [
        Case(kind, ranks, jitter, steps=steps // len(kinds), disturbances=i % 3 > 0)
        for i, (ranks, jitter) in enumerate(kinds)
    ]


def is_right(case: Case, found: Found) -> bool:
    """Whether only the late rank has a verdict, after the fault."""
    return set(found.named) == {case.late} and found.named[case.late].step > 0


def late_row(title: str, cases: Sequence[Case]) -> str:
    """A row of the table."""
    every = [(case, replayed(case)) for case in cases]
    named = [(case, found.named[case.late]) for case, found in every if is_right(case, found)]
    return row(
        title,
        len(every),
        shares(
            [is_right(*each) for each in every],
            [case.phase == found.phase for case, found in named],
            [found.waits_in.startswith(case.kind.where[case.phase]) for case, found in named],
        ),
        soon([found.step for _, found in named]),
    )


def table() -> Iterator[str]:
    """The whole table."""
    steps = 35_000
    yield "| one rank late by | runs | rank, phase, dimension right (%) | steps until named |"
    yield "|---|---|---|---|"
    for excess in (0.05, 0.1):
        cases = [case for kind in KINDS for case in late(kind, excess)[::4]]
        yield late_row(f"{excess * 100:.0f} %", cases)
    more = product(KINDS, (0.15, 0.25, 0.5))
    cases = [case for kind, excess in more for case in late(kind, excess)[::2]]
    yield late_row("15, 25 or 50 %", cases)
    false = sum(len(replayed(case).named) for kind in KINDS for case in balanced(kind, steps))
    yield ""
    yield f"Verdicts in {len(KINDS) * steps:,} balanced steps: {false}."


if __name__ == "__main__":
    main({"parallel cases": table})
