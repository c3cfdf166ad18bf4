"""The board Compare: which configuration learns faster?"""

from __future__ import annotations

from tools.dashboards import panels
from tools.dashboards import variables as v
from tools.dashboards.annotations import marks
from tools.dashboards.board import Row, board
from tools.dashboards.links import of_table
from tools.dashboards.names import metric
from tools.dashboards.roles import IN_RANGE, having_role, info
from tools.dashboards.selectors import BY_RUN, LOGGED, RANK_0, RANKS_OF_RUNS, RUNS, WHOLE_RUNS

QUESTION = "Which configuration learns faster?"

# Nothing else is below 0: what is meant is counted by the query.
_ELAPSED = f"-1 + 0 * {metric('training.heartbeat.timestamp')}"

_NOT_BEYOND = "[$__range:15s]"


def build() -> str:
    return board(
        "Compare",
        QUESTION,
        [
            Row("Runs beside each other", _runs()),
            Row("At one step", _at_step()),
            Row("As one group: mean, lowest, highest", _group(), collapsed=True),
        ],
        variables=[
            v.datasource(),
            *v.of_runs(),
            *v.places(RUNS, first_rank="0"),
            v.name(RUNS),
            v.split(RUNS),
            v.choice(
                "x",
                "Against",
                [
                    ("step", metric("training.scalar.step")),
                    ("epoch", metric("training.scalar.epoch")),
                    ("tokens of a rank", metric("training.tokens")),
                    ("elapsed time in s", _ELAPSED),
                    ("wall time in s", metric("training.heartbeat.timestamp")),
                ],
                "What the curves are drawn against. Elapsed time counts from the first start of a "
                "run within this time, tokens from the last.",
            ),
            v.attribute(),
            v.text("at_step", "At step", "5000", "For the table: the last value up to this step."),
            v.choice(
                "width",
                "Averaged over",
                [(each, each) for each in ("1", "10", "100", "1000", "100000", "1000000")],
                "How wide a stretch of x becomes one point where several runs are averaged.",
                first=2,
            ),
        ],
        annotations=marks(),
        since="now-24h",
    )


# A value has a name and a split, what it may be drawn against (tokens, say) has none of the two.
_X = f'${{x}}{{{RANKS_OF_RUNS},name=~"$name|",split=~"$split|"}}'
_Y = metric("training.scalar", RANKS_OF_RUNS, LOGGED)
# Only fresh values: Prometheus repeats the last value of an ended run for five minutes. But at
# least as long as the distance of points, or there would be none.
_FRESH_S = "scalar(clamp_min(vector($__interval_ms / 1000), 60))"
_Y_LOGGED = f"({_Y} and timestamp({_Y}) > time() - {_FRESH_S})"


def _x(by: str) -> str:
    """The x values, one for each run or rank."""
    x = f"max by ({by}) ({_X})"
    began = metric("training.run.start.timestamp", WHOLE_RUNS)
    # A clock of the process restarts when a run is resumed, which would draw two curves in one.
    first = f"min by ({BY_RUN}) (min_over_time({began}[$__range] @ end()))"
    return f"{x} >= 0 or time() + 0 * ({x} < 0) - on ({BY_RUN}) group_left () {first}"


def _named(expr: str) -> str:
    """With an attribute of the run before its name, so that equal ones are adjacent."""
    # Under another name: `group` is matched on already.
    described = f'label_replace({info("[$__range] @ end()")}, "attribute", "$1", "$by", "(.*)")'
    # A curve without a name would be called "Value".
    described = f'label_replace({described}, "attribute", "(none)", "attribute", "")'
    # A resumed run may have two descriptions.
    attribute = f"max by ({BY_RUN}, attribute) ({described})"
    both = f"({expr}) * on ({BY_RUN}) group_left (attribute) {attribute}"
    return f'label_join({both}, "curve", " · ", "attribute", "run")'


def _curves(column: str, value: str) -> list[panels.Transformation]:
    """A column for each curve, sorted by name, so that its colour is the same on all panels."""
    options = {"columnField": column, "emptyValue": "null", "rowField": "x", "valueField": value}
    return [_sorted_by(column), ("groupingToMatrix", options), _IN_ORDER]


