"""The attempts of a run: which of its launches a process is of, and which steps they did twice."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from otel_ddp.diagnosis.steps import Step

_MOST_ATTEMPTS = 100
# Steps wait until a rank that logs has told which ones they are: so many of each rank and clock,
# and for so long. Then it is not known.
_MOST_HELD, _HELD_NS = 500, 60 * 10**9


class Placed(NamedTuple):
    """A step, and where it belongs among those of all attempts."""

    step: Step
    number: int
    """Its place on the axis of steps: a step that is done twice has one place."""
    is_repeated: bool | None
    """Whether an earlier attempt had done it; None: not known."""


class _Numbers:
    """How the numbers of one attempt's steps relate to those of the program."""

    def __init__(self) -> None:
        self.told_until = 0
        """Up to this step of ours, a rank has told by which number the program knows it."""
        self.is_silent = False
        """The program tells no number, as far as can be seen."""
        self.teller = ""
        """The rank that tells it: several may count from 0 and from 1."""
        self.shift: int | None = None
        """The program's number less ours, as last told."""
        self.is_even = True
        """It counts steps as we do. Some count each part of a step, or epochs."""
        self._moved = 0
        self.furthest = -1
        """By the program, or by ours where it tells none."""

    def tell(self, number: int, logged: int) -> None:
        """The program's number of a step."""
        shift = logged - number
        # Once by one: what a resumed optimizer has counted holds until the first number is logged.
        self._moved += 0 if self.shift is None else abs(shift - self.shift)
        self.is_even = self.is_even and self._moved < 2
        self.shift = shift
        self.told_until = max(self.told_until, number)
        self.furthest = max(self.furthest, logged)

    def go_on(self, attempt: Mapping[str, Any]) -> None:
        """Another agent has seen the beginning of the attempt, and told this of it."""
        self.teller = attempt.get("teller", "")
        self.shift, self.is_even = attempt.get("shift"), attempt.get("is_even", True)
        self.furthest = attempt.get("last_step", -1)


