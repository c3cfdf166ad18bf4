"""From journals to verdicts: what is reported, when, how often, and what is left afterwards."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fed import ReadRank
from otel_ddp import errors
from otel_ddp.agent.judge import run_case as run_case_module
from otel_ddp.agent.judge.answers import Answers, Ras
from otel_ddp.agent.judge.judge import Judge
from otel_ddp.agent.judge.observe import ExitCauses
from otel_ddp.agent.judge.reports import Judgement
from otel_ddp.agent.ledger import Ledger
from otel_ddp.diagnosis.stall.evidence import Evidence, Group
from otel_ddp.diagnosis.straggler.finding import RankReport, Report
from otel_ddp.diagnosis.verdict import Labels, run_labels
from otel_ddp.journal import layout
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.words import STATES

FLOOR_S = 60.0


class Rank(ReadRank):
    """One that runs, and whose waits are known."""

    def __init__(self, bench: Bench, number: int, node: str = "node-1", **more: Any) -> None:
        super().__init__(bench.folder / str(len(bench.made)), number, node, bench.causes, **more)
        self.rank = number
        self.writer.document(layout.FACTS, {"capability": {"comm_wait": ""}})
        self.enter("forward")
        self.writer.state(STATES["running"], 0)

    def spend(self, **spent_ms: float) -> None:
        """One more step, of these phases."""
        self.step(spent_ms)


class Bench:
    """A judge, ranks with journals, and a clock that the test moves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger = Ledger()
        self.ledger.keep_history = True
        self.now_ns = time.monotonic_ns()
        self.gpus: list[dict[str, Any]] = []
        self.cores: dict[Labels, float] = {}
        self.judge = Judge(
            *(self.ledger, FLOOR_S, self.folder / "incidents"),
            clock=lambda: self.now_ns,
            gpus=lambda: list(self.gpus),
            cores=lambda: self.cores,
        )
        self.causes = ExitCauses()
        self.led: dict[Labels, Judgement] = {}
        self.ranks: list[Rank] = []
        self.made: list[Rank] = []

    def join(self, *numbers: int, **more: Any) -> None:
        for number in numbers:
            self.made.append(Rank(self, number, **more))
            self.ranks.append(self.made[-1])

    def poll(self, later_s: float = 1.0, times: int = 1) -> None:
        """What the agent's loop does, so much later."""
        for _ in range(times):
            self.now_ns += int(later_s * 1e9)
            for rank in self.ranks:
                rank.poll()
            self.judge.poll([rank.process for rank in self.ranks], self.led)
            with self.ledger.lock:
                self.judge.update_series(time.time_ns())

    def train(
        self,
        steps: int,
        late_ms: float = 0.0,
        ranks: Sequence[Rank] | None = None,
        late: Collection[int] = (1,),
    ) -> None:
        """These ranks in step, of which some may be late in backward."""
        for number in range(steps):
            for rank in self.ranks if ranks is None else ranks:
                own, waits = (late_ms, 1.0) if rank.rank in late else (0.0, 1.0 + late_ms)
                # No two steps take equally long, on no rank.
                jitter = (number * 7 + rank.rank * 3) % 5 / 10
                spent = {"forward": 10.0, "backward": 20.0 + own + jitter, "optimizer": 5.0}
                spent["comm_wait"] = waits + 0.5 - jitter
                rank.spend(**spent)
            if number % 25 == 24:
                self.poll()

    def series(self, metric: catalog.Metric) -> dict[tuple[str, ...], float]:
        """Values by rank and by the attributes of the metric."""
        found = {}
        for row in self.rows(metric):
            fields = dict(row.labels)
            names = ("rank", *metric.attributes)
            found[tuple(fields[name] for name in names if name in fields)] = row.value
        return found

    def rows(self, metric: catalog.Metric) -> list[Any]:
        return list(dict(self.ledger.families()).get(metric, []))

    def reported(self) -> list[tuple[str, str, str]]:
        """Kind, state and severity of what is on its way."""
        found = []
        for _, _, documents in self.judge.flush_documents():
            for each in documents:
                fields, severity = each.content["attributes"], each.content["severity"]
                found.append((fields["verdict"], fields["verdict.state"], severity))
        return found

    def why(self) -> str:
        """Why the ranks of the one run cannot be compared."""
        (lacks,) = self.judge.insufficient()
        assert (lacks["group"], lacks["run"]) == ("g", "r")
        return lacks["why"]

    def open(self) -> list[str]:
        return sorted(each["kind"] for each in self.judge.verdicts())

    def verdict(self, kind: str) -> dict[str, Any]:
        """The one open verdict of this kind."""
        (verdict,) = [each for each in self.judge.verdicts() if each["kind"] == kind]
        return verdict

    def incidents(self) -> dict[str, dict[str, Any]]:
        """The post-mortems, by file."""
        files = sorted((self.folder / "incidents").glob("*.json"))
        return {file.name: json.loads(file.read_text()) for file in files}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    for rank in made.made:
        rank.close()


