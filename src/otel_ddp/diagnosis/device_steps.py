"""Puts the steps of a rank on the clock of its device.

The device's clock knows how long each phase took there. What else a step was, only the host knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from otel_ddp.diagnosis.step_facts import StepFacts, TimedStep, batches_of, facts_of
from otel_ddp.words import PHASES, WORK_PHASES

# The device is some steps behind the host, and never more than this.
_MOST_WAITING = 1000
# In the journal a phase and a time are one number: the phase is above these bits.
_PACED_SHIFT = 48
_PACED_NS = (1 << _PACED_SHIFT) - 1
_CODES = [PHASES[word] for word in WORK_PHASES]


class DeviceStep(TimedStep, Protocol):
    """One step on the device's clock, as the agent has put it together from the journal."""

    @property
    def paced(self) -> tuple[int, ...]: ...
    @property
    def lag_ns(self) -> int | None: ...


class DeviceSteps:
    """One per rank that has such a clock."""

    def __init__(self) -> None:
        # Of steps that the device has not finished, by number.
        self._on_host: dict[int, StepFacts] = {}
        # Of the last step: its number, and by how much the device was behind at its end.
        self._last: tuple[int, int | None] = (-1, None)

    def feed_host(self, steps: Sequence[StepFacts]) -> None:
        """Steps as the host saw them."""
        on_host = self._on_host
        for each in steps:
            on_host[each.number] = each
        while len(on_host) > _MOST_WAITING:
            del on_host[next(iter(on_host))]

    def feed(self, steps: Sequence[DeviceStep]) -> list[StepFacts]:
        """Steps as the device saw them; the facts of those that the host has told, too."""
        by_number = {step.number: step for step in steps}
        found = []
        for facts in [each for batch in batches_of(steps) for each in facts_of(batch)]:
            step = by_number[facts.number]
            (before, behind_ns), self._last = self._last, (facts.number, step.lag_ns)
            host = self._on_host.pop(facts.number, None)
            if host is None:
                continue
            paced_ns = dict.fromkeys(_CODES, 0)
            for each in step.paced:
                code = each >> _PACED_SHIFT
                if code in paced_ns:
                    paced_ns[code] += each & _PACED_NS
            found.append(
                facts._replace(
                    # The two clocks drift apart, so the host's says when.
                    ended_ns=host.ended_ns + (step.lag_ns or 0),
                    unusual=host.unusual or facts.unusual,
                    work=host.work,
                    paced_ns=tuple(paced_ns.values()),
                    host_ns=host.phases_ns,
                    behind_ns=behind_ns if before == facts.number - 1 else None,
                )
            )
        return found
