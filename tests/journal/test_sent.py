"""What is sent of a journal again, after its reader on the other node has lost some of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from make import WrittenRank
from otel_ddp.journal import layout
from otel_ddp.journal.parser import Scalars
from otel_ddp.journal.reader import JournalReader
from otel_ddp.journal.sent import ReceivedJournal, SentJournal

ALL = 1 << 30


class Both:
    """A journal, what is sent of it, and what has come."""

    def __init__(self, folder: Path) -> None:
        self.rank = WrittenRank(folder)
        self.reader = JournalReader(self.rank.writer.path)
        self.logged = 0
        self.sent = self.sent_from(self.reader.bookmark())
        self.received = ReceivedJournal("a.journal", self.sent.head(), 0)

    def sent_from(self, mark: tuple[int, int, int]) -> SentJournal:
        """As an agent sends it that has read it from there."""
        made = SentJournal(self.reader, mark)
        made.sends_values = True
        return made

    def log(self, count: int) -> None:
        for _ in range(count):
            self.logged += 1
            self.rank.log({"loss": float(self.logged)}, self.logged)
        self.reader.read()

    def come(self) -> list[int]:
        """The steps of all that is sent next."""
        assert self.received.add(self.sent.records(ALL), self.sent.lost)
        new = self.received.read()
        return [each.step or 0 for each in new if isinstance(each, Scalars)]

    def close(self) -> None:
        self.sent.close()
        self.reader.close()
        self.rank.close()


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Both]:
    made = Both(tmp_path)
    yield made
    made.close()


def test_what_is_overwritten_when_the_lead_asks_for_it_is_counted(both: Both) -> None:
    both.log(10)
    both.come()
    both.log(10)
    # It gets lost on the way.
    both.sent.records(ALL)
    both.log(2000)

    both.sent.go_back(1, both.received.position)

    found = both.come()
    assert found == [*range(2021 - len(found), 2021)]
    assert both.received.lost == 2010 - len(found)


@pytest.mark.parametrize(
    ("before", "after", "overwritten"), [(10, 10, False), (700, 900, True), (10, 2000, True)]
)
def test_the_next_agent_of_the_node_sends_what_the_last_one_has_lost(
    both: Both, before: int, after: int, overwritten: bool
) -> None:
    both.log(10)
    both.come()
    both.log(before)
    both.sent.close()
    both.sent = both.sent_from(both.reader.bookmark())
    both.log(after)

    both.sent.go_back(1, both.received.position)

    found = both.come()
    assert found == [*range(both.logged + 1 - len(found), both.logged + 1)]
    assert (found[0] > 11) == overwritten
    assert both.received.lost == found[0] - 11


def test_what_was_lost_under_two_agents_of_a_node_is_counted(both: Both) -> None:
    both.log(2000)
    first = both.come()
    both.sent.close()
    both.log(10)
    both.sent = both.sent_from(both.reader.bookmark())
    both.log(2000)
    assert not both.received.add(both.sent.records(ALL), both.sent.lost)

    both.sent.go_back(1, both.received.position)

    assert both.received.lost == 2000 - len(first)
    second = both.come()
    assert both.received.lost == 4010 - len(first) - len(second)


def test_what_the_lead_has_is_not_lost_though_the_next_agent_finds_it_overwritten(
    both: Both,
) -> None:
    stored = both.reader.bookmark()
    both.log(700)
    both.come()
    both.sent.close()
    both.sent = both.sent_from(stored)
    both.log(600)

    assert both.come() == [*range(701, 1301)]
    assert both.sent.lost > 0
    assert both.received.lost == 0


def test_checkpoints_are_the_only_spans_that_are_sent(both: Both) -> None:
    for name in (b"checkpoint", b"load"):
        both.rank.writer.append(layout.SPAN, b'{"name": "%s", "start": 1, "end": 2}' % name)
    both.log(1)
    assert both.received.add(both.sent.records(ALL), 0)

    assert [getattr(each, "kind", 0) for each in both.received.read()] == [layout.SPAN, 0]
