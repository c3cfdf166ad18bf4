"""Runs code in a process of its own, because it may crash or never return."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from typing import Any


def run_python(code: str, limit_s: float) -> dict[str, Any] | str:
    """What this code prints as JSON; if it fails, the reason as the end of a sentence."""
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
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        # A process that hangs in the kernel cannot be killed, and is left behind.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1.0)
        return f"has not ended within {limit_s:g} s"
    if process.returncode < 0:
        return f"died of signal {-process.returncode}"
    try:
        answer = json.loads(output.splitlines()[-1])
    except (ValueError, IndexError):
        answer = None
    if process.returncode or not isinstance(answer, dict):
        last = (errors.strip().splitlines() or ["it printed nothing"])[-1]
        return f"failed ({last})"
    return answer
