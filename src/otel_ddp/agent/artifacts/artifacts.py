"""The artifacts of a node: told of by journals, read by a thread, shown as series and records."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Collection, Iterable
from hashlib import blake2s
from typing import Any

from otel_ddp.agent.artifacts.content import Pace, path_of
from otel_ddp.agent.artifacts.store import Store, is_directory
from otel_ddp.agent.artifacts.work import COMPLETE, WAITING, Artifact, Told, Worker, WorkList
from otel_ddp.agent.kept_thread import KeptThread
from otel_ddp.agent.ledger import Labels, Ledger
from otel_ddp.agent.reading.journal_feed import JournalFeed
from otel_ddp.journal.layout import EVENT, SPAN
from otel_ddp.journal.place import Place
from otel_ddp.journal.reader import Document
from otel_ddp.settings import Settings
from otel_ddp.vocabulary import catalog

log = logging.getLogger("otel_ddp.agent")

_LATEST_NS = 2**63


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
            Pace(),
            conf.artifact_roots if of_platform else None,
            make_store if address else None,
        )
        self._started_ns = time.time_ns()
        self._documents: list[tuple[Labels, str, list[Document]]] = []
        self._shown: set[tuple[catalog.Metric, Labels]] = set()

    def feed(self, found: Iterable[tuple[JournalFeed, Document]]) -> None:
        """Take what the journals tell of, before their marks are committed."""
        for journal, document in found:
            told = _told(journal.labels, journal.project, document.content)
            if told is None:
                journal.reader.ring.unreadable += 1
                continue
            artifact = Artifact(f"{journal.reader.path.name}/{document.position}", told)
            if path_of(told.uri) is None:
                # It lies elsewhere, and is not fetched.
                artifact.state = COMPLETE
            else:
                self._note(artifact, _record(artifact))
            self._work.add(artifact)
        self._work.keep()

    def _note(self, artifact: Artifact, *made: Document) -> None:
        if self._ledger.keep_history:
            self._documents.append((artifact.told.labels, artifact.told.project, list(made)))

    def flush_documents(self) -> list[tuple[Labels, str, list[Document]]]:
        """The records and spans that have not been exported yet."""
        found, self._documents = self._documents, []
        return found

    def update_series(self, now_ns: int, in_use: Collection[Labels]) -> None:
        """Write them into the ledger, whose lock the caller holds. *in_use*: the ranks shown."""
        for artifact in self._work.flush_done():
            span = [_span(artifact)] if artifact.began_ns else []
            self._note(artifact, _record(artifact), *span)
        self._work.forget(in_use, self._linger_s)
        self._work.keep()
        shown: set[tuple[catalog.Metric, Labels]] = set()
        for artifact in self._work.shown():
            told = artifact.told
            labels = (
                *told.labels,
                ("name", _label(told.name)),
                ("type", _label(told.type)),
                ("direction", told.direction),
                ("digest", artifact.digest),
                ("uri", _label(artifact.uri)),
            )
            for metric, value in (
                (catalog.TRAINING_ARTIFACT_TIMESTAMP, told.time_ns / 1e9),
                (catalog.TRAINING_ARTIFACT_SIZE, artifact.size),
                (catalog.TRAINING_ARTIFACT_STEP, told.step),
            ):
                if value is not None:
                    self._ledger.put(metric, labels, float(value), now_ns, 0, told.project)
                    shown.add((metric, labels))
        for metric, labels in self._shown - shown:
            self._ledger.forget(self._ledger.series(metric, labels))
        self._shown = shown
        node = ("node", self._node)
        if outcomes := self._work.outcomes():
            waiting = float(self._work.waiting())
            self._ledger.put(catalog.OTEL_DDP_ARTIFACTS_WAITING, (node,), waiting, now_ns)
        for outcome, count in outcomes.items():
            own, metric = (node, ("outcome", outcome)), catalog.OTEL_DDP_ARTIFACTS
            self._ledger.put(metric, own, float(count), now_ns, self._started_ns)

    def busy(self) -> bool:
        """Whether there is something left to read or to store."""
        return self._work.waiting() > 0

    def threads(self) -> list[KeptThread]:
        """The thread that reads; none before there is something to read."""
        return [self._worker.thread] if self.busy() else []

    def stop(self) -> None:
        """Leave the rest to the next agent."""
        self._worker.stop()
        if self.busy():
            log.info("%d artifacts are left to the next agent", self._work.waiting())
        self._work.keep()


def _told(labels: Labels, project: str, content: dict[str, Any]) -> Told | None:
    """What a record says; None if it makes no sense. Another process has written it."""
    words = [content.get(name) for name in ("name", "type", "direction", "uri", "span", "trace")]
    if not all(isinstance(word, str) for word in words):
        return None
    name, kind, direction, uri, span, trace = map(str, words)
    time_ns, step, metadata = (content.get(each) for each in ("time", "step", "metadata"))
    if direction not in ("output", "input") or not name or not uri:
        return None
    if not all(type(each) is int and 0 <= each < _LATEST_NS for each in (time_ns, step or 0)):
        return None
    more = metadata if isinstance(metadata, dict) else {}
    said = (name, kind, direction, uri, int(time_ns or 0), step, span, trace, more)
    return Told(labels, project, *said)


def _label(text: str) -> str:
    """A text as a label, which stores want short."""
    longest = catalog.LONGEST_LABEL
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _record(artifact: Artifact) -> Document:
    """What is known now, as a log record: once it is told of, and once it is done with."""
    told = artifact.told
    size = "" if artifact.size is None else f", {artifact.size} bytes"
    problem = artifact.problem and f": {artifact.problem}"
    content = {
        **_common(artifact),
        "time": artifact.done_ns or told.time_ns,
        "body": f"{told.direction} {told.name} ({told.type}){size}: {artifact.uri}{problem}",
        "severity": "INFO" if artifact.state in (WAITING, COMPLETE) else "WARN",
        "span": told.span,
    }
    return Document(EVENT, content, 0)


def _span(artifact: Artifact) -> Document:
    """The time that the agent took to read and to store it, below the span it was told of in."""
    content = {
        **_common(artifact),
        "id": blake2s(artifact.key.encode("utf-8", "replace"), digest_size=8).hexdigest(),
        "parent": artifact.told.span,
        "start": artifact.began_ns,
        "end": artifact.done_ns,
        "error": artifact.problem,
    }
    return Document(SPAN, content, 0)


def _common(artifact: Artifact) -> dict[str, Any]:
    """Of the record and of the span."""
    told = artifact.told
    found: dict[str, Any] = {
        # A journal may hold anything.
        **{
            f"artifact.metadata.{key}": value
            for key, value in told.metadata.items()
            if isinstance(value, (str, bool, int, float))
        },
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
    name, trace = catalog.ARTIFACT_EVENT, told.trace
    return {"name": name, "trace": trace, "step": told.step, "attributes": found}
