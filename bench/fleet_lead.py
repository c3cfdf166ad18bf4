"""Plays the nodes of a large run to one real agent that leads it, for docs/internals/scale.md.

    python bench/fleet_lead.py [--nodes 1250] [--seconds 240] [--late-after 150]

The first node is a place with eight journals and a real agent. The agents of all others are played
by one process, over the product's own links: a report with a step a second, and from
`--late-after` on the ranks of one node need 250 ms longer.
"""

from __future__ import annotations

import argparse
import random
import resource
import struct
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from make import WrittenRank  # noqa: E402
from node import Node  # noqa: E402
from otel_ddp.agent.link import link_pb2 as wire  # noqa: E402
from otel_ddp.agent.link.channel import LinkThread  # noqa: E402
from otel_ddp.agent.link.client import LinkClient  # noqa: E402
from otel_ddp.agent.link.following import Outflow  # noqa: E402
from otel_ddp.agent.reading.process import Host, Process  # noqa: E402
from otel_ddp.journal import layout  # noqa: E402
from otel_ddp.journal.reader import JournalReader  # noqa: E402
from otel_ddp.vocabulary import catalog  # noqa: E402
from otel_ddp.vocabulary.words import PHASES  # noqa: E402

RANKS, STEP_MS, LATE_MS = 8, 1000.0, 250.0
NEEDS_MS = {"data": 5.0, "forward": 250.0, "backward": 450.0, "optimizer": 10.0, "other": 5.0}
SECRET, PORTS = "5a" * 32, [29_481, 29_482]


def spent_ms(chance: random.Random, late: bool, any_late: bool) -> dict[str, float]:
    needed = {word: ms * chance.uniform(0.98, 1.02) for word, ms in NEEDS_MS.items()}
    needed["backward"] += LATE_MS * late
    step_ms = STEP_MS + LATE_MS * any_late
    return {**needed, "comm_wait": step_ms - sum(needed.values())}


