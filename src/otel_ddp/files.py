"""Opens, reads and replaces files in places where other programs or users may interfere."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from otel_ddp import errors

# Read at most this many bytes of a file by default. Our own files are never longer.
_MOST_BYTES = 8 << 20
_PIECE = 1 << 16
# JSON with more nested levels than this is refused, since code that walks it recurses. Our own
# files have at most ten levels.
_DEEPEST = 64
_LAST_STANDARD = 2
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL
# The fields of `struct flock`, which fcntl uses for a lock: type, whence, start, length, pid.
_FLOCK = struct.Struct("hhqqi4x")
_TEMPORARY = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


# -- files


def open_private(path: Path | str, flags: int = os.O_RDONLY, dir_fd: int | None = None) -> int:
    """Open a file, but follow no link, and do not wait for the other end of a fifo.

    Only this user can read a file that it creates.
    """
    # These flags are no constant of the module, since Windows imports it but lacks them.
    carefully = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.open(path, flags | carefully, 0o600, dir_fd=dir_fd)


def open_own(path: Path, flags: int = os.O_RDONLY) -> int:
    """Like `open_private`, for a file of this user in a directory of this user.

    Raises OSError if the file or the directory belongs to another user.
    """
    with own_directory(path.parent) as folder:
        handle = open_private(path.name, flags, folder)
    try:
        # Other users may have been able to write to the directory before, and have created the
        # file.
        _check_owner(path, os.fstat(handle))
    except BaseException:
        os.close(handle)
        raise
    return handle


def create(path: Path) -> int:
    """Create a file in our own directory; returns its descriptor."""
    return open_own(path, _NEW)


def make_fifo(path: Path) -> None:
    """Create a fifo in our own directory."""
    with own_directory(path.parent) as folder:
        os.mkfifo(path.name, 0o600, dir_fd=folder)


def read(path: Path | str, most: int = _MOST_BYTES) -> bytes:
    """Read at most *most* bytes from the start of a file. Raises OSError."""
    return _read(open_private(path), most)


def read_own(path: Path, most: int = _MOST_BYTES) -> bytes:
    """Like `read`, for our own file in our own directory."""
    return _read(open_own(path), most)


def _read(handle: int, most: int) -> bytes:
    try:
        pieces = []
        # Read in a loop, since for a file in /proc the kernel returns at most one page per read.
        while most > 0 and (piece := os.read(handle, min(most, _PIECE))):
            pieces.append(piece)
            most -= len(piece)
        return b"".join(pieces)
    finally:
        os.close(handle)


def read_text(path: Path | str, most: int = _PIECE) -> str | None:
    """The first *most* bytes as text; None if the file cannot be read."""
    try:
        return read(path, most).decode("utf-8", "replace")
    except (OSError, ValueError):  # ValueError: the path has a null byte
        errors.reraise_foreign()
        return None


def stat_fields(task: Path) -> list[str]:
    """The fields of the file `stat` in *task*, a folder in /proc, from the process state on.

    Empty if the process or thread has ended.
    """
    # Do not call `read`, as Windows lacks the flags that it uses. There, this returns an empty
    # list.
    try:
        text = (task / "stat").read_text(errors="replace")
    except OSError:
        return []
    # The name of the program comes before these fields, in parentheses. It may contain any
    # character, even a parenthesis.
    return text.rpartition(")")[2].split()


def read_json(path: Path, most: int = _MOST_BYTES) -> Any:
    """The JSON of a file in our own directory; None if it is missing, damaged or too long."""
    try:
        return parse_json(read_own(path, most))
    except (OSError, ValueError):
        errors.reraise_foreign()
        return None


def read_mapping(path: Path, most: int = _MOST_BYTES) -> dict[str, Any]:
    """Like `read_json`, but an empty mapping if the file has none."""
    content = read_json(path, most)
    return content if isinstance(content, dict) else {}


def parse_json(
    text: str | bytes,
    parse_constant: Callable[[str], Any] | None = None,
    parse_float: Callable[[str], Any] | None = None,
) -> Any:
    """Parse JSON from any source. Raises ValueError if it is damaged or nested too deeply."""
    try:
        content = json.loads(text, parse_constant=parse_constant, parse_float=parse_float)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [content]
    for _ in range(_DEEPEST + 1):
        level = [
            child
            for each in level
            if isinstance(each, (dict, list))
            for child in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return content
    raise ValueError("it is nested too deeply")


def replace(path: Path, content: str | bytes) -> None:
    """Replace a file in our own directory, atomically. Raises OSError."""
    if isinstance(content, str):
        content = content.encode("utf-8", "backslashreplace")
    with own_directory(path.parent) as folder:
        replace_in(folder, path.name, content)


def replace_in(dir_fd: int, name: str, content: bytes) -> None:
    """Replace the file *name* by a temporary file, so that readers see all of it or the old one.

    Raises OSError.
    """
    half = f"{name}.half"
    try:
        try:
            handle = open_private(half, _NEW, dir_fd)
        except FileExistsError:
            os.unlink(half, dir_fd=dir_fd)
            handle = open_private(half, _NEW, dir_fd)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.rename(half, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(half, dir_fd=dir_fd)
        raise


def remove(*paths: Path) -> None:
    """Delete files in our own directories. Skip files that are missing or cannot be deleted."""
    for path in paths:
        _remove(path)


def _remove(path: Path) -> None:
    try:
        with own_directory(path.parent) as folder:
            os.unlink(path.name, dir_fd=folder)
    except OSError:
        errors.reraise_foreign()


def write_to_fifo(fifo: Path, line: str) -> None:
    """Write a line to a fifo with a single, atomic write. Raises OSError if no process reads it."""
    handle = open_own(fifo, os.O_WRONLY)
    try:
        os.write(handle, line.encode())
    finally:
        os.close(handle)


def check_own(path: Path) -> os.stat_result:
    """Raise OSError unless the path is a file that belongs to us. A link counts as no file."""
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(22, "is no file (a link is not followed)", str(path))
    _check_owner(path, found)
    return found


def _check_owner(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise PermissionError(1, f"belongs to user {found.st_uid}, not to us", str(path))


# -- directories of this user alone


@contextlib.contextmanager
def own_directory(path: Path) -> Iterator[int]:
    """A descriptor of our own directory. Raises OSError if other users may write to it.

    This is checked at each use: a directory in shared memory may be removed, as at a logout, and
    another user may then create one with the same name.
    """
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check_closed(path, os.fstat(handle))
        yield handle
    finally:
        os.close(handle)


def _check_closed(path: Path, found: os.stat_result) -> None:
    _check_owner(path, found)
    if found.st_mode & 0o022:
        raise PermissionError(1, "other users can write to it", str(path))


def private_directory(path: Path, named: bool = False) -> Path:
    """Create a directory if necessary. Raises OSError unless only we can write to it.

    *named*: True if the user has chosen the directory. Its mode is then left as it is, even if
    other users may read it; else it is closed to them.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
        os.chmod(path, 0o700)  # the umask may have restricted mkdir's mode
    found = _status_of_own_directory(path)
    if named:
        _check_closed(path, found)
    elif found.st_mode & 0o077:
        # Other users can read this directory of ours, or even write to it: close it to them.
        os.chmod(path, 0o700)
    return path


