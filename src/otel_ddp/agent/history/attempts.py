"""The attempts of a run: assigns processes and steps to them, and finds repeated steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from otel_ddp.diagnosis.steps import Step

_MOST_ATTEMPTS = 100
# After a restart, steps are held back until a rank logs the program's own step number, which tells
# whether they are repeated. Limits of held steps and of their time, for each rank and clock: beyond
# them, the program is assumed to log no numbers.
_MOST_HELD, _HELD_NS = 500, 60 * 10**9


class Placed(NamedTuple):
    """A step, with its position among the steps of all attempts."""

    step: Step
    number: int
    """The step's position in charts. A repeated step has the position of its first execution."""
    is_repeated: bool | None
    """Whether an earlier attempt has done the same step; None if unknown."""


class _Numbers:
    """Relates the program's logged step numbers in one attempt to our numbers, which begin at 1."""

    def __init__(self) -> None:
        self.known_until = 0
        """The last step, by our number, for which a rank has logged the program's own number."""
        self.is_silent = False
        """Whether the program seems to log no step numbers."""
        self.source = ""
        """The rank whose logged numbers are used. Those of other ranks may differ."""
        self.shift: int | None = None
        """The program's number minus our number, for the last step with a logged number."""
        self.is_even = True
        """Whether the program counts steps as we do. Some count micro-batches or epochs."""
        self._moved = 0

    def add(self, number: int, logged: int) -> None:
        """Note that the program has logged the number *logged* for our step *number*."""
        shift = logged - number
        # One change by 1 is allowed: until the program logs a number, the step count of a resumed
        # optimizer is used, which may be off by one.
        self._moved += 0 if self.shift is None else abs(shift - self.shift)
        self.is_even = self.is_even and self._moved < 2
        self.shift = shift
        self.known_until = max(self.known_until, number)

    def go_on(self, attempt: Mapping[str, Any]) -> None:
        """Continue with the numbers of an attempt that began under an earlier agent."""
        self.source = attempt.get("source", "")
        self.shift, self.is_even = attempt.get("shift"), attempt.get("is_even", True)


