"""Corrects the steps of devices that wait for their own hosts.

The problem: if all hosts load or launch equally slowly, one host may happen to be ahead of its
device. That device always has work, and waits for the other devices, which idle in every step.
Their idle time would look like lateness. So a rank counts as late only by the time that its host
needs more than the other hosts.

Conversely, if several hosts are late, only the device of the latest host idles. The devices of the
other late hosts wait for it, so their own hosts' lateness does not show. Without the latest host
they would idle, so their ranks count as late as well.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from operator import add
from typing import NamedTuple

from otel_ddp.diagnosis.medians import excesses, median
from otel_ddp.diagnosis.step_facts import StepFacts
from otel_ddp.diagnosis.straggler import limits
from otel_ddp.diagnosis.straggler.phase_table import some_of
from otel_ddp.diagnosis.verdict import Labels
from otel_ddp.vocabulary.words import COMPUTE_PHASES, WORK_PHASES

_DATA = WORK_PHASES.index("data")
_OTHER = WORK_PHASES.index("other")
_COMPUTE = [WORK_PHASES.index(word) for word in COMPUTE_PHASES]


class _More(NamedTuple):
    """How much longer than the other hosts one host usually needs in a step."""

    # By phase. In `data`, the other loaders are assumed to be still as slow as their longest waits
    # have shown.
    needs_ns: list[float]
    # How much longer it would need in `data` in addition, if the other loaders have become faster
    # since.
    hidden_ns: float
    # Whether at least half of the other hosts need about as long as this one to launch a step.
    launches_alike: bool


class HostPace:
    """Corrects the measured steps of one run, where hosts make their devices wait."""

    def __init__(self) -> None:
        self._hosts: dict[Labels, HostNeed] = {}
        # The hosts of the compared ranks, in the order in which `adjusted` and `follow` get their
        # steps.
        self._compared: list[HostNeed] = []
        self.unclear = 0.0
        """EWMA of the unexplained idle time of devices, as a share of the step: no host is known to
        be slow, and the idle time is not known to be harmless."""

    def begin(self, labels: Labels, steps: Sequence[StepFacts]) -> None:
        """Learn from a rank's first steps as soon as they are read, before they are compared."""
        if steps and steps[0].host_ns is not None:
            self._hosts.setdefault(labels, HostNeed()).begin(steps)

    def forget(self, labels: Labels) -> None:
        self._hosts.pop(labels, None)

    def start_again(self, ranks: Sequence[Labels]) -> None:
        """Start over with these ranks; `adjusted` and `follow` must get steps in the same order."""
        self._compared = [self._hosts.setdefault(labels, HostNeed()) for labels in ranks]
        self.unclear = 0.0

    def adjusted(self, facts: Sequence[StepFacts]) -> Sequence[StepFacts]:
        """The corrected step: idle time that makes no rank late becomes waiting, and lateness that
        a later rank hides becomes work."""
        if not self.follow(facts):
            return facts
        # Idle time is the time beyond the fastest rank's. Measured from the median of the others,
        # two idle ranks of three would each show only half of their idle time.
        least_ns = list(map(min, zip(*[each.phases_ns for each in facts], strict=True)))
        idle_ns = [_idle_ns(each, least_ns) for each in facts]
        if not any(map(any, idle_ns)):
            self.unclear -= limits.PACE_FORGETS * self.unclear
            return facts
        hosts = _Hosts(self._compared, facts[0].took_ns)
        late_ns = _late_ns(facts, [sum(each) for each in idle_ns], hosts)
        pairs = [
            _adjusted(each, idle_ns[i], late_ns[i], hosts.more(i)) if i in late_ns else (each, 0.0)
            for i, each in enumerate(facts)
        ]
        most = max(unclear_ns / each.took_ns for each, unclear_ns in pairs)
        self.unclear += limits.PACE_FORGETS * (most - self.unclear)
        return [each for each, _ in pairs]

    def follow(self, facts: Sequence[StepFacts]) -> bool:
        """Learn the usual times of hosts from this step. Returns False if some rank has no device
        clock."""
        if any(each.host_ns is None for each in facts):
            return False
        for host, each in zip(self._compared, facts, strict=True):
            host.follow(each)
        return True


