"""Takes out of the work of each rank what it waits for others in its calls to process groups.

Nobody tells who meets whom: the n-th collective of a group in a step is the same on all of its
members, and the n-th send of a rank to another one meets that one's n-th receive from it. A rank
waits in a collective until the last member arrives, and in a receive until the send.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import groupby
from operator import sub
from typing import NamedTuple

from otel_ddp.diagnosis.detector import RankState
from otel_ddp.diagnosis.medians import median
from otel_ddp.diagnosis.say import first_of, rank_number
from otel_ddp.diagnosis.step_facts import StepFacts
from otel_ddp.diagnosis.steps import Call
from otel_ddp.diagnosis.straggler import limits
from otel_ddp.diagnosis.verdict import Labels, node_of
from otel_ddp.vocabulary.words import WORK_PHASES

_PEERS = ("send", "recv")
_BACKWARD = ("backward", "comm_wait")
_INDEX = {word: at for at, word in enumerate(WORK_PHASES)}
# What a step has of calls changes little: with a log of every tenth step there are two kinds.
_MOST_PLANS = 8

_Each = tuple[Call, ...]


_DISAGREE = "the ranks do not agree on how often they call their process groups"
_FEW_KNOWN = "ranks that are not known here are in some of the process groups"
_CLOCKS = "ranks wait for other nodes, and no clock is exact enough to say for how long"


class _Unknown(Exception):
    """Why it is not known who has waited for whom."""


class _Member(NamedTuple):
    """One rank of a group."""

    rank: int
    places: Sequence[int]
    """Of its collectives of this group, among all of its calls."""
    phases: Sequence[tuple[int, int, int]]
    """Index into WORK_PHASES, and from which of these collectives up to which it holds."""


class _Group:
    """The collectives of one group in a step."""

    def __init__(self, each: Sequence[_Each], members: Sequence[tuple[int, Sequence[int]]]) -> None:
        rank, places = members[0]
        self.calls = [each[rank][place] for place in places]
        self.members = [_Member(i, at, _stretches(each[i], at)) for i, at in members]
        # Those that are asynchronous: in how many steps each was seen not to be waited for before
        # the next call.
        self._went_on = {n: 0 for n, call in enumerate(self.calls) if call.asynchronous}
        self.overlapped: list[int] = []
        """What lies between such a collective and the wait for it is not known."""
        self.known: list[int] = []
        """The waits in these are `comm_wait`, unless steps show that they are not."""
        self._steps = self._waited_ns = self._known_ns = 0

    @property
    def may_hide(self) -> bool:
        """Whether waits are taken that work may hide."""
        return len(self._went_on) > len(self.known)

    def look_for_longer(
        self, waits_ns: Sequence[Sequence[int]], facts: Sequence[StepFacts]
    ) -> None:
        """Waits that are known already are about as long as the `comm_wait` that they are."""
        if self.known:
            self._steps += 1
            for member, each_ns in zip(self.members, waits_ns, strict=True):
                self._waited_ns += each_ns[self.known[-1]]
                self._known_ns += facts[member.rank].wait_ns
            if self._steps >= limits.CALLS_KNOWN and self._waited_ns > 2 * self._known_ns:
                self.known = []

    def arrivals(self, at_ns: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[int]]:
        """When each member has arrived at each collective, and when the last one has."""
        columns = [[at_ns[i][place] for place in places] for i, places, _ in self.members]
        return columns, list(map(max, zip(*columns, strict=True)))

    def look_for_overlap(self, at_ns: Sequence[Sequence[int]], last_ns: Sequence[int]) -> None:
        """Who waits for a collective does not call the next one before its last member has come."""
        for n in self._went_on.keys() - self.known:
            least_ns = last_ns[n] - limits.CALL_GRAIN_NS
            for i, places, _ in self.members:
                after = places[n] + 1
                if after < len(at_ns[i]) and at_ns[i][after] < least_ns:
                    self._went_on[n] += 1
                    break
            if self._went_on[n] >= limits.CALLS_WENT_ON:
                # All of a kind are called by the same lines, mostly, and waited for alike.
                alike = [at for at in self._went_on if self.calls[at] == self.calls[n]]
                self.overlapped += alike
                for at in alike:
                    del self._went_on[at]
                return


def _stretches(each: _Each, places: Sequence[int]) -> list[tuple[int, int, int]]:
    """Of the calls at these places: in which phases of work they are."""
    found, first = [], 0
    for phase, same in groupby([each[place].phase for place in places]):
        end = first + len(list(same))
        if phase in _INDEX:
            found.append((_INDEX[phase], first, end))
        first = end
    return found


class _Receive:
    """One receive of a step."""

    def __init__(self, place: int, sender: int, send: int) -> None:
        self.place, self.sender, self.send = place, sender, send
        # The call behind which it is waited for: several may be made at once, and waited for then.
        self.behind = place


class _Plan:
    """Who meets whom in steps with these calls."""

    def __init__(self, facts: Sequence[StepFacts], numbers: Mapping[int, int]) -> None:
        """*numbers*: the place of each rank by its number."""
        self.each = [facts.calls.each for facts in facts if facts.calls is not None]
        self.groups = self._groups()
        self.receives = self._receives(numbers)
        self.stages = self._stages(numbers)
        if any(each.wait_ns for each in facts):
            self._leave_out_gradients()

    def _groups(self) -> list[_Group]:
        members: defaultdict[str, list[tuple[int, list[int]]]] = defaultdict(list)
        for i, each in enumerate(self.each):
            own: defaultdict[str, list[int]] = defaultdict(list)
            for at, call in enumerate(each):
                if call.op not in _PEERS:
                    own[call.group].append(at)
            for group, places in own.items():
                members[group].append((i, places))
        for found in members.values():
            if len({len(places) for _, places in found}) > 1:
                raise _Unknown(_DISAGREE)
        return [_Group(self.each, found) for found in members.values() if len(found) > 1]

    def _receives(self, numbers: Mapping[int, int]) -> dict[int, list[_Receive]]:
        """By the receiving rank, in their order."""
        sends: defaultdict[tuple[str, int, int], list[int]] = defaultdict(list)
        for i, each in enumerate(self.each):
            for at, call in enumerate(each):
                if call.op == "send":
                    sends[call.group, i, numbers.get(call.peer, -1)].append(at)
        found: defaultdict[int, list[_Receive]] = defaultdict(list)
        met: defaultdict[tuple[str, int, int], int] = defaultdict(int)
        for i, each in enumerate(self.each):
            for at, call in enumerate(each):
                if call.op != "recv":
                    continue
                sender = numbers.get(call.peer, -1)
                key = call.group, sender, i
                if sender < 0 or met[key] >= len(sends[key]):
                    raise _Unknown(_DISAGREE)
                found[i].append(_Receive(at, sender, sends[key][met[key]]))
                met[key] += 1
        if any(len(places) != met[key] for key, places in sends.items()):
            raise _Unknown(_DISAGREE)
        return found

    def _stages(self, numbers: Mapping[int, int]) -> tuple[int, ...]:
        """Of each rank: its place along the pipeline.

        A rank that sends before it has received begins it, and sends to the next stage first. Where
        all do, as in a ring of equals, or none does, there is no pipeline. What no stage sends to
        is -1.
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
        """Raise where some ranks wait for others that are not known, or whose clock is another."""
        known = len(self.each)
        if known < world_size and any(len(each.members) < known for each in self.groups):
            raise _Unknown(_FEW_KNOWN)
        meet = [[each.rank for each in group.members] for group in self.groups]
        meet += [[i, each.sender] for i, several in self.receives.items() for each in several]
        if any(len({nodes[i] for i in each}) > 1 for each in meet):
            raise _Unknown(_CLOCKS)

    def passed(self, i: int) -> set[int]:
        """The places of the calls in which nobody waits for rank *i*. In the last one, some may."""
        found = {at for at, call in enumerate(self.each[i]) if call.op == "recv"}
        for group in self.groups:
            for member in group.members:
                if member.rank == i:
                    found |= {member.places[n] for n in (*group.known, *group.overlapped)}
        return found - {len(self.each[i]) - 1}

    def alike(self, i: int, late: Sequence[int]) -> list[int]:
        """Ranks of the same stage as rank *i* that make as many calls, without the *late* ones."""
        stages = self.stages or (0,) * len(self.each)
        return [
            at
            for at, each in enumerate(self.each)
            if stages[at] == stages[i] and len(each) == len(self.each[i]) and at not in late
        ]

    def _leave_out_gradients(self) -> None:
        """The waits of DistributedDataParallel are `comm_wait`.

        It reduces the last gradients when all are computed. No collective comes after that.
        """
        last = set()
        for each in self.each:
            in_backward = [e for e in each if e.phase in _BACKWARD and e.op not in _PEERS]
            if in_backward and _is_of_gradients(in_backward[-1]):
                last.add(in_backward[-1].group)
        for group in self.groups:
            if group.calls[0].group in last:
                group.known = [n for n, e in enumerate(group.calls) if _is_of_gradients(e)]


