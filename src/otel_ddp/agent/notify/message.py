"""What people are told: one message, as a webhook gets it and as it waits on disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

# A receiver may rely on the names of this version: docs/notifications.md lists them.
SCHEMA = 1


class Message(NamedTuple):
    """One notification; what it is not about is empty."""

    id: str
    """The same each time it is sent."""
    kind: str
    """A kind of verdict, or `ended`, `alert`, `test`."""
    level: str
    """`info`, `warn` or `error`."""
    title: str
    text: str
    time: str
    """When it was made, in UTC, as RFC 3339 writes it."""
    group: str = ""
    run: str = ""
    node: str = ""
    rank: str = ""
    url: str = ""
    """The page of the run."""

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **self._asdict()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Message:
        """Raises KeyError where it is none."""
        return cls(*(str(content[name]) for name in cls._fields))
