"""Keeps, for the next agent, until when the series of a journal have points."""

from __future__ import annotations

import contextlib
import os
from itertools import starmap
from pathlib import Path
from struct import Struct

from otel_ddp.journal import layout
from otel_ddp.journal.reader import JournalReader

# A position and how many times follow; of each the number of its name; a checksum of all that.
_TIMES_HEAD, _TIME, _TIMES_END = Struct("<QI"), Struct("<Iq"), Struct("<I")
_MOST_TIMES = 100
# In the place of a name's number: one time for all, where there are more than that.
ALL = 0xFFFFFFFF
_MOST_KEPT = 400


class SeriesTimes:
    """Until when the series of a journal have points, as far as new values may meet them.

    Lies behind the reading position, in the same file, for the next agent: it gives a value that
    it reads again the same time, and a new one a later one. Kept before anything is sent, for
    each position that may come to be the reading position, so that both fit whenever we are killed.
    """

    def __init__(self, reader: JournalReader) -> None:
        self._path = reader.path.with_suffix(layout.TAKEN_SUFFIX)
        # Ascending; what a killed agent wrote of what it had read and not settled is left out.
        self._kept = [each for each in _kept(self._path) if each[0] <= reader.position][-1:]

    def found(self) -> dict[int, int]:
        """What the agent before us has left, by the number of the name."""
        return dict(_TIME.iter_unpack(self._kept[0][1])) if self._kept else {}

    def keep(self, position: int, times: dict[int, int]) -> None:
        """Write down how it stands where everything before *position* is read."""
        if self._kept and self._kept[-1][0] == position:
            return
        if len(times) > _MOST_TIMES:
            times = {ALL: max(times.values())}
        taken = layout.read_taken(self._path)
        # Of several the last one up to the reading position counts: times only grow.
        while taken is not None and len(self._kept) > 1 and self._kept[1][0] <= taken[0]:
            del self._kept[0]
        if len(self._kept) >= _MOST_KEPT:
            del self._kept[1::2]
        self._kept.append((position, b"".join(starmap(_TIME.pack, times.items()))))
        content = b"".join(starmap(_packed, self._kept))
        # A full or vanished directory: only an agent that is started again would miss it.
        with contextlib.suppress(OSError):
            fd = os.open(
                self._path,
                os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK,
                0o600,
            )
            try:
                os.pwrite(fd, content, layout.TAKEN.size)
                os.ftruncate(fd, layout.TAKEN.size + len(content))
            finally:
                os.close(fd)


def _packed(position: int, times: bytes) -> bytes:
    content = _TIMES_HEAD.pack(position, len(times) // _TIME.size) + times
    return content + _TIMES_END.pack(layout.checksum(content, position))


def _kept(path: Path) -> list[tuple[int, bytes]]:
    """What is whole of what lies there, from the beginning."""
    content = b""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            content = os.pread(fd, os.fstat(fd).st_size, layout.TAKEN.size)
        finally:
            os.close(fd)
    found: list[tuple[int, bytes]] = []
    at = 0
    while at + _TIMES_HEAD.size <= len(content):
        position, count = _TIMES_HEAD.unpack_from(content, at)
        times = content[at + _TIMES_HEAD.size :][: count * _TIME.size]
        packed = _packed(position, times)
        if content[at : at + len(packed)] != packed:
            break
        found.append((position, times))
        at += len(packed)
    return found
