"""Packs and checks the JSON in messages: facts on processes, samples of a node, the judgement."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from otel_ddp import files, plain
from otel_ddp.agent.history.kept_run import Sample
from otel_ddp.agent.judge.answers import content_of, evidence_of
from otel_ddp.agent.judge.reports import Judgement
from otel_ddp.agent.link.channel import MOST_BYTES, MOST_NODE_LETTERS
from otel_ddp.agent.reading.process import Host, Life, Process
from otel_ddp.diagnosis.detector import NonfiniteValue
from otel_ddp.diagnosis.stall.evidence import Evidence, Kernel, Question
from otel_ddp.diagnosis.straggler.finding import RankReport, Report
from otel_ddp.diagnosis.verdict import Labels, run_labels
from otel_ddp.history.tables import SeriesKey
from otel_ddp.journal.process_state import state_of
from otel_ddp.journal.sent import ReceivedJournal
from otel_ddp.vocabulary.words import STATES

# Size limits of texts and lists in messages.
_LONGEST_TEXT = 4000
_MOST_MEMBERS = 300
_MOST_KNOWN = 256 * 1024
# A remote process is asked only if its agent's last report about it is not older than this.
_HEARD_NS = 6_000_000_000


class Senseless(ValueError):
    """A message has content that no otel_ddp agent sends."""


@contextlib.contextmanager
def _sensible(what: str) -> Iterator[None]:
    """Raises Senseless if *what* has other types or values than expected."""
    try:
        yield
    except (ValueError, TypeError, OverflowError, LookupError, AttributeError):
        raise Senseless(what) from None


def node_facts(process: Process, now_ns: int, evidence: Evidence | None) -> dict[str, Any]:
    """Facts about a process that only this node has, except the facts about its end.

    Times are on the monotonic clock. *evidence*: None unless the lead has asked the process.
    """
    origin_ns = wall_origin_ns()
    found: dict[str, Any] = {
        "node": dict(process.labels).get("node", ""),
        "step": process.logged_step,
        "started_ns": process.started_ns - origin_ns,
        # JSON has neither NaN nor infinity, so these values are sent as text.
        "nonfinite": [
            each._replace(value=str(each.value), time_ns=each.time_ns - origin_ns)  # type: ignore[arg-type]
            for each in list(process.nonfinite(now_ns))[:_MOST_MEMBERS]
        ],
    }
    if evidence is not None:
        found["answer"] = content_of(evidence, _MOST_MEMBERS)
        found["answered_ns"] = evidence.answered_ns
        found["silent_s"], found["kernel"] = evidence.silent_s, evidence.kernel
    return {key: value for key, value in found.items() if value not in (None, [])}


def wall_origin_ns() -> int:
    """The time at which the monotonic clock was 0, by the current wall clock."""
    return time.time_ns() - time.monotonic_ns()


@_sensible("JSON")
def read_json(content: bytes, most: int = _MOST_KNOWN) -> Mapping[str, Any]:
    """Parse a JSON object. Infinite numbers are refused, since a browser could not read them."""
    if len(content) > most:
        raise ValueError
    found = files.parse_json(content or b"{}", parse_constant=_finite, parse_float=_finite)
    return dict(found)


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError
    return number


class RemoteHost(Host):
    """The state of a process of another node. Each report of that node's agent updates
    it."""

    is_here = False
    reader: ReceivedJournal

    def __init__(self, journal: ReceivedJournal, *, is_kept: bool) -> None:
        self.reader, self.pid = journal, 0
        self.is_kept = is_kept
        self.questions: list[Question] = []
        """Questions that still have to be sent to the process's agent."""
        self.number = 0
        """The process's id in messages, which its agent has chosen."""
        self.report = 0
        """The number of its node's last report that contained this process."""
        self.heard_ns = 0
        """When the last report about the process arrived, on the judge's clock."""
        self._ahead_ns = 0
        self._facts: Mapping[str, Any] = {}
        self._evidence = Evidence()
        self._nonfinite: list[NonfiniteValue] = []
        self.process = Process(self, lambda _: self.node)

    @property
    def node(self) -> str:
        """The reported name of the process's node."""
        return str(self._facts.get("node") or "")[:_LONGEST_TEXT]

    def poll(self, now_ns: int) -> None:
        """Let the process read its new records."""
        self.process = self.process.poll(now_ns, alive=True)
        self.process.has_news = True

    @_sensible("facts about a process")
    def hear(self, known: bytes, ahead_ns: int, now_ns: int) -> None:
        """Read the facts in a report. Raises Senseless.

        *ahead_ns*: our clock minus the node's monotonic clock. *now_ns*: on the judge's clock.
        """
        facts = read_json(known)
        if (end := facts.get("end")) is not None and end["state"] not in STATES:
            raise ValueError
        self._nonfinite = _nonfinite(facts, ahead_ns)
        self._facts, self.logged_step = facts, plain.whole(facts.get("step"))
        if (answer := facts.get("answer")) is not None:
            self._evidence = self._answered(plain.mapping(answer), ahead_ns)
        self._ahead_ns, self.heard_ns = ahead_ns, now_ns

    def _answered(self, answer: Mapping[str, Any], ahead_ns: int) -> Evidence:
        facts = self._facts
        at_ns = plain.whole(facts.get("answered_ns")) or 0
        found = evidence_of(answer, at_ns + ahead_ns) if at_ns else Evidence()
        kernel = facts.get("kernel")
        return found._replace(
            silent_s=plain.number(facts.get("silent_s")), kernel=kernel and Kernel(*kernel)
        )

    # -- called by the process

    def started_ns(self) -> int:
        started_ns = plain.whole(self._facts.get("started_ns"))
        return 0 if started_ns is None else max(started_ns + self._ahead_ns, 0)

    def update(self, life: Life, now_ns: int, alive: bool) -> None:
        end = self._facts.get("end")
        if life.ended_at is not None:
            return
        if end is None:
            life.seen_alive_ns = now_ns
            progress = self.reader.progress()
            life.state = state_of(None if progress is None else progress.state, alive=True)
            return
        life.state, life.ended_at = STATES[end["state"]], time.monotonic()
        life.seen_alive_ns = (plain.whole(end.get("seen_alive_ns")) or 0) + self._ahead_ns
        life.gone_ns = (plain.whole(end.get("gone_ns")) or 0) + self._ahead_ns
        life.ended_ns = (plain.whole(end.get("ended_ns")) or 0) + self._ahead_ns

    def nonfinite(self) -> Sequence[NonfiniteValue]:
        return self._nonfinite

    def ask(self, question: Question, now_ns: int) -> None:
        if now_ns - self.heard_ns <= _HEARD_NS and question not in self.questions:
            self.questions.append(question)

    def evidence(self, now_ns: int) -> Evidence:
        if now_ns - self.heard_ns > _HEARD_NS:
            # The last report is too old to tell the current kernel state and silence of the
            # process.
            return self._evidence._replace(silent_s=None, kernel=None)
        return self._evidence

    def cause(self) -> Mapping[str, Any]:
        return plain.mapping(self._facts.get("cause"))

    def present_ns(self) -> int:
        present_ns = plain.whole(self._facts.get("present_ns"))
        return present_ns + self._ahead_ns if present_ns else 0


