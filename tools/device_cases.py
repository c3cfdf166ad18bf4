"""Simulates training on devices with and without faults, and writes tables of the verdicts.

    python -m tools.device_cases

prints the tables on devices and writes them into docs/internals/diagnosis.md. The simulated journal
words of hosts and devices go through the real reader and detectors.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import NamedTuple

from tools.cases import NOW_NS, Found, Named, Replay, labels_of, main, row, shares, soon
from tools.device_training.rank import QUEUE
from tools.device_training.setting import Setting, Trouble
from tools.device_training.training import Piece, WordStream, trained

from otel_ddp.agent.reading.steps import StepStream
from otel_ddp.diagnosis.detector import RankState
from otel_ddp.diagnosis.step_facts import DeviceSteps, StepFacts, facts_of

SEED = 5
BEGINS = 200
LASTS = 400
# The agent reads a journal every second or so.
_STEPS_AT_A_TIME = 10
# A rank must get a verdict if steps are shorter by the first share without its fault, and must not
# if they are not shorter by the second. In between, either is right.
TO_BE_NAMED, HARMLESS = 0.05, 0.01

SETTINGS = {
    "host ahead": Setting(),
    "one step ahead": Setting(kernels=900, launch_ms=50),
    "busy host": Setting(launch_ms=75),
    "prefetch": Setting(load_ms=50, prefetch=4),
    "item": Setting(item_every=1),
    "item every 10": Setting(item_every=10),
    "accumulation": Setting(accumulation=4, forward_ms=7, backward_ms=14, load_ms=1, launch_ms=12),
}
# The device waits for the host in every step, on all ranks.
HOST_BOUND = {"launch-bound": Setting(launch_ms=130), "input-bound": Setting(load_ms=110)}
JITTERS = (0.0, 0.02, 0.05, 0.1)


class Expected(NamedTuple):
    """The right verdict on a fault: any of the phases is right."""

    side: str
    phases: tuple[str, ...]
    kind: str = "straggler"


# By the place of the fault.
EXPECTED = {
    "device": Expected("device", ("compute",)),
    "forward kernels": Expected("device", ("forward",)),
    "backward kernels": Expected("device", ("backward",)),
    "optimizer kernels": Expected("device", ("optimizer",)),
    "batch": Expected("device", ("compute",), "imbalance"),
    "copy": Expected("device", ("other",)),
    # The whole host is slow, including its loader. The device idles wherever it has least work.
    "cores": Expected("host", ("compute", "forward", "backward", "optimizer", "data", "mixed")),
    "forward launches": Expected("host", ("forward",)),
    # The host loses its lead, so the device idles in other phases too.
    "backward launches": Expected("host", ("backward", "compute")),
    "before forward": Expected("host", ("forward",)),
    "in forward": Expected("host", ("forward",)),
    "loader": Expected("host", ("data",)),
    "host": Expected("host", ("other",)),
}


# A host that sleeps in forward has a row of its own.
IN_FORWARD = ("before forward", "in forward")
DRAWN = tuple(where for where in EXPECTED if where not in IN_FORWARD)


class Case(NamedTuple):
    """One run."""

    setting: Setting
    troubles: tuple[Trouble, ...] = ()
    steps: int = BEGINS + LASTS
    nodes: int = 1
    """The ranks are divided among them, evenly."""

    def node_of(self, rank: int) -> int:
        """The node of a rank."""
        return rank * self.nodes // self.setting.ranks

    def late_one(self, trouble: Trouble) -> int | str:
        """The rank with this fault, or its node if all ranks there have one."""
        node, troubled = self.node_of(trouble.rank), {each.rank for each in self.troubles}
        members = {each for each in range(self.setting.ranks) if self.node_of(each) == node}
        return f"node-{node}" if self.nodes > 1 and members <= troubled else trouble.rank


class _Rank:
    """Reads the journal words of a rank."""

    def __init__(self) -> None:
        self._words = WordStream(False), WordStream(True)
        self._streams = StepStream(NOW_NS), StepStream(NOW_NS)
        self._device_steps = DeviceSteps()

    def read(self, pieces: Sequence[Piece]) -> list[StepFacts]:
        """The facts of more steps, by the device's clock."""
        host_words = [word for piece in pieces for word in piece.host]
        device_words = [word for piece in pieces for word in piece.device]
        steps = self._streams[0].feed(self._words[0].record(host_words))
        self._device_steps.feed_host(facts_of(steps))
        if not device_words:
            return []
        steps = self._streams[1].feed(self._words[1].record(device_words))
        return self._device_steps.feed(steps)