def of(kind: str, reported: Sequence[tuple[str, str, str]]) -> list[tuple[str, str]]:
    return [each[1:] for each in reported if each[0] == kind]


def test_a_straggler_is_reported_when_it_is_found_and_when_it_is_over(bench: Bench) -> None:
    bench.join(0)
    # Findings about it are exported though its series are not.
    bench.join(1, exported=False)
    bench.poll()
    labels = [rank.process.labels for rank in bench.ranks]
    bench.gpus = [{"index": "7", "labels": dict(labels[1]), "throttled": ["power"]}]
    bench.cores = {labels[0]: 0.0, labels[1]: 0.8}
    bench.train(150, late_ms=30)
    first = bench.reported()
    opened = bench.verdict("straggler")
    standing = bench.series(catalog.TRAINING_STRAGGLER)
    excess = bench.series(catalog.TRAINING_STRAGGLER_EXCESS)
    bench.train(200, late_ms=30)
    between = bench.reported()
    present = bench.verdict("straggler")
    lost_s = bench.series(catalog.TRAINING_STRAGGLER_LOST_TIME)
    bench.train(300)
    last = bench.reported()

    assert of("straggler", first) == [("opened", "WARN")]
    assert standing == {("0", ""): 0.0, ("1", ""): 0.0, ("1", "backward"): 1.0}
    for where in ("all", "backward"):
        assert excess["1", where] == pytest.approx(30 / 66.5, rel=0.05)
    assert "Its core is taken" in opened["sentence"]
    assert opened["sentence"].endswith("Its GPU 7 is held back (power).")
    # Figures that move are shown, and are no record.
    assert of("straggler", between) == []
    assert present["evidence"]["lost_s"] > opened["evidence"]["lost_s"]
    assert present["since_ns"] == opened["since_ns"]
    # 30 ms a step, which the other rank waits: of 330 steps at the most, and of most of them.
    assert 0.03 * 200 < lost_s["1",] < 0.03 * 331
    assert of("straggler", last) == [("closed", "INFO")]
    assert bench.series(catalog.TRAINING_STRAGGLER)["1", "backward"] == 0.0


def test_a_late_node_has_a_series_and_so_has_each_of_its_ranks(bench: Bench) -> None:
    bench.join(0, 1)
    bench.join(2, 3, node="node-2")
    bench.train(150, late_ms=30, late=(2, 3))
    standing = bench.series(catalog.TRAINING_STRAGGLER)
    of_node = [
        (dict(row.labels)["node"], row.value) for row in bench.rows(catalog.TRAINING_NODE_STRAGGLER)
    ]
    compared = [row.value for row in bench.rows(catalog.TRAINING_COMPARED_RANKS)]
    who = bench.verdict("straggler")["who"]
    bench.train(300)

    assert standing == {
        **{(str(rank), ""): 0.0 for rank in range(4)},
        **{(rank, "backward"): 1.0 for rank in ("2", "3")},
    }
    assert of_node == [("node-2", 1.0)]
    assert (who["node"], who.get("rank")) == ("node-2", None)
    # Each node has how many ranks of all nodes are compared.
    assert compared == [4.0, 4.0]
    assert [each for each, _ in of("straggler", bench.reported())] == ["opened", "closed"]
    assert bench.series(catalog.TRAINING_STRAGGLER)["2", "backward"] == 0.0
    assert bench.rows(catalog.TRAINING_NODE_STRAGGLER)[0].value == 0.0