def _nonfinite(facts: Mapping[str, Any], ahead_ns: int) -> list[NonfiniteValue]:
    return [
        NonfiniteValue(name, split, float(value), step, time_ns + ahead_ns, finite_step)
        for name, split, value, step, time_ns, finite_step in facts.get("nonfinite", ())
    ]


# -- samples of a node for the history of a run

# Limit of samples in one report. A node has about a hundred series, each with one new sample.
_MOST_SAMPLES = 4000
_MOST_OF_READINGS = 1 << 20
_MOST_LETTERS, _MOST_LABELS = 1000, 16
_KINDS_OF_SAMPLES = ("node", "counter")
_LAST_NS = 1 << 62


def pack_readings(found: Sequence[Sample]) -> bytes:
    """Serialise samples for the lead. Their times are sent on this node's monotonic clock."""
    origin_ns = wall_origin_ns()
    rows = [
        [*key[:3], [*map(list, key.labels)], time_ns - origin_ns, value]
        for _, key, time_ns, value in found[:_MOST_SAMPLES]
        # Skip NaN and infinity, which JSON cannot contain.
        if math.isfinite(value)
    ]
    return json.dumps({"samples": rows}).encode()


@_sensible("samples")
def unpack_readings(content: bytes, node: str, ahead_ns: int) -> list[Sample]:
    """Parse the samples that a node has sent. *ahead_ns*: our clock minus the node's. Raises
    Senseless."""
    rows = plain.list_of(list, read_json(content, _MOST_OF_READINGS).get("samples"))
    return [_sample(row, node, ahead_ns) for row in rows[:_MOST_SAMPLES]]


