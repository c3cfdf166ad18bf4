"""What only a node knows: of its processes, and of itself. As JSON; and such a process by that."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from otel_ddp import files, plain
from otel_ddp.agent.history.kept_run import Sample
from otel_ddp.agent.reading.process import Host, Life, Process
from otel_ddp.agent.verdicts.answers import content_of, evidence_of
from otel_ddp.diagnosis.detector import NonfiniteValue
from otel_ddp.diagnosis.stall.evidence import Evidence, Kernel, Question
from otel_ddp.history.tables import SeriesKey
from otel_ddp.journal.process_state import state_of
from otel_ddp.journal.sent import ReceivedJournal
from otel_ddp.vocabulary.words import STATES

# Nothing that people read, and no list of theirs, is longer.
_LONGEST_TEXT = 4000
_MOST_MEMBERS = 300
_MOST_KNOWN = 256 * 1024
# A process can be asked only while its agent is heard.
_HEARD_NS = 6_000_000_000
# What may be known of the cause of an end, and how it is written.
_CAUSES: Mapping[str, Any] = {
    "signal": str,
    "exit_code": int,
    "out_of_memory": str,
    "out_of_memory_in": str,
    "out_of_memory_group": str,
    "out_of_memory_kills": int,
    "out_of_memory_within_s": (int, float),
    "memory_limit_of": str,
    "memory_limit_bytes": int,
    "resident_bytes": int,
    "xid": list,
}


class Senseless(ValueError):
    """What no agent of ours says."""


def told_of(process: Process, now_ns: int, evidence: Evidence | None) -> dict[str, Any]:
    """What the node of this process knows, but for its end; *evidence*: of one that was asked.

    Its times are on our monotonic clock, as *now_ns* is and those of the evidence.
    """
    origin_ns = wall_origin_ns()
    found: dict[str, Any] = {
        "node": dict(process.labels).get("node", ""),
        "step": process.logged_step,
        "started_ns": process.started_ns - origin_ns,
        # JSON has no such numbers.
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
    """When the monotonic clock was 0, by the wall clock as it is set now."""
    return time.time_ns() - time.monotonic_ns()


def read_json(content: bytes, most: int = _MOST_KNOWN) -> Mapping[str, Any]:
    """A mapping as JSON, of which others make JSON again: a browser reads no infinite number."""
    try:
        if len(content) > most:
            raise Senseless("JSON")
        found = files.parse_json(content or b"{}", parse_constant=_finite, parse_float=_finite)
    except ValueError:
        raise Senseless("JSON") from None
    if not isinstance(found, dict):
        raise Senseless("JSON")
    return found


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise Senseless("JSON")
    return number


class Elsewhere(Host):
    """A process of another node, updated by each report of its agent."""

    is_here = False
    reader: ReceivedJournal

    def __init__(self, journal: ReceivedJournal, *, is_kept: bool) -> None:
        self.reader, self.pid = journal, 0
        self.is_kept = is_kept
        self.questions: list[Question] = []
        """Those that its agent has not been asked yet."""
        self.number = 0
        """What its agent calls it."""
        self.report = 0
        """The node's last report that contained it."""
        self.heard_ns = 0
        """When its node was last heard, by the clock of the judge."""
        self._ahead_ns = 0
        self._told: Mapping[str, Any] = {}
        self._evidence = Evidence()
        self._nonfinite: list[NonfiniteValue] = []
        self.process = Process(self, lambda _: self.node)

    @property
    def node(self) -> str:
        """The node of the process, as its agent reports it."""
        return str(self._told.get("node") or "")[:_LONGEST_TEXT]

    def poll(self, now_ns: int) -> None:
        """Let the process see what has come of it."""
        self.process = self.process.poll(now_ns, alive=True)
        self.process.has_news = True

    def hear(self, known: bytes, ahead_ns: int, now_ns: int) -> None:
        """What its node knows of it. Raises Senseless.

        *ahead_ns*: our clock less that of its times. *now_ns*: on the clock of the judge.
        """
        told = read_json(known)
        end = told.get("end")
        if end is not None and plain.text(plain.mapping(end).get("state")) not in STATES:
            raise Senseless("end")
        self._nonfinite = _nonfinite(told, ahead_ns)
        self._told, self.logged_step = told, plain.whole(told.get("step"))
        if (answer := told.get("answer")) is not None:
            self._evidence = self._answered(plain.mapping(answer), ahead_ns)
        self._ahead_ns, self.heard_ns = ahead_ns, now_ns

    def _answered(self, answer: Mapping[str, Any], ahead_ns: int) -> Evidence:
        told = self._told
        at_ns = plain.whole(told.get("answered_ns")) or 0
        found = evidence_of(answer, at_ns + ahead_ns) if at_ns else Evidence()
        return found._replace(silent_s=plain.number(told.get("silent_s")), kernel=_kernel(told))

    # -- as its process asks

    def started_ns(self) -> int:
        started_ns = plain.whole(self._told.get("started_ns"))
        return 0 if started_ns is None else max(started_ns + self._ahead_ns, 0)

    def update(self, life: Life, now_ns: int, alive: bool) -> None:
        end = self._told.get("end")
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
            # Evidence from before says nothing about now.
            return self._evidence._replace(silent_s=None, kernel=None)
        return self._evidence

    def cause(self) -> Mapping[str, Any]:
        found = plain.mapping(self._told.get("cause"))
        cause = {word: v for word, v in found.items() if isinstance(v, _CAUSES.get(word, ()))}
        if isinstance(xids := cause.get("xid"), list):
            cause["xid"] = [str(each)[:_LONGEST_TEXT] for each in xids[:_MOST_MEMBERS]]
        return cause

    def present_ns(self) -> int:
        present_ns = plain.whole(self._told.get("present_ns"))
        return present_ns + self._ahead_ns if present_ns else 0