def replayed(case: Case) -> Found:
    """The verdicts of the detectors."""
    ranks = case.setting.ranks
    states = [
        RankState(labels_of(rank, case.node_of(rank)), ranks, device_clock=True)
        for rank in range(ranks)
    ]
    readers = [_Rank() for _ in range(ranks)]
    replay = Replay(states, BEGINS)
    pieces: list[list[Piece]] = []
    for step in trained(case.setting, case.steps, case.troubles):
        pieces.append(step)
        if len(pieces) == _STEPS_AT_A_TIME:
            theirs = zip(readers, zip(*pieces, strict=True), strict=True)
            replay.feed([reader.read(each) for reader, each in theirs])
            pieces.clear()
    return replay.found()


# -- the ground truth


@cache
def step_ns(setting: Setting, troubles: tuple[Trouble, ...], since: int, until: int) -> float:
    """The mean duration of a step on the device, between the ends of two steps."""
    ends_ns = [
        pieces[0].marks[-1].device_ns
        for at, pieces in enumerate(trained(setting, until, troubles, watched=False), 1)
        if at in (since, until)
    ]
    return (ends_ns[1] - ends_ns[0]) / (until - since)


def cost(case: Case, taken: Sequence[Trouble], alone: bool = False) -> float:
    """By which share steps are shorter without these faults. *alone*: without any others."""
    troubles = tuple(taken) if alone else case.troubles
    left = tuple(each for each in troubles if each not in taken)
    # Late enough that a host with a large fault has lost its lead.
    since = case.steps - LASTS // 2
    with_ns = step_ns(case.setting, troubles, since, case.steps)
    return 1 - step_ns(case.setting, left, since, case.steps) / with_ns


class Truth(NamedTuple):
    """The ranks and nodes that must get a verdict, and those that may."""

    to_be_named: set[int | str]
    may_be_named: set[int | str]


def truth(case: Case) -> Truth:
    """The truth, from the cost of each fault.

    Of two ranks that are equally late, neither costs anything while the other is there. So both
    must get a verdict if they have the same fault, and both together cost something. Else a rank
    may get one if its fault alone costs something.
    """
    late_ones: dict[int | str, list[Trouble]] = {}
    for each in case.troubles:
        late_ones.setdefault(case.late_one(each), []).append(each)
    if len({each._replace(rank=0) for each in case.troubles}) == 1:
        costs = dict.fromkeys(late_ones, cost(case, case.troubles))
    else:
        costs = {who: cost(case, troubles) for who, troubles in late_ones.items()}
    alone = costs
    if len(late_ones) > 1:
        alone = {who: cost(case, troubles, alone=True) for who, troubles in late_ones.items()}
    return Truth(
        {who for who, share in costs.items() if share > TO_BE_NAMED},
        {who for who, share in alone.items() if share > HARMLESS},
    )


@cache
def amount(setting: Setting, where: str, excess: float) -> float:
    """The size of a fault that makes a step longer by this share."""

    def took_ns(*troubles: Trouble) -> float:
        return step_ns(setting, troubles, 40, 80)

    wanted_ns = took_ns() * (1 + excess)
    low, high = 0.0, 1.0
    while took_ns(Trouble(1, where, high)) < wanted_ns:
        low, high = high, 2 * high
    while high - low > 0.003 * high:
        middle = (low + high) / 2
        if took_ns(Trouble(1, where, middle)) < wanted_ns:
            low = middle
        else:
            high = middle
    return high


# -- the cases


def late(setting: Setting, rank: int, where: str, excess: float) -> Trouble:
    """A fault that makes each step longer by this share."""
    return Trouble(rank, where, amount(setting, where, excess), BEGINS)


