"""The board Goodput: how much of the GPU-hours moved runs on, and what did the rest cost?"""

from __future__ import annotations

from collections.abc import Sequence

from tools.dashboards import panels
from tools.dashboards import variables as v
from tools.dashboards.annotations import marks
from tools.dashboards.board import Row, board
from tools.dashboards.links import of_table, of_table_lifetime
from tools.dashboards.looks import HOURS
from tools.dashboards.names import metric, recorded
from tools.dashboards.roles import (
    GROUP_NAME,
    IN_RANGE,
    IN_STEP,
    SHORTEST_STEP,
    average,
    each_group,
    having_role,
    last,
)
from tools.dashboards.runs import lifetime
from tools.dashboards.selectors import BY_RUN, GROUPS, WHOLE_RUNS

from otel_ddp.vocabulary.words import TIME_CAUSES, TIME_COLOURS

QUESTION = "How much of the GPU-hours moved the runs on, and what did the rest cost?"

# Evaluation is shown, and is no loss.
_LOST = 'cause!~"productive|evaluation"'
# Causes that a healthy cluster does not have.
_TROUBLE = 'cause=~"late_rank|hang|repeated|between_attempts"'
# Hours that nobody is known to have paid for are time, and cost nothing.
_HELD = 'cause!~"between_launches"'
# At 0 there is no price, and no money.
_PRICED = "* on () group_left () (vector($price) > 0)"
_PRODUCTIVE = 'cause="productive"'
# Causes with their own columns, narrow enough for a screen; the others are summed.
_COLUMNS = {
    "start": ("Start", 75),
    "data": ("Data", 75),
    "checkpoint": ("Saving", 80),
    "late_rank": ("Late rank", 100),
    "hang": ("Hang", 75),
    "repeated": ("Done twice", 110),
    "between_attempts": ("No process", 115),
}


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


def _spent(*selectors: str) -> str:
    """The seconds of each run and cause since its first start; also of ended runs."""
    found = last(recorded("run_cause:otel_ddp_run_time:sum", WHOLE_RUNS, *selectors))
    return having_role(found, IN_RANGE)


def _attempts() -> str:
    """The number of attempts of each run."""
    found = last(metric("otel_ddp.run.attempts", WHOLE_RUNS))
    return having_role(f"max by ({BY_RUN}) ({found})", IN_RANGE)


def _hours(*selectors: str) -> str:
    return f"sum({_spent(_HELD, *selectors)}) / 3600"


def _hours_stat(text: panels.Text, *selectors: str) -> panels.Panel:
    return panels.stat(text, panels.now(_hours(*selectors)), unit=HOURS, nothing="not counted")


def _cost_stat(text: panels.Text, *selectors: str) -> panels.Panel:
    asked = panels.now(f"{_hours(*selectors)} {_PRICED}")
    return panels.stat(text, asked, unit="locale", decimals=2, nothing="no price chosen")


def _numbers() -> list[panels.Panel]:
    return [
        panels.stat(
            panels.Text(
                "Goodput",
                "Of all time of the ranks of these runs, since each first began, the share in "
                "steps that moved the run on.",
                "The table says which run has lost most, and to what.",
            ),
            panels.now(f"sum({_spent(_PRODUCTIVE)}) / sum({_spent()})"),
            unit="percentunit",
            decimals=1,
            nothing="not counted",
        ),
        _hours_stat(
            panels.Text(
                "GPU-hours",
                "Hours of all ranks of these runs, from the start of their first processes on, "
                "with the gaps between attempts of a launch.",
                "What was paid for: compare with your bill.",
            )
        ),
        _hours_stat(
            panels.Text(
                "Lost to all causes",
                "GPU-hours that moved no run on and were no evaluation.",
                "By cause, below, tells what took them.",
            ),
            _LOST,
        ),
        _hours_stat(
            panels.Text(
                "Lost to trouble",
                "GPU-hours lost to late ranks, hangs, steps done twice and the gaps between "
                "attempts of a launch: lost seconds times ranks.",
                "The table of runs says where; Ranks says who, and Run why an attempt ended.",
            ),
            _TROUBLE,
        ),
        panels.stat(
            panels.Text(
                "Restarts",
                "Attempts of these runs beyond the first of each.",
                "The table says which run; its page says why each attempt ended.",
            ),
            panels.now(f"sum(({_attempts()}) - 1)"),
            decimals=0,
            nothing="not counted",
        ),
        _cost_stat(
            panels.Text(
                "Cost",
                "The GPU-hours at the price above.",
                "Choose what an hour of a GPU costs you.",
            )
        ),
        _cost_stat(
            panels.Text(
                "Cost of all losses",
                "The hours lost to all causes at the price above.",
                "As for the hours above it.",
            ),
            _LOST,
        ),
        _cost_stat(
            panels.Text(
                "Cost of trouble",
                "The hours lost to trouble at the price above.",
                "As for the hours above it.",
            ),
            _TROUBLE,
        ),
    ]