def _is_of_gradients(call: Call) -> bool:
    return call.op == "allreduce" and call.asynchronous and call.phase == "backward"


class Taken(NamedTuple):
    """One step of all ranks, with waits in calls taken out of their work."""

    facts: Sequence[StepFacts]
    stages: tuple[int, ...]
    """Of each rank: its place along the pipeline; empty where no rank sends or receives."""
    bubble_ns: Sequence[int]
    """Of each rank: how long it waited in receives."""
    unclear: float
    """The share of the step in which a rank may have waited or not."""
    may_hide: bool
    """Some of the waits are in asynchronous calls: work may have gone on meanwhile."""


class _Step(NamedTuple):
    """One step of all ranks, as it is kept for who asks where they have waited."""

    plan: _Plan
    facts: Sequence[StepFacts]
    ahead_ns: Sequence[int]
    """Of each rank: what its clock is ahead of the one that all have in common."""
    at_ns: Sequence[Sequence[int]]
    """Of each rank: when it has arrived at each call, on that clock."""
    lasts_ns: Sequence[Sequence[int]]
    """Of each group: when the last member has arrived at each collective."""

    def works_ns(self, i: int) -> list[int]:
        """How long rank *i* worked before each of its calls, and behind the last one."""
        plan, own_ns = self.plan, self.at_ns[i]
        ends_ns = [*own_ns]
        for group, last_ns in zip(plan.groups, self.lasts_ns, strict=True):
            places = next((each.places for each in group.members if each.rank == i), ())
            left_out = {*group.known, *group.overlapped}
            for n, place in enumerate(places):
                if n not in left_out:
                    ends_ns[place] = last_ns[n]
        for receive in plan.receives.get(i, ()):
            sent_ns = self.at_ns[receive.sender][receive.send]
            ends_ns[receive.place] = max(ends_ns[receive.place], sent_ns)
        ended_ns = self.facts[i].ended_ns - self.ahead_ns[i]
        began_ns = ended_ns - self.facts[i].took_ns
        return list(map(sub, [*own_ns, ended_ns], [began_ns, *ends_ns]))


