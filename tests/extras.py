"""What only some tests need: packages of an extra, and what the oldest torch lacks."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest

from otel_ddp.torch.models import OLDEST

_OLDEST = ".".join(map(str, OLDEST))


def needed(module: str, extra: str) -> ModuleType:
    """The module; without it the test is skipped, or fails where CI is set."""
    try:
        return importlib.import_module(module)
    except ImportError:
        _lack(module, extra)


def needed_command(name: str, extra: str) -> str:
    """The path of a command of this environment; without it as above."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or _lack(name, extra)


def _lack(what: str, extra: str) -> NoReturn:
    missing = f"needs {what}: pip install -e '.[{extra}]'"
    if os.environ.get("CI"):
        pytest.fail(missing, pytrace=False)
    pytest.skip(missing)


def has_oldest_torch() -> bool:
    """Whether the oldest torch that we measure is installed, or its patches."""
    try:
        return f"{importlib.metadata.version('torch')}.".startswith(f"{_OLDEST}.")
    except importlib.metadata.PackageNotFoundError:
        return False


def newer_torch(what: str) -> pytest.MarkDecorator:
    """Skips a test of what the oldest torch lacks."""
    return pytest.mark.skipif(has_oldest_torch(), reason=f"torch {_OLDEST} has no {what}")
