"""What goes out of one process of this node to the lead of its run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from otel_ddp import errors
from otel_ddp.agent.link import link_pb2 as wire
from otel_ddp.agent.link.runs.known import told_of, wall_origin_ns
from otel_ddp.agent.reading.process import Process
from otel_ddp.diagnosis.stall.evidence import Evidence, Question
from otel_ddp.journal.sent import SentJournal, Stretch
from otel_ddp.vocabulary.words import state_word

# For so long after a question the lead is told what the kernel says of the process.
_ASKED_NS = 30_000_000_000
# Memory changes all the time.
_KNOWN_EVERY_NS = 2_000_000_000
_TELL_AGAIN_NS = 10_000_000_000


class Outflow:
    """One a process: looked at in each round of the agent's loop, and written now and then."""

    def __init__(self, number: int, process: Process, *, is_kept: bool) -> None:
        """*number*: its own, as long as this agent lives. *is_kept*: the lead writes its history,
        and so needs all that was read here."""
        self.number, self.process = number, process
        self._is_kept = is_kept
        self._journal = SentJournal(process.reader, process.mark_before)
        self._told: bytes | None = None
        self._told_ns = self._tell_again_ns = self._asked_ns = 0
        self.ended_at_ns = 0
        """When its end was seen; 0: it has none."""
        self._evidence = Evidence()
        self._ended: dict[str, Any] | None = None
        self._cause: Mapping[str, Any] = {}
        self.is_urgent = False
        """Whether there is something that the lead waits for."""

    @property
    def has_ended(self) -> bool:
        return self._ended is not None

    def close(self) -> None:
        self._journal.close()

    @errors.contained()
    def look(self, now_ns: int) -> None:
        """What is new of it, beside its journal. *now_ns*: by the monotonic clock."""
        process = self.process
        if self._is_asked(now_ns):
            before, self._evidence = self._evidence, process.host.evidence(now_ns)
            self.is_urgent |= self._evidence.answered_ns != before.answered_ns
        if self._ended is None and not process.is_at_work:
            origin_ns, life = wall_origin_ns(), process.life
            self.ended_at_ns, self.is_urgent = now_ns, True
            self._ended = {
                "state": state_word(life.state),
                "seen_alive_ns": life.seen_alive_ns - origin_ns,
                "gone_ns": life.gone_ns - origin_ns,
                "ended_ns": life.ended_ns - origin_ns,
            }

    def ask(self, question: Question, now_ns: int) -> None:
        """The lead asks the process."""
        self.process.host.ask(question, now_ns)
        self._asked_ns = now_ns

    def _is_asked(self, now_ns: int) -> bool:
        return bool(self._asked_ns) and now_ns - self._asked_ns < _ASKED_NS

    def go_back(self, defined: int, position: int | None) -> None:
        """What lies behind these positions has not come."""
        self._journal.go_back(defined, position)
        if not defined:
            # The lead knows nothing of it.
            self._told = None

    @errors.contained()
    def write(self, message: wire.Process, now_ns: int, most: int) -> None:
        """All that is new since the last call; *most*: within so many bytes of the ring."""
        journal, self.is_urgent = self._journal, False
        journal.sends_values = self._is_kept and self.process.exported
        message.id = self.number
        if self._told is None:
            message.journal, message.head = self.process.reader.name, journal.head()
        _write(message.definitions, journal.definitions())
        _write(message.records, journal.records(most))
        message.lost = journal.lost
        message.progress = journal.progress()
        asked = self._is_asked(now_ns)
        due = self._told is None or now_ns - self._told_ns >= _KNOWN_EVERY_NS
        if due or asked or self.has_ended:
            self._told_ns = now_ns
            message.totals = journal.totals()
            self._write_known(message, now_ns, asked=asked)

    def _write_known(self, message: wire.Process, now_ns: int, *, asked: bool) -> None:
        process = self.process
        known = told_of(process, now_ns, self._evidence if asked else None)
        if self._ended is not None:
            message.reason = self._journal.reason()
            known["end"] = self._ended
            # What is known of it grows, until the kernel is asked no more.
            cause = process.host.cause()
            self._cause = cause if len(cause) >= len(self._cause) else self._cause
            known["cause"] = dict(self._cause)
            if present_ns := process.host.present_ns():
                known["present_ns"] = present_ns - wall_origin_ns()
        content = json.dumps(known).encode()
        # A report may get lost where no part of the journal does.
        if content != self._told or self.has_ended or now_ns >= self._tell_again_ns:
            self._told = message.known = content
            self._tell_again_ns = now_ns + _TELL_AGAIN_NS


def _write(message: wire.Stretch, stretch: Stretch) -> None:
    message.since, message.until = stretch.since, stretch.until
    message.at.extend([each.position for each in stretch.pieces])
    message.content.extend([each.content for each in stretch.pieces])
