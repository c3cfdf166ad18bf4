"""Takes the digest of an artifact and copies it, in a process of its own that the agent starts.

A file server or a store that hangs holds up this process alone. The request is on stdin, in a
file that the answer replaces.

The digest of a directory is the SHA-256 of what `sha256sum` prints for its files in the order of
their names. A link in it counts with the path that it holds. SECURITY.md says what may be read.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator
from hashlib import sha256
from secrets import token_hex
from typing import Any, NamedTuple
from urllib.parse import quote, unquote_to_bytes

from otel_ddp import errors, files

CHUNK_BYTES = 1 << 20
MOST_FILES = 100_000
_MOST_LINKS = 40
_LONGEST_NAME = 120
# Letters that every store takes, and that fsspec takes for no pattern.
_SAFE = " +,=@()~"
_PATH_OF = b"/proc/self/fd/%d"
_CHANGED = "it was written to while the agent read it"


class Problem(Exception):
    """Why there is no digest, or no copy."""


class _File(NamedTuple):
    """A file, or a link, when it was listed."""

    name: bytes
    size: int
    mtime_ns: int
    inode: int
    link: bytes | None
    """The path that it holds."""


def main() -> None:
    """Answer one request."""
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    answer = json.dumps(read(**json.load(sys.stdin))).encode()
    os.ftruncate(0, 0)
    os.pwrite(0, answer, 0)
    # A store may have threads that do not end.
    os._exit(0)


def read(uri: str, store: str, run: str, name: str) -> dict[str, Any]:
    """Size and digest, the address of the copy, and the problem if there is one."""
    path = unquote_to_bytes(uri.removeprefix("file://"))
    try:
        own_name = os.path.basename(os.path.realpath(path))
        top = _open(path)
        found = _listed(top, own_name)
        digests = {file: _digest(_chunks(top, file)) for file in found}
        if _listed(top, own_name) != found:
            raise Problem(_CHANGED)
    except (Problem, OSError, ValueError) as error:
        return {"problem": getattr(error, "strerror", None) or str(error)}
    is_file = stat.S_ISREG(os.fstat(top).st_mode)
    listing = [_line(file.name, digest) for file, digest in digests.items()]
    digest = digests[found[0]] if is_file else _digest(listing)
    answer = {"size": sum(file.size for file in found), "digest": digest}
    if store:
        base = digest[:16]
        parts: list[tuple[str, Iterable[bytes], str]] = [
            (f"{base}/{quote(file.name, f'{_SAFE}/')}", _chunks(top, file), digests[file])
            for file in found
            if file.link is None
        ]
        if not is_file:
            # Last: with its list the copy of a directory is whole.
            parts.append((f"{base}.sha256", listing, digest))
        try:
            folder = _copy(store, run, name, parts)
            answer["uri"] = f"{folder}/{parts[0][0] if is_file else base}"
        except errors.ANY_ERROR as error:
            # Without the password of an address.
            why = re.sub(r"//[^/\s]*@", "//", f"{type(error).__name__}: {error}")[:200]
            answer["problem"] = f"it is not stored: {why}"
    return answer


def _open(path: bytes) -> int:
    for _ in range(_MOST_LINKS):
        found = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        status = os.fstat(found)
        if not stat.S_ISLNK(status.st_mode):
            break
        if status.st_uid not in (0, os.geteuid()):
            # Whoever can write there could have any file of ours read and stored.
            raise Problem(f"it is a link of user {status.st_uid}, which is not followed")
        path = os.path.join(os.path.dirname(path), os.readlink(b"", dir_fd=found))
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise Problem("it is neither a file nor a directory")
    return os.open(_PATH_OF % found, os.O_RDONLY | os.O_CLOEXEC)


def _listed(top: int, own_name: bytes) -> list[_File]:
    """The files to read, sorted by name."""
    status = os.fstat(top)
    if stat.S_ISREG(status.st_mode):
        return [_file(own_name, status)]
    found: list[_File] = []
    for folder, folders, names, fd in os.fwalk(b".", dir_fd=top, onerror=_raise):
        for name in (*names, *folders):
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            link = os.readlink(name, dir_fd=fd) if stat.S_ISLNK(status.st_mode) else None
            if stat.S_ISREG(status.st_mode) or link is not None:
                found.append(_file(os.path.normpath(os.path.join(folder, name)), status, link))
            elif not stat.S_ISDIR(status.st_mode):
                raise Problem("there is something in it that is neither file nor directory")
        if len(found) > MOST_FILES:
            raise Problem(f"there are more than {MOST_FILES} files in it")
    return sorted(found)


def _file(name: bytes, status: os.stat_result, link: bytes | None = None) -> _File:
    size = status.st_size if link is None else 0
    return _File(name, size, status.st_mtime_ns, status.st_ino, link)


def _raise(error: OSError) -> None:
    raise error


def _chunks(top: int, file: _File) -> Iterator[bytes]:
    """The bytes of a file, however it grows; or the path that a link holds."""
    if file.link is not None:
        yield file.link
        return
    where, count = os.readlink(_PATH_OF % top), 0
    if stat.S_ISDIR(os.fstat(top).st_mode):
        fd = files.open_private(os.fsdecode(file.name), dir_fd=top)
        where = os.path.join(where, file.name)
    else:
        fd = os.open(_PATH_OF % top, os.O_RDONLY | os.O_CLOEXEC)
    with open(fd, "rb", buffering=0) as content:
        # Any folder in between may have become a link.
        if os.readlink(_PATH_OF % fd) != where:
            raise Problem(_CHANGED)
        while count <= file.size and (chunk := content.read(CHUNK_BYTES)):
            count += len(chunk)
            yield chunk


def _digest(chunks: Iterable[bytes]) -> str:
    seen = sha256()
    for chunk in chunks:
        seen.update(chunk)
    return seen.hexdigest()


def _line(name: bytes, digest: str) -> bytes:
    """As `sha256sum` writes it, with a backslash before odd characters."""
    escaped = name.replace(b"\\", b"\\\\").replace(b"\n", b"\\n").replace(b"\r", b"\\r")
    return (b"\\" if escaped != name else b"") + digest.encode() + b"  " + escaped + b"\n"


def _copy(
    store: str, run: str, name: str, parts: Iterable[tuple[str, Iterable[bytes], str]]
) -> str:
    """Store files, each with its name, content and digest; returns the address of their folder."""
    # Few agents store anything.
    from fsspec.core import url_to_fs

    system, root = url_to_fs(store)
    # No part of a path leads out of the store.
    plain = [quote(word.strip("."), _SAFE)[:_LONGEST_NAME] or "_" for word in (run, name)]
    base = "/".join([root.rstrip("/"), *plain])
    for each, chunks, digest in parts:
        path = f"{base}/{each}"
        # With the digest in its path, a file that is there is this one.
        if not system.exists(path):
            _put(system, path, chunks, digest)
    return str(system.unstrip_protocol(base))


def _put(system: Any, path: str, chunks: Iterable[bytes], digest: str) -> None:
    folder, _, name = path.rpartition("/")
    # It has its final name once it is whole, and no link of another user waits under this one.
    part, seen = f"{folder}/.{name}.{token_hex(8)}.part", sha256()
    system.makedirs(folder, exist_ok=True)
    try:
        with system.open(part, "wb") as out:
            for chunk in chunks:
                seen.update(chunk)
                out.write(chunk)
        if seen.hexdigest() != digest:
            raise Problem(_CHANGED)
        system.mv(part, path)
    except errors.ANY_ERROR:
        errors.attempt(lambda: system.rm_file(part), None)
        raise


if __name__ == "__main__":
    main()
