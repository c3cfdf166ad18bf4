"""What a run's time goes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from make import step_facts
from otel_ddp.diagnosis.straggler.detector import Stragglers
from otel_ddp.diagnosis.verdict import Change
from ranks import Told

S = 1_000_000_000
MS = 1_000_000
NOW = 1_700_000_000 * S
COMPUTE = {"data": 5, "forward": 25, "backward": 50, "optimizer": 10, "other": 5, "comm_wait": 5}


class Run:
    def __init__(self) -> None:
        stragglers = Stragglers()
        self.bounds, self.told = stragglers.bounds, Told(stragglers)
        self.number = 0
        self.now_ns = NOW

    def steps(self, steps: int, *ranks: Mapping[str, int]) -> list[Change]:
        """Milliseconds of each phase, of each rank."""
        return self.turns([ranks] * steps)

    def turns(self, turns: Sequence[Sequence[Mapping[str, int]]]) -> list[Change]:
        """The same, of each step by itself."""
        changes: list[Change] = []
        for ranks in turns:
            self.number += 1
            self.now_ns += MS * sum(ranks[0].values())
            for rank, ms in enumerate(ranks):
                collected_ns = ms.get("garbage", 0) * MS
                facts = step_facts(self.number, self.now_ns, ms, garbage_ns=collected_ns)
                self.told.feed(rank, [facts])
            changes += self.bounds.poll(0)
        return changes

    def end(self, *ranks: int) -> list[Change]:
        for rank in ranks:
            self.told.forget(rank)
        for each in self.told.detectors:
            each.poll(0)
        return self.bounds.poll(0)


def phases(changes: list[Change]) -> list[tuple[str, bool]]:
    return [(each.verdict.phase, each.opened) for each in changes]


@pytest.mark.parametrize(
    ("more", "phase"),
    [
        ({}, "compute"),
        ({"data": 40}, "data"),
        ({"comm_wait": 60}, "comm_wait"),
        ({"other": 60}, "other"),
        ({"checkpoint": 20, "eval": 20}, "saving"),
        ({"compile": 40}, "compile"),
        ({"comm_wait": 25}, "compute"),
        # Of 30 and 40 %: the first is further above what it may take.
        ({"data": 60, "other": 80}, "data"),
    ],
)
def test_one_verdict_says_what_bounds_the_run(more: dict[str, int], phase: str) -> None:
    ms = {**COMPUTE, **more}
    changes = Run().steps(500, ms, ms)

    assert phases(changes) == [(phase, True)]
    verdict = changes[0].verdict
    assert verdict.labels == (("group", "g"), ("run", "r"))
    of = {"compute": ("forward", "backward", "optimizer"), "saving": ("checkpoint", "eval")}
    share = sum(ms[word] for word in of.get(phase, (phase,))) / sum(ms.values())
    assert verdict.evidence["shares"][phase] == pytest.approx(share, abs=0.001)
    assert f"{share * 100:.0f} %" in verdict.sentence


def test_an_open_bound_has_the_present_share_without_a_further_change() -> None:
    run = Run()
    ms = {**COMPUTE, "data": 40}
    (opened, _) = run.steps(500, ms, ms)[0]
    ms = {**COMPUTE, "data": 95}
    changes = run.steps(300, ms, ms)

    (present,) = run.bounds.present()

    assert changes == []
    assert "30 % of the step" in opened.sentence
    assert "50 % of the step" in present.sentence
    assert (present.since_ns, present.step) == (opened.since_ns, opened.step)
    assert phases(run.end(0, 1)) == [("data", False)]
    assert run.bounds.present() == []


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_wait_for_ranks_of_other_agents_may_wait_for_a_late_one(world_size: int) -> None:
    run, waiting = Run(), {**COMPUTE, "comm_wait": 60}
    run.told.known = {"world_size": world_size}

    (opened,) = run.steps(500, waiting, waiting)
    late = "Of 4 ranks 2 are compared: another may be late." in opened.verdict.sentence
    assert late is (world_size == 4)


def test_a_single_rank_that_waits_for_data_is_no_bound() -> None:
    late = {**COMPUTE, "data": 65}
    waiting = {**COMPUTE, "comm_wait": 65}

    assert phases(Run().steps(500, late, waiting)) == [("compute", True)]
    run = Run()
    changes = run.steps(500, late, waiting, waiting)
    assert phases(changes) == [("compute", True)]
    assert changes[0].verdict.evidence["shares"]["late_ranks"] == pytest.approx(60 / 160, abs=0.01)


def test_ranks_that_are_late_in_turn_are_no_communication_bound() -> None:
    longer, waiting = {**COMPUTE, "forward": 125}, {**COMPUTE, "comm_wait": 105}
    changes = Run().turns([(longer, waiting), (waiting, longer)] * 800)

    assert phases(changes) == [("late_in_turn", True)]
    shares = changes[0].verdict.evidence["shares"]
    assert shares["late_in_turn"] == pytest.approx(0.25, abs=0.01)
    assert shares["comm_wait"] == pytest.approx(5 / 200, abs=0.001)


@pytest.mark.parametrize(
    ("turns", "bound", "share"),
    [("01", "garbage", 0.5), ("1-", "compute", 0.0)],
    ids=["in turn", "on one rank"],
)
def test_collections_of_garbage_bound_a_run_where_all_ranks_have_them(
    turns: str, bound: str, share: float
) -> None:
    collects, waits = {**COMPUTE, "garbage": 100}, {**COMPUTE, "comm_wait": 105}
    of = {"0": (collects, waits), "1": (waits, collects)}
    changes = Run().turns([of.get(each, (COMPUTE, COMPUTE)) for each in turns * 300])

    assert phases(changes) == [(bound, True)]
    verdict = changes[0].verdict
    assert verdict.evidence["shares"]["garbage"] == pytest.approx(share, abs=0.01)
    assert ("gc.freeze()" in verdict.sentence) is (bound == "garbage")


def test_waiting_for_one_late_rank_in_collectives_of_the_users_own_is_no_bound() -> None:
    run = Run()
    run.told.know(1, own_collectives=("other",))
    late, waiting = {**COMPUTE, "forward": 75}, {**COMPUTE, "other": 55}

    assert phases(run.steps(500, late, waiting, waiting)) == [("compute", True)]


@pytest.mark.parametrize(("own", "may"), [("forward", True), ("other", False)])
def test_a_bound_of_computation_says_where_it_may_hold_waits(own: str, may: bool) -> None:
    run = Run()
    run.told.know(1, own_collectives=(own,))

    (change,) = run.steps(400, COMPUTE, COMPUTE)
    assert change.verdict.phase == "compute"
    assert ("may hold waits for other ranks" in change.verdict.sentence) is may


def test_the_first_steps_are_left_out() -> None:
    run = Run()
    run.steps(20, {**COMPUTE, "compile": 100_000})

    (change,) = run.steps(400, COMPUTE)
    # A hundred steps, and three more looks that agree.
    assert (change.verdict.phase, change.verdict.step) == ("compute", 20 + 100 + 3 * 50)


def test_a_short_change_is_no_other_verdict() -> None:
    run = Run()
    run.steps(500, COMPUTE)

    assert run.steps(120, {**COMPUTE, "data": 45}) == []
    assert run.steps(500, COMPUTE) == []
    changes = run.steps(500, {**COMPUTE, "data": 45})
    assert phases(changes) == [("compute", False), ("data", True)]


def test_a_share_about_the_limit_does_not_go_to_and_fro() -> None:
    run = Run()
    changes = run.steps(500, {**COMPUTE, "data": 26})
    for _ in range(4):
        changes += run.steps(300, {**COMPUTE, "data": 22})
        changes += run.steps(300, {**COMPUTE, "data": 26})

    assert phases(changes) == [("data", True)]


@pytest.mark.parametrize("ends", [False, True])
def test_a_run_that_has_no_bound_any_more_or_has_ended_closes_the_verdict(ends: bool) -> None:
    run = Run()
    run.steps(500, {**COMPUTE, "data": 60})
    even = {"data": 10, "forward": 15, "backward": 20, "optimizer": 5, "other": 25, "comm_wait": 25}

    (change,) = run.end(0) if ends else run.steps(500, even)

    assert phases([change]) == [("data", False)]
    # With the share of its whole time, and not that of the last steps.
    assert change.verdict.evidence["shares"]["data"] == pytest.approx(0.4, abs=0.05)
