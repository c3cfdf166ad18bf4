"""Reports verdicts: in the agent's log, as a log record, and in a post-mortem."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from otel_ddp import errors, files
from otel_ddp.agent.ledger import Ledger
from otel_ddp.agent.reading.process import Process
from otel_ddp.diagnosis.death.cause import FOLLOWS_S
from otel_ddp.diagnosis.hardware import Cores, Gpu, with_cores, with_gpus
from otel_ddp.diagnosis.say import past_sentence, rank_list
from otel_ddp.diagnosis.straggler.finding import Report
from otel_ddp.diagnosis.verdict import Change, Labels, Verdict
from otel_ddp.history.page.http import json_text
from otel_ddp.journal.layout import EVENT, trace_of_step
from otel_ddp.journal.parser import Document
from otel_ddp.journal.process_state import ProcessState
from otel_ddp.vocabulary.words import HARMLESS_VERDICTS, Kind

log = logging.getLogger("otel_ddp.agent")

# How many closed verdicts are kept for each run.
_MOST_PAST = 20
# Kinds of verdicts after which the training does not recover by itself.
_FATAL: frozenset[Kind] = frozenset({"death", "silence", "stall"})


class Incident:
    """An open verdict, with its hardware evidence and post-mortem."""

    def __init__(self, verdict: Verdict, *, by_lead: bool = False) -> None:
        self.found = self.shown = verdict
        """`found`: the detector's verdict. `shown`: the same verdict with hardware evidence."""
        self.gpus: Sequence[Gpu] | None = None
        """The GPUs when the verdict opened; not read later, since a dead process uses no GPU."""
        self.postmortem: Path | None = None
        self.by_lead = by_lead
        """Whether another agent, which led the run before, has reported this verdict already."""


class RunReports:
    """The reported verdicts of one run."""

    def __init__(self, run: Labels) -> None:
        self.run = run
        self.sources: Collection[Process] = ()
        self.open: dict[tuple[Kind, Labels], Incident] = {}
        # The last closed verdicts, as JSON.
        self.past: deque[dict[str, Any]] = deque(maxlen=_MOST_PAST)
        # Closed verdicts on the bottleneck of the run. They are harmless, so they go only into the
        # saved histories.
        self.past_bounds: deque[dict[str, Any]] = deque(maxlen=_MOST_PAST)
        # The ended processes. Post-mortems need them, and the journals may be deleted by then.
        self.ended: dict[Labels, ProcessState] = {}
        # The last incident that this poll closed. If a verdict of the same kind opens in the same
        # poll, it continues this incident.
        self.just_closed: Incident | None = None
        # The last judgement from another agent that led the run; None if there was none.
        self.last_led: Judgement | None = None

    def past_of(self, kind: Kind) -> deque[dict[str, Any]]:
        """The list to which closed verdicts of this kind are added."""
        return self.past_bounds if kind in HARMLESS_VERDICTS else self.past

    def is_of_lead(self, verdict: Verdict) -> bool:
        """Whether the last judgement from another agent contains this verdict.

        For a death it is enough that the judgement has any death at about the same time.
        """
        if self.last_led is None:
            return False
        if verdict.kind == "death":
            deaths = [*self.last_led.open, *self.last_led.past]
            since_ns = [each["since_ns"] for each in deaths if each["kind"] == "death"]
            return any(abs(each_ns - verdict.since_ns) <= FOLLOWS_S * 1e9 for each_ns in since_ns)
        keys = [(each["kind"], tuple(each["who"].items())) for each in self.last_led.open]
        return verdict.key in keys


