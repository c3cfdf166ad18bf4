"""Separates waits in calls to process groups from the work of each rank.

Calls are matched by their order: the n-th collective of a group in a step is the same on all
members, and the n-th send from A to B matches the n-th receive of B from A. A collective is ready
when the last member arrives, a receive when its message is sent. A rank waits for a call at most
until it is ready: right after the call or later (in `work.wait()`), and only while its thread is
idle.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from operator import sub
from typing import NamedTuple

from otel_ddp.diagnosis.detector import RankState
from otel_ddp.diagnosis.medians import median
from otel_ddp.diagnosis.say import first_of, rank_number
from otel_ddp.diagnosis.step_facts import StepFacts
from otel_ddp.diagnosis.steps import Call, Collective
from otel_ddp.diagnosis.straggler import limits
from otel_ddp.diagnosis.verdict import Labels, node_of
from otel_ddp.vocabulary.words import WORK_PHASES

_PEERS = ("send", "recv")
_INDEX = {word: at for at, word in enumerate(WORK_PHASES)}
# How many plans to keep. Programs repeat few sequences of calls: two if they log every tenth step.
_MOST_PLANS = 8
# The waits of ranks are shown as means over this many steps.
_MEAN_OF = 100

_Each = tuple[Call, ...]


_DISAGREE = "the ranks do not agree on how often they call their process groups"
_FEW_KNOWN = "ranks that are not known here are in some of the process groups"
_CLOCKS = "ranks wait for other nodes, and no clock is exact enough to say for how long"


class _Unknown(Exception):
    """Raised if it is unknown who waits for whom. The message gives the reason."""


class _Member(NamedTuple):
    """A member of a process group: the index of its rank, and the indices of the group's
    collectives among all calls of the rank."""

    rank: int
    places: Sequence[int]


class _Receive(NamedTuple):
    """A receive and the matching send: the index of each rank, and of the call among its rank's
    calls."""

    rank: int
    place: int
    sender: int
    send: int


class _Phases:
    """Assigns the waits of one rank to phases. Each wait follows a call to a process group."""

    def __init__(self, each: _Each) -> None:
        """*each*: the calls of the rank."""
        phases = [call.phase for call in each]
        after = [*phases[1:], ""] if phases else []
        # Calls whose waits the phase `comm_wait` may already include: all calls made in it, and the
        # last call of each backward, whose result the rank awaits in `comm_wait`.
        self.beside_gradients = [
            at
            for at, (phase, following) in enumerate(zip(phases, after, strict=True))
            if phase == "comm_wait" or (phase == "backward" and following != phase)
        ]
        for at in self.beside_gradients:
            phases[at] = ""
        # Runs of calls in the same phase: the index of the phase in WORK_PHASES, the index of the
        # first call, and the index after the last.
        self.stretches = list[tuple[int, int, int]]()
        first = 0
        for phase, same in groupby(phases):
            end = first + len(list(same))
            if phase in _INDEX:
                self.stretches.append((_INDEX[phase], first, end))
            first = end
        self.of_peers = [at for at, call in enumerate(each) if call.op in _PEERS]
        self.of_kind = defaultdict[Collective, list[int]](list)
        """By collective: the indices of its calls. No sends, as their waits are unknown."""
        for at, call in enumerate(each):
            if call.op != "send":
                self.of_kind[call.kind].append(at)

    def spent_ns(self, waits_ns: Sequence[int], known_ns: int) -> list[int]:
        """How much of these waits lies in each phase. *known_ns*: what `comm_wait` already counts
        of them."""
        found = [0] * len(WORK_PHASES)
        for at, first, end in self.stretches:
            found[at] += sum(waits_ns[first:end])
        beside_ns = sum([waits_ns[at] for at in self.beside_gradients])
        found[_INDEX["backward"]] += max(beside_ns - known_ns, 0)
        return found


class _Plan:
    """Matches the calls of all ranks in a step with each other."""

    def __init__(self, each: Sequence[_Each], numbers: Mapping[int, int]) -> None:
        """*each*: the calls of each rank. *numbers*: by rank number, the index of the rank."""
        self.each = each
        self.groups = self._groups()
        self.receives = self._receives(numbers)
        self.stages = self._stages(numbers)
        self.phases = [_Phases(calls) for calls in each]

    def ready_ns(self, at_ns: Sequence[Sequence[int]]) -> list[list[int]]:
        """When each call of each rank is ready: a collective when its last member arrives, a
        receive when its message has been sent."""
        found = [[*own_ns] for own_ns in at_ns]
        for members in self.groups.values():
            columns = [[at_ns[i][place] for place in places] for i, places in members]
            lasts_ns = list(map(max, zip(*columns, strict=True)))
            for i, places in members:
                for place, last_ns in zip(places, lasts_ns, strict=True):
                    found[i][place] = last_ns
        for i, place, sender, send in self.receives:
            found[i][place] = max(found[i][place], at_ns[sender][send])
        return found

    def _groups(self) -> dict[str, list[_Member]]:
        members: defaultdict[str, list[_Member]] = defaultdict(list)
        for i, each in enumerate(self.each):
            own: defaultdict[str, list[int]] = defaultdict(list)
            for at, call in enumerate(each):
                if call.op not in _PEERS:
                    own[call.group].append(at)
            for group, places in own.items():
                members[group].append(_Member(i, places))
        for found in members.values():
            if len({len(places) for _, places in found}) > 1:
                raise _Unknown(_DISAGREE)
        return {group: found for group, found in members.items() if len(found) > 1}

    def _receives(self, numbers: Mapping[int, int]) -> list[_Receive]:
        sends: defaultdict[tuple[str, int, int], list[int]] = defaultdict(list)
        for i, each in enumerate(self.each):
            for at, call in enumerate(each):
                if call.op == "send":
                    sends[call.group, i, numbers.get(call.peer, -1)].append(at)
        found = list[_Receive]()
        met: defaultdict[tuple[str, int, int], int] = defaultdict(int)
        for i, each in enumerate(self.each):
            for at, call in enumerate(each):
                if call.op != "recv":
                    continue
                sender = numbers.get(call.peer, -1)
                key = call.group, sender, i
                if sender < 0 or met[key] >= len(sends[key]):
                    raise _Unknown(_DISAGREE)
                found.append(_Receive(i, at, sender, sends[key][met[key]]))
                met[key] += 1
        if any(len(places) != met[key] for key, places in sends.items()):
            raise _Unknown(_DISAGREE)
        return found

    def _stages(self, numbers: Mapping[int, int]) -> tuple[int, ...]:
        """The pipeline stage of each rank; -1 if no stage sends to it.

        A rank that sends before it receives is in the first stage. Each rank's first send goes to a
        rank of the next stage. If all ranks send first, as in a ring, or none does, there is no
        pipeline, and all are in stage 0.
        """
        first = [next((e for e in each if e.op in _PEERS), None) for each in self.each]
        sends = [next((e for e in each if e.op == "send"), None) for each in self.each]
        front = [i for i, call in enumerate(first) if call is not None and call.op == "send"]
        if not front:
            return (0,) * len(first) if any(first) else ()
        stages = dict.fromkeys(front, 0)
        while front:
            after = []
            for i in front:
                call = sends[i]
                to = numbers.get(call.peer, -1) if call is not None else -1
                if to >= 0 and to not in stages:
                    stages[to] = stages[i] + 1
                    after.append(to)
            front = after
        return tuple([stages.get(i, -1) for i in range(len(first))])

    def check(self, world_size: int, nodes: Sequence[Labels]) -> None:
        """Raise _Unknown if ranks wait for ranks whose steps are unknown here, or for ranks on
        other nodes, whose clocks are not exact enough."""
        known = len(self.each)
        groups = self.groups.values()
        if known < world_size and any(len(members) < known for members in groups):
            raise _Unknown(_FEW_KNOWN)
        meet = [[each.rank for each in members] for members in groups]
        meet += [[each.rank, each.sender] for each in self.receives]
        if any(len({nodes[i] for i in each}) > 1 for each in meet):
            raise _Unknown(_CLOCKS)

    def alike(self, i: int, late: Sequence[int]) -> list[int]:
        """The ranks to compare rank *i* with: of its pipeline stage, with as many calls, and not
        among the *late* ones."""
        stages = self.stages or (0,) * len(self.each)
        return [
            at
            for at, each in enumerate(self.each)
            if stages[at] == stages[i] and len(each) == len(self.each[i]) and at not in late
        ]


class Taken(NamedTuple):
    """One step of all ranks, without waits in calls."""

    facts: Sequence[StepFacts]
    stages: tuple[int, ...]
    """The pipeline stage of each rank; empty if no rank sends or receives."""
    bubble_ns: Sequence[int]


class _Step(NamedTuple):
    """One step of all ranks, and how long each waited after each of its calls."""

    plan: _Plan
    facts: Sequence[StepFacts]
    waits_ns: Sequence[Sequence[int]]

    def works_ns(self, i: int) -> list[int]:
        """How long rank *i* worked before each of its calls; the last value is its work after the
        last call."""
        facts = self.facts[i]
        own_ns = facts.calls.at_ns if facts.calls is not None else ()
        edges_ns = pairwise([facts.ended_ns - facts.took_ns, *own_ns, facts.ended_ns])
        spans_ns = [end_ns - begin_ns for begin_ns, end_ns in edges_ns]
        return list(map(sub, spans_ns, [0, *self.waits_ns[i]]))

    def awaited_ns(self, i: int) -> dict[int, int]:
        """By index of a collective among rank *i*'s calls: the longest wait of a few other members
        in it."""
        found = {}
        for members in self.plan.groups.values():
            places = next((each.places for each in members if each.rank == i), ())
            others = [each for each in members if each.rank != i][: limits.CALLS_ALIKE]
            for n, place in enumerate(places):
                found[place] = max([self.waits_ns[each.rank][each.places[n]] for each in others])
        return found


class Waits:
    """Separates waits from work in the steps of one run."""

    def __init__(self) -> None:
        self._numbers: Mapping[int, int] = {}
        self._nodes: Sequence[Labels] = ()
        # By rank: how far its clock is ahead of the clock of its node's first rank.
        self._ahead_ns: Sequence[int] = ()
        # Cached plans. The key is the `id`s of the ranks' tuples of calls, as steps with the same
        # calls share one tuple. The value is these tuples, kept alive so that no `id` is reused,
        # and their plan, or the reason why there is none.
        self._plans: dict[tuple[int, ...], tuple[Sequence[_Each], _Plan | str]] = {}
        self.why = ""
        """Why it was unknown in the last step who waits for whom; empty if it was known."""
        # The last steps, which `where` examines.
        self._last: deque[_Step] = deque(maxlen=limits.CALLS_KEPT)
        # By step, rank and collective: the waits in the last _MEAN_OF steps. And their sums over
        # these steps.
        self._by_kind_ns = deque[Sequence[Mapping[Collective, int]]]()
        self._sums_ns: Sequence[Counter[Collective]] = ()

    def start_again(self, ranks: Sequence[RankState]) -> None:
        """Start over with these ranks. `take` must get their steps in the same order."""
        self._numbers = {
            int(number): i
            for i, number in enumerate([rank_number(each.labels) for each in ranks])
            if number.isdecimal()
        }
        # All processes of a node share one monotonic clock, but each adds its own offset to it. So
        # compare the offsets with that of the node's first rank.
        self._nodes = [node_of(each.labels) for each in ranks]
        shared_ns: dict[Labels, int] = {}
        self._ahead_ns = [
            shared_ns.setdefault(node, each.clock_shift_ns) - each.clock_shift_ns
            for node, each in zip(self._nodes, ranks, strict=True)
        ]
        self._plans.clear()
        self._last.clear()
        self._by_kind_ns.clear()
        self._sums_ns = [Counter() for _ in ranks]

    def take(self, facts: Sequence[StepFacts], world_size: int) -> Taken | None:
        """Separate the waits of a step; None if it is unknown who waits for whom."""
        if any(each.calls is None for each in facts):
            self.why = _DISAGREE
            return None
        plan = self._plan(facts, world_size)
        self.why = plan if isinstance(plan, str) else ""
        if isinstance(plan, str):
            return None
        ready_ns = plan.ready_ns(self._at_ns(facts))
        waits_ns = list(map(_waits, facts, self._ahead_ns, ready_ns))
        self._last.append(_Step(plan, facts, waits_ns))
        self._add_up(plan, waits_ns)
        return Taken(
            list(map(_without, facts, plan.phases, waits_ns)),
            plan.stages,
            [
                sum([own_ns[at] for at in phases.of_peers])
                for phases, own_ns in zip(plan.phases, waits_ns, strict=True)
            ],
        )

    def each_s(self, i: int) -> dict[Collective, float]:
        """How long rank *i* recently waited in a step, by collective."""
        many = len(self._by_kind_ns)
        return {kind: ns / many / 1e9 for kind, ns in self._sums_ns[i].items()} if many else {}

    def _add_up(self, plan: _Plan, waits_ns: Sequence[Sequence[int]]) -> None:
        if len(self._by_kind_ns) == _MEAN_OF:
            for sums_ns, oldest_ns in zip(self._sums_ns, self._by_kind_ns.popleft(), strict=True):
                sums_ns.subtract(oldest_ns)
        self._by_kind_ns.append(
            [
                {
                    kind: sum([own_ns[at] for at in places])
                    for kind, places in phases.of_kind.items()
                }
                for phases, own_ns in zip(plan.phases, waits_ns, strict=True)
            ]
        )
        for sums_ns, newest_ns in zip(self._sums_ns, self._by_kind_ns[-1], strict=True):
            sums_ns.update(newest_ns)

    def where(self, late: Sequence[int]) -> str:
        """Names the process group in which others first wait for the late ranks; empty if unknown.

        It has the calls before which the late ranks work longer than other ranks of their stage.
        Later calls do not show who is late: ranks that have waited for a late rank arrive at them
        as late as that rank.
        """
        found: Counter[Call] = Counter()
        for step in self._last:
            plan = step.plan
            for i in late[: limits.CALLS_ALIKE]:
                several = [i, *plan.alike(i, late)[: limits.CALLS_ALIKE]]
                works_ns = [step.works_ns(at) for at in several]
                found.update(_more_before(plan.each[i], works_ns, step.awaited_ns(i)))
        dimensions: Counter[str] = Counter()
        for call, more_ns in found.items():
            dimensions[call.dimension] += more_ns
        if not any(dimensions.values()):
            return ""
        dimension = max(dimensions, key=dimensions.__getitem__)
        call = max([each for each in found if each.dimension == dimension], key=found.__getitem__)
        return self._in_words(call)

    def _in_words(self, call: Call) -> str:
        where = f"mesh dimension {call.dimension}" if call.dimension else "process group"
        if call.op == "send":
            return f"{where}: sends to rank {call.peer}"
        members = self._last[-1].plan.groups.get(call.group, [])
        if len(members) == len(self._numbers):
            return f"{where}: all ranks"
        numbers = list(self._numbers)
        several = [str(numbers[each.rank]) for each in members]
        return f"{where}: ranks {first_of(several, limits.CALLS_ALIKE)}"

    def _plan(self, facts: Sequence[StepFacts], world_size: int) -> _Plan | str:
        each = [one.calls.each for one in facts if one.calls is not None]
        key = tuple(map(id, each))
        if key not in self._plans:
            if len(self._plans) >= _MOST_PLANS:
                del self._plans[next(iter(self._plans))]
            try:
                plan = _Plan(each, self._numbers)
                plan.check(world_size, self._nodes)
                self._plans[key] = each, plan
            except _Unknown as why:
                self._plans[key] = each, str(why)
        return self._plans[key][1]

    def _at_ns(self, facts: Sequence[StepFacts]) -> list[Sequence[int]]:
        found: list[Sequence[int]] = []
        for each, ahead_ns in zip(facts, self._ahead_ns, strict=True):
            at_ns: Sequence[int] = each.calls.at_ns if each.calls is not None else ()
            found.append([ns - ahead_ns for ns in at_ns] if ahead_ns else at_ns)
        return found


def _waits(facts: StepFacts, ahead_ns: int, ready_ns: Sequence[int]) -> list[int]:
    """How long a rank waited after each of its calls.

    *ready_ns*: when each call was ready, by the clock of its node's first rank. *ahead_ns*: how far
    the rank's own clock is ahead of that clock.
    """
    if facts.calls is None:
        return []
    own_ns, found, until_ns = facts.calls.at_ns, list[int](), 0
    ends_ns = [*own_ns[1:], facts.ended_ns]
    # This loop runs for each call of each rank. Calls of min and max would be slower.
    for ready, at_ns, end_ns, parts in zip(
        ready_ns, own_ns, ends_ns, facts.calls.idle, strict=True
    ):
        # The rank may still wait for an earlier call when this one is ready, so `until_ns` never
        # falls.
        if ready > until_ns:
            until_ns = ready
        open_ns = until_ns + ahead_ns - at_ns
        idle_ns = (end_ns - at_ns) * (parts + 1) >> 8
        found.append(open_ns if open_ns < idle_ns else idle_ns)
    return found


def _without(facts: StepFacts, phases: _Phases, waits_ns: Sequence[int]) -> StepFacts:
    """The step with these waits removed from its phases."""
    # A wait may go on after the phase in which its call was made, so remove at most the time of
    # that phase.
    taken_ns = list(map(min, phases.spent_ns(waits_ns, facts.wait_ns), facts.phases_ns))
    return facts._replace(
        wait_ns=facts.wait_ns + sum(taken_ns),
        phases_ns=tuple(map(sub, facts.phases_ns, taken_ns)),
    )


def _more_before(
    each: _Each, works_ns: Sequence[Sequence[int]], awaited_ns: Mapping[int, int]
) -> Counter[Call]:
    """For each call in which others wait for the late rank: how much longer than the others that
    rank has worked before the call.

    *works_ns*: of the late rank first, then of the others.
    """
    found: Counter[Call] = Counter()
    own_ns, *others_ns = works_ns
    if not others_ns or not each:
        return found
    more_ns = list(map(sub, own_ns, map(round, map(median, zip(*others_ns, strict=True)))))
    # After the last call of a step, extra work makes others wait in the first call of the next
    # step. So count it as work before the first call.
    carried_ns = more_ns.pop()
    for at, (call, ns) in enumerate(zip(each, more_ns, strict=True)):
        carried_ns += ns
        # The extra work so far counts for the first call in which it shows: a send, or a collective
        # in which another rank waits for more than half of it.
        shows = call.op == "send" or awaited_ns.get(at, 0) > carried_ns / 2
        if shows or at == len(each) - 1:
            found[call] += max(carried_ns, 0)
            carried_ns = 0
    return found
