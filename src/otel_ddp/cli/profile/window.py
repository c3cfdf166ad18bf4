"""Asks a rank for a profile, through the fifo beside its journal, and reads what became of it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from otel_ddp.cli.profile.ranks import Candidate
from otel_ddp.cli.text import cell, integer
from otel_ddp.errors import foreign_json
from otel_ddp.journal.layout import ASK_SUFFIX, PROFILE_SUFFIX
from otel_ddp.journal.locks import lock_holder

_LARGEST_ANSWER = 64 * 1024


class Window:
    """One rank that is profiled."""

    def __init__(self, rank: Candidate, trace: Path) -> None:
        self.rank = rank
        self.trace = trace
        """Where the process writes it, not compressed."""
        self.state = "waiting"
        """Then `recording`, and at last `written`, or `refused` or `failed`, with a reason."""
        self.why = ""
        self.steps = 0
        self.first_step: int | None = None
        self._number = 0

    @property
    def is_over(self) -> bool:
        return self.state in ("written", "refused", "failed")

    def ask(self, steps: int, wait_s: float) -> None:
        """Ask; the window must begin within that time."""
        if self.rank.user != os.geteuid():
            # Root could ask, but the process may not write to a folder of root's.
            self._refuse(f"only its own user may ask it, which is user {self.rank.user}")
            return
        now_ns = time.time_ns()
        self._number = now_ns
        question = {
            "number": now_ns,
            "steps": steps,
            "trace": str(self.trace),
            "until_ns": now_ns + int(wait_s * 1e9),
        }
        # In one write, which a fifo takes as a whole.
        line = f"profile {json.dumps(question)}\n".encode()
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(self.rank.journal.with_suffix(ASK_SUFFIX), flags)
        except OSError:
            self._refuse(
                "it takes no questions: it has not called otel_ddp.instrument, or is about to end"
            )
            return
        try:
            os.write(fd, line)
        except OSError as error:
            self._refuse(f"it takes no question: {error.strerror}")
        finally:
            os.close(fd)

    def poll(self) -> None:
        """Look for an answer."""
        if self.is_over:
            return
        answer = _read(self.rank.journal.with_suffix(PROFILE_SUFFIX))
        state, number = answer.get("state"), answer.get("number")
        if number == self._number:
            self.state = state if isinstance(state, str) else "failed"
            self.why = cell(answer.get("why"))
            self.steps = integer(answer.get("steps")) or 0
            self.first_step = integer(answer.get("first_step"))
        elif self.state == "waiting" and state == "recording":
            self._refuse("another profile of this rank is under way")
        if not self.is_over and lock_holder(self.rank.journal) is None:
            self._refuse("it ended")

    def give_up(self, why: str) -> None:
        """Nobody waits for it any longer."""
        if not self.is_over:
            self._refuse(why)

    def _refuse(self, why: str) -> None:
        self.state, self.why = "refused", why


def _read(path: Path) -> dict[str, Any]:
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with os.fdopen(os.open(path, flags), "rb") as file:
            content = foreign_json.parse(file.read(_LARGEST_ANSWER))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
