"""Which agent leads a run, by its processes on one node; and what a lead keeps of the others."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fed import ReadRank
from otel_ddp.agent.link import link_pb2 as wire
from otel_ddp.agent.link.following import Outflow
from otel_ddp.agent.link.leading import Leading
from otel_ddp.agent.link.links import Links, wanted_by
from otel_ddp.agent.link.server import LinkServer
from otel_ddp.agent.reading.process import Process
from otel_ddp.diagnosis.verdict import Labels
from otel_ddp.identity import lead
from otel_ddp.journal import layout

NAMED = lead.propose(["node-0"]).as_json()
RUN: Labels = (("group", "g"), ("run", "r"))

Made = Callable[..., Process]


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Made]:
    """Makes a process of this rank and world, alive or not, and maybe with a lead."""
    written: list[Any] = []

    def make(rank: int, world_size: int, *, alive: bool = True, named: Any = NAMED) -> Process:
        folder = tmp_path / str(len(written))
        made = ReadRank(folder, rank, "node-0", world_size=world_size)
        written.append(made)
        made.writer.document(layout.FACTS, {lead.FACT: named} if named else {})
        made.alive = alive
        made.poll()
        return made.process

    yield make
    for each in written:
        each.close()


def test_the_node_of_rank_0_leads_also_after_a_larger_attempt_and_when_that_rank_ends_first(
    process: Made,
) -> None:
    before = [process(rank, 6, alive=False) for rank in (2, 3)]
    now = [process(rank, 4) for rank in (0, 1)]
    ended_first = [process(1, 4), process(0, 4, alive=False)]

    for ranks in ([*before, *now], ended_first):
        wanted = wanted_by(ranks)

        assert (wanted.leads, wanted.world_size) == (True, 4)


def test_an_attempt_on_one_node_has_no_lead_whatever_the_last_one_had(process: Made) -> None:
    before = [process(rank, 4, alive=False) for rank in (0, 1)]
    now = [process(rank, 2, named=None) for rank in (0, 1)]

    assert wanted_by(before) is not None
    assert wanted_by([*before, *now]) is None


class Kept:
    """What an agent keeps in histories, as `Links` sees it."""

    keeps = True

    def readings(self, run: tuple[str, str], lead: str) -> None: ...

    def positions(self, run: tuple[str, str]) -> dict[str, int]:
        return {}


class Later:
    """The clock, so many seconds later."""

    s = 0.0

    def __call__(self) -> int:
        return time.monotonic_ns() + int(self.s * 1e9)


@pytest.fixture
def clock() -> Later:
    return Later()


@pytest.fixture
def links(clock: Later) -> Iterator[Links]:
    kept: Any = Kept()
    made = Links("node-0", kept, clock)
    yield made
    made.stop()


def test_a_link_stays_for_a_minute_after_the_journals_are_gone(
    process: Made, links: Links, clock: Later
) -> None:
    links.poll([process(2, 4)])
    # Their ends may be known later.
    links.poll([])
    assert len(links.describe()) == 1

    clock.s += 61
    links.poll([])
    assert links.describe() == []


def test_a_run_that_goes_on_elsewhere_is_led_on_while_its_other_nodes_are_heard(
    process: Made, links: Links, clock: Later, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, reports = process(2, 4), [True]
    monkeypatch.setattr(LinkServer, "take", lambda _: [report(other, "node-1")] if reports else [])
    links.poll([process(0, 4)])
    for _ in range(4):
        clock.s += 50
        links.poll([])
    assert len(links.describe()) == 1
    assert links.running_remotely() == {RUN}

    reports.clear()
    for _ in range(20):
        clock.s += 5
        links.poll([])
    # A cut cable may be mended, and bring the rest.
    assert len(links.describe()) == 1
    assert links.running_remotely() == set()
    clock.s += 600
    links.poll([])
    assert links.describe() == []
    assert links.running_remotely() == set()


@pytest.mark.parametrize("rank", [0, 2])
def test_a_link_stays_for_ten_minutes_while_the_lead_lacks_the_ends(
    process: Made, links: Links, clock: Later, rank: int
) -> None:
    ended = process(rank, 4, alive=False)
    links.poll([ended])

    # The cable is cut.
    clock.s += 300
    links.poll([ended])
    assert len(links.describe()) == 1

    clock.s += 301
    links.poll([ended])
    assert links.describe() == []


@pytest.mark.parametrize(("ago_s", "links_of"), [(10, 1), (70, 0)])
def test_an_agent_that_starts_after_the_end_of_a_run_still_tells_it(
    process: Made, links: Links, clock: Later, ago_s: int, links_of: int
) -> None:
    ended = process(2, 4, alive=False)
    clock.s += ago_s

    links.poll([ended])

    assert len(links.describe()) == links_of


@pytest.mark.parametrize("drawn", ["once", "anew"])
def test_a_lead_stays_one_when_rank_0_has_gone_until_another_secret_is_drawn(
    process: Made, links: Links, drawn: str
) -> None:
    links.poll([process(0, 4), process(1, 4)])
    named = NAMED if drawn == "once" else lead.propose(["node-1"]).as_json()
    links.poll([process(1, 4, named=named)])

    (told,) = links.describe()
    assert ("this agent leads the run" in told["sentence"]) is (drawn == "once")


@pytest.mark.parametrize(
    ("world_size", "named", "known", "why"),
    [
        (4, None, 2, "they name no lead (no process group yet, or OTEL_DDP_LEAD=off)"),
        (10_241, NAMED, 1, "one agent compares 10240 at most"),
    ],
)
def test_ranks_that_have_no_lead_are_compared_alone_and_status_says_so(
    process: Made, links: Links, world_size: int, named: Any, known: int, why: str
) -> None:
    ranks = [process(rank, world_size, named=named) for rank in range(known)]

    links.poll(ranks)
    (told,) = links.describe()
    said = f"{known} of {world_size} ranks are known here and compared with each other alone: {why}"
    assert told["sentence"] == said

    if named is None:
        links.poll([*ranks, *(process(rank, world_size, named=None) for rank in (2, 3))])
        assert links.describe() == []


@pytest.mark.parametrize(("world_size", "is_whole"), [(512, True), (513, False)])
def test_of_a_larger_run_each_agent_writes_the_history_of_its_own_ranks(
    process: Made, links: Links, monkeypatch: pytest.MonkeyPatch, world_size: int, is_whole: bool
) -> None:
    other = process(1, world_size)
    monkeypatch.setattr(LinkServer, "take", lambda _: [report(other, "node-1")])
    links.poll([process(0, world_size)])
    kept = [each.is_kept for each in links.sources()]

    assert kept == [is_whole]


# -- what a lead takes from other nodes


class Wire:
    """The lead's end, as `Leading` sees it."""

    state = "listens"

    def __init__(self) -> None:
        self.refused: dict[str, int] = {}
        self.reports: list[tuple[str, Any]] = []

    def take(self) -> list[tuple[str, Any]]:
        found, self.reports = self.reports, []
        return found