def _sorted_by(field: str) -> panels.Transformation:
    return ("sortBy", {"fields": {}, "sort": [{"field": field}]})


_TOGETHER: list[panels.Transformation] = [
    ("merge", {}),
    (
        "organize",
        {
            "excludeByName": {"Time": True},
            "renameByName": {"Value #x": "x", "Value #y": "y"},
        },
    ),
    # A moment with one of the two is no point: a run's x goes on after its last value, and would
    # take its place; a run without any x would leave the axis of all runs without an end.
    (
        "filterByValue",
        {
            "filters": [
                {"fieldName": axis, "config": {"id": "isNull", "options": {}}}
                for axis in ("x", "y")
            ],
            "match": "any",
            "type": "exclude",
        },
    ),
]
_IN_ORDER = _sorted_by("x")


def _runs() -> list[panels.Panel]:
    return [
        panels.against(
            panels.Text(
                "$name against ${x:text}",
                "One curve a run, whenever it was started: the value of the chosen ranks (rank 0, "
                "unless you choose others), their mean where there are several. After a restart "
                "the "
                "later attempt is shown.",
                "The lowest curve at equal x learns fastest. The time range must span all runs; "
                "a short one inside of a long time has few points: make it shorter.",
            ),
            panels.points(f"max by (curve) ({_named(_x(BY_RUN))})", "x"),
            panels.points(f"avg by (curve) ({_named(f'avg by ({BY_RUN}) ({_Y_LOGGED})')})", "y"),
            transformations=[*_TOGETHER, *_curves("curve", "y")],
        )
    ]


def _at_step() -> list[panels.Panel]:
    value = metric("training.scalar", RUNS, LOGGED, RANK_0)
    step = metric("training.scalar.step", RUNS, LOGGED, RANK_0)
    upto = f"({value} and {step} <= $at_step)"
    seen = f"({step} <= $at_step)"
    return [
        panels.listing(
            panels.Text(
                "$name at step $at_step",
                "The last value that rank 0 of each run logged up to this step, the lowest first, "
                "with "
                "the step at which it was logged and what the run was started with.",
                "The first row is the best, if lower is better. A run whose step is far from the "
                "one asked for has not come so far, or logs more rarely.",
            ),
            panels.rows(f"avg by ({BY_RUN}) (last_over_time({upto}{_NOT_BEYOND}))", "value"),
            panels.rows(f"max by ({BY_RUN}) (max_over_time({seen}{_NOT_BEYOND}))", "step"),
            panels.rows(
                "max without (job, instance, job_type, node, rank, local_rank) "
                f"({having_role(info(IN_RANGE), IN_RANGE)})",
                "info",
            ),
            columns=[
                panels.Column("run", links=[of_table("Run")]),
                panels.Column("group"),
                panels.Column("Value #value", "Value", "short"),
                panels.Column("Value #step", "At step", decimals=0),
            ],
            hidden=("Value #info", "otel_scope_name", "otel_scope_version"),
            sort=("Value", False),
            size=(24, 7),
        ),
    ]


def _group() -> list[panels.Panel]:
    by = f"{BY_RUN}, rank"
    x = f"round({_x(by)}, $width)"
    y = f"avg by ({by}) ({_Y_LOGGED})"
    return [
        panels.against(
            panels.Text(
                "$name against ${x:text}, all that is selected",
                "Mean, lowest and highest over the selected runs and ranks, in stretches of x. "
                "Choose one group, and ranks All, to see how far its ranks are apart.",
                "A band that widens: runs or ranks part ways.",
            ),
            panels.points(x, "x"),
            panels.points(y, "y"),
            transformations=[
                *_TOGETHER,
                (
                    "groupBy",
                    {
                        "fields": {
                            "x": {"aggregations": [], "operation": "groupby"},
                            "y": {"aggregations": ["mean", "min", "max"], "operation": "aggregate"},
                        }
                    },
                ),
                _IN_ORDER,
                (
                    "organize",
                    {
                        "renameByName": {
                            "y (max)": "highest",
                            "y (mean)": "mean",
                            "y (min)": "lowest",
                        }
                    },
                ),
            ],
            size=(24, 10),
            band=("highest", "lowest"),
            legend=("lastNotNull",),
        ),
    ]
