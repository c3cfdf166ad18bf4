"""The agent that leads a run writes the history of all its ranks, whatever becomes of the link."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agent.link.two_agents import RUN, Agent, TwoAgents
from histories import kept_steps
from otel_ddp.agent.history.histories import Collector, Histories
from otel_ddp.agent.history.kept_run import Sample
from otel_ddp.agent.link.following import Following
from otel_ddp.agent.link.leading import Leading
from otel_ddp.agent.link.messages import Senseless, pack_readings, unpack_readings
from otel_ddp.history.directory import file_name, find_run
from otel_ddp.history.goodput import goodput_of
from otel_ddp.history.reader import History
from otel_ddp.history.tables import SeriesKey
from otel_ddp.history.whole_run import WholeRun
from otel_ddp.journal import layout
from otel_ddp.settings import MIB
from otel_ddp.vocabulary import catalog

KEY = ("g", "r")
S = 10**9


class Kept:
    """What the agent of a node keeps of the run."""

    def __init__(self, folder: Path, agent: Agent, node: str) -> None:
        self.agent, self.node = agent, node
        self.histories = Histories(str(folder), 100 * MIB, node)
        self.collector = Collector(self.histories, agent.ledger, node)

    @property
    def path(self) -> Path:
        return self.histories.directory / file_name(*KEY, self.node)

    def feed(self, fresh: list[Any], elsewhere: list[Any]) -> None:
        here = [each.process for each in self.agent.seen]
        self.collector.feed([*here, *fresh])
        with self.agent.ledger.lock:
            self.collector.feed_states([*here, *elsewhere], self.agent.judge.verdicts())

    def close(self) -> None:
        """Write nothing more."""
        for run, _ in self.histories._runs.values():
            run.close()

    def steps(self) -> dict[str, int]:
        """How many steps of each rank are kept."""
        with History(self.path) as history:
            series = history.step_series
            return {
                r: sum(e.steps for e in kept_steps(history, each)) for r, each in series.items()
            }

    def values(self) -> dict[str, int]:
        """How many values of each rank are kept."""
        with History(self.path) as history:
            return {
                each.key.rank: sum(bucket.finite for bucket in history.sums(each))
                for each in history.series("value", "loss")
            }

    def about(self) -> dict[str, Any]:
        with History(self.path) as history:
            return history.about


class KeptAgents(TwoAgents):
    """As they are, with their histories; values are logged, and each poll is written."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folders = [folder / "h", folder / "h1"]
        self.writes = True
        self.keep()
        self.start_follower_again()

    def keep(self) -> None:
        """Agents that begin, as far as their histories and the lead's end of the link go."""
        agents = zip(self._folders, (self.lead, self.led), ("node-0", "node-1"), strict=True)
        self.kept = [Kept(folder, agent, node) for folder, agent, node in agents]
        self.leading = Leading(RUN, "node-0", self.leading._server, self.kept[0].collector)

    def start_lead_again(self) -> None:
        """After a kill: what it had not written is gone. It measures the clocks anew."""
        self.cable.clock_offset_ns += 5_000_000
        for each in self.kept:
            each.close()
        self.keep()

    def start_follower_again(self) -> None:
        super().start_follower_again()
        asked = partial(self.kept[1].collector.readings, KEY)
        self.following.stop()
        self.following = Following(RUN, self._led_end, 0, asked)

    def train(self, steps: int, late: int = -1) -> None:
        for _ in range(steps):
            self._number += 1
            for each in [*self.lead.ranks, *self.led.ranks]:
                each.step({"forward": 20.0, "comm_wait": 20.0}, self._number)
                each.log({"loss": 1.0 / self._number}, self._number)
            if self._number % 25 == 0:
                self.poll()

    def poll_once(self) -> None:
        super().poll_once()
        lead, led = self.kept
        lead.feed([*self.leading.fresh()], [*self.leading.sources()])
        led.feed([], [])
        if self.writes:
            for each in self.kept:
                each.histories._write_all()

    def settle(self) -> None:
        """Let all come that is on the way."""
        self.poll(4)

    def close(self) -> None:
        super().close()
        for each in self.kept:
            each.histories.stop()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("otel_ddp.agent.history.histories._WRITE_SELDOM_S", 0.0)


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[KeptAgents]:
    made = KeptAgents(tmp_path)
    yield made
    made.close()


def all_ranks(count: int) -> dict[str, int]:
    return dict.fromkeys("0123", count)


