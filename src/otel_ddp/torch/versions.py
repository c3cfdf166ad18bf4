"""Tells which versions of torch have what the hooks need."""

from __future__ import annotations

import re

# The first with `torch.get_autocast_dtype` and `torch.amp.GradScaler`; also in pyproject.toml.
OLDEST = (2, 4)


def too_old(version: str) -> str:
    """A warning about a torch that is too old; empty for a newer or an unknown one."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) >= OLDEST:
        return ""
    oldest = ".".join(map(str, OLDEST))
    return (
        f"training steps are measured with torch {oldest} or newer, this is {version}: values, "
        "phases and spans of your own are recorded all the same"
    )
