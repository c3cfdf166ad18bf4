"""Packages that only some tests need: each is in an extra of pyproject.toml."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest


def needed(module: str, extra: str) -> ModuleType:
    """The module; without it the test is skipped, or fails where CI is set."""
    try:
        return importlib.import_module(module)
    except ImportError:
        missing = f"needs {module}: pip install -e '.[{extra}]'"
    if os.environ.get("CI"):
        pytest.fail(missing, pytrace=False)
    pytest.skip(missing)