class _Hosts:
    """Compares how long the hosts of all ranks usually need, in a step that takes *step_ns*."""

    def __init__(self, needs: Sequence[HostNeed], step_ns: int) -> None:
        self._needs = needs
        wait = any(each.waits for each in needs)
        usual_ns = [each.usual_ns(wait) for each in needs]
        self._more: dict[int, _More] = {}
        # By rank, then by phase: how much longer the rank's host needs than the other hosts.
        by_phase = [excesses([each[at] for each in usual_ns]) for at in range(len(WORK_PHASES))]
        self._more_ns = list(zip(*by_phase, strict=True))
        self._least_ns = step_ns / limits.PACE_SMALL
        self._launches_ns = [each.launches.usual_ns(step_ns) for each in needs]
        self._ordered_ns, self._some = sorted(self._launches_ns), some_of(len(needs))

    def more(self, i: int) -> _More:
        """How much longer the host of rank *i* needs than the other hosts."""
        if i not in self._more:
            self._more[i] = self._find_more(i)
        return self._more[i]

    def _find_more(self, i: int) -> _More:
        host = self._needs[i]
        needs_ns = [ns if ns > self._least_ns else 0.0 for ns in self._more_ns[i]]
        loads_ns = [self._needs[at].loads_ns(host) for at in self._some if at != i]
        for_sure_ns = min(host.waits_ns - median(loads_ns), self._more_ns[i][_DATA])
        hidden_ns = min(needs_ns[_DATA], needs_ns[_DATA] - for_sure_ns)
        needs_ns[_DATA] = for_sure_ns if for_sure_ns > self._least_ns else 0.0
        return _More(needs_ns, hidden_ns, _are_alike(self._launches_ns[i], self._ordered_ns))

    def lacks_ns(self, latest: int) -> list[float]:
        """How much less time each host needs than the host of rank *latest*, summed over the phases
        in which that host is late."""
        needs_ns = [(at, ns) for at, ns in enumerate(self.more(latest).needs_ns) if ns]
        return [
            sum([max(ns - more_ns[at], 0.0) for at, ns in needs_ns]) for more_ns in self._more_ns
        ]


def _are_alike(own_ns: float, ordered_ns: Sequence[float]) -> bool:
    """Whether at least half of the other hosts need as long as this one; 0 means unknown.

    *ordered_ns*: the sorted times of all hosts, including this one.
    """
    others = len(ordered_ns) - 1
    as_long = others - bisect_left(ordered_ns, limits.PACE_ALIKE * own_ns) if own_ns > 0 else 0
    return 2 * as_long >= others


def _idle_ns(facts: StepFacts, least_ns: Sequence[int]) -> list[int]:
    """By phase: how long the device idled. If its host held it up for most of the phase, that is
    the time beyond the fastest rank's; else 0."""
    paced_ns = facts.paced_ns or (0,) * len(WORK_PHASES)
    return [
        took - least if 2 * paced > took else 0
        for least, paced, took in zip(least_ns, paced_ns, facts.phases_ns, strict=True)
    ]


def _late_ns(facts: Sequence[StepFacts], idle_ns: Sequence[int], hosts: _Hosts) -> dict[int, float]:
    """By rank: how late its host makes it, for each rank whose device idles, or would idle if it
    did not wait for an even later rank."""
    found = {i: min(ns, sum(hosts.more(i).needs_ns)) for i, ns in enumerate(idle_ns) if ns}
    latest = max(found, key=found.__getitem__)
    latest_ns = found[latest]
    for i, lacks_ns in enumerate(hosts.lacks_ns(latest)):
        if lacks_ns < latest_ns:
            waited_ns = facts[i].wait_ns - facts[latest].wait_ns
            ns = min(latest_ns, idle_ns[i] + waited_ns) - lacks_ns
            found[i] = max(found.get(i, 0.0), min(ns, sum(hosts.more(i).needs_ns)))
    return found


def _adjusted(
    facts: StepFacts, idle_ns: list[int], late_ns: float, more: _More
) -> tuple[StepFacts, float]:
    """The corrected step of one rank, and how much of the time moved from work to waiting is
    unexplained."""
    share = late_ns / sum(more.needs_ns) if late_ns else 0.0
    # Add the lateness to the phases in which the host is late. The device may idle in a later
    # phase, which is not the one to blame.
    kept_ns = [round(share * ns) - idle for ns, idle in zip(more.needs_ns, idle_ns, strict=True)]
    found = facts._replace(
        phases_ns=tuple(map(add, facts.phases_ns, kept_ns)),
        paced_ns=tuple(map(add, facts.paced_ns or idle_ns, kept_ns)),
        wait_ns=facts.wait_ns - sum(kept_ns),
    )
    clear_ns = max(idle_ns[_DATA] - more.hidden_ns, 0)
    if more.launches_alike:
        clear_ns += sum(map(idle_ns.__getitem__, _COMPUTE))
    return found, max(-sum(kept_ns) - clear_ns, 0.0)


