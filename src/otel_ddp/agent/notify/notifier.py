"""Decides on notifications: lasting verdicts, ends of runs, and alerts of scripts."""

from __future__ import annotations

import shlex
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from hashlib import blake2s
from pathlib import Path
from typing import Any

from otel_ddp import errors, shown
from otel_ddp.agent.judge.reports import Incident
from otel_ddp.agent.judge.run_case import RunCase
from otel_ddp.agent.kept_thread import KeptThread
from otel_ddp.agent.notify.outbox import Address, Message, Outbox
from otel_ddp.agent.reading.process import Process
from otel_ddp.diagnosis.say import unit_name
from otel_ddp.diagnosis.verdict import Labels, Verdict, run_labels
from otel_ddp.history.card import Card, card_of, lines
from otel_ddp.history.newest_attempt import Newest, OfNode, newest_attempt
from otel_ddp.history.terminal import printable, when
from otel_ddp.identity import addresses
from otel_ddp.journal.process_state import ProcessState
from otel_ddp.settings import Settings
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.words import (
    HARMLESS_VERDICTS,
    Kind,
    is_taken_back,
    state_word,
)

_STOOD_S = 30.0
# How long to wait before sending a message on a death: finding the cause takes a moment.
_DEATH_S = 2.0
# For each kind of verdict: the level and title of its message, and how long the verdict must have
# been open before the message is sent.
_KINDS: Mapping[Kind, tuple[str, str, float]] = {
    "death": ("error", "died", _DEATH_S),
    "silence": ("error", "is no longer heard", _STOOD_S),
    "stall": ("error", "hangs", _STOOD_S),
    "nonfinite": ("error", "has a value that is not finite", 0.0),
    "straggler": ("warn", "keeps the others waiting", _STOOD_S),
}
# Send a message on a late rank or node only if it costs at least this share of the step time.
_COSTS = 0.05
# Send no message when a run shorter than this ends well: it may be a test, or one of thousands of
# runs in a sweep.
_SHORTEST_S = 10.0


class _Run:
    """What the rules remember of one run."""

    def __init__(self) -> None:
        self.since: dict[tuple[Kind, Labels], float] = {}
        """When each open verdict was first seen, on the monotonic clock."""
        self.sent: set[tuple[Kind, Labels]] = set()
        self.card: Card | None = None
        self.over_since: float | None = None
        self.began_ns = 0
        """The start of the first attempt after the last success; 0 until an attempt has ended."""
        self.lasted_s = 0.0
        self.end_is_sent = False


