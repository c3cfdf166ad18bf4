"""Stores artifacts through fsspec: in object stores, and wherever else it has a file system for.

Few of these can go on with a broken upload, so one file begins anew; files that are whole stay.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from typing import Any, TypeVar

from otel_ddp.agent.artifacts.sink import CannotStore
from otel_ddp.errors import containment

T = TypeVar("T")

# One block waits for the store at a time.
_BLOCK_BYTES = 16 * 1024 * 1024


class FsspecSink:
    """One address and what lies below it."""

    def __init__(self, url: str, agent: str) -> None:
        """*agent*: as for DirectorySink."""
        # Imported where it is used: it takes a moment, and few agents store anything.
        try:
            from fsspec.core import url_to_fs

            self._files, self._root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise CannotStore(
                f"OTEL_DDP_ARTIFACTS cannot be used: {error} (pip install 'otel-ddp[artifacts]', "
                "and what fsspec needs for this address, such as s3fs)",
                again=False,
            ) from None
        # Neither a password nor parameters, which may be one.
        self._shown = re.sub(r"//[^/]*@", "//", url).partition("?")[0].rstrip("/")
        self._agent = agent

    def size(self, key: str) -> int | None:
        """The size of a whole object; None if there is none."""
        path = self._path(key)
        if not _asked(lambda: self._files.exists(path)):
            return None
        return int(_asked(lambda: self._files.info(path)["size"]))

    def upload(self, key: str) -> FsspecUpload:
        """Begin an object."""
        final = self._path(key)
        folder, name = posixpath.split(final)
        part = posixpath.join(folder, f".{name}.{self._agent}.part")
        return FsspecUpload(self._files, final, part)

    def uri(self, key: str) -> str:
        """Its address."""
        return f"{self._shown}/{key}"

    def _path(self, key: str) -> str:
        return f"{self._root.rstrip('/')}/{key}"


class FsspecUpload:
    """One object, under another name until it is whole.

    A file of fsspec that is closed after an error may become an object, and be half of one.
    """

    written = 0

    def __init__(self, files: Any, final: str, part: str) -> None:
        self._files, self._final, self._part = files, final, part

        def begin() -> Any:
            files.makedirs(posixpath.dirname(final), exist_ok=True)
            return files.open(part, "wb", block_size=_BLOCK_BYTES)

        self._file = _asked(begin)
        self._open = True

    def holds(self, at: int, chunk: bytes) -> bool:
        """Nothing is left of an earlier attempt."""
        return not chunk

    def write(self, chunk: bytes) -> None:
        """Add bytes."""
        _asked(lambda: self._file.write(chunk))

    def commit(self) -> None:
        """Give the object its final name."""

        def rename() -> None:
            self._file.close()
            self._files.mv(self._part, self._final)
            self._open = False

        _asked(rename)

    def leave(self) -> None:
        """Stop here: nothing of it can be used later."""
        self.discard()

    def discard(self) -> None:
        """Remove what was written."""
        if not self._open:
            return
        self._open = False
        containment.attempt(self._file.close, None)
        containment.attempt(lambda: self._files.rm(self._part), None)


def _asked(ask: Callable[[], T]) -> T:
    """Asks the file system, whose errors are of any class."""
    try:
        return ask()
    except containment.ANY_ERROR as error:
        why = re.sub(r"//[^/\s]*@", "//", str(error))[:200]
        raise CannotStore(f"{type(error).__name__}: {why}") from None
