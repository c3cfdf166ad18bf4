"""The ended processes of a run: how each ended, and when more may be known about it."""

from __future__ import annotations

import time

from otel_ddp.agent.reading.journal_feed import JournalFeed
from otel_ddp.agent.verdicts.exit_causes import ExitCauses
from otel_ddp.diagnosis.death.ended_process import EndedProcess
from otel_ddp.diagnosis.verdict import Labels
from otel_ddp.journal.process_state import ENDED
from otel_ddp.words import state_word

# When an end is looked at again. Other ranks report theirs soon after. The kernel knows the cause
# once the process has left, which takes Python seconds, and once its launcher has looked, which may
# take 5 s more.
_LOOK_AGAIN_AFTER_NS = (500_000_000, 2_000_000_000, 6_000_000_000, 20_000_000_000)


class Exits:
    """The processes of one run on this node that have ended."""

    def __init__(self, causes: ExitCauses) -> None:
        self._causes = causes
        self._ended: set[Labels] = set()
        # The ends to look at again, and when.
        self._pending: list[tuple[EndedProcess, JournalFeed, int]] = []
        # Processes that reported their end, and may still exist.
        self._leaving: dict[JournalFeed, EndedProcess] = {}

    def feed(self, journal: JournalFeed, labels: Labels, now_ns: int) -> EndedProcess:
        """How this process ended, as far as that is known at once."""
        self._ended.add(labels)
        ended = self._ended_process(journal, labels)
        if ended.state != "killed":
            self._leaving[journal] = ended
        self._pending += [
            (ended._replace(known_for_s=after / 1e9), journal, now_ns + after)
            for after in _LOOK_AGAIN_AFTER_NS
        ]
        return ended

    def poll(self) -> None:
        """Note which of the processes that reported their end still exist."""
        for journal, ended in self._leaving.items():
            if self._causes.is_there(*_process(journal)):
                self._leaving[journal] = ended._replace(last_present_ns=time.time_ns())

    def has_restarted(self, labels: Labels) -> bool:
        """A process with these labels is at work; whether an earlier one with them had ended."""
        if labels not in self._ended:
            return False
        self._ended.remove(labels)
        # The run was restarted: the earlier ends are not looked at again.
        self.forget_all()
        return True

    def updated(self, now_ns: int) -> list[EndedProcess]:
        """The ends of which more may be known by now."""
        found: dict[JournalFeed, EndedProcess] = {}
        for due in [each for each in self._pending if now_ns >= each[2]]:
            self._pending.remove(due)
            ended, journal, _ = due
            cause = self._causes.why(*_process(journal))
            latest = self._leaving.get(journal, ended)
            found[journal] = latest._replace(cause=cause, known_for_s=ended.known_for_s)
            if journal in self._leaving:
                self._leaving[journal] = found[journal]
            if not any(each[1] is journal for each in self._pending):
                self._causes.forget(*_process(journal))
                self._leaving.pop(journal, None)
        # A verdict on one end depends on when the other processes left, too.
        return list({**self._leaving, **found}.values()) if found else []

    def forget_all(self) -> None:
        """No end is looked at again."""
        for _, journal, _ in self._pending:
            self._causes.forget(*_process(journal))
        self._pending.clear()
        self._leaving.clear()

    def _ended_process(self, journal: JournalFeed, labels: Labels) -> EndedProcess:
        progress = journal.reader.progress()
        described = journal.describe()
        alive_ns, ended_ns = journal.life.seen_alive_ns, journal.life.gone_ns
        if progress is not None and progress.state in ENDED:
            # It reported its end: the moment of that report counts.
            alive_ns = ended_ns = progress.state_since_ns
        return EndedProcess(
            labels=labels,
            state=state_word(journal.state),
            step=journal.step(),
            phase=described.phase,
            phase_since_ns=described.phase_since_ns,
            seen_alive_ns=alive_ns,
            ended_ns=ended_ns,
            reason=described.reason,
            cause=self._causes.why(*_process(journal)),
            world_size=journal.world_size,
        )


def _process(journal: JournalFeed) -> tuple[int, int]:
    return journal.pid, journal.reader.start_ticks
