"""Finds the phases of a step in which a program waits in collectives that are not DDP's."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from otel_ddp import errors
from otel_ddp.torch.answers.collectives import started, world

# The steps in which collectives are counted: before any rank is judged, then now and then. No round
# numbers: every tenth or hundredth step may have a collective that the others do not have.
_COUNTED = (5, 11, 23, 47, 71)
_THEN_EVERY = 101
# The phases in which DDP starts its own collectives: of gradients, and of buffers.
_GRADIENTS = "backward"
_OF_DDP = (_GRADIENTS, "comm_wait")


def counted_steps() -> Iterator[int]:
    """The numbers of those steps."""
    return itertools.chain(_COUNTED, itertools.count(_THEN_EVERY, _THEN_EVERY))


class OwnCollectives:
    """Compares, at each change of phase, how many collectives each process group has counted.

    On the training thread, in few steps, without a collective and without torch's recorder.
    """

    def __init__(self) -> None:
        self.counts = False
        """Whether the present step is one in which they are counted."""
        self._numbers = counted_steps()
        self._steps = 0
        self._steps_with: Counter[str] = Counter()
        self._phases: set[str] = set()
        self._own: set[str] = set()
        # By a group's id: the collectives of gradients that DDP starts there in a step at most.
        # None: that is not known.
        self._of_ddp: dict[int, int | None] = {}
        # The same, as counted in this step; and the groups that had collectives elsewhere.
        self._in_backward: Counter[int] = Counter()
        self._shared: set[int] = set()
        self._counts: dict[int, int] = {}

    def next_step(self, done: int) -> int:
        """The next step after this one in which they are counted."""
        return next(step for step in self._numbers if step > done)

    def begin(self, models: list[nn.Module]) -> None:
        """A step begins in which collectives are counted."""
        self._of_ddp = {}
        for each in models:
            if isinstance(each, DistributedDataParallel):
                group, more = id(getattr(each, "process_group", None)), _of_gradients(each)
                known = self._of_ddp.get(group, 0)
                self._of_ddp[group] = None if more is None or known is None else known + more
        self._phases = set()
        self._in_backward.clear()
        self._shared.clear()
        self._counts = _counts()

    def phase_ended(self, phase: str) -> None:
        """The time since the last call was spent in this phase."""
        before, self._counts = self._counts, _counts()
        for group, count in self._counts.items():
            more = count - before.get(group, 0)
            if more <= 0:
                continue
            if group not in self._of_ddp or phase not in _OF_DDP:
                self._phases.add(phase)
                self._shared.add(group)
            elif phase == _GRADIENTS:
                self._in_backward[group] += more

    def end(self) -> list[str]:
        """The phases that had such collectives in most of the counted steps.

        A phase stays in the answer until few steps had any: each change makes the agent begin anew.
        """
        # A layer that waits for other ranks in forward often does so in backward as well, on the
        # group that DDP uses: there are more collectives than DDP has gradients to reduce.
        for group in self._shared & self._in_backward.keys():
            of_ddp = self._of_ddp[group]
            if of_ddp is None or self._in_backward[group] > of_ddp:
                self._phases.add(_GRADIENTS)
        self._steps += 1
        self._steps_with.update(self._phases)
        for phase, times in self._steps_with.items():
            if 2 * times > self._steps:
                self._own.add(phase)
            elif 4 * times < self._steps:
                self._own.discard(phase)
        return sorted(self._own)


def _of_gradients(model: Any) -> int | None:
    """How many collectives this DDP starts in a backward: one a bucket, and what it asks beside."""
    ask = getattr(model, "_get_ddp_logging_data", None)
    known = None if ask is None else errors.attempt(ask, None)
    if not isinstance(known, dict):
        return None
    sizes = str(known.get("rebuilt_bucket_sizes") or known.get("bucket_sizes") or "")
    if not sizes:
        return None
    return len(sizes.split(",")) + bool(known.get("find_unused_parameters"))


def none_so_far() -> bool:
    """Whether there are process groups, and none has done a collective so far."""
    numbers = _counts()
    return bool(numbers) and not any(numbers.values())


def _counts() -> dict[int, int]:
    """By a group's id, how many collectives it was given so far."""
    counts = {id(group): started(group) for group in list(getattr(world(), "pg_names", ()))}
    return {group: int(count) for group, count in counts.items() if count is not None}
