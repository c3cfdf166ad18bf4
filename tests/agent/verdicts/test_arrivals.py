"""Ranks are asked how long collectives took: how often, and what is made of the answers."""

from __future__ import annotations

import base64
import json
import os
import pickle
import random
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fed import ReadRank
from make import step_facts
from otel_ddp.agent.reading.process import Process
from otel_ddp.agent.reading.steps import Step
from otel_ddp.agent.verdicts.arrivals import Arrivals
from otel_ddp.agent.verdicts.observe import ExitCauses
from otel_ddp.diagnosis.detector import Observation
from otel_ddp.diagnosis.step_facts import StepFacts, batches_of
from otel_ddp.diagnosis.verdict import Change, Labels
from otel_ddp.journal import layout

MS = 1_000_000
RING = 400


class Rank(ReadRank):
    """A journal with steps in it, and a process that answers when the test lets it."""

    def __init__(self, folder: Path, rank: int, causes: ExitCauses) -> None:
        super().__init__(folder, rank, causes=causes, world_size=None)
        self.ask = self.writer.path.with_suffix(layout.ASK_SUFFIX)
        os.mkfifo(self.ask)
        self.fd = os.open(self.ask, os.O_RDWR | os.O_NONBLOCK)
        self.entries: list[dict[str, Any]] = []

    def arrive(self, after_ms: float, took_ms: float) -> None:
        """When in its next step it arrives at a collective, and how long that takes its device."""
        reader = self.process.reader
        self.entries.append(
            {
                "process_group": ("0", "default_pg"),
                "collective_seq_id": len(self.entries) + 1,
                "profiling_name": "nccl:all_gather",
                # On this node the clock was set by an hour since the journal began.
                "time_created_ns": reader.created_ns + self.at_ns + int(after_ms * MS) + HOUR_NS,
                "duration_ms": took_ms,
            }
        )

    def new_steps(self) -> list[Step]:
        self.process.poll(self.process.reader.created_ns, True)
        return self.process.new.steps

    def asked(self) -> int | None:
        """The last question without an answer."""
        try:
            words = os.read(self.fd, 65536).split()
        except BlockingIOError:
            return None
        assert words[-1] == b"when"
        return int(words[-2])

    def packed(self) -> str:
        content = pickle.dumps({"entries": self.entries[-RING:]}, protocol=2)
        return base64.b64encode(zlib.compress(content)).decode()

    def answer(self, question: int, **arrivals: Any) -> None:
        reader = self.process.reader
        fields = {
            "question": question,
            "kind": "where",
            "groups": [{"name": "0", "size": 2}],
            "time_ns": reader.created_ns + HOUR_NS,
            "monotonic_ns": reader.created_monotonic_ns,
            "arrivals": arrivals,
        }
        self.writer.path.with_suffix(layout.ANSWER_SUFFIX).write_text(json.dumps(fields))

    def close(self) -> None:
        os.close(self.fd)
        super().close()


HOUR_NS = 3600 * 1_000_000_000


class Bench:
    """Two ranks that wait for each other in forward, unseen by hooks; and the agent's part."""

    def __init__(self, folder: Path) -> None:
        causes = ExitCauses()
        self.ranks = []
        for number in range(2):
            self.ranks.append(Rank(folder / f"{number}", number, causes))
        # Both begin at one moment, in a journal that one of them has had for longer.
        began_ns = [rank.process.reader.created_monotonic_ns for rank in self.ranks]
        for rank, own_ns in zip(self.ranks, began_ns, strict=True):
            rank.at_ns = max(began_ns) - own_ns
        self.arrivals = Arrivals(self.source)
        self.now_s = 1000.0
        self.random = random.Random(1)
        for rank in self.ranks:
            rank.new_steps()
        self.sources = [rank.process for rank in self.ranks]
        causes.close()
        self.feed()

    def source(self, labels: Labels) -> Process | None:
        return next((each for each in self.sources if each.labels == labels), None)

    def feed(self, facts: Sequence[list[StepFacts]] = ((), ()), **known: Any) -> None:
        """Steps of the ranks, of which so much is known."""
        known = {"waits_known": False, "under_nccl": True, "device_clock": True} | known
        for rank, source, mine in zip(self.ranks, self.sources, facts, strict=True):
            seen = Observation(batches=batches_of(rank.new_steps()), facts=mine)
            self.arrivals.feed(source.state()._replace(**known), seen)

    def train(self, steps: int, late_ms: float) -> None:
        facts: list[list[StepFacts]] = [[], []]
        for _ in range(steps):
            # No two steps take equally long.
            own = [20.0 + late + self.random.gauss(0, 1) for late in (0.0, late_ms)]
            phases_ms = {"data": 10.0, "forward": max(own) + 5, "backward": 30.0}
            for rank, mine, found in zip(self.ranks, own, facts, strict=True):
                rank.arrive(10.5, took_ms=2 + max(own) - mine)
                rank.step(phases_ms)
                found.append(step_facts(rank.number, rank.at_ns, phases_ms))
        self.feed(facts)

    def poll(self, later_s: float = 1.0, quiet: bool = True) -> list[Change]:
        self.now_s += later_s
        return self.arrivals.poll(int(self.now_s * 1e9), quiet)

    def asked(self) -> list[int | None]:
        return [rank.asked() for rank in self.ranks]

    def pause_s(self, **answer: Any) -> float:
        """Until they are asked, and answer; how long that was."""
        began_s = self.now_s
        while None in (questions := self.asked()):
            assert questions == [None, None]
            self.poll()
            assert self.now_s < began_s + 3600
        took_s = self.now_s - began_s
        for rank, question in zip(self.ranks, questions, strict=True):
            assert question is not None
            rank.answer(question, **({"in_s": 1.0, "packed": rank.packed()} | answer))
        return took_s

    def sample(self, late_ms: float) -> list[Change]:
        self.train(60, late_ms)
        self.pause_s()
        return self.poll()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    for rank in made.ranks:
        rank.close()


