"""Writes what a user logs into the journal: from any thread, never waiting, never raising."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import index
from time import time_ns
from typing import Any

from otel_ddp import errors
from otel_ddp.journal import layout
from otel_ddp.journal.writer import NO_STEP, Gate, JournalWriter
from otel_ddp.recording import values
from otel_ddp.recording.documents import Documents, Names
from otel_ddp.recording.quick_log import Shapes, quick_log
from otel_ddp.recording.steps import StepNumbers, When
from otel_ddp.recording.totals import Totals
from otel_ddp.vocabulary import catalog

_IN_MARK = layout.IN_MARK // 8
_NO_EPOCH = float("nan")
_LARGEST_STEP = 2**63
# A value of one of these names is also the epoch of all values of the call. Hugging Face's
# Trainer logs the second one.
_EPOCHS = frozenset({"epoch", "train/epoch"})


class Recorder:
    """The parts that write one journal, and the values that are logged to it."""

    def __init__(
        self, writer: JournalWriter, check_agent: Callable[[int], None] = lambda now: None
    ) -> None:
        """*check_agent* is called with the time, every few seconds of logging."""
        self.writer = writer
        self.gate = Gate()
        self.totals = Totals(self.gate, writer)
        self.documents = Documents(self.gate, writer, self.totals)
        self.steps = StepNumbers()
        self.names = Names(self.gate, writer, self.totals)
        # The id, trace and parent of the span of the whole run.
        self.run_span: Mapping[str, str] = {"id": "", "trace": "", "parent": ""}
        self.check_agent = check_agent
        self.on_value: Callable[[], None] = lambda: None
        self._shapes = Shapes()
        # Made at the first tensor of a device, when torch is imported for sure.
        self.device_scalars: Any = None
        # In a forked child: what its calls of `log` do instead.
        self._successor: Callable[..., None] | None = None
        # The hot path.
        self.log = quick_log(
            writer, self.gate, self._shapes, self.steps, self._log_slowly, check_agent
        )

    def disown(self, successor: Callable[..., None]) -> None:
        """Write nothing more to the parent's journal, in a forked child.

        The child may have kept `log` itself: such a call goes to the successor.
        """
        self.gate.closed = True
        self._successor = successor
        self._shapes.forget()

    def close(self) -> None:
        """Closes the journal; later calls of other threads write nothing."""
        with self.gate.lock:
            self.gate.closed = True
            self.writer.close()

    # -- values

    def log_beside(
        self, metrics: Mapping[str, Any], step: Any, epoch: Any = None, split: Any = None
    ) -> None:
        """Record numbers that a tracker is given: its step is an axis of them, and none of ours."""
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
        if not errors.attempt(lambda: isinstance(metrics, Mapping), False):
            kind = type(metrics).__name__
            refuse("value", "log", f"log expects a mapping of names to numbers, got {kind}")
            return
        pairs: list[tuple[Any, Any]] = []
        # The values before a failure of the mapping are kept.
        if not _collect(metrics, pairs):
            kind = type(metrics).__name__
            refuse("value", "log", f"log could not read all of the {kind} it was given")
        clean_epoch, word = self._epoch(epoch), self._split(split)
        known = [(names.number(name, word), name, value) for name, value in pairs]
        known = [each for each in known if each[0]]
        trains = any(names.of(number)[1] == "train" for number, _, _ in known)
        epochs = (pair for pair in pairs if type(pair[0]) is str and pair[0].lower() in _EPOCHS)
        epoch_name, epoch_value = next(epochs, ("", None))
        if epoch is None and epoch_name:
            # A value that is no number is refused later, once.
            found = errors.attempt(partial(values.number, epoch_value), _NO_EPOCH)
            clean_epoch = found if found - found == 0.0 else None
        logged = clean_step = self._whole(step)
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
        # There are no more names than fit, but two keys may be one.
        for at in range(0, len(ids), layout.MOST_VALUES):
            some = slice(at, at + layout.MOST_VALUES)
            self._write(tuple(ids[some]), numbers[some], when)
        if logged is not None and trains:
            if leads:
                steps.train(logged)
            else:
                steps.logged_beside(logged)
        self._shapes.remember(metrics, pairs, split, tuple(ids), trains, epoch_name)
        self.gate.log_ns += time_ns() - now
        if now > self.gate.check_due_ns:
            self.check_agent(now)

    def _write(self, ids: tuple[int, ...], numbers: Sequence[float], when: When) -> None:
        step = NO_STEP if when.step is None else when.step
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

    def _whole(self, step: Any) -> int | None:
        if step is None:
            return None
        whole = errors.attempt(lambda: _whole_number(step), -1)
        if not 0 <= whole < _LARGEST_STEP:
            shown = values.shown(step)
            self.totals.refuse(
                "value", "step", f"step must be a whole number from 0 on, got {shown}"
            )
            return None
        return whole

    def _epoch(self, epoch: Any) -> float | None:
        if epoch is None:
            return None
        try:
            number = values.number(epoch)
            if number - number != 0.0:
                raise values.Refused(f"a finite number was expected, got {number}")
        except values.Refused as why:
            self.totals.refuse("value", "epoch", f"the epoch was not recorded: {why}")
            return None
        return number

    def _split(self, split: Any) -> str | None:
        if split is None:
            return None
        try:
            return values.text(split, 64)[0]
        except values.Refused as why:
            self.totals.refuse("name", "split", f"the split was not recorded: {why}")
            return None

    def record_reading(self, found: Mapping[str, Any], step: int, at_ns: int = 0) -> None:
        """Records values that we read ourselves, unless the user logs a value of that name.

        *at_ns*: when they were read, if not now.
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

    # -- tensors of a device

    @errors.contained()
    def _start_copy(self, number: int, tensor: Any, when: When) -> None:
        if self.device_scalars is None:
            from otel_ddp.recording.device_scalars import DeviceScalars

            self.device_scalars = DeviceScalars(self._copy_arrived)
        # Where the device's launch queue is full the copy waits for a place.
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
        """Records the tensors that have arrived by now; *wait*: for the others a moment, too."""
        lost, self.gate.interrupted = self.gate.interrupted, 0
        if lost:
            text = "a value logged by a signal handler was lost: it came in the middle of another"
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


def _collect(metrics: Mapping[Any, Any], pairs: list[tuple[Any, Any]]) -> bool:
    """Appends the pairs of a mapping to a list; False if the mapping failed before its end."""

    def walk() -> bool:
        pairs.extend(metrics.items())
        return True

    return errors.attempt(walk, False)


def _whole_number(value: Any) -> int:
    """A step as a plain int; -1 if it is none. May run the user's code."""
    if values.is_device_tensor(value) or values.is_spread(value):
        return -1
    # Not by way of a float, which cannot hold a large step.
    whole = errors.attempt(lambda: index(value), None)
    if whole is not None:
        return int(whole)
    number = values.number(value)
    return int(number) if number.is_integer() else -1