class Rules:
    """Decides which messages to send. The agent's loop calls `poll` after the judge."""

    def __init__(self) -> None:
        self._runs: dict[Labels, _Run] = {}
        self._carded: set[Process] = set()
        self.ending: set[Labels] = set()
        """Runs in which a process has ended, but whose end was not reported in a message yet."""

    def poll(
        self,
        cases: Collection[RunCase],
        feeds: Collection[Process],
        page: str,
        now: float,
        *,
        leaving: bool = False,
    ) -> Iterator[Message]:
        """The messages to send now. *leaving*: the agent is ending, so don't wait for a restart."""
        self._runs = {case.run: self._runs.get(case.run) or _Run() for case in cases}
        self._carded &= set(feeds)
        for feed in feeds:
            if (run := self._runs.get(run_labels(feed.labels))) is not None:
                yield from self._read(feed, run, page)
        for case in cases:
            run = self._runs[case.run]
            over = bool(case.reports.ended) and not any(each.is_at_work for each in case.sources)
            if case.judgement is not None:
                # Another agent leads this run, and sends the messages on it.
                run.end_is_sent, run.since = over, {}
                continue
            yield from self._verdicts(case, run, page, now, leaving)
            yield from self._end(case, run, page, now, over, leaving)
        self.ending = {
            case.run
            for case in cases
            if case.reports.ended and not self._runs[case.run].end_is_sent
        }

    def _read(self, feed: Process, run: _Run, page: str) -> Iterator[Message]:
        """Yield a message for each new alert. If rank 0 has ended, also read its card: the summary
        that the message on the end of the run contains."""
        for document in feed.new.events:
            content = document.content
            if content.get("name") == catalog.ALERT_EVENT:
                key = f"{feed.reader.path.name}/{document.position}"
                yield _alert(key, feed.labels, content.get("attributes"), page)
        of_first = feed.identity.get("global_rank") == 0
        if of_first and feed.ended_at is not None and feed not in self._carded:
            self._carded.add(feed)
            state = state_word(feed.life.state)
            run.card = card_of(feed.reader, state, 0.0, feed.extremes) or run.card

    def _verdicts(
        self, case: RunCase, run: _Run, page: str, now: float, leaving: bool
    ) -> Iterator[Message]:
        found = case.reports.open
        run.since = {key: run.since.get(key, now) for key in found}
        run.sent &= found.keys()
        for key, incident in found.items():
            verdict = incident.shown
            if verdict.kind not in _KINDS or key in run.sent or incident.by_lead:
                continue
            stood_s = _KINDS[verdict.kind][2]
            stands = now - run.since[key] >= stood_s or (leaving and stood_s < _STOOD_S)
            if stands and _costs_enough(verdict):
                run.sent.add(key)
                yield self._of_verdict(incident, run, page)

    def _of_verdict(self, incident: Incident, run: _Run, page: str) -> Message:
        verdict = incident.shown
        level, what, _ = _KINDS[verdict.kind]
        labels = dict(verdict.labels)
        of_run = "rank" not in labels and "node" not in labels
        who = "" if of_run else f": {unit_name(verdict.labels)}"
        text = [verdict.sentence]
        if incident.postmortem is not None:
            text += ["", f"Post-mortem: {incident.postmortem}"]
        key = f"{verdict.kind}/{verdict.labels}/{verdict.since_ns}"
        title = f"run {labels.get('run')}{who} {what}"
        return _message(key, verdict.kind, level, title, "\n".join(text), labels, page)

    def _end(
        self, case: RunCase, run: _Run, page: str, now: float, over: bool, leaving: bool
    ) -> Iterator[Message]:
        if not over:
            run.over_since, run.end_is_sent = None, False
            return
        ended = sorted(case.reports.ended.values(), key=lambda each: each.started_ns)
        if run.over_since is None:
            run.over_since = now
            run.began_ns = run.began_ns or ended[0].started_ns
            run.lasted_s = time.time() - run.began_ns / 1e9
        newest = _newest(ended)
        is_whole = len(newest.ranks) >= max(
            each["world_size"] or 1 for each in newest.ranks.values()
        )
        ended_well = newest.state == "finished" and is_whole
        # Report a failure only after 30 s: until then the launcher may restart failed ranks, and
        # ranks that are still missing may start.
        stands = ended_well or leaving or now - run.over_since >= _STOOD_S
        if run.end_is_sent or not stands:
            return
        run.end_is_sent = True
        if newest.state == "finished":
            run.began_ns = 0
        if newest.state != "finished" or run.lasted_s >= _SHORTEST_S:
            yield _of_end(case, run, newest, page)


def _newest(ended: Sequence[ProcessState]) -> Newest:
    """The newest attempt of a run. *ended*: its ended processes, sorted by their starts."""
    job_type = next((each.job_type for each in ended if each.trains), ended[0].job_type)
    return newest_attempt(
        [
            OfNode({each.rank_key(job_type): each.to_json()}, each.seen_alive_ns or 0)
            for each in ended
        ]
    )