class VerdictReporter:
    """Reports the verdicts on all runs of a node. There is one per node."""

    def __init__(
        self,
        ledger: Ledger,
        postmortems: Path,
        gpus: Callable[[], Sequence[Gpu]],
        cores: Callable[[], Cores],
    ) -> None:
        """*gpus*: returns the node's devices. *cores*: returns for each rank the share of time in
        which it waited for a core."""
        self._ledger = ledger
        self._postmortems = postmortems
        self._gpus, self._cores = gpus, cores
        self._documents: list[tuple[Labels, str, list[Document]]] = []

    @errors.contained()
    def report(
        self, reports: RunReports, change: Change, now_ns: int, ended: Collection[Labels] = ()
    ) -> None:
        """Report a change of a verdict. *ended*: the ranks whose end closed the verdict."""
        verdict, opened = change
        incident = reports.open.pop(verdict.key, None)
        if incident is None and not opened:
            return  # another agent opened this verdict, and reports its end
        before = None if incident is None else incident.shown
        incident = incident or Incident(verdict, by_lead=reports.is_of_lead(verdict))
        self._update(incident, verdict, opened)
        verdict, ended_with = incident.shown, ""
        if opened:
            reports.open[verdict.key] = incident
        else:
            ended_with = _ended_with(verdict, reports.sources, ended)
            reports.past_of(verdict.kind).append(_past(verdict, ended_with, now_ns))
            reports.just_closed = incident
        if incident.by_lead:
            return
        # Record the verdict when it opens, at each change of phase or cause, and when it closes.
        if not opened or before is None or _phase_and_cause(before) != _phase_and_cause(verdict):
            body = verdict.sentence
            if not opened:
                body = f"no longer{f', as {ended_with} ended' if ended_with else ''}: {body}"
            self._record(reports, verdict, opened, body, now_ns)
        if opened and verdict.kind in _FATAL:
            self._write_postmortem(reports, incident)

    @errors.contained()
    def hand_over(self, reports: RunReports, by: str, now_ns: int) -> None:
        """Close the open verdicts here: the agent of node *by* judges the run from now on."""
        handed_over = [each for each in reports.open.values() if not each.by_lead]
        reports.open.clear()
        for incident in handed_over:
            verdict = incident.shown
            if verdict.kind != "death":
                reports.past_of(verdict.kind).append(_past(verdict, "", now_ns))
            body = f"judged by the agent of {by} from now on: {verdict.sentence}"
            self._record(reports, verdict, False, body, now_ns)

    @errors.contained()
    def update(self, reports: RunReports, verdict: Verdict) -> None:
        """Show new figures of an open verdict, without a log record."""
        incident = reports.open.get(verdict.key)
        if incident is not None and incident.found is not verdict:
            self._update(incident, verdict, opened=True)
            if verdict.kind in ("silence", "stall"):
                self._write_postmortem(reports, incident)

    def _update(self, incident: Incident, verdict: Verdict, opened: bool) -> None:
        incident.found = verdict
        if opened and verdict.kind == "straggler":
            verdict = with_gpus(with_cores(verdict, self._cores()), self._gpus())
        incident.shown = verdict

    def _record(
        self, reports: RunReports, verdict: Verdict, opened: bool, body: str, now_ns: int
    ) -> None:
        """Write a line into the agent's log, and queue a log record for the export."""
        warns = opened and verdict.kind not in HARMLESS_VERDICTS
        severity = ("ERROR" if verdict.kind in _FATAL else "WARN") if warns else "INFO"
        log.log(logging.WARNING if warns else logging.INFO, "%s", body)
        if not self._ledger.keep_history:
            return
        attributes = {
            "verdict": verdict.kind,
            "verdict.state": "opened" if opened else "closed",
            "phase": verdict.phase,
            "sentence": verdict.sentence,
            **dict(_flat(verdict.evidence)),
        }
        record = {
            "name": f"training.{verdict.kind}",
            "trace": "" if verdict.step is None else trace_of_step(verdict.step),
            "step": verdict.step,
            "attributes": attributes,
            "time": now_ns,
            "body": body,
            "severity": severity,
        }
        project = next((each.project for each in reports.sources if each.project), "")
        self._documents.append((verdict.labels, project, [Document(EVENT, record, 0)]))

    def _write_postmortem(self, reports: RunReports, incident: Incident) -> None:
        before, verdict = reports.just_closed, incident.shown
        if before is not None and before.shown.kind == verdict.kind:
            incident.postmortem = incident.postmortem or before.postmortem
            incident.gpus = before.gpus if incident.gpus is None else incident.gpus
        if incident.gpus is None:
            incident.gpus = self._gpus()
        living = {each.labels: each.describe() for each in reports.sources}
        processes = {**reports.ended, **living}
        others = [each.shown for each in reports.open.values() if each is not incident]
        found = {
            "verdict": plain(verdict),
            "processes": [each.to_json() for each in processes.values()],
            "open_verdicts": list(map(plain, others)),
            "gpus": incident.gpus,
        }
        run = dict(reports.run).get("run", "")
        incident.postmortem = write_postmortem(self._postmortems, run, found, incident.postmortem)

    def flush_documents(self) -> list[tuple[Labels, str, list[Document]]]:
        """Take the log records that were not exported yet."""
        documents, self._documents = self._documents, []
        return documents


