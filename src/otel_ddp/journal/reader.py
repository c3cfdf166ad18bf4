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

# The most bytes that one read takes from a journal, so that a rank that writes much does not delay
# the reading of others.
_MOST_BYTES = 4 * 1024 * 1024
# A position is skipped after this many reads have found no valid record there.
_MOST_STUCK_READS = 20


@dataclass
class FileBytes(parser.Bytes):
    """The bytes of the journal file. Reads beyond its end return fewer bytes."""

    fd: int = -1

    def read(self, at: int, size: int) -> bytes:
        # Use `pread` instead of mmap: if the file was truncated, `pread` returns fewer bytes, but
        # reading a map would end the agent by SIGBUS.
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
    """Waits for missing definitions: on CPUs with weak memory ordering, the writer's new position
    may become visible before the definitions up to it."""

    def _skip(self, position: int) -> int:
        self.stuck += 1
        if self.stuck < _MOST_STUCK_READS:
            return 0
        # Count several invalid records in a row only once.
        self.unreadable += self.stuck == _MOST_STUCK_READS
        return 8


class Ring(parser.Records):
    """The records in the ring of a journal file. The writer may overwrite them while we read."""

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
        # The writer may have written this many bytes after the position that it has published: it
        # writes padding and a record first, and publishes the new position afterwards.
        self._unpublished = 2 * layout.largest_record(self.size)
        # At the last check, the writer had already overwritten everything before this position.
        self._gone = -self._unpublished

    def end(self) -> int:
        """The position up to which the writer has written."""
        # Round down to a multiple of eight: in a damaged file, the position may be any number.
        return self._file.word(layout.RING_POSITION) & ~7

    def read(self, end: int, most: int = _MOST_BYTES - layout.LARGEST_RECORD) -> list[Any]:
        """Read the complete records up to *end*, in order. Records that were overwritten before
        they were read count as lost.

        *most*: read only records that begin in the next *most* bytes.
        """
        records: list[Any] = []
        if end - self.position > self.size:
            if self.end() < end:
                return records  # the file is damaged: the position of an intact file only grows
            self.position = end - self.size
        read_bytes = 0
        while self.position < end and read_bytes < most:
            offset = self.position % self.size
            whole = min(end - self.position, self.size - offset)
            want = min(whole, most + layout.LARGEST_RECORD)
            block = self._file.read(self._start + offset, want)
            # If the file was truncated, put zeros in place of the missing bytes: zeros are no valid
            # record, so they are skipped after a few reads.
            block += bytes(want - len(block))
            read_bytes += want
            stop = want if want == whole else want - layout.LARGEST_RECORD
            before = self.position
            records += self.feed(block, stop)
            if self.position - before < want:
                break
        return records

    def go_back(self, position: int, before: int) -> None:
        """Continue reading at *before* bytes before a position, even if no record begins there."""
        # If records after the position were overwritten, it is unknown how many: count them as one.
        self.lost += self.end() - position > self.size
        self.position, self.stuck = max(position - before, 0) & ~7, _MOST_STUCK_READS

    def _skip(self, position: int) -> int:
        waits = self.stuck < _MOST_STUCK_READS
        if waits and position >= self._gone + self._unpublished:
            self._gone = self.end() - self.size
        if position < self._gone + self._unpublished:
            # The writer has overwritten these bytes during the read: continue after them.
            return max(8, self._gone - position)
        if waits:
            # Either the record is not visible yet, or its writer died before it was complete: try
            # again in the next few reads.
            self.stuck += 1
            return 0
        return 8


class JournalReader(parser.Journal):
    """Reads the journal of another process. Opening it may raise `Unreadable`; reading never
    raises."""

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
        # Call pread directly: FileBytes.read would hide the system's error.
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
            # In a damaged area, go on only in the next call, so as not to delay other journals.
            if definitions.position == position or definitions.stuck:
                break

    def read(self) -> list[parser.Record]:
        end = self.ring.end()
        # Read the definitions after the writer's position, so that they include all names in the
        # records before this position.
        self.read_definitions()
        return self.ring.read(end)

    def commit(self, position: int, expected: int, lost: int) -> None:
        """Store that all records before this position were delivered, so that the next agent does
        not read them again."""
        content = layout.TAKEN.pack(position, expected, lost, 0)[:-4]
        content += checksum(content, 0).to_bytes(4, "little")
        # Ignore a failure, e.g. if the directory is full: then some records may be read again.
        with contextlib.suppress(OSError):
            fd = files.open_own(self._taken_path, os.O_WRONLY | os.O_CREAT)
            try:
                os.pwrite(fd, content, 0)
            finally:
                os.close(fd)

    def writer_is_alive(self) -> bool:
        """Whether a process holds the journal's lock. This is seen from any PID namespace."""
        try:
            return files.holder(self.content.fd) is not None
        except (OSError, ValueError):
            return False

    def was_removed(self) -> bool:
        """Whether the file was deleted; it then remains readable until it is closed."""
        return os.fstat(self.content.fd).st_nlink == 0

    def drained(self) -> bool:
        """Whether all records have been read."""
        return self.ring.position >= self.ring.end()

    def close(self) -> None:
        """Close the file; later reads return nothing."""
        self.content.close()
