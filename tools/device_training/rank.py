"""One rank: a host that launches kernels, and a device that executes them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import repeat
from operator import mul
from typing import NamedTuple

import torch

from otel_ddp.journal.layout import CODE_SHIFT, STEP_ENDED, STEP_NUMBER, STEP_WORK, STEPS_BEGAN
from otel_ddp.journal.writer import scratch_words
from otel_ddp.torch.device_clock import DeviceClock
from otel_ddp.vocabulary.words import PHASES

# The capacity of a device's launch queue in kernels; the host blocks while it is full.
QUEUE = 1024
# The largest drift between a device's and its host's clock.
_DRIFT = 20e-6
_FACTORS = 4096
MS = 1_000_000
_E = 2.718281828459045


@lru_cache
def _factors(sigma: float) -> list[float]:
    chance = random.Random(1)
    return [_E ** chance.gauss(0, sigma) for _ in range(_FACTORS)]


def _drawn(chance: Callable[[], float]) -> Iterator[int]:
    """Log-normal factors; in C, as Python would take three times as long."""
    return map(int, map(mul, iter(chance, None), repeat(_FACTORS)))


class Jitter:
    """A log-normal factor for a whole step, and half of it in addition for each part."""

    def __init__(self, sigma: float, seed: str) -> None:
        self._at = _drawn(random.Random(seed).random) if sigma else repeat(0)
        self._of_step, self._of_part = _factors(sigma), _factors(sigma / 2)
        self._whole = 1.0

    def begin_step(self) -> None:
        """A new factor for the whole step."""
        self._whole = self._of_step[next(self._at)]

    def part(self) -> float:
        """The factor of one part of the step."""
        return self._whole * self._of_part[next(self._at)]


class _Event:
    """An event of `torch.cuda` on the compute stream."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._passed_ns = 0.0

    def record(self, stream: object) -> None:
        self._passed_ns = max(self._rank.compute_ns, self._rank.host_ns)

    def query(self) -> bool:
        return self._passed_ns <= self._rank.host_ns

    def elapsed_time(self, later: _Event) -> float:
        return (later._passed_ns - self._passed_ns) * self._rank.device_pace / MS


