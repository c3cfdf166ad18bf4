"""Requests that wait until their receiver takes them: what one is, and how an attempt ended."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from otel_ddp import files

# Of one request, packed or not: ours have 1 MB. A copy from elsewhere may unpack to any size.
_LARGEST = 16 << 20


@dataclass(eq=False, slots=True)
class Request:
    """One, from when it is made until it is delivered or lost."""

    lane: str
    """Whom it is for. The requests of a lane are sent in their order."""
    body: bytes
    """Empty once the request is in its file."""
    points: int
    irreplaceable: bool = True
    """Whether it holds what is sent only once: logged values, spans, events. A request with
    current values alone is replaced by the next export, so it is dropped first."""
    oldest_s: int = 0
    """When the oldest point in it was measured, in seconds; 0: not known."""
    number: int = 0
    """Of its file, from 1 on; 0: it is in memory alone."""
    path: Path = Path()
    size_bytes: int = 0
    """What that takes of the disk."""

    def read(self) -> bytes | None:
        """Its body; OSError where the file cannot be read now.

        None where the file is damaged, or unpacks to more than any request of ours.
        """
        if not self.number:
            return self.body
        packed = files.read(self.path, _LARGEST)
        unpacking = zlib.decompressobj()
        try:
            body = unpacking.decompress(packed, _LARGEST)
        except zlib.error:
            return None
        return body if unpacking.eof else None


@dataclass(frozen=True)
class Outcome:
    """How one attempt to send went."""

    kind: Literal["delivered", "retry", "refused"]
    """`retry`: kept for later, because people can mend the cause. `refused`: the receiver says that
    these bytes are wrong."""
    why: str = ""
    """One short line, without any credentials."""
    retry_after_s: float = 0.0
    """The pause that the receiver asks for."""
    doubtful: bool = False
    """To be tried again, but the cause may be this request: a receiver that fails over it."""
    rejected: int = 0
    """Points, spans or records that the collector dropped out of a request that it accepted."""
