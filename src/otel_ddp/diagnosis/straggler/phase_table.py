"""What each rank needed in each phase, and what that says: which phase, or unequal work."""

from __future__ import annotations

from collections.abc import Sequence
from operator import sub

from otel_ddp.diagnosis.medians import excesses, median, without
from otel_ddp.diagnosis.step_facts import StepFacts
from otel_ddp.diagnosis.straggler import limits
from otel_ddp.diagnosis.straggler.alignment import Row
from otel_ddp.vocabulary.words import COMPUTE_PHASES, WORK_PHASES, Kind

# How a step begins. Of these phases it is known how far the device is behind its host.
_ORDER = [WORK_PHASES.index(word) for word in ("other", "data", "forward", "backward")]
# Which of them a verdict speaks of: from the first one up to the second.
_WINDOWS = {"data": (1, 2), "forward": (2, 3), "backward": (3, 4), "compute": (2, 4)}


def _host(steps: Sequence[StepFacts], first: int, last: int) -> tuple[float, float, float] | None:
    """Of these phases of _ORDER: how far the device was behind its host at their beginning, how
    long they took the host, and how far the device was behind at their end."""
    found = []
    for facts in steps:
        if facts.host_ns is None or facts.behind_ns is None:
            continue
        more_ns = [facts.phases_ns[at] - facts.host_ns[at] for at in _ORDER]
        began_ns = facts.behind_ns + sum(more_ns[:first])
        took_ns = sum([facts.host_ns[at] for at in _ORDER[first:last]])
        found.append((began_ns, took_ns, began_ns + sum(more_ns[first:last])))
    if not found:
        return None
    began, took, left = map(median, zip(*found, strict=True))
    return began, took, left


class PhaseTable:
    """Medians over some steps, of each rank, in seconds."""

    def __init__(
        self, rows: Sequence[Row], left_out: tuple[int, ...], *, compute_apart: bool = True
    ) -> None:
        """*left_out*: indices into WORK_PHASES, of the phases that cannot be compared.

        *compute_apart*: a late forward can be told from a late backward.
        """
        self._compute_apart = compute_apart
        by_rank = list(zip(*[row.facts for row in rows], strict=True))
        self.work_s: list[float] = []
        # Of each rank whose device's clock is known: how long it kept up with the host.
        self._paced_s: list[dict[str, float] | None] = []
        self._by_rank = by_rank
        self.left_out_s = 0.0
        """Time in the phases that are left out, of the rank that has the most there."""
        self._phases_s: dict[str, list[float]] = {word: [] for word in WORK_PHASES}
        for steps in by_rank:
            work_ns = [each.work_ns for each in steps]
            columns = list(zip(*[each.phases_ns for each in steps], strict=True))
            for needed_s, column in zip(self._phases_s.values(), columns, strict=True):
                needed_s.append(median(column) / 1e9)
            if left_out:
                left_out_ns = list(map(sum, zip(*[columns[at] for at in left_out], strict=True)))
                self.left_out_s = max(self.left_out_s, median(left_out_ns) / 1e9)
                work_ns = list(map(sub, work_ns, left_out_ns))
            self.work_s.append(median(work_ns) / 1e9)
            paced_ns = [each.paced_ns for each in steps if each.paced_ns is not None]
            self._paced_s.append(
                {
                    word: median(column) / 1e9
                    for word, column in zip(WORK_PHASES, zip(*paced_ns, strict=True), strict=True)
                }
                if paced_ns
                else None
            )
        for at in left_out:
            del self._phases_s[WORK_PHASES[at]]
        self._excesses_s = {word: excesses(each) for word, each in self._phases_s.items()}
        self._amount = [sum([each.work for each in steps]) for steps in by_rank]
        self.step_s = median([each.took_ns for each in by_rank[0]]) / 1e9

    def excess_by_phase(self, i: int) -> dict[str, float]:
        """Seconds that rank *i* needs more than the others, in each compared phase."""
        return {word: excesses_s[i] for word, excesses_s in self._excesses_s.items()}

    def more_to_do(self, i: int) -> float:
        """How many more tokens or samples rank *i* has, as a share of what the others have."""
        others = median(without(self._amount, i))
        return self._amount[i] / others - 1 if others > 0 else 0.0

    def side(self, i: int, phase: str) -> str:
        """Whether rank *i* is late in this phase on its `device`, or since its `host` is.

        A device that waits for its host keeps up with it for longer than those of the others, by
        most of the excess. Where that does not show it, what was in line may: see _side_by_lag.
        Empty where the device's clock is not known.
        """
        paced_s = self._paced_s[i]
        if paced_s is None:
            return ""
        compared = self._phases_s.keys()
        words = compared if phase == "mixed" else COMPUTE_PHASES if phase == "compute" else {phase}
        others = [each for at, each in enumerate(self._paced_s) if at != i and each is not None]
        late_s = waits_s = 0.0
        for word in compared & set(words):
            late_s += self._excesses_s[word][i]
            waits_s += paced_s[word] - (median([each[word] for each in others]) if others else 0.0)
        if waits_s > late_s / 2:
            return "host"
        return self._side_by_lag(i, phase, late_s * 1e9)

    def _side_by_lag(self, i: int, phase: str, late_ns: float) -> str:
        """The side of a rank whose device had work left at the end of the phase.

        Where its host is late in it by most of the excess, the device may have waited for launches.
        But a host may also be late since its launch queue is full: then its device, which is
        slower, has at least as much left as those of the others.
        """
        first, last = _WINDOWS.get(phase, (0, 0))
        if first == last:
            return "device"
        hosts = [_host(steps, first, last) for steps in self._by_rank]
        if None in hosts:
            return "device"
        known = [each for each in hosts if each is not None]
        began_ns, took_ns, left_ns = known[i]
        others = [each for at, each in enumerate(known) if at != i]
        if took_ns - median([each[1] for each in others]) < late_ns / 2:
            return "device"
        if phase == "data" and began_ns <= late_ns / 2:
            # No queue holds up a host that waits for a batch. What is left is the batch's copy.
            return "host"
        share = left_ns / (median([each[2] for each in others]) + limits.PHASE_TICK_NS)
        at_most, perhaps = (
            limits.PHASE_AFTER_NOTHING if began_ns <= late_ns / 2 else limits.PHASE_AFTER_MORE
        )
        return "host" if share <= at_most else "unclear" if share <= perhaps else "device"

    def kind_and_phase(
        self, i: int, excess_s: float, before: tuple[Kind, str] | None = None
    ) -> tuple[Kind, str]:
        """What the lateness of rank *i* is, and the phase that holds most of it.

        *before*: the answer that stands. It takes more to change it, so it does not flap.
        """
        others_s = {word: median(without(needed, i)) for word, needed in self._phases_s.items()}
        phase = self._phase(i, excess_s, others_s, before[1] if before else "")
        compute_s = sum(others_s.get(word, 0.0) for word in ("forward", "backward"))
        if phase in ("forward", "backward", "compute"):
            explained_s = self.more_to_do(i) * compute_s
            least = limits.PHASE_MOST_OF + _against(before and before[0], "imbalance")
            if explained_s >= least * excess_s:
                return "imbalance", phase
        return "straggler", phase

    def _phase(self, i: int, excess_s: float, others_s: dict[str, float], before: str) -> str:
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
        if not self._compute_apart:
            return "compute"
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
