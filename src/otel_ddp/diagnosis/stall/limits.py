"""Learns from a rank's own steps and phases how long it may stand still before it is stalled."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from otel_ddp.diagnosis.stall.evidence import Evidence, Frame, Position
from otel_ddp.vocabulary.words import UNUSUAL_PHASES

# The limit is 10 times the p99 step, or 3 times the longest stretch of the phase; or 1.5 times
# what the user has announced.
_STEPS, _STRETCHES, _ANNOUNCED = 10.0, 3.0, 1.5
# In these phases, and before the first step, a rank may stand still for LONG times as long.
LONG = 10.0
# The steps that p99 is taken of, and how often it is taken.
_REMEMBERED, _UPDATE_EVERY = 1000, 50
# In these phases no hook shows progress; what the rank logs does.
UNHOOKED = frozenset({"other", "eval", "checkpoint", "unmeasured"})


class RankMovement:
    """When one rank last moved, and how long its steps and phases have taken so far."""

    def __init__(self) -> None:
        self.position: Position | None = None
        # When it was first seen in its phase, when it last moved, and when it was last polled.
        self.entered_ns = self.moved_ns = self.polled_ns = 0
        self.steps = array("d")
        self.seen_steps = self.counted_steps = 0
        self.longest_step_s = self.p99_s = 0.0
        self.longest_s: dict[str, float] = {}
        self.numbers: tuple[tuple[str, int | None], ...] = ()
        self.stack: tuple[Frame, ...] = ()
        # Whether its program moves where no hook sees it: in an evaluation, for example.
        self.moves_unhooked = False
        self.not_learnt_before_ns = 0

    def limit_s(self, floor_s: float) -> float:
        """How long the rank may stand still where it is now."""
        position = self.position
        assert position is not None
        if position.expect_s is not None:
            return max(floor_s, _ANNOUNCED * position.expect_s)
        patience = LONG if position.phase in UNUSUAL_PHASES or self._at_start() else 1.0
        usual_s = _STEPS * self.longest_step_s
        return max(
            patience * floor_s,
            # p99 takes a sort, so it is only computed where it can matter.
            _STEPS * self._p99_s() if usual_s > patience * floor_s else 0.0,
            _STRETCHES * self.longest_s.get(position.phase, 0.0),
        )

    def _at_start(self) -> bool:
        """Until the first step is over, models are loaded, and kernels are chosen and compiled."""
        return self.position is not None and self.position.step is None and not self.seen_steps

    def succeeded_by(self, position: Position) -> bool:
        """Whether this position is of a new process that has the labels of one that ended."""
        return position.alive and self.position is not None and not self.position.alive

    def update(self, position: Position, now_ns: int) -> None:
        """The rank is at this position now."""
        before = self.position
        self.position = position
        if before is None:
            self.entered_ns = self.moved_ns = min(position.since_ns, now_ns)
        elif (before.step, before.phase, before.since_ns) != (
            *(position.step, position.phase, position.since_ns),
        ):
            self.learn_stretch(before.phase, self.entered_ns, self.polled_ns)
            # By the agent's clock: the clock of the process may have been set since.
            self.entered_ns = self.moved_ns = now_ns
            self.numbers, self.stack, self.moves_unhooked = (), (), False
        elif position.phase in UNHOOKED and position.written != before.written:
            self.moved_ns = now_ns
        self.polled_ns = now_ns

    def pause(self, spent_ns: int) -> None:
        """The agent was paused for so long, and the rank may have been paused too."""
        self.entered_ns += spent_ns
        self.moved_ns += spent_ns

    def learn_stretch(self, phase: str, began_ns: int, ended_ns: int) -> None:
        """The rank was in this phase for so long, and went on.

        Waits are not learnt: other ranks make them long.
        """
        if phase != "comm_wait" and began_ns >= self.not_learnt_before_ns:
            spent_s = (ended_ns - began_ns) / 1e9
            self.longest_s[phase] = max(spent_s, self.longest_s.get(phase, 0.0))

    def learn_steps(self, steps_s: Sequence[float]) -> None:
        """The rank made steps that took so long."""
        self.steps.extend(steps_s)
        del self.steps[:-_REMEMBERED]
        self.seen_steps += len(steps_s)
        self.longest_step_s = max(self.longest_step_s, *steps_s)

    def _p99_s(self) -> float:
        fresh = self.seen_steps - self.counted_steps
        if fresh >= _UPDATE_EVERY or (fresh and self.counted_steps < 10):
            self.counted_steps = self.seen_steps
            ordered = sorted(self.steps)
            self.p99_s = ordered[int(0.99 * (len(ordered) - 1))]
        return self.p99_s

    def answered(self, known: Evidence) -> Evidence:
        """Take in what the rank has answered; without what it answered before it last moved."""
        if known.answered and known.answered_ns > self.moved_ns:
            # A rank that puts more collectives in line moves, though no hook sees it.
            numbers = tuple((each.name, each.enqueued) for each in known.groups)
            if self.numbers and self.numbers != numbers:
                self.moved_ns = known.answered_ns
            self.numbers = numbers
        if not known.answered or known.answered_ns <= self.moved_ns:
            return Evidence(silent_s=known.silent_s, kernel=known.kernel)
        # Where no hook shows progress, another stack does.
        if known.stack and self.position is not None and self.position.phase in UNHOOKED:
            self.moves_unhooked |= bool(self.stack) and self.stack != known.stack
            self.stack = known.stack
        return known

    def still_s(self, now_ns: int) -> float:
        """For how long the rank has not moved."""
        return max(0.0, (now_ns - self.moved_ns) / 1e9)
