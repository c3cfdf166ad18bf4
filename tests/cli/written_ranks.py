"""Ranks of a run, written by the product's own writer in a process of their own.

    python tests/cli/written_ranks.py DIRECTORY '{"ranks": 8, ...}'

It says `ready`. Each line on its stdin is done, and answered by `done`: `step N` adds so many
steps, `end RANK` lets one finish.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from pathlib import Path
from typing import Any

from otel_ddp import catalog
from otel_ddp.journal import layout, locks
from otel_ddp.journal.place import Place
from otel_ddp.journal.writer import JournalWriter, Shape
from otel_ddp.words import PHASES, STATES

# What a step is made of, by rank: the one that is late computes, and the others wait for it.
STEP_NS, WORK_NS, LATE_NS = 50_000_000, 20_000_000, 45_000_000


class WrittenRank:
    """One rank."""

    def __init__(self, folder: Path, rank: int, said: dict[str, Any]) -> None:
        identity = {
            "run": "one",
            "group": "g",
            "job_type": "train",
            "node": "alpha",
            "settled": True,
            "global_rank": rank,
            "local_rank": rank,
            "world_size": said["ranks"],
            "exported": True,
            "pid": os.getpid(),
            **said.get("identity", {}),
        }
        self.writer = JournalWriter(folder, said.get("bytes", 512 * 1024), identity)
        self.late = rank == said.get("late")
        self._words = self._step = self._now_ns = 0
        names = said.get("names", ["loss"])
        self._shape = Shape([self.writer.name(name, "train") for name in names])
        self._values = [0.5 / (each + 1) for each in range(len(names))]
        total = self.writer.counter(catalog.TRAINING_STEPS.name)
        self.writer.add(total, 1.0)
        self.writer.phase(PHASES["comm_wait"], 0, 0)
        self._state("running")

    def _state(self, name: str) -> None:
        self.writer.state(STATES[name], time.time_ns() // 1000)

    def steps(self, count: int) -> None:
        words = []
        if not self._step:
            words.append(layout.STEPS_BEGAN << 56)
        for _ in range(count):
            work_ns = LATE_NS if self.late else WORK_NS
            self._step += 1
            began_ns, self._now_ns = self._now_ns, self._now_ns + STEP_NS
            words += [
                PHASES["forward"] << 56 | began_ns,
                PHASES["comm_wait"] << 56 | began_ns + work_ns,
                layout.STEP_NUMBER << 56 | self._step,
                layout.STEP_ENDED << 56 | self._now_ns,
            ]
            self.writer.scalars(self._shape, time.time_ns(), self._step, float("nan"), self._values)
        for at in range(0, len(words), 500):
            some = words[at : at + 500]
            self.writer.append(layout.STEPS, struct.pack(f"<{len(some) + 1}Q", self._words, *some))
            self._words += len(some)
        self.writer.step(self._step)
        code = PHASES["forward" if self.late else "comm_wait"]
        self.writer.phase(code, 0, time.monotonic_ns() - self.writer.created_monotonic_ns)

    def end(self) -> None:
        self._state("finished")
        self.writer.close()


def agent(folder: Path, content: dict[str, Any]) -> int:
    """What an agent says of itself, and its lock, held until this process ends."""
    place = Place(folder)
    place.agent_file.write_text(json.dumps({"pid": os.getpid(), "version": "0", **content}))
    held = os.open(place.agent_lock, os.O_RDWR | os.O_CREAT, 0o600)
    locks.acquire(held)
    return held


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def main() -> None:
    folder, said = Path(sys.argv[1]), json.loads(sys.argv[2])
    folder.mkdir(mode=0o700, exist_ok=True)
    ranks = [WrittenRank(folder, rank, said) for rank in range(said["ranks"])]
    lock = agent(folder, said["agent"]) if "agent" in said else -1
    say("ready")
    for line in sys.stdin:
        act, *rest = line.split()
        if act == "step":
            for each in ranks:
                each.steps(int(rest[0]))
        elif act == "end":
            ranks[int(rest[0])].end()
        say("done")
    if lock >= 0:
        os.close(lock)


if __name__ == "__main__":
    main()
