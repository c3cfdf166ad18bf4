"""Ranks of a run, written by the product's own writer in a process of their own.

    python tests/written_ranks.py DIRECTORY '{"ranks": 8, ...}'

It says `ready`. Each line on its stdin is done, and answered by `done`: `step N` adds so many
steps, `end RANK` lets one finish.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from make import WrittenRank
from otel_ddp import files
from otel_ddp.journal.place import Place
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.words import PHASES

# What a step is made of, by rank: the one that is late computes, and the others wait for it.
STEP_MS, WORK_MS, LATE_MS = 50, 20, 45


class Rank(WrittenRank):
    """One of a run of eight, or so."""

    def __init__(self, folder: Path, rank: int, said: dict[str, Any]) -> None:
        told = {"run": "one", "node": "alpha", "world_size": said["ranks"], "pid": os.getpid()}
        identity = {**told, **said.get("identity", {})}
        super().__init__(folder, rank, said.get("bytes", 512 * 1024), **identity)
        self.late = rank == said.get("late")
        self._values = {name: 0.5 / at for at, name in enumerate(said.get("names", ["loss"]), 1)}
        self.writer.add(self.writer.counter(catalog.TRAINING_STEPS.name), 1.0)
        self.writer.phase(PHASES["comm_wait"], 0, 0)
        self.state("running")

    def go_on(self, steps: int) -> None:
        work_ms = LATE_MS if self.late else WORK_MS
        for _ in range(steps):
            self.step({"forward": work_ms, "comm_wait": STEP_MS - work_ms})
            self.log(self._values, self.number)
        self.enter("forward" if self.late else "comm_wait")

    def end(self) -> None:
        self.state("finished")
        self.close()


def agent(folder: Path, content: dict[str, Any]) -> int:
    """What an agent says of itself, and its lock, held until this process ends."""
    place = Place(folder)
    about = {"agents": [{"pid": os.getpid(), "version": "0"}], **content}
    place.agent_file.write_text(json.dumps(about))
    held = os.open(place.agent_lock, os.O_RDWR | os.O_CREAT, 0o600)
    files.lock(held)
    return held


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def main() -> None:
    folder, said = Path(sys.argv[1]), json.loads(sys.argv[2])
    folder.mkdir(mode=0o700, exist_ok=True)
    ranks = [Rank(folder, rank, said) for rank in range(said["ranks"])]
    lock = agent(folder, said["agent"]) if "agent" in said else -1
    say("ready")
    for line in sys.stdin:
        act, *rest = line.split()
        if act == "step":
            for each in ranks:
                each.go_on(int(rest[0]))
        elif act == "end":
            ranks[int(rest[0])].end()
        say("done")
    if lock >= 0:
        os.close(lock)


if __name__ == "__main__":
    main()
