"""Tabulates the time of ranks or nodes by phase; finds their late phases, and unequal work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from otel_ddp.diagnosis.medians import median
from otel_ddp.diagnosis.straggler import limits
from otel_ddp.diagnosis.straggler.window import Compared, Unit, by_stage
from otel_ddp.vocabulary.words import COMPUTE_PHASES, WORK_PHASES, Kind

# The phases with which a step begins, in this order; `_behind_s` adds up the lag over them.
_FIRST_PHASES = ("other", "data", "forward")


class _Need(NamedTuple):
    """The time that a rank or node needs in a step: medians over steps, and over a node's ranks."""

    work_s: float
    phases_s: tuple[float, ...]
    # By phase: how long the host held the device up; None without a device clock.
    paced_s: tuple[float, ...] | None
    # The number of tokens or samples.
    amount: float

    @classmethod
    def of(cls, steps: Sequence[Compared], rank: int) -> _Need:
        paced_ns = [each.paced_ns for each in steps if each.paced_ns is not None]
        return cls(
            median([each.works_ns[rank] for each in steps]) / 1e9,
            _medians_s([each.phases_ns for each in steps], rank),
            _medians_s(paced_ns, rank) if paced_ns else None,
            sum([each.amounts[rank] for each in steps]),
        )

    @classmethod
    def of_several(cls, needs: Sequence[_Need]) -> _Need:
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
    """The time that units (ranks or nodes) needed in each phase of some steps, computed lazily."""

    def __init__(
        self,
        steps: Sequence[Compared],
        units: Sequence[Unit],
        left_out: Sequence[int],
    ) -> None:
        """*left_out*: excluded phases, as indices into WORK_PHASES."""
        self._steps = steps
        self._units = units
        self._left_out = left_out
        self._words = [word for at, word in enumerate(WORK_PHASES) if at not in left_out]
        self._needs: dict[int, _Need] = {}
        # By pipeline stage: the sample of ranks or nodes from which the usual time is estimated.
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

    def _usual_need(self, i: int) -> _Need:
        """The median needs of the units other than *i*."""
        key = self._units[i].stage, i if i in self._sample(i) else None
        if key not in self._usual:
            self._usual[key] = _Need.of_several([self._need(at) for at in self._others(i)])
        return self._usual[key]

    def work_s(self, i: int) -> float:
        """The time that unit *i* works in a step."""
        return self._need(i).work_s

    def others_work_s(self, i: int) -> list[float]:
        """How long the other units, or a sample of them, work in a step."""
        return [self._need(at).work_s for at in self._others(i)]

    def left_out_s(self) -> float:
        """How long a rank spends in excluded phases per step: the maximum over all ranks."""
        left_out_ns = [
            median([sum([each.phases_ns[at][i] for at in self._left_out]) for each in self._steps])
            for i in range(len(self._steps[0].works_ns))
            if self._left_out
        ]
        return max(left_out_ns, default=0.0) / 1e9

    def excess_by_phase(self, i: int) -> dict[str, float]:
        """The excess of unit *i* in each compared phase."""
        own_s, usual_s = self._phases_s(self._need(i)), self._phases_s(self._usual_need(i))
        return {word: own_s[word] - usual_s[word] for word in self._words}

    def _phases_s(self, need: _Need) -> Mapping[str, float]:
        found = dict(zip(WORK_PHASES, need.phases_s, strict=True))
        return {word: found[word] for word in self._words}

    def more_to_do(self, i: int) -> float:
        """How many more tokens or samples unit *i* has, as a share of the others'."""
        others = self._usual_need(i).amount
        return self._need(i).amount / others - 1 if others > 0 else 0.0

    def side(self, i: int, phase: str) -> str:
        """What makes unit *i* late in this phase, `host` or `device`; empty without a device clock.

        It is the host if the device was held up by it for most of the excess. In data and forward,
        it is also the host if the device had little work queued when the phase began or ended: a
        slow device lags behind its host at least as far as other devices do.
        """
        paced_s = self._need(i).paced_s
        if paced_s is None:
            return ""
        usual_s = self._usual_need(i).paced_s or (0.0,) * len(WORK_PHASES)
        words = COMPUTE_PHASES if phase == "compute" else {phase}
        late_s = waits_s = 0.0
        excesses_s = self.excess_by_phase(i)
        for word, excess_s in excesses_s.items():
            if phase == "mixed" or word in words:
                at = WORK_PHASES.index(word)
                late_s += excess_s
                waits_s += paced_s[at] - usual_s[at]
        if waits_s > late_s / 2:
            return "host"
        if phase in ("compute", "mixed"):
            phase = max(excesses_s, key=excesses_s.__getitem__)
        if phase not in ("data", "forward"):
            return "device"
        at = _FIRST_PHASES.index(phase)
        began_s, left_s = self._behind_s(i, at), self._behind_s(i, at + 1)
        others_s = [self._behind_s(j, at + 1) for j in self._others(i)]
        known_s = [each_s for each_s in others_s if each_s is not None]
        if began_s is None or left_s is None or not known_s:
            return "device"
        few_s = limits.SIDE_FEW * median(known_s)
        most_s = median(known_s) + limits.SIDE_MORE * late_s
        return "host" if min(began_s, left_s) <= few_s and left_s <= most_s else "device"

    def _behind_s(self, i: int, phases: int) -> float | None:
        """How far the devices of unit *i* lag behind their hosts after the first *phases* phases of
        a step."""
        at = [WORK_PHASES.index(word) for word in _FIRST_PHASES[:phases]]
        each_ns = [
            behind_ns + sum([step.phases_ns[j][rank] - step.host_ns[j][rank] for j in at])
            for step in self._steps
            for rank in self._units[i].members
            if step.host_ns is not None and (behind_ns := step.behind_ns[rank]) is not None
        ]
        return median(each_ns) / 1e9 if each_ns else None

    def kind_and_phase(
        self, i: int, excess_s: float, before: tuple[Kind, str] | None = None
    ) -> tuple[Kind, str]:
        """The kind of verdict on unit *i*, and the phase with most of its excess.

        *before*: kind and phase of the open verdict, which are kept unless another one is clearly
        better.
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
        # If forward and backward are equally slow, the device itself is slow: name the phase
        # `compute`.
        other = "backward" if phase == "forward" else "forward"
        if others_s[phase] and others_s.get(other):
            slower, other_slower = excess[phase] / others_s[phase], excess[other] / others_s[other]
            if other_slower >= (limits.PHASE_ALIKE + _against(before, "compute")) * slower:
                return "compute"
        return phase


def _against(before: str | None, answer: str) -> float:
    """What to add to a threshold for hysteresis: more for a new *answer*, less for the present
    one."""
    if not before:
        return 0.0
    return -limits.PHASE_MARGIN if before == answer else limits.PHASE_MARGIN


def some_of(many: int) -> Sequence[int]:
    """The indices of all units, or of an evenly spaced sample if there are many."""
    if many <= limits.COMPARED_WITH:
        return range(many)
    return range(0, many, -(-many // limits.COMPARED_WITH))