@pytest.fixture
def end() -> Wire:
    return Wire()


def report(process: Process, node: str) -> tuple[str, Any]:
    """A report of this node with this process."""
    made = wire.Report(clock_offset_ns=time.time_ns() - time.monotonic_ns())
    outflow = Outflow(1, process, is_kept=False)
    outflow.write(made.processes.add(), time.monotonic_ns(), 1 << 20)
    outflow.journal.close()
    made.processes[0].known = json.dumps({"node": node}).encode()
    return node, made


@pytest.mark.parametrize(("run", "node"), [("r", "node-0"), ("another", "node-1")])
def test_processes_of_the_lead_itself_or_of_another_run_are_not_taken_from_others(
    process: Made, end: Any, run: str, node: str
) -> None:
    led = Leading((("group", "g"), ("run", run)), "node-0", end, None)
    _, made = report(process(0, 4), node)
    end.reports.append(("node-1", made))
    led.poll([], 1)

    assert list(led.sources()) == []


def test_what_the_lead_refuses_is_told_by_its_reason(end: Any) -> None:
    led = Leading(RUN, "node-0", end, None)
    assert "refused" not in led.describe()

    end.refused = {"another version": 2, "no name": 1}

    assert led.describe().endswith(
        "; refused links of other nodes: another version (2), no name (1)"
    )