# -- the time that a host needs


class HostNeed:
    """Learns how long one rank's host usually needs in each phase."""

    def __init__(self) -> None:
        self._first_ns: list[tuple[int, ...]] = []
        self._last_first = 0
        self._usual_ns = [0.0] * len(WORK_PHASES)
        # By phase: how many steps in a row were outliers, and the shortest of these outliers.
        self._far = [(0, 0)] * len(WORK_PHASES)
        # The usual time in the phase `other`, if the host did not wait for its device there.
        self._alone_ns = 0.0
        self._steps = 0
        # EWMA of the waits for batches. `_shown_ns` has the maximum of this EWMA in the present and
        # in the previous block of NEED_SHOWN_STEPS steps.
        self._load_ns = 0.0
        self._shown_ns = [0.0, 0.0]
        self._shown_first_ns = 0.0
        # For the last gaps between steps: how long the gap took, and how far the device lagged
        # behind the host when it began.
        self._between_ns: deque[tuple[int, int]] = deque(maxlen=limits.NEED_WAITS_STEPS)
        self.waits: bool | None = None
        """Whether the host waits for its device between steps; None if unknown yet."""
        self.launches = LaunchNeed()

    def begin(self, steps: Sequence[StepFacts]) -> None:
        """Learn from the first steps of this rank as soon as they are read."""
        for facts in steps[: limits.NEED_BEGINS - len(self._first_ns)]:
            if facts.host_ns is None:
                continue
            self._first_ns.append(facts.host_ns)
            self.launches.follow(facts)
            self._last_first = facts.number
            self._usual_ns = [median(each) for each in zip(*self._first_ns, strict=True)]
            self._alone_ns = self._usual_ns[_OTHER]
            self._load_ns = self._shown_ns[0] = self._usual_ns[_DATA]
            loads_ns = sorted([each[_DATA] for each in self._first_ns])
            self._shown_first_ns = loads_ns[-min(limits.NEED_SHOWN_IN, len(loads_ns))]

    def follow(self, facts: StepFacts) -> None:
        """Learn from a step that is compared."""
        if facts.number <= self._last_first:
            return
        self.launches.follow(facts)
        needed_ns = facts.host_ns or ()
        usual_ns = self._usual_ns
        for at, ns in enumerate(needed_ns):
            most_ns = limits.NEED_FAR * usual_ns[at] + 1
            usual_ns[at] += limits.NEED_FOLLOWS * (min(ns, most_ns) - usual_ns[at])
            if ns > most_ns:
                self._go_far(at, ns)
            elif self._far[at][0]:
                self._far[at] = (0, 0)
        self._steps += 1
        if self._steps % limits.NEED_SHOWN_STEPS == 0:
            self._shown_ns = [0.0, self._shown_ns[0]]
            self._shown_first_ns = 0.0
        most_ns = limits.NEED_FAR * self._load_ns + 1
        self._load_ns += limits.NEED_SHOWS * (min(needed_ns[_DATA], most_ns) - self._load_ns)
        self._shown_ns[0] = max(self._shown_ns[0], self._load_ns)
        if facts.behind_ns is None:
            return
        took_ns, behind_ns = needed_ns[_OTHER], facts.behind_ns
        alone_ns = max(took_ns - behind_ns, 0)
        self._alone_ns += limits.NEED_FOLLOWS * (
            min(alone_ns, limits.NEED_FAR * self._alone_ns + 1) - self._alone_ns
        )
        self._between_ns.append((took_ns, behind_ns))
        if self._steps % limits.NEED_CHECK_EVERY == 0:
            self.waits = _waits(self._between_ns, self.waits)

    def _go_far(self, at: int, ns: int) -> None:
        many, least_ns = self._far[at]
        many, least_ns = many + 1, min(ns, least_ns) if many else ns
        if many == limits.NEED_STAYS:
            self._usual_ns[at] = max(self._usual_ns[at], least_ns)
            many = 0
        self._far[at] = (many, least_ns)

    def usual_ns(self, others_wait: bool) -> list[float]:
        """The host's usual time by phase, without waits for its device between steps.

        *others_wait*: whether other hosts wait for their devices there. A host of which that is not
        known is assumed to wait too: most likely it runs the same program.
        """
        if self.waits is False or not (self.waits or others_wait):
            return self._usual_ns
        return [self._alone_ns if at == _OTHER else ns for at, ns in enumerate(self._usual_ns)]

    def loads_ns(self, rank: HostNeed) -> float:
        """How long this host's loader may take for a batch.

        While batches are ready before the host asks, that time does not show. Then it is taken as
        the longest wait so far; or, if that is longer, but at most twice as long, as the usual wait
        for *rank*'s loader.
        """
        usual_ns, shown_ns, theirs_ns = self._usual_ns[_DATA], max(self._shown_ns), rank.waits_ns
        # Ignore slow first batches of this loader if *rank*'s first batches were slow too: such a
        # start says nothing about later batches.
        starts_slowly = rank._shown_first_ns > limits.NEED_STARTS_SLOWLY * theirs_ns
        most_ns = max(shown_ns, 0 if starts_slowly else self._shown_first_ns)
        if usual_ns < limits.NEED_READY * most_ns:
            return max(most_ns, theirs_ns) if 2 * most_ns >= theirs_ns else most_ns
        return shown_ns if usual_ns < limits.NEED_AHEAD * shown_ns else usual_ns

    @property
    def waits_ns(self) -> float:
        """How long the host usually waits for a batch, i.e. its usual time in `data`."""
        return self._usual_ns[_DATA]


