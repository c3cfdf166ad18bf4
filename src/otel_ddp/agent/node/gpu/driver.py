"""What a GPU driver is asked and what it answers: devices, their users, questions, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

_S = 1_000_000_000
_FRESH_PERIODS = 3
# A call that comes a little early must not postpone a question by a whole period.
_EARLY_NS = _S // 4


class DriverMissing(Exception):
    """There is no driver, or no device. The text is one sentence that a user can act on."""


class NotSupported(Exception):
    """This device does not support that: it is never asked for it again."""


class DeviceLost(Exception):
    """The device, or the whole driver, is lost: devices have to be found anew."""


@dataclass(frozen=True)
class Device:
    """A board, or a part of one with numbers of its own (a MIG instance)."""

    uuid: str
    index: str
    """As `nvidia-smi` counts: `3`, and `3:1` for the second part of that board."""
    name: str
    pci: str = ""
    parent: str = ""
    """The UUID of the board that this device is a part of."""


class User(NamedTuple):
    """A process that uses memory on a device."""

    pid: int
    used_bytes: int | None


class Question(Generic[T]):
    """A question that one device is asked periodically, and the last answer to it."""

    def __init__(self, name: str, every_s: float, ask: Callable[[], Iterable[T]]) -> None:
        """*ask* raises NotSupported or DeviceLost; any other error means that one attempt failed.

        An impossible number is NaN: it is left out and counted.
        """
        self.name, self.every_s, self.ask = name, every_s, ask
        self.is_unsupported = False
        self._every_ns = max(1, int(every_s * _S))
        self._due_ns = 0
        self._answered_ns, self._answer = 0, tuple[T, ...]()

    def due(self, now_ns: int) -> bool:
        """Whether to ask now; if so, the question is due again in the next period."""
        if self.is_unsupported or now_ns + _EARLY_NS < self._due_ns:
            return False
        self._due_ns = now_ns + self._every_ns
        return True

    def keep(self, answer: Iterable[T], now_ns: int) -> None:
        self._answered_ns, self._answer = now_ns, tuple(answer)

    def fresh(self, now_ns: int) -> tuple[T, ...]:
        """The last answer; empty if it is too old."""
        is_old = now_ns - self._answered_ns > _FRESH_PERIODS * self._every_ns
        return () if is_old or self.is_unsupported else self._answer
