"""The agents of two nodes of one run, with their real ends of the link and a cable between them."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fed import ReadRank
from node import without_figures
from otel_ddp.agent.judge.judge import Judge
from otel_ddp.agent.judge.observe import ExitCauses
from otel_ddp.agent.ledger import Ledger
from otel_ddp.agent.link import link_pb2 as wire
from otel_ddp.agent.link.following import Following
from otel_ddp.agent.link.leading import Leading
from otel_ddp.agent.reading.process import Process
from otel_ddp.diagnosis.verdict import Labels
from otel_ddp.journal import layout
from otel_ddp.vocabulary import catalog

RUN: Labels = (("group", "g"), ("run", "r"))


class Cable:
    """Both ends of a link, without a network: a lead for `Leading`, a follower for `Following`."""

    state, is_connected = "connected", True
    refused: Mapping[str, int] = {}

    def __init__(self) -> None:
        self.is_cut = False
        self.node = "node-1"
        # The lead's clock is the wall clock, the follower's the monotonic one.
        self.clock_offset_ns = time.time_ns() - time.monotonic_ns()
        self.clock_uncertainty_ns = 0
        self.reports: list[tuple[str, Any]] = []
        self.answers: list[Any] = []

    def start(self) -> None: ...
    def stop(self) -> None: ...

    def send(self, report: Any) -> None:
        report.clock_offset_ns = self.clock_offset_ns
        report.clock_uncertainty_ns = self.clock_uncertainty_ns
        self.reports.append((self.node, wire.Report.FromString(report.SerializeToString())))

    def answer(self, node: str, answer: Any) -> None:
        self.answers.append(wire.Answer.FromString(answer.SerializeToString()))

    def reports_taken(self) -> list[tuple[str, Any]]:
        return [] if self.is_cut else _taken(self.reports)

    def answers_taken(self) -> list[Any]:
        return [] if self.is_cut else _taken(self.answers)


def _taken(found: list[Any]) -> list[Any]:
    taken = list(found)
    found.clear()
    return taken


class _End:
    """One end of a cable: what it takes differs, all else is the same."""

    def __init__(self, cable: Cable, take: Any) -> None:
        self._cable, self.take = cable, take

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cable, name)


class Agent:
    """The judge of a node and its two ranks."""

    def __init__(self, folder: Path, number: int, node: str = "") -> None:
        """*node*: as its ranks call it, if not by its number."""
        folder.mkdir()
        self.ledger, self.now_ns = Ledger(), time.monotonic_ns()
        self.judge = Judge(self.ledger, 60.0, folder / "incidents", clock=lambda: self.now_ns)
        self.ledger.keep_history = True
        causes = ExitCauses()
        self.ranks = [
            ReadRank(folder / str(rank), rank, node or f"node-{number}", causes, world_size=4)
            for rank in (2 * number, 2 * number + 1)
        ]
        for each in self.ranks:
            each.writer.document(layout.FACTS, {"capability": {"comm_wait": ""}})
            each.state("running")
        self.seen = [*self.ranks]
        """Those whose journals are there."""

    def read(self) -> Collection[Process]:
        self.now_ns += 1_000_000_000
        for each in self.seen:
            each.poll()
        return [each.process for each in self.seen]

    def late(self) -> list[str]:
        """The ranks that the open verdicts name."""
        return [each["who"]["rank"] for each in self.of_kind("straggler")]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The open verdicts of this kind."""
        return [each for each in self.judge.verdicts() if each["kind"] == kind]

    def sentence(self) -> str:
        """Of the one open verdict; the lead tells its figures every few seconds."""
        (found,) = self.judge.verdicts()
        return without_figures(found["sentence"])

    def reported(self) -> set[str]:
        """The kinds of verdict of which there are new records."""
        return {kind for kind, _ in self.records()}

    def records(self) -> list[tuple[str, str]]:
        """Kind and state of each verdict of which there is a new record."""
        found = [each for _, _, some in self.judge.flush_documents() for each in some]
        told = [each.content["attributes"] for each in found if each.kind == layout.EVENT]
        return [(each["verdict"], each["verdict.state"]) for each in told]

    def named(self) -> dict[str, float]:
        """By rank: the series that name it for backward."""
        with self.ledger.lock:
            self.judge.update_series(time.time_ns())
        rows = dict(self.ledger.families()).get(catalog.TRAINING_STRAGGLER, [])
        named = [row for row in rows if ("phase", "backward") in row.labels]
        return {dict(row.labels)["rank"]: row.value for row in named}


class TwoAgents:
    """The agents of two nodes; that of node-0 leads."""

    def __init__(self, folder: Path) -> None:
        self.cable = Cable()
        self.lead, self.led = (Agent(folder / str(number), number) for number in (0, 1))
        lead_end: Any = _End(self.cable, self.cable.reports_taken)
        led_end: Any = _End(self.cable, self.cable.answers_taken)
        self.leading = Leading(RUN, "node-0", lead_end, None)
        self._led_end = led_end
        self.following = Following(RUN, self._led_end, 0, None)
        self._number = 0

    def start_follower_again(self) -> None:
        """It is killed; the next one takes up the journals where it was."""
        self.cable.is_connected = False
        self.following.stop()
        self.cable.is_connected = True
        self.following = Following(RUN, self._led_end, 0, None)

    def start_run_again(self, folder: Path) -> None:
        """All ranks are killed, and others take their place."""
        for each in (*self.lead.ranks, *self.led.ranks):
            each.alive = False
            each.writer.close()
        self.poll()
        for number, agent in enumerate((self.lead, self.led)):
            agent.ranks = Agent(folder / f"again-{number}", number).ranks
            agent.seen += agent.ranks

    def train(self, steps: int, late: int) -> None:
        """So many steps, 25 a second, of which one rank is late in backward."""
        for _ in range(steps):
            self._number += 1
            for rank, each in enumerate([*self.lead.ranks, *self.led.ranks]):
                own, jitter = 12.0 * (rank == late), (self._number * 7 + rank * 3) % 5 / 10
                spent = {"forward": 10.0, "backward": 20.0 + own + jitter, "optimizer": 5.0}
                each.step({**spent, "comm_wait": 13.5 - own - jitter})
            if self._number % 25 == 0:
                self.poll()

    def close(self) -> None:
        self.following.stop()
        for agent in (self.lead, self.led):
            for rank in {*agent.ranks, *agent.seen}:
                rank.close()

    def poll(self, times: int = 1) -> None:
        for _ in range(times):
            self.poll_once()

    def poll_once(self) -> None:
        here = self.led.read()
        self.following.poll(here, self.led.now_ns)
        judgement = self.following.judgement()
        self.led.judge.poll(here, {} if judgement is None else {RUN: judgement})
        here = self.lead.read()
        self.leading.poll(here, self.lead.now_ns)
        self.lead.judge.poll([*here, *self.leading.sources()])
        self.leading.answer(self.lead.judge.judgement(RUN, "node-0"), self.lead.now_ns)
