"""Reads a journal file while another process writes it; raises nothing once the file is open."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from otel_ddp import files
from otel_ddp.journal import layout, parser
from otel_ddp.journal.layout import checksum

# The most bytes per read, so that one rank cannot starve the others.
_MOST_BYTES = 4 * 1024 * 1024
# After this many reads at a position without a valid record, the position is skipped.
_MOST_STUCK_READS = 20


@dataclass
class FileBytes(parser.Bytes):
    """The bytes of the journal file. Reads beyond its end return fewer bytes."""

    fd: int = -1

    def read(self, at: int, size: int) -> bytes:
        # `pread` instead of mmap: if the file is truncated, we get fewer bytes instead of a SIGBUS.
        try:
            return os.pread(self.fd, size, at)
        except OSError:
            return b""

    def again(self) -> FileBytes:
        try:
            return FileBytes(os.dup(self.fd))
        except OSError:
            return FileBytes()

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class _Definitions(parser.Definitions):
    """Waits for missing definitions: on weakly ordered CPUs, the writer's new position may become
    visible before the definitions that it covers."""

    def _skip(self, position: int) -> int:
        self.stuck += 1
        if self.stuck < _MOST_STUCK_READS:
            return 0
        # Count each damaged area once.
        self.unreadable += self.stuck == _MOST_STUCK_READS
        return 8


class Ring(parser.Records):
    """The records of a file, which its writer may overwrite during a read."""

    def __init__(
        self,
        file: parser.Bytes,
        area: tuple[int, int],
        mark: tuple[int, int, int],
        made: parser.Made | None = None,
    ) -> None:
        super().__init__(mark, made)
        self._file = file
        self._start, self.size = area
        # Up to this many bytes after the published position may be overwritten already: the writer
        # writes a record, and padding before it, and only then publishes the position.
        self._unpublished = 2 * layout.largest_record(self.size)
        # Bytes before this position were overwritten already at the last check.
        self._gone = -self._unpublished

    def end(self) -> int:
        """The writer's position."""
        # Round down to a multiple of eight, as a damaged position may be any number.
        return self._file.word(layout.RING_POSITION) & ~7

    def read(self, end: int, most: int = _MOST_BYTES - layout.LARGEST_RECORD) -> list[Any]:
        """The whole records up to *end*, in order; counts overwritten records as lost.

        *most*: read only records that begin within this many bytes.
        """
        records: list[Any] = []
        if end - self.position > self.size:
            if self.end() < end:
                return records  # the file is damaged, as its position only grows
            self.position = end - self.size
        read_bytes = 0
        while self.position < end and read_bytes < most:
            offset = self.position % self.size
            whole = min(end - self.position, self.size - offset)
            want = min(whole, most + layout.LARGEST_RECORD)
            block = self._file.read(self._start + offset, want)
            # Fill a truncated part with zeros: they are no valid record, so they are skipped after
            # a few reads.
            block += bytes(want - len(block))
            read_bytes += want
            stop = want if want == whole else want - layout.LARGEST_RECORD
            before = self.position
            records += self.feed(block, stop)
            if self.position - before < want:
                break
        return records

    def go_back(self, position: int, before: int) -> None:
        """Move back to *before* bytes before a position; a record need not begin there."""
        # How many records were overwritten meanwhile is unknown: count them as one.
        self.lost += self.end() - position > self.size
        self.position, self.stuck = max(position - before, 0) & ~7, _MOST_STUCK_READS

    def _skip(self, position: int) -> int:
        waits = self.stuck < _MOST_STUCK_READS
        if waits and position >= self._gone + self._unpublished:
            self._gone = self.end() - self.size
        if position < self._gone + self._unpublished:
            # The writer overwrote these bytes during the read: continue after them.
            return max(8, self._gone - position)
        if waits:
            # The record is not visible yet, or its writer died before completing it: wait for a few
            # reads.
            self.stuck += 1
            return 0
        return 8


class JournalReader(parser.Journal):
    """A journal of another process. Raises `Unreadable` on opening, and nothing afterwards."""

    ring: Ring
    content: FileBytes

    def __init__(self, path: Path) -> None:
        self.path = path
        self._taken_path = path.with_suffix(layout.TAKEN_SUFFIX)
        self.content = FileBytes()
        try:
            self.content.fd = files.open_own(path)
            self._open()
        except OSError as error:
            self.close()
            raise parser.Unreadable(f"{path}: {error.strerror}") from None
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        found = os.fstat(self.content.fd)
        # Use pread here, as FileBytes.read hides system errors.
        content = b""
        if stat.S_ISREG(found.st_mode):
            content = os.pread(self.content.fd, layout.HEAD_BYTES, 0)
        head = parser.Head.parse(content, str(self.path))
        if found.st_size < head.size:
            raise parser.Unreadable(f"{self.path} is damaged")
        mark = layout.read_taken(self._taken_path) or (0, 1, 0)
        ring = Ring(self.content, head.areas.ring, mark)
        super().__init__(self.path, head, self.content, _Definitions(), ring)
        self.read_definitions()

    def read_definitions(self) -> None:
        definitions, (start, room) = self._definitions, self.areas.definitions
        end = min(self.content.word(layout.DEFINITIONS_POSITION), room)
        while (position := definitions.position) < end:
            block = self.content.read(start + position, min(end - position, _MOST_BYTES))
            definitions.feed(block, len(block) - layout.RECORD.size + 1)
            # Skip only one piece of a damaged area per call, so as not to delay other journals.
            if definitions.position == position or definitions.stuck:
                break

    def read(self) -> list[parser.Record]:
        end = self.ring.end()
        # Read definitions after the position: then every name in records before it is defined.
        self.read_definitions()
        return self.ring.read(end)

    def commit(self, position: int, expected: int, lost: int) -> None:
        """Record that everything before this position was delivered."""
        content = layout.TAKEN.pack(position, expected, lost, 0)[:-4]
        content += checksum(content, 0).to_bytes(4, "little")
        # If the directory is full or gone, some records may be read again.
        with contextlib.suppress(OSError):
            fd = files.open_own(self._taken_path, os.O_WRONLY | os.O_CREAT)
            try:
                os.pwrite(fd, content, 0)
            finally:
                os.close(fd)

    def writer_is_alive(self) -> bool:
        """Whether a process holds the journal's lock, which works across PID namespaces."""
        try:
            return files.holder(self.content.fd) is not None
        except (OSError, ValueError):
            return False

    def was_removed(self) -> bool:
        """Whether the file was deleted, so that only open descriptors can read it."""
        return os.fstat(self.content.fd).st_nlink == 0

    def drained(self) -> bool:
        """Whether all records are read."""
        return self.ring.position >= self.ring.end()

    def close(self) -> None:
        """Close the file; later reads return nothing."""
        self.content.close()
