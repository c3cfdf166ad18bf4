"""Writes logged values into the journal: from any thread, without blocking or raising."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import fsum
from operator import index
from time import time_ns
from typing import Any, TypeVar

from otel_ddp import errors
from otel_ddp.journal import layout
from otel_ddp.journal.writer import Gate, JournalWriter, Shape
from otel_ddp.recording import values
from otel_ddp.recording.documents import Documents, Names
from otel_ddp.recording.steps import StepNumbers, When
from otel_ddp.recording.totals import Totals
from otel_ddp.vocabulary import catalog

_IN_MARK = layout.IN_MARK // 8
_NO_EPOCH = float("nan")
_LARGEST_STEP = 2**63
# A value with one of these names is also used as the epoch of all values in the same call. Hugging
# Face's Trainer logs the second name.
_EPOCHS = frozenset({"epoch", "train/epoch"})
_T = TypeVar("_T")


class Recorder:
    """Holds the writers of one journal, and records logged values."""

    def __init__(
        self, writer: JournalWriter, check_agent: Callable[[int], None] = lambda now: None
    ) -> None:
        """*check_agent* is called with the time in nanoseconds, every few seconds while values are
        logged."""
        self.writer = writer
        self.gate = Gate()
        self.totals = Totals(self.gate, writer)
        self.documents = Documents(self.gate, writer, self.totals)
        self.steps = StepNumbers()
        self.names = Names(self.gate, writer, self.totals)
        # The id, trace and parent id of the span that covers the whole run.
        self.run_span: Mapping[str, str] = {"id": "", "trace": "", "parent": ""}
        self.check_agent = check_agent
        self.on_value: Callable[[], None] = lambda: None
        self._shapes = Shapes()
        # Created at the first device tensor, when torch is certainly imported.
        self.device_scalars: Any = None
        # In a forked child, calls of `log` are passed on to this function.
        self._successor: Callable[..., None] | None = None
        # The hot path: a closure, which is faster than a method.
        self.log = quick_log(
            writer, self.gate, self._shapes, self.steps, self._log_slowly, check_agent
        )

    def disown(self, successor: Callable[..., None]) -> None:
        """In a forked child: stop writing to the journal, which belongs to the parent.

        The child's code may still hold a reference to `log`. Its calls are passed on to
        *successor*.
        """
        self.gate.closed = True
        self._successor = successor
        self._shapes.forget()

    def close(self) -> None:
        """Close the journal; later calls in other threads write nothing."""
        with self.gate.lock:
            self.gate.closed = True
            self.writer.close()

    # -- values

    def log_beside(self, metrics: Any, step: Any, epoch: Any, split: Any) -> None:
        """Record values that the user logs to a tracker. Its step numbers may count something other
        than training steps, so they do not set the training step."""
        self._log_slowly(metrics, step, epoch, split, time_ns(), leads=False)

    @errors.contained()
    def _log_slowly(
        self, metrics: Any, step: Any, epoch: Any, split: Any, now: int, leads: bool = True
    ) -> None:
        if self.gate.closed:
            if self._successor is not None:
                self._successor(metrics, step=step, epoch=epoch, split=split)
            return
        refuse, names, steps = self.totals.refuse, self.names, self.steps
        # A user's mapping may raise anything when it is iterated.
        pairs = errors.attempt(lambda: _items(metrics), None)
        if pairs is None:
            kind = type(metrics).__name__
            refuse("value", "log", f"log expects a mapping of names to numbers, got {kind}")
            return
        clean_epoch = self._clean("epoch", epoch, _finite)
        word = self._clean("split", split, lambda given: values.text(given, 64))
        known = [(names.number(name, word), name, value) for name, value in pairs]
        known = [each for each in known if each[0]]
        trains = any(names.of(number)[1] == "train" for number, _, _ in known)
        epochs = (pair for pair in pairs if type(pair[0]) is str and pair[0].lower() in _EPOCHS)
        epoch_name, epoch_value = next(epochs, ("", None))
        if epoch is None and epoch_name:
            # If the epoch is not a number, the loop below warns about it, as it is one of the
            # values. So do not warn here.
            found = errors.attempt(partial(values.number, epoch_value), _NO_EPOCH)
            clean_epoch = found if found - found == 0.0 else None
        logged = clean_step = self._clean("step", step, _whole_number)
        if step is None and known:
            clean_step = steps.next(trains)
        when = When(clean_step, clean_epoch, now)
        ids: list[int] = []
        numbers: list[float] = []
        for number, name, value in known:
            if values.is_device_tensor(value):
                self._start_copy(number, value, when)
                continue
            try:
                numbers.append(values.number(value))
            except values.Refused as why:
                shown = values.shown(name)
                refuse("value", f"value:{shown}", f"{shown} was not recorded: {why}")
                continue
            ids.append(number)
        # Several keys may have the same name, so the values may not all fit into one record.
        for at in range(0, len(ids), layout.MOST_VALUES):
            some = slice(at, at + layout.MOST_VALUES)
            self._write(tuple(ids[some]), numbers[some], when)
        if logged is not None and trains and leads:
            steps.train(logged)
        self._shapes.remember(metrics, pairs, split, tuple(ids), trains, epoch_name)
        self.gate.log_ns += time_ns() - now
        if now > self.gate.check_due_ns:
            self.check_agent(now)

    def _write(self, ids: tuple[int, ...], numbers: Sequence[float], when: When) -> None:
        step = layout.NO_STEP if when.step is None else when.step
        epoch = _NO_EPOCH if when.epoch is None else when.epoch

        def write() -> bool:
            self.writer.scalars(self._shapes.of(ids), when.time_ns, step, epoch, numbers)
            return True

        if not self.gate.write(write, False):
            return
        self.on_value()
        for number, value in zip(ids, numbers, strict=True):
            if value - value != 0.0:
                name, split = self.names.of(number)
                self.totals.count(catalog.TRAINING_NONFINITE, name=name, split=split)

    def _clean(self, what: str, given: Any, clean: Callable[[Any], _T]) -> _T | None:
        """The validated step, epoch or split of a call; None if it is missing or invalid."""
        if given is None:
            return None
        try:
            return clean(given)
        except values.Refused as why:
            kind = "name" if what == "split" else "value"
            self.totals.refuse(kind, what, f"the {what} was not recorded: {why}")
            return None

    def record_reading(self, found: Mapping[str, Any], step: int, at_ns: int = 0) -> None:
        """Record values that we measure ourselves, unless the user logs a value of that name.

        *at_ns*: when they were measured; 0 means now.
        """
        when = When(step, None, at_ns or time_ns())
        known = {self.names.number(name, of_user=False): value for name, value in found.items()}
        known.pop(0, None)
        for number, value in known.items():
            if values.is_device_tensor(value):
                self._start_copy(number, value, when)
                continue
            number_of = errors.attempt(partial(values.number, value), None)
            if number_of is not None:
                self._write((number,), (number_of,), when)

    # -- device tensors

    @errors.contained()
    def _start_copy(self, number: int, tensor: Any, when: When) -> None:
        if self.device_scalars is None:
            from otel_ddp.recording.device_scalars import DeviceScalars

            self.device_scalars = DeviceScalars(self._copy_arrived)
        # While the device's launch queue is full, starting a copy blocks. IN_MARK tells the agent
        # that this rank may be blocked here.
        words = self.writer.words
        words[_IN_MARK] = 1
        try:
            why = self.device_scalars.start_copy(number, tensor, when)
        finally:
            words[_IN_MARK] = 0
        if why:
            name = values.shown(self.names.of(number)[0])
            self.totals.refuse("value", f"tensor:{name}", f"{name} was not recorded: {why}")

    def _copy_arrived(self, number: int, value: float, when: When) -> None:
        self._write((number,), (value,), when)

    @errors.contained()
    def poll_copies(self, *, wait: bool = False) -> None:
        """Record the tensors whose copies have arrived. *wait*: wait briefly for the others."""
        lost, self.gate.interrupted = self.gate.interrupted, 0
        if lost:
            text = "a value logged by a signal handler was lost: it interrupted another log call"
            self.totals.refuse("reentered", "reentered", text, lost)
        if (copies := self.device_scalars) is None:
            return
        if wait:
            copies.drain()
        else:
            copies.poll()
        lost, copies.lost = copies.lost, 0
        if lost:
            text = "tensors logged last were lost: their device failed"
            self.totals.refuse("value", "lost", text, lost)


def _items(metrics: Any) -> list[tuple[Any, Any]] | None:
    return list(metrics.items()) if isinstance(metrics, Mapping) else None


def _finite(epoch: Any) -> float:
    number = values.number(epoch)
    if number - number != 0.0:
        raise values.Refused(f"a finite number was expected, got {number}")
    return number


def _whole_number(step: Any) -> int:
    found = errors.attempt(lambda: _whole(step), -1)
    if not 0 <= found < _LARGEST_STEP:
        raise values.Refused(f"a whole number from 0 on was expected, got {values.shown(step)}")
    return found


def _whole(step: Any) -> int:
    """A step as a plain int; -1 if it is none. May run user code."""
    if values.is_device_tensor(step) or values.is_spread(step):
        return -1
    # Try an integer first, as a float cannot represent large steps exactly.
    whole = errors.attempt(lambda: index(step), None)
    if whole is not None:
        return int(whole)
    number = values.number(step)
    return int(number) if number.is_integer() else -1


# -- the hot path: known names with plain finite numbers are written directly

# Numbers of other types, such as NumPy's, take the slow path.
_PLAIN = frozenset({float, int, bool})

# The most names in all cached sets together, which bounds the memory if every call has new names.
_MOST_SHAPED_NAMES = 200_000
# Each set costs memory in addition to that of its names: as much as this many names.
_NAMES_OF_SET = 40


# How the hot path writes a set of names: the names; their split; the layout of the record; whether
# all values were floats (if not, the type of each value is checked); whether one of the names is in
# the train split, so that the call's step is a training step; the name whose value is the epoch.
# This is a plain tuple, as unpacking a NamedTuple is slower.
KnownNames = tuple[list[str], str | None, Shape, bool, bool, str]

# No `split=` of a call of `log` equals this object, so `_NO_NAMES` matches no call.
_NO_SPLIT: Any = object()
_NO_NAMES: KnownNames = ([], _NO_SPLIT, Shape([]), False, False, "")


class Shapes:
    """Caches the record layout of each set of names that was logged."""

    def __init__(self) -> None:
        # `known` has by split and names how to write this set of names; `last` is the set that was
        # logged last.
        self.known: dict[tuple[str | None, ...], KnownNames] = {}
        self.last = _NO_NAMES
        self._by_ids: dict[tuple[int, ...], Shape] = {}
        self._names = 0

    def forget(self) -> None:
        """Forget all sets, so that each call takes the slow path."""
        self.known.clear()
        self.last = _NO_NAMES

    def of(self, ids: tuple[int, ...]) -> Shape:
        """The record layout of calls with these name numbers."""
        shape = self._by_ids.get(ids)
        if shape is None:
            self._make_room(len(ids))
            shape = self._by_ids[ids] = Shape(ids)
        return shape

    def _make_room(self, more: int) -> None:
        # Clear the cache if it is full. Otherwise a program that logs new names in every call would
        # let it grow without limit.
        if self._names >= _MOST_SHAPED_NAMES:
            self._by_ids.clear()
            self.known.clear()
            self._names = 0
        self._names += more + _NAMES_OF_SET

    def remember(
        self,
        metrics: Any,
        pairs: Sequence[tuple[Any, Any]],
        split: Any,
        ids: tuple[int, ...],
        trains: bool,
        epoch_name: str,
    ) -> None:
        """Let the hot path write this set of names from now on, if it would write what the slow
        path does."""
        is_plain = split is None or (type(split) is str and 0 < len(split) <= values.LONGEST_NAME)
        if type(metrics) is not dict or not is_plain:
            return
        shape = self._by_ids.get(ids)
        if shape is None or len(ids) != len(pairs) or len(set(ids)) != len(ids):
            return
        if len(ids) > 512 or not all(
            type(k) is str and len(k) <= values.LONGEST_NAME for k, _ in pairs
        ):
            return
        self._make_room(len(ids))
        self._by_ids[ids] = shape
        floats = all(isinstance(value, float) for _, value in pairs)
        key = (split, *(name for name, _ in pairs))
        self.last = self.known[key] = list(metrics), split, shape, floats, trains, epoch_name


def _without_tensors(given: Iterable[Any]) -> list[float]:
    """The numbers, with scalar CPU tensors replaced by their values."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    # Convert neither subclasses of Tensor, whose `item` may run user code, nor device tensors,
    # whose `item` would wait for the device. `item` raises if a tensor has several elements.
    numbers = [each.item() if type(each) is tensor and each.is_cpu else each for each in given]
    if not _PLAIN.issuperset(map(type, numbers)):
        raise TypeError("a value that only the slow path can convert")
    return numbers


def quick_log(
    writer: JournalWriter,
    gate: Gate,
    shapes: Shapes,
    steps: StepNumbers,
    slowly: Callable[..., None],
    check: Callable[[int], None],
) -> Callable[..., None]:
    """Build the `log` of a recorder.

    It is a closure over local variables, as attribute lookups would take a noticeable part of its
    time. Unusual calls are passed to *slowly*, which never raises. *check* is called every few
    seconds.
    """
    gate_write, known, write = gate.write, shapes.known, writer.scalars
    clock, any_error, no_epoch = time_ns, errors.ANY_ERROR, _NO_EPOCH
    # `float.conjugate` raises for anything but a float, which sends the call to the slow path.
    # Adding up other values could wait for a device, or warn about an overflow (NumPy).
    as_float = float.conjugate

    def log(metrics: Any, *, step: Any = None, epoch: Any = None, split: Any = None) -> None:
        """Record numbers: `run.log({"loss": loss, "lr": lr}, step=step)`."""
        now = clock()
        try:
            # Iterating over a mapping other than a dict could run user code.
            if type(metrics) is not dict:
                return slowly(metrics, step, epoch, split, now)
            # Most calls have the same names as the previous call.
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
        # Usually a KeyError from `known`: these names are logged for the first time.
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