def _nonfinite(told: Mapping[str, Any], ahead_ns: int) -> list[NonfiniteValue]:
    try:
        found = [
            NonfiniteValue(
                str(name)[:_LONGEST_TEXT],
                str(split)[:_LONGEST_TEXT],
                float(value),
                plain.whole(step),
                int(time_ns) + ahead_ns,
                plain.whole(finite_step),
            )
            for name, split, value, step, time_ns, finite_step in told.get("nonfinite", ())
        ][:_MOST_MEMBERS]
    except (ValueError, TypeError, OverflowError):
        raise Senseless("nonfinite") from None
    # A verdict says when, and is stored: a time that fits no column would be in its way for ever.
    if any(math.isfinite(each.value) or abs(each.time_ns) > _LAST_NS for each in found):
        raise Senseless("nonfinite")
    return found


def _kernel(told: Mapping[str, Any]) -> Kernel | None:
    found = told.get("kernel")
    if not isinstance(found, list) or len(found) != len(Kernel._fields):
        return None
    state, lasting, busy, waits_in = found
    return Kernel(
        str(state)[:1], lasting is True, plain.number(busy), str(waits_in)[:_LONGEST_TEXT]
    )


# Of one report. A node has some hundred.
_MOST_SAMPLES = 4000
_MOST_OF_READINGS = 1 << 20
_LONGEST_WORD, _MOST_LABELS = 200, 16
_KINDS = ("node", "counter")
_LAST_NS = 1 << 62


def pack_readings(found: Sequence[Sample]) -> bytes:
    """Serialise for the lead, with times on our monotonic clock."""
    origin_ns = wall_origin_ns()
    rows = [
        [*key[:3], [*map(list, key.labels)], time_ns - origin_ns, value]
        for _, key, time_ns, value in found[:_MOST_SAMPLES]
        # JSON has no such numbers.
        if math.isfinite(value)
    ]
    return json.dumps({"samples": rows}).encode()


def unpack_readings(content: bytes, node: str, ahead_ns: int) -> list[Sample]:
    """Parse what a node sent; raises Senseless. *ahead_ns*: our clock minus the sender's."""
    told = read_json(content, _MOST_OF_READINGS)
    rows = plain.list_of(list, told.get("samples"))[:_MOST_SAMPLES]
    return [_sample(row, node, ahead_ns) for row in rows]


def _sample(row: list[Any], node: str, ahead_ns: int) -> Sample:
    try:
        kind, name, rank, labels, time_ns, value = row
        more = {_word(key): _word(word) for key, word in labels[:_MOST_LABELS]}
        at_ns = int(time_ns) + ahead_ns
        if kind not in _KINDS or not 0 <= at_ns < _LAST_NS:
            raise Senseless("a sample")
        # The connection decides whose it is, not the message.
        labelled = tuple({**more, "node": node}.items())
        key = SeriesKey(kind, _word(name), _word(rank), labelled)
        if (number := plain.number(value)) is None:
            raise Senseless("a sample")
        return Sample(None, key, at_ns, number)
    # An integer may be too long for a number, and a mapping has no slices.
    except (ValueError, TypeError, OverflowError, LookupError):
        raise Senseless("a sample") from None


def _word(text: Any) -> str:
    if not isinstance(text, str) or len(text) > _LONGEST_WORD:
        raise Senseless("a word of a sample")
    return text
