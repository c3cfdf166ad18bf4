"""The row of the board Runs on time: how much of it moved the runs on, and what took the rest?"""

from __future__ import annotations

from tools.dashboards.links import of_table
from tools.dashboards.names import metric, recorded
from tools.dashboards.panels import Column, Panel, Text, lines, listing, now, over_time, rows, stat
from tools.dashboards.roles import IN_RANGE, having_role, last
from tools.dashboards.selectors import BY_RUN, WHOLE_RUNS

from otel_ddp.vocabulary.words import TIME_CAUSES

_PRODUCTIVE = 'cause="productive"'
# Shown by themselves; the others together.
_COLUMNS = {
    "start": "Start",
    "data": "Data",
    "checkpoint": "Saving",
    "late_rank": "Late rank",
    "hang": "Hang",
    "repeated": "Done twice",
    "between_attempts": "No process",
}


def time_spent() -> list[Panel]:
    return [_goodput(), _by_cause(), _table()]


def _last(*selectors: str) -> str:
    found = last(recorded("run_cause:otel_ddp_run_time:sum", WHOLE_RUNS, *selectors))
    return having_role(found, IN_RANGE)


def _goodput() -> Panel:
    return stat(
        Text(
            "Goodput",
            "Of all time of the ranks of these runs, since each first began, the share in steps "
            "that moved the run on.",
            "The table says which run has lost most, and to what.",
        ),
        now(f"sum({_last(_PRODUCTIVE)}) / sum({_last()})"),
        unit="percentunit",
        decimals=1,
        nothing="not counted",
        size=(6, 8),
    )


def _by_cause() -> Panel:
    spent = metric("otel_ddp.run.time", WHOLE_RUNS)
    return lines(
        Text(
            "What the ranks do",
            "How many ranks' worth of time goes to each cause now, all chosen runs together.",
            "What grows beside `productive` is lost: open the run in which it does.",
        ),
        over_time(
            f"sum by (cause) ({having_role(f'rate({spent}[$__rate_interval])')})", "{{cause}}"
        ),
        minimum=0,
        stacked=True,
        size=(18, 8),
    )


def _table() -> Panel:
    attempts = last(metric("otel_ddp.run.attempts", WHOLE_RUNS))
    attempts = having_role(f"max by ({BY_RUN}) ({attempts})", IN_RANGE)
    whole = f"sum by ({BY_RUN}) ({_last()})"

    def share(selector: str) -> str:
        return f"sum by ({BY_RUN}) ({_last(selector)}) / {whole}"

    others = "|".join(each for each in TIME_CAUSES if each not in {"productive", *_COLUMNS})
    return listing(
        Text(
            "What the time went to",
            "Shares of the time of all ranks of a run since it first began, over its attempts.",
            "The largest beside Goodput is what to mend first; `otel-ddp goodput` tells more.",
        ),
        rows(f"{whole} / 3600", "hours"),
        rows(attempts, "attempts"),
        rows(share(_PRODUCTIVE), "productive"),
        *(rows(share(f'cause="{each}"'), f"of_{each}") for each in _COLUMNS),
        rows(share(f'cause=~"{others}"'), "others"),
        columns=[
            Column("group", width=100),
            Column("run", width=140, links=[of_table("Run")]),
            Column("Value #hours", "GPU-hours", "h", decimals=1),
            Column("Value #attempts", "Attempts", decimals=0),
            Column("Value #productive", "Goodput", "percentunit", decimals=1),
            *(
                Column(f"Value #of_{each}", title, "percentunit", decimals=1)
                for each, title in _COLUMNS.items()
            ),
            Column("Value #others", "Else", "percentunit", decimals=1),
        ],
        sort=("GPU-hours", True),
        nothing="no run has counted its time",
    )