def _status_of_own_directory(path: Path) -> os.stat_result:
    """The status of our own directory. Raises OSError for another user's, and for a link."""
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(20, "is no directory (a link is not followed)", str(path))
    _check_owner(path, found)
    return found


def default_root() -> Path:
    """The default directory on disk, one for each user.

    Every user can write to /var/tmp. If another user has created the directory of this name first,
    it is not used, and nothing is stored on disk.
    """
    return Path(f"/var/tmp/otel_ddp-{os.geteuid()}")


def _with_root(path: Path) -> tuple[Path, ...]:
    """*path*, and before it the default root, if *path* is directly inside of it."""
    in_root = path.parent.name == f"otel_ddp-{os.geteuid()}"
    return (path.parent, path) if in_root else (path,)


def make_kept(path: Path, ours: bool = False) -> None:
    """Create a directory on disk. Raises OSError unless it is our own, and only we can write to it.

    *ours*: True if the user chose only a parent of this directory. It is then closed to other
    users, while a directory that the user chose itself may be open to readers.
    """
    directories = _with_root(path)
    directories[0].parent.mkdir(parents=True, exist_ok=True)
    for each in directories:
        private_directory(each, named=len(directories) == 1 and not ours)


def check_kept(path: Path) -> None:
    """Raise OSError if another user can put files into a directory."""
    for each in _with_root(path):
        with contextlib.suppress(FileNotFoundError):
            _check_closed(each, _status_of_own_directory(each))


def is_kept(path: Path) -> bool:
    """Whether `check_kept` passes."""
    try:
        check_kept(path)
    except OSError:
        return False
    return True


# -- descriptors that the program may have closed: some programs close all open descriptors


def file_of(fd: int) -> tuple[int, int] | None:
    """The device and inode of the file that is open as *fd*; None if *fd* is closed."""
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def close_ours(fd: int, file: tuple[int, int] | None) -> None:
    """Close a descriptor, unless the program has closed it and opened another file with it."""
    if file is not None and file_of(fd) == file:
        os.close(fd)


@contextlib.contextmanager
def off_standard_streams() -> Iterator[None]:
    """Prevent opened files from getting the descriptors 0, 1 and 2, if the program has closed them.

    C libraries may still write to these descriptors.
    """
    taken: list[tuple[int, tuple[int, int] | None]] = []
    try:
        # Occupy the free ones of these descriptors by opening /dev/null. If it cannot be opened,
        # they stay free.
        with contextlib.suppress(OSError):
            while (fd := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= _LAST_STANDARD:
                taken.append((fd, file_of(fd)))
            os.close(fd)
        yield
    finally:
        # Meanwhile the program may have closed a descriptor and opened another file with it: close
        # only what is still ours.
        for fd, file in taken:
            close_ours(fd, file)


# -- locks, which the kernel drops when their process dies

# Each function imports fcntl itself, as Windows imports this module but lacks it.


def lock(fd: int) -> None:
    """Lock a file for this process. Raises OSError if another process has locked it."""
    import fcntl

    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def raise_file_limit() -> None:
    """Raise the limit of open files to the system's maximum."""
    import resource

    with contextlib.suppress(OSError, ValueError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def holder(fd: int) -> int | None:
    """The pid of the process that holds the file's lock; None if no process does.

    0 if that process is in another PID namespace.
    """
    import fcntl

    answer = fcntl.fcntl(fd, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    kind, _, _, _, pid = _FLOCK.unpack(answer)
    return None if kind == fcntl.F_UNLCK else max(0, pid)


def lock_holder(path: Path) -> int | None:
    """The pid of the process that locks our own file; None if no process does.

    0 if that process is in another PID namespace. Also 0 if the file cannot be opened because of a
    temporary shortage, such as of descriptors: None would mean that the process is dead.
    """
    try:
        fd = open_own(path)
    except OSError as error:
        return 0 if error.errno in _TEMPORARY else None
    try:
        return holder(fd)
    except OSError:
        return None
    finally:
        os.close(fd)
