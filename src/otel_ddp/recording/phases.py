"""Which phases are open: one goes inside the other, and time counts for the innermost one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import Any, NamedTuple

from otel_ddp.journal import layout
from otel_ddp.journal.writer import JournalWriter, scratch_words
from otel_ddp.recording.documents import Documents
from otel_ddp.vocabulary.words import PHASES

_SHIFT = layout.CODE_SHIFT
PHASE_WORD = layout.PHASE // 8


class DevicePosition(NamedTuple):
    """Where a device is in the training."""

    phase: int
    step: int | None
    """The number of the last step that it has done; None where that is the same as its host's."""


class Phase:
    """A phase that may be open. Two of one name are two: threads leave them in any order."""

    __slots__ = ("base", "code", "expect_ms", "name", "of_hooks", "word")

    def __init__(
        self, name: str, code: int, origin_ns: int, word: int = 0, expect_ms: int = 0
    ) -> None:
        self.name = name
        self.code = code
        self.of_hooks = False  # entered and left within one step
        self.expect_ms = expect_ms
        self.word = word  # the number of the user's own name for it
        # Plus the clock, this is the journal's word for "in this phase since now".
        self.base = (code << _SHIFT) - origin_ns


class OpenPhases:
    """The open phases, the word for the innermost one, and the words that wait to be flushed.

    Hooks enter and leave on the training thread, ten times a step. The word is written at once.
    """

    __slots__ = ("_bases", "clock", "device_clock", "opened", "origin_ns", "pending", "words")

    def __init__(self, writer: JournalWriter, clock: Callable[[], int] = monotonic_ns) -> None:
        """*clock*: in nanoseconds, like the time at which the journal was made."""
        self.clock = clock
        self.origin_ns = writer.created_monotonic_ns
        self.words = writer.words
        # What is open where nothing else is: in a step that is not measured, and in one that is.
        names = ("unmeasured", "other")
        self._bases = [Phase(name, PHASES[name], self.origin_ns) for name in names]
        self.opened = [self._bases[True]]
        self.pending: list[int] = []
        # The device's clock, if there is one, gets each change on the training thread. It is a
        # `DeviceClock` of torch/, which this room does not import.
        self.device_clock: Any = None

    def enter(self, phase: Phase) -> None:
        """Enters a phase inside the open one."""
        self.opened.append(phase)
        self._change(phase)

    def leave(self, phase: Phase) -> None:
        """Leaves a phase and all that is open inside it; nothing if the phase is not open."""
        opened = self.opened
        if phase in opened:
            del opened[opened.index(phase) :]
            self._change(opened[-1])

    def _change(self, phase: Phase) -> None:
        """From now on time counts for this phase."""
        self.words[PHASE_WORD] = word = phase.base + self.clock()
        self.pending.append(word)
        if self.device_clock is not None:
            self.device_clock.mark(word)

    def measure(self, measured: bool) -> None:
        """Whether the phases of what follows are measured."""
        self.opened[0] = self._bases[measured]

    def go_on_measured(self) -> None:
        """In the middle of a step: from now on its phases are measured."""
        self.measure(True)
        self._change(self.opened[-1])

    def of_hooks(self, name: str, of_buffers: bool = False) -> Phase:
        """A phase for hooks, made once, which they enter and leave in each step."""
        phase = Phase(name, PHASES[name] | (layout.OF_BUFFERS if of_buffers else 0), self.origin_ns)
        phase.of_hooks = True
        return phase

    def now_ns(self) -> int:
        """The time since the making of the journal."""
        return self.clock() - self.origin_ns

    def close(self) -> None:
        """The journal is about to close: words that come later go nowhere."""
        self.words = scratch_words()


class DeviceTimes:
    """What the device's clock has learnt; flushed with the rest."""

    def __init__(self, phases: OpenPhases) -> None:
        self.phases = phases
        self.by_phase: dict[int, float] = {}
        self.words: list[int] = []
        self.flushed_words = 0

    @property
    def present_words(self) -> memoryview[int]:
        """The journal's, with the present phase."""
        return self.phases.words

    def add_device_time(self, code: int, seconds: float) -> None:
        """Adds time that the device has spent in a phase."""
        self.by_phase[code] = self.by_phase.get(code, 0.0) + seconds

    def add_device_words(self, words: Sequence[int]) -> None:
        """Adds the words of a step that the device has finished."""
        self.words += words

    def flush(self, documents: Documents) -> dict[int, float]:
        """Appends the words to their ring; returns the time by phase since the last call."""
        by_phase, self.by_phase = self.by_phase, {}
        # Hooks may go on here.
        words = self.words[:]
        if words:
            del self.words[: len(words)]
            documents.append_words(layout.DEVICE_STEPS, self.flushed_words, words)
            self.flushed_words += len(words)
        return by_phase
