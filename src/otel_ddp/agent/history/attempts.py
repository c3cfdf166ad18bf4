"""The attempts of a run: assigns processes and steps to them, and finds repeated steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from otel_ddp.diagnosis.steps import Step

_MOST_ATTEMPTS = 100
# Limits for each rank and clock: after a restart, steps are held until a rank logs the program's
# step number. Beyond the limits the number counts as unknown.
_MOST_HELD, _HELD_NS = 500, 60 * 10**9


class Placed(NamedTuple):
    """A step with its place among those of all attempts."""

    step: Step
    number: int
    """Its place on the axis of steps. A repeated step has the place of its first execution."""
    is_repeated: bool | None
    """Whether an earlier attempt has done the same step; None if unknown."""


class _Numbers:
    """Relates our numbers of one attempt's steps to the numbers that the program logs."""

    def __init__(self) -> None:
        self.known_until = 0
        """Our last step for which a rank has logged the program's own step number."""
        self.is_silent = False
        """Whether the program seems to log no step numbers."""
        self.source = ""
        """The rank whose logged numbers count: other ranks may begin at another number."""
        self.shift: int | None = None
        """The program's number minus ours, by the last logged one."""
        self.is_even = True
        """Whether the program counts steps as we do. Some count micro-batches or epochs."""
        self._moved = 0

    def add(self, number: int, logged: int) -> None:
        """Note the program's number of a step."""
        shift = logged - number
        # One change by 1 is allowed: before the first logged number, a resumed optimizer's count is
        # used.
        self._moved += 0 if self.shift is None else abs(shift - self.shift)
        self.is_even = self.is_even and self._moved < 2
        self.shift = shift
        self.known_until = max(self.known_until, number)

    def go_on(self, attempt: Mapping[str, Any]) -> None:
        """Continue an attempt whose beginning an earlier agent has seen."""
        self.source = attempt.get("source", "")
        self.shift, self.is_even = attempt.get("shift"), attempt.get("is_even", True)


