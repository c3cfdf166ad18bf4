"""What a run costs the agent that leads it: many nodes of eight ranks, each with a step a second.

    python bench/links.py [--nodes 1250] [--seconds 60] [--transport]

Two processes: the followers of all nodes in one, with invented ranks of which one is late; in the
other a lead with the judge of an agent, in rounds as the agent makes them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from otel_ddp.agent.ledger import Ledger
from otel_ddp.agent.link.client import LinkClient
from otel_ddp.agent.link.link_pb2 import Process, Report
from otel_ddp.agent.link.link_thread import LinkThread
from otel_ddp.agent.link.runs import pack
from otel_ddp.agent.link.runs.leading import Leading
from otel_ddp.agent.link.runs.wall_clock import WallClock
from otel_ddp.agent.link.server import LinkServer
from otel_ddp.agent.reading.steps import Parts, Step
from otel_ddp.agent.service.startup import TICK_S
from otel_ddp.agent.verdicts.judge import Judge
from otel_ddp.diagnosis.detector import RankState
from otel_ddp.diagnosis.stall.evidence import Position
from otel_ddp.diagnosis.verdict import Labels
from otel_ddp.journal.process_state import ProcessState
from otel_ddp.vocabulary.words import PHASES

SECRET = bytes(range(32))
PORTS = (29_471, 29_472, 29_473)
MS, S = 1_000_000, 1_000_000_000
RANKS = 8
LATE, LATE_MS = 13, 150
RUN: Labels = (("group", "bench"), ("run", "r"))
# By phase, in a step of a second; what is left is waiting.
USUAL_MS = {"data": 30, "forward": 200, "backward": 350, "optimizer": 40}


# -- the lead


def cpu_s() -> Counter[str]:
    """The processor time of this process so far, by thread."""
    found: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        name, _, rest = (task / "stat").read_text().rpartition(") ")
        user, system = rest.split()[11:13]
        which = "loop" if task.name == str(os.getpid()) else name.partition("(")[2]
        found[which] += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return found


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


class Judging:
    """The lead's part of an agent's round."""

    def __init__(self, lead: LinkServer, folder: Path, judges: bool) -> None:
        self.judge = Judge(Ledger(), 60.0, folder)
        self.leading = Leading(RUN, "lead", lead, lambda node, parts: None, WallClock())
        self._lead, self._judges = lead, judges
        self.reports = self.nodes = 0
        self._names: set[str] = set()

    def round(self) -> None:
        time.sleep(TICK_S)
        if not self._judges:
            taken = self._lead.take()
            self.reports += len(taken)
            self._names.update(node for node, _ in taken)
            self.nodes = len(self._names)
            return
        now_ns = time.time_ns()
        self.leading.poll((), now_ns)
        sources = list(self.leading.sources())
        self.reports += sum(each.has_news for each in sources) // RANKS
        self.nodes = len(sources) // RANKS
        self.judge.poll(sources)
        self.leading.answer(self.judge.judgement(RUN, "lead"), now_ns)


def lead(nodes: int, seconds: float, transport: bool) -> None:
    """Takes reports and judges, until it has been measured."""
    thread = LinkThread()
    thread.start()
    empty_mib, began = resident_mib(), time.monotonic()
    link = LinkServer(thread, SECRET, node="lead", hosts=["127.0.0.1"], ports=PORTS)
    with tempfile.TemporaryDirectory() as folder:
        judging = Judging(link, Path(folder), not transport)
        link.start()
        while judging.nodes < nodes:
            judging.round()
        connected_s, before = time.monotonic() - began, cpu_s()
        judging.reports, until, rounds, named_s = 0, time.monotonic() + seconds, 0, None
        while time.monotonic() < until:
            judging.round()
            rounds += 1
            if named_s is None and judging.judge.verdicts():
                named_s = round(time.monotonic() - began - connected_s, 1)
        used = cpu_s() - before
        said = {
            "nodes": nodes,
            "connected after s": round(connected_s, 1),
            "reports/s": round(judging.reports / seconds),
            "rounds/s": round(rounds / seconds, 1),
            "share of a core": round(sum(used.values()) / seconds, 3),
            "by thread": {name: round(s / seconds, 3) for name, s in used.most_common(4)},
            "MiB": round(resident_mib() - empty_mib),
            "late rank named after s": named_s,
            "verdicts": [each.get("sentence") for each in judging.judge.verdicts()],
            "insufficient": judging.judge.insufficient(),
            "dropped": link.dropped,
            "refused": link.streams.refused,
        }
        print(json.dumps(said), flush=True)
        thread.stop()


# -- the followers


class Node:
    """One of them, with ranks that are all alike but for the late one."""

    def __init__(self, number: int, nodes: int, thread: LinkThread) -> None:
        self.name = f"node-{number}"
        self.ranks = range(number * RANKS, (number + 1) * RANKS)
        self._world_size = nodes * RANKS
        self.link = LinkClient(thread, SECRET, node=self.name, hosts=["127.0.0.1"], ports=PORTS)
        self.link.start()
        self._resets = -1

    def report(self, step: int, ended_ns: int, late: bool) -> None:
        report = Report()
        tells_all = self._resets != self.link.resets or step % 10 == 0
        self._resets = self.link.resets
        for rank in self.ranks:
            process = report.processes.add(id=rank + 1)
            if tells_all:
                self._describe(process, rank)
            pack.pack_position(process.position, self._position(rank, step, ended_ns))
            pack.pack_steps(process.steps, [made_step(step, ended_ns, rank == LATE, late)])
        self.link.send(report, steps=RANKS)

    def _labels(self, rank: int) -> Labels:
        own = (("rank", str(rank)), ("local_rank", str(rank % RANKS)))
        return (*RUN, ("job_type", "train"), ("node", self.name), *own)

    def _describe(self, process: Process, rank: int) -> None:
        state = RankState(self._labels(rank), own_world_size=self._world_size, waits_known=True)
        pack.pack_state(process.state, self._labels(rank), state, "", True)
        described = ProcessState(
            *("r", "bench", "train"),
            node=self.name,
            rank=rank,
            world_size=self._world_size,
            trains=True,
        )
        process.state.description = json.dumps(described.to_json()).encode()

    def _position(self, rank: int, step: int, ended_ns: int) -> Position:
        own = self._labels(rank)
        return Position(
            own, True, state="running", step=step, phase="forward", since_ns=ended_ns,
            name="", expect_s=1.0, written=step, world=self._world_size, in_mark=False,
        )  # fmt: skip


def made_step(number: int, ended_ns: int, is_late: bool, one_is: bool) -> Step:
    spent = {word: round(ms * MS * random.uniform(0.98, 1.02)) for word, ms in USUAL_MS.items()}
    if is_late and one_is:
        spent["forward"] += LATE_MS * MS
    waited = S - sum(spent.values())
    spans = {**spent, "comm_wait": waited}
    codes = bytes(PHASES[word] for word in spans)
    began_ns = ended_ns - S
    parts = Parts(began_ns, codes, tuple(spans.values()))
    return Step(number, began_ns, ended_ns, parts, (), 0.0, False, 0)


def followers(nodes: int, lead: subprocess.Popen[bytes]) -> None:
    thread = LinkThread()
    thread.start()
    made = [Node(number, nodes, thread) for number in range(nodes)]
    step, began, began_s = 0, time.monotonic(), time.process_time()
    while lead.poll() is None:
        step += 1
        ended_ns = time.time_ns()
        for number, node in enumerate(made):
            due = began + step + number / nodes
            if (wait_s := due - time.monotonic()) > 0.005:
                time.sleep(wait_s)
            node.link.take()
            if node.link.clock_offset_ns is not None:
                node.report(step, ended_ns, late=True)
    share = (time.process_time() - began_s) / (time.monotonic() - began) / nodes
    dropped = sum(each.link.dropped_steps for each in made)
    print(f"a follower: {share:.4f} of a core; steps dropped: {dropped}; steps: {step}")
    thread.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1250)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--transport", action="store_true", help="without the judge")
    parser.add_argument("--lead", action="store_true", help="for the bench itself")
    given = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if given.lead:
        lead(given.nodes, given.seconds, given.transport)
        return
    with subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--lead"]) as process:
        followers(given.nodes, process)


if __name__ == "__main__":
    main()
