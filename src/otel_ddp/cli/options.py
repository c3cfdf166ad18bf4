"""The option --dir, and the directories of journals, agents and histories."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from otel_ddp import files, settings
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
    # Unlike in a variable, it may be relative to the current directory.
    return os.path.abspath(os.path.expanduser(text)) if text else ""


def find_places(directory: str) -> tuple[settings.Settings, list[Place], str]:
    """The settings, the existing places, and a sentence if OTEL_DDP_DIR does not exist yet.

    Raises ConfigError for an unreadable directory, as an empty answer would mean that nothing runs,
    and for a --dir that does not exist.
    """
    conf = settings.read(directory=directory or None)
    path = Path(conf.directory)
    if not conf.directory:
        return conf, existing("", os.environ), ""
    if why := _why_unreadable(path):
        raise ConfigError(f"{path} cannot be read ({why}).")
    if path.exists():
        return conf, [Place(path)], ""
    if directory:
        raise ConfigError(f"{path} does not exist.")
    return conf, [], f"{path} (OTEL_DDP_DIR) does not exist yet: nothing has recorded there"


def _why_unreadable(path: Path) -> str:
    """Why a directory cannot be read; empty if it can or does not exist."""
    try:
        files.check_kept(path)
        with files.own_directory(path):
            return ""
    except FileNotFoundError:
        return ""
    except OSError as error:
        return str(error.strerror)


def history_directory() -> Path:
    """The directory in which runs are looked up by name."""
    return default_directory(settings.value("OTEL_DDP_HISTORY_DIR", os.environ) or "")
