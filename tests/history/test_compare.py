"""A comparison finds what is slower, and nothing in equal runs."""

from __future__ import annotations

import random
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from histories import write_history
from history.noisy_runs import noisy_side
from otel_ddp.history import blocks
from otel_ddp.history.compare import Comparison, Row, Side, compare, load
from otel_ddp.history.directory import NotFound
from otel_ddp.vocabulary.words import MEASURED_PHASES


@cache
def usual(seed: int) -> Side:
    return noisy_side(seed)


def row(found: Comparison, name: str) -> Row:
    [only] = [each for each in found.rows if each.name == name]
    return only


def verdicts(found: Comparison) -> dict[str, str]:
    return {row.name: row.verdict for row in found.rows if row.verdict}


# What a machine without others' work shows.
STEADY = 0.008


def test_a_forward_that_is_slower_is_found_and_no_other_phase_is_blamed() -> None:
    found = [
        compare(
            noisy_side(seed, jitter=STEADY),
            noisy_side(seed + 500, jitter=STEADY, slower={"forward": 1.1}),
        )
        for seed in range(6)
    ]

    assert {row(each, "forward").verdict for each in found} == {"worse"}
    assert all((row(each, "forward").p or 0) < 0.01 for each in found)
    assert all(0.05 < (row(each, "forward").change or 0) < 0.15 for each in found)
    assert [
        each for each in found if {"backward", "data", "optimizer"} & verdicts(each).keys()
    ] == []


def test_nothing_is_found_in_equal_runs() -> None:
    found = [compare(usual(seed), usual(seed + 500)) for seed in range(6)]

    assert [verdicts(each) for each in found if verdicts(each)] == []


@pytest.mark.stress
@pytest.mark.parametrize(("steps", "slower"), [(300, 1.25), (1500, 1.15)])
def test_how_often_it_errs(steps: int, slower: float) -> None:
    equal = [
        compare(noisy_side(seed, steps=steps), noisy_side(seed + 5000, steps=steps))
        for seed in range(400)
    ]
    changed = [
        compare(
            noisy_side(seed, steps=steps),
            noisy_side(seed + 5000, steps=steps, slower={"forward": slower}),
        )
        for seed in range(200)
    ]

    # Of all measures of a pair together.
    assert sum(bool(verdicts(each)) for each in equal) <= 4
    assert sum(row(each, "forward").verdict == "worse" for each in changed) >= 196


def test_the_pace_of_a_machine_is_not_told_as_a_change_of_the_code() -> None:
    shared = [noisy_side(seed, jitter=STEADY, shared=True) for seed in range(12)]
    found = [compare(*pair) for pair in pairwise(shared)]
    times = [row(each, "step_time").change or 0 for each in found]

    assert sum(abs(each) > 0.03 for each in times) > 2
    assert [verdicts(each) for each in found if verdicts(each)] == []


def test_a_worse_loss_is_found_and_an_equal_one_is_not() -> None:
    worse = compare(usual(1), noisy_side(2, loss=1.1))
    same = compare(usual(1), usual(2))

    assert row(worse, "loss").verdict == "worse"
    assert row(same, "loss").verdict == ""


def test_first_steps_checkpoints_and_pauses_are_left_out_and_counted() -> None:
    found = compare(usual(1), usual(2))

    [one, _] = found.used
    assert (one.warm_up, one.unusual) == (15, 3)
    assert one.used + one.pauses == 300 - 15 - 3


def test_many_pauses_are_no_exceptions() -> None:
    often = [1.0, 1.01] * 50
    often[::10] = [3.0] * 10

    assert blocks.without_pauses(often) == [*range(100)]
    assert blocks.without_pauses([*often[1:10], 3.0, *[1.0] * 90]) == [*range(9), *range(10, 100)]


@pytest.mark.parametrize("size", [1e80, 1e160, 1e300])
def test_values_beyond_all_bounds_are_not_told_to_differ_by_an_error(size: float) -> None:
    found = blocks.of_steps([size, -size] * 30, [-size, size] * 30)

    assert found is not None
    assert found > 0.01


