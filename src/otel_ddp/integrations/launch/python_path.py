"""Puts the folder with our sitecustomize on PYTHONPATH, for every Python below a command."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

FOLDER = str(Path(__file__).with_name("startup"))


def add_to(env: MutableMapping[str, str]) -> None:
    """Every Python that is started with these variables waits for torch."""
    before = env.get("PYTHONPATH", "")
    others = [each for each in before.split(os.pathsep) if each != FOLDER]
    # An empty entry is the working directory. An empty variable is none at all.
    env["PYTHONPATH"] = os.pathsep.join([FOLDER, *others]) if before else FOLDER