class Waits:
    """The ranks of one run."""

    def __init__(self) -> None:
        self._numbers: Mapping[int, int] = {}
        self._nodes: Sequence[Labels] = ()
        # What its clock is ahead of the one that all processes of its node share.
        self._ahead_ns: Sequence[int] = ()
        # With what they are for: it has to live on, as its ids are the keys.
        self._plans: dict[tuple[int, ...], tuple[Sequence[_Each], _Plan | str]] = {}
        self.why = ""
        """Why it was not known of the last step who has waited for whom; empty: it was."""
        # The last steps, for who asks where ranks have waited.
        self._last: deque[_Step] = deque(maxlen=limits.CALLS_KEPT)

    def start_again(self, ranks: Sequence[RankState]) -> None:
        """From now on these ranks are compared, in this order."""
        self._numbers = {
            int(number): i
            for i, number in enumerate([rank_number(each.labels) for each in ranks])
            if number.isdecimal()
        }
        # All processes of a node share one clock, which each has turned to its own.
        self._nodes = [node_of(each.labels) for each in ranks]
        shared_ns: dict[Labels, int] = {}
        self._ahead_ns = [
            shared_ns.setdefault(node, each.clock_shift_ns) - each.clock_shift_ns
            for node, each in zip(self._nodes, ranks, strict=True)
        ]
        self._plans.clear()
        self._last.clear()

    def take(self, facts: Sequence[StepFacts], world_size: int) -> Taken | None:
        """None where it is not known who has waited for whom."""
        if any(each.calls is None for each in facts):
            self.why = _DISAGREE
            return None
        plan = self._plan(facts, world_size)
        self.why = plan if isinstance(plan, str) else ""
        if isinstance(plan, str):
            return None
        at_ns = self._at_ns(facts)
        spent_ns = [[0] * len(WORK_PHASES) for _ in facts]
        unclear_ns = 0
        lasts_ns = []
        for group in plan.groups:
            columns, last_ns = group.arrivals(at_ns)
            lasts_ns.append(last_ns)
            group.look_for_overlap(at_ns, last_ns)
            each_ns = [list(map(sub, last_ns, column)) for column in columns]
            group.look_for_longer(each_ns, facts)
            for (i, _, phases), waits_ns in zip(group.members, each_ns, strict=True):
                for n in group.overlapped:
                    unclear_ns = max(unclear_ns, waits_ns[n])
                    waits_ns[n] = 0
                for n in group.known:
                    waits_ns[n] = 0
                for at, first, end in phases:
                    spent_ns[i][at] += sum(waits_ns[first:end])
        bubble_ns = [0] * len(facts)
        for i, receives in plan.receives.items():
            for phase, wait_ns in _waits_in(receives, plan.each[i], at_ns, at_ns[i]):
                bubble_ns[i] += wait_ns
                if phase in _INDEX:
                    spent_ns[i][_INDEX[phase]] += wait_ns
        self._last.append(_Step(plan, facts, self._ahead_ns, at_ns, lasts_ns))
        return Taken(
            list(map(_without, facts, spent_ns)),
            plan.stages,
            bubble_ns,
            unclear_ns / facts[0].took_ns,
            any(bubble_ns) or any(group.may_hide for group in plan.groups),
        )

    def where(self, late: Sequence[int]) -> str:
        """In which calls the others first wait for these ranks; empty where that is not known.

        That is where what they need longer than ranks of their stage comes out. In later calls they
        are as late, and so is each rank that has waited for them.
        """
        found: Counter[Call] = Counter()
        for step in self._last:
            plan = step.plan
            for i in late[: limits.CALLS_ALIKE]:
                several = [i, *plan.alike(i, late)[: limits.CALLS_ALIKE]]
                works_ns = [step.works_ns(at) for at in several]
                found.update(_more_before(plan.each[i], plan.passed(i), works_ns))
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
        groups = self._last[-1].plan.groups
        members = next((each.members for each in groups if each.calls[0].group == call.group), [])
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
                plan = _Plan(facts, self._numbers)
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


