"""Runs commands to their end, for tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any


def run(*command: str | Path, **how: Any) -> subprocess.CompletedProcess[str]:
    """What a command says, however it ends."""
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **how)


def python(code: str, *arguments: str | Path, **how: Any) -> subprocess.CompletedProcess[str]:
    """The same of a program in Python."""
    return run(sys.executable, "-c", code, *arguments, **how)
