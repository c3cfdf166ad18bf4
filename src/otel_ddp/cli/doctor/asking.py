"""Asks in a process of its own what may crash, or never come back."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from typing import Any


def ask(code: str, limit_s: float) -> dict[str, Any] | str:
    """What this code prints as JSON; or, as the end of a sentence, how it failed to.

    In another process: what is imported or called there may crash, or never come back.
    """
    start = "import json, sys\nsys.path[:] = json.loads(sys.argv[1])\n"
    process = subprocess.Popen(
        [sys.executable, "-c", start + code, json.dumps(sys.path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        output, complaint = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        # One that hangs in the kernel cannot be killed, and is left behind.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1.0)
        return f"has not come to an end within {limit_s:g} s"
    if process.returncode < 0:
        return f"died of signal {-process.returncode}"
    try:
        answer = json.loads(output.splitlines()[-1])
    except (ValueError, IndexError):
        answer = None
    if process.returncode or not isinstance(answer, dict):
        last = (complaint.strip().splitlines() or ["it said nothing"])[-1]
        return f"failed ({last})"
    return answer
