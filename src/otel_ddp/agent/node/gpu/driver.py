"""What a maker's driver has to answer, so that its devices can be shown: the seam for others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from otel_ddp.agent.node.reading import Reading


class Missing(Exception):
    """There is no driver, or no device. The text is one sentence that a user can act on."""


class Absent(Exception):
    """This device does not have that: it is never asked for it again."""


class Lost(Exception):
    """The device, or the whole driver, went away: devices have to be found anew."""


@dataclass(frozen=True)
class Device:
    """A board, or a part of one that stands for itself (a MIG instance)."""

    uuid: str
    index: str
    """As the maker's own tools count: `3`, and `3:1` for the second part of that board."""
    name: str
    pci: str = ""
    parent: str = ""
    """The UUID of the board that this is a part of."""


class User(NamedTuple):
    """A process that has memory on a device."""

    pid: int
    used_bytes: int | None


class Question(NamedTuple):
    """Something to ask of one device, again and again."""

    name: str
    every_s: float
    ask: Callable[[], Iterable[Reading]]
    """Raises Absent or Lost; any other error is that of one attempt."""


class Driver(Protocol):
    """One maker's devices. Only ever called from one thread, in which every call may hang."""

    @property
    def impossible(self) -> int:
        """How many numbers were left out because they cannot be."""

    @property
    def remarks(self) -> Sequence[str]:
        """What is to be said of its numbers, each sentence once."""

    @property
    def silent(self) -> Sequence[str]:
        """A sentence on each device that did not answer when they were last looked for."""

    def open(self) -> None:
        """Begin; raises Missing. Called again after Lost."""

    def close(self) -> None:
        """Give everything back; never raises."""

    def version(self) -> str:
        """The driver's version, in words."""

    def devices(self) -> Sequence[Device]:
        """All there are now, in the order of their indices."""

    def questions(self, device: Device) -> Sequence[Question]:
        """What can be asked of this one."""

    def users(self, device: Device) -> Sequence[User]:
        """The processes that compute on it."""

    def visible(self, environment: Mapping[str, str]) -> Sequence[str] | None:
        """The UUIDs of the devices that a process with these variables sees, in its own order.

        None where that cannot be told.
        """
