"""Where a command finds journals, agents and histories; the option --dir."""

from __future__ import annotations

import argparse
import os
import stat
from pathlib import Path

from otel_ddp import settings
from otel_ddp.errors import ConfigError
from otel_ddp.history.directory import default_directory
from otel_ddp.journal.place import Place, existing


def add_directory_option(parser: argparse.ArgumentParser) -> None:
    """Add --dir, the same for all commands."""
    parser.add_argument(
        "--dir",
        type=_directory,
        default="",
        help="the directory of journals and agent (default: OTEL_DDP_DIR, else one on tmpfs)",
    )


def _directory(text: str) -> str:
    # May be relative, unlike in a variable: a person who types it knows the current directory.
    return os.path.abspath(os.path.expanduser(text)) if text else ""


def find_places(directory: str) -> tuple[settings.Settings, list[Place], str]:
    """The settings, the places that exist, and a sentence on a place that does not exist yet.

    Raises ConfigError for a named directory that cannot be read: no output would be taken for
    "nothing runs". The first process that records makes the directory of OTEL_DDP_DIR, so that
    one may be missing. A directory that was typed here must exist.
    """
    conf = settings.read(directory=directory or None)
    if not conf.directory:
        return conf, existing("", os.environ), ""
    path = Path(conf.directory)
    if why := _why_unreadable(path):
        raise ConfigError(f"{path} {why}.")
    if not path.exists():
        if directory:
            raise ConfigError(f"{path} does not exist.")
        return conf, [], f"{path} (OTEL_DDP_DIR) does not exist yet: nothing has recorded there"
    return conf, [Place(path)], ""


def _why_unreadable(path: Path) -> str:
    """Why a path cannot be read; empty if it can, or if it does not exist."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if not stat.S_ISDIR(found.st_mode):
        return "is no directory"
    if not os.access(path, os.R_OK | os.X_OK):
        mode = stat.S_IMODE(found.st_mode)
        return f"cannot be read (it belongs to user {found.st_uid} and has mode {mode:04o})"
    return ""


def history_directory() -> Path:
    """Where runs are looked up by their names."""
    return default_directory(os.path.expanduser(os.environ.get("OTEL_DDP_HISTORY_DIR", "")))
