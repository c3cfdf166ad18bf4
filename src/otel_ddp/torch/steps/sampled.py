"""Samples a step now and then, in which more is read than in others."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from otel_ddp import errors

_FAILURES_ALLOWED = 3
_NEVER = 2**63
# Fewer than the first steps, which are all measured.
_FIRST_WITHIN = 32
# The steps in which collectives are counted: before any rank is judged, then now and then. No round
# numbers: every tenth or hundredth step may have a collective that the others do not have.
_COUNTED = (5, 11, 23, 47, 71)
_THEN_EVERY = 101


class SampledSteps:
    """Chooses the steps that are sampled, and those in which collectives are counted."""

    readings: Any
    """The `Readings`, whose methods are called at their moments; set before the first hook."""

    def __init__(self) -> None:
        self._failures: dict[str, int] = {}
        self._every, self._rarely = 100, 1
        self._counted = itertools.chain(_COUNTED, itertools.count(_THEN_EVERY, _THEN_EVERY))
        # The next of these steps. The first measured one from there on is it.
        self._sample_at, self._count_at = _NEVER, next(self._counted)
        self.sampling = self.counting = False
        """What the present step is."""
        self.wants_loss = False
        """Whether the loss of the next forward is read."""
        self.wants_backward = False
        """Whether that of the next backward is: that forward has returned no loss."""
        self._after_step: Callable[[], None] | None = None
        self.next_change = 0
        """The step at whose begin `begin` has something to do."""

    def sample_every(self, every: int) -> None:
        """Sample one step of so many; 0: none."""
        self._every, self._sample_at = every, 0 if every > 0 else _NEVER
        self.next_change = 0

    def at_most_one_of(self, steps: int) -> None:
        """Sample no more than one of so many steps, from the next sampled one on."""
        self._rarely = steps

    def call_after_steps(self, act: Callable[[], None] | None) -> None:
        """Call this after each step from now on; None: no more. Any thread may say so."""
        self._after_step = act
        # Last: `begin` sets it, and then looks whether there is something to call.
        self.next_change = 0

    @property
    def acts(self) -> bool:
        """Whether something is done after each step, for which each has to be measured."""
        return self._after_step is not None

    def begin(self, following: int, measured: bool = True) -> None:
        """The step of this number begins. *measured*: its phases are."""
        counting = measured and following >= self._count_at
        if self.counting:
            self.run(self.readings.counted_step_ended)
        if counting:
            self._count_at = next(step for step in self._counted if step > following)
            self.run(self.readings.counted_step_begins)
        every = self._every
        if not self._sample_at:
            # The first one soon: which later ones are measured depends on what that takes.
            self._sample_at = following + min(-following % every, _FIRST_WITHIN)
        self.sampling = measured and following >= self._sample_at
        if self.sampling:
            # Ranks that sample fewer steps sample some that others do.
            after = every * -(-self._rarely // every)
            self._sample_at = following + after - following % every
        self.counting = counting
        self.next_change = min(self._sample_at, self._count_at)
        if self.sampling or counting:
            self.next_change = following + 1
        if (act := self._after_step) is not None:
            self.next_change = following + 1
            self.run(act)

    def run(self, act: Callable[..., None], *args: Any) -> None:
        """Do what is not done in every step.

        What has failed three times is not done any more; the steps are measured as before.
        """
        name = act.__name__
        failures = self._failures.get(name, 0)
        if failures >= _FAILURES_ALLOWED:
            return
        try:
            act(*args)
        except errors.ANY_ERROR:
            errors.record_failure(name)
            self._failures[name] = failures + 1