class Attempts:
    """The attempts of one run: its launches, and restarts by a launcher."""

    def __init__(self, kept: Sequence[Mapping[str, Any]] = ()) -> None:
        """*kept*: the attempts as stored in the history."""
        self.entries: list[dict[str, Any]] = [dict(each) for each in kept]
        """All attempts, as JSON."""
        self._numbers = _Numbers()
        # The rank whose numbers counted last, and the shift of the first attempt with a step.
        self._source = ""
        self._first_shift: int | None = None
        self._is_even = True
        # The furthest step of earlier attempts, by the program's number and by place.
        self._before, self._last_place = -1, 0
        self._held: dict[tuple[str, str], list[Step]] = {}
        for each in self.entries[:-1]:
            self._remember(each)
        if self.entries:
            self._numbers.go_on(self.entries[-1])

    def _remember(self, attempt: Mapping[str, Any]) -> None:
        """Note the facts of an ended attempt with which later attempts are compared."""
        self._source = attempt.get("source", self._source)
        if self._first_shift is None and "last_place" in attempt:
            # A program without numbers is assumed to count as we do.
            self._first_shift = attempt.get("shift", 0)
        self._is_even = self._is_even and attempt.get("is_even", True)
        self._before = max(self._before, attempt.get("last_step", -1))
        self._last_place = max(self._last_place, attempt.get("last_place") or 0)

    @property
    def present(self) -> int:
        """The number of the current attempt."""
        return int(self.entries[-1]["attempt"]) if self.entries else 1

    def of(self, began_ns: int) -> int:
        """The number of the attempt of a process that began at this time."""
        for each, later in pairwise(self.entries):
            if began_ns < each.get("ended_ns", later["began_ns"]):
                return int(each["attempt"])
        return self.present

    @property
    def began_ns(self) -> int:
        """When the current attempt began; 0 for the first."""
        return int(self.entries[-1]["began_ns"]) if len(self.entries) > 1 else 0

    def begin(self, began_ns: int) -> None:
        """Begin another attempt."""
        if self.entries:
            self._remember(self.entries[-1])
        number = self.entries[-1]["attempt"] + 1 if self.entries else 1
        self.entries.append({"attempt": number, "began_ns": began_ns})
        del self.entries[:-_MOST_ATTEMPTS]
        self._numbers = _Numbers()
        self._held.clear()

    def end(self, ended_ns: int, state: str) -> None:
        """End the current attempt."""
        self.entries[-1] |= {"ended_ns": ended_ns, "state": state}

    def go_on(self) -> None:
        """Undo the end of the current attempt: one of its processes still runs."""
        for key in ("ended_ns", "state"):
            self.entries[-1].pop(key, None)

    def reach(self, rank: str, step: int) -> None:
        """Note the last step of a process that has ended.

        Its recorded steps may lack the last quarter of a second before a sudden end.
        """
        # The step of another rank is our number, not the program's.
        if self._numbers.shift is None or rank == self._numbers.source:
            self.entries[-1]["last_step"] = max(self.entries[-1].get("last_step", -1), step)

    def explain(self, time_ns: int, why: str) -> None:
        """Set why the attempt of that time ended.

        The earliest reason counts, in its latest wording.
        """
        for each in reversed(self.entries):
            if each["began_ns"] < time_ns:
                if time_ns <= each.get("why_ns", time_ns):
                    each |= {"why": why, "why_ns": time_ns}
                return

    def take_back(self, time_ns: int) -> None:
        """Withdraw the reason with this time."""
        for each in self.entries:
            if each.get("why_ns") == time_ns:
                del each["why"], each["why_ns"]

    # -- steps

    def place(self, rank: str, clock: str, steps: Iterable[Step]) -> list[Placed]:
        """Add steps of a rank; returns those whose places are known by now."""
        numbers = self._numbers
        steps = [each for each in steps if each.number is not None]
        if self._counts_numbers_of(rank):
            self._note_numbers(rank, steps)
        if self.present == 1:
            placed = [Placed(each, each.number or 0, False) for each in steps]
            self._note(placed)
            return placed
        held = self._held.setdefault((rank, clock), [])
        held.extend(steps)
        held_ns = held[-1].ended_ns - held[0].ended_ns if held else 0
        numbers.is_silent |= len(held) > _MOST_HELD or held_ns > _HELD_NS
        is_known = numbers.shift is not None or numbers.is_silent
        return self.release(rank, clock) if is_known else []

    def place_late(self, number: int, steps: Iterable[Step]) -> list[Placed]:
        """Place steps of an earlier attempt that are read late."""
        attempt = next((e for e in self.entries if e["attempt"] == number), self.entries[0])
        shift = attempt.get("shift", 0) - (self._first_shift or 0)
        return [Placed(each, each.number + shift, None) for each in steps if each.number]

    def release(self, rank: str, clock: str) -> list[Placed]:
        """Place the held steps without waiting for numbers."""
        held = self._held.pop((rank, clock), ())
        if self._numbers.shift is None:
            # The rank whose numbers count has ended, or logs none.
            self._note_numbers(rank, held)
        placed = [self._placed(each) for each in held]
        self._note(placed)
        return placed

    def held(self) -> dict[str, tuple[int, int]]:
        """By rank: the beginning and the end of its held steps."""
        found = {rank: held for (rank, _), held in self._held.items() if held}
        return {rank: (held[0].began_ns, held[-1].ended_ns) for rank, held in found.items()}

    def _note_numbers(self, rank: str, steps: Iterable[Step]) -> None:
        """Note the program's numbers in steps of a rank."""
        for each in steps:
            # Skip the first step: a program logs the number of a step only after that step.
            if each.logged is not None and (each.number or 0) > 1:
                self._numbers.source = rank
                self._numbers.add(each.number or 0, each.logged)

    def _counts_numbers_of(self, rank: str) -> bool:
        """Whether this rank's numbers count.

        Only those of one rank do, if possible the same rank as in the last attempt.
        """
        numbers = self._numbers
        if numbers.source:
            return rank == numbers.source
        return rank == self._source or not self._source or numbers.is_silent

    def _placed(self, step: Step) -> Placed:
        numbers, ours = self._numbers, step.number or 0
        shift = numbers.shift
        if shift is None or not (numbers.is_even and self._is_even):
            # Without step numbers from the program, a restart from step 0 and a resume look alike.
            return Placed(step, ours, None if ours <= self._last_place else False)
        number = ours + shift
        return Placed(step, number - (self._first_shift or 0), number <= self._before)

    def _note(self, placed: Sequence[Placed]) -> None:
        if not placed or not self.entries:
            return
        numbers, entry = self._numbers, self.entries[-1]
        last_place = max(each.number for each in placed)
        entry["last_place"] = max(entry.get("last_place", 0), last_place)
        if numbers.shift is None:
            entry["last_step"] = entry["last_place"]
        else:
            furthest = numbers.known_until + numbers.shift
            entry["last_step"] = max(entry.get("last_step", -1), furthest)
            entry |= {"shift": numbers.shift, "is_even": numbers.is_even, "source": numbers.source}
            if numbers.is_even or "first_step" not in entry:
                entry["first_step"] = 1 + numbers.shift
        new = [each.step.began_ns for each in placed if each.is_repeated is False]
        if new:
            entry["new_ns"] = min(new[0], entry.get("new_ns", new[0]))
        # All ranks repeat the same steps: count them once.
        repeated = [each.step.number or 0 for each in placed if each.is_repeated]
        if repeated:
            entry["repeated_steps"] = max(entry.get("repeated_steps", 0), *repeated)
