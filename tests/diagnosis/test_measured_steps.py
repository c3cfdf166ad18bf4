"""Where one of several steps is measured: who is late, what it costs, and what cannot be told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import make
from otel_ddp.diagnosis.stall.evidence import Evidence, Frame
from otel_ddp.diagnosis.step_facts import DeviceSteps, StepFacts, facts_of
from otel_ddp.diagnosis.steps import Step
from otel_ddp.diagnosis.verdict import Change, Verdict
from otel_ddp.vocabulary.words import PHASES
from ranks import STEP_S, Job, summary

MS = 1_000_000
NOW = 1_700_000_000_000_000_000


class Measuring(Job):
    """Measured steps take 5 ms longer; ranks measure one of so many."""

    def __init__(self, *one_of: int, nodes: int = 1) -> None:
        super().__init__(len(one_of), nodes=nodes)
        self.one_of = dict(enumerate(one_of))

    def facts(self, rank: int, more: Mapping[str, float], took_s: float, **given: Any) -> StepFacts:
        facts = super().facts(rank, more, took_s, **given)
        return facts._replace(took_ns=facts.took_ns + 5 * MS * facts.measured)

    def verdict(self) -> Verdict:
        (verdict,) = self.detector.present()
        return verdict


@pytest.mark.parametrize("phase", ["data", "backward"])
@pytest.mark.parametrize("one_of", [(8, 8, 8, 8), (1, 8, 2, 4)], ids=["alike", "each its own"])
def test_a_late_rank_is_named_with_its_phase_and_what_it_costs_in_all_steps(
    one_of: tuple[int, ...], phase: str
) -> None:
    job = Measuring(*one_of)
    job.steps(100 * 8)
    changes = job.steps(150 * 8, {2: {phase: 0.03}})

    assert summary(changes) == [("straggler", "2", phase, True)]
    assert not job.report().insufficient
    verdict = job.verdict()
    assert verdict.evidence["one_of"] == 8
    # Of all steps, and not of the measured ones, which take longer.
    assert verdict.evidence["step_s"] == pytest.approx(STEP_S + 0.03, abs=0.002)
    assert verdict.evidence["lost_per_s"] == pytest.approx(3 * 0.03 / 0.13, rel=0.05)
    lost_s = job.report().ranks[2].lost_s
    assert lost_s == pytest.approx(3 * 0.03 * 150 * 8, rel=0.1)
    assert verdict.evidence["step_without_s"] == pytest.approx(STEP_S, abs=0.003)


def test_where_measured_steps_lie_far_apart_a_clear_case_is_named_after_12_seconds() -> None:
    job = Measuring(16, 16)
    job.steps(90 * 16)
    changes = job.steps(16 * 16, {1: {"data": 0.05}})

    assert summary(changes) == [("straggler", "1", "data", True)]
    assert job.verdict().evidence["steps"] < 20


def test_ranks_that_never_measure_the_same_steps_are_not_called_balanced() -> None:
    job = Measuring(64, 1 << 20)
    job.steps(1500)

    assert job.report().insufficient == (
        "insufficient data: none of the last 1000 steps was measured on all ranks"
    )


def test_stalls_that_recur_are_looked_for_where_every_step_is_measured_alone() -> None:
    def train(job: Measuring, steps: int) -> list[Change]:
        found = []
        for _ in range(steps):
            is_stall = job.number % 50 == 0
            found += job.steps(1, {1: {"data": 0.6}} if is_stall else {})
        return found

    job = Measuring(1, 1)

    assert summary(train(job, 400)) == [("recurring", "1", "data", True)]
    job.one_of = {0: 2, 1: 2}
    assert summary(train(job, 600)) == [("recurring", "1", "data", False)]


# -- facts


def step_of(number: int, *phases: str, **more: Any) -> Step:
    """Of 10 ms each."""
    return make.step_of(number, NOW, [(PHASES[word], 10 * MS) for word in phases], **more)


def facts(*steps: Step) -> list[StepFacts]:
    return facts_of(steps)


def test_facts_say_which_steps_were_measured_and_keep_what_always_is() -> None:
    plain, bare, saved = facts(
        step_of(1, "forward", "comm_wait"),
        step_of(2, "unmeasured"),
        step_of(3, "unmeasured", "checkpoint", "unmeasured"),
    )

    assert [each.measured for each in (plain, bare, saved)] == [True, False, False]
    assert (bare.took_ns, bare.wait_ns, bare.unusual) == (10 * MS, 0, False)
    assert (saved.unusual, saved.unusual_ns) == (True, {"checkpoint": 10 * MS})


def test_the_device_tells_of_measured_steps_and_the_host_of_those_between_them() -> None:
    joined = DeviceSteps()
    host = [step_of(number, "forward" if number % 4 == 0 else "unmeasured") for number in range(9)]
    joined.feed_host(facts(*host))
    # Of the step before a gap's end the device tells the end alone.
    end = step_of(7, "unmeasured", lag_ns=3 * MS)
    found = joined.feed([step_of(0, "forward"), step_of(4, "forward"), end, step_of(8, "forward")])

    assert [each.number for each in found] == list(range(9))
    assert [each.measured for each in found] == [number % 4 == 0 for number in range(9)]
    assert [each.behind_ns for each in found if each.measured] == [None, None, 3 * MS]


# -- where it hangs


@pytest.mark.parametrize(
    ("file", "function", "phase"),
    [
        ("nn/modules/module.py", "_call_impl", "forward"),
        ("autograd/__init__.py", "backward", "backward"),
        ("optim/optimizer.py", "wrapper", "optimizer"),
        ("random.py", "seed", ""),
    ],
)
def test_the_innermost_frame_of_torch_says_the_phase(file: str, function: str, phase: str) -> None:
    outer = Frame("/lib/python3/site-packages/torch/optim/optimizer.py", 1, "step")
    frames = (Frame("net.py", 3, "forward"), Frame(f"/x/torch/{file}", 9, function), outer)

    assert Evidence(stack=frames).phase == phase