class _Module:
    """The part of `torch.cuda` that the device clock uses."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def Event(self, enable_timing: bool) -> _Event:
        return _Event(self._rank)

    def current_stream(self, index: int) -> None:
        """The only stream."""

    def is_current_stream_capturing(self) -> bool:
        return False


class Mark(NamedTuple):
    """A change of phase, or the end of a step."""

    code: int
    """A code of journal words."""
    host_ns: int
    device_ns: int
    """When the device has executed all that was launched before."""


class Rank:
    """Times are on the host's clock, since the creation of the journal."""

    def __init__(self, rank: int, jitter: float, seed: int) -> None:
        self.rank = rank
        # Separate, so that events on one side do not change the random numbers of the other.
        self.host_jitter = Jitter(jitter, f"host {rank} {seed}")
        self.device_jitter = Jitter(jitter, f"device {rank} {seed}")
        self.loader_jitter = Jitter(jitter, f"loader {rank} {seed}")
        self.chance = random.Random(f"disturbances {rank} {seed}")
        self.host_ns = 0.0
        self.compute_ns = 0.0
        """When the compute stream is idle."""
        self.comm_ns = 0.0
        """When the communication stream is idle."""
        self.launched = 0
        self.device_pace = 1 + random.Random(f"pace {rank} {seed}").uniform(-_DRIFT, _DRIFT)
        self.marks: list[Mark] = []
        """Of the present step."""
        self.host_words = [STEPS_BEGAN << CODE_SHIFT]
        self.device_words: list[int] = []
        """What the device clock has written since the last step."""
        self.present_words = scratch_words()
        self._clock = DeviceClock(torch.device("cuda", 0), module=_Module(self), times=self)
        self.mark("other")
        # Consecutive kernels: the number of the last one since the start, how many they are, and
        # when the device started and finished them.
        self._queued: deque[tuple[int, int, float, float]] = deque()
        # For each prefetched batch: when the host took the previous one in its slot.
        self._taken_ns: deque[float] = deque()
        self._loaded_ns = 0.0

    # -- the host

    def launch(self, kernels: int, launch_ns: float, work_ns: float) -> None:
        """Launch kernels that keep the device busy for *work_ns* in total."""
        # The hot spot of a simulation: `max` would double its time.
        each_ns = launch_ns * self.host_jitter.part()
        work_ns *= self.device_jitter.part()
        began_ns = self.host_ns + each_ns
        last_ns = self.host_ns + kernels * each_ns
        self.launched += kernels
        if self.launched > QUEUE and (room_ns := self._room_ns(each_ns)) > last_ns:
            last_ns = room_ns
        if self.compute_ns > began_ns:
            began_ns = self.compute_ns
        done_ns = began_ns + work_ns
        # Either the device is busy without a pause, or it waits for the last kernel.
        if (waited_ns := last_ns + work_ns / kernels) > done_ns:
            done_ns = waited_ns
        self._queued.append((self.launched, kernels, began_ns, done_ns))
        self.host_ns = last_ns
        self.compute_ns = done_ns

    def _room_ns(self, each_ns: float) -> float:
        """When the queue has room for the last kernel launched, at *each_ns* a launch."""
        # There is room when the kernel QUEUE places before it is done.
        kernel = self.launched - QUEUE
        queued, room_ns = self._queued, 0.0
        last, kernels, began_ns, done_ns = queued[0]
        while last < kernel:
            if (after_ns := done_ns + (kernel - last) * each_ns) > room_ns:
                room_ns = after_ns
            queued.popleft()
            last, kernels, began_ns, done_ns = queued[0]
        within_ns = done_ns - (done_ns - began_ns) * (last - kernel) / kernels
        return within_ns if within_ns > room_ns else room_ns

    def work(self, work_ns: float) -> None:
        """Work of the host itself."""
        self.host_ns += work_ns * self.host_jitter.part()

    def synchronize(self) -> None:
        """Wait until the device is idle, as in `.item()`."""
        self.host_ns = max(self.host_ns, self.compute_ns)

    def load(self, load_ns: float, prefetch: int) -> None:
        """Take the next batch; *prefetch*: how many the loader's worker keeps ready."""
        load_ns *= self.loader_jitter.part()
        if not prefetch:
            self.host_ns += load_ns
            return
        # The worker starts a batch once its slot is free.
        room_ns = self._taken_ns.popleft() if len(self._taken_ns) == prefetch else 0.0
        self._loaded_ns = max(self._loaded_ns, room_ns) + load_ns
        self.host_ns = max(self.host_ns, self._loaded_ns)
        self._taken_ns.append(self.host_ns)

    # -- the streams

    def wait_for_communication(self) -> None:
        """Let the compute stream wait for all collectives so far."""
        self.compute_ns = max(self.compute_ns, self.comm_ns)

    # -- records of hooks and device clock

    def mark(self, phase: str) -> None:
        """Begin a phase: on the host now, on the device when it gets here."""
        self._clock.mark(self._mark(PHASES[phase]))

    def _mark(self, code: int) -> int:
        host_ns = round(self.host_ns)
        self.marks.append(Mark(code, host_ns, max(round(self.compute_ns), host_ns)))
        word = code << CODE_SHIFT | host_ns
        self.host_words.append(word)
        return word

    def end_step(self, number: int, amount: int) -> tuple[list[Mark], list[int], list[int]]:
        """The marks and words of the step, and words of steps that the device has finished."""
        self.host_words += (STEP_WORK << CODE_SHIFT | amount, STEP_NUMBER << CODE_SHIFT | number)
        self._mark(STEP_ENDED)
        marks, words, self.marks, self.host_words = self.marks, self.host_words, [], []
        self.mark("other")
        self._clock.step_finished(number, round(self.host_ns))
        device_words, self.device_words = self.device_words, []
        return marks, words, device_words

    def begin_step(self) -> None:
        """Draw new factors for the next step."""
        for jitter in (self.host_jitter, self.device_jitter, self.loader_jitter):
            jitter.begin_step()

    # -- the interface for the device clock

    def add_device_time(self, code: int, seconds: float) -> None:
        """Totals are not simulated."""

    def add_device_words(self, words: Sequence[int]) -> None:
        """Record the words of a step that the device has finished."""
        self.device_words += words


class UnwatchedRank(Rank):
    """Writes down no more than when its steps end."""

    def mark(self, phase: str) -> None:
        """Nothing of a phase is wanted."""

    def end_step(self, number: int, amount: int) -> tuple[list[Mark], list[int], list[int]]:
        """The mark at its end."""
        self._mark(STEP_ENDED)
        marks, self.marks, self.host_words = self.marks, [], []
        return marks, [], []
