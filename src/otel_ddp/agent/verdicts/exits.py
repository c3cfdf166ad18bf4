"""Who of a run has ended and why, and when that is to be thought of once more."""

from __future__ import annotations

import time

from otel_ddp.agent.reading.journal_feed import JournalFeed
from otel_ddp.agent.reading.process_status import ENDED
from otel_ddp.agent.verdicts.exit_causes import ExitCauses
from otel_ddp.catalog import STATES
from otel_ddp.diagnosis.ends import Gone
from otel_ddp.diagnosis.verdict import Who

# What others have to say of it comes soon after; what the kernel has, when the process has left,
# which takes Python seconds, and its launcher has looked, every 5 s perhaps.
_AFTERTHOUGHTS_NS = (500_000_000, 2_000_000_000, 6_000_000_000, 20_000_000_000)
_STATES = {code: word for word, code in STATES.items()}


class Exits:
    """The processes of one run on this node that are no more."""

    def __init__(self, causes: ExitCauses) -> None:
        self._causes = causes
        self._ended: set[Who] = set()
        # Whose end is to be thought of once more, and when.
        self._afterthoughts: list[tuple[Gone, JournalFeed, int]] = []
        # Those that told their end, and may be there all the same.
        self._leaving: dict[JournalFeed, Gone] = {}

    def feed(self, journal: JournalFeed, who: Who, now_ns: int) -> Gone:
        """How this process ended, as far as that is known at once."""
        self._ended.add(who)
        gone = self._gone(journal, who)
        if gone.state != "killed":
            self._leaving[journal] = gone
        self._afterthoughts += [
            (gone._replace(waited_s=after / 1e9), journal, now_ns + after)
            for after in _AFTERTHOUGHTS_NS
        ]
        return gone

    def poll(self) -> None:
        """See which of those that told their end are still there."""
        for journal, gone in self._leaving.items():
            if self._causes.is_there(*_process(journal)):
                self._leaving[journal] = gone._replace(present_ns=time.time_ns())

    def take_back(self, who: Who) -> bool:
        """Somebody at work bears this name; whether one of that name had ended."""
        if who not in self._ended:
            return False
        self._ended.remove(who)
        # The run was started anew: what ended it before is not thought of again.
        self.think_no_more()
        return True

    def reconsidered(self, now_ns: int) -> list[Gone]:
        """Those of whom more may be known by now."""
        found: dict[JournalFeed, Gone] = {}
        for thought in [each for each in self._afterthoughts if now_ns >= each[2]]:
            self._afterthoughts.remove(thought)
            gone, journal, _ = thought
            cause = self._causes.why(*_process(journal))
            before = self._leaving.get(journal, gone)
            found[journal] = before._replace(cause=cause, waited_s=gone.waited_s)
            if journal in self._leaving:
                self._leaving[journal] = found[journal]
            if not any(each[1] is journal for each in self._afterthoughts):
                self._causes.forget(*_process(journal))
                self._leaving.pop(journal, None)
        # What is said of one rests on when the others left, too.
        return list({**self._leaving, **found}.values()) if found else []

    def think_no_more(self) -> None:
        """Nobody wants to know any more."""
        for _, journal, _ in self._afterthoughts:
            self._causes.forget(*_process(journal))
        self._afterthoughts.clear()
        self._leaving.clear()

    def _gone(self, journal: JournalFeed, who: Who) -> Gone:
        progress = journal.reader.progress()
        described = journal.describe()
        told_ns = 0 if progress is None else progress.state_since_ns
        spoke = progress is not None and progress.state in ENDED
        return Gone(
            who=who,
            state=_STATES.get(journal.state, "killed"),
            step=journal.step(),
            phase=described["phase"],
            phase_since_ns=described["phase_since_ns"],
            seen_alive_ns=told_ns if spoke else journal.seen_alive_ns,
            gone_ns=told_ns if spoke else journal.gone_ns,
            reason=described["reason"],
            cause=self._causes.why(*_process(journal)),
            world_size=journal.world_size,
        )


def _process(journal: JournalFeed) -> tuple[int, int]:
    return journal.pid, journal.reader.start_ticks
