"""The journal of a process as a test writes it, and an agent's way from there to its ledger."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, ClassVar

from make import WrittenRank
from otel_ddp.agent.judge.observe import ExitCauses, LocalHost
from otel_ddp.agent.ledger import Ledger, Series
from otel_ddp.agent.reading.exports import Exports
from otel_ddp.agent.reading.journals import NodeNames
from otel_ddp.agent.reading.logged_values import Summaries
from otel_ddp.agent.reading.process import Host, Process
from otel_ddp.identity.identity import Identity
from otel_ddp.journal import layout
from otel_ddp.journal.reader import JournalReader
from otel_ddp.vocabulary import catalog

IDENTITY: dict[str, Any] = {
    **Identity(group="g", run="r", host="h", global_rank=0, local_rank=0, world_size=2).to_dict(),
    "strategy": "all",
    "exported": True,
    "settled": True,
}


class _OfTest(LocalHost):
    """The kernel knows the process, which lives on: the test says whether it does."""

    def ended_well(self) -> bool | None:
        return Host.ended_well(self)


class ReadRank(WrittenRank):
    """A process of a run, and the agent's way to it."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        node: str = "node-1",
        causes: ExitCauses | None = None,
        **identity: Any,
    ) -> None:
        """*causes*: of a process that is asked, and whose end is looked at."""
        folder.mkdir(exist_ok=True)
        super().__init__(folder, rank, **identity)
        self.alive = True
        reader = JournalReader(self.writer.path)
        host = Host(reader) if causes is None else _OfTest(reader, causes)
        self.process, self.reader = Process(host, lambda _: node), reader

    def poll(self) -> None:
        now_ns = time.time_ns()
        if not self.alive and not self.process.life.gone_ns:
            self.process.life.gone_ns = now_ns
        self.process = self.process.poll(now_ns, self.alive)

    def close(self) -> None:
        self.reader.close()
        super().close()


class Fed:
    """The writer of a journal, and its feed into a ledger."""

    made: ClassVar[list[Fed]] = []

    def __init__(self, folder: Path, identity: dict[str, Any] = IDENTITY) -> None:
        self.made.append(self)
        self.rank = WrittenRank(folder, **identity)
        self.writer, self.log = self.rank.writer, self.rank.log
        self.names = NodeNames(folder / "nodes.json", "")
        self.readers: list[JournalReader] = []
        self.read_by(Ledger(), {})

    def read_by(self, ledger: Ledger, summaries: Summaries) -> None:
        """Let another agent read it, which may have read other journals."""
        self.ledger, self.ledger.keep_history = ledger, True
        self.readers.append(JournalReader(self.writer.path))
        self.process = Process(Host(self.readers[-1]), self.names.name)
        self.exports = Exports(self.readers[-1], self.process, ledger, summaries)

    def steps(self, *numbers: int) -> None:
        """Of 10 ms each, half forward and half a wait."""
        for number in numbers:
            self.rank.step({"forward": 5.0, "comm_wait": 5.0}, number)

    def spans(self) -> list[tuple[str, int]]:
        """The name and step of each span that waits for export."""
        return [
            (each.content["name"], each.content["step"])
            for each in self.exports.documents
            if each.kind == layout.SPAN
        ]

    def read(self, after_s: float = 0.0, *, alive: bool = True) -> None:
        """What is new; no series of what is true now."""
        now_ns = time.time_ns() + int(after_s * 1e9)
        self.process = self.process.poll(now_ns, alive)
        self.exports.feed(self.process)

    def poll(self, after_s: float = 0.0, *, alive: bool = True) -> None:
        self.read(after_s, alive=alive)
        self.exports.update_series(time.time_ns() + int(after_s * 1e9), is_newest=True)

    def start_again(self) -> None:
        """Start another agent after one that was killed."""
        self.exports.reader.close()
        self.read_by(Ledger(), {})

    def rows(self, metric: catalog.Metric) -> list[Series]:
        """The series of a metric."""
        return dict(self.ledger.families()).get(metric, [])

    def sent(self, metric: catalog.Metric = catalog.TRAINING_SCALAR) -> dict[str, dict[float, int]]:
        """Name -> value -> its time, of everything that this agent exports."""
        return {
            dict(series.labels)["name"]: dict(zip(*(series.history or ((), ()))[::-1], strict=True))
            for series in self.rows(metric)
        }

    def values(self, metric: catalog.Metric) -> dict[str, Any]:
        """The values of a metric, by its labels beyond the six."""
        return {
            "/".join(value for _, value in series.labels[6:]): series.value
            for series in self.rows(metric)
        }

    def close(self) -> None:
        for each in self.readers:
            each.close()
        self.writer.close()

    @classmethod
    def close_all(cls) -> None:
        for each in cls.made:
            each.close()
        cls.made.clear()
