"""Watches a node: reads journals, samples the node, judges runs, and updates the ledger."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator

from otel_ddp.agent.artifacts import Artifacts
from otel_ddp.agent.history.histories import Collector, Histories
from otel_ddp.agent.judge.judge import Judge
from otel_ddp.agent.judge.observe import ExitCauses, LocalHost
from otel_ddp.agent.kept_thread import KeptThread
from otel_ddp.agent.ledger import Labels, Ledger
from otel_ddp.agent.link.links import Links
from otel_ddp.agent.node.sampling import Sampling
from otel_ddp.agent.reading.journals import Journals, Marks
from otel_ddp.diagnosis.verdict import run_labels
from otel_ddp.journal.parser import Document
from otel_ddp.journal.place import Place
from otel_ddp.settings import Settings


class NodeWatch:
    """The node as seen from one journal directory. The agent's loop calls every method."""

    def __init__(
        self, place: Place, conf: Settings, node: str, *, of_platform: bool, keeps_found: bool
    ) -> None:
        """*of_platform*: see `Artifacts`. *keeps_found*: see `Journals`."""
        self.ledger = Ledger()
        self.exit_causes = ExitCauses()
        self.sampling = Sampling(self.ledger, node, conf.sources)
        self.journals = Journals(
            place,
            self.ledger,
            conf.node,
            host=lambda reader: LocalHost(reader, self.exit_causes),
            keeps_found=keeps_found,
            devices=self.sampling.describe,
        )
        self.histories = Histories(conf.history_directory, conf.history_bytes, node)
        self._collector = Collector(self.histories, self.ledger, node)
        self.artifacts = Artifacts(conf, of_platform=of_platform)
        self.judge = Judge(
            self.ledger,
            conf.stall_timeout_s,
            self.histories.directory,
            gpus=self.sampling.gpus,
            cores=self.sampling.cores,
        )
        self.links = Links(node, self._collector)
        # The journal offsets up to which records were exported, and how many batches the histories
        # had been fed at that moment. None if the journals have stored these offsets.
        self._delivered: tuple[Marks, int] | None = None

    def threads(self) -> Iterator[KeptThread]:
        """The threads that the agent must keep running."""
        yield from (*self.sampling.threads(), *self.links.threads(), self.histories.thread)

    def read_and_judge(self) -> None:
        """Read new records, and judge the runs."""
        self.journals.find()
        self.journals.poll()
        self.artifacts.feed(self.journals.exports())
        processes = self.journals.processes()
        for each in processes:
            # Watch processes with unknown ranks too: they may end before their ranks are known.
            if each.is_at_work and not each.life.gone_ns:
                each.host.watch()
        here = [each for each in processes if each.labels]
        self.links.poll(here)
        self._collector.feed([*here, *self.links.fresh()])
        self.judge.poll([*here, *self.links.sources()], self.links.judgements())
        self.links.answer(self.judge)

    def update_series(self) -> None:
        """Update the ledger and the histories."""
        now_ns = time.time_ns()
        with self.ledger.lock:
            self.journals.update_series(now_ns)
            self.judge.update_series(now_ns)
            ranks, pids = self.journals.ranks(), self.journals.pids()
            self.sampling.update_series(ranks, pids, now_ns)
        past = [*self.judge.past_bounds(), *self.judge.past()]
        with self.ledger.lock:
            verdicts = [*past, *self.judge.verdicts()]
            processes = [*self.journals.processes(), *self.links.sources()]
            self._collector.feed_states(processes, verdicts)

    def flush_documents(self) -> list[tuple[Labels, str, list[Document]]]:
        """Take the spans and events that were not exported yet: those of verdicts and of ranks."""
        return [*self.judge.flush_documents(), *self.journals.flush_documents()]

    def commit(self, marks: Marks) -> None:
        """Commit the journal offsets *marks*, up to which records were exported, once the histories
        on disk have these records too."""
        self.journals.deliver(marks)
        delivered, fed = self._delivered = self._delivered or (marks, self.histories.fed)
        if self.histories.has(fed):
            self.journals.commit(delivered)
            self._delivered = None

    def forget_ended(self, linger_s: float, keep: Collection[Labels]) -> None:
        """Drop processes and runs that ended more than *linger_s* ago. Keeps the runs in *keep*,
        and runs that have ranks on other nodes."""
        self.journals.forget_ended(linger_s)
        keep = {*keep, *self.links.running_remotely()}
        self.judge.retire({*keep, *map(run_labels, self.journals.labels())})

    def stop(self) -> None:
        """Close the links, stop sampling, and write the histories."""
        self.links.stop()
        self.sampling.stop()
        self.histories.stop()