@pytest.mark.parametrize("steps", [0, 45])
def test_a_few_steps_are_no_test(steps: int) -> None:
    found = compare(usual(1), usual(2)._replace(cells=usual(2).cells[:steps]))

    assert row(found, "step_time").untested == "too few steps"
    steps = [row for row in found.rows if not row.of_value]
    assert found._replace(rows=steps).conclusion == "Nothing could be tested."


def test_what_both_have_in_common_drops_out_of_values() -> None:
    common = [(-1) ** at * 10.0 for at in range(60)]
    found = blocks.of_pairs(
        common, [each + 0.1 + 0.001 * (at % 7) for at, each in enumerate(common)]
    )

    assert found is not None
    assert found < 0.01


def test_students_distribution_is_that_of_the_tables() -> None:
    assert blocks.two_sided(2.228, 10) == pytest.approx(0.05, abs=1e-4)
    assert blocks.two_sided(3.169, 10) == pytest.approx(0.01, abs=1e-4)
    assert blocks.two_sided(0.0, 5) == pytest.approx(1.0)


def test_several_tests_need_more_evidence_each() -> None:
    assert blocks.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_a_step_that_is_slower_in_all_phases_alike_may_be_another_machine() -> None:
    # Two runs alone differ by more than their own steps do, but their pace changes too.
    little, much = (
        compare(usual(1), noisy_side(2, slower=dict.fromkeys(("data", "forward", "backward"), by)))
        for by in (1.1, 1.4)
    )

    assert row(little, "step_time").verdict == ""
    assert row(much, "step_time").verdict == "worse"
    assert "equal runs differ as well" in " ".join(much.notes())


# -- where runs come from


def test_an_ambiguous_or_unknown_name_is_said(tmp_path: Path) -> None:
    write_history(tmp_path, "r", group="g")
    write_history(tmp_path, "r", group="h")

    with pytest.raises(NotFound, match="g/r, h/r"):
        load("r", tmp_path)
    with pytest.raises(NotFound, match="several runs"):
        load(str(tmp_path), tmp_path)


def test_what_makes_runs_differ_by_itself_is_said_first(tmp_path: Path) -> None:
    for name, ranks, lr, batch in (("a", 4, 0.3, 32), ("b", 2, 0.1, 64)):
        environment = {"world_size": ranks, "gpus": f"{ranks} x H100"}
        about = {"config": {"lr": lr, "batch": batch}, "environment": environment}
        write_history(tmp_path, name, ranks=ranks, about=about)

    found = compare(load("a", tmp_path), load("b", tmp_path))

    assert ("ranks", "4", "2") in found.conditions
    assert ("gpus", "4 x H100", "2 x H100") in found.conditions
    assert found.config == [("batch", "32", "64"), ("lr", "0.3", "0.1")]


def test_a_long_run_is_compared_by_its_buckets(tmp_path: Path) -> None:
    write_history(tmp_path, "a", steps=5000, ranks=1, seed=1)
    write_history(tmp_path, "b", steps=5000, ranks=1, seed=2, slower={"backward": 1.03})

    found = compare(load("a", tmp_path), load("b", tmp_path))

    assert verdicts(found)["backward"] == "worse"
    assert "forward" not in verdicts(found)


def test_a_phase_has_its_own_name_in_the_table(tmp_path: Path) -> None:
    write_history(tmp_path, "a", steps=100, ranks=2)
    names = {each.name for each in compare(*[load("a", tmp_path)] * 2).rows if not each.of_value}

    assert "comm_wait" in names <= {"step_time", "throughput", *MEASURED_PHASES}


def test_samples_a_second_say_what_the_time_of_a_step_says_also_beside_quick_steps() -> None:
    chance = random.Random(1)
    slow, quick = usual(1), usual(2)
    cells = [
        each._replace(took_s=each.took_s / chance.choice((50, 100, 5000))) for each in quick.cells
    ]
    found = compare(slow, quick._replace(cells=cells))

    assert row(found, "step_time").verdict == "better"
    assert row(found, "throughput").verdict == "better"


def test_a_run_that_is_slow_from_some_step_on_is_slower() -> None:
    late = noisy_side(2, steps=600, jitter=STEADY)
    cells = [
        each._replace(took_s=each.took_s + (0.04 if at >= 75 else 0.0))
        for at, each in enumerate(late.cells)
    ]
    found = compare(usual(1), late._replace(cells=cells))

    assert row(found, "step_time").verdict == "worse"
