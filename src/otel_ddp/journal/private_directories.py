"""Directories of this user alone: how they are made and checked, and where they lie on a disk."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path


def private_directory(path: Path, named: bool = False) -> Path:
    """Makes this directory if need be. Raises OSError unless it is ours and closed to others."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
        os.chmod(path, 0o700)  # whatever the umask took away
    if _own_mode(path) & 0o077:
        if named:
            # Not ours to change: it may be shared for a reason.
            raise PermissionError(1, "other users can enter it; it must have mode 0700", str(path))
        # Ours, but open to others, by a umask. Close it before anything is put there.
        os.chmod(path, 0o700)
    return path


def _own_mode(path: Path) -> int:
    """The mode of a directory of ours. Raises OSError for another user's, and for a link."""
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(20, "is no directory (a link is not followed)", str(path))
    if found.st_uid != os.geteuid():
        raise PermissionError(1, f"belongs to user {found.st_uid}, not to us", str(path))
    return found.st_mode


# -- on a disk


def default_root(env: Mapping[str, str] | None = None, disk: Path = Path("/var/tmp")) -> Path:
    """The directory on a disk for what no variable names a directory for.

    Every user may write to /var/tmp. Where another user was first, it is the state directory.
    """
    env = os.environ if env is None else env
    name = f"otel_ddp-{os.geteuid()}"
    candidates = (each / name for each in (disk, *_state_directory(env)))
    return next(filter(_is_free, candidates), disk / name)


def _state_directory(env: Mapping[str, str]) -> Iterator[Path]:
    state, home = Path(env.get("XDG_STATE_HOME", "")), Path(env.get("HOME", ""))
    if state.is_absolute():
        yield state
    # In a container it may be a directory of all users, such as /tmp.
    elif home.is_absolute() and os.path.isdir(home) and home.stat().st_uid == os.geteuid():
        yield home / ".local" / "state"


def _is_free(path: Path) -> bool:
    """Whether it is ours, or nothing is there and we can make it."""
    try:
        above = next(each for each in path.parents if each.exists())
        if os.stat(above).st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
            return False  # another user could put one of theirs in its place at any time
        if not os.path.lexists(path):
            return os.access(above, os.W_OK | os.X_OK, effective_ids=True)
        _own_mode(path)
    except OSError:
        return False
    return True


def _with_root(path: Path) -> tuple[Path, ...]:
    """A directory on a disk, and the default root if it lies in that."""
    in_root = path.parent.name == f"otel_ddp-{os.geteuid()}"
    return (path.parent, path) if in_root else (path,)


def make_kept(path: Path) -> None:
    """Makes a directory on a disk. Raises OSError unless it is ours and closed to others."""
    directories = _with_root(path)
    directories[0].parent.mkdir(parents=True, exist_ok=True)
    for each in directories:
        private_directory(each, named=len(directories) == 1)


def check_kept(path: Path) -> None:
    """Raises OSError if another user may have put into a directory what is there to be read."""
    for each in _with_root(path):
        with contextlib.suppress(FileNotFoundError):
            if _own_mode(each) & 0o022:
                raise PermissionError(1, "other users can write to it", str(each))


def is_kept(path: Path) -> bool:
    """Whether `check_kept` has nothing against it."""
    try:
        check_kept(path)
    except OSError:
        return False
    return True
