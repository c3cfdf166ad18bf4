"""Every query of every board, asked of a Prometheus that has seen a cluster and its troubles."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import pytest
from tools.dashboards.queries import Board, Mark, Question, boards
from tools.stack.build import Binaries

from nvml_boards import standin_library
from stack.asked import ALL, Page, answer, expression, opened, options, put_in, step_s
from stack.scenario import (
    BASE,
    DEBUG,
    EVALUATOR,
    EXPORT_EVERY_S,
    HIGH,
    HUNG_RANK,
    LATE_RANK,
    LOW,
    NODES,
    WORLD_SIZE,
    scenario,
)
from stack.servers import Sample, Series

BOARDS = {board.title: board for board in boards()}
# Of a list of values, so many are chosen by themselves.
MOST_VALUES = 4
PAID = ("cost", "trouble")
# What of all targets may bring nothing: the panel and the letter of the target.
MAY_BE_EMPTY = {
    "GPUs & nodes": {
        # Where the tests run there may be no such thing.
        *(("Swap", "A"), ("InfiniBand and RoCE", "A"), ("Standing still for want of", "A")),
    },
    "Ranks": {
        # Where no program waits for others by itself.
        ("Ranks with most work", "own"),
        # Where no rank has more to do, none stalls again and again, and no node is late as a whole.
        *(("Verdicts", ref) for ref in "ABDE"),
        ("Nodes with most work", "late"),
        # How long ranks on several nodes wait is not known.
        *(("Waiting in each mesh dimension", ref) for ref in "AB"),
        ("Collectives of a step", "wait"),
    },
    "Fleet": {
        # It ends with the last whole step, in which no time had been lost yet.
        ("Who is waited for", "A"),
    },
    "Goodput": {
        # Where no price is chosen.
        *((panel, "A") for panel in ("Cost", "Cost of all losses", "Cost of trouble")),
        *((panel, ref) for panel in ("By group", "What the time went to") for ref in PAID),
    },
}

Target = tuple[int, str, str]
"""Number and title of a panel, and the letter of one of its queries."""
Answers = dict[Target, list[dict[str, str]]]
"""The labels of the series that each target brings."""


class Reader:
    """Somebody who opens boards and chooses; asks the same query once only."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self._known: dict[tuple[str, bool, float], list[dict[str, str]]] = {}

    def opened(self, board: Board, **wanted: Sequence[str]) -> dict[str, str]:
        """Values for all variables: All where there is an All, unless something is wanted."""
        everything = {each.name: (ALL,) for each in board.variables if each.multi}
        return opened(board, self.page, **{**everything, **wanted})

    def options(self, board: Board, name: str, **wanted: Sequence[str]) -> list[str]:
        """What there is to choose from for a variable."""
        (variable,) = (each for each in board.variables if each.name == name)
        return options(variable, self.opened(board, **wanted), self.page)

    def answers(self, board: Board, **wanted: Sequence[str]) -> Answers:
        """What a board shows with these values; a query that is wrong raises."""
        values = self.opened(board, **wanted)
        return {
            **{(q.panel_id, q.panel, q.ref): self._answer(q, values) for q in board.questions},
            **{(0, mark.name, ""): self._marks(mark, values) for mark in board.marks},
        }

    def _answer(self, question: Question, values: Mapping[str, str]) -> list[dict[str, str]]:
        every_s = step_s(self.page, question)
        asked = (expression(question, values, self.page), question.instant, every_s)
        if asked not in self._known:
            found = answer(question, values, self.page)
            self._known[asked] = [each.labels for each in found]
        return self._known[asked]

    def _marks(self, mark: Mark, values: Mapping[str, str]) -> list[dict[str, str]]:
        page, every_s = self.page, self.page.interval_s
        found = page.prometheus.query_range(
            put_in(mark.expr, values, page, every_s=every_s),
            start_s=page.start_s,
            end_s=page.end_s,
            step_s=every_s,
        )
        return [each.labels for each in found]