class Attempts:
    """The attempts of one run. Each launch is an attempt, and each restart by a launcher."""

    def __init__(self, kept: Sequence[Mapping[str, Any]] = ()) -> None:
        """*kept*: the attempts as stored in the history."""
        self.entries: list[dict[str, Any]] = [dict(each) for each in kept]
        """All attempts in order, as stored in the history."""
        self._numbers = _Numbers()
        # From earlier attempts: the rank whose logged numbers were used last, and the shift between
        # the program's numbers and ours in the first attempt with a step.
        self._source = ""
        self._first_shift: int | None = None
        self._is_even = True
        # The furthest step of earlier attempts: `_before` is its number in the program,
        # `_last_place` is its position in charts.
        self._before, self._last_place = -1, 0
        self._held: dict[tuple[str, str], list[Step]] = {}
        for each in self.entries[:-1]:
            self._remember(each)
        if self.entries:
            self._numbers.go_on(self.entries[-1])

    def _remember(self, attempt: Mapping[str, Any]) -> None:
        """Remember what later attempts need to know about an ended attempt."""
        self._source = attempt.get("source", self._source)
        if self._first_shift is None and "last_place" in attempt:
            # If the program logs no numbers, assume that it counts steps as we do.
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
        # The first one stays: it has the beginning of the run, and its first step number.
        del self.entries[1 : 1 - _MOST_ATTEMPTS]
        self._numbers = _Numbers()
        self._held.clear()

    def end(self, ended_ns: int, state: str) -> None:
        """End the current attempt."""
        self.entries[-1] |= {"ended_ns": ended_ns, "state": state}

    def go_on(self) -> None:
        """Undo the end of the current attempt, since one of its processes still runs."""
        for key in ("ended_ns", "state"):
            self.entries[-1].pop(key, None)

    def reach(self, rank: str, step: int) -> None:
        """Note the last step of a process that has ended.

        After a sudden end, the steps of its last quarter of a second may be missing in its journal.
        """
        # Only the rank whose logged numbers are used has recorded the program's number of the step.
        # Any other rank has recorded our number, which is not comparable.
        if self._numbers.shift is None or rank == self._numbers.source:
            self.entries[-1]["last_step"] = max(self.entries[-1].get("last_step", -1), step)

    def explain(self, time_ns: int, why: str) -> None:
        """Set why the attempt that ran at *time_ns* ended.

        If there are several reasons, the earliest one is used, in its latest wording.
        """
        for each in reversed(self.entries):
            if each["began_ns"] < time_ns:
                if time_ns <= each.get("why_ns", time_ns):
                    each |= {"why": why, "why_ns": time_ns}
                return

    def take_back(self, time_ns: int) -> None:
        """Withdraw the reason that was set for this time."""
        for each in self.entries:
            if each.get("why_ns") == time_ns:
                del each["why"], each["why_ns"]

    # -- steps

    def place(self, rank: str, clock: str, steps: Iterable[Step]) -> list[Placed]:
        """Add steps of a rank. Returns all steps, also held ones, whose places are known by now."""
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
        if "shift" not in attempt and self._source:
            # As in `_placed`: do not replace the steps of earlier attempts.
            earlier = [e.get("last_place", 0) for e in self.entries if e["attempt"] < number]
            shift = max(earlier, default=0)
        return [Placed(each, each.number + shift, None) for each in steps if each.number]

    def release(self, rank: str, clock: str) -> list[Placed]:
        """Place the held steps of a rank without waiting longer for the program's numbers."""
        held = self._held.pop((rank, clock), ())
        if self._numbers.shift is None:
            # No numbers are known: the rank whose numbers should be used has ended, or logs none.
            # Use the numbers of this rank.
            self._note_numbers(rank, held)
        placed = [self._placed(each) for each in held]
        self._note(placed)
        return placed

    def held(self) -> dict[str, tuple[int, int]]:
        """For each rank with held steps: when the first one began, and when the last one ended."""
        found = {rank: of for (rank, clock), of in self._held.items() if of and clock == "host"}
        return {rank: (held[0].began_ns, held[-1].ended_ns) for rank, held in found.items()}

    def _note_numbers(self, rank: str, steps: Iterable[Step]) -> None:
        """Note the program's step numbers that a rank has logged during these steps."""
        for each in steps:
            # Skip the first step: a program logs a step's number after the step, so it cannot have
            # logged one yet.
            if each.logged is not None and (each.number or 0) > 1:
                self._numbers.source = rank
                self._numbers.add(each.number or 0, each.logged)

    def _counts_numbers_of(self, rank: str) -> bool:
        """Whether to use the step numbers that this rank logs.

        The numbers of only one rank are used, if possible of the same rank as in the last attempt.
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
            # So it is unknown whether a step is repeated, except for steps beyond the furthest one.
            # If earlier attempts had step numbers, do not replace their steps: it may have resumed.
            base = self._last_place if shift is None and self._source and self._is_even else 0
            return Placed(step, base + ours, None if ours <= self._last_place else False)
        number = ours + shift
        return Placed(step, number - (self._first_shift or 0), number <= self._before)

    def _note(self, placed: Sequence[Placed]) -> None:
        if not placed or not self.entries:
            return
        numbers, entry = self._numbers, self.entries[-1]
        last_place = max(each.number for each in placed)
        entry["last_place"] = max(entry.get("last_place", 0), last_place)
        if numbers.shift is None and not self._source:
            entry["last_step"] = entry["last_place"]
        elif numbers.shift is not None:
            furthest = numbers.known_until + numbers.shift
            entry["last_step"] = max(entry.get("last_step", -1), furthest)
            entry |= {"shift": numbers.shift, "is_even": numbers.is_even, "source": numbers.source}
            if numbers.is_even or "first_step" not in entry:
                entry["first_step"] = 1 + numbers.shift
        new = [each.step.began_ns for each in placed if each.is_repeated is False]
        if new:
            entry["new_ns"] = min(new[0], entry.get("new_ns", new[0]))
        # All ranks repeat the same steps, so do not add them up over the ranks.
        repeated = [each.step.number or 0 for each in placed if each.is_repeated]
        if repeated:
            entry["repeated_steps"] = max(entry.get("repeated_steps", 0), *repeated)
