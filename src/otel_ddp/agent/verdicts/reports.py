"""Reports verdicts: in the agent's log, as a log record with its span, and in a post-mortem."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from hashlib import blake2s
from pathlib import Path
from typing import Any

from otel_ddp import errors
from otel_ddp.agent.ledger import Ledger
from otel_ddp.agent.verdicts import postmortem
from otel_ddp.agent.verdicts.source import Snapshot, Source
from otel_ddp.diagnosis.hardware import Gpu, with_gpu
from otel_ddp.diagnosis.say import past_sentence, rank_list
from otel_ddp.diagnosis.straggler.finding import side_of
from otel_ddp.diagnosis.verdict import Change, Labels, Verdict
from otel_ddp.identity import addresses
from otel_ddp.journal import trace_ids
from otel_ddp.journal.layout import EVENT, SPAN
from otel_ddp.journal.reader import Document
from otel_ddp.vocabulary.words import HARMLESS_VERDICTS, Kind

log = logging.getLogger("otel_ddp.agent")

# So many verdicts that are over are kept of a run.
_MOST_PAST = 20
# After these, training does not go on by itself.
_FATAL: frozenset[Kind] = frozenset({"death", "stall"})
# Findings about one rank and a phase, which have a series.
_NAMING: frozenset[Kind] = frozenset({"straggler", "imbalance", "recurring"})
# Findings that compare ranks; the others are seen best on the board of the run.
_OF_RANKS: frozenset[Kind] = _NAMING | {"stall", "death"}
# A verdict of the agent before goes on if it is found again so soon: it takes a hundred steps.
_FOUND_AGAIN_WITHIN_NS = 600 * 10**9


class RunReports:
    """What was reported of one run."""

    def __init__(self, run: Labels) -> None:
        self.run = run
        self.open: dict[tuple[str, Labels], Verdict] = {}
        # The same as the detectors have made them, without what is added here.
        self.as_found: dict[tuple[str, Labels], Verdict] = {}
        # The last verdicts that are over, as JSON.
        self.past: deque[dict[str, Any]] = deque(maxlen=_MOST_PAST)
        # Those that a history alone tells: what has bounded the run.
        self.past_bounds: deque[dict[str, Any]] = deque(maxlen=_MOST_PAST)
        # Phases that a rank was ever named for, and the side: their series go on, at 0.
        self.named: set[tuple[Kind, Labels, str, str]] = set()
        # What post-mortems show of ended processes, whose journals may have been deleted.
        self.snapshots: dict[Labels, Snapshot] = {}
        self.postmortems: dict[tuple[str, Labels], Path | None] = {}
        # The devices as they were when an incident began: a dead process has left its own since.
        self.gpus: dict[tuple[str, Labels], Sequence[Gpu]] = {}
        # The kind and the post-mortem of the verdict that this poll has closed.
        self.just_closed: tuple[Kind, Path | None] | None = None


class VerdictReporter:
    """One per node, for all of its runs."""

    def __init__(
        self,
        ledger: Ledger,
        postmortems: Path,
        grafana: str,
        gpus: Callable[[], Sequence[Gpu]],
        before: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """*gpus*: the node's devices as known now. *before*: what an agent that was killed had
        found, and this one may find again."""
        self._before = [each for each in before if _is_plain(each)]
        self._found_again: set[tuple[str, Labels]] = set()
        self._before_until_ns = time.monotonic_ns() + _FOUND_AGAIN_WITHIN_NS
        self._ledger = ledger
        self._postmortems = postmortems
        self._grafana = grafana
        self._gpus = gpus
        self._documents: list[tuple[Labels, str, list[Document]]] = []

    @errors.contained()
    def report(
        self,
        told: RunReports,
        change: Change,
        sources: Collection[Source],
        now_ns: int,
        ended: Collection[Labels] = (),
    ) -> None:
        """A verdict of this run was opened, has changed, or is over, as these ranks *ended*."""
        key = change.verdict.key
        change = change._replace(verdict=self._continued(change.verdict))
        told.as_found.pop(key, None)
        before = told.open.pop(key, None)
        ended_with = _ended_with(change, sources, ended)
        if change.opened:
            told.as_found[key] = change.verdict
            change = change._replace(verdict=self._with_device(change.verdict))
            told.open[key] = change.verdict
            if before is not None and before.since_ns != change.verdict.since_ns:
                # Another bound has taken its place.
                told.past_bounds.append(self._past(before, "", now_ns))
        else:
            self._before = [each for each in self._before if not _is_one(each, change.verdict)]
            past = told.past_bounds if key[0] in HARMLESS_VERDICTS else told.past
            past.append(self._past(change.verdict, ended_with, now_ns))
            # A verdict of this kind that opens in the same poll continues the incident.
            told.just_closed = change.verdict.kind, told.postmortems.pop(key, None)
            told.gpus.pop(key, None)
        verdict = change.verdict
        if verdict.kind in _NAMING:
            side = side_of(verdict) if verdict.kind == "straggler" else ""
            told.named.add((verdict.kind, verdict.labels, verdict.phase, side))
        # One record per incident, and another one if its phase or cause changes.
        if (
            not change.opened
            or before is None
            or _phase_and_cause(before) != _phase_and_cause(verdict)
        ):
            body = _sentence(change, ended_with)
            board = self._board(verdict)
            level = logging.WARNING if _warns(change) else logging.INFO
            log.log(level, "%s%s", body, f" · {board}" if board else "")
            self._record(change, body, sources, now_ns)
        if change.opened and verdict.kind in ("death", "stall"):
            self._write_postmortem(told, verdict, sources)

    @errors.contained()
    def update(self, told: RunReports, verdict: Verdict, sources: Collection[Source]) -> None:
        """An open verdict may have other figures now: they are shown, and no record is made."""
        if told.as_found.get(verdict.key, verdict) is verdict:
            return
        told.as_found[verdict.key] = verdict
        told.open[verdict.key] = self._with_device(self._continued(verdict))
        if verdict.kind == "stall":
            self._write_postmortem(told, verdict, sources)

    def _continued(self, verdict: Verdict) -> Verdict:
        """Since when it has held: since before this agent's start, if the one before says so."""
        if time.monotonic_ns() > self._before_until_ns and verdict.key not in self._found_again:
            return verdict
        for each in self._before:
            if _is_one(each, verdict) and each["since_ns"] < verdict.since_ns:
                self._found_again.add(verdict.key)
                return verdict._replace(since_ns=each["since_ns"])
        return verdict

    def _with_device(self, verdict: Verdict) -> Verdict:
        return with_gpu(verdict, self._gpus()) if verdict.kind == "straggler" else verdict

    def _record(self, change: Change, body: str, sources: Collection[Source], now_ns: int) -> None:
        """Keep a log record, and a span from the beginning until now."""
        if not self._ledger.keep_history:
            return
        verdict, opened = change
        project = next((each.project for each in sources if each.project), "")
        attributes = {
            "verdict": verdict.kind,
            "verdict.state": "opened" if opened else "closed",
            "phase": verdict.phase,
            "sentence": verdict.sentence,
            **dict(_flat(verdict.evidence)),
        }
        if board := self._board(verdict):
            attributes["otel_ddp.board.url"] = board
        name = f"training.{verdict.kind}"
        since_ns = min(verdict.since_ns or now_ns, now_ns)
        identity = f"{verdict.key}/{opened}/{now_ns}".encode("utf-8", "replace")
        span_id = blake2s(identity, digest_size=8).hexdigest()
        step = verdict.step
        trace = f"verdict/{span_id}" if step is None else trace_ids.trace_of_step(step)
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
            "body": body,
            "severity": _severity(change),
        }
        documents = [Document(SPAN, span, 0), Document(EVENT, record, 0)]
        self._documents.append((verdict.labels, project, documents))

    def _write_postmortem(
        self, told: RunReports, verdict: Verdict, sources: Collection[Source]
    ) -> None:
        key, earlier = verdict.key, told.postmortems.get(verdict.key)
        if earlier is None and told.just_closed is not None:
            kind, path = told.just_closed
            earlier = path if kind == verdict.kind else None
        snapshots = {**told.snapshots, **{each.labels: each.snapshot() for each in sources}}
        told.postmortems[key] = postmortem.write(
            self._postmortems,
            dict(told.run).get("run", ""),
            verdict=self.plain(verdict),
            processes=[described for described, _ in snapshots.values()],
            values=[value for _, values in snapshots.values() for value in values],
            open_verdicts=[self.plain(each) for each in told.open.values() if each.key != key],
            gpus=told.gpus.setdefault(key, self._gpus()),
            now_ns=time.time_ns(),
            earlier=earlier,
        )

    def flush_documents(self) -> list[tuple[Labels, str, list[Document]]]:
        """The spans and events that have not been exported yet."""
        documents, self._documents = self._documents, []
        return documents

    def plain(self, verdict: Verdict) -> dict[str, Any]:
        """A verdict as JSON. Programs read these keys."""
        return {
            "kind": verdict.kind,
            "who": dict(verdict.labels),
            "phase": verdict.phase,
            "sentence": verdict.sentence,
            "evidence": dict(verdict.evidence),
            "step": verdict.step,
            "since_ns": verdict.since_ns,
            "board": self._board(verdict),
        }

    def _past(self, verdict: Verdict, ended_with: str, now_ns: int) -> dict[str, Any]:
        """A verdict that is over, as JSON: with its numbers and words, without its long tables."""
        numbers = {k: v for k, v in verdict.evidence.items() if not isinstance(v, list)}
        return {
            **self.plain(verdict),
            "sentence": past_sentence(verdict),
            "evidence": numbers,
            "until_ns": verdict.until_ns or now_ns,
            "ended_with": ended_with,
        }

    def _board(self, verdict: Verdict) -> str:
        title = "Ranks" if verdict.kind in _OF_RANKS else "Run"
        return addresses.board(self._grafana, title, dict(verdict.labels), verdict.since_ns)