def test_a_late_rank_is_named_after_several_samples_and_let_go_when_it_is_not(bench: Bench) -> None:
    reported = [bench.sample(late_ms=30) for _ in range(4)]

    assert (reported[0], reported[2:]) == ([], [[], []])
    (change,) = reported[1]
    verdict = change.verdict
    rank = dict(verdict.labels)["rank"]
    assert (verdict.kind, rank, verdict.phase) == ("straggler", "1", "compute")
    assert verdict.evidence["told_by"] == "arrivals at collectives"
    report = bench.arrivals.report()
    assert report.insufficient == ""
    assert report.ranks[1].excess["all"] == pytest.approx(30 / 97, rel=0.1)

    over = [change for _ in range(5) for change in bench.sample(late_ms=0)]
    assert [(each.verdict.kind, each.opened) for each in over] == [("straggler", False)]


def test_lost_time_includes_the_steps_in_between(bench: Bench) -> None:
    for _ in range(4):
        bench.train(60, late_ms=30)
        bench.pause_s(in_s=20.0)
        bench.poll()

    lost_s = bench.arrivals.report().ranks[1].lost_s

    # 60 steps of 0.095 s were looked at in each pause of 22 s; of the first ones 20 do not count.
    seen_s = 220 * 0.03
    assert lost_s == pytest.approx(seen_s * 23 / 5.7, rel=0.15)
    (verdict,) = bench.arrivals.present()
    assert verdict.evidence["lost_s"] == pytest.approx(lost_s, abs=0.001)


def test_until_there_is_enough_the_report_says_what_is_missing(bench: Bench) -> None:
    bench.train(60, 0)
    unknown = "insufficient data: waiting for other ranks cannot be told from work on rank 0, 1; "
    assert bench.arrivals.report().insufficient == (
        f"{unknown}the ranks have not been asked yet when they arrive at their collectives"
    )

    bench.sample(0)

    fields = bench.arrivals.report().insufficient
    assert fields == f"{unknown}40 of the first 90 steps to compare"


def test_ranks_are_asked_again_when_they_say_so(bench: Bench) -> None:
    bench.train(60, 0)
    # At once: then there is least to write down.
    assert bench.pause_s(in_s=40.0, packed=bench.ranks[0].packed()) == pytest.approx(1)
    bench.poll()
    bench.train(2, 0)

    # A tenth more than they say; also where one is not ready, and has no sample.
    assert bench.pause_s(in_s=50.0, packed=None) == pytest.approx(44, abs=1)
    bench.poll()
    assert bench.pause_s() == pytest.approx(55, abs=1)


def test_no_rank_is_asked_while_a_stall_is_suspected(bench: Bench) -> None:
    bench.train(60, 0)
    bench.poll(later_s=10, quiet=False)
    assert bench.asked() == [None, None]
    bench.poll()
    assert None not in bench.asked()


@pytest.mark.parametrize("known", [{"waits_known": True}, {"under_nccl": False}])
def test_no_rank_is_asked_where_waits_are_known_or_hosts_wait(
    bench: Bench, known: dict[str, bool]
) -> None:
    bench.train(60, 0)
    bench.feed(**known)
    bench.poll()
    bench.poll(later_s=100)

    assert bench.asked() == [None, None]
    assert not bench.arrivals.wanted


def test_no_step_is_kept_where_waits_are_known(bench: Bench) -> None:
    bench.train(60, 0)
    assert all(each.steps for each in bench.arrivals._ranks.values())

    bench.feed(waits_known=True)
    bench.poll()
    bench.feed(waits_known=True)

    assert not any(each.steps for each in bench.arrivals._ranks.values())


def test_a_rank_that_does_not_answer_is_not_waited_for(bench: Bench) -> None:
    bench.train(60, 0)
    bench.poll()
    bench.poll(later_s=10)
    first = bench.asked()
    assert None not in first

    bench.poll(later_s=11)
    bench.poll(later_s=70)

    again = bench.asked()
    assert None not in again
    assert again != first


@pytest.mark.parametrize("why", ["its samples are old", "the rank has ended"])
def test_a_verdict_does_not_outlive_what_it_rests_on(bench: Bench, why: str) -> None:
    for _ in range(4):
        bench.sample(late_ms=30)

    ended = why == "the rank has ended"
    if ended:
        bench.arrivals.forget(bench.ranks[1].process.labels)
    changes = bench.poll(later_s=1 if ended else 21 * 60)

    assert [(each.verdict.kind, each.opened) for each in changes] == [("straggler", False)]
    assert bench.arrivals.wanted is not ended
    assert ended or "have not been asked yet" in bench.arrivals.report().insufficient


class Evil:
    """What would run if it were unpacked as Python unpacks."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


def packed(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content)).decode()


@pytest.mark.parametrize(
    "answer",
    [
        {"packed": packed(pickle.dumps(Evil()))},
        {"packed": packed(pickle.dumps({"entries": [{"process_group": 3}]}))},
        {"packed": None},
        {"packed": base64.b64encode(b"no").decode()},
        {"in_s": "soon"},
        {},
    ],
)
def test_what_is_no_answer_is_no_sample_and_runs_nothing(
    bench: Bench, answer: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bench.train(60, 30)
    bench.pause_s(**answer)

    assert bench.poll() == []
    assert bench.arrivals.report().insufficient
    assert not (tmp_path / "evil").exists()
