"""What people are told of runs, when, and how often: by verdicts and ends that the test states."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from golden import Golden
from make import labels_of
from otel_ddp.agent.judge.reports import Incident, RunReports
from otel_ddp.agent.notify.notifier import Notifier, Rules
from otel_ddp.agent.notify.outbox import Message
from otel_ddp.diagnosis.verdict import Labels, Verdict, run_labels
from otel_ddp.journal.process_state import ProcessState
from otel_ddp.settings import Settings
from otel_ddp.vocabulary.words import HARMLESS_VERDICTS, VERDICTS, Kind

RANK = labels_of(1)
RUN = run_labels(RANK)
NODE = (*RUN, ("node", "n1"))
COSTS: Mapping[str, float] = {"step_s": 1.0, "step_without_s": 0.94}


@dataclass
class Case:
    """The part of a RunCase that is looked at."""

    run: Labels = RUN
    reports: RunReports = field(default_factory=lambda: RunReports(RUN))
    judgement: Any = None
    living: int = 2

    @property
    def sources(self) -> list[Any]:
        return [SimpleNamespace(is_at_work=True)] * self.living


class Watched:
    """One run, polled as the agent's loop does, on a clock that the test moves."""

    def __init__(self) -> None:
        self.case = Case()
        self.occasions = Rules()
        self.now = 1000.0

    def open(self, kind: Kind, labels: Labels = RANK, **evidence: Any) -> None:
        verdict = Verdict(kind, labels, "", f"{kind}: why.", evidence, 7, int(self.now * 1e9))
        self.case.reports.open[verdict.key] = Incident(verdict)

    def close(self) -> None:
        self.case.reports.open.clear()

    def end(self, *states: str, lasted_s: float = 60.0, world: int = 2) -> None:
        started_ns = time.time_ns() - int(lasted_s * 1e9)
        self.case.living = world - len(states)
        for rank, state in enumerate(states):
            self.ends(ProcessState(state=state, rank=rank, world_size=world, started_ns=started_ns))

    def ends(self, process: ProcessState) -> None:
        labels = (*labels_of(process.rank or 0), ("node", process.node))
        self.case.reports.ended[labels] = process

    def told(self, later_s: float = 0.0, **how: Any) -> list[Message]:
        self.now += later_s
        case: Any = self.case
        return list(self.occasions.poll([case], [], "http://n:9464", self.now, **how))

    def kinds(self, later_s: float = 0.0, **how: Any) -> list[str]:
        return [each.kind for each in self.told(later_s, **how)]


@pytest.fixture
def watched() -> Watched:
    return Watched()


# Of whom each kind of verdict is, and for how many seconds it has to stand.
TOLD: dict[Kind, tuple[Labels, float]] = {
    "death": (RANK, 2),
    "silence": (NODE, 30),
    "stall": (RUN, 30),
    "nonfinite": (RANK, 0),
    "straggler": (RANK, 30),
}


@pytest.mark.parametrize("kind", TOLD)
def test_a_verdict_that_stands_is_told_once(watched: Watched, kind: Kind, golden: Golden) -> None:
    labels, stands_s = TOLD[kind]
    watched.open(kind, labels, **COSTS)
    if stands_s:
        assert watched.kinds() == []
        assert watched.kinds(stands_s - 0.5) == []

    (message,) = watched.told(0.5)

    golden.check(*(each for each in message._replace(id="", time="") if each))
    assert watched.kinds(100.0) == []


@pytest.mark.parametrize("kind", sorted({*VERDICTS} - {*TOLD}))
def test_other_verdicts_are_not_told(watched: Watched, kind: Kind) -> None:
    assert {*VERDICTS} - {*TOLD} >= HARMLESS_VERDICTS
    watched.open(kind, **COSTS)

    assert watched.kinds() + watched.kinds(100.0) == []


def test_a_verdict_that_is_over_before_is_not_told(watched: Watched) -> None:
    for _ in range(5):
        watched.open("straggler", **COSTS)
        assert watched.kinds(1.0) + watched.kinds(29.0) == []
        watched.close()
        assert watched.kinds(1.0) == []


