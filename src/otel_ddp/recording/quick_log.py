"""The hot path of `Run.log`: known names with plain finite numbers go straight to the journal."""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from math import fsum
from struct import Struct
from time import time_ns
from typing import TYPE_CHECKING, Any, Protocol
from zlib import crc32

from otel_ddp.errors import containment
from otel_ddp.journal import layout
from otel_ddp.journal.writer import Shape

if TYPE_CHECKING:
    from otel_ddp.recording.recorder import Recorder

# Walking through one of these runs no code of the user.
PLAIN_MAPPINGS: frozenset[type] = frozenset({dict, OrderedDict, defaultdict})
# The recorder adds NumPy's scalars when the first one comes.
PLAIN_TYPES: set[type] = {float, int, bool}

_NO_EPOCH = float("nan")


class Log(Protocol):
    """The signature of `Run.log`."""

    def __call__(
        self,
        metrics: Any,
        *,
        step: Any = None,
        epoch: Any = None,
        split: Any = None,
    ) -> None: ...


# How the hot path writes one set of names: the names, their split and shape; whether all values
# were floats (other plain numbers are checked one by one); whether one of the names belongs to
# training, since its step is then the run's step; the name whose value is the epoch of them all;
# and what the writer's records of this shape have in common. A plain tuple: Python takes one apart
# faster than a subclass.
KnownNames = tuple[
    list[str], str | None, Shape, bool, bool, str, Any, Any, int, bytes, bytes, bytes
]


def known_names(
    names: list[str], split: str | None, shape: Shape, floats: bool, trains: bool, epoch_name: str
) -> KnownNames:
    """How the hot path writes these names, with all that can be worked out beforehand."""
    join = None if shape.parts else Struct(f"<I{shape.size - 4}s").pack
    # fmt: off
    return (names, split, shape, floats, trains, epoch_name, shape.pack, join, shape.size,
            shape.head, shape.counts, shape.ids)
    # fmt: on


# No call has an equal split, so these are the names of none.
_NO_SPLIT: Any = object()
NO_NAMES = known_names([], _NO_SPLIT, Shape([]), False, False, "")


def _plain_numbers(given: Iterable[Any]) -> list[float] | None:
    """Plain numbers of numbers and scalar tensors of the CPU; None if anything else is given."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    numbers = []
    for value in given:
        kind = type(value)
        # A subclass may do anything when it is asked, and a device would make training wait.
        if kind is tensor and value.is_cpu and not value.dim():
            value = value.item()
            kind = type(value)
        if kind not in PLAIN_TYPES:
            return None
        numbers.append(value)
    return numbers


def quick_log(recorder: Recorder) -> Log:
    """Builds the `log` of one recorder.

    A closure with everything in local names: attribute lookups and calls would take a third of
    its time. It does by itself what `LockedJournal._locked` and `JournalWriter.scalars` do for
    all others, so the three must agree on the lock, on `inside` and on the bytes. Anything out
    of the ordinary goes to `Recorder.log_slowly`, which starts over and contains errors.
    """
    writer = recorder.writer
    acquire, release = recorder.lock.acquire, recorder.lock.release
    mapped, words = writer.mapped, writer.words
    ring_start, ring_bytes = writer.ring_start, writer.ring_bytes
    slowly, known = recorder.log_slowly, recorder.known_names
    plain_mappings, plain_types = PLAIN_MAPPINGS, PLAIN_TYPES
    clock, crc, any_error, no_epoch = time_ns, crc32, containment.ANY_ERROR, _NO_EPOCH
    ring_word = layout.RING_POSITION // 8
    # float's own method accepts floats only. A tensor would be asked for its value, and NumPy's
    # scalars, of which this makes plain floats, would warn in a sum about overflow and infinity.
    as_float = float.conjugate

    def log(metrics: Any, *, step: Any = None, epoch: Any = None, split: Any = None) -> None:
        """Record numbers: `run.log({"loss": loss, "lr": lr}, step=step)`."""
        now = clock()
        try:
            kind = type(metrics)
            if kind is not dict and kind not in plain_mappings:
                return slowly(metrics, step, epoch, split, now)
            # Most calls log the names of the call before.
            (names, known_split, shape, floats, trains, epoch_name, pack, join, size, head, counts,
             ids) = recorder.last_names  # fmt: skip
            if [*metrics] != names or split != known_split:
                key = (split, *metrics)
                found = recorder.last_names = known[key]
                (_, _, shape, floats, trains, epoch_name, pack, join, size, head, counts,
                 ids) = found  # fmt: skip
            numbers: Any = metrics.values()
            if floats:
                total = sum(map(as_float, numbers))
            else:
                if not plain_types.issuperset(map(type, numbers)):
                    numbers = _plain_numbers(numbers)
                    if numbers is None:
                        return slowly(metrics, step, epoch, split, now)
                total = fsum(numbers)
            if total - total != 0.0 or (step is not None and (type(step) is not int or step < 0)):
                return slowly(metrics, step, epoch, split, now)
            if epoch is None:
                at = no_epoch
                if epoch_name:
                    at = metrics[epoch_name]
                    if type(at) not in plain_types:
                        found_epoch = _plain_numbers((at,))
                        if found_epoch is None:
                            return slowly(metrics, step, epoch, split, now)
                        at = found_epoch[0]
            elif type(epoch) not in (int, float) or epoch - epoch != 0:
                return slowly(metrics, step, epoch, split, now)
            else:
                at = epoch
            entered = False
            try:
                # `with` costs twice as much. Python runs signal handlers after a call only, so
                # none can raise between the beginning of this block and the end of acquire().
                acquire()
                if recorder.inside:
                    recorder.note_reentry()
                else:
                    entered = recorder.inside = True
                    counted = recorder.next_step(trains) if step is None else step
                    position = writer.position
                    offset = position % ring_bytes
                    end = offset + size
                    latest = shape.latest
                    if latest is None or end > ring_bytes:
                        writer.scalars(shape, now, counted, at, numbers)
                    else:
                        number = (writer.number + 1) & 0xFFFFFFFF
                        body = pack(head, number, counts, now, counted, at, ids, *numbers)
                        record = join(crc(body, position), body)
                        mapped[ring_start + offset : ring_start + end] = record
                        # Counted once it is written: a value that does not pack was not lost.
                        writer.number = number
                        writer.position = words[ring_word] = position + size
                        words[shape.latest_word] = position
                        mapped[latest] = record
                    recorder.inside = False
                    if recorder.deferred is not None:
                        recorder.run_deferred()
            except BaseException:
                try:
                    if entered and recorder.inside:
                        recorder.inside = False
                        if recorder.deferred is not None:
                            recorder.run_deferred()
                finally:
                    # No `suppress`: a handler could raise in the call of it.
                    try:  # noqa: SIM105
                        release()
                    except RuntimeError:
                        pass  # A handler raised while this waited in acquire().
                raise
            release()
            if not entered:
                return None
            if step is not None and trains:
                recorder.step = step if step >= recorder.step else recorder.step_after_lower(step)
        # Most often these are names seen for the first time.
        except any_error:
            containment.reraise_foreign()
            return slowly(metrics, step, epoch, split, now)
        if now > recorder.check_due_ns:
            recorder.check_agent(now)
        return None

    return log
