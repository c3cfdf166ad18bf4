"""Reads how full the file systems are that the training uses."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from otel_ddp import catalog
from otel_ddp.agent.node.source import KernelFiles, Measurement

_MOST_FILE_SYSTEMS = 16
# Data loaders pass their batches through shared memory, and die when it is full.
_SHARED_MEMORY = Path("/dev/shm")


class FileSystems:
    """Needs a thread of its own: a file server that does not answer blocks it for ever."""

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

    def read(self) -> list[Measurement]:
        measurements: list[Measurement] = []
        seen: set[int] = set()
        # Sorted, so that a file system with several mount points always has the same one.
        for directory in (*self._always, *sorted(set(self._directories()))):
            try:
                device, point = _mount_point(directory)
                if device in seen:
                    continue
                if len(seen) == _MOST_FILE_SYSTEMS:
                    self._files.leave_out(
                        "/", f"only {_MOST_FILE_SYSTEMS} file systems are measured"
                    )
                    break
                seen.add(device)
                measurements += self._of_one(point)
            except OSError as error:
                self._files.failed(str(directory), error)
        return measurements

    def _of_one(self, point: str) -> list[Measurement]:
        found = self._statvfs(point)
        if not found.f_blocks:
            return []  # without storage, as /proc
        # As in `df`: blocks reserved for the superuser are neither used nor free.
        states = {"used": found.f_blocks - found.f_bfree, "free": found.f_bavail}
        # A path may be any bytes; a label is text.
        shown = ("system.filesystem.mountpoint", os.fsencode(point).decode("utf-8", "replace"))
        measurements = []
        for state, blocks in states.items():
            if not 0 <= blocks <= found.f_blocks:
                self._files.leave_out(point, f"{blocks} of {found.f_blocks} blocks are {state}")
                continue
            attributes = (shown, ("system.filesystem.state", state))
            size_bytes = blocks * found.f_frsize
            metric = catalog.SYSTEM_FILESYSTEM_USAGE
            measurements.append(Measurement(metric, size_bytes, attributes))
        return measurements


def _always() -> Iterator[Path]:
    yield Path("/")
    # There is none if nothing can be written, as in a container with a read-only root.
    with contextlib.suppress(OSError):
        yield Path(tempfile.gettempdir())
    yield _SHARED_MEMORY


def _mount_point(directory: Path) -> tuple[int, str]:
    """The device, and its highest directory above this one."""
    path = os.path.realpath(directory)
    device = os.stat(path).st_dev
    while (above := os.path.dirname(path)) != path and os.stat(above).st_dev == device:
        path = above
    return device, path
