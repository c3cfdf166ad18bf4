"""Stores artifacts through fsspec: in directories, in object stores, wherever it has a file system.

An upload that was broken off is begun anew; files that are whole stay.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2s
from secrets import token_hex
from typing import Any
from urllib.parse import quote, unquote

from otel_ddp import errors
from otel_ddp.agent.artifacts.content import Content, File

# One block waits for the store at a time.
_BLOCK_BYTES = 16 * 1024 * 1024
_LONGEST_PART = 120


class CannotStore(Exception):
    """The store did not take it; the text says why."""

    def __init__(self, why: str, *, again: bool = True) -> None:
        """*again*: whether it may take it later."""
        super().__init__(why)
        self.again = again


def is_directory(address: str) -> bool:
    """Whether it is one of this machine's directories."""
    return address.startswith(("/", "file:///"))


class Store:
    """One address and what lies below it. Keys are relative paths of plain letters."""

    def __init__(self, address: str, agent: str) -> None:
        """*agent*: what tells this agent's uploads from another's; the next one has it again."""
        # Without a password and without parameters, which may be one.
        self._shown = re.sub(r"//[^/]*@", "//", address).partition("?")[0].rstrip("/")
        self._is_local = is_directory(address)
        # Imported where it is used: it takes a moment, and few agents store anything.
        try:
            from fsspec import filesystem
            from fsspec.core import url_to_fs
        except ImportError:
            raise CannotStore(
                "OTEL_DDP_ARTIFACTS needs fsspec: pip install 'otel-ddp[artifacts]'", again=False
            ) from None
        try:
            if self._is_local:
                root = unquote(address[len("file://") :]) if address[0] != "/" else address
                self._files: Any = filesystem("file")
                self._shown = f"file://{quote(os.fsencode(root.rstrip('/')))}"
            else:
                self._files, root = url_to_fs(address)
        except (ImportError, ValueError) as error:
            raise CannotStore(f"OTEL_DDP_ARTIFACTS cannot be used: {error}", again=False) from None
        self._root = root.rstrip("/")
        word = blake2s(agent.encode("utf-8", "replace"), digest_size=4).hexdigest()
        self._part_of_ours = f".{word}.part"

    def uri(self, key: str) -> str:
        """Its address, without passwords."""
        return f"{self._shown}/{quote(key) if self._is_local else key}"

    def copy(
        self, folder: str, name: bytes, content: Content, read: Callable[[File], Iterable[bytes]]
    ) -> str:
        """Store every file below a folder, and the list of a directory's last; returns the address.

        *name*: of an artifact that is one file. With its list the copy of a directory is whole.
        """
        # The digest is in the key, so a file that is there is this one.
        base = key = f"{folder}/{content.digest[:16]}"
        there = self._sizes(base)
        for file in content.digests:
            parts = file.name.split(b"/") if file.name else [name]
            key = posixpath.join(base, *map(plain, parts))
            if file.link is None and there.get(key) != file.size:
                self.put(key, read(file))
        listing = content.listing()
        if not listing and content.digests:
            return self.uri(key)
        with _errors_told():
            is_whole = self._files.exists(self._path(f"{base}.sha256"))
        if not is_whole:
            self.put(f"{base}.sha256", [listing])
        return self.uri(base)

    def _sizes(self, base: str) -> dict[str, int]:
        """Of the files below, by their keys. What a killed agent of this name left is removed."""
        with _errors_told():
            # Others store there too.
            self._files.invalidate_cache()
            try:
                found = self._files.find(self._path(base), detail=True)
            except FileNotFoundError:
                return {}
        for path in [path for path in found if path.endswith(self._part_of_ours)]:
            del found[path]
            self._remove(path)
        return {path.removeprefix(self._path("")): info["size"] for path, info in found.items()}

    def put(self, key: str, content: Iterable[bytes]) -> None:
        """Store a file, which has another name until it is whole and *content* has not raised.

        A file of fsspec that is closed after an error may become an object, and be half of one.
        """
        final = self._path(key)
        folder, name = posixpath.split(final)
        # The name is random: no link waits under it, and no other agent uses it.
        part = posixpath.join(folder, f".{name}.{token_hex(8)}{self._part_of_ours}")
        with _errors_told():
            self._files.makedirs(folder, exist_ok=True)
            file = self._files.open(part, "wb", block_size=_BLOCK_BYTES)
        try:
            for chunk in content:
                with _errors_told():
                    file.write(chunk)
            with _errors_told():
                self._commit(file, part, final)
        except BaseException:
            errors.attempt(file.close, None)
            self._remove(part)
            raise

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _commit(self, file: Any, part: str, final: str) -> None:
        if not self._is_local:
            file.close()
            self._files.mv(part, final)
            return
        # A name says that the disk has all of it. fsspec's own move may be a copy.
        file.flush()
        os.fsync(file.fileno())
        file.close()
        os.replace(part, final)

    def _remove(self, path: str) -> None:
        errors.attempt(lambda: self._files.rm_file(path), None)


def plain(word: str | bytes) -> str:
    """A part of a key: letters that every store takes, and not too many."""
    text = quote(word, safe=" +,=@()~")
    if not text.strip("."):
        text = text.replace(".", "%2E") or "%"
    if len(text) > _LONGEST_PART:
        text = f"{text[: _LONGEST_PART - 9]}~{blake2s(text.encode(), digest_size=4).hexdigest()}"
    return text


@contextmanager
def _errors_told() -> Iterator[None]:
    """The errors of a file system are of any class."""
    try:
        yield
    except errors.ANY_ERROR as error:
        why = re.sub(r"//[^/\s]*@", "//", str(error))[:200]
        raise CannotStore(f"{type(error).__name__}: {why}") from None
