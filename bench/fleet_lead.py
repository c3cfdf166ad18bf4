"""Plays the nodes of a large run to one real agent that leads it; the source of docs/scale.md.

    python bench/fleet_lead.py [--nodes 1250] [--seconds 240] [--late-after 150]

The first node is a place with eight journals and a real agent. The agents of all others are played
by one process, with the product's own reports over its own links: a step a second, and from
`--late-after` on the ranks of one node need 250 ms longer.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from make import WrittenRank, labels_of  # noqa: E402
from node import Node  # noqa: E402
from otel_ddp.agent.link.client import LinkClient  # noqa: E402
from otel_ddp.agent.link.link_thread import LinkThread  # noqa: E402
from otel_ddp.agent.link.runs.following import Following  # noqa: E402
from otel_ddp.agent.link.runs.wall_clock import WallClock  # noqa: E402
from otel_ddp.agent.reading.steps import Parts, Step  # noqa: E402
from otel_ddp.diagnosis.detector import RankState  # noqa: E402
from otel_ddp.diagnosis.stall.evidence import Evidence, Position  # noqa: E402
from otel_ddp.diagnosis.verdict import Labels, run_labels  # noqa: E402
from otel_ddp.journal import layout  # noqa: E402
from otel_ddp.journal.process_state import ProcessState  # noqa: E402
from otel_ddp.vocabulary.words import PHASES  # noqa: E402

RANKS, STEP_MS, LATE_MS = 8, 1000.0, 250.0
NEEDS_MS = {"data": 5.0, "forward": 250.0, "backward": 450.0, "optimizer": 10.0, "other": 5.0}
CODES = bytes([PHASES[word] for word in (*NEEDS_MS, "comm_wait")])
SECRET, PORTS = "5a" * 32, [29_481, 29_482]


def labels(rank: int) -> Labels:
    found = dict(labels_of(rank, node=f"node-{rank // RANKS}"))
    return tuple({**found, "local_rank": str(rank % RANKS)}.items())


def spent_ms(chance: random.Random, late: bool, any_late: bool) -> dict[str, float]:
    needed = {word: ms * chance.uniform(0.98, 1.02) for word, ms in NEEDS_MS.items()}
    needed["backward"] += LATE_MS * late
    step_ms = STEP_MS + LATE_MS * any_late
    return {**needed, "comm_wait": step_ms - sum(needed.values())}


class PlayedProcess:
    """One process of another node, as the agent there sees it."""

    is_here = has_news = trains = is_at_work = True
    project = ""

    def __init__(self, rank: int, world: int, began_ns: int, shift_ns: int) -> None:
        self.labels, self.began_ns = labels(rank), began_ns
        self._world, self._until_ns, self._number = world, began_ns, 0
        self._shift_ns = shift_ns
        self._chance = random.Random(rank)
        self._new: list[Step] = []
        who: dict[str, Any] = {**dict(self.labels), "rank": rank, "local_rank": rank % RANKS}
        state = {"state": "running", "world_size": world, "pid": 1 + rank, "settled": True}
        described = ProcessState.from_json({**who, **state, "started_ns": began_ns})
        assert described is not None
        self._described = described

    def step(self, late: bool, any_late: bool) -> None:
        spent = [round(ms * 1e6) for ms in spent_ms(self._chance, late, any_late).values()]
        began_ns, self._until_ns = self._until_ns, self._until_ns + sum(spent)
        self._number += 1
        parts = Parts(began_ns, CODES, spent)
        self._new = [Step(self._number, began_ns, self._until_ns, parts, (), 0.0, False, 0)]

    def state(self) -> RankState:
        own = {"own_world_size": self._world, "began_ns": self.began_ns}
        return RankState(self.labels, waits_known=True, clock_shift_ns=self._shift_ns, **own)

    def steps(self) -> tuple[list[Step], list[Step]]:
        new, self._new = self._new, []
        return new, []

    def position(self, origin_ns: int) -> Position:
        where = (self.labels, True, "running", self._number, "forward", self._until_ns)
        return Position(*where, written=self._number, world=self._world)

    def nonfinite(self, now_ns: int) -> tuple[()]:
        return ()

    def memory(self) -> None:
        return None

    def device_memory(self) -> None:
        return None

    def evidence(self, now_ns: int) -> Evidence:
        return Evidence()

    def ask(self, question: str, now_ns: int) -> bool:
        return True

    def describe(self) -> ProcessState:
        return self._described


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
    began_ns = time.time_ns()
    # A process that has ended is no longer polled for.
    node.start(sys.executable, "-m", "otel_ddp", "agent", "--dir", str(node.place.directory))
    usage = Usage(int(node.agent()["pid"]))
    thread = LinkThread()
    thread.start()
    clock = WallClock()
    links, processes = [], []
    for number in range(1, nodes):
        follower = LinkClient(
            thread, bytes.fromhex(SECRET), node=f"node-{number}", hosts=["127.0.0.1"], ports=PORTS
        )
        ranks = range(number * RANKS, (number + 1) * RANKS)
        shift_ns = -clock.origin_ns
        processes.append([PlayedProcess(rank, world, began_ns, shift_ns) for rank in ranks])
        links.append(Following(run_labels(labels(0)), follower, clock, None))
        links[-1].start()
    began_s, own_s = time.monotonic(), time.process_time()
    chance, late_node, told_s, turn = random.Random(0), nodes // 2, 0.0, 0
    while (since_s := time.monotonic() - began_s) < seconds:
        turn += 1
        any_late = since_s > late_after
        for each in here:
            each.step(spent_ms(chance, False, any_late))
        for at, (link, ranks) in enumerate(zip(links, processes, strict=True)):
            wait_s = began_s + turn + at / nodes - time.monotonic()
            if wait_s > 0.005:
                time.sleep(wait_s)
            for process in ranks:
                process.step(any_late and at + 1 == late_node, any_late)
            link.poll(ranks, time.time_ns())
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
