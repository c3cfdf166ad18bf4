"""What only some tests need: packages of an extra, and what the oldest torch lacks."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from types import ModuleType

import pytest

from otel_ddp.torch.models import OLDEST

_OLDEST = ".".join(map(str, OLDEST))


def needed(module: str, extra: str) -> ModuleType:
    """The module; without it the test is skipped, or fails where CI is set."""
    try:
        return importlib.import_module(module)
    except ImportError:
        missing = f"needs {module}: pip install -e '.[{extra}]'"
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
