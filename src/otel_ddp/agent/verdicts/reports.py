"""Tells what was found: once in the log, as a record with its span, and in a post-mortem."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2s
from pathlib import Path
from typing import Any

from otel_ddp import containment
from otel_ddp.agent.ledger import Labels, Ledger
from otel_ddp.agent.reading.journal_feed import JournalFeed
from otel_ddp.agent.verdicts import postmortem
from otel_ddp.agent.verdicts.run_case import RunCase, said
from otel_ddp.diagnosis.hardware import Gpu, with_gpu
from otel_ddp.diagnosis.verdict import Change, Kind, Verdict, Who
from otel_ddp.journal.layout import EVENT, SPAN
from otel_ddp.journal.reader import Document

log = logging.getLogger("otel_ddp.agent")

# Findings that are no trouble: nobody is to be woken by them.
_CALM: frozenset[Kind] = frozenset({"bound"})


class VerdictReporter:
    """One a node, for all of its runs."""

    def __init__(
        self, ledger: Ledger, postmortems: Path, gpus: Callable[[], Sequence[Gpu]]
    ) -> None:
        """*gpus*: the node's devices as they are known now."""
        self._ledger = ledger
        self._postmortems = postmortems
        self._gpus = gpus
        self._told: dict[tuple[Who, str, str], str] = {}
        self._documents: list[tuple[Labels, str, list[Document]]] = []

    @containment.contained()
    def report(
        self, case: RunCase, change: Change, journals: Sequence[JournalFeed], now_ns: int
    ) -> None:
        """A verdict of this run is reached, has changed, or holds no longer."""
        if change.opened and change.verdict.kind == "straggler":
            change = change._replace(verdict=with_gpu(change.verdict, self._gpus()))
        verdict = change.verdict
        before = case.verdicts.pop(verdict.key, None)
        if change.opened:
            case.verdicts[verdict.key] = verdict
        else:
            # What is told of another rank in the same breath is the same incident.
            case.moved = verdict.kind, case.postmortem.pop(verdict.key, None)
            case.gpus.pop(verdict.key, None)
        if verdict.kind == "straggler":
            case.named.add((verdict.who, verdict.phase))
        # One record an incident, and one more where it turns out to be another one.
        if not change.opened or before is None or _gist(before) != _gist(verdict):
            if change.opened:
                # Of a death the last word counts, whomever it is about.
                about = "" if verdict.kind == "death" else str(verdict.who)
                self._told[case.run, verdict.kind, about] = verdict.sentence
            said_of_it = _sentence(change, _ended(case, change, journals))
            log.log(logging.WARNING if _warns(change) else logging.INFO, "%s", said_of_it)
            self._record(change, said_of_it, journals, now_ns)
        if change.opened and verdict.kind in ("death", "stall"):
            self._write_down(case, verdict, journals)

    def _record(
        self, change: Change, said_of_it: str, journals: Sequence[JournalFeed], now_ns: int
    ) -> None:
        """A log record, and a span from when it began until now with the same as its event."""
        if not self._ledger.keep_history:
            return
        verdict, opened = change
        project = next((each.project for each in journals if each.project), "")
        attributes = {
            "verdict": verdict.kind,
            "verdict.state": "opened" if opened else "closed",
            "phase": verdict.phase,
            "sentence": verdict.sentence,
            **dict(_flat(verdict.evidence)),
        }
        name = f"training.{verdict.kind}"
        trace = f"step/{verdict.step}" if verdict.step is not None else f"name/{name}"
        since_ns = min(verdict.since_ns or now_ns, now_ns)
        told = f"{verdict.key}/{opened}/{now_ns}".encode("utf-8", "replace")
        span_id = blake2s(told, digest_size=8).hexdigest()
        common = {"name": name, "trace": trace, "step": verdict.step, "attributes": attributes}
        event = {"name": name, "time": now_ns, "attributes": attributes}
        span = {
            **common,
            "id": span_id,
            "parent": "",
            "start": since_ns,
            "end": now_ns,
            "error": verdict.sentence if _warns(change) else "",
            "events": [event],
        }
        record = {
            **common,
            "time": now_ns,
            "span": span_id,
            "body": said_of_it,
            "severity": "WARN" if _warns(change) else "INFO",
        }
        documents = [Document(SPAN, span, 0), Document(EVENT, record, 0)]
        self._documents.append((verdict.who, project, documents))

    def _write_down(self, case: RunCase, verdict: Verdict, journals: Sequence[JournalFeed]) -> None:
        earlier = case.postmortem.get(verdict.key)
        if earlier is None and case.moved is not None and case.moved[0] == verdict.kind:
            earlier = case.moved[1]
        # As they were when it began: who is dead has left its device since.
        gpus = case.gpus.setdefault(verdict.key, self._gpus())
        told = {**case.last, **{each.labels: said(each) for each in journals}}
        case.postmortem[verdict.key] = postmortem.write(
            self._postmortems,
            dict(case.run).get("run", ""),
            verdict=plain(verdict),
            processes=[described for described, _ in told.values()],
            values=[value for _, values in told.values() for value in values],
            open_verdicts=[plain(e) for e in case.verdicts.values() if e.key != verdict.key],
            gpus=gpus,
            now_ns=time.time_ns(),
            earlier=earlier,
        )

    def flush_documents(self) -> list[tuple[Labels, str, list[Document]]]:
        """What is to be exported, once."""
        documents, self._documents = self._documents, []
        return documents

    def findings(self) -> list[str]:
        """What was ever found, also where it is over, the latest last."""
        return list(self._told.values())

    def forget(self, run: Who) -> None:
        """Nothing is left to show of this run."""
        self._told = {key: sentence for key, sentence in self._told.items() if key[0] != run}


def plain(verdict: Verdict) -> dict[str, Any]:
    """A verdict as JSON has it."""
    return {**verdict._asdict(), "who": dict(verdict.who), "evidence": dict(verdict.evidence)}


def _sentence(change: Change, ended: str) -> str:
    sentence = change.verdict.sentence
    if change.opened:
        return sentence
    return f"no longer, as {ended} ended: {sentence}" if ended else f"no longer: {sentence}"


def _ended(case: RunCase, change: Change, journals: Sequence[JournalFeed]) -> str:
    """Whose end it was that ended this as well: nothing was cured by that."""
    if not case.leaving or change.verdict.kind == "death":
        return ""
    if all(each.ended_at is not None for each in journals):
        return "the run"
    numbers = sorted((dict(who).get("rank", "?") for who in case.leaving), key=_by_number)
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(numbers)}"


def _by_number(rank: str) -> tuple[int, str]:
    return len(rank), rank


def _warns(change: Change) -> bool:
    return change.opened and change.verdict.kind not in _CALM


def _gist(verdict: Verdict) -> tuple[str, Any]:
    return verdict.phase, verdict.evidence.get("cause")


def _flat(evidence: Mapping[str, Any], prefix: str = "evidence") -> Iterator[tuple[str, Any]]:
    """As attributes: numbers and words; what is a list of things stays in the post-mortem."""
    for name, value in evidence.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}.{name}")
        elif isinstance(value, (str, bool, int, float)):
            yield f"{prefix}.{name}", value
