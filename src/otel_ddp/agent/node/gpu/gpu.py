"""Asks each device of a node what is due, and shows the answers that are fresh and possible."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from otel_ddp import containment
from otel_ddp.agent.node.gpu.driver import Absent, Device, Driver, Lost, Missing, Question, User
from otel_ddp.agent.node.reading import Reading

T = TypeVar("T")
Attributes = tuple[tuple[str, str], ...]

_S = 1_000_000_000
# A driver may be loaded later, a board may be added, MIG may be set up anew.
_LOOK_EVERY_NS = 60 * _S
_REOPEN_NS, _REOPEN_MOST_NS = 5 * _S, 60 * _S
# Three calls a board, and no faster than a person sees a process come.
_USERS_EVERY_S = 2.0
_FRESH_PERIODS = 3
# A tick that comes a little early must not put a question off by a whole tick.
_EARLY_NS = _S // 4


class DeviceSample(NamedTuple):
    """One device, what is known of it now, and the processes that compute on it."""

    device: Device
    readings: tuple[Reading, ...]
    users: tuple[User, ...]


class GpuSample(NamedTuple):
    """All devices at one moment."""

    devices: tuple[DeviceSample, ...]
    remark: str
    """Why there are none, or fewer than there were; empty where all is well."""
    errors: int
    """Numbers that could not be read or were impossible, since the beginning."""
    version: str


def identity(device: Device) -> Attributes:
    """The attributes that every metric of the catalogue's GPU section begins with."""
    return (("hw.id", device.uuid), ("gpu", device.index), ("hw.name", device.name))


class _Standing(Generic[T]):
    """A question that is asked in its turn, and the last answer to it."""

    def __init__(self, name: str, every_s: float, ask: Callable[[], T], due_ns: int) -> None:
        self.name = name
        self.ask = ask
        self.absent = False
        self._every_ns = max(1, int(every_s * _S))
        self._due_ns = due_ns
        self._answer: tuple[int, T] | None = None

    def due(self, now_ns: int) -> bool:
        """Whether to ask now; if so, it is the next period's turn."""
        if self.absent or now_ns + _EARLY_NS < self._due_ns:
            return False
        # Always whole periods: after a long wait questions still take their turns one by one.
        missed = max(0, now_ns - self._due_ns) // self._every_ns
        self._due_ns += self._every_ns * (1 + missed)
        return True

    def answered(self, answer: T, now_ns: int) -> None:
        self._answer = (now_ns, answer)

    def fresh(self, now_ns: int) -> T | None:
        """The last answer, unless it is too old to be shown as today's."""
        if self.absent or self._answer is None:
            return None
        answered_ns, answer = self._answer
        return answer if now_ns - answered_ns <= _FRESH_PERIODS * self._every_ns else None


class _Watched:
    """A device, and what is asked of it."""

    def __init__(self, device: Device, users: _Standing[tuple[User, ...]]) -> None:
        self.device = device
        self.users = users
        # None until the driver has said what it can be asked.
        self.questions: list[_Standing[tuple[Reading, ...]]] | None = None
        self.gone = ""
        """Why it is left alone; empty while it answers."""

    def sample(self, now_ns: int) -> DeviceSample:
        answers = (each.fresh(now_ns) for each in self.questions or ())
        readings = tuple(reading for answer in answers for reading in answer or ())
        return DeviceSample(self.device, readings, self.users.fresh(now_ns) or ())


