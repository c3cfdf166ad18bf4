"""Asks git whether the files of a script's repository were changed, without waiting for it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

# A slow file system: then it is not known.
_PATIENCE_S = 10.0


class GitState:
    """Of one folder. An agent asks; a training process starts no program."""

    def __init__(self, folder: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._give_up_at = clock() + _PATIENCE_S
        self._asked = _ask(folder) if folder else None
        self._dirty = ""

    def known(self) -> bool:
        """Whether there is nothing to wait for any more."""
        asked = self._asked
        if asked is None:
            return True
        if asked.poll() is None:
            if self._clock() < self._give_up_at:
                return False
            asked.kill()
            asked.wait()
        elif asked.returncode in (0, 1):
            self._dirty = "true" if asked.returncode else "false"
        self._asked = None
        return True

    @property
    def dirty(self) -> str:
        """`true` or `false`; empty where it is not known."""
        return self._dirty


def _ask(folder: str) -> subprocess.Popen[bytes] | None:
    with contextlib.suppress(OSError, ValueError):
        repository = next(
            (each for each in (Path(folder), *Path(folder).parents) if (each / ".git").exists()),
            None,
        )
        # A repository may name programs that git runs: never those of another user.
        if repository is None or (repository / ".git").stat().st_uid != os.geteuid():
            return None
        return subprocess.Popen(
            [
                *("git", "-C", str(repository), "-c", "core.fsmonitor=false"),
                *("diff", "--quiet", "--no-ext-diff", "--no-textconv", "HEAD", "--"),
            ],
            # It must not take the lock that a person's git in this folder may need.
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    return None