def test_where_another_agent_judges_now_nothing_of_the_judge_before_it_stays(bench: Bench) -> None:
    bench.join(0, 1)
    bench.train(150, late_ms=30)
    labels = bench.ranks[1].process.labels
    alone_s = bench.series(catalog.TRAINING_STRAGGLER_LOST_TIME)["1",]
    report = Report((RankReport(labels, {"all": 0.0}, 500.0),), insufficient="")
    other = {**bench.verdict("straggler"), "phase": "forward"}
    bench.led[run_labels(labels)] = Judgement("node-0", [other], [], report, compared=2)
    bench.poll()
    led = bench.series(catalog.TRAINING_STRAGGLER)
    led_s = bench.series(catalog.TRAINING_STRAGGLER_LOST_TIME)["1",]
    handed_over = of("straggler", bench.reported())
    bench.led.clear()
    bench.poll()
    anew = bench.series(catalog.TRAINING_STRAGGLER), bench.open(), bench.why()
    bench.train(150, late_ms=30)
    alone = bench.series(catalog.TRAINING_STRAGGLER)

    assert (led["1", "backward"], led["1", "forward"]) == (0.0, 1.0)
    assert handed_over == [("opened", "WARN"), ("closed", "INFO")]
    # Each judge counts from its own beginning, and the counter only grows.
    assert led_s == alone_s > 0
    assert anew[0] == {("1", "backward"): 0.0, ("1", "forward"): 0.0}
    assert (anew[1], anew[2][:18]) == ([], "insufficient data:")
    assert (alone["1", "backward"], alone["1", "forward"]) == (1.0, 0.0)
    # The agent that led has told of this rank.
    assert of("straggler", bench.reported()) == []


def test_waits_in_collectives_and_stalls_that_recur_have_series_of_their_own(bench: Bench) -> None:
    bench.join(0, 1)
    bench.poll()
    labels = bench.ranks[1].process.labels
    recurring = {"kind": "recurring", "who": dict(labels), "phase": "data", "evidence": {}}
    waits_s = {("tp", "all_reduce"): 0.012, ("pp", "recv"): 0.0}
    # As where each stage of a pipeline has one rank.
    report = Report((RankReport(labels, {}, 0.0, None, waits_s),), insufficient="no rank is alike")
    bench.led[run_labels(labels)] = Judgement("node-0", [recurring], [], report, compared=0)
    bench.poll()
    known = bench.series(catalog.TRAINING_COLLECTIVE_STEP_WAIT)
    stalls = bench.series(catalog.TRAINING_RECURRING_STALL)
    bench.led.clear()
    bench.poll()

    assert known == {("1", "tp", "all_reduce"): 0.012, ("1", "pp", "recv"): 0.0}
    assert stalls == {("1", "data"): 1.0}
    assert bench.series(catalog.TRAINING_COLLECTIVE_STEP_WAIT) == {}


def test_facts_about_own_collectives_reach_the_detectors(bench: Bench) -> None:
    bench.join(0, 1)
    bench.ranks[0].writer.document(layout.FACTS, {"own_collectives": ["backward", "no phase", 7]})
    bench.train(150, late_ms=30)

    assert bench.series(catalog.TRAINING_OWN_COLLECTIVES) == {("0", "backward"): 1.0}
    # A phase in which the user's own program waits for others is not compared.
    assert ("1", "backward") not in bench.series(catalog.TRAINING_STRAGGLER_EXCESS)
    assert bench.open() == []


@pytest.mark.parametrize(("left", "ended"), [(1, "rank 0"), (0, "the run")])
def test_a_verdict_that_ends_with_its_rank_is_not_reported_as_solved(
    bench: Bench, caplog: pytest.LogCaptureFixture, left: int, ended: str
) -> None:
    bench.join(0, 1)
    bench.train(150, late_ms=30)
    for rank in bench.ranks[: 2 - left]:
        rank.writer.state(STATES["finished"], 1)
    with caplog.at_level("INFO", "otel_ddp.agent"):
        bench.poll()

    begins = f"no longer, as {ended} ended: rank 1 (node-1) keeps the others waiting"
    assert sum(each.startswith(begins) for each in caplog.messages) == 1
    # It is kept, with what it cost.
    (past,) = bench.judge.past()
    lost_s = bench.series(catalog.TRAINING_STRAGGLER_LOST_TIME)["1",]
    assert past["evidence"]["lost_s"] == pytest.approx(lost_s, abs=0.001)
    assert 0 < past["since_ns"] < past["until_ns"]
    assert past["ended_with"] == ended
    assert past["sentence"].endswith(f", which cost the others {lost_s:.3g} s in total")


