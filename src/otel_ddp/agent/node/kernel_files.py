"""Reads small files of the kernel; counts what it cannot read, and logs that once a file."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Collection

from otel_ddp import files

log = logging.getLogger("otel_ddp.agent")

# The machine, the container or the device lacks this file; or the process has ended.
_NOT_THERE = {
    *(errno.ENOENT, errno.ENOTDIR, errno.ESRCH, errno.ENODEV, errno.ENXIO),
    *(errno.EOPNOTSUPP, errno.EINVAL),
}
_MOST_PLACES = 200


class KernelFiles:
    """The files of one source; `errors` counts the numbers that it had to leave out."""

    def __init__(self) -> None:
        self.errors = 0
        self._said: set[str] = set()

    def text(self, path: str, place: str = "") -> str | None:
        """The whole file. *place*: its name in the log if its path has a process id in it."""
        try:
            return files.read(path).decode("utf-8", "replace")
        except OSError as error:
            self.failed(place or path, error)
            return None

    def value(self, path: str) -> int | None:
        """The number that is the whole file."""
        text = self.text(path)
        if text is None:
            return None
        value = number(text.strip())
        if value is None:
            self.leave_out(path, f"{text.strip()[:50]!r} is no number")
        return value

    def numbers(self, path: str, names: Collection[str], place: str = "") -> dict[str, int]:
        """The numbers of the lines that begin with these names."""
        place = place or path
        text = self.text(path, place)
        said: dict[str, str] = {}
        for name, *words in (line.split(None, 2) or [""] for line in (text or "").splitlines()):
            said.setdefault(name.rstrip(":"), words[0] if words else "")
        found = {}
        for name in names if text is not None else ():
            value = number(said.get(name, ""))
            if value is None:
                self.leave_out(place, f"it has no number of {name}")
            else:
                found[name] = value
        return found

    def names(self, folder: str, place: str = "") -> list[str]:
        """The names in a folder."""
        try:
            return os.listdir(folder)
        except OSError as error:
            self.failed(place or folder, error)
            return []

    def failed(self, place: str, error: OSError) -> None:
        """Count an error, unless it only means that there is no such file."""
        if error.errno not in _NOT_THERE:
            self.leave_out(place, error.strerror or str(error))

    def leave_out(self, place: str, what: str) -> None:
        """Count a number that is left out; log it once a place."""
        self.errors += 1
        if place not in self._said and len(self._said) < _MOST_PLACES:
            self._said.add(place)
            log.info("A number of %s is left out: %s.", place, what)


def number(word: str) -> int | None:
    """A count of the kernel: not negative, and at most 64 bits."""
    if not (word.isascii() and word.isdigit() and len(word) <= 20):
        return None
    value = int(word)
    return value if value < 1 << 64 else None
