"""The handles by which one process logs for other ranks: one for each rank, and not too many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from otel_ddp.errors import containment
from otel_ddp.settings import MIB

# Each rank that a process logs for takes two descriptors and this much shared memory: few values
# come by a queue.
MOST_RANKS = 100
JOURNAL_BYTES = MIB // 2

# The global rank and the job type.
Key = tuple[int | None, str]


class Handle(Protocol):
    """What has to be known of a handle here."""

    @property
    def is_closed(self) -> bool: ...


H = TypeVar("H", bound=Handle)


class RankHandles(Generic[H]):
    """The handles that one run has given out."""

    def __init__(self) -> None:
        self._handles: dict[Key, H] = {}

    def all(self) -> list[H]:
        """Every handle that was given out."""
        return list(self._handles.values())

    def handle(self, key: Key, make: Callable[[], H]) -> H | None:
        """The handle of a rank, made if need be; None if there are too many already."""
        known = self._handles.get(key)
        if known is not None:
            if known.is_closed:
                self._handles[key] = make()
            return self._handles[key]
        if len(self._handles) >= MOST_RANKS:
            containment.warn_once(
                "most ranks",
                "for_rank gives handles for %d ranks at most: what is logged for others is not "
                "recorded. Let them log by themselves, or log their mean.",
                MOST_RANKS,
            )
            return None
        # Two threads may ask for the same rank at once.
        return self._handles.setdefault(key, make())
