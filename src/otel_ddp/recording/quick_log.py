"""The hot path of `Run.log`: known names with plain finite numbers go straight to the journal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from math import fsum
from time import time_ns
from typing import Any

from otel_ddp import errors
from otel_ddp.journal.writer import Gate, JournalWriter, Shape
from otel_ddp.recording.steps import StepNumbers
from otel_ddp.recording.values import LONGEST_NAME

# What else is a number, such as NumPy's, goes the slow way.
_PLAIN = frozenset({float, int, bool})

_NO_EPOCH = float("nan")
_MOST_SHAPES = 4096
# The limit of all shapes together: names that change with every call must not fill the memory.
_MOST_SHAPED_NAMES = 200_000


# How the hot path writes one set of names: the names, their split and shape; whether all values
# were floats (other plain numbers are checked one by one); whether one of the names belongs to
# training, since its step is then the run's step; and the name whose value is the epoch of them
# all. A plain tuple: Python takes one apart faster than a subclass.
KnownNames = tuple[list[str], str | None, Shape, bool, bool, str]

# No call has an equal split, so these are the names of none.
_NO_SPLIT: Any = object()
_NO_NAMES: KnownNames = ([], _NO_SPLIT, Shape([]), False, False, "")


class Shapes:
    """The sets of names that calls of `log` had, each worked out once."""

    __slots__ = ("_by_ids", "_names", "known", "last")

    def __init__(self) -> None:
        # By split and names; and those of the last call.
        self.known: dict[tuple[str | None, ...], KnownNames] = {}
        self.last = _NO_NAMES
        self._by_ids: dict[tuple[int, ...], Shape] = {}
        self._names = 0

    def forget(self) -> None:
        """Know none: each call comes to the slow path."""
        self.known.clear()
        self.last = _NO_NAMES

    def of(self, ids: tuple[int, ...]) -> Shape:
        """The shape of the calls with these numbers of names."""
        shape = self._by_ids.get(ids)
        if shape is None:
            self._make_room(len(ids))
            shape = self._by_ids[ids] = Shape(ids)
        return shape

    def _make_room(self, more: int) -> None:
        # If names change with every call, this starts over instead of growing.
        known = max(len(self._by_ids), len(self.known))
        if known >= _MOST_SHAPES or self._names >= _MOST_SHAPED_NAMES:
            self._by_ids.clear()
            self.known.clear()
            self._names = 0
        self._names += more

    def remember(
        self,
        metrics: Any,
        pairs: Sequence[tuple[Any, Any]],
        split: Any,
        ids: tuple[int, ...],
        trains: bool,
        epoch_name: str,
    ) -> None:
        """Let the hot path write this set of names from now on, if it writes it in the same way."""
        if type(metrics) is not dict or not (split is None or type(split) is str):
            return
        shape = self._by_ids.get(ids)
        if shape is None or len(ids) != len(pairs) or len(set(ids)) != len(ids):
            return
        if len(ids) > 512 or not all(type(k) is str and len(k) <= LONGEST_NAME for k, _ in pairs):
            return
        if split is not None and not 0 < len(split) <= LONGEST_NAME:
            return
        self._make_room(len(ids))
        self._by_ids[ids] = shape
        floats = all(isinstance(value, float) for _, value in pairs)
        key = (split, *(name for name, _ in pairs))
        self.last = self.known[key] = list(metrics), split, shape, floats, trains, epoch_name


def _without_tensors(given: Iterable[Any]) -> list[float]:
    """These numbers, with those of scalar tensors of the CPU in place of the tensors."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    # A subclass may do anything when it is asked, and a device would make training wait. One of
    # several numbers raises.
    numbers = [each.item() if type(each) is tensor and each.is_cpu else each for each in given]
    if not _PLAIN.issuperset(map(type, numbers)):
        raise TypeError("a value that only the slow path can tell")
    return numbers


def quick_log(
    writer: JournalWriter,
    gate: Gate,
    shapes: Shapes,
    steps: StepNumbers,
    slowly: Callable[..., None],
    check: Callable[[int], None],
) -> Callable[..., None]:
    """Builds the `log` of one recorder.

    A closure with everything in local names: attribute lookups would take a part of its time.
    Anything out of the ordinary goes to *slowly*, which starts over and contains errors. *check* is
    called every few seconds.
    """
    gate_write, known, write = gate.write, shapes.known, writer.scalars
    clock, any_error, no_epoch = time_ns, errors.ANY_ERROR, _NO_EPOCH
    # float's own method accepts floats only. A tensor would be asked for its value, and NumPy's
    # scalars, of which this makes plain floats, would warn in a sum about overflow and infinity.
    as_float = float.conjugate

    def log(metrics: Any, *, step: Any = None, epoch: Any = None, split: Any = None) -> None:
        """Record numbers: `run.log({"loss": loss, "lr": lr}, step=step)`."""
        now = clock()
        try:
            # Walking through another mapping could run the user's code.
            if type(metrics) is not dict:
                return slowly(metrics, step, epoch, split, now)
            # Most calls log the names of the call before.
            names, known_split, shape, floats, trains, epoch_name = shapes.last
            if [*metrics] != names or split != known_split:
                key = (split, *metrics)
                found = shapes.last = known[key]
                _, _, shape, floats, trains, epoch_name = found
            numbers: Any = metrics.values()
            if floats:
                total = sum(map(as_float, numbers))
            else:
                if not _PLAIN.issuperset(map(type, numbers)):
                    numbers = _without_tensors(numbers)
                total = fsum(numbers)
            if total - total != 0.0 or (step is not None and (type(step) is not int or step < 0)):
                return slowly(metrics, step, epoch, split, now)
            at = epoch
            if epoch is None:
                at = metrics[epoch_name] if epoch_name else no_epoch
            if type(at) not in _PLAIN or (at - at != 0.0 and at is not no_epoch):
                return slowly(metrics, step, epoch, split, now)

            def act() -> bool:
                counted = steps.next(trains) if step is None else step
                write(shape, now, counted, at, numbers)
                return True

            if not gate_write(act, False):
                return None
            if step is not None and trains:
                steps.train(step)
        # Most often these are names seen for the first time.
        except any_error:
            errors.reraise_foreign()
            return slowly(metrics, step, epoch, split, now)
        gate.logs = logs = gate.logs + 1
        if not logs & 63:
            gate.log_ns += (clock() - now) << 6
        if now > gate.check_due_ns:
            check(now)
        return None

    return log