def test_a_late_rank_is_told_once_it_costs_five_percent(watched: Watched) -> None:
    watched.open("straggler", step_s=1.0, step_without_s=0.96)
    assert watched.kinds() + watched.kinds(60.0) == []

    watched.open("straggler", step_s=1.0, step_without_s=0.95)

    assert watched.kinds(1.0) == ["straggler"]


def test_an_agent_that_leaves_tells_what_need_not_stand(watched: Watched) -> None:
    watched.open("death")
    watched.open("straggler", **COSTS)

    assert watched.kinds(leaving=True) == ["death"]
    watched.end("killed", "killed")
    assert watched.kinds(leaving=True) == ["ended"]


def test_the_agent_that_does_not_judge_tells_nothing(watched: Watched) -> None:
    watched.case.judgement = object()
    watched.open("death")
    watched.end("killed", "killed")
    assert watched.kinds() + watched.kinds(60.0) == []

    # The lead has ended by now, and has told the end.
    watched.case.judgement = None
    watched.close()

    assert watched.kinds(60.0) + watched.kinds(60.0) == []


def test_what_another_agent_has_judged_is_not_told_again(watched: Watched) -> None:
    watched.open("death")
    for incident in watched.case.reports.open.values():
        incident.by_lead = True

    assert watched.kinds() + watched.kinds(60.0) == []


def test_a_run_that_ended_well_is_told_at_once_with_its_card(watched: Watched) -> None:
    late = {"kind": "straggler", "sentence": "rank 1 was late.", "since_ns": 1, "until_ns": 2}
    taken_back = {"kind": "death", "sentence": "rank 0 did not.", "since_ns": 3, "until_ns": 4}
    watched.case.reports.past.append({**late, "evidence": {}})
    watched.case.reports.past.append({**taken_back, "evidence": {"taken_back": True}})
    watched.end("finished")
    assert watched.kinds() == []

    watched.end("finished", "finished", lasted_s=3 * 3600)
    (message,) = watched.told()

    assert (message.kind, message.level) == ("ended", "info")
    assert message.title == "run r finished after 3 h"
    assert message.text.startswith("otel_ddp: run g/r finished after 3 h\n")
    *_, late, look = message.text.splitlines()
    assert late.endswith("rank 1 was late.")
    assert look.split() == ["look", "otel-ddp", "open", "g/r"]
    assert watched.kinds(100.0) == []


def test_a_short_run_that_ended_well_is_not_told_and_one_that_failed_is(watched: Watched) -> None:
    watched.end("finished", "finished", lasted_s=9.0)
    assert watched.kinds() + watched.kinds(60.0) == []

    watched.case.living = 2
    assert watched.kinds() == []
    watched.end("finished", "failed", lasted_s=5.0)

    (message,) = (*watched.told(), *watched.told(30.0))
    assert (message.level, message.title) == ("error", "run r failed after 5 s")


def test_a_run_that_a_launcher_starts_again_has_not_ended(watched: Watched) -> None:
    watched.end("killed", "failed")
    assert watched.kinds() + watched.kinds(29.0) == []
    watched.case.living = 2
    assert watched.kinds(5.0) == []

    watched.end("finished", "finished", lasted_s=5.0)

    (message,) = watched.told()
    assert message.title == "run r finished after 60 s"


def test_the_end_of_a_run_whose_ranks_are_not_all_known_waits_for_them(watched: Watched) -> None:
    watched.end("finished", world=2)
    assert watched.kinds() == []
    # Until it is told, the judge does not forget the run, also while others are at work elsewhere.
    assert watched.occasions.ending == {RUN}
    watched.case.living = 0
    assert watched.kinds() + watched.kinds(29.0) == []
    assert watched.occasions.ending == {RUN}

    assert watched.kinds(1.0) == ["ended"]
    assert not watched.occasions.ending


@pytest.mark.parametrize(
    ("conf", "says"),
    [
        (Settings(), "off: OTEL_DDP_NOTIFY names no address"),
        (
            Settings(notify=("http://127.0.0.1:1/s3cret",), agent="offline"),
            "off: OTEL_DDP_AGENT=offline sends nothing",
        ),
    ],
)
def test_without_an_address_or_offline_nothing_is_told(
    tmp_path: Path, conf: Settings, says: str
) -> None:
    notifier = Notifier(conf, tmp_path / "notify")

    assert notifier.describe() == says
    assert not list(notifier.threads())
