"""What is counted for a machine, and what is not: from the histories of runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from histories import S, value_sums, write_history
from otel_ddp.history.directory import file_name
from otel_ddp.history.fleet import DAY_NS, Fleet, LateIn, NodeRecord, fleet_of
from otel_ddp.history.run_file import RunFile
from otel_ddp.history.tables import SeriesKey

NOW_NS = 1_800_000_000 * S
HOUR_S = 3600
RANKS = 2
SPENT_S = RANKS * HOUR_S
"""All ranks of one node, in a run of `play`."""


def play(
    folder: Path,
    *verdicts: Mapping[str, Any],
    run: str = "r",
    group: str = "g",
    nodes: Sequence[str] = ("a", "b"),
    kept: Sequence[str] = (),
    ago_days: float = 1.0,
    state: str = "finished",
    about: Mapping[str, Any] = {},
) -> None:
    """An hour of two ranks a node. *kept*: the nodes whose histories are here, if not all."""
    seen_ns = NOW_NS - round(ago_days * DAY_NS)
    for at, node in enumerate(nodes):
        if kept and node not in kept:
            continue
        write_history(
            folder,
            run,
            group=group,
            node=node,
            ranks=RANKS,
            first_rank=RANKS * at,
            steps=1,
            names=(),
            state=state,
            began_ns=seen_ns - HOUR_S * S,
            about={
                "seen_ns": seen_ns,
                "time": {"seconds": {"productive": float(SPENT_S)}},
                "environment": {"world_size": RANKS * len(nodes)},
                **about,
            },
            verdicts=[
                {"who": {**who(run, group), **each.pop("who", {})}, **each}
                for each in map(dict, verdicts)
            ],
        )


def who(run: str, group: str) -> dict[str, str]:
    return {"group": group, "run": run}


def late(node: str, lost_s: Any, rank: str = "") -> dict[str, Any]:
    of = {"node": node, **({"rank": rank} if rank else {})}
    return {
        "kind": "straggler",
        "who": of,
        "evidence": {"lost_s": lost_s},
        "since_ns": NOW_NS - DAY_NS,
    }


def hang(
    node: str, since_s: int = 0, until_s: int = 60, *, kind: str = "stall", of: str = ""
) -> dict[str, Any]:
    """*node*: which holds the run up, as far as it is known; *of*: of which the verdict is."""
    told = {"kind": kind, "who": {"node": of} if of else {}, "evidence": {"node": node}}
    began_ns = NOW_NS - DAY_NS - HOUR_S * S
    return {**told, "since_ns": began_ns + since_s * S, "until_ns": began_ns + until_s * S}


def death(node: str, **evidence: Any) -> dict[str, Any]:
    told = {"kind": "death", "who": {"node": node, "rank": "3"}, "since_ns": NOW_NS - DAY_NS}
    return {**told, "evidence": {"cause": "signal", **evidence}}


def fleet(folder: Path, days: int = 30) -> Fleet:
    return fleet_of(folder, NOW_NS, days)


def nodes_of(folder: Path, days: int = 30) -> dict[str, NodeRecord]:
    found = fleet(folder, days)
    assert found.faults == []
    return {each.node: each for each in found.nodes}


def test_a_late_rank_costs_the_others_what_its_verdict_says_by_its_gpu(tmp_path: Path) -> None:
    play(tmp_path, late("b", 144.0, rank="3"))

    found = nodes_of(tmp_path)

    assert [*found] == ["b", "a"]
    assert found["b"].lost_s == {"late": 144.0}
    assert found["b"].gpus == {"GPU-1": 144.0}
    assert found["b"].since_ns == NOW_NS - DAY_NS
    assert found["b"].late_in == [LateIn("g", "r", 144 / (2 * SPENT_S))]
    assert (found["a"].lost_s, found["a"].late_in, found["a"].since_ns) == ({}, [], 0)


def test_a_rank_that_stalls_again_and_again_is_late_too(tmp_path: Path) -> None:
    play(tmp_path, late("b", 144.0), {**late("b", 6.0), "kind": "recurring"})

    assert nodes_of(tmp_path)["b"].lost_s == {"late": 150.0}


def test_of_a_late_node_all_gpus_are_late_alike(tmp_path: Path) -> None:
    play(tmp_path, late("b", 144.0))

    assert nodes_of(tmp_path)["b"].gpus == {"GPU-0": 72.0, "GPU-1": 72.0}


def test_a_machine_is_called_as_its_ranks_are_and_not_as_their_agent(tmp_path: Path) -> None:
    for run in ("r0", "r1"):
        play(
            tmp_path,
            late("b", 144.0, rank="1") if run == "r0" else {**hang("b")},
            run=run,
            nodes=["b"],
            about={"node": "host"},
        )

    found = nodes_of(tmp_path)

    assert [*found] == ["b"]
    assert (found["b"].runs, found["b"].lost_s) == (2, {"late": 144.0})
    assert found["b"].gpus == {"GPU-1": 144.0}


def test_a_run_in_which_the_others_lost_less_than_a_hundredth_is_none_of_the_late_ones(
    tmp_path: Path,
) -> None:
    play(tmp_path, late("b", 0.0099 * 2 * SPENT_S))

    (first, _) = fleet(tmp_path).nodes

    assert (first.late_in, first.runs, first.last_runs) == ([], 1, 1)


@pytest.mark.parametrize("gap", ["between_attempts", "between_launches"])
def test_the_time_between_two_attempts_is_none_of_the_run(tmp_path: Path, gap: str) -> None:
    time = {"seconds": {"productive": float(SPENT_S), gap: 99.0 * SPENT_S}}
    play(tmp_path, late("b", 144.0), about={"time": time})

    assert nodes_of(tmp_path)["b"].late_in == [LateIn("g", "r", 144 / (2 * SPENT_S))]


@pytest.mark.parametrize("kind", ["imbalance", "regression", "bound"])
def test_who_has_more_to_do_is_not_late(tmp_path: Path, kind: str) -> None:
    play(tmp_path, {**late("b", 144.0), "kind": kind})

    assert nodes_of(tmp_path)["b"].lost_s == {}


def test_a_hang_costs_all_ranks_of_the_run_for_the_node_of_the_culprits(tmp_path: Path) -> None:
    # A stall is of the run as a whole, as the agent tells it that leads it.
    play(tmp_path, hang("b"), hang("", of="a"))

    found = nodes_of(tmp_path)

    assert found["b"].lost_s == {"hang": 60.0 * 4}
    assert found["b"].late_in == []
    assert found["a"].lost_s == {}


def test_a_hang_that_goes_on_has_lasted_until_the_run_was_last_seen(tmp_path: Path) -> None:
    play(tmp_path, {**hang("b", HOUR_S - 70), "until_ns": None}, state="running")

    assert nodes_of(tmp_path)["b"].lost_s == {"hang": 70.0 * 4}


def test_a_hang_whose_agent_was_killed_is_over_when_the_run_makes_steps_again(
    tmp_path: Path,
) -> None:
    # The steps of these runs are made when they begin.
    play(tmp_path, {**hang("b", -600), "until_ns": None})

    assert nodes_of(tmp_path)["b"].lost_s == {"hang": 600.0 * 4}


def test_agents_that_are_not_linked_blame_no_node_for_a_hang_that_is_elsewhere(
    tmp_path: Path,
) -> None:
    play(tmp_path, hang("", of="a"), hang("", of="b"))

    assert {each.cost_s for each in nodes_of(tmp_path).values()} == {0.0}


def test_two_nodes_that_hold_up_a_run_at_once_say_nothing_of_either(tmp_path: Path) -> None:
    play(tmp_path, hang("a", 0, 60), hang("b", 50, 90), hang("b", 200, 230))

    found = nodes_of(tmp_path)

    assert found["a"].lost_s == {}
    assert found["b"].lost_s == {"hang": 30.0 * 4}


def test_a_node_that_is_silent_and_for_which_the_run_stands_still_is_counted_once(
    tmp_path: Path,
) -> None:
    play(tmp_path, hang("", 0, 50, kind="silence", of="b"), hang("b", 20, 60))

    assert nodes_of(tmp_path)["b"].lost_s == {"hang": 60.0 * 4}


def test_a_hang_of_a_run_on_one_node_says_nothing_of_the_machine(tmp_path: Path) -> None:
    play(tmp_path, hang("a", of="a"), nodes=["a"])

    assert nodes_of(tmp_path)["a"].lost_s == {}


def test_deaths_are_counted_but_for_those_that_were_taken_back(tmp_path: Path) -> None:
    play(tmp_path, death("b"), death("a", taken_back=True), run="r0")
    play(tmp_path, death("b", cause="out_of_memory"), run="r1")

    found = nodes_of(tmp_path)

    assert found["b"].deaths == {"signal": 1, "out_of_memory": 1}
    assert (found["a"].deaths, found["b"].cost_s) == ({}, 0.0)


def test_a_gpu_is_held_back_by_the_reason_that_lasts_longest_in_all_runs(tmp_path: Path) -> None:
    # Of a hundred seconds. The power limit is the ordinary one under load.
    held = {("0", "hw_thermal"): 0.5, ("0", "sw_thermal"): 0.2, ("1", "hw_slowdown"): 0.1}
    for run in ("r0", "r1"):
        play(tmp_path, run=run, nodes=["a"])
        file = RunFile(tmp_path / file_name("g", run, "a"))
        values = {}
        for (gpu, reason), share in {**held, ("0", "sw_power"): 1.0}.items():
            labels = (("hw.id", f"GPU-{gpu}"), ("reason", reason))
            key = SeriesKey("node", "otel_ddp.gpu.throttle.active", gpu, labels)
            points = [(s, s * S, float(s < share * 100)) for s in range(101)]
            values[key] = value_sums(file, key, points)
        for code in ("79", "9"):
            key = SeriesKey("counter", "otel_ddp.gpu.xid.errors", "", (("code", code),))
            values[key] = value_sums(file, key, [(0, S, 1.0)])
        file.write(values=values)
        file.close()

    found = nodes_of(tmp_path)["a"]

    assert found.held_back_s == pytest.approx(2 * (50 + 10), rel=0.02)
    assert found.xids == ["9", "79"]


def test_a_gpu_is_not_held_back_between_two_attempts_of_a_run(tmp_path: Path) -> None:
    play(tmp_path, nodes=["a"])
    file = RunFile(tmp_path / file_name("g", "r", "a"))
    labels = (("hw.id", "GPU-0"), ("reason", "hw_thermal"))
    key = SeriesKey("node", "otel_ddp.gpu.throttle.active", "0", labels)
    # Ten days lie between them.
    seconds = [began_s + s for began_s in (0, 864_000) for s in range(0, 1000, 10)]
    file.write(values={key: value_sums(file, key, [(s, s * S, 1.0) for s in seconds])})
    file.close()

    assert nodes_of(tmp_path)["a"].held_back_s == pytest.approx(2000, rel=0.05)


def test_a_node_whose_history_is_lost_is_known_by_what_the_lead_says_of_it(tmp_path: Path) -> None:
    play(tmp_path, late("b", 144.0), hang("b"), kept=["a"])

    found = nodes_of(tmp_path)

    assert found["b"].lost_s == {"late": 144.0, "hang": 240.0}
    # Its ranks have taken as long as those that are known.
    assert found["b"].late_in == [LateIn("g", "r", 144 / (2 * SPENT_S))]
    assert found["b"].runs == 1


def test_the_machine_is_suspect_that_was_late_in_three_runs_of_two_groups(tmp_path: Path) -> None:
    for number, group in enumerate(("g", "g", "h")):
        play(
            tmp_path,
            late("b", 1000.0),
            late("c", 1000.0),
            run=f"r{number}",
            group=group,
            nodes="abc",
        )
    play(tmp_path, late("c", 1000.0), run="r3", nodes="c")
    for number in range(4, 12):
        play(tmp_path, run=f"r{number}", nodes="c", ago_days=0.5)
    for number in range(3):
        # In one group alone it may be what its programs do.
        play(tmp_path, late("d", 1000.0), run=f"of-g-{number}", nodes="d")

    found = nodes_of(tmp_path)

    assert [each.node for each in found.values() if each.is_suspect] == ["b"]
    # Good runs have taken the place of the late ones.
    assert (len(found["c"].late_in), found["c"].last_runs, found["c"].runs) == (2, 10, 12)
    assert len(found["d"].late_in) == 3


def test_the_last_runs_are_those_of_30_days_and_of_the_days_that_are_asked_for(
    tmp_path: Path,
) -> None:
    for run, ago_days in (("r0", 60.0), ("r1", 20.0), ("r2", 2.0)):
        play(tmp_path, late("b", 1000.0), run=run, ago_days=ago_days)

    def seen(days: int) -> tuple[int, int, list[str]]:
        found = nodes_of(tmp_path, days)["b"]
        return found.runs, found.last_runs, sorted(each.run for each in found.late_in)

    assert seen(90) == (3, 2, ["r1", "r2"])
    assert seen(30) == (2, 2, ["r1", "r2"])
    assert seen(7) == (1, 1, ["r2"])


@pytest.mark.parametrize("lost_s", ["144", None, float("nan"), float("inf"), -5.0, [1.0], {}])
def test_a_cost_that_is_no_number_of_seconds_is_none(tmp_path: Path, lost_s: Any) -> None:
    play(tmp_path, late("b", lost_s))

    (one, other) = fleet(tmp_path).nodes

    assert (one.cost_s, other.cost_s) == (0.0, 0.0)
    json.dumps([one.to_json(), other.to_json()], allow_nan=False)


def test_a_history_that_is_damaged_leaves_the_others_and_is_named(tmp_path: Path) -> None:
    play(tmp_path, late("b", 144.0), run="r0")
    play(tmp_path, late("b", 7.0), run="r1", nodes="b", about={"time": {"seconds": {"hang": "x"}}})
    (tmp_path / f"other{next(tmp_path.iterdir()).suffix}").write_bytes(b"no database")

    found = fleet(tmp_path)

    assert {each.node: each.cost_s for each in found.nodes} == {"b": 144.0, "a": 0.0}
    assert len(found.faults) == 2
    assert found.runs == 2


def test_an_empty_folder_has_no_machine(tmp_path: Path) -> None:
    assert fleet(tmp_path) == Fleet(0, [], [])
