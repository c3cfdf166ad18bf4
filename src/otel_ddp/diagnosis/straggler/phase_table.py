"""What each rank or node needed in each phase, and what that says: which phase, or unequal work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from otel_ddp.diagnosis.medians import median
from otel_ddp.diagnosis.straggler import limits
from otel_ddp.diagnosis.straggler.window import Compared, Unit, by_stage
from otel_ddp.vocabulary.words import COMPUTE_PHASES, WORK_PHASES, Kind

# How a step begins. Of these phases it is known how far the device is behind its host.
_ORDER = [WORK_PHASES.index(word) for word in ("other", "data", "forward", "backward")]
# Which of them a verdict speaks of: from the first one up to the second.
_BEFORE_FORWARD = (0, 2)
_WINDOWS = {"data": (1, 2), "forward": (2, 3), "backward": (3, 4), "compute": (2, 4)}


class _Host(NamedTuple):
    """The host of a unit in some of the phases of _ORDER."""

    began_ns: float
    """How far the device was behind its host at their beginning."""
    took_ns: float
    """How long they took the host."""
    left_ns: float
    """How far the device was behind at their end."""


def _host(steps: Sequence[Compared], rank: int, first: int, last: int) -> _Host | None:
    found = []
    for each in steps:
        behind_ns = each.behind_ns[rank]
        if each.host_ns is None or behind_ns is None:
            continue
        more_ns = [each.phases_ns[at][rank] - each.host_ns[at][rank] for at in _ORDER]
        began_ns = behind_ns + sum(more_ns[:first])
        took_ns = sum([each.host_ns[at][rank] for at in _ORDER[first:last]])
        found.append((began_ns, took_ns, began_ns + sum(more_ns[first:last])))
    return _Host(*map(median, zip(*found, strict=True))) if found else None


class _Need(NamedTuple):
    """What a rank needed: medians over the steps. A node has the medians of its ranks."""

    work_s: float
    phases_s: tuple[float, ...]
    """In each of WORK_PHASES."""
    paced_s: tuple[float, ...] | None
    """Where the device's clock is known: how long it kept up with the host."""
    amount: float

    @classmethod
    def of(cls, steps: Sequence[Compared], rank: int) -> _Need:
        """That of a rank."""
        paced_ns = [each.paced_ns for each in steps if each.paced_ns is not None]
        return cls(
            median([each.works_ns[rank] for each in steps]) / 1e9,
            _medians_s([each.phases_ns for each in steps], rank),
            _medians_s(paced_ns, rank) if paced_ns else None,
            sum([each.amounts[rank] for each in steps]),
        )

    @classmethod
    def of_several(cls, needs: Sequence[_Need]) -> _Need:
        """That of a node."""
        if len(needs) == 1:
            return needs[0]
        paced_s = [each.paced_s for each in needs if each.paced_s is not None]
        return cls(
            median([each.work_s for each in needs]),
            _medians([each.phases_s for each in needs]),
            _medians(paced_s) if paced_s else None,
            median([each.amount for each in needs]),
        )


