"""The journal of a process as a test writes it, and its feed into the ledger of an agent."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, ClassVar

from make import WrittenRank
from otel_ddp.agent.ledger import Ledger, Series
from otel_ddp.agent.reading.journal_feed import JournalFeed
from otel_ddp.agent.reading.logged_values import Summaries
from otel_ddp.agent.reading.node_names import NodeNames
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


class ReadRank(WrittenRank):
    """A process of a run, and the agent's way to it."""

    def __init__(
        self, folder: Path, rank: int, ledger: Ledger, node: str = "node-1", **identity: Any
    ) -> None:
        folder.mkdir(exist_ok=True)
        super().__init__(folder, rank, **identity)
        self.alive = True
        reader = JournalReader(self.writer.path)
        self.journal = JournalFeed(reader, ledger, lambda _: node)

    def poll(self) -> None:
        now_ns = time.time_ns()
        if not self.alive and not self.journal.life.gone_ns:
            self.journal.life.gone_ns = now_ns
        self.journal.poll(now_ns, self.alive)

    def close(self) -> None:
        self.journal.reader.close()
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
        self.journal = JournalFeed(self.readers[-1], ledger, self.names.name, summaries=summaries)

    def steps(self, *numbers: int) -> None:
        """Of 10 ms each, half forward and half a wait."""
        for number in numbers:
            self.rank.step({"forward": 5.0, "comm_wait": 5.0}, number)

    def spans(self) -> list[tuple[str, int]]:
        """The name and step of each span that waits for export."""
        return [
            (each.content["name"], each.content["step"])
            for each in self.journal.documents.waiting
            if each.kind == layout.SPAN
        ]

    def poll(self, after_s: float = 0.0) -> None:
        now = time.time_ns() + int(after_s * 1e9)
        self.journal.poll(now, alive=True)
        self.journal.update_series(now, is_newest=True)

    def start_again(self) -> None:
        """Start another agent after one that was killed."""
        self.journal.reader.close()
        self.read_by(Ledger(), {})

    def rows(self, metric: catalog.Metric) -> list[Series]:
        """The series of a metric."""
        return dict(self.ledger.families()).get(metric, [])

    def sent(self, metric: catalog.Metric = catalog.TRAINING_SCALAR) -> dict[str, dict[float, int]]:
        """Name -> value -> its time, of everything that this agent exports."""
        return {
            dict(series.labels)["name"]: {value: at for at, value in series.history or ()}
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
