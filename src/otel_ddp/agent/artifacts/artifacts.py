"""The artifacts of a node: told of by journals, read by a thread, shown as series and records."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Collection, Iterable
from hashlib import blake2s
from typing import Any

from otel_ddp.agent.artifacts.content import Pace, path_of
from otel_ddp.agent.artifacts.store import Store, is_directory
from otel_ddp.agent.artifacts.work_list import COMPLETE, WAITING, Artifact, WorkList, label, told
from otel_ddp.agent.artifacts.worker import Worker
from otel_ddp.agent.kept_thread import KeptThread
from otel_ddp.agent.ledger import Labels, Ledger
from otel_ddp.agent.reading.journal_feed import JournalFeed
from otel_ddp.journal.layout import EVENT, SPAN
from otel_ddp.journal.place import Place
from otel_ddp.journal.reader import Document
from otel_ddp.settings import Settings
from otel_ddp.vocabulary import catalog

log = logging.getLogger("otel_ddp.agent")


class Artifacts:
    """One an agent. Its loop calls every method; none waits for a file."""

    def __init__(
        self, conf: Settings, place: Place, ledger: Ledger, node: str, *, of_platform: bool
    ) -> None:
        """*of_platform*: whether the agent may read files that the runs' user cannot."""
        self._ledger = ledger
        self._node = node
        self._linger_s = conf.linger_s
        self._work = WorkList(place.artifacts_file)
        address = conf.artifact_sink
        if conf.offline and not is_directory(address):
            address = ""
        make_store = functools.cache(lambda: Store(address, f"{node}\0{place.directory}"))
        self._worker = Worker(
            self._work,
            Pace(conf.artifact_rate_bytes, stopping=threading.Event()),
            conf.artifact_roots if of_platform else None,
            make_store if address else None,
        )
        self._started_ns = time.time_ns()
        self._documents: list[tuple[Labels, str, list[Document]]] = []
        self._shown: set[tuple[catalog.Metric, Labels]] = set()

    def feed(self, found: Iterable[tuple[JournalFeed, Document]]) -> None:
        """Take what the journals tell of, before their marks are committed."""
        news = False
        for journal, document in found:
            said = told(journal.labels, journal.project, document.content)
            if said is None:
                journal.reader.unreadable += 1
                continue
            artifact = Artifact(f"{journal.reader.path.name}/{document.position}", said)
            if path_of(said.uri) is None:
                # It lies elsewhere, and is not fetched.
                artifact.state = COMPLETE
            elif self._ledger.keep_history:
                self._note(artifact, _record(artifact))
            news |= self._work.add(artifact)
        if news:
            self._work.keep()

    def _note(self, artifact: Artifact, *made: Document) -> None:
        self._documents.append((artifact.told.labels, artifact.told.project, list(made)))

    def flush_documents(self) -> list[tuple[Labels, str, list[Document]]]:
        """The records and spans that have not been exported yet."""
        self._collect()
        found, self._documents = self._documents, []
        return found

    def _collect(self) -> None:
        """Make records and spans of what is done with, if they are to be sent."""
        for artifact in self._work.flush_done():
            if self._ledger.keep_history:
                made = [_record(artifact)]
                if artifact.began_ns:
                    made.append(_span(artifact))
                self._note(artifact, *made)

    def update_series(self, now_ns: int, in_use: Collection[Labels]) -> None:
        """Write them into the ledger, whose lock the caller holds. *in_use*: the ranks shown."""
        # Where nothing is sent, nothing else asks for them.
        self._collect()
        self._work.forget(in_use, self._linger_s)
        shown: set[tuple[catalog.Metric, Labels]] = set()
        for artifact in self._work.shown():
            said = artifact.told
            labels = (
                *said.labels,
                ("name", label(said.name)),
                ("type", label(said.type)),
                ("direction", said.direction),
                ("digest", artifact.digest),
                ("uri", label(artifact.uri)),
            )
            for metric, value in (
                (catalog.TRAINING_ARTIFACT_TIMESTAMP, said.time_ns / 1e9),
                (catalog.TRAINING_ARTIFACT_SIZE, artifact.size),
                (catalog.TRAINING_ARTIFACT_STEP, said.step),
            ):
                if value is not None:
                    self._ledger.put(metric, labels, float(value), now_ns, 0, said.project)
                    shown.add((metric, labels))
        for metric, labels in self._shown - shown:
            self._ledger.forget(self._ledger.series(metric, labels))
        self._shown = shown
        self._update_own_series(now_ns)

    def _update_own_series(self, now_ns: int) -> None:
        node = ("node", self._node)
        for outcome, count in self._work.outcomes().items():
            labels = (node, ("outcome", outcome))
            self._ledger.put(
                catalog.OTEL_DDP_ARTIFACTS, labels, float(count), now_ns, self._started_ns
            )
            waiting = float(self._work.waiting())
            self._ledger.put(catalog.OTEL_DDP_ARTIFACTS_WAITING, (node,), waiting, now_ns)

    def busy(self) -> bool:
        """Whether there is something left to read or to store."""
        return self._work.waiting() > 0

    def threads(self) -> list[KeptThread]:
        """The thread that reads; none before there is something to read."""
        return [self._worker.thread] if self.busy() else []

    def stop(self) -> None:
        """Leave the rest to the next agent."""
        was_busy = self.busy()
        self._worker.stop()
        if was_busy:
            log.info("%d artifacts are left to the next agent", self._work.waiting())
            self._work.keep()


def _record(artifact: Artifact) -> Document:
    """What is known now, as a log record: once it is told of, and once it is done with."""
    told, state = artifact.told, artifact.state
    failed = state not in (WAITING, COMPLETE)
    body = f"{told.direction} {told.name} ({told.type})"
    if artifact.size is not None:
        body += f", {artifact.size} bytes"
    body += f": {artifact.uri}"
    if artifact.problem:
        body += f": {artifact.problem}"
    content = {
        "name": catalog.ARTIFACT_EVENT,
        "time": artifact.done_ns or told.time_ns,
        "body": body,
        "severity": "WARN" if failed else "INFO",
        "step": told.step,
        "span": told.span,
        "trace": told.trace,
        "attributes": _attributes(artifact),
    }
    return Document(EVENT, content, 0)


def _span(artifact: Artifact) -> Document:
    """The time that the agent took to read and to store it, below the span it was told of in."""
    told = artifact.told
    content = {
        "name": catalog.ARTIFACT_EVENT,
        "id": blake2s(artifact.key.encode("utf-8", "replace"), digest_size=8).hexdigest(),
        "parent": told.span,
        "trace": told.trace,
        "start": artifact.began_ns,
        "end": artifact.done_ns,
        "step": told.step,
        "error": artifact.problem,
        "attributes": _attributes(artifact),
    }
    return Document(SPAN, content, 0)


def _attributes(artifact: Artifact) -> dict[str, Any]:
    told = artifact.told
    found: dict[str, Any] = {
        "artifact.name": told.name,
        "artifact.type": told.type,
        "artifact.direction": told.direction,
        "artifact.uri": artifact.uri,
        "artifact.state": artifact.state,
    }
    if artifact.size is not None:
        found["artifact.size"] = artifact.size
        found["artifact.digest"] = f"sha256:{artifact.digest}"
    if artifact.stored_uri:
        found["artifact.origin"] = told.uri
    if artifact.problem:
        found["artifact.problem"] = artifact.problem
    # A journal may hold anything.
    return {
        **{
            f"artifact.metadata.{key}": value
            for key, value in told.metadata.items()
            if isinstance(value, (str, bool, int, float))
        },
        **found,
    }