def _sentence(change: Change, ended: str) -> str:
    sentence = change.verdict.sentence
    if change.opened:
        return sentence
    return f"no longer, as {ended} ended: {sentence}" if ended else f"no longer: {sentence}"


def _ended_with(change: Change, sources: Collection[Source], ended: Collection[Labels]) -> str:
    """What ended and ended the verdict with it: then nothing was cured."""
    if not ended or change.opened or change.verdict.kind == "death":
        return ""
    return rank_list(ended) if any(each.is_at_work for each in sources) else "the run"


def _warns(change: Change) -> bool:
    return change.opened and change.verdict.kind not in HARMLESS_VERDICTS


def _severity(change: Change) -> str:
    if not _warns(change):
        return "INFO"
    return "ERROR" if change.verdict.kind in _FATAL else "WARN"


def _phase_and_cause(verdict: Verdict) -> tuple[str, Any]:
    return verdict.phase, verdict.evidence.get("cause")


def _flat(evidence: Mapping[str, Any], prefix: str = "evidence") -> Iterator[tuple[str, Any]]:
    """Evidence as attributes: numbers and words. Lists stay in the post-mortem."""
    for name, value in evidence.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}.{name}")
        elif isinstance(value, (str, bool, int, float)):
            yield f"{prefix}.{name}", value


def _is_plain(found: Mapping[str, Any]) -> bool:
    return isinstance(found.get("since_ns"), int) and found["since_ns"] > 0


def _is_one(found: Mapping[str, Any], verdict: Verdict) -> bool:
    same = (verdict.kind, dict(verdict.labels), verdict.phase)
    return (found.get("kind"), found.get("who"), found.get("phase")) == same