class PlayedRank:
    """A rank of another node, by what its agent sends of its journal."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        node = f"node-{rank // RANKS}"
        written = WrittenRank(folder, rank, run="r", node=node, world_size=world)
        written.writer.document(layout.FACTS, {"capability": {"comm_wait": ""}})
        written.writer.add(written.writer.counter(catalog.TRAINING_STEPS.name), 1.0)
        written.state("running")
        with closing(JournalReader(written.writer.path)) as reader:
            process = Process(Host(reader), lambda _: node).poll(time.time_ns(), alive=True)
            outflow = Outflow(rank + 1, process, is_kept=world <= 512)
            self._first = wire.Process()
            outflow.write(self._first, time.monotonic_ns(), 1 << 20)
            outflow.journal.close()
        written.close()
        written.writer.path.unlink()
        self._position, self._words, self._at_ns, self.number = self._first.records.until, 0, 0, 0
        self._created_ns = written.writer.created_monotonic_ns
        self._chance = random.Random(rank)

    def begin(self, now_ns: int) -> None:
        """Its first step begins at this monotonic time, as those of all ranks do."""
        self._at_ns = now_ns - self._created_ns

    def step(self, message: Any, late: bool, any_late: bool, tells_all: bool) -> None:
        """One more, and all that was told before where that is to be told, or told again."""
        if tells_all or not self.number:
            message.CopyFrom(self._first)
            # What lies before is nothing that it lacks.
            message.records.since, message.records.until = 0, self._position
        self.number += 1
        pairs = [] if self._words else [(layout.STEPS_BEGAN, self._at_ns)]
        for word, ms in spent_ms(self._chance, late, any_late).items():
            pairs.append((PHASES[word], self._at_ns))
            self._at_ns += round(ms * 1e6)
        pairs += [(layout.STEP_NUMBER, self.number), (layout.STEP_ENDED, self._at_ns)]
        words = [code << layout.CODE_SHIFT | value for code, value in pairs]
        payload = struct.pack(f"<{len(words) + 1}Q", self._words, *words)
        self._words += len(words)
        size = layout.padded(layout.RECORD.size + len(payload))
        record = layout.RECORD.pack(0, size, layout.STEPS, 0, self.number)[4:] + payload
        record = layout.checksum(record, self._position).to_bytes(4, "little") + record
        if message.id != self._first.id:
            for name in ("id", "journal", "head", "known", "totals"):
                setattr(message, name, getattr(self._first, name))
            message.definitions.since = self._first.definitions.until
            message.records.since = self._position
        if message.records.content:
            message.records.content[-1] += record
        else:
            message.records.at.append(self._position)
            message.records.content.append(record)
        self._position = message.records.until = self._position + size
        since_ns = max(time.monotonic_ns() - self._created_ns, 0)
        phase = PHASES["forward"] << layout.CODE_SHIFT | since_ns
        state = int.from_bytes(self._first.progress[32:40], "little")
        message.progress = layout.PROGRESS.pack(phase, 0, self.number + 1, 0, state)


class PlayedNode:
    """The agent of another node, with its ranks."""

    def __init__(self, thread: LinkThread, folder: Path, number: int, world: int) -> None:
        self._link = LinkClient(
            thread, bytes.fromhex(SECRET), node=f"node-{number}", hosts=["127.0.0.1"], ports=PORTS
        )
        ranks = range(number * RANKS, (number + 1) * RANKS)
        self.ranks = [PlayedRank(folder, rank, world) for rank in ranks]
        # As often as agents report.
        self._every, self._turn = min(-(-world // 4096), 3), number
        self._report = wire.Report()
        self._link.start()

    def step(self, late: bool, any_late: bool) -> None:
        tells_all = any(answer.lacking for answer in self._link.take())
        processes = self._report.processes
        for at, rank in enumerate(self.ranks):
            message = processes[at] if at < len(processes) else processes.add()
            rank.step(message, late, any_late, tells_all)
        self._turn += 1
        if self._turn % self._every == 0 and self._link.clock_offset_ns is not None:
            self._link.send(self._report)
            self._report = wire.Report()


class Usage:
    """What a process has used since the last look, by /proc."""

    def __init__(self, pid: int) -> None:
        self._folder = Path("/proc", str(pid))
        self._last = self._now()

    def _now(self) -> tuple[float, float]:
        fields = (self._folder / "stat").read_text().rpartition(") ")[2].split()
        return time.monotonic(), (int(fields[11]) + int(fields[12])) / 100

    def cores(self) -> float:
        (then, before_s), self._last = self._last, self._now()
        return (self._last[1] - before_s) / (self._last[0] - then)

    def resident_mib(self) -> float:
        pages = int((self._folder / "statm").read_text().split()[1])
        return pages * resource.getpagesize() / 2**20


def play(node: Node, nodes: int, seconds: float, late_after: float) -> None:
    world = nodes * RANKS
    here = [
        WrittenRank(node.place.directory, rank, run="r", node="node-0", world_size=world)
        for rank in range(RANKS)
    ]
    for each in here:
        lead = {"secret": SECRET, "hosts": ["127.0.0.1"], "ports": PORTS}
        each.writer.document(layout.FACTS, {"lead": lead, "capability": {"comm_wait": ""}})
        each.state("running")
    # A process that has ended is no longer polled for.
    node.start(sys.executable, "-m", "otel_ddp", "agent", "--dir", str(node.place.directory))
    usage = Usage(int(node.agent()["pid"]))
    thread = LinkThread()
    thread.start()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        others = [PlayedNode(thread, Path(folder), number, world) for number in range(1, nodes)]
    began_ns = time.monotonic_ns()
    for each in here:
        each.at_ns = began_ns - each.writer.created_monotonic_ns
    for rank in [rank for other in others for rank in other.ranks]:
        rank.begin(began_ns)
    began_s, own_s = time.monotonic(), time.process_time()
    chance, late_node, told_s, turn = random.Random(0), nodes // 2, 0.0, 0
    while (since_s := time.monotonic() - began_s) < seconds:
        turn += 1
        any_late = since_s > late_after
        for each in here:
            each.step(spent_ms(chance, False, any_late))
        for at, other in enumerate(others):
            wait_s = began_s + turn + at / nodes - time.monotonic()
            if wait_s > 0.005:
                time.sleep(wait_s)
            other.step(any_late and at + 1 == late_node, any_late)
        said = node.told()
        named = [each["sentence"] for each in said.verdicts if each["kind"] == "straggler"]
        if named and not told_s:
            told_s = time.monotonic() - began_s - late_after
            print(f"named {told_s:.0f} s after it was late: {named[0]}", flush=True)
        if turn % 20 == 0:
            own = (time.process_time() - own_s) / since_s
            why = [each["why"] for each in said.insufficient]
            print(
                f"{since_s:.0f} s, step {turn}: the lead takes {usage.cores():.2f} cores and "
                f"{usage.resident_mib():.0f} MiB; all followers {own:.2f} cores; {why}",
                flush=True,
            )
    thread.stop()
    for each in here:
        each.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1250)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--late-after", type=float, default=150)
    given = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with Node() as node:
        node.place.directory.mkdir(mode=0o700)
        play(node, given.nodes, given.seconds, given.late_after)


if __name__ == "__main__":
    main()
