"""Annotations on the curves: start, checkpoints, restarts, alerts and verdicts of runs."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as build
from tools.dashboards.names import metric, recorded
from tools.dashboards.roles import having_role
from tools.dashboards.selectors import (
    ALERTS_OF_RUN,
    ALERTS_OF_RUNS,
    BY_RUN,
    RANK_0,
    RUN,
    RUNS,
    WHOLE_RUN,
    WHOLE_RUNS,
)
from tools.dashboards.variables import PROMETHEUS

# The step of the queries: what lasts one step is a mark, not a region.
_EVERY = "1m"


def marks(*, one_run: bool = False, starts: bool = True) -> list[build.AnnotationQuery]:
    """The annotations, each with a switch; checkpoints are off by default."""
    runs, ranks = (WHOLE_RUN, RUN) if one_run else (WHOLE_RUNS, RUNS)
    alerts = ALERTS_OF_RUN if one_run else ALERTS_OF_RUNS

    def chosen(expr: str) -> str:
        return expr if one_run else having_role(expr)

    began = recorded("run:training_start_timestamp:last", runs)
    reported = f"max by ({BY_RUN}) ({metric('training.run.start.timestamp', runs)})"
    started = chosen(f"{began} or {reported}")
    saved = chosen(metric("training.checkpoint.timestamp", runs, RANK_0))
    # The launcher starts all ranks again together.
    came_back = chosen(f"changes({metric('training.restarts', runs, RANK_0)}[{_EVERY}])")
    named = metric("training.straggler", ranks, 'phase!=""')
    owner = "run, node, rank, phase"
    firing = f'ALERTS{{alertstate="firing",{alerts}}}'
    fires = chosen(f"ALERTS_FOR_STATE{{{alerts}}} and ignoring (alertstate) {firing}")
    return [
        _mark(
            "Run start",
            f"max by (run) ({started}) * 1000",
            "green",
            "{{run}} starts",
            at_value=True,
            shown=starts,
        ),
        _mark(
            "Checkpoints",
            f"max by (run) ({saved}) * 1000",
            "blue",
            "{{run}} has saved",
            at_value=True,
            shown=False,
        ),
        _mark(
            "Restarts",
            f"max by (run) ({came_back}) > 0",
            "orange",
            "{{run}} was restarted",
        ),
        _mark(
            "Alerts",
            # The start of the alert, which is constant while it fires.
            f"max by (alertname, severity, run) ({fires}) * 1000",
            "red",
            "{{alertname}} {{run}}",
            at_value=True,
        ),
        _mark(
            "Verdicts",
            # Only the start: a region would cover the curves.
            f"max by ({owner}) ({named} == 1)"
            f" unless max by ({owner}) ({named} offset {_EVERY} == 1)",
            "purple",
            "rank {{rank}} on {{node}} holds the others back in {{phase}}",
        ),
    ]


def _mark(
    name: str, expr: str, colour: str, title: str, *, at_value: bool = False, shown: bool = True
) -> build.AnnotationQuery:
    mark = (
        build.AnnotationQuery()
        .name(name)
        .expr(expr)
        .datasource(PROMETHEUS)
        .enable(shown)
        .icon_color(colour)
        .title_format(title)
        .step(_EVERY)
    )
    return mark.use_value_for_time(True) if at_value else mark