def one_late(
    excesses: Sequence[float],
    wheres: Sequence[str] = DRAWN,
    settings: Sequence[str] = tuple(SETTINGS),
    ranks: Sequence[int] = (2, 3, 4, 8),
    every: int = 1,
) -> list[Case]:
    """One late rank, for each fault, jitter and number of ranks."""
    chance = random.Random(SEED)
    drawn = []
    for many, jitter, where, excess in product(ranks, JITTERS, wheres, excesses):
        setting = (SETTINGS | HOST_BOUND)[chance.choice(settings)]
        trouble = chance.randrange(many), where, excess
        drawn.append((setting, _varied(setting, many, jitter, chance), trouble))
    chance.shuffle(drawn)
    return [Case(varied, (late(setting, *trouble),)) for setting, varied, trouble in drawn[::every]]


def _varied(setting: Setting, ranks: int, jitter: float, chance: random.Random) -> Setting:
    return setting._replace(
        ranks=ranks,
        jitter=jitter,
        disturbances=chance.random() < 0.5,
        seed=chance.randrange(1_000_000),
    )


# Faults of a whole node.
DEVICES_OF_NODE = ("device", "forward kernels", "backward kernels", "copy", "batch")
HOSTS_OF_NODE = ("cores", "forward launches", "loader", "host")


# Nodes, and ranks on each.
NODES = ((2, 2), (2, 4), (3, 2), (4, 2))


def nodes_late(
    excess: float,
    wheres: Sequence[str],
    every: int = 1,
    many: int = 0,
    kinds: Sequence[tuple[int, int]] = NODES,
) -> list[Case]:
    """All ranks of one node late by the same fault, or only *many* of them."""
    chance = random.Random(SEED)
    drawn = []
    for (nodes, each), jitter, where in product(kinds, JITTERS, wheres):
        setting, node = SETTINGS[chance.choice(tuple(SETTINGS))], chance.randrange(nodes)
        ranks: Sequence[int] = range(node * each, (node + 1) * each)
        if many:
            ranks = chance.sample(ranks, many)
        drawn.append((setting, _varied(setting, nodes * each, jitter, chance), where, ranks, nodes))
    chance.shuffle(drawn)
    return [
        Case(varied, tuple([late(setting, i, where, excess) for i in ranks]), nodes=nodes)
        for setting, varied, where, ranks, nodes in drawn[::every]
    ]