class Gpus:
    """One maker's devices. `read` may hang like the driver: called by a Sampler's thread alone."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._opened = False
        self._version = ""
        self._remark = ""
        self._errors = 0
        self._watched: list[_Watched] = []
        self._look_at_ns = 0
        self._reopen_ns = _REOPEN_NS
        # Of each length of period: how many questions have been given their turn.
        self._turns: dict[int, itertools.count[int]] = defaultdict(itertools.count)

    def read(self, now_ns: int) -> GpuSample:
        """Ask what is due. *now_ns*: by a clock that never goes back."""
        try:
            if now_ns >= self._look_at_ns:
                self._look(now_ns)
            self._ask_all(now_ns)
        except Missing as why:
            self._leave(str(why), now_ns + _LOOK_EVERY_NS)
        except Lost as why:
            remark = f"The GPU driver went away ({why}); it is opened again when it is back."
            self._leave(remark, self._reopen_at_ns(now_ns))
        return self._sample(now_ns)

    # -- finding devices

    def _look(self, now_ns: int) -> None:
        """Open the driver, if it is not open, and see what devices there are."""
        if self._opened:
            if any(each.gone for each in self._watched):
                # A board that was reset is seen again only by who opens the driver anew.
                self._close()
            else:
                self._reopen_ns = _REOPEN_NS
        if not self._opened:
            if not self._attempt("opening the driver", self._open):
                raise Missing("The GPU driver could not be opened; the agent's log says why.")
            self._version = self._attempt("the driver's version", self._driver.version) or ""
        found = self._attempt("the list of devices", self._driver.devices)
        if found is None and not self._watched:
            raise Lost("its devices could not be listed")
        if found is not None:
            # Of a board that is divided in another way other things can be asked.
            before, now = _parts([each.device for each in self._watched]), _parts(found)
            known = {
                each.device: each
                for each in self._watched
                if before.get(each.device.uuid) == now.get(each.device.uuid)
            }
            self._watched = [known.get(device) or self._watch(device, now_ns) for device in found]
        self._remark = "" if self._watched else "The GPU driver is there, but it shows no device."
        self._look_at_ns = now_ns + _LOOK_EVERY_NS

    def _open(self) -> bool:
        self._driver.open()
        self._opened = True
        return True

    def _reopen_at_ns(self, now_ns: int) -> int:
        """When to open the driver again: ever later, until a minute has passed without a loss."""
        wait_ns, self._reopen_ns = self._reopen_ns, min(2 * self._reopen_ns, _REOPEN_MOST_NS)
        return now_ns + wait_ns

    def _leave(self, remark: str, look_at_ns: int) -> None:
        self._remark = remark
        self._look_at_ns = look_at_ns
        self._close()

    def _close(self) -> None:
        self._watched = []
        if self._opened:
            self._opened = False
            self._driver.close()

    # -- asking

    def _watch(self, device: Device, now_ns: int) -> _Watched:
        ask = partial(self._users, device)
        return _Watched(
            device, _Standing("users", _USERS_EVERY_S, ask, self._turn(_USERS_EVERY_S, now_ns))
        )

    def _ask_all(self, now_ns: int) -> None:
        before = sum(1 for each in self._watched if each.gone)
        for watched in self._watched:
            if not watched.gone:
                self._ask(watched, now_ns)
        gone = [each.gone for each in self._watched if each.gone]
        if gone and len(gone) == len(self._watched):
            raise Lost(gone[0])
        if gone and not before:
            self._look_at_ns = min(self._look_at_ns, self._reopen_at_ns(now_ns))

    def _ask(self, watched: _Watched, now_ns: int) -> None:
        try:
            if watched.questions is None:
                watched.questions = self._questions(watched.device, now_ns)
            for question in watched.questions or ():
                self._put(question, now_ns)
            self._put(watched.users, now_ns)
        except Lost as why:
            # The others go on; what it has answered is shown for as long as it is fresh.
            watched.gone = str(why)

    def _questions(
        self, device: Device, now_ns: int
    ) -> list[_Standing[tuple[Reading, ...]]] | None:
        questions = self._attempt(
            "what can be asked", lambda: tuple(self._driver.questions(device))
        )
        if questions is None:
            return None
        return [
            _Standing(
                each.name,
                each.every_s,
                partial(self._readings, device, each),
                self._turn(each.every_s, now_ns),
            )
            for each in questions
        ]

    def _turn(self, every_s: float, now_ns: int) -> int:
        """When a new question would have been due.

        So it is asked at once, and then in a second of its period that it shares with as few
        other slow ones as can be.
        """
        seconds = int(every_s)
        return now_ns - (next(self._turns[seconds]) % seconds * _S if seconds > 1 else 0)

    def _put(self, standing: _Standing[T], now_ns: int) -> None:
        if not standing.due(now_ns):
            return
        try:
            answer = self._attempt(standing.name, standing.ask)
        except Absent:
            standing.absent = True
            return
        if answer is not None:
            standing.answered(answer, now_ns)

    def _readings(self, device: Device, question: Question) -> tuple[Reading, ...]:
        good = []
        own = identity(device)
        for each in question.ask():
            if _possible(each):
                good.append(Reading(each.metric, each.value, own + each.attributes, each.start_ns))
                continue
            self._errors += 1
            containment.warn_once(
                f"gpu impossible {question.name}",
                "GPU %s says that %s is %s, which cannot be; such numbers are left out.",
                device.index,
                each.metric.name,
                each.value,
            )
        return tuple(good)

    def _users(self, device: Device) -> tuple[User, ...]:
        return tuple(self._driver.users(device))

    def _attempt(self, what: str, ask: Callable[[], T]) -> T | None:
        """The answer; None where this one attempt failed, which is counted."""
        try:
            return ask()
        except (Missing, Absent, Lost):
            raise
        except containment.ANY_ERROR as why:
            self._errors += 1
            containment.warn_once(
                f"gpu {what}",
                "GPU: %s failed (%s: %s); it is tried again.",
                what,
                type(why).__name__,
                why,
            )
            return None

    def _sample(self, now_ns: int) -> GpuSample:
        left = [
            f"GPU {each.device.index} ({each.device.name}) does not answer any more: {each.gone}."
            for each in self._watched
            if each.gone
        ]
        devices = tuple(each.sample(now_ns) for each in self._watched)
        for remark in self._driver.remarks:
            containment.warn_once(f"gpu {remark}", "GPU: %s", remark)
        errors = self._errors + self._driver.impossible
        left += self._driver.silent
        return GpuSample(devices, " ".join([self._remark, *left]).strip(), errors, self._version)


def _parts(devices: Iterable[Device]) -> dict[str, set[str]]:
    """By board: the devices that are parts of it."""
    parts: dict[str, set[str]] = defaultdict(set)
    for each in devices:
        if each.parent:
            parts[each.parent].add(each.uuid)
    return parts


def _possible(reading: Reading) -> bool:
    """No device has less than nothing of anything, or is busy more than all the time."""
    if not math.isfinite(reading.value) or reading.value < 0.0:
        return False
    return reading.metric.unit != "1" or reading.value <= 1.0
