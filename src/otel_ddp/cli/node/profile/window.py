"""One rank that is profiled: it is asked through the fifo beside its journal."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from otel_ddp import files, plain
from otel_ddp.cli.node.profile.choice import Candidate
from otel_ddp.cli.text import cell
from otel_ddp.journal.layout import ASK_SUFFIX, PROFILE_SUFFIX

_LARGEST_ANSWER = 64 * 1024


class Window:
    """Some steps of one rank."""

    def __init__(self, rank: Candidate, folder: Path) -> None:
        self.rank = rank
        self.state = "waiting"
        """Then `recording`, and at last `written`, or `refused` or `failed`, with a reason."""
        self.why = ""
        self.steps = 0
        self.first_step: int | None = None
        # The process writes it there, not compressed.
        self._trace = folder / f"rank-{rank.rank}.json"
        self._number = 0

    def ask(self, steps: int, wait_s: float) -> None:
        """Ask; the window must begin within that time."""
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
        """Look for an answer."""
        answer = files.read_mapping(self.rank.journal.with_suffix(PROFILE_SUFFIX), _LARGEST_ANSWER)
        state = answer.get("state")
        if not self._is_over and answer.get("number") == self._number:
            self.state = plain.text(state) or "failed"
            self.why = cell(answer.get("why"))
            self.steps = plain.whole(answer.get("steps")) or 0
            self.first_step = plain.whole(answer.get("first_step"))
        elif self.state == "waiting" and state == "recording":
            self.refuse("another profile of this rank is under way")
        if files.lock_holder(self.rank.journal) is None:
            self.refuse("it ended")

    def refuse(self, why: str) -> None:
        """There will be no answer, unless there is one."""
        if not self._is_over:
            self.state, self.why = "refused", why

    @property
    def _is_over(self) -> bool:
        return self.state not in ("waiting", "recording")

    def answer(self) -> dict[str, Any]:
        """How it ended, for `profile.json`."""
        process = self.rank.process
        who = {"rank": self.rank.rank, "node": process.node, "pid": process.pid}
        names = ("state", "why", "steps", "first_step")
        return who | {name: getattr(self, name) for name in names}

    def keep(self) -> str:
        """Compress the trace; returns the name of its file. Raises OSError."""
        name = f"{self._trace.name}.gz"
        with (
            self._trace.open("rb") as source,
            os.fdopen(files.create(self._trace.with_name(name)), "wb") as file,
            gzip.GzipFile(self._trace.name, "wb", 6, file) as packed,
        ):
            shutil.copyfileobj(source, packed, 1 << 20)
        self._trace.unlink()
        return name
