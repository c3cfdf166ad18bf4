"""What leaves the node of one process: spans, events, and the description of its run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from otel_ddp.agent.ledger import Labels
from otel_ddp.agent.reading.run_description import Devices, RunDescription, RunRecords
from otel_ddp.agent.reading.step_spans import StepSpans, sampled_every
from otel_ddp.agent.reading.steps import Step
from otel_ddp.journal.layout import EVENT, SPAN
from otel_ddp.journal.reader import Document, JournalReader
from otel_ddp.vocabulary.words import STATES, state_word

CHECKPOINT_EVENT = "training.checkpoint"


class Documents:
    """One a process. They wait here until the export takes them."""

    def __init__(self, reader: JournalReader, devices: Devices) -> None:
        self.waiting: list[Document] = []
        self.description = RunDescription(reader, devices)
        self._reader = reader
        self._step_spans = StepSpans()
        self._run_records = RunRecords()
        self._has_run_span = False

    def take(self) -> list[Document]:
        """Those that wait; none waits any more."""
        taken, self.waiting = self.waiting, []
        return taken

    def add_steps(
        self, steps: Sequence[Step], labels: Labels, position: int
    ) -> Iterator[tuple[Step, dict[str, Any]]]:
        """Spans of the steps that are worth it; each such step, with its own span."""
        every = sampled_every(self._reader.facts)
        for step in steps:
            spans = self._step_spans.spans(step, labels, every)
            if spans:
                spans[0]["link"] = _context(self._reader)
                self.waiting += [Document(SPAN, each, position) for each in spans]
                yield step, spans[0]

    def add_run(self, now_ns: int, state: int, ended_ns: int, *, ended: bool) -> None:
        """What the run says of itself, by its rank 0; and its span, once the process has ended."""
        reader = self._reader
        if reader.identity.get("global_rank") == 0:
            new = self._run_records.new_records(reader, self.description, now_ns, ended=ended)
            self.waiting += new
        if ended and not self._has_run_span:
            self._has_run_span = True
            if (span := _run_span(reader, state, ended_ns)) is not None:
                self.waiting.append(Document(SPAN, span, reader.position))


def checkpoint_event(document: Document) -> Document | None:
    """A line for the log that a checkpoint was saved, or was not; None for any other document."""
    span = document.content
    if document.kind != SPAN or span.get("name") != "checkpoint":
        return None
    try:
        took_s = (int(span["end"]) - int(span["start"])) / 1e9
    except (KeyError, TypeError, ValueError, OverflowError):
        return None  # a record of another version
    error = str(span.get("error") or "")
    body = f"checkpoint failed after {took_s:.1f} s: {error}" if error else ""
    content = {
        "name": CHECKPOINT_EVENT,
        "time": span["end"],
        "step": span.get("step"),
        "span": span.get("id"),
        "trace": span.get("trace"),
        "body": body or f"checkpoint saved in {took_s:.1f} s",
        "severity": "WARN" if error else "INFO",
        "attributes": {"duration_s": took_s},
        "exception": span.get("exception"),
    }
    return Document(EVENT, content, document.position)


def _context(reader: JournalReader) -> tuple[str, str] | None:
    """The trace and the id of the run's span, which are known from the beginning."""
    known = reader.facts.get("span")
    if not isinstance(known, dict) or not (known.get("trace") and known.get("id")):
        return None
    return str(known["trace"]), str(known["id"])


def _run_span(reader: JournalReader, state: int, ended_ns: int) -> dict[str, Any] | None:
    """The run in this process, as content of a document."""
    if (ids := _context(reader)) is None:
        return None
    trace, span_id = ids
    progress, reason = reader.progress(), reader.reason()
    failed = state != STATES["finished"]
    return {
        "name": "run",
        "id": span_id,
        "parent": str(reader.facts["span"].get("parent") or ""),
        "trace": trace,
        "start": reader.created_ns,
        "end": max(ended_ns, reader.created_ns),
        "step": None if progress is None else progress.step,
        "error": (reason or state_word(state)) if failed else "",
        "attributes": {"state": state_word(state)},
    }
