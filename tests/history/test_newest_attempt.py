"""A run that was started again, maybe on other nodes: every face tells its newest attempt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from histories import S, summary, value_rows
from otel_ddp.history import report
from otel_ddp.history.buckets import step_row
from otel_ddp.history.directory import file_name, find_run
from otel_ddp.history.newest_attempt import OfNode, are_redundant, newest_attempt
from otel_ddp.history.page import columns, runs
from otel_ddp.history.page.answers import ANSWERS
from otel_ddp.history.page.http import Question
from otel_ddp.history.run_file import RunFile
from otel_ddp.history.tables import Event, SeriesKey
from otel_ddp.journal.process_state import ProcessState
from otel_ddp.journal.survey import Survey
from otel_ddp.vocabulary.words import PHASES

T = 1_800_000_000 * S
LOSS = SeriesKey("value", "loss", "0", (("split", "train"),))


def process(rank: int, state: str, began_s: int, ended_s: int, node: str = "a") -> ProcessState:
    times = {"started_ns": T + began_s * S, "seen_alive_ns": T + ended_s * S}
    return ProcessState(run="r", rank=rank, state=state, node=node, pid=7, **times)


def wrote(
    folder: Path,
    node: str,
    processes: Sequence[ProcessState],
    losses: dict[int, float],
    attempts_s: Sequence[int] = (),
    events: Sequence[Event] = (),
    **about: Any,
) -> None:
    """The history of a node, with the losses of rank 0 by their steps, one a second."""
    file = RunFile(folder / file_name("", "r", node))
    began_ns, ended_ns = processes[-1].started_ns, processes[-1].seen_alive_ns or 0
    points = [(step, began_ns + step * S, loss) for step, loss in losses.items()]
    codes = bytes([PHASES["forward"]])
    steps = [step_row(step, ns, ns + S, codes, [S], 0, False) for step, ns, _ in points]
    file.write(
        rows={LOSS: value_rows(points), SeriesKey("steps", "host", "0"): steps},
        ranks={str(each.rank): each.to_json() for each in processes},
        about={
            "group": "",
            "run": "r",
            "node": node,
            "job_type": "",
            "summary": [summary("loss", "train", points)] if points else [],
            "began_ns": began_ns,
            "seen_ns": ended_ns,
            "attempts": [
                {"attempt": number, "began_ns": T + began_s * S}
                for number, began_s in enumerate(attempts_s, 1)
            ],
            **about,
        },
        events=events,
    )
    file.close()


def faces(folder: Path) -> dict[str, tuple[str, list[str]]]:
    """The state and the ranks of the run, as each tells them."""
    ((row,), _) = runs.Runs(folder, ours=False).rows()
    with find_run(str(folder), folder) as run:
        gathered, head = report.gather(run), runs.head(run, Survey())
        table = runs.ranks(run, Survey())
        card = report.card_of(gathered)
    return {
        "list": (row["state"], row["ranks"]),
        "report": (gathered["run"]["state"], [each["rank"] for each in gathered["ranks"]]),
        "page": (head["state"], [each["rank"] for each in table["ranks"]]),
        "card": (card.state, [each["rank"] for each in gathered["ranks"]]),
    }


def test_a_run_that_finishes_with_fewer_ranks_has_finished(tmp_path: Path) -> None:
    last = [process(0, "finished", 20, 30), process(1, "killed", 0, 10)]
    wrote(tmp_path, "a", last[::-1], {}, attempts_s=(0, 20))

    assert faces(tmp_path) == dict.fromkeys(faces(tmp_path), ("finished", ["0"]))


def test_ranks_that_moved_to_another_node_are_told_from_there(tmp_path: Path) -> None:
    before, after = {0: 9.0, 10: 1.0, 20: 7.0}, {15: 5.0, 25: 3.0}
    wrote(tmp_path, "a", [process(rank, "killed", 0, 30) for rank in (0, 1)], before)
    wrote(tmp_path, "b", [process(rank, "finished", 40, 90, "b") for rank in (0, 1)], after)

    assert faces(tmp_path) == dict.fromkeys(faces(tmp_path), ("finished", ["0", "1"]))
    with find_run(str(tmp_path), tmp_path) as run:
        losses = [(each.first, each.last) for each in run.values["loss", "train"]]
        (loss,) = run.summary
        nodes = {each["node"] for each in run.ranks.values()}
        steps = run.steps(1)
        grid = columns.grid(run, Question("steps"))["columns"]
        drawn = columns.columns_of(run, Question("values", {"name": ["loss"]}), "value")["series"]
    ((row,), _) = runs.Runs(tmp_path, ours=False).rows()
    assert nodes == {"b"}
    assert losses == [(0, 9.0), (10, 1.0), (15, 5.0), (25, 3.0)]
    assert [each.first for _, each in sorted(steps.items())] == [0, 10, 15, 25]
    made = zip(grid["first"], grid["steps"], strict=True)
    assert [first for first, many in made if many] == [0, 10, 15, 25]
    assert [(each["node"], each["columns"]["last"]) for each in drawn] == [
        *(("b", [5.0, 3.0]), ("a", [9.0, 1.0]))
    ]
    # The last value is of the newest attempt, the best one of all.
    assert (loss["last"]["value"], loss["min"]["value"], loss["max"]["value"]) == (3.0, 1.0, 9.0)
    assert row["summary"] == [loss]


def test_a_wide_bucket_is_not_drawn_beyond_where_its_rank_moved_away(tmp_path: Path) -> None:
    wrote(tmp_path, "a", [process(0, "killed", 0, 30)], dict.fromkeys(range(5000), 9.0))
    wrote(tmp_path, "b", [process(0, "finished", 40, 90, "b")], {2501: 5.0, 2502: 3.0})

    with find_run(str(tmp_path), tmp_path) as run:
        question = Question("values", {"name": ["loss"], "columns": ["4096"]})
        after, before = columns.columns_of(run, question, "value")["series"]
    assert after["columns"]["first"] == [2501, 2502]
    assert before["columns"]["x"] == [*range(1, 2500, 2)]


def test_what_a_rank_has_said_counts_as_its_own_node_has_it(tmp_path: Path) -> None:
    of_a = [process(1, "running", 0, 30, "b"), process(0, "killed", 0, 30)]
    of_b = [process(1, "running", 0, 300, "b")]
    for node, ranks, nodes in (("a", of_a, {"b": T}), ("b", of_b, {})):
        # The clock of another node is known to some milliseconds.
        at_ns = T + ord(node)
        said = [Event(at_ns, 1, str(each.rank), "log", "INFO", "saved", {}) for each in ranks]
        wrote(tmp_path, node, ranks, {}, events=said, led_by="a", nodes=nodes)

    with find_run(str(tmp_path), tmp_path) as run:
        found = ANSWERS["events"](run, Question("events"))["events"]
        assert run.ranks["1"]["seen_alive_ns"] == T + 300 * S
    assert [(each["rank"], each["node"], each["time_ns"]) for each in found] == [
        *(("1", "b", T + ord("b")), ("0", "a", T + ord("a")))
    ]


@pytest.mark.parametrize("is_here", [True, False])
def test_a_node_that_led_an_earlier_attempt_does_not_call_what_it_has_the_whole_run(
    tmp_path: Path, is_here: bool
) -> None:
    # Rank 0 is on the other node now.
    wrote(tmp_path, "a", [process(0, "killed", 0, 30, "a")], {}, led_by="b", nodes={"b": 1})
    if is_here:
        wrote(tmp_path, "b", [process(0, "running", 40, 50, "b")], {})

    with find_run(str(tmp_path), tmp_path) as run:
        assert run.look == ("" if is_here else "all ranks of this run are shown on b")


@pytest.mark.parametrize(
    ("nodes", "state"),
    [
        # It is at work again on another node, whatever has become of the first one.
        ([[process(0, "killed", 0, 10)], [process(0, "running", 20, 25, "b")]], "running"),
        ([[process(0, "finished", 0, 10)], [process(0, "killed", 20, 25, "b")]], "killed"),
        # One attempt on two nodes, with the worst end of any.
        ([[process(0, "finished", 0, 10)], [process(1, "failed", 1, 9, "b")]], "failed"),
        # A smaller world on other nodes.
        (
            [
                [process(0, "killed", 0, 10), process(1, "killed", 0, 10)],
                [process(0, "finished", 20, 30, "b")],
            ],
            "finished",
        ),
        # Its ranks have other numbers than those of before.
        (
            [
                [process(0, "killed", 0, 10)],
                [
                    process(1, "killed", 0, 10, "b"),
                    replace(process(2, "finished", 20, 30, "b"), trains=True),
                ],
            ],
            "finished",
        ),
        # An evaluator that starts after the training is no attempt of it.
        ([[process(0, "failed", 0, 10)], [process(9, "finished", 20, 30, "b")]], "failed"),
    ],
)
def test_the_state_is_that_of_the_newest_attempt(nodes: Any, state: str) -> None:
    told = [
        OfNode({str(each.rank): each.to_json() for each in node}, T + 100 * S) for node in nodes
    ]

    assert newest_attempt(told).state == newest_attempt(told[::-1]).state == state


def test_what_the_agent_knows_now_is_newer_than_what_is_written(tmp_path: Path) -> None:
    wrote(tmp_path, "a", [process(rank, "killed", 0, 10) for rank in (0, 1)], {})
    live = Survey(agents=[{}], processes=[process(0, "running", 20, 21)])

    with find_run(str(tmp_path), tmp_path) as run:
        head, table = runs.head(run, live), runs.ranks(run, live)

    assert (head["state"], [each["rank"] for each in table["ranks"]]) == ("running", ["0"])


def test_a_rank_whose_node_is_not_heard_any_more_does_not_count_beside_others() -> None:
    def state(unheard_s: int) -> str:
        lost = process(1, "not heard", 0, 100 - unheard_s).to_json()
        ranks = {"0": process(0, "finished", 0, 99).to_json(), "1": lost}
        return newest_attempt([OfNode(ranks, T + 100 * S)]).state

    assert (state(30), state(90)) == ("running", "finished")
    # The agent of the other node has vanished as well.
    here = OfNode({"0": process(0, "finished", 0, 99).to_json()}, T + 100 * S)
    there = OfNode({"1": process(1, "running", 0, 30).to_json()}, T + 30 * S)
    assert newest_attempt([here, there]).state == "finished"


def test_a_process_is_the_same_though_its_clock_is_known_better_now() -> None:
    written = process(0, "finished", 20, 30).to_json() | {"journal": "7-a.journal"}
    other = process(1, "finished", 1, 18).to_json()
    now = written | {"started_ns": written["started_ns"] - 5, "step": 9}

    found = newest_attempt([OfNode({"0": written, "1": other}, T), OfNode({"0": now}, T)])

    assert (found.ranks, found.began_ns) == ({"0": now, "1": other}, 0)


def test_of_two_nodes_that_know_a_process_the_one_that_was_written_last_describes_it() -> None:
    older, newer = (OfNode({"0": {"step": at, "started_ns": T}}, T + at) for at in (1, 2))

    found = [newest_attempt(nodes).ranks["0"] for nodes in ([older, newer], [newer, older])]

    assert [each["step"] for each in found] == [2, 2]


def of_node(node: str, began_s: int, led_by: str = "", **others_s: int) -> OfNode:
    since = {other: T + at * S for other, at in others_s.items()}
    return OfNode({}, T, 0, node, T + began_s * S, led_by, since)


@pytest.mark.parametrize(
    ("nodes", "twice"),
    [
        ([of_node("a", 0, b=1), of_node("b", 2, "a")], [False, True]),
        # Its lead's file is not here, or never had it.
        ([of_node("c", 0, b=1), of_node("b", 2, "a")], [False, False]),
        ([of_node("a", 0), of_node("b", 2, "a")], [False, False]),
        # It has gone on without its lead.
        ([of_node("a", 0, b=1), of_node("b", 2, "a")._replace(seen_ns=T + 61 * S)], [False, False]),
        # It was there long before the lead knew of it.
        ([of_node("a", 900, b=901), of_node("b", 2, "a")], [False, False]),
        # That time is in the file of another lead; which has led, and so has ranks of others.
        (
            [of_node("a", 900, b=901, c=901), of_node("b", 2, "a"), of_node("c", 0, "a", b=1)],
            [False, True, False],
        ),
    ],
)
def test_a_file_is_passed_over_if_another_has_all_of_it(
    nodes: list[OfNode], twice: list[bool]
) -> None:
    assert are_redundant(nodes) == twice
