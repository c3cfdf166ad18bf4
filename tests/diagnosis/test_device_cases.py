"""What docs/internals/diagnosis.md promises by the device's clock, on a part of its runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import pytest
from tools import device_cases as tool
from tools.device_training.setting import Trouble

# More ranks take longer, and are in the table.
FEW = (2, 3, 4)


@pytest.mark.parametrize(
    ("excesses", "every", "rank_right", "rest_right"),
    [
        pytest.param((0.2, 0.3), 48, 0.98, 0.95, id="from 20 % on"),
        pytest.param((0.1,), 12, 0.9, 0.0, id="10 %", marks=pytest.mark.stress),
    ],
)
def test_one_late_rank(
    excesses: tuple[float, ...], every: int, rank_right: float, rest_right: float
) -> None:
    cases = tool.one_late(excesses, ranks=FEW, every=every)
    outcomes = [tool.Outcome.of(each._replace(steps=tool.BEGINS + 300)) for each in cases]
    right = [each for each in outcomes if each.rank_right]
    named = [each for each in right if each.found.named]

    assert len(named) >= 5
    assert len(right) >= rank_right * len(outcomes)
    assert sum(each.phase_right for each in named) >= rest_right * len(named)
    assert sum(each.side_right for each in named) >= rest_right * len(named)


@pytest.mark.parametrize(
    ("where", "setting", "within"),
    [
        ("device", "host ahead", 120),
        ("loader", "host ahead", 120),
        ("forward launches", "host ahead", 120),
        # It takes 60 steps more to see that hosts wait for their devices between steps.
        ("host", "item", 170),
    ],
)
def test_a_rank_that_is_late_from_the_beginning_is_named_soon(
    where: str, setting: str, within: int
) -> None:
    varied = tool.SETTINGS[setting]._replace(ranks=2, jitter=0.02, seed=3)
    trouble = Trouble(1, where, tool.amount(tool.SETTINGS[setting], where, 0.3))

    found = tool.replayed(tool.Case(varied, (trouble,), steps=within + 20))

    assert set(found.named) == {1}
    assert found.named[1].step + tool.BEGINS <= within
    assert found.named[1].phase in tool.EXPECTED[where].phases


def test_a_rank_whose_loader_becomes_very_late_is_named_within_100_steps() -> None:
    setting = tool.SETTINGS["host ahead"]
    varied = setting._replace(ranks=2, jitter=0.02, seed=3)
    trouble = Trouble(1, "loader", tool.amount(setting, "loader", 2.5), begins=100)

    found = tool.replayed(tool.Case(varied, (trouble,), steps=220))

    assert set(found.named) == {1}
    assert found.named[1].step + tool.BEGINS <= 200


ALL_SIDES = list(product((*tool.IN_FORWARD, "device", "loader"), tool.SETTINGS))


@pytest.mark.parametrize(
    ("where", "setting"),
    [ALL_SIDES[0], *(pytest.param(*each, marks=pytest.mark.stress) for each in ALL_SIDES[1:])],
)
def test_the_side_is_right_wherever_a_queue_hides_it(where: str, setting: str) -> None:
    varied = tool.SETTINGS[setting]._replace(ranks=3, jitter=0.05, seed=3)
    late = tool.late(tool.SETTINGS[setting], 1, where, 0.3)
    found = tool.replayed(tool.Case(varied, (late,)))

    assert set(found.named) == {1}
    assert found.named[1].phase in tool.EXPECTED[where].phases
    assert found.named[1].side == tool.EXPECTED[where].side


@pytest.mark.parametrize("where", ["device", "loader"])
def test_only_the_rank_that_costs_something_is_named(where: str) -> None:
    cases = tool.late_at_no_cost(48 * 600, beside=(where, 0.3))[::24]
    outcomes = [tool.Outcome.of(case) for case in cases]

    assert all(len(each.truth.may_be_named) == 1 for each in outcomes)
    assert all(each.rank_right for each in outcomes)


@pytest.mark.parametrize(
    ("where", "setting"),
    [
        ("loader", "host ahead"),
        ("forward launches", "busy host"),
    ],
)
def test_a_node_is_named_whose_hosts_are_all_late(where: str, setting: str) -> None:
    found = tool.replayed(late_on_two_nodes(where, setting, 4, (2, 3)))

    assert set(found.named) == {"node-1"}
    assert found.named["node-1"].side == "host"
    assert found.named["node-1"].phase in tool.EXPECTED[where].phases


def late_on_two_nodes(where: str, setting: str, ranks: int, late: Sequence[int]) -> tool.Case:
    varied = tool.SETTINGS[setting]._replace(ranks=ranks, jitter=0.05, seed=3)
    troubles = [tool.late(tool.SETTINGS[setting], rank, where, 0.3) for rank in late]
    return tool.Case(varied, tuple(troubles), nodes=2)


def test_a_slow_device_is_named_where_hosts_are_100_steps_ahead() -> None:
    outcomes = [tool.Outcome.of(case) for case in tool.slow_far_ahead()[1:6:4]]

    assert all(each.rank_right and each.side_right and each.found.named for each in outcomes)


def test_a_loader_within_the_loop_is_named_where_all_are_too_slow() -> None:
    cases = tool.one_late((0.15,), ("loader",), ("input-bound",), FEW, every=4)
    outcomes = [tool.Outcome.of(case) for case in cases]

    assert len(outcomes) >= 3
    assert all(each.rank_right and each.side_right for each in outcomes)


def synchronises_alone(lead: int) -> list[tool.Case]:
    cases = tool.synchronises_alone(lead)[::5]
    assert {case.setting.ranks for case in cases} == {2, 3, 8}
    assert all(tool.cost(case, case.troubles[:1]) < tool.HARMLESS for case in cases)
    return cases


def slow_loaders_that_vary() -> list[tool.Case]:
    cases = [c for c in tool.all_bound(load_ms=130, prefetch=4) if c.setting.jitter == 0.1]
    return [case._replace(steps=1_000) for case in cases[:2]]


def slow_workers_of_hosts_hardly_ahead(chosen: Sequence[int]) -> list[tool.Case]:
    cases = [case for case in tool.hardly_ahead(1_500) if case.setting.jitter]
    return [cases[at] for at in chosen]


BLAME_NONE: dict[str, Callable[[], Sequence[tool.Case]]] = {
    "late at no cost": lambda: tool.late_at_no_cost(36 * 400, FEW)[::9],
    "slow loaders that vary much": slow_loaders_that_vary,
    "slow workers, hosts hardly ahead": partial(slow_workers_of_hosts_hardly_ahead, (5,)),
    "hosts that work long between steps": lambda: tool.all_bound(host_ms=110)[:12:6],
}
MORE = {
    "slow workers, all cases": partial(slow_workers_of_hosts_hardly_ahead, range(12)),
    **{f"one is {n} ahead": partial(synchronises_alone, n) for n in (3, 5, 10, 100)},
}


@pytest.mark.parametrize(
    "what", [*BLAME_NONE, *(pytest.param(each, marks=pytest.mark.stress) for each in MORE)]
)
def test_no_rank_is_blamed_for_what_all_do_or_what_costs_nothing(what: str) -> None:
    found = [tool.replayed(case) for case in (BLAME_NONE | MORE)[what]()]

    assert not any(each.named for each in found)
    if what == "late at no cost" or what.startswith("one is"):
        assert not any(each.insufficient for each in found)
    if what == "hosts that work long between steps":
        assert all(each.bound == "other" or each.insufficient for each in found)


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(each, marks=pytest.mark.stress) for each in range(1, 6))]
)
def test_balanced_ranks_lead_to_no_verdict(part: int) -> None:
    cases = tool.balanced(12_000, ranks=(2, 3))[part::6]
    found = [tool.replayed(case) for case in cases]

    assert not any(each.named for each in found)
    # Hosts that launch slowly and vary much take longer to be seen to be alike.
    launch_ms = tool.HOST_BOUND["launch-bound"].launch_ms
    assert not any(
        each.insufficient
        for case, each in zip(cases, found, strict=True)
        if (case.setting.launch_ms, case.setting.jitter) != (launch_ms, 0.1)
    )


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({"load_ms": 80}, "data"),
        ({"transfer_ms": 240}, "comm_wait"),
        ({"launch_ms": 130}, "launch"),
        ({}, "compute"),
    ],
    ids=["load", "transfer", "launch", "none"],
)
def test_what_bounds_all_ranks(changes: dict[str, float], bound: str) -> None:
    found = [tool.replayed(case) for case in tool.all_bound(**changes)[1:12:6]]

    assert {each.bound for each in found} == {bound}
    assert not any(each.named or each.insufficient for each in found)