def _of_end(case: RunCase, run: _Run, newest: Newest, page: str) -> Message:
    now_ns, lasted_s, state = time.time_ns(), run.lasted_s, newest.state
    ended = newest.ranks.values()
    past = [each for each in case.reports.past if not is_taken_back(each["evidence"])]
    still = [
        each for each in case.reports.open.values() if each.shown.kind not in HARMLESS_VERDICTS
    ]
    sentences = [
        *(when(each.shown._asdict(), now_ns) + each.shown.sentence for each in still),
        *(when(each, now_ns) + str(each["sentence"]) for each in past),
    ]
    labels = dict(case.run)
    group, name = labels.get("group", ""), labels.get("run", "")
    card = run.card or Card(f"run {group}/{name}" if group else f"run {name}", state, lasted_s)
    reason = card.reason or next((each["reason"] for each in ended if each["reason"]), "")
    card = card._replace(
        state=state,
        duration_s=lasted_s,
        reason=reason,
        sentences=sentences,
        # Show a command instead of the page's address: the address works only while the agent runs.
        look=[f"otel-ddp open {shlex.quote(f'{group}/{name}' if group else name)}"],
    )
    key = f"ended/{case.run}/{max(each['started_ns'] for each in ended)}"
    title = (
        f"run {name} {'was killed' if state == 'killed' else state} after {shown.seconds(lasted_s)}"
    )
    level = "info" if state == "finished" else "error"
    return _message(key, "ended", level, title, "\n".join(lines(card)), labels, page)


def _alert(key: str, labels: Labels, attributes: Any, page: str) -> Message:
    said = attributes if isinstance(attributes, dict) else {}
    level = str(said.get("level"))
    level = level if level in ("info", "warn", "error") else "info"
    of = dict(labels)
    title = f"run {of.get('run')}: {said.get('title')}"
    return _message(key, "alert", level, title, str(said.get("text") or ""), of, page)


def _costs_enough(verdict: Verdict) -> bool:
    """Whether a late rank or node costs enough time for a message. True for other verdicts."""
    step_s, without_s = (verdict.evidence.get(name) for name in ("step_s", "step_without_s"))
    if verdict.kind != "straggler" or not step_s or without_s is None:
        return True
    return bool((step_s - without_s) / step_s >= _COSTS)


def _message(
    key: str, kind: str, level: str, title: str, text: str, labels: Mapping[str, str], page: str
) -> Message:
    run = labels.get("run", "")
    return Message(
        id=blake2s(key.encode("utf-8", "replace"), digest_size=8).hexdigest(),
        kind=kind,
        level=level,
        title=printable(title),
        text=text,
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        group=labels.get("group", ""),
        run=run,
        node=labels.get("node", ""),
        rank=labels.get("rank", ""),
        url=addresses.page_of_run(page, run) if page else "",
    )


class Notifier:
    """Sends an agent's notifications. The agent's loop calls it. It does nothing if OTEL_DDP_NOTIFY
    is empty."""

    def __init__(self, conf: Settings, folder: Path) -> None:
        """*folder*: the folder in which unsent messages are stored."""
        self._outbox: Outbox | None = None
        self._why_none = "off: OTEL_DDP_NOTIFY names no address"
        if conf.notify and conf.offline:
            self._why_none = "off: OTEL_DDP_AGENT=offline sends nothing"
        elif conf.notify:
            self._outbox = Outbox(folder, [*map(Address, dict.fromkeys(conf.notify))])
        self._rules = Rules()

    @errors.contained()
    def poll(
        self,
        cases: Collection[RunCase],
        feeds: Collection[Process],
        page: str,
        *,
        leaving: bool = False,
    ) -> None:
        """Queue the messages that are due. The loop calls this after the judge.

        *page*: the address of the agent's page, for links in the messages.
        """
        if self._outbox is not None:
            now = time.monotonic()
            for message in self._rules.poll(cases, feeds, page, now, leaving=leaving):
                self._outbox.put(message)
            self._outbox.give_up_old()

    @property
    def ending(self) -> Collection[Labels]:
        """Runs that the judge has to keep until the message on their end is queued."""
        return self._rules.ending

    def threads(self) -> list[KeptThread]:
        """One thread for each address."""
        return [] if self._outbox is None else self._outbox.delivery.threads()

    def busy(self) -> bool:
        """Whether messages are still to be sent, so that the agent should keep running."""
        return bool(self.ending) or (self._outbox is not None and self._outbox.is_awaited())

    def describe(self) -> str:
        """A sentence for `status`, without secrets."""
        return self._why_none if self._outbox is None else self._outbox.describe()

    def stop(self) -> None:
        """Send messages for another moment. The next agent sends the rest, which stays on disk."""
        if self._outbox is not None:
            self._outbox.delivery.stop(1.5, 1.5)