def plain(verdict: Verdict) -> dict[str, Any]:
    """A verdict as JSON. The keys must stay, since users' programs read them."""
    return {
        "kind": verdict.kind,
        "who": dict(verdict.labels),
        "phase": verdict.phase,
        "sentence": verdict.sentence,
        "evidence": dict(verdict.evidence),
        "step": verdict.step,
        "since_ns": verdict.since_ns,
    }


def _past(verdict: Verdict, ended_with: str, now_ns: int) -> dict[str, Any]:
    """A closed verdict as JSON, without the lists in its evidence."""
    numbers = {k: v for k, v in verdict.evidence.items() if not isinstance(v, list)}
    return {
        **plain(verdict),
        "sentence": past_sentence(verdict),
        "evidence": numbers,
        "until_ns": verdict.until_ns or now_ns,
        "ended_with": ended_with,
    }


def _ended_with(verdict: Verdict, sources: Collection[Process], ended: Collection[Labels]) -> str:
    """The ranks, or the run, whose end closed a verdict; empty if the problem was resolved."""
    if not ended or verdict.kind == "death":
        return ""
    return rank_list(ended) if any(each.is_at_work for each in sources) else "the run"


def _phase_and_cause(verdict: Verdict) -> tuple[str, Any]:
    return verdict.phase, verdict.evidence.get("cause")


def _flat(evidence: Mapping[str, Any], prefix: str = "evidence") -> Iterator[tuple[str, Any]]:
    """Evidence as attributes without nesting. Leaves lists out, which only post-mortems contain."""
    for name, value in evidence.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}.{name}")
        elif isinstance(value, (str, bool, int, float)):
            yield f"{prefix}.{name}", value


# -- the judgement of a run's lead, which the agents of the other nodes show and export


@dataclass(frozen=True)
class Judgement:
    """The verdicts on one run, and the comparison of its ranks."""

    by: str
    """The node of the agent that leads the run, i.e. that judges it."""
    open: Sequence[Mapping[str, Any]]
    """The open verdicts as JSON; `past` has the closed ones."""
    past: Sequence[Mapping[str, Any]]
    report: Report
    compared: int
    """How many ranks are compared with each other, on all nodes."""


def compared_ranks(report: Report) -> int:
    """How many ranks are compared with each other in this report."""
    return sum([each.work_s is not None for each in report.ranks])


Plain = Mapping[str, Any]

_KEPT = 50
_LONGEST_NAME = 120
# People read these files and send them by mail, so their size is bounded for large runs.
_MOST_PROCESSES, _MOST_ROWS = 1000, 64


def write_postmortem(
    directory: Path, run: str, found: Plain, earlier: Path | None = None
) -> Path | None:
    """Write the post-mortem of an incident; returns its path, or None if that fails.

    *earlier*: the path of a previous call for the same incident, whose file is replaced.
    """
    now_ns = time.time_ns()
    name = re.sub(r"[^\w.-]+", "_", run).encode()[:_LONGEST_NAME].decode(errors="ignore") or "run"
    path = earlier or directory / f"postmortem-{name}-{now_ns}.json"
    try:
        files.make_kept(directory)
        files.replace(path, _by_line({"version": 1, "run": run, "written_ns": now_ns, **found}))
        # Ignore missing files: another agent with the same directory may delete the same files.
        with contextlib.suppress(FileNotFoundError):
            _delete_oldest(directory)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        errors.warn_once("postmortem", "no post-mortem in %s: %s", directory, why)
        return None
    return path


def _by_line(report: Plain) -> str:
    """JSON with one line for each process and for each entry of the other lists."""
    rows = []
    for name, value in report.items():
        text = json_text(value, ensure_ascii=False)
        if isinstance(value, (list, tuple)):
            most = _MOST_PROCESSES if name == "processes" else _MOST_ROWS
            lines = [f"\n  {json_text(each, ensure_ascii=False)}" for each in value[:most]]
            text = f"[{','.join(lines)}\n ]"
        rows.append(f' "{name}": {text}')
    return "{\n" + ",\n".join(rows) + "\n}\n"


def _delete_oldest(directory: Path) -> None:
    """Delete all but the newest post-mortems."""
    ours = directory.glob("postmortem-?*.json")
    for path in sorted(ours, key=lambda each: each.lstat().st_mtime)[:-_KEPT]:
        files.remove(path)