def _waits_in(
    receives: Sequence[_Receive],
    each: _Each,
    at_ns: Sequence[Sequence[int]],
    own_ns: Sequence[int],
) -> Iterator[tuple[str, int]]:
    """The phases and lengths of the waits in these receives of one rank."""
    until_ns = 0
    for receive in receives:
        sent_ns = at_ns[receive.sender][receive.send]
        # A call that came before the send shows that the receive was waited for behind it.
        least_ns = sent_ns - limits.CALL_GRAIN_NS
        while receive.behind + 1 < len(own_ns) and own_ns[receive.behind + 1] < least_ns:
            receive.behind += 1
        since_ns = max(own_ns[receive.behind], until_ns)
        if sent_ns > since_ns:
            until_ns = sent_ns
            yield each[receive.behind].phase, sent_ns - since_ns


def _without(facts: StepFacts, spent_ns: Sequence[int]) -> StepFacts:
    """The step with these waits taken out of its phases."""
    # A phase that ends while a rank waits in it holds but a part of the wait.
    taken_ns = list(map(min, spent_ns, facts.phases_ns))
    return facts._replace(
        wait_ns=facts.wait_ns + sum(taken_ns),
        phases_ns=tuple(map(sub, facts.phases_ns, taken_ns)),
    )


def _more_before(each: _Each, passed: Set[int], works_ns: Sequence[Sequence[int]]) -> Counter[Call]:
    """What the first of these needed longer than the others, by the call that shows it.

    *passed*: the places of those in which nobody waits for it.
    """
    found: Counter[Call] = Counter()
    own_ns, *others_ns = works_ns
    if not others_ns or not each:
        return found
    more_ns = list(map(sub, own_ns, map(round, map(median, zip(*others_ns, strict=True)))))
    # What comes behind the last call shows in the first one of the next step.
    carried_ns = more_ns.pop()
    for at, (call, ns) in enumerate(zip(each, more_ns, strict=True)):
        carried_ns += ns
        if at not in passed:
            found[call] += max(carried_ns, 0)
            carried_ns = 0
    return found