def _sample(row: list[Any], node: str, ahead_ns: int) -> Sample:
    kind, name, rank, labels, time_ns, value = row
    words = dict(labels[:_MOST_LABELS])
    at_ns, number = int(time_ns) + ahead_ns, plain.number(value)
    letters = len("".join((name, rank, *words.keys(), *words.values())))
    if kind not in _KINDS_OF_SAMPLES or letters > _MOST_LETTERS or number is None:
        raise ValueError
    if not 0 <= at_ns < _LAST_NS:
        raise ValueError
    # Take the node label from the connection: the message could contain any name.
    return Sample(
        None, SeriesKey(kind, name, rank, tuple({**words, "node": node}.items())), at_ns, number
    )


# -- the judgement of a run

# Evidence may have lists and tables with a row for each rank. Longer ones are not sent.
_MOST_IN_LIST = 256
_MOST_VERDICTS = 100


class PackedJudgement:
    """The judgement of a run, packed for other nodes. Each node gets all verdicts, but only the
    rows of its own ranks."""

    def __init__(self, judgement: Judgement) -> None:
        of_all = {
            "by": judgement.by,
            "open": [_lean(each) for each in judgement.open[-_MOST_VERDICTS:]],
            "past": [_lean(each) for each in judgement.past[-_MOST_VERDICTS:]],
            "insufficient": judgement.report.insufficient,
            "compared": judgement.compared,
        }
        self._of_all = json.dumps(of_all)
        self._ranks = {each.labels: each for each in judgement.report.ranks}

    def to(self, own: Sequence[Labels]) -> bytes:
        """The message for the agent whose processes have these labels."""
        ranks = [
            [each.labels, dict(each.excess), each.lost_s, each.work_s, [*each.waits_s.items()]]
            for labels in own
            if (each := self._ranks.get(labels)) is not None
        ]
        # The part for all nodes was packed once: append the node's own part to its JSON text.
        of_node = json.dumps({"ranks": ranks})
        return f"{self._of_all[:-1]}, {of_node[1:]}".encode()


def _lean(verdict: Mapping[str, Any]) -> dict[str, Any]:
    evidence = verdict["evidence"]
    few = {
        name: value
        for name, value in evidence.items()
        if not isinstance(value, (list, dict)) or len(value) <= _MOST_IN_LIST
    }
    return {**verdict, "evidence": few}


@_sensible("the judgement of the lead")
def unpack_judgement(content: bytes, run: Labels, own: Sequence[Labels]) -> Judgement:
    """Parse the lead's judgement; drops rows of ranks that are not in *own*. Raises Senseless."""
    found = read_json(content, MOST_BYTES)
    ranks = tuple(
        RankReport(
            labels,
            excess,
            lost_s,
            work_s,
            {(dimension, word): wait_s for (dimension, word), wait_s in waits},
        )
        for row, excess, lost_s, work_s, waits in found["ranks"]
        if (labels := tuple((str(key), str(value)) for key, value in row)) in own
    )
    still, past = (
        # Ignore verdicts on other runs: this lead may judge only its own run.
        [each for each in found[name] if run_labels(tuple(each["who"].items())) == run]
        for name in ("open", "past")
    )
    report, by = Report(ranks, insufficient=str(found["insufficient"])), found["by"]
    if not by.isprintable():
        raise ValueError
    return Judgement(by[:MOST_NODE_LETTERS], still, past, report, int(found["compared"]))
