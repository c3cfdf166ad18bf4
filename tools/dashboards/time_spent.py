"""What the time of runs went to: the row of the board Runs, and parts of the board Goodput."""

from __future__ import annotations

from collections.abc import Sequence

from tools.dashboards.links import of_table, of_table_lifetime
from tools.dashboards.looks import HOURS
from tools.dashboards.names import metric, recorded
from tools.dashboards.panels import (
    Column,
    Panel,
    Query,
    Text,
    bars,
    lines,
    listing,
    now,
    over_time,
    rows,
    stat,
)
from tools.dashboards.roles import IN_RANGE, IN_STEP, SHORTEST_STEP, average, having_role, last
from tools.dashboards.selectors import BY_RUN, RANK_0, WHOLE_RUNS

from otel_ddp.vocabulary.words import TIME_CAUSES, TIME_COLOURS

PRODUCTIVE = 'cause="productive"'
# Shown by themselves, so narrow that all are in sight beside a menu; the others together.
_COLUMNS = {
    "start": ("Start", 75),
    "data": ("Data", 75),
    "checkpoint": ("Saving", 85),
    "late_rank": ("Late rank", 105),
    "hang": ("Hang", 75),
    "repeated": ("Done twice", 110),
    "between_attempts": ("No process", 115),
}


def time_spent() -> list[Panel]:
    return [goodput(size=(6, 8)), by_cause(size=(18, 8)), table_of_runs()]


def spent(*selectors: str) -> str:
    """The seconds of each run and cause, since the run first began; of ended runs too."""
    found = last(recorded("run_cause:otel_ddp_run_time:sum", WHOLE_RUNS, *selectors))
    return having_role(found, IN_RANGE)


def attempts() -> str:
    """How often each run was begun."""
    found = last(metric("otel_ddp.run.attempts", WHOLE_RUNS))
    return having_role(f"max by ({BY_RUN}) ({found})", IN_RANGE)


def goodput(size: tuple[int, int]) -> Panel:
    return stat(
        Text(
            "Goodput",
            "Of all time of the ranks of these runs, since each first began, the share in steps "
            "that moved the run on.",
            "The table says which run has lost most, and to what.",
        ),
        now(f"sum({spent(PRODUCTIVE)}) / sum({spent()})"),
        unit="percentunit",
        decimals=1,
        nothing="not counted",
        size=size,
    )


def by_cause(size: tuple[int, int]) -> Panel:
    recorded_ = recorded("run_cause:otel_ddp_run_time:rate5m", WHOLE_RUNS)
    told = having_role(average(recorded_), IN_STEP)
    return lines(
        Text(
            "What the ranks do",
            "How many ranks' worth of time goes to each cause, over five minutes, all chosen runs "
            "together. The start of a run is counted when its first step has ended, so it is not "
            "here.",
            "What grows beside `productive` is lost: open the run in which it does.",
        ),
        over_time(f"sum by (cause) ({told})", "{{cause}}"),
        minimum=0,
        stacked=True,
        colours=TIME_COLOURS,
        size=size,
        shortest_step=SHORTEST_STEP,
        nothing="nobody in this time",
    )


def hours_by_cause(seconds: str, size: tuple[int, int]) -> Panel:
    """*seconds*: of each cause."""
    return bars(
        Text(
            "GPU-hours by cause",
            "What the time of all ranks went to, over all attempts, since the run first began.",
            "docs/goodput.md says what each cause is. The largest beside `productive` is what to "
            "mend first.",
        ),
        now(f"sort_desc({seconds} / 3600 > 0)", "{{cause}}"),
        unit=HOURS,
        colours=TIME_COLOURS,
        nothing="not counted",
        size=size,
    )


def lifetime() -> list[Query]:
    """When each run first began, and when all that it sent had come: its last export, with how it
    ended, comes after its last heartbeat."""
    began = metric("training.run.start.timestamp", WHOLE_RUNS)
    beat = metric("training.heartbeat.timestamp", WHOLE_RUNS, RANK_0)
    first = f"min by ({BY_RUN}) (min_over_time({began}{IN_RANGE}) * 1000)"
    end = f"max by ({BY_RUN}) ({last(beat)} * 1000 + 60000)"
    return [rows(having_role(first, IN_RANGE), "start"), rows(having_role(end, IN_RANGE), "until")]


def table_of_runs(*more: Query, columns: Sequence[Column] = ()) -> Panel:
    """*columns*: of *more*."""
    return _table(
        Text(
            "What the time went to",
            "Shares of the time of all ranks of a run since it first began, over its attempts.",
            "The largest beside Goodput is what to mend first; `otel-ddp goodput` tells more.",
        ),
        BY_RUN,
        [rows(attempts(), "attempts"), *lifetime(), *more],
        [
            Column("group", width=100),
            Column("run", width=110, links=[of_table_lifetime("Run"), of_table("Run")]),
            Column("Value #start", "Started", out_of_sight=True),
            Column("Value #until", "Until", out_of_sight=True),
            Column("Value #attempts", "Attempts", decimals=0, width=100),
        ],
        columns,
    )


def table_of_groups(*more: Query, columns: Sequence[Column] = ()) -> Panel:
    """*columns*: of *more*."""
    runs = f"count by (group) (sum by ({BY_RUN}) ({spent()}))"
    begun = f"sum by (group) ({attempts()})"
    return _table(
        Text(
            "By group",
            "The same of all chosen runs of a group together.",
            "Compare groups by Goodput, and find below which run of a group has lost most.",
        ),
        "group",
        [rows(runs, "runs"), rows(begun, "attempts"), *more],
        [
            Column("group", width=110),
            Column("Value #runs", "Runs", decimals=0, width=80),
            Column("Value #attempts", "Attempts", decimals=0, width=100),
        ],
        columns,
    )


def _table(
    text: Text,
    by: str,
    asked: Sequence[Query],
    columns: Sequence[Column],
    more: Sequence[Column],
) -> Panel:
    """*columns* and *more* are of *asked*, before and after those of the time."""
    whole = f"sum by ({by}) ({spent()})"

    def share(selector: str) -> str:
        return f"sum by ({by}) ({spent(selector)}) / {whole}"

    others = "|".join(each for each in TIME_CAUSES if each not in {"productive", *_COLUMNS})
    return listing(
        text,
        rows(f"{whole} / 3600", "hours"),
        *asked,
        rows(share(PRODUCTIVE), "productive"),
        *(rows(share(f'cause="{each}"'), f"of_{each}") for each in _COLUMNS),
        rows(share(f'cause=~"{others}"'), "others"),
        columns=[
            *columns,
            Column("Value #hours", "GPU-hours", HOURS, decimals=2, width=140),
            Column("Value #productive", "Goodput", "percentunit", decimals=1, width=95),
            *(
                Column(f"Value #of_{each}", title, "percentunit", decimals=1, width=width)
                for each, (title, width) in _COLUMNS.items()
            ),
            Column("Value #others", "Else", "percentunit", decimals=1, width=65),
            *more,
        ],
        sort=("GPU-hours", True),
        nothing="no run has counted its time",
    )