def _waits(between_ns: deque[tuple[int, int]], before: bool | None) -> bool | None:
    """Whether the host waits for its device between steps, as `.item()` does; *before* if unclear.

    If it waits, the device has caught up when the gap between steps ends, and the gap is longer by
    what the device lagged behind. Without a wait, the gap does not depend on the lag.
    """
    if len(between_ns) < limits.NEED_WAITS_STEPS:
        return before
    missed = sum(
        took < behind - behind // limits.NEED_DONE_PART - limits.NEED_TICK_NS
        for took, behind in between_ns
    )
    if missed > limits.NEED_ODD * len(between_ns):
        return False
    with_wait_ns = _spread_ns([took for took, _ in between_ns])
    alone_ns = _spread_ns([took - behind for took, behind in between_ns])
    if max(with_wait_ns, alone_ns) < limits.NEED_TICK_NS:
        # If the gaps hardly vary, with and without the lag, they don't show whether the host waits.
        return before
    if alone_ns < limits.NEED_CLEARLY_LESS * with_wait_ns:
        return True
    return before if alone_ns < with_wait_ns else False


def _spread_ns(values: list[int]) -> float:
    center = median(values)
    far = sorted([abs(each - center) for each in values])
    ordinary = far[: len(far) - round(limits.NEED_ODD * len(far))]
    return sum(ordinary) / len(ordinary)


class LaunchNeed:
    """Learns how long one rank's host needs to launch a step.

    The time shows only in steps in which the host is not ahead of its device, as in the first steps
    or after a pause. In others, the full launch queue blocks the host, which makes it longer.
    """

    def __init__(self) -> None:
        self._steps = 0
        # For each step in which the launch time showed: the number of the step, and that time.
        self._shown: deque[tuple[int, int]] = deque(maxlen=limits.LAUNCH_MOST)

    def follow(self, facts: StepFacts) -> None:
        if facts.paced_ns is None or facts.host_ns is None:
            return
        self._steps += 1
        took_ns = sum(map(facts.phases_ns.__getitem__, _COMPUTE))
        if 0 < limits.LAUNCH_KEEPS_UP * took_ns <= sum(map(facts.paced_ns.__getitem__, _COMPUTE)):
            self._shown.append((self._steps, sum(map(facts.host_ns.__getitem__, _COMPUTE))))

    def usual_ns(self, step_ns: float) -> float:
        """The usual launch time; 0 if it is unknown, or outdated because a step takes only
        *step_ns*."""
        while self._shown and self._steps - self._shown[0][0] > limits.LAUNCH_SHOWN_STEPS:
            self._shown.popleft()
        if len(self._shown) < limits.LAUNCH_FEWEST:
            return 0.0
        usual_ns = median([ns for _, ns in self._shown])
        return usual_ns if usual_ns <= limits.LAUNCH_OUTDATED * step_ns else 0.0