def _medians(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(map(median, zip(*rows, strict=True)))


def _medians_s(steps_ns: Sequence[Sequence[Sequence[int]]], rank: int) -> tuple[float, ...]:
    by_phase = zip(*steps_ns, strict=True)
    return tuple([median([each[rank] for each in columns]) / 1e9 for columns in by_phase])


class PhaseTable:
    """What units needed over some steps. Each is worked out when it is first asked for."""

    def __init__(
        self,
        steps: Sequence[Compared],
        units: Sequence[Unit],
        left_out: Sequence[int],
    ) -> None:
        """*left_out*: indices into WORK_PHASES, of the phases that cannot be compared."""
        self._steps = steps
        self._units = units
        self._left_out = left_out
        self._words = [word for at, word in enumerate(WORK_PHASES) if at not in left_out]
        self._needs: dict[int, _Need] = {}
        # Of thousands of units, some say what is usual as well as all.
        self._samples = {
            stage: [places[at] for at in some_of(len(places))]
            for stage, places in by_stage([unit.stage for unit in units]).items()
        }
        self._usual: dict[tuple[int, int | None], _Need] = {}
        self.step_s = median([each.took_ns for each in steps]) / 1e9

    def _need(self, i: int) -> _Need:
        if i not in self._needs:
            members = self._units[i].members
            self._needs[i] = _Need.of_several([_Need.of(self._steps, at) for at in members])
        return self._needs[i]

    def _sample(self, i: int) -> Sequence[int]:
        return self._samples[self._units[i].stage]

    def _others(self, i: int) -> list[int]:
        return [at for at in self._sample(i) if at != i]

    def is_alone(self, i: int) -> bool:
        """Whether unit *i* is like no other."""
        return not self._others(i)

    def _usual_need(self, i: int) -> _Need:
        """What the others than unit *i* usually need."""
        key = self._units[i].stage, i if i in self._sample(i) else None
        if key not in self._usual:
            self._usual[key] = _Need.of_several([self._need(at) for at in self._others(i)])
        return self._usual[key]

    def work_s(self, i: int) -> float:
        """What unit *i* works in a step."""
        return self._need(i).work_s

    def others_work_s(self, i: int) -> list[float]:
        """What the others work; of very many units, some of them."""
        return [self._need(at).work_s for at in self._others(i)]

    def left_out_s(self) -> float:
        """Time in the phases that are left out, of the rank that has the most there."""
        left_out_ns = [
            median([sum([each.phases_ns[at][i] for at in self._left_out]) for each in self._steps])
            for i in range(len(self._steps[0].works_ns))
            if self._left_out
        ]
        return max(left_out_ns, default=0.0) / 1e9

    def excess_by_phase(self, i: int) -> dict[str, float]:
        """Seconds that unit *i* needs more than the others, in each compared phase."""
        own_s, usual_s = self._phases_s(self._need(i)), self._phases_s(self._usual_need(i))
        return {word: own_s[word] - usual_s[word] for word in self._words}

    def _phases_s(self, need: _Need) -> Mapping[str, float]:
        found = dict(zip(WORK_PHASES, need.phases_s, strict=True))
        return {word: found[word] for word in self._words}

    def more_to_do(self, i: int) -> float:
        """How many more tokens or samples unit *i* has, as a share of what the others have."""
        others = self._usual_need(i).amount
        return self._need(i).amount / others - 1 if others > 0 else 0.0

    def side(self, i: int, phase: str) -> str:
        """Whether unit *i* is late in this phase on its `device`, or since its `host` is.

        A device that waits for its host keeps up with it for longer than those of the others, by
        most of the excess. Where that does not show it, what was in line may: see _side_by_lag.
        Empty where the device's clock is not known.
        """
        paced_s = self._need(i).paced_s
        if paced_s is None:
            return ""
        usual_s = self._usual_need(i).paced_s or (0.0,) * len(WORK_PHASES)
        words = COMPUTE_PHASES if phase == "compute" else {phase}
        late_s = waits_s = 0.0
        for word, excess_s in self.excess_by_phase(i).items():
            if phase == "mixed" or word in words:
                at = WORK_PHASES.index(word)
                late_s += excess_s
                waits_s += paced_s[at] - usual_s[at]
        if waits_s > late_s / 2:
            return "host"
        return self._side_by_lag(i, phase, late_s * 1e9)

    def waits_alone(self, i: int, phase: str) -> bool:
        """Whether the host of unit *i*, and no other, waits for its device before forward begins.

        Its device had work in line when the step began, and has none when forward does. So it idles
        until more is launched. A host that launches slowly has never much in line.
        """
        if self._main_phase(i, phase) not in ("forward", "compute"):
            return False
        hosts = self._hosts(i, *_BEFORE_FORWARD)
        if hosts is None:
            return False
        own, others = hosts
        late_s = self.excess_by_phase(i).get("forward", 0.0)
        least_ns = max(late_s * 1e9, limits.PHASE_TICK_NS)
        others_ns = median([each.left_ns for each in others])
        return own.left_ns < limits.PHASE_TICK_NS and min(own.began_ns, others_ns) > least_ns

    def _main_phase(self, i: int, phase: str) -> str:
        """The phase itself, or the one with the most of what is mixed."""
        excess_s = self.excess_by_phase(i)
        return max(excess_s, key=excess_s.__getitem__) if phase == "mixed" else phase

    def _side_by_lag(self, i: int, phase: str, late_ns: float) -> str:
        """The side of a unit whose devices had work left at the end of the phase.

        Where its host is late in it by most of the excess, the device may have waited for launches.
        But a host may also be late since its launch queue is full: then its device, which is
        slower, has at least as much left as those of the others.
        """
        phase = self._main_phase(i, phase)
        first, last = _WINDOWS.get(phase, (0, 0))
        if first == last:
            return "device"
        hosts = self._hosts(i, first, last)
        if hosts is None:
            return "device"
        (began_ns, took_ns, left_ns), known = hosts
        if self.waits_alone(i, phase) and 2 * took_ns >= late_ns:
            # Its device has idled for no longer than its host takes to launch the phase. But a slow
            # device is slow in all of them.
            return "host" if took_ns >= late_ns and phase != "compute" else "unclear"
        more_ns = took_ns - median([each.took_ns for each in known])
        share = left_ns / (median([each.left_ns for each in known]) + limits.PHASE_TICK_NS)
        if more_ns < late_ns / 2:
            # Hosts that are far ahead are held up by their queues, and look slower than they are. A
            # slow device would have as much in line as theirs.
            is_host = more_ns >= late_ns / 4 and share <= limits.PHASE_AFTER_MORE[0]
            return "host" if is_host else "device"
        if phase == "data" and began_ns <= late_ns / 2:
            # No queue holds up a host that waits for a batch. What is left is the batch's copy.
            return "host"
        at_most, perhaps = (
            limits.PHASE_AFTER_NOTHING if began_ns <= late_ns / 2 else limits.PHASE_AFTER_MORE
        )
        return "host" if share <= at_most else "unclear" if share <= perhaps else "device"

    def _hosts(self, i: int, first: int, last: int) -> tuple[_Host, list[_Host]] | None:
        """The hosts of unit *i* and of the others; None if not all are known."""
        own = self._unit_host(i, first, last)
        others = [self._unit_host(at, first, last) for at in self._others(i)]
        known = [each for each in others if each is not None]
        return (own, known) if own is not None and len(known) == len(others) else None

    def _unit_host(self, i: int, first: int, last: int) -> _Host | None:
        hosts = [_host(self._steps, at, first, last) for at in self._units[i].members]
        known = [each for each in hosts if each is not None]
        return _Host(*_medians(known)) if known and len(known) == len(hosts) else None

    def kind_and_phase(
        self, i: int, excess_s: float, before: tuple[Kind, str] | None = None
    ) -> tuple[Kind, str]:
        """What the lateness of unit *i* is, and the phase that holds most of it.

        *before*: the answer that stands. It takes more to change it, so it does not flap.
        """
        others_s = self._phases_s(self._usual_need(i))
        phase = self._phase(i, excess_s, others_s, before[1] if before else "")
        compute_s = sum(others_s.get(word, 0.0) for word in ("forward", "backward"))
        if phase in ("forward", "backward", "compute"):
            explained_s = self.more_to_do(i) * compute_s
            least = limits.PHASE_MOST_OF + _against(before and before[0], "imbalance")
            if explained_s >= least * excess_s:
                return "imbalance", phase
        return "straggler", phase

    def _phase(self, i: int, excess_s: float, others_s: Mapping[str, float], before: str) -> str:
        excess = self.excess_by_phase(i)
        phase = max(excess, key=lambda word: excess[word])
        if (
            before in excess
            and excess[before] >= (limits.PHASE_MOST_OF - limits.PHASE_MARGIN) * excess_s
        ):
            phase = before
        if excess[phase] < (limits.PHASE_MOST_OF + _against(before, phase)) * excess_s:
            together_s = sum(excess.get(word, 0.0) for word in COMPUTE_PHASES)
            least = limits.PHASE_MOST_OF + _against(before, "compute")
            return "compute" if together_s >= least * excess_s else "mixed"
        if phase not in ("forward", "backward"):
            return phase
        # A slow device is slow in both, and backward is most of it.
        other = "backward" if phase == "forward" else "forward"
        if others_s[phase] and others_s.get(other):
            slower, other_slower = excess[phase] / others_s[phase], excess[other] / others_s[other]
            if other_slower >= (limits.PHASE_ALIKE + _against(before, "compute")) * slower:
                return "compute"
        return phase


def _against(before: str | None, answer: str) -> float:
    """How much more it takes for an answer where another one stands, or less where it does."""
    if not before:
        return 0.0
    return -limits.PHASE_MARGIN if before == answer else limits.PHASE_MARGIN


def some_of(many: int) -> Sequence[int]:
    """The places of all units; of very many, of some that lie evenly among them."""
    if many <= limits.COMPARED_WITH:
        return range(many)
    return range(0, many, -(-many // limits.COMPARED_WITH))