def test_the_lead_has_one_file_with_all_ranks_and_the_other_node_one_of_its_own(
    agents: KeptAgents,
) -> None:
    saved = {"name": "checkpoint", "start": S, "end": 2 * S, "id": "a", "trace": "b"}
    agents.led.ranks[0].writer.append(layout.SPAN, json.dumps(saved).encode())
    line = {"time": time.time_ns(), "name": "", "body": "a line of rank 3", "step": 1}
    agents.led.ranks[1].writer.append(layout.EVENT, json.dumps(line).encode())
    agents.train(100)
    agents.settle()

    lead, led = agents.kept
    assert (lead.steps(), lead.values()) == (all_ranks(100), all_ranks(100))
    assert (led.steps(), led.values()) == (dict.fromkeys("23", 100), dict.fromkeys("23", 100))
    with find_run("r", lead.histories.directory) as run:
        assert (len(run.histories), run.nodes, run.look) == (1, ["node-0", "node-1"], "")
        assert {rank: each["node"] for rank, each in run.ranks.items()} == {
            **dict.fromkeys("01", "node-0"),
            **dict.fromkeys("23", "node-1"),
        }
        bodies = {(each.rank, each.body) for each in run.histories[0].events()}
        assert bodies == {("2", "checkpoint saved in 1.0 s"), ("3", "a line of rank 3")}
        assert set(lead.about()["time"]["nodes"]) == {"node-1"}
        found = goodput_of(run)
        assert found is not None
        assert found["seconds"]["productive"] == pytest.approx(4 * 99 * 0.04, rel=0.01)
    with find_run("r", led.histories.directory) as run:
        assert (run.nodes, run.look) == (["node-1"], "all ranks of this run are shown on node-0")


@pytest.mark.parametrize("written", [0, 100])
def test_a_lead_that_starts_again_doubles_nothing_and_loses_nothing(
    agents: KeptAgents, written: int
) -> None:
    agents.train(written)
    agents.settle()
    # These are with the lead, and not in its file.
    agents.writes = False
    agents.train(75)
    for rank in agents.lead.ranks:
        rank.poll()
    agents.start_lead_again()
    agents.writes = True
    agents.train(100)
    agents.settle()

    lead, _ = agents.kept
    everything = dict.fromkeys("23", written + 175)
    assert {rank: lead.steps()[rank] for rank in "23"} == everything
    assert {rank: lead.values()[rank] for rank in "23"} == everything
    about = lead.about()
    assert about["gaps"] == []
    assert len(about["attempts"]) == 1


def test_an_agent_of_another_node_that_starts_again_doubles_nothing_and_loses_nothing(
    agents: KeptAgents,
) -> None:
    agents.train(100)
    agents.cable.is_cut = True
    agents.train(50)
    agents.cable.reports.clear()
    agents.cable.is_cut = False
    agents.start_follower_again()
    agents.train(100)
    agents.settle()

    lead, _ = agents.kept
    assert (lead.steps(), lead.values()) == (all_ranks(250), all_ranks(250))
    assert lead.about()["gaps"] == []


def test_what_an_attempt_did_while_the_link_was_cut_comes_to_the_lead_of_the_next_one(
    agents: KeptAgents, tmp_path: Path
) -> None:
    agents.train(50)
    agents.cable.is_connected = False
    agents.train(100)
    agents.start_run_again(tmp_path)
    # Their journals are exported, and deleted.
    for each in set(agents.led.seen) - set(agents.led.ranks):
        each.close()
    agents.led.seen = [*agents.led.ranks]
    agents.poll(60)
    asked = partial(agents.kept[1].collector.readings, KEY)
    before, agents.following = agents.following, Following(RUN, agents._led_end, 0, asked)
    agents.following.take_over(before)
    agents.leading = Leading(RUN, "node-0", agents.leading._server, agents.kept[0].collector)
    agents.cable.is_connected = True
    agents.settle()

    lead, _ = agents.kept
    assert lead.values() == all_ranks(150)
    assert lead.about()["gaps"] == []


def test_what_was_overwritten_before_the_lead_had_it_is_a_gap_there(agents: KeptAgents) -> None:
    agents.train(50)
    agents.cable.is_connected = False
    agents.train(1500)
    agents.cable.is_connected = True
    agents.train(25)
    agents.settle()

    lead, led = agents.kept
    said = "records of other nodes were overwritten before they came"
    assert said in agents.leading.describe()
    assert 100 < lead.values()["2"] < 1575
    assert led.values()["2"] == 1575
    whys = {gap["why"] for gap in lead.about()["gaps"]}
    assert whys == {f"records of rank {r} were overwritten before they were read" for r in "23"}
    assert led.about()["gaps"] == []


