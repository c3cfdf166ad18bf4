"""Writes what a user logs into the journal: from any thread, never waiting, never raising."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import index
from time import time_ns
from typing import Any

from otel_ddp import catalog
from otel_ddp.errors import containment
from otel_ddp.journal import layout
from otel_ddp.journal.writer import NO_STEP, JournalWriter, Shape
from otel_ddp.recording import values
from otel_ddp.recording.locked_journal import LockedJournal
from otel_ddp.recording.quick_log import (
    NO_NAMES,
    PLAIN_MAPPINGS,
    PLAIN_TYPES,
    KnownNames,
    Log,
    known_names,
    quick_log,
)
from otel_ddp.settings import Settings

_IN_MARK = layout.IN_MARK // 8
_NO_EPOCH = float("nan")
_MOST_SHAPES = 4096
# The limit of all shapes together: names that change with every call must not fill the memory.
_MOST_SHAPED_NAMES = 200_000
_LARGEST_STEP = 2**63
# A value of one of these names is also the epoch of all values of the call. Hugging Face's
# Trainer logs the second one.
_EPOCHS = frozenset({"epoch", "train/epoch"})


class Recorder(LockedJournal):
    """The names of one journal, and how the values of each set of names are written."""

    def __init__(self, writer: JournalWriter, conf: Settings) -> None:
        super().__init__(writer, conf)
        # The id, trace and parent of the span of the whole run.
        self.run_span: Mapping[str, str] = {"id": "", "trace": "", "parent": ""}
        # Called with the time: every few seconds of logging, and at the first value.
        self.check_agent: Callable[[int], None] = lambda now: None
        self.on_first_value: Callable[[int], None] = lambda now: None
        # If the hooks count the steps: the step of a value that is logged now, be it of training or
        # not.
        self.step_from_hooks: Callable[[bool], int] = lambda trains: NO_STEP
        # By split and names; and those of the last call.
        self.known_names: dict[tuple[str | None, ...], KnownNames] = {}
        self.last_names = NO_NAMES
        self._by_ids: dict[tuple[int, ...], Shape] = {}
        self._shaped_names = 0
        # The last step at the time a lower one was logged, and the lower one.
        self._lower = (-1, -1)
        # The step of an evaluation's values before anything trains.
        self._evaluations = -1
        self._names: dict[tuple[str, str], int] = {}
        # The names of our own readings. A name that the user logs too is the user's from then on.
        self._reading_names: set[int] = set()
        self._in_reading = False
        self._named: dict[int, tuple[str, str]] = {}
        # Made at the first tensor of a device, when torch is imported for sure.
        self.device_scalars: Any = None
        # In a forked child: what its calls of `log` do instead.
        self._successor: Log | None = None
        # The hot path; made last, since it reads what is set above.
        self.log = quick_log(self)

    def disown(self, successor: Log) -> None:
        """Write nothing more to the parent's journal, in a forked child.

        The child may have kept `log` itself: such a call goes to the successor.
        """
        self._closed = True
        self._successor = successor
        self.known_names.clear()
        self.last_names = NO_NAMES

    # -- values

    @containment.contained()
    def log_slowly(self, metrics: Any, step: Any, epoch: Any, split: Any, now: int) -> None:
        if self._closed:
            if self._successor is not None:
                self._successor(metrics, step=step, epoch=epoch, split=split)
            return
        if not containment.attempt(lambda: isinstance(metrics, Mapping), False):
            kind = type(metrics).__name__
            self.refuse("value", "log", f"log expects a mapping of names to numbers, got {kind}")
            return
        pairs: list[tuple[Any, Any]] = []
        # The values before a failure of the mapping are kept.
        if not _collect(metrics, pairs):
            kind = type(metrics).__name__
            self.refuse("value", "log", f"log could not read all of the {kind} it was given")
        clean_epoch, word = self._epoch(epoch), self._split(split)
        known = [(self._name(name, word), name, value) for name, value in pairs]
        known = [each for each in known if each[0]]
        trains = any(self._named[number][1] == "train" for number, _, _ in known)
        if epoch is None:
            clean_epoch = _epoch_among(known)
        logged = clean_step = self._whole(step)
        if step is None and known:
            clean_step = self.next_step(trains)
        ids: list[int] = []
        numbers: list[float] = []
        for number, name, value in known:
            if values.is_device_tensor(value):
                self._start_copy(number, value, clean_step, clean_epoch, now)
                continue
            try:
                numbers.append(values.number(value))
            except values.Refused as why:
                shown = values.shown(name)
                self.refuse("value", f"value:{shown}", f"{shown} was not recorded: {why}")
                continue
            ids.append(number)
        self._write(tuple(ids), numbers, clean_step, clean_epoch, now)
        if logged is not None and trains:
            self.step = logged if logged >= self.step else self.step_after_lower(logged)
        self._remember_shape(metrics, pairs, split, ids, trains)
        if now > self.check_due_ns:
            self.check_agent(now)

    def next_step(self, trains: bool) -> int:
        """The step of a call without one: the hooks' step, or a new one for each call."""
        if self.steps_counted:
            return self.step_from_hooks(trains)
        if trains:
            self.step += 1
            self.implied_steps += 1
        elif self.step < 0:
            self._evaluations += 1
            return self._evaluations
        return self.step

    def current_step(self) -> int | None:
        """The step of a span or event that begins now."""
        step = self.step_from_hooks(True) if self.steps_counted else self.step
        return step if step >= 0 else None

    def step_after_lower(self, step: int) -> int:
        """The step of training after a call with a lower step than the last one.

        Two rising lower steps mean that training went back. A single one may count epochs.
        """
        last, lower = self._lower
        if last == self.step and step > lower:
            return step
        self._lower = self.step, step
        return self.step

    def _write(
        self,
        ids: tuple[int, ...],
        numbers: Sequence[float],
        step: int | None,
        epoch: float | None,
        now: int,
    ) -> None:
        if not ids or not self._locked(lambda: self._append(ids, numbers, step, epoch, now), False):
            return
        self.on_first_value(now)
        for number, value in zip(ids, numbers, strict=True):
            if value - value != 0.0:
                name, split = self._named[number]
                if not self.count(catalog.TRAINING_NONFINITE, name=name, split=split):
                    containment.warn_once(
                        "nonfinite",
                        "%s and further names are NaN or infinite and are recorded, but not "
                        "counted: there is no room for more names (OTEL_DDP_JOURNAL_BYTES).",
                        values.shown(name),
                    )

    def _append(
        self,
        ids: tuple[int, ...],
        numbers: Sequence[float],
        step: int | None,
        epoch: float | None,
        now: int,
    ) -> bool:
        shape = self._by_ids.get(ids)
        if shape is None:
            self._make_room()
            self._shaped_names += len(ids)
            shape = self._by_ids[ids] = Shape(ids)
        self.writer.scalars(
            shape,
            now,
            NO_STEP if step is None else step,
            _NO_EPOCH if epoch is None else epoch,
            numbers,
        )
        return True

    def _make_room(self) -> None:
        # If names change with every call, this starts over instead of growing.
        known = max(len(self._by_ids), len(self.known_names))
        if known >= _MOST_SHAPES or self._shaped_names >= _MOST_SHAPED_NAMES:
            self._by_ids.clear()
            self.known_names.clear()
            self._shaped_names = 0

    def _remember_shape(
        self,
        metrics: Any,
        pairs: Sequence[tuple[Any, Any]],
        split: Any,
        ids: Sequence[int],
        trains: bool,
    ) -> None:
        # Only sets of names that the hot path writes in the same way.
        if type(metrics) not in PLAIN_MAPPINGS or not (split is None or type(split) is str):
            return
        shape = self._by_ids.get(tuple(ids))
        if shape is None or len(ids) != len(pairs) or len(set(ids)) != len(ids):
            return
        if len(ids) > 512 or not all(
            type(k) is str and len(k) <= values.LONGEST_NAME for k, _ in pairs
        ):
            return
        if split is not None and not 0 < len(split) <= values.LONGEST_NAME:
            return
        self._make_room()
        self._shaped_names += len(ids)
        self._by_ids[tuple(ids)] = shape
        key = (split, *(name for name, _ in pairs))
        floats = all(isinstance(value, float) for _, value in pairs)
        epoch = next((name for name, _ in pairs if name.lower() in _EPOCHS), "")
        self.last_names = self.known_names[key] = known_names(
            list(metrics), split, shape, floats, trains, epoch
        )
        # NumPy's scalars are common, and struct reads them as floats.
        for _, value in pairs:
            kind = type(value)
            if kind.__module__ == "numpy" and kind.__name__ in ("float64", "float32", "int64"):
                PLAIN_TYPES.add(kind)

    def _name(self, name: Any, split: str | None) -> int:
        try:
            clean, changed = values.text(name, values.LONGEST_NAME)
        except values.Refused as why:
            self.refuse("name", f"name:{type(name).__name__}", f"a value was not recorded: {why}")
            return 0
        key = (clean, values.split_of(clean, split))
        known = self._names.get(key)
        if known is not None:
            if self._in_reading and known not in self._reading_names:
                return 0
            if not self._in_reading:
                self._reading_names.discard(known)
            return known
        known = self._locked(lambda: self._new_name(key), -1)
        if known < 0:
            return 0
        if known == 0:
            self._refuse_name(clean)
        elif self._in_reading:
            self._reading_names.add(known)
        elif changed:
            self.count(catalog.OTEL_DDP_VALUES_REFUSED, why="name_changed")
        return known

    @property
    def logs_values(self) -> bool:
        """Whether the program itself has logged a value of training."""
        named = {number for (_, split), number in self._names.items() if split == "train"}
        return not named <= self._reading_names

    def _new_name(self, key: tuple[str, str]) -> int:
        # Another thread may have added it meanwhile.
        known = self._names.get(key)
        if known is not None:
            return known
        if len(self._names) >= self._conf.max_names:
            return 0
        number = self.writer.name(*key)
        if number:
            self._names[key] = number
            self._named[number] = key
        return number

    def _refuse_name(self, clean: str) -> None:
        if (
            "names" in self._warned
        ):  # There may be very many: do not format a text that is not used.
            self.count(catalog.OTEL_DDP_VALUES_REFUSED, why="names_full")
            return
        full = len(self._names) >= self._conf.max_names
        self.refuse(
            "names_full",
            "names",
            f"{values.shown(clean)} and further new names are not recorded: this process has "
            f"logged {len(self._names)} different ones "
            f"({'OTEL_DDP_MAX_NAMES' if full else 'OTEL_DDP_JOURNAL_BYTES'})",
        )

    def _whole(self, step: Any) -> int | None:
        if step is None:
            return None
        whole = containment.attempt(lambda: _whole_number(step), -1)
        if not 0 <= whole < _LARGEST_STEP:
            shown = values.shown(step)
            self.refuse("value", "step", f"step must be a whole number from 0 on, got {shown}")
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
            self.refuse("value", "epoch", f"the epoch was not recorded: {why}")
            return None
        return number

    def _split(self, split: Any) -> str | None:
        if split is None:
            return None
        try:
            return values.text(split, 64)[0]
        except values.Refused as why:
            self.refuse("name", "split", f"the split was not recorded: {why}")
            return None

    def record_reading(self, found: Mapping[str, Any], step: int) -> None:
        """Records values that we read ourselves, unless the user logs a value of that name."""
        now = time_ns()
        self._in_reading = True
        try:
            known = {self._name(name, None): value for name, value in found.items()}
        finally:
            self._in_reading = False
        known.pop(0, None)
        for number, value in known.items():
            if values.is_device_tensor(value):
                self._start_copy(number, value, step, None, now)
                continue
            number_of = containment.attempt(partial(values.number, value), None)
            if number_of is not None:
                self._write((number,), (number_of,), step, None, now)

    # -- tensors of a device

    @containment.contained()
    def _start_copy(
        self, number: int, tensor: Any, step: int | None, epoch: float | None, now: int
    ) -> None:
        if self.device_scalars is None:
            from otel_ddp.recording.device_scalars import DeviceScalars

            self.device_scalars = DeviceScalars(self._copy_arrived)
        # Where the device's launch queue is full the copy waits for a place.
        words = self.writer.words
        words[_IN_MARK] = 1
        try:
            why = self.device_scalars.start_copy(number, tensor, step, epoch, now)
        finally:
            words[_IN_MARK] = 0
        if why:
            name = values.shown(self._named[number][0])
            self.refuse("value", f"tensor:{name}", f"{name} was not recorded: {why}")

    def _copy_arrived(
        self, number: int, value: float, step: int | None, epoch: float | None, now: int
    ) -> None:
        self._write((number,), (value,), step, epoch, now)

    @containment.contained()
    def poll_copies(self) -> None:
        """Records the tensors that have arrived by now."""
        self._count_interrupted()
        if self.device_scalars is not None:
            self.device_scalars.poll()
            self._count_lost()

    @containment.contained()
    def drain_copies(self) -> None:
        """Waits a moment for the tensors that are still being copied."""
        self._count_interrupted()
        if self.device_scalars is not None:
            self.device_scalars.drain()
            self._count_lost()

    def _count_lost(self) -> None:
        """Counts the tensors that will never arrive."""
        lost = self.device_scalars.lost
        self.device_scalars.lost = 0
        for _ in range(lost):
            self.refuse("value", "lost", "tensors logged last were lost: their device failed")


def _collect(metrics: Mapping[Any, Any], pairs: list[tuple[Any, Any]]) -> bool:
    """Appends the pairs of a mapping to a list; False if the mapping failed before its end."""

    def walk() -> bool:
        pairs.extend(metrics.items())
        return True

    return containment.attempt(walk, False)


def _epoch_among(known: Sequence[tuple[int, Any, Any]]) -> float | None:
    """The epoch among these names and values, if there is one."""
    for _, name, value in known:
        if isinstance(name, str) and name.lower() in _EPOCHS:
            # A value that is no number is refused later, once.
            number = containment.attempt(partial(values.number, value), None)
            return number if number is not None and number - number == 0.0 else None
    return None


def _whole_number(value: Any) -> int:
    """A step as a plain int; -1 if it is none. May run the user's code."""
    if values.is_device_tensor(value) or values.is_spread(value):
        return -1
    # Not by way of a float, which cannot hold a large step.
    whole = containment.attempt(lambda: index(value), None)
    if whole is not None:
        return int(whole)
    number = values.number(value)
    return int(number) if number.is_integer() else -1