def late_at_no_cost(
    steps: int, ranks: Sequence[int] = (2, 3, 4, 8), beside: tuple[str, float] | None = None
) -> list[Case]:
    """One host is late, but its device has enough work queued. *steps*: the total.

    *beside*: place and size of another rank's fault, which has a cost.
    """
    chance = random.Random(SEED)
    setting = SETTINGS["host ahead"]
    harmless = [("loader", 30.0), ("host", 30.0), ("forward launches", 1.5), ("cores", 0.6)]
    kinds = list(product(ranks, JITTERS[:3], harmless))
    cases = []
    for many, jitter, (where, size) in kinds:
        one, other = chance.sample(range(many), 2)
        troubles = [Trouble(one, where, size, BEGINS if beside else 0)]
        if beside:
            troubles.append(late(setting, other, *beside))
        varied = _varied(setting, many, jitter, chance)._replace(disturbances=False)
        cases.append(Case(varied, tuple(troubles), steps // len(kinds)))
    return cases


def synchronises_alone(lead: int) -> list[Case]:
    """One rank reads its loss every tenth step; the other hosts are *lead* steps ahead."""
    chance = random.Random(SEED)
    return [
        Case(
            _varied(_ahead(lead), many, jitter, chance),
            (Trouble(rank, "item", 10),),
            BEGINS + LASTS + 4 * lead,
        )
        for many, jitter, rank in product((2, 3, 8), JITTERS, (0, 1))
    ]


def slow_far_ahead() -> list[Case]:
    """One device is slow, and all hosts are a hundred steps ahead."""
    chance = random.Random(SEED)
    setting = _ahead(100)
    return [
        Case(
            _varied(setting, many, jitter, chance),
            (late(setting, 1, "device", 0.15),),
            BEGINS + LASTS + 100,
        )
        for many, jitter in product((2, 3, 4, 8), JITTERS)
    ]


def _ahead(lead: int) -> Setting:
    """Hosts that are *lead* steps ahead of their devices."""
    return Setting(layers=4, kernels=QUEUE // lead, launch_ms=20, load_ms=1, host_ms=0.5)


def all_bound(**changes: float) -> list[Case]:
    """All ranks have the same bound."""
    chance = random.Random(SEED)
    setting = Setting()._replace(**changes)
    return [
        Case(_varied(setting, many, jitter, chance)._replace(disturbances=False))
        for many, jitter in product((2, 3, 4, 8), JITTERS)
    ]


def hardly_ahead(steps: int) -> list[Case]:
    """All loaders are too slow, with workers, and the hosts are hardly ahead."""
    ahead = SETTINGS["one step ahead"]
    return [
        case._replace(setting=case.setting._replace(kernels=ahead.kernels), steps=steps)
        for case in all_bound(load_ms=130, prefetch=4, launch_ms=ahead.launch_ms)
    ]


def balanced(
    steps: int, ranks: Sequence[int] = (2, 3, 4, 8), nodes: Sequence[int] = (1,)
) -> list[Case]:
    """No late rank. *steps*: the total. *ranks*: on each node."""
    chance = random.Random(SEED)
    kinds = list(product(nodes, ranks, JITTERS, (SETTINGS | HOST_BOUND).values()))
    return [
        Case(_varied(setting, many * each, jitter, chance), steps=steps // len(kinds), nodes=many)
        for many, each, jitter, setting in kinds
    ]


# -- the table


class Outcome(NamedTuple):
    """A case, its truth and its verdicts."""

    case: Case
    truth: Truth
    found: Found

    @classmethod
    def of(cls, case: Case) -> Outcome:
        """Run it."""
        return cls(case, truth(case), replayed(case))

    @property
    def rank_right(self) -> bool:
        """Whether all ranks that must get a verdict have one, and no others."""
        to_be_named, may_be_named = self.truth
        named = self.found.named
        return to_be_named <= set(named) <= to_be_named | may_be_named and all(
            each.step > 0 for each in named.values()
        )

    @property
    def phase_right(self) -> bool:
        """Of each rank that is named."""
        return all(
            named.phase in expected.phases and named.kind == expected.kind
            for named, expected in self._named()
        )

    @property
    def side_right(self) -> bool:
        """Of each rank that is named."""
        return all(named.side == expected.side for named, expected in self._named())

    def _named(self) -> Iterator[tuple[Named, Expected]]:
        late_ones = {self.case.late_one(each): each.where for each in self.case.troubles}
        for who, where in late_ones.items():
            if who in self.found.named:
                yield self.found.named[who], EXPECTED[where]


def late_row(title: str, cases: Sequence[Case]) -> str:
    """A row of the table of runs with late ranks."""
    outcomes = [Outcome.of(case) for case in cases]
    named = [each for each in outcomes if each.rank_right and each.found.named]
    return row(
        title,
        len(cases),
        len([each for each in outcomes if each.truth.to_be_named]),
        shares(
            [each.rank_right for each in outcomes],
            [each.phase_right for each in named],
            [each.side_right for each in named],
        ),
        soon([name.step for each in named for name in each.found.named.values()]),
    )


def quiet_row(title: str, cases: Sequence[Case]) -> str:
    """A row of the table of runs without late ranks."""
    found = [replayed(case) for case in cases]
    steps = sum(case.steps for case in cases)
    verdicts = sum(len(each.after_s) for each in found)
    compared = sum(not each.insufficient for each in found) / len(found)
    return row(title, len(cases), f"{steps:,}", verdicts, f"{compared * 100:.0f} %")


def bound_row(title: str, cases: Sequence[Case], bound: str) -> str:
    """A row of the table of what bounds all ranks."""
    found = [replayed(case) for case in cases]
    said = sum(each.bound == bound for each in found) / len(found)
    unknown = sum(each.insufficient != "" for each in found) / len(found)
    named = sum(len(each.after_s) for each in found)
    return row(
        title, len(cases), f"`{bound}`", f"{said * 100:.0f} %", f"{unknown * 100:.0f} %", named
    )


def tables() -> Iterator[str]:
    """All lines of the tables, each as soon as it is known."""
    yield "| late | runs | to name | rank, phase, side right (%) | steps until named |"
    yield "|---|---|---|---|---|"
    for excess in (0.05, 0.1, 0.15, 0.3, 0.5):
        yield late_row(f"one rank, {excess * 100:.0f} %", one_late((excess,), every=4))
    ahead = ("host ahead", "one step ahead", "busy host")
    yield late_row("its device", one_late((0.3,), ("device",), ahead))
    yield late_row("its loader", one_late((0.3,), ("loader",)))
    launches = ("cores", "forward launches", "backward launches")
    yield late_row("its launches", one_late((0.3,), launches, ahead, every=2))
    yield late_row("its host, before or in forward", one_late((0.3,), IN_FORWARD, ahead))
    yield late_row("`.item()` in each step", one_late((0.3,), settings=("item",), every=8))
    yield late_row("accumulation", one_late((0.3,), settings=("accumulation",), every=8))
    for name in HOST_BOUND:
        yield late_row(f"all hosts {name}", one_late((0.3,), settings=(name,), every=8))
    yield late_row("one device, 15 %, hosts 100 steps ahead", slow_far_ahead())
    yield late_row("one of 64 ranks", one_late((0.3,), ranks=(64,), every=8))
    for excess in (0.15, 0.3):
        title = f"all devices of a node, {excess * 100:.0f} %"
        yield late_row(title, nodes_late(excess, DEVICES_OF_NODE, every=3))
    for excess in (0.15, 0.3):
        title = f"all hosts of a node, {excess * 100:.0f} %"
        yield late_row(title, nodes_late(excess, HOSTS_OF_NODE))
    of_four = nodes_late(0.3, HOSTS_OF_NODE, many=2, kinds=((2, 4), (3, 4)))
    yield late_row("two of 4 hosts of a node", of_four)
    alone = nodes_late(0.3, HOSTS_OF_NODE, every=2, many=1)
    yield late_row("one host, of several nodes", alone)
    for title, where in (("one device", "device"), ("one loader", "loader")):
        beside = late_at_no_cost(48 * (BEGINS + LASTS), beside=(where, 0.3))
        yield late_row(f"{title}, another rank's host at no cost", beside[::2])
    yield ""
    yield "| no rank to name | runs | steps | verdicts | compared |"
    yield "|---|---|---|---|---|"
    yield quiet_row("all alike", balanced(200_000))
    yield quiet_row("the same, 2 or 3 nodes", balanced(50_000, (2, 4), (2, 3)))
    workers = [case._replace(steps=1_500) for case in all_bound(load_ms=130, prefetch=4)]
    yield quiet_row("bound by prefetching loaders", workers)
    yield quiet_row("the same, hosts hardly ahead", hardly_ahead(1_500))
    yield quiet_row("a host late at no cost", late_at_no_cost(50_000))
    synchronising = [case for lead in (3, 5, 10, 100) for case in synchronises_alone(lead)]
    yield quiet_row("one rank synchronises each 10 steps", synchronising)
    yield ""
    yield "| all ranks | runs | bound | reported | insufficient data | verdicts |"
    yield "|---|---|---|---|---|---|"
    yield bound_row("launch slowly", all_bound(launch_ms=130), "launch")
    yield bound_row("load slowly", all_bound(load_ms=80), "data")
    yield bound_row("load slowly in workers", all_bound(load_ms=130, prefetch=4), "data")
    yield bound_row("work long between steps", all_bound(host_ms=110), "other")
    yield bound_row("wait for transfers", all_bound(transfer_ms=240), "comm_wait")
    yield bound_row("none of these", all_bound(), "compute")


if __name__ == "__main__":
    main({"device cases": tables})