def _causes() -> list[panels.Panel]:
    recorded_ = recorded("run_cause:otel_ddp_run_time:sum", WHOLE_RUNS)
    told = having_role(last(recorded_, IN_STEP), IN_STEP)
    return [
        panels.bars(
            panels.Text(
                "GPU-hours by cause",
                "What the time of all ranks went to, over all attempts, since the run first began.",
                "docs/goodput.md says what each cause is. The largest beside `productive` is what "
                "to mend first.",
            ),
            panels.now(f"sort_desc(sum by (cause) ({_spent()}) / 3600 > 0)", "{{cause}}"),
            unit=HOURS,
            colours=TIME_COLOURS,
            nothing="not counted",
            size=(8, 9),
        ),
        panels.lines(
            panels.Text(
                "Shares until then",
                "Of all time until each moment, the share of each cause, of the chosen runs that "
                "report then. All shares together are 1.",
                "Where `productive` falls, something was lost: a restart, a hang, a late rank.",
            ),
            panels.over_time(
                f"sum by (cause) ({told}) / on () group_left () sum({told})", "{{cause}}"
            ),
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


def _tables() -> list[panels.Panel]:
    runs = f"count by (group) (sum by ({BY_RUN}) ({_spent()}))"
    return [
        _table(
            panels.Text(
                "By group",
                "Shares of the time of all chosen runs of a group, since each first began.",
                "Compare groups by Goodput, and find below which run of a group has lost most.",
            ),
            "group",
            [panels.rows(runs, "runs"), panels.rows(f"sum by (group) ({_attempts()})", "attempts")],
            [
                panels.Column("group", width=110),
                panels.Column("Value #runs", "Runs", decimals=0, width=75),
            ],
        ),
        _table(
            panels.Text(
                "What the time went to",
                "Shares of the time of all ranks of a run since it first began, over its attempts.",
                "The largest beside Goodput is what to mend first; `otel-ddp goodput` tells more.",
            ),
            BY_RUN,
            [panels.rows(_attempts(), "attempts"), *lifetime()],
            [
                panels.Column("group", width=90),
                panels.Column("run", width=110, links=[of_table_lifetime("Run"), of_table("Run")]),
                panels.Column("Value #start", "Started", out_of_sight=True),
                panels.Column("Value #until", "Until", out_of_sight=True),
            ],
        ),
    ]


def _table(
    text: panels.Text, by: str, asked: Sequence[panels.Query], columns: Sequence[panels.Column]
) -> panels.Panel:
    """*columns*: for the queries *asked*, without attempts."""
    whole = f"sum by ({by}) ({_spent()})"

    def share(selector: str) -> str:
        return f"sum by ({by}) ({_spent(selector)}) / {whole}"

    def cost(*selectors: str) -> str:
        return f"sum by ({by}) ({_spent(_HELD, *selectors)}) / 3600 {_PRICED}"

    others = "|".join(each for each in TIME_CAUSES if each not in {"productive", *_COLUMNS})
    return panels.listing(
        text,
        panels.rows(f"{whole} / 3600", "hours"),
        *asked,
        panels.rows(cost(), "cost"),
        panels.rows(cost(_TROUBLE), "trouble"),
        panels.rows(share(_PRODUCTIVE), "productive"),
        *(panels.rows(share(f'cause="{each}"'), f"of_{each}") for each in _COLUMNS),
        panels.rows(share(f'cause=~"{others}"'), "others"),
        columns=[
            *columns,
            panels.Column("Value #attempts", "Attempts", decimals=0, width=95),
            panels.Column("Value #hours", "GPU-hours", HOURS, decimals=2, width=137),
            panels.Column("Value #productive", "Goodput", "percentunit", decimals=1, width=95),
            *(
                panels.Column(f"Value #of_{each}", title, "percentunit", decimals=1, width=width)
                for each, (title, width) in _COLUMNS.items()
            ),
            panels.Column("Value #others", "Else", "percentunit", decimals=1, width=65),
            panels.Column("Value #cost", "Cost", "locale", decimals=2, width=70),
            panels.Column("Value #trouble", "Trouble", "locale", decimals=2, width=85),
        ],
        sort=("GPU-hours", True),
        nothing="no run has counted its time",
    )


def _over_time() -> list[panels.Panel]:
    of_groups, of_all = (
        last(recorded(f"{whose}:otel_ddp_run_time:goodput_ratio", chosen), IN_STEP)
        for whose, chosen in (("group", GROUPS), ("cluster", ""))
    )
    rates = recorded("run_cause:otel_ddp_run_time:rate5m", WHOLE_RUNS)
    told = having_role(average(rates), IN_STEP)
    return [
        panels.lines(
            panels.Text(
                "What the ranks do",
                "How many ranks' worth of time goes to each cause, over five minutes, all chosen "
                "runs together. The start of a run is counted when its first step has ended, so it "
                "is not here.",
                "What grows beside `productive` is lost: open the run in which it does.",
            ),
            panels.over_time(f"sum by (cause) ({told})", "{{cause}}"),
            minimum=0,
            stacked=True,
            colours=TIME_COLOURS,
            size=(24, 8),
            shortest_step=SHORTEST_STEP,
            nothing="nobody in this time",
        ),
        panels.lines(
            panels.Text(
                "Goodput of groups",
                "Of the runs of a group that report then, each since it first began; and of all "
                "runs of all groups.",
                "A group below the others: see what its time goes to.",
            ),
            panels.over_time(each_group(of_groups), GROUP_NAME, "groups"),
            panels.over_time(of_all, "all", "all"),
            unit="percentunit",
            minimum=0,
            maximum=1,
            sort=("Last *", False),
            shortest_step=SHORTEST_STEP,
            nothing="not counted",
        ),
    ]
