"""Reads small files of the kernel; what is refused or wrong is counted, and said once a place."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Collection

log = logging.getLogger("otel_ddp.agent")

# What this machine, this container or this device just does not have; or a process that ended.
_NOT_THERE = {
    *(errno.ENOENT, errno.ENOTDIR, errno.ESRCH, errno.ENODEV, errno.ENXIO),
    *(errno.EOPNOTSUPP, errno.EINVAL),
}
_PIECE = 1 << 16
_LONGEST_FILE = 8 << 20
_MOST_PLACES = 200


class KernelFiles:
    """What one source reads; `errors` counts the numbers that it had to leave out."""

    def __init__(self) -> None:
        self.errors = 0
        self._said: set[str] = set()

    def text(self, path: str, place: str = "") -> str | None:
        """The whole file; *place* stands for it where its path has a process id in it."""
        try:
            return _content(path)
        except OSError as error:
            self.failed(place or path, error)
            return None

    def numbers(self, path: str, names: Collection[str], place: str = "") -> dict[str, int]:
        """Those lines of a file that begin with these names."""
        found: dict[str, int] = {}
        place = place or path
        text = self.text(path, place)
        if text is None:
            return found
        for line in text.splitlines():
            words = line.split(None, 2)
            name = words[0].rstrip(":") if words else ""
            if name in names:
                value = number(words[1]) if len(words) > 1 else None
                if value is None:
                    self.wrong(place, f"{name} is no number")
                else:
                    found[name] = value
                names = [each for each in names if each != name]
        for name in names:
            self.wrong(place, f"it has no {name}")
        return found

    def names(self, folder: str, place: str = "") -> list[str]:
        """What is in a folder."""
        try:
            return os.listdir(folder)
        except OSError as error:
            self.failed(place or folder, error)
            return []

    def failed(self, place: str, error: OSError) -> None:
        """Count an error, unless it only means that there is no such thing here."""
        if error.errno not in _NOT_THERE:
            self.wrong(place, error.strerror or str(error))

    def wrong(self, place: str, what: str) -> None:
        """Count a number that is left out."""
        self.errors += 1
        if place not in self._said and len(self._said) < _MOST_PLACES:
            self._said.add(place)
            log.info("A number of %s is left out: %s.", place, what)


def number(word: str) -> int | None:
    """A count of the kernel: never negative, never longer than 64 bits."""
    if not (word.isascii() and word.isdigit() and len(word) <= 20):
        return None
    value = int(word)
    return value if value < 1 << 64 else None


def _content(path: str) -> str:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        pieces = []
        left = _LONGEST_FILE
        # A file of /proc comes in pieces of a page.
        while left > 0 and (piece := os.read(handle, _PIECE)):
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces).decode("utf-8", "replace")
    finally:
        os.close(handle)
