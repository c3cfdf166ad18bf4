"""What the agent asks of a store of artifacts."""

from __future__ import annotations

from typing import Protocol


class CannotStore(Exception):
    """The store did not take it; the text says why."""

    def __init__(self, why: str, *, again: bool = True) -> None:
        """*again*: whether it may take it later."""
        super().__init__(why)
        self.again = again


class Upload(Protocol):
    """One object on its way. Every method may raise `CannotStore`."""

    written: int
    """How many bytes an earlier attempt has left; writing goes on behind them."""

    def holds(self, at: int, chunk: bytes) -> bool:
        """Whether these bytes are what an earlier attempt has left there."""

    def write(self, chunk: bytes) -> None:
        """Add bytes; returns once the next ones may come."""

    def commit(self) -> None:
        """Give the object its final name: only now others see it."""

    def leave(self) -> None:
        """Stop here, and keep what a later attempt can go on with."""

    def discard(self) -> None:
        """Remove what was written."""


class Sink(Protocol):
    """A store. The agent calls it from one thread; a call may take as long as it needs."""

    def size(self, key: str) -> int | None:
        """The size of a whole object; None if there is none. A part is no object."""

    def upload(self, key: str) -> Upload:
        """Begin an object, or go on with it. Keys are relative paths of plain letters."""

    def uri(self, key: str) -> str:
        """Its address, without passwords."""
