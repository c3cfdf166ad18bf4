"""Stores, for the next agent, the times of the last points of a journal's series."""

from __future__ import annotations

import contextlib
import os
from itertools import starmap
from pathlib import Path
from struct import Struct

from otel_ddp.journal import layout
from otel_ddp.journal.reader import JournalReader

# A position and the number of times; each time with the number of its name; a checksum.
_TIMES_HEAD, _TIME, _TIMES_END = Struct("<QI"), Struct("<Iq"), Struct("<I")
_MOST_TIMES = 100
# Instead of a name's number: one time for all names, if there are too many.
ALL = 0xFFFFFFFF
_MOST_KEPT = 400


class SeriesTimes:
    """The times of last points that new values could have too.

    They lie behind the reading position, in the same file. With them the next agent gives the same
    time to a value that it reads again, and a later time to a new one. They are stored before
    anything is sent, for each position that may become the reading position: so both match
    whenever the agent is killed.
    """

    def __init__(self, reader: JournalReader) -> None:
        self._path = reader.path.with_suffix(layout.TAKEN_SUFFIX)
        # Ascending. Without positions that a killed agent had read but not committed.
        self._kept = [each for each in _kept(self._path) if each[0] <= reader.position][-1:]

    def found(self) -> dict[int, int]:
        """The times that the agent before us stored, by the number of the name."""
        return dict(_TIME.iter_unpack(self._kept[0][1])) if self._kept else {}

    def keep(self, position: int, times: dict[int, int]) -> None:
        """Store the times that are true once everything before *position* is read."""
        if self._kept and self._kept[-1][0] == position:
            return
        if len(times) > _MOST_TIMES:
            times = {ALL: max(times.values())}
        taken = layout.read_taken(self._path)
        # The last one up to the reading position counts: times only grow.
        while taken is not None and len(self._kept) > 1 and self._kept[1][0] <= taken[0]:
            del self._kept[0]
        if len(self._kept) >= _MOST_KEPT:
            del self._kept[1::2]
        self._kept.append((position, b"".join(starmap(_TIME.pack, times.items()))))
        content = b"".join(starmap(_packed, self._kept))
        # A full or deleted directory: only an agent that starts again would need the file.
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
    """The undamaged entries from the beginning of the file."""
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