def test_what_was_overwritten_before_the_lead_started_again_is_counted_and_timed(
    agents: KeptAgents,
) -> None:
    agents.train(50)
    agents.settle()
    agents.cable.is_connected = False
    agents.start_lead_again()
    agents.train(1500)
    agents.cable.is_connected = True
    agents.train(25)
    agents.settle()

    lead, _ = agents.kept
    missing = {rank: 1575 - lead.values()[rank] for rank in "23"}
    assert 0 < missing["2"] < 1500
    counted = {dict(each.labels)["rank"]: each.reader.lost for each in agents.leading.sources()}
    assert all(counted[rank] >= count for rank, count in missing.items())
    with History(lead.path) as history:
        assert len(history.about["gaps"]) == 2
        for gap in history.about["gaps"]:
            steps = kept_steps(history, history.step_series[gap["why"].split()[3]])
            pairs = pairwise(steps)
            holes = [(a.last_ns, b.first_ns) for a, b in pairs if b.first > a.until + 1]
            assert holes == [(gap["since_ns"], gap["until_ns"])]


def test_times_of_another_node_are_the_leads(
    agents: KeptAgents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hour_ns, now_ns = 3600 * S, time.time_ns
    for rank in agents.led.ranks:
        rank.close()
    with monkeypatch.context() as set_back:
        set_back.setattr(time, "time_ns", lambda: now_ns() - hour_ns)
        agents.led = Agent(tmp_path / "set back", 1)
        agents.keep()
        agents.start_follower_again()
        for rank in agents.led.ranks:
            line = {"time": time.time_ns(), "name": "", "body": "a line", "step": 1}
            rank.writer.append(layout.EVENT, json.dumps(line).encode())
            rank.log({"loss": 1.0}, 1)
    agents.train(50)
    agents.settle()

    with History(agents.kept[0].path) as history:
        times = [event.time_ns for event in history.events()]
        times += [history.sums(each)[0].first_ns for each in history.series("value", "loss")]
        times += [each["started_ns"] for each in history.ranks.values()]
    assert len(times) == 2 + 4 + 4
    assert all(abs(each - now_ns()) < 600 * S for each in times)


def test_samples_of_each_node_are_in_the_file_of_the_lead(agents: KeptAgents) -> None:
    of_host = (("group", ""), ("run", ""), ("job_type", ""))
    for number, agent in enumerate((agents.lead, agents.led)):
        labels = (*of_host, ("node", f"node-{number}"), ("rank", ""), ("local_rank", ""))
        with agent.ledger.lock:
            agent.ledger.put(catalog.SYSTEM_MEMORY_USAGE, labels, 100.0 + number, time.time_ns(), 1)
    agents.train(300)
    agents.settle()

    with WholeRun([History(agents.kept[0].path)]) as run:
        found = {
            dict(series.key.labels)["node"]: history.sums(series)
            for history, series in run.series("node")
        }
        last = {node: [each.last for each in sums] for node, sums in found.items()}
        assert last == {"node-0": [100.0], "node-1": [101.0]}
        # By the lead's clock.
        assert all(abs(sums[0].last_ns - time.time_ns()) < 600 * S for sums in found.values())


def test_another_node_does_not_speak_for_a_rank_that_is_at_work_here(
    agents: KeptAgents, tmp_path: Path
) -> None:
    agents.led.ranks[0].close()
    other, claims = Agent(tmp_path / "claims", 0, node="node-1").ranks
    other.close()
    agents.led.ranks[0] = agents.led.seen[0] = claims
    agents.train(50)
    agents.settle()

    assert agents.kept[0].steps() == {"0": 50, "1": 50, "3": 50}


GOOD = ["node", "hw.power", "3", [["hw.id", "GPU-0"]], 7 * S, 0.5]


@pytest.mark.parametrize(
    "bad",
    [
        ["value", *GOOD[1:]],
        ["node", "x" * 2000, *GOOD[2:]],
        [*GOOD[:3], [["a", 7]], *GOOD[4:]],
        [*GOOD[:3], {"a": "b"}, *GOOD[4:]],
        [*GOOD[:4], 2**62, 0.5],
        [*GOOD[:5], "nan"],
        [*GOOD[:5], 10**400],
        GOOD[:5],
    ],
)
def test_samples_without_sense_are_refused(bad: list[Any]) -> None:
    def content(row: list[Any]) -> bytes:
        return json.dumps({"samples": [row]}).encode()

    key = SeriesKey("node", "hw.power", "3", (("hw.id", "GPU-0"), ("node", "node-1")))
    assert unpack_readings(content(GOOD), "node-1", S) == [Sample(None, key, 8 * S, 0.5)]
    with pytest.raises(Senseless):
        unpack_readings(content(bad), "node-1", S)


def test_a_sample_is_of_the_node_that_sends_it_whatever_it_says() -> None:
    key = SeriesKey("node", "hw.power", "", (("node", "node-0"),))

    content = pack_readings([Sample(None, key, time.time_ns(), 1.0)])

    [sample] = unpack_readings(content, "node-1", time.time_ns() - time.monotonic_ns())
    assert sample.key.labels == (("node", "node-1"),)
    assert abs(sample.time_ns - time.time_ns()) < 60 * S
