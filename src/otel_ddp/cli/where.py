"""Where a command looks: in the directory that was named, or in those that there are by default."""

from __future__ import annotations

import argparse
import os
import stat
from pathlib import Path

from otel_ddp import settings
from otel_ddp.errors import ConfigError
from otel_ddp.journal.place import Place, existing


def argument(parser: argparse.ArgumentParser) -> None:
    """--dir, the same for all commands."""
    parser.add_argument(
        "--dir",
        type=_directory,
        default="",
        help="where journals and agent meet (default: OTEL_DDP_DIR, else a directory on tmpfs)",
    )


def _directory(text: str) -> str:
    try:
        # Relative is fine here, unlike in a variable: whoever types it sees where he is.
        return str(Path(text).expanduser().absolute()) if text else ""
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"there is no home directory for {text!r}") from None


def look(directory: str) -> tuple[settings.Settings, list[Place], str]:
    """The settings, the places that are there, and a word on one that is not there yet.

    ConfigError for a named directory that cannot be looked into: silence would be taken for
    "nothing runs". One that OTEL_DDP_DIR names is made by the first process that records, so it
    may be missing; one that somebody has typed here should be there.
    """
    conf = settings.read(directory=directory or None)
    if not conf.directory:
        return conf, existing("", os.environ), ""
    path = Path(conf.directory)
    if why := _closed(path):
        raise ConfigError(f"{path} {why}.")
    if not path.exists():
        if directory:
            raise ConfigError(f"{path} does not exist.")
        return conf, [], f"{path} (OTEL_DDP_DIR) does not exist yet: nothing has recorded there"
    return conf, [Place(path)], ""


def _closed(path: Path) -> str:
    """Why a path cannot be looked into; empty where it can, or where there is nothing."""
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
