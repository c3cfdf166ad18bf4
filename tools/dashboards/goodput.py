"""The board Goodput: how much of the GPU-hours moved runs on, and what did the rest cost?"""

from __future__ import annotations

from typing import Any

from tools.dashboards import variables as v
from tools.dashboards.annotations import marks
from tools.dashboards.board import Row, board
from tools.dashboards.links import of_series
from tools.dashboards.looks import HOURS
from tools.dashboards.names import recorded
from tools.dashboards.panels import Column, Panel, Text, lines, now, over_time, rows, stat
from tools.dashboards.roles import (
    GROUP_NAME,
    IN_STEP,
    RUN_NAME,
    SHORTEST_STEP,
    each_group,
    each_run,
    having_role,
    last,
)
from tools.dashboards.selectors import BY_RUN, GROUPS, WHOLE_RUNS
from tools.dashboards.time_spent import (
    attempts,
    by_cause,
    goodput,
    hours_by_cause,
    spent,
    table_of_groups,
    table_of_runs,
)

from otel_ddp.vocabulary.words import TIME_COLOURS

QUESTION = "How much of the GPU-hours moved the runs on, and what did the rest cost?"

# Evaluation is shown, and is no loss.
_LOST = 'cause!~"productive|evaluation"'
# What a healthy cluster would not have at all.
_TROUBLE = 'cause=~"late_rank|hang|repeated|between_attempts"'
# Hours that nobody is known to have paid for are time, and cost nothing.
_HELD = 'cause!~"between_launches"'
# At 0 there is no price, and no money.
_PRICED = "* on () group_left () (vector($price) > 0)"
_NO_PRICE = "no price chosen"


def build() -> str:
    price = v.text(
        "price",
        "Price",
        "0",
        "Of one hour of one GPU, in any currency: 2.50. With 0 no costs are shown.",
    )
    return board(
        "Goodput",
        QUESTION,
        [
            Row("Of the chosen runs, since each first began", _numbers()),
            Row("By cause", _causes()),
            Row("By group and run", _tables()),
            Row("Over time", _over_time()),
        ],
        variables=[v.datasource(), *v.of_runs(), price],
        # Of the runs of a week there are too many.
        annotations=marks(starts=False),
        since="now-7d",
    )


def _hours(*selectors: str) -> str:
    return f"sum({spent(_HELD, *selectors)}) / 3600"


def _costs(by: str, *selectors: str) -> str:
    return f"sum by ({by}) ({spent(_HELD, *selectors)}) / 3600 {_PRICED}"


def _numbers() -> list[Panel]:
    return [
        goodput(size=(6, 3)),
        stat(
            Text(
                "GPU-hours",
                "Hours of all ranks of these runs, from the start of their first processes on, "
                "with the gaps between attempts of a launch.",
                "What was paid for: compare with your bill.",
            ),
            now(_hours()),
            unit=HOURS,
            nothing="not counted",
        ),
        stat(
            Text(
                "Lost to all causes",
                "GPU-hours that moved no run on and were no evaluation.",
                "By cause, below, tells what took them.",
            ),
            now(_hours(_LOST)),
            unit=HOURS,
            nothing="not counted",
        ),
        stat(
            Text(
                "Lost to trouble",
                "GPU-hours lost to late ranks, hangs, steps done twice and the gaps between "
                "attempts of a launch: lost seconds times ranks.",
                "The table of runs says where; Ranks says who, and Run why an attempt ended.",
            ),
            now(_hours(_TROUBLE)),
            unit=HOURS,
            nothing="not counted",
        ),
        stat(
            Text(
                "Restarts",
                "Attempts of these runs beyond the first of each.",
                "The table says which run; its page says why each attempt ended.",
            ),
            now(f"sum(({attempts()}) - 1)"),
            decimals=0,
            nothing="not counted",
        ),
        stat(
            Text(
                "Cost",
                "The GPU-hours at the price above.",
                "Choose what an hour of a GPU costs you.",
            ),
            now(f"{_hours()} {_PRICED}"),
            unit="locale",
            decimals=2,
            nothing=_NO_PRICE,
        ),
        stat(
            Text(
                "Cost of all losses",
                "The hours lost to all causes at the price above.",
                "As for the hours above it.",
            ),
            now(f"{_hours(_LOST)} {_PRICED}"),
            unit="locale",
            decimals=2,
            nothing=_NO_PRICE,
        ),
        stat(
            Text(
                "Cost of trouble",
                "The hours lost to trouble at the price above.",
                "As for the hours above it.",
            ),
            now(f"{_hours(_TROUBLE)} {_PRICED}"),
            unit="locale",
            decimals=2,
            nothing=_NO_PRICE,
        ),
    ]


def _causes() -> list[Panel]:
    recorded_ = recorded("run_cause:otel_ddp_run_time:sum", WHOLE_RUNS)
    told = having_role(last(recorded_, IN_STEP), IN_STEP)
    return [
        hours_by_cause(f"sum by (cause) ({spent()})", size=(8, 9)),
        lines(
            Text(
                "Shares until then",
                "Of all time until each moment, the share of each cause, of the chosen runs that "
                "report then. All shares together are 1.",
                "Where `productive` falls, something was lost: a restart, a hang, a late rank.",
            ),
            over_time(f"sum by (cause) ({told}) / on () group_left () sum({told})", "{{cause}}"),
            unit="percentunit",
            minimum=0,
            maximum=1,
            stacked=True,
            colours=TIME_COLOURS,
            legend=("lastNotNull",),
            size=(16, 9),
            shortest_step=SHORTEST_STEP,
            nothing="not counted",
        ),
    ]


def _tables() -> list[Panel]:
    paid = [
        Column("Value #cost", "Cost", "locale", decimals=2),
        Column("Value #trouble", "Cost of trouble", "locale", decimals=2, width=150),
    ]

    def asked(by: str) -> list[Any]:
        return [rows(_costs(by), "cost"), rows(_costs(by, _TROUBLE), "trouble")]

    return [
        table_of_groups(*asked("group"), columns=paid),
        table_of_runs(*asked(BY_RUN), columns=paid),
    ]


def _over_time() -> list[Panel]:
    of_groups, of_runs, of_all = (
        last(recorded(f"{whose}:otel_ddp_run_time:goodput_ratio", chosen), IN_STEP)
        for whose, chosen in (("group", GROUPS), ("run", WHOLE_RUNS), ("cluster", ""))
    )
    of_runs = having_role(of_runs, IN_STEP)
    return [
        by_cause(size=(24, 8)),
        lines(
            Text(
                "Goodput of groups",
                "Of the runs of a group that report then, each since it first began; and of all "
                "runs of all groups.",
                "A group below the others: see what its time goes to.",
            ),
            over_time(each_group(of_groups), GROUP_NAME, "groups"),
            over_time(of_all, "all", "all"),
            unit="percentunit",
            minimum=0,
            maximum=1,
            sort=("Last *", False),
            shortest_step=SHORTEST_STEP,
            nothing="not counted",
        ),
        lines(
            Text(
                "Goodput of runs",
                "Of each run, since it first began.",
                "It rises as long as a run goes on well. Where it falls, the run was started "
                "again, or stood still.",
            ),
            over_time(each_run(of_runs), RUN_NAME),
            unit="percentunit",
            minimum=0,
            maximum=1,
            sort=("Last *", False),
            shortest_step=SHORTEST_STEP,
            nothing="not counted",
            link=of_series("Run", "run"),
        ),
    ]
