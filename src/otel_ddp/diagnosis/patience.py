"""How long one rank may stand still where it is, learnt from its own steps and phases."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from otel_ddp.diagnosis.evidence import Frame, Position

# 10 times the step that 99 of 100 are shorter than; 3 times the longest stretch of a phase.
_STEPS, _STRETCHES, _ANNOUNCED = 10.0, 3.0, 1.5
# Before the first step, and in these phases, a rank may be silent for so many times as long.
_LONG_PHASES = frozenset({"checkpoint", "eval", "compile"})
LONG = 10.0
# As many steps as p99 is taken of, and how often it is.
_REMEMBERED, _COUNT_EVERY = 1000, 50
# What is logged tells of progress where no hook does.
UNHOOKED = frozenset({"other", "eval", "checkpoint"})


class Rank:
    """What is remembered of one rank."""

    def __init__(self) -> None:
        self.position: Position | None = None
        # When it was first seen in its phase, last seen to move in it, and last seen there.
        self.entered_ns = self.moved_ns = self.looked_ns = 0
        self.steps: deque[float] = deque(maxlen=_REMEMBERED)
        self.seen_steps = self.counted_steps = 0
        self.longest_step_s = self.p99_s = 0.0
        self.longest_s: dict[str, float] = {}
        self.numbers: tuple[tuple[str, int | None], ...] = ()
        self.stack: tuple[Frame, ...] = ()
        # Whether its program was seen to go on though no hook saw it: an evaluation, say.
        self.wanders = False
        self.not_learnt_before_ns = 0

    def limit_s(self, floor_s: float) -> float:
        """How long it may stand still where it is now."""
        position = self.position
        assert position is not None
        if position.expect_s is not None:
            return max(floor_s, _ANNOUNCED * position.expect_s)
        patience = LONG if position.phase in _LONG_PHASES or self._at_start() else 1.0
        usual_s = _STEPS * self.longest_step_s
        return max(
            patience * floor_s,
            # Sorting is only worth it where it can make a difference.
            _STEPS * self._p99_s() if usual_s > patience * floor_s else 0.0,
            _STRETCHES * self.longest_s.get(position.phase, 0.0),
        )

    def _at_start(self) -> bool:
        """Models are loaded, kernels are chosen and compiled until the first step is over."""
        return self.position is not None and self.position.step is None and not self.seen_steps

    def succeeded_by(self, position: Position) -> bool:
        """Whether this is of another process, which got the name of one that has ended."""
        return position.alive and self.position is not None and not self.position.alive

    def move(self, position: Position, now_ns: int) -> None:
        """Take in where it is now."""
        before = self.position
        self.position = position
        if before is None:
            self.entered_ns = self.moved_ns = min(position.since_ns, now_ns)
        elif (before.step, before.phase, before.since_ns) != (
            *(position.step, position.phase, position.since_ns),
        ):
            self.stretch(before.phase, self.entered_ns, self.looked_ns)
            # By the clock of whoever looks: the one of the process may have been set since.
            self.entered_ns = self.moved_ns = now_ns
            self.numbers, self.stack, self.wanders = (), (), False
        elif position.phase in UNHOOKED and position.written != before.written:
            self.moved_ns = now_ns
        self.looked_ns = now_ns

    def pause(self, spent_ns: int) -> None:
        """Nobody looked for so long, and maybe nobody could run."""
        self.entered_ns += spent_ns
        self.moved_ns += spent_ns

    def stretch(self, phase: str, began_ns: int, ended_ns: int) -> None:
        """It was in this phase for so long, and went on. A wait is as long as others make it."""
        if phase != "comm_wait" and began_ns >= self.not_learnt_before_ns:
            spent_s = (ended_ns - began_ns) / 1e9
            self.longest_s[phase] = max(spent_s, self.longest_s.get(phase, 0.0))

    def learn(self, steps_s: Sequence[float]) -> None:
        """Steps took so long."""
        self.steps.extend(steps_s)
        self.seen_steps += len(steps_s)
        self.longest_step_s = max(self.longest_step_s, *steps_s)

    def _p99_s(self) -> float:
        fresh = self.seen_steps - self.counted_steps
        if fresh >= _COUNT_EVERY or (fresh and self.counted_steps < 10):
            self.counted_steps = self.seen_steps
            ordered = sorted(self.steps)
            self.p99_s = ordered[int(0.99 * (len(ordered) - 1))]
        return self.p99_s

    def stands_at(self, stack: tuple[Frame, ...]) -> None:
        """Where its program is; another place than the last time, where no hook tells of it."""
        assert self.position is not None
        if stack and self.position.phase in UNHOOKED:
            self.wanders |= bool(self.stack) and self.stack != stack
            self.stack = stack

    def age_s(self, now_ns: int) -> float:
        """For how long it has stood still."""
        return max(0.0, (now_ns - self.moved_ns) / 1e9)