@pytest.fixture(scope="module")
def reader(binaries: Binaries, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    folder = tmp_path_factory.mktemp("scenario")
    with scenario(binaries, folder, standin_library(tmp_path_factory)) as played:
        played.play()
        played.rest()
        # On a machine that is as busy as two nodes, exports come late.
        interval_s = 2 * EXPORT_EVERY_S
        yield Reader(Page(played.prometheus, played.start_s, played.end_s, interval_s))


def single(board: Board) -> list[str]:
    """The variables of which one value is chosen, from a list."""
    lists = ("query", "custom")
    return [each.name for each in board.variables if not each.multi and each.kind in lists]


@pytest.mark.parametrize("title", BOARDS)
def test_every_query_brings_something(title: str, reader: Reader) -> None:
    board = BOARDS[title]
    found = [reader.answers(board)]
    for name in single(board):
        found += [reader.answers(board, **{name: (v,)}) for v in reader.options(board, name)]

    empty = {
        (panel, ref)
        for panel_id, panel, ref in found[0]
        if not any(each[panel_id, panel, ref] for each in found)
    }
    assert empty <= MAY_BE_EMPTY.get(title, set())


def test_a_run_is_compared_with_the_one_before_it(reader: Reader) -> None:
    board = BOARDS["Run"]
    sweep = {"group": (HIGH.group,), "run": (LOW.name,)}

    before = reader.options(board, "before", **sweep)
    of_first = reader.options(board, "before", group=(HIGH.group,), run=(HIGH.name,))

    # The first one of a group has only itself, and then the others.
    assert (before, of_first) == ([HIGH.name, LOW.name], [HIGH.name, LOW.name])
    values = reader.opened(board, **sweep)
    asked = {each.ref: each for each in board.questions if each.panel.startswith("What differs")}
    mine, other = (
        {
            each.labels["setting"]: each.labels[label]
            for each in answer(asked[ref], values, reader.page)
            # Somebody may write into this checkout meanwhile.
            if not each.labels["setting"].startswith("git_")
        }
        for ref, label in (("mine", "value"), ("before", "before"))
    )
    assert mine == {"config.lr": "0.001", "config.seed": "2", "name": LOW.called}
    assert other == {"config.lr": "0.1", "config.seed": "1"}


def several(board: Board) -> list[str]:
    """The variables of which several values are chosen; where it shows one run, within that."""
    names = [each.name for each in board.variables]
    first = names.index("run") if "run" in single(board) else 0
    return [each.name for each in board.variables[first:] if each.multi]


@pytest.mark.parametrize(
    ("title", "name"), [(title, name) for title in BOARDS for name in several(BOARDS[title])]
)
def test_what_is_chosen_is_shown_and_nothing_else(title: str, name: str, reader: Reader) -> None:
    board = BOARDS[title]
    within = {"run": (BASE.name,)} if "run" in single(board) else {}
    everything = reader.answers(board, **within)
    there = reader.options(board, name, **within)
    asks = {(q.panel_id, q.panel, q.ref) for q in board.questions if mentions(q.expr, name)}
    asks |= {(0, mark.name, "") for mark in board.marks if mentions(mark.expr, name)}

    for chosen in [*((value,) for value in there[:MOST_VALUES]), tuple(there[:2])]:
        shown = reader.answers(board, **within, **{name: chosen})

        # A node's or a board's own numbers are everybody's: they are without the label.
        strange = {
            key
            for key in asks
            for labels in shown[key]
            if labels.get(name, "") not in (*chosen, "")
        }
        assert strange == set(), chosen
        more = {key for key, found in shown.items() if len(found) > len(everything[key])}
        assert more == set(), chosen
        if len(chosen) < len(there):
            assert total(shown) < total(everything), f"{chosen} leaves nothing out"


def mentions(expr: str, name: str) -> bool:
    return re.search(rf"\$\{{?{name}\b", expr) is not None


def total(answers: Answers) -> int:
    return sum(map(len, answers.values()))


@pytest.mark.parametrize("roles", [(ALL,), (BASE.others,), (EVALUATOR,)])
def test_a_run_is_one_row_whatever_the_roles_of_its_processes(
    roles: Sequence[str], reader: Reader
) -> None:
    table = [each for each in BOARDS["Runs"].questions if each.panel == "Runs"]
    values = reader.opened(BOARDS["Runs"], job_type=roles)

    for question in table:
        found = [each.labels for each in answer(question, values, reader.page)]
        named = sorted(labels["run"] for labels in found)

        assert len(named) == len(set(named)), question.ref
        assert roles == (ALL,) or set(named) <= {BASE.name}, question.ref
        if question.ref == "info":
            assert BASE.name in named
            assert {labels["world_size"] for labels in found} == {str(WORLD_SIZE)}


def test_the_best_loss_of_each_run_is_its_lowest_one_and_has_a_step(reader: Reader) -> None:
    values = reader.opened(BOARDS["Runs"])
    table = {each.ref: each for each in BOARDS["Runs"].questions if each.panel == "Runs"}

    best, lowest, step = (
        {each.labels["run"]: each.value for each in answer(table[ref], values, reader.page)}
        for ref in ("best", "lowest", "best_step")
    )

    assert BASE.name in best
    assert best == lowest
    assert step.keys() == best.keys()


def named(reader: Reader, title: str, panel: str, **wanted: Sequence[str]) -> dict[str, str]:
    """The labels of the one thing that a panel names."""
    board = BOARDS[title]
    question = next(each for each in board.questions if each.panel == panel)
    (found,) = answer(question, reader.opened(board, **wanted), reader.page)
    return found.labels


def test_the_boards_name_who_is_late_who_hangs_and_what_is_hot(reader: Reader) -> None:
    late = {"node": NODES[1], "rank": str(LATE_RANK)}

    slowest = named(reader, "Ranks", "Slowest rank or node", run=(BASE.name,))
    assert slowest == {**late, "phase": "data", "who": f"rank {LATE_RANK} · "}
    assert named(reader, "Run", "Cost most", run=(BASE.name,)) == late
    hung = {"node": NODES[0], "rank": str(HUNG_RANK)}
    assert named(reader, "Ranks", "Held up by", run=(DEBUG.name,)) == hung
    assert named(reader, "GPUs & nodes", "Hottest").items() >= late.items()


def test_the_causes_of_a_run_are_all_of_its_time_and_its_attempts_are_counted(
    reader: Reader,
) -> None:
    board = BOARDS["Goodput"]
    values = reader.opened(board, run=(LOW.name,))

    def told(panel: str, ref: str = "A") -> list[Sample | Series]:
        (asked,) = (e for e in board.questions if e.panel == panel and e.ref == ref)
        return list(answer(asked, values, reader.page))

    causes = {each.labels["cause"]: each.value for each in told("GPU-hours by cause")}
    (hours,) = told("GPU-hours")
    (trouble,) = told("Lost to trouble")
    (restarts,) = told("Restarts")
    (attempts,) = told("What the time went to", "attempts")

    # It failed once, and went on from its checkpoint.
    assert {"productive", "start", "between_attempts"} <= causes.keys()
    assert sum(causes.values()) == pytest.approx(hours.value)
    lost = ("late_rank", "hang", "repeated", "between_attempts")
    assert trouble.value == pytest.approx(sum(causes.get(each, 0.0) for each in lost))
    # On each of its nodes.
    assert (attempts.value, restarts.value) == (2, 1)
    shares: dict[float, float] = {}
    for each in told("Shares until then"):
        for at_s, share in each.points:
            shares[at_s] = shares.get(at_s, 0.0) + share
    assert [*shares.values()] == pytest.approx([1.0] * len(shares))


def test_a_run_is_not_measured_against_itself(reader: Reader) -> None:
    board = BOARDS["Run"]
    asked = next(each for each in board.questions if each.panel == "Efficiency")
    itself = reader.opened(board, run=(BASE.name,), before=(BASE.name,))
    another = reader.opened(board, run=(HIGH.name,), before=(BASE.name,))

    assert answer(asked, itself, reader.page) == []
    (found,) = answer(asked, another, reader.page)

    assert isinstance(found, Series)
    assert all(share > 0 for _, share in found.points)
