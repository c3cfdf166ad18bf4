"""Reads how full the file systems are that a training depends on."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from otel_ddp import catalog, containment
from otel_ddp.agent.node.kernel_files import KernelFiles
from otel_ddp.agent.node.reading import Reading

_MOST_FILE_SYSTEMS = 16
# Data loaders pass their batches through shared memory, and are killed when it is full.
_SHARED_MEMORY = Path("/dev/shm")


class FileSystems:
    """Wants a thread of its own: a server that does not answer holds it for ever."""

    def __init__(
        self,
        directories: Callable[[], Iterable[Path]],
        *,
        always: Iterable[Path] | None = None,
        statvfs: Callable[[str], os.statvfs_result] = os.statvfs,
    ) -> None:
        self._directories = directories
        self._always = tuple(_always() if always is None else always)
        self._statvfs = statvfs
        self._files = KernelFiles()

    @property
    def errors(self) -> int:
        return self._files.errors

    def read(self) -> list[Reading]:
        return [*self._read()]

    @containment.contained(default=())
    def _read(self) -> list[Reading]:
        readings: list[Reading] = []
        seen: set[int] = set()
        # Sorted, so that one with several mount points is told of under the same one each time.
        for directory in (*self._always, *sorted(set(self._directories()))):
            try:
                device, point = _mount_point(directory)
                if device in seen:
                    continue
                if len(seen) == _MOST_FILE_SYSTEMS:
                    self._files.wrong("/", f"only {_MOST_FILE_SYSTEMS} file systems are told of")
                    break
                seen.add(device)
                readings += self._of_one(point)
            except OSError as error:
                self._files.failed(str(directory), error)
        return readings

    def _of_one(self, point: str) -> list[Reading]:
        found = self._statvfs(point)
        if not found.f_blocks:
            return []  # it holds nothing, like that of processes
        # As in `df`: what is kept back for the superuser is neither used nor free.
        states = {"used": found.f_blocks - found.f_bfree, "free": found.f_bavail}
        readings = []
        for state, blocks in states.items():
            if not 0 <= blocks <= found.f_blocks:
                self._files.wrong(point, f"{blocks} of {found.f_blocks} blocks are {state}")
                continue
            # A name may be any bytes; a label is text.
            shown = os.fsencode(point).decode("utf-8", "replace")
            attributes = (
                ("system.filesystem.mountpoint", shown),
                ("system.filesystem.state", state),
            )
            size_bytes = blocks * found.f_frsize
            readings.append(Reading(catalog.SYSTEM_FILESYSTEM_USAGE, size_bytes, attributes))
        return readings


def _always() -> Iterator[Path]:
    yield Path("/")
    # There is none where nothing can be written, as in a container whose root is read only.
    with contextlib.suppress(OSError):
        yield Path(tempfile.gettempdir())
    yield _SHARED_MEMORY


def _mount_point(directory: Path) -> tuple[int, str]:
    """The device, and the highest directory above this one that is still on it."""
    path = os.path.realpath(directory)
    device = os.stat(path).st_dev
    while (above := os.path.dirname(path)) != path and os.stat(above).st_dev == device:
        path = above
    return device, path