class Attempts:
    """The attempts of one run on this node: each launch under the run's name is one."""

    def __init__(self, kept: Sequence[Mapping[str, Any]] = ()) -> None:
        """*kept*: what the history tells of earlier ones, as `told` was."""
        self.told: list[dict[str, Any]] = [dict(each) for each in kept]
        """For people, as JSON."""
        self._numbers = _Numbers()
        # The rank that told the program's number last, and by how much that was more than ours in
        # the first attempt with a step.
        self._teller = ""
        self._first_shift: int | None = None
        self._is_even = True
        # The furthest step of earlier attempts: by the program's number, and by its place.
        self._before, self._last_place = -1, 0
        self._held: dict[tuple[str, str], deque[Step]] = {}
        for each in self.told[:-1]:
            self._remember(each)
        if self.told:
            self._numbers.go_on(self.told[-1])

    def _remember(self, attempt: Mapping[str, Any]) -> None:
        """Of an attempt that is over, what later ones are compared with."""
        self._teller = attempt.get("teller", self._teller)
        if self._first_shift is None and "last_place" in attempt:
            # A program that tells no number counts as we do, as far as is known.
            self._first_shift = attempt.get("shift", 0)
        self._is_even = self._is_even and attempt.get("is_even", True)
        self._before = max(self._before, attempt.get("last_step", -1))
        self._last_place = max(self._last_place, attempt.get("last_place") or 0)

    @property
    def present(self) -> int:
        """The number of the current attempt."""
        return int(self.told[-1]["attempt"]) if self.told else 1

    def of(self, began_ns: int) -> int:
        """The number of the attempt of a process that began then."""
        for each, later in pairwise(self.told):
            if began_ns < each.get("ended_ns", later["began_ns"]):
                return int(each["attempt"])
        return self.present

    @property
    def began_ns(self) -> int:
        """When the current one began; 0: it is the first one."""
        return int(self.told[-1]["began_ns"]) if len(self.told) > 1 else 0

    def begin(self, began_ns: int) -> None:
        """The first process of another attempt is here."""
        if self.told:
            self._remember(self.told[-1])
        number = self.told[-1]["attempt"] + 1 if self.told else 1
        self.told.append({"attempt": number, "began_ns": began_ns})
        del self.told[:-_MOST_ATTEMPTS]
        self._numbers = _Numbers()
        self._held.clear()

    def end(self, ended_ns: int, state: str) -> None:
        """No process of the present one is left."""
        self.told[-1] |= {"ended_ns": ended_ns, "state": state}

    def go_on(self) -> None:
        """A process of it is left after all."""
        for key in ("ended_ns", "state"):
            self.told[-1].pop(key, None)

    def reach(self, rank: str, step: int) -> None:
        """The process of this rank has ended, and had come to this step.

        The last quarter of a second before a sudden end may be missing among its steps.
        """
        # The others know only how many they have made.
        if self._numbers.shift is None or rank == self._numbers.teller:
            self._numbers.furthest = max(self._numbers.furthest, step)
            self.told[-1]["last_step"] = max(self.told[-1].get("last_step", -1), step)

    def explain(self, time_ns: int, why: str) -> None:
        """Why the one ended that was going on then: the first reason counts, as last worded."""
        for each in reversed(self.told):
            if each["began_ns"] < time_ns:
                if time_ns <= each.get("why_ns", time_ns):
                    each |= {"why": why, "why_ns": time_ns}
                return

    def take_back(self, time_ns: int) -> None:
        """Withdraw the reason that was recorded for an attempt at this moment."""
        for each in self.told:
            if each.get("why_ns") == time_ns:
                del each["why"], each["why_ns"]

    # -- its steps

    def place(self, rank: str, clock: str, steps: Iterable[Step]) -> list[Placed]:
        """The steps of a rank whose places are known by now."""
        numbers, key = self._numbers, (rank, clock)
        steps = [each for each in steps if each.number is not None]
        if self._listens_to(rank):
            self._hear(rank, steps)
        if self.present == 1:
            placed = [Placed(each, each.number or 0, False) for each in steps]
        else:
            held = self._held.setdefault(key, deque())
            held.extend(steps)
            waits_ns = held[-1].ended_ns - held[0].ended_ns if held else 0
            if len(held) > _MOST_HELD or waits_ns > _HELD_NS:
                numbers.is_silent = True
                self._hear_instead(rank, held)
            placed = []
            while held and self._is_due(held):
                placed.append(self._placed(held.popleft()))
        self._note(placed)
        return placed

    def place_late(self, number: int, steps: Iterable[Step]) -> list[Placed]:
        """Steps of this earlier attempt, which come when the present one has begun."""
        attempt = next((each for each in self.told if each["attempt"] == number), self.told[0])
        shift = attempt.get("shift", 0) - (self._first_shift or 0)
        return [Placed(each, each.number + shift, None) for each in steps if each.number]

    def release(self, rank: str, clock: str) -> list[Placed]:
        """The held steps of a process that has ended or hangs: no rank will number them soon."""
        held = self._held.pop((rank, clock), ())
        self._hear_instead(rank, held)
        placed = [self._placed(each) for each in held]
        self._note(placed)
        return placed

    def _hear(self, rank: str, steps: Iterable[Step]) -> None:
        """By which numbers the program of this rank knows its steps."""
        for each in steps:
            # The first step is known by the second: a program logs after it.
            if each.logged is not None and (each.number or 0) > 1:
                self._numbers.teller = rank
                self._numbers.tell(each.number or 0, each.logged)

    def _hear_instead(self, rank: str, held: Iterable[Step]) -> None:
        """The rank whose step numbers placed earlier attempts has ended, or reports no numbers."""
        if self._numbers.shift is None:
            self._hear(rank, held)

    def _listens_to(self, rank: str) -> bool:
        """Whether its numbers count: those of one rank do, if it can be the one of before."""
        numbers = self._numbers
        if numbers.teller:
            return rank == numbers.teller
        return rank == self._teller or not self._teller or numbers.is_silent

    def _is_due(self, held: deque[Step]) -> bool:
        """Whether it is known what the first one is, or will not be known any more."""
        numbers = self._numbers
        return numbers.is_silent or (held[0].number or 0) <= numbers.told_until

    def _placed(self, step: Step) -> Placed:
        numbers, ours = self._numbers, step.number or 0
        shift = numbers.shift
        if shift is None and step.logged is not None:
            # It has made one step.
            shift = step.logged - ours
        if shift is None or not (numbers.is_even and self._is_even):
            # Without step numbers from the program, a restart and a resume look alike.
            return Placed(step, ours, None if ours <= self._last_place else False)
        number = ours + shift
        return Placed(step, number - (self._first_shift or 0), number <= self._before)

    def _note(self, placed: Sequence[Placed]) -> None:
        if not placed or not self.told:
            return
        numbers, told = self._numbers, self.told[-1]
        last_place = max(each.number for each in placed)
        told["last_place"] = max(told.get("last_place", 0), last_place)
        told["last_step"] = max(told.get("last_step", -1), numbers.furthest)
        if numbers.shift is None:
            told["last_step"] = told["last_place"]
        else:
            told |= {"shift": numbers.shift, "is_even": numbers.is_even, "teller": numbers.teller}
            if numbers.is_even or "first_step" not in told:
                told["first_step"] = 1 + numbers.shift
        new = [each.step.began_ns for each in placed if each.is_repeated is False]
        if new:
            told["new_ns"] = min(new[0], told.get("new_ns", new[0]))
        # All ranks do them, from the first step on: each is counted once.
        repeated = [each.step.number or 0 for each in placed if each.is_repeated]
        if repeated:
            told["repeated_steps"] = max(told.get("repeated_steps", 0), *repeated)
