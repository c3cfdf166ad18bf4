"""One rank that is profiled: it is asked, and what becomes of it is looked at again and again."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from otel_ddp import files
from otel_ddp.cli.node.profile.choice import Candidate
from otel_ddp.cli.node.profile.operators import Totals, totals_of
from otel_ddp.cli.text import cell, integer
from otel_ddp.journal.layout import ASK_SUFFIX, PROFILE_SUFFIX

_LARGEST_ANSWER = 64 * 1024


class Window(ABC):
    """One rank that is profiled."""

    def __init__(self, rank: Candidate) -> None:
        self.rank = rank
        self.state = "waiting"
        """Then `recording`, and at last `written`, or `refused` or `failed`, with a reason."""
        self.why = ""
        self.steps = 0
        self.first_step: int | None = None

    @abstractmethod
    def ask(self, steps: int, wait_s: float) -> None:
        """Ask; the window must begin within that time."""

    @abstractmethod
    def poll(self) -> None:
        """Look for an answer."""

    @abstractmethod
    def totals(self) -> Totals:
        """What was recorded; raises OSError or ValueError."""

    @abstractmethod
    def keep(self) -> str:
        """The name of the trace: in the folder, or with its full path on the rank's node."""

    def refuse(self, why: str) -> None:
        """There will be no answer, unless there is one."""
        if not self.is_over:
            self.state, self.why = "refused", why

    @property
    def is_over(self) -> bool:
        return self.state not in ("waiting", "recording")

    def answer(self) -> dict[str, Any]:
        """How it ended, for `profile.json`."""
        return {name: getattr(self, name) for name in ("state", "why", "steps", "first_step")}


class WindowHere(Window):
    """Of a rank of this node, which is asked through the fifo beside its journal."""

    def __init__(self, rank: Candidate, folder: Path) -> None:
        super().__init__(rank)
        # The process writes it there, not compressed.
        self._trace = folder / f"rank-{rank.rank}.json"
        self._number = 0

    def ask(self, steps: int, wait_s: float) -> None:
        self._number = time.time_ns()
        question = {
            "number": self._number,
            "steps": steps,
            "trace": str(self._trace),
            "until_ns": self._number + int(wait_s * 1e9),
        }
        try:
            # In one write, which a fifo takes as a whole.
            line = f"profile {json.dumps(question)}\n"
            files.tell(self.rank.journal.with_suffix(ASK_SUFFIX), line)
        except OSError:
            self.refuse(
                "it takes no questions: it has not called otel_ddp.instrument, or is about to end"
            )

    def poll(self) -> None:
        answer = files.read_mapping(self.rank.journal.with_suffix(PROFILE_SUFFIX), _LARGEST_ANSWER)
        state = answer.get("state")
        if not self.is_over and answer.get("number") == self._number:
            self.state = state if isinstance(state, str) else "failed"
            self.why = cell(answer.get("why"))
            self.steps = integer(answer.get("steps")) or 0
            self.first_step = integer(answer.get("first_step"))
        elif self.state == "waiting" and state == "recording":
            self.refuse("another profile of this rank is under way")
        if files.lock_holder(self.rank.journal) is None:
            self.refuse("it ended")

    def totals(self) -> Totals:
        return totals_of(json.loads(self._trace.read_bytes()))

    def keep(self) -> str:
        """Compresses it."""
        name = f"{self._trace.name}.gz"
        with (
            self._trace.open("rb") as source,
            os.fdopen(files.create(self._trace.with_name(name)), "wb") as file,
            gzip.GzipFile(self._trace.name, "wb", 6, file) as packed,
        ):
            shutil.copyfileobj(source, packed, 1 << 20)
        self._trace.unlink()
        return name