def test_where_ranks_cannot_be_compared_there_are_no_series(bench: Bench) -> None:
    bench.join(0, 1)
    bench.train(50, late_ms=30)
    assert bench.series(catalog.TRAINING_STRAGGLER) == {}
    assert bench.series(catalog.TRAINING_STRAGGLER_EXCESS) == {}
    assert bench.why().startswith("insufficient data: ")
    bench.train(150, late_ms=30)
    assert bench.series(catalog.TRAINING_STRAGGLER)["1", "backward"] == 1.0
    assert bench.judge.insufficient() == []

    bench.ranks[1].alive = False
    bench.poll()

    # The late rank has ended, and the other one cannot be compared with any.
    assert bench.series(catalog.TRAINING_STRAGGLER) == {("1", "backward"): 0.0}
    assert bench.series(catalog.TRAINING_STRAGGLER_EXCESS) == {}
    assert ("1",) not in bench.series(catalog.TRAINING_STALLED)


def test_what_bounds_a_run_is_no_warning_and_is_over_with_the_run(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.join(0, 1)
    with caplog.at_level("INFO", "otel_ddp.agent"):
        bench.train(400)
    verdict = bench.verdict("bound")
    for rank in bench.ranks:
        rank.writer.state(STATES["finished"], 1)
    bench.poll()

    assert [(each.levelname, each.message[:13]) for each in caplog.records] == [
        ("INFO", "compute-bound")
    ]
    assert bench.reported() == [("bound", "opened", "INFO"), ("bound", "closed", "INFO")]
    assert bench.open() == []
    # Its history tells when it was over, and the status has troubles alone.
    (past,) = bench.judge.past_bounds()
    assert past["since_ns"] == verdict["since_ns"] < past["until_ns"]
    assert bench.judge.past() == []


def test_a_death_is_reported_at_once_looked_at_again_and_over_when_the_run_is_started_anew(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.gpus = gpus = [{"index": "3", "labels": {"rank": "1"}}]
    bench.join(0, 1)
    bench.train(25)
    bench.ranks[1].alive = False
    bench.poll(later_s=0.01)

    assert of("death", bench.reported()) == [("opened", "ERROR")]
    ((file, fields),) = bench.incidents().items()
    assert {each["rank"] for each in fields["processes"]} == {0, 1}

    # It has left its device when it is thought of again.
    bench.gpus = [{"index": "3", "labels": {}}]
    monkeypatch.setattr(ExitCauses, "why", lambda *_: {"out_of_memory": "kernel log"})

    bench.poll(later_s=3.0)

    assert of("death", bench.reported()) == [("opened", "ERROR")]
    ((name, fields),) = bench.incidents().items()
    assert name == file
    assert fields["gpus"] == gpus
    assert "memory" in fields["verdict"]["sentence"]
    assert bench.verdict("death")["sentence"] == fields["verdict"]["sentence"]

    # The kernel says more once the run has been started anew.
    bench.join(1)
    monkeypatch.setattr(ExitCauses, "why", lambda *_: {"signal": "SIGSEGV"})
    bench.poll(later_s=3.0, times=10)

    assert of("death", bench.reported()) == [("closed", "INFO")]
    assert bench.open() == []


def test_a_death_counts_for_the_rank_that_ended_first_and_not_for_one_that_was_taken_for_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.join(0, 1, 2)
    bench.train(25)
    assert bench.series(catalog.TRAINING_DEATHS) == {}

    bench.ranks[1].alive = False
    bench.poll(later_s=0.01)
    bench.poll()
    assert bench.series(catalog.TRAINING_DEATHS) == {("1", "unknown"): 1.0}

    # The kernel says that another one was killed first.
    host = bench.ranks[0].process.host
    monkeypatch.setattr(host, "cause", lambda: {"out_of_memory": "kernel log"})
    bench.ranks[0].alive = False
    bench.poll(later_s=0.01)
    bench.poll(later_s=3.0)
    assert bench.series(catalog.TRAINING_DEATHS) == {("0", "out_of_memory"): 1.0}
    # One incident has one post-mortem.
    assert len(bench.incidents()) == 1

    # It stays told when the run is started anew.
    bench.join(0, 1)
    bench.poll(later_s=3.0, times=3)
    assert bench.open() == []
    assert bench.series(catalog.TRAINING_DEATHS) == {("0", "out_of_memory"): 1.0}


def test_a_rank_that_dies_again_soon_after_its_restart_has_died_twice(bench: Bench) -> None:
    bench.join(0, 1)
    for times in (1.0, 2.0):
        bench.train(25)
        bench.ranks[1].alive = False
        bench.poll(later_s=0.01)
        bench.poll(later_s=3.0)
        bench.poll(later_s=3.0)
        assert bench.series(catalog.TRAINING_DEATHS) == {("1", "unknown"): times}
        bench.ranks.pop()
        bench.join(1)
        bench.poll(later_s=3.0)


def test_a_death_before_the_agent_came_is_over_where_the_run_was_started_again(
    bench: Bench,
) -> None:
    for state in ("running", "finished"):
        bench.join(0, 1)
        for rank in bench.ranks[-2:]:
            rank.state(state)
            rank.alive = False
    bench.poll(later_s=3.0, times=3)

    assert (bench.open(), bench.judge.past()) == ([], [])


def test_a_death_that_the_agent_tells_that_leads_is_the_one_that_was_told_here(
    bench: Bench,
) -> None:
    bench.join(0, 1)
    bench.train(25)
    bench.ranks[1].alive = False
    bench.poll(later_s=0.01)
    bench.poll(later_s=3.0)
    own = bench.verdict("death")
    # What is told of other nodes is none of this one.
    elsewhere = {**own, "who": {**own["who"], "node": "node-2"}}

    def led(**evidence: Any) -> dict[tuple[str, ...], float]:
        # Its clock is some seconds ahead.
        told = {**own, "since_ns": own["since_ns"] + 5 * 10**9, "evidence": evidence}
        judgement = Judgement("node-0", [], [elsewhere, told], Report((), ""), compared=0)
        bench.led[("group", "g"), ("run", "r")] = judgement
        bench.poll()
        return bench.series(catalog.TRAINING_DEATHS)

    assert led(cause="out_of_memory") == {("1", "out_of_memory"): 1.0}
    assert led(cause="out_of_memory", taken_back=True) == {}


def stall(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = (Group("world", 2, 17, 16, "gloo"), Group("other", 2, 3, 2, "gloo"))
    monkeypatch.setattr(
        Answers,
        "poll",
        lambda _, now_ns: Evidence(answered=True, answered_ns=now_ns, groups=groups),
    )
    bench.join(0, 1)
    bench.train(25)
    bench.ranks[0].enter("comm_wait")
    bench.ranks[1].enter("data")
    bench.poll(later_s=5, times=14)


def test_what_nccl_itself_says_of_a_stall_is_told_with_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.join(0, 1)
    here = {"rank": 0, "host": "10.0.0.7", "pid": bench.ranks[0].process.reader.pid}
    gone = {"rank": 1, "host": "10.0.0.8", "pid": 7, "status": {"considered_dead": True}}
    answer = {"communicators": [{"size": 2, "ranks": [here], "missing_ranks": [gone]}]}
    monkeypatch.setattr(Ras, "poll", lambda *_: answer)
    for each in bench.ranks:
        each.writer.document(layout.FACTS, {"backend": "nccl"})
    bench.train(25)
    for each in bench.ranks:
        each.enter("comm_wait")
    bench.poll(later_s=5, times=16)

    said = "NCCL does not reach rank 1 (process 7 on 10.0.0.8), which it takes for dead. Look at"
    assert said in bench.verdict("stall")["sentence"]


def test_a_stall_is_reported_and_is_over_when_a_rank_moves(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    stall(bench, monkeypatch)
    reported, standing = bench.reported(), bench.series(catalog.TRAINING_STALLED)
    culprits = bench.series(catalog.TRAINING_STALL_CULPRIT)
    for rank in bench.ranks:
        rank.enter("forward")
    bench.poll()

    assert of("stall", reported) == [("opened", "ERROR")]
    assert culprits == {("1", "not_reached"): 1.0}
    assert bench.series(catalog.TRAINING_STALL_CULPRIT) == {}
    (past,) = bench.judge.past()
    # What the costs of nodes are made of.
    assert (past["evidence"]["cause"], past["evidence"]["node"]) == ("not_reached", "node-1")
    # A long table is not kept.
    assert "ranks" not in past["evidence"]
    assert standing == {("0",): 1.0, ("1",): 1.0}
    (fields,) = bench.incidents().values()
    assert fields["verdict"]["kind"] == "stall"
    assert of("stall", bench.reported()) == [("closed", "INFO")]
    assert bench.series(catalog.TRAINING_STALLED) == {("0",): 0.0, ("1",): 0.0}


def test_a_position_is_all_that_a_journal_tells_of_where_a_rank_is(bench: Bench) -> None:
    bench.join(0)
    (rank,) = bench.ranks
    capability = {"comm_wait": "", "device_clock": "no device"}
    facts = {"capability": capability, "own_collectives": ["other"], "backend": "cuda:nccl"}
    rank.writer.document(layout.FACTS, facts)
    bench.train(25)
    rank.enter("comm_wait")
    rank.writer.words[layout.IN_MARK // 8] = 1
    bench.poll()

    position, state = rank.process.position(0), rank.process.state()
    assert position is not None
    assert (position.phase, position.step, position.world) == ("comm_wait", 25, 2)
    assert (position.in_mark, position.waits_in) == (True, {"other"})
    assert (state.waits_known, state.device_clock, state.under_nccl) == (True, False, True)


def test_a_broken_detector_takes_nothing_from_the_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(errors, "raise_failures", False)
    for method in ("feed", "poll"):
        # The first one of all.
        monkeypatch.setattr(run_case_module.Deaths, method, fail)
    stall(bench, monkeypatch)
    bench.train(150, late_ms=30)

    reported = bench.reported()
    assert of("stall", reported) == [("opened", "ERROR"), ("closed", "INFO")]
    assert of("straggler", reported) == [("opened", "WARN")]


def test_nothing_is_kept_of_a_run_that_has_ended(bench: Bench) -> None:
    bench.join(0, 1)
    bench.train(150, late_ms=30)
    for rank in bench.ranks:
        rank.alive = False
    bench.poll()
    before = len(bench.judge.past()), len(bench.causes._watched)
    bench.ranks.clear()
    bench.poll()
    bench.judge.retire(set())

    # Both ranks have the process of this test.
    assert before == (1, 1)
    assert (bench.judge._cases, bench.judge._series, bench.causes._watched) == ({}, {}, {})
    assert (bench.judge.verdicts(), bench.judge.past()) == ([], [])
    assert bench.series(catalog.TRAINING_STRAGGLER_LOST_TIME) == {}


def test_a_process_with_new_labels_is_not_waited_for_under_the_old_ones(
    bench: Bench,
) -> None:
    bench.join(0, 1)
    bench.train(50)
    renamed = {**bench.ranks[1].process.identity, "global_rank": 3}
    bench.ranks[1].writer.document(layout.IDENTITY, renamed)

    bench.train(200, late_ms=30)

    straggler = bench.series(catalog.TRAINING_STRAGGLER)
    assert straggler["3", "backward"] == 1.0
    assert bench.judge.insufficient() == []


# -- roles, and what is beside the training


def test_ranks_that_train_together_are_compared_whatever_their_roles(bench: Bench) -> None:
    bench.join(0)
    bench.join(1, job_type="worker")

    bench.train(400, late_ms=30)

    assert bench.series(catalog.TRAINING_STRAGGLER)["1", "backward"] == 1.0
    assert bench.verdict("bound")["who"] == {"group": "g", "run": "r"}


def test_what_is_beside_the_training_is_not_compared_with_it(bench: Bench) -> None:
    # Those that make steps are the training.
    bench.join(0, 1, 2, 3, job_type="actor", world_size=4)
    bench.poll()
    # It has steps as well, whose waits are not known.
    bench.join(0, job_type="eval", world_size=1)
    bench.ranks[-1].writer.document(layout.FACTS, {"capability": {"comm_wait": "fsdp"}})
    bench.train(40, ranks=bench.ranks[4:])
    bench.join(0, 1)
    bench.train(200, late_ms=30, ranks=bench.ranks[4:])

    assert bench.series(catalog.TRAINING_STRAGGLER)["1", "backward"] == 1.0
    roles = {dict(row.labels)["job_type"] for row in bench.rows(catalog.TRAINING_STRAGGLER)}
    assert roles == {"train"}


def test_a_process_beside_the_training_neither_stalls_it_nor_keeps_it_going(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answers, "poll", lambda *_: Evidence())
    bench.join(0, 1)
    bench.train(25)
    bench.join(0, job_type="eval", world_size=1)
    evaluator = bench.ranks[2]
    bench.poll()
    for rank in bench.ranks:
        rank.enter("comm_wait")
    for _ in range(14):
        bench.poll(later_s=5)
        evaluator.spend(forward=10.0)

    found = bench.verdict("stall")
    assert (found["evidence"]["cause"], len(found["evidence"]["ranks"])) == ("backend", 2)
    standing = bench.rows(catalog.TRAINING_STALLED)
    assert {dict(row.labels)["job_type"] for row in standing} == {"train"}
