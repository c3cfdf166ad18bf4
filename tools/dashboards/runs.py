"""The board Runs: what is running, what is healthy, and what did it cost?"""

from __future__ import annotations

from tools.dashboards import panels
from tools.dashboards import variables as v
from tools.dashboards.annotations import marks
from tools.dashboards.board import Row, board
from tools.dashboards.links import of_series, of_table, of_table_lifetime
from tools.dashboards.looks import (
    ABOVE_0_IS_BAD,
    BAD,
    HOURS,
    STALLED_WORDS,
    STATE_WORDS,
    WARN,
    steps,
)
from tools.dashboards.names import metric, recorded
from tools.dashboards.roles import (
    IN_RANGE,
    RUN_NAME,
    each_run,
    having_role,
    info,
    last,
    training_alone,
)
from tools.dashboards.selectors import (
    ALERTS_OF_RUNS,
    ALIVE_S,
    BY_RANK,
    BY_RUN,
    LOGGED,
    RANK_0,
    RULES_EVERY_S,
    RUNS,
    WHOLE_RUNS,
)

QUESTION = "What is running, what is healthy, and what did it cost?"

_RATE = "[$__rate_interval]"
_FALLS, _GROWS = 'direction="min"', 'direction="max"'
_HOURS = f"* {RULES_EVERY_S} / 3600"


def build() -> str:
    return board(
        "Runs",
        QUESTION,
        [
            Row("Now, and in this time", _now()),
            Row("Runs", [_table()]),
            Row("Over time", _over_time()),
        ],
        variables=[v.datasource(), *v.of_runs(), v.name(RUNS), v.split(RUNS)],
        annotations=marks(),
        since="now-24h",
    )


def _running() -> str:
    beat = metric("training.heartbeat.timestamp", RUNS)
    reporting = f"and on ({BY_RANK}) (time() - {beat} < {ALIVE_S})"
    return f"{metric('training.state', RUNS)} == 1 {reporting}"


def _stalled() -> str:
    # Of ranks that are not exported there is no heartbeat.
    stalled = metric("training.stalled", WHOLE_RUNS)
    return f"{stalled} == 1 and time() - timestamp({stalled}) < {ALIVE_S}"


def _count(ranks: str) -> str:
    return f"count(count by ({BY_RUN}) ({ranks})) or vector(0)"


def _integral(recorded_name: str) -> str:
    summed = f"sum_over_time({recorded(recorded_name, WHOLE_RUNS)}{IN_RANGE})"
    return f"sum({having_role(summed, IN_RANGE)})"


def _now() -> list[panels.Panel]:
    worst = f"max_over_time({recorded('run:training_state:max', WHOLE_RUNS)}{IN_RANGE}) >= 3"
    firing = having_role(f'ALERTS{{alertstate="firing",{ALERTS_OF_RUNS}}}')
    joules = f"{_integral('run:hw_power:sum')} * {RULES_EVERY_S}"
    return [
        panels.stat(
            panels.Text(
                "Running",
                f"Runs with a running rank that has reported within {ALIVE_S} s.",
                "Fewer than you have started: the table below says how the others ended.",
            ),
            panels.now(_count(_running())),
        ),
        panels.stat(
            panels.Text(
                "Stalled",
                "Runs of which no rank moves.",
                "Open Ranks for that run: it says who is waited for.",
            ),
            panels.now(_count(having_role(_stalled()))),
            levels=ABOVE_0_IS_BAD,
        ),
        panels.stat(
            panels.Text(
                "Failed",
                "Runs that lost a rank to an exception or to a signal within this time.",
                "Open the run: its errors are in the row Checkpoints and errors.",
            ),
            panels.now(f"count({having_role(worst, IN_RANGE)}) or vector(0)"),
            levels=ABOVE_0_IS_BAD,
        ),
        panels.stat(
            panels.Text(
                "Alerts",
                "Alerts of these runs that fire now.",
                "Each names its runbook; the marks over the curves say since when.",
            ),
            panels.now(f"count({firing}) or vector(0)"),
            levels=ABOVE_0_IS_BAD,
        ),
        panels.stat(
            panels.Text(
                "Ranks",
                "Ranks that run now: mostly a GPU each.",
                "Compare with what you pay for.",
            ),
            panels.now(f"count(max by ({BY_RANK}) ({_running()})) or vector(0)"),
        ),
        panels.stat(
            panels.Text(
                "GPU-hours",
                "Hours that ranks have been running within this time, summed over ranks.",
                "Times the price of an hour: what it cost.",
            ),
            panels.now(f"{_integral('run:training_ranks_running:count')} {_HOURS}"),
            unit=HOURS,
            decimals=1,
        ),
        panels.stat(
            panels.Text(
                "Lost hours",
                "GPU-hours that all other ranks waited for one that was found to be late.",
                "The table says in which run; Ranks says which rank, and in what.",
            ),
            panels.now(f"{_integral('run:training_straggler_lost_time:rate2m')} {_HOURS}"),
            unit=HOURS,
            decimals=2,
            levels=steps((1, WARN), (24, BAD)),
            nothing="none",
        ),
        panels.stat(
            panels.Text(
                "Energy",
                "Energy that the GPUs of these runs took within this time.",
                "Where it is paid for apart, this is the number.",
            ),
            panels.now(f"{joules} / 3600000"),
            unit="kwatth",
            decimals=1,
            nothing="not measured",
        ),
    ]


def lifetime() -> list[panels.Query]:
    """The first start of each run, and the end of its last export, which is after its last
    heartbeat."""
    began = metric("training.run.start.timestamp", WHOLE_RUNS)
    beat = metric("training.heartbeat.timestamp", WHOLE_RUNS, RANK_0)
    first = f"min by ({BY_RUN}) (min_over_time({began}{IN_RANGE}) * 1000)"
    end = f"max by ({BY_RUN}) ({last(beat)} * 1000 + 60000)"
    return [
        panels.rows(having_role(first, IN_RANGE), "start"),
        panels.rows(having_role(end, IN_RANGE), "until"),
    ]


def _table() -> panels.Panel:
    state = metric("training.state", WHOLE_RUNS, RANK_0)
    beat = metric("training.heartbeat.timestamp", WHOLE_RUNS, RANK_0)
    value = metric("training.scalar", WHOLE_RUNS, LOGGED, RANK_0)
    worst = recorded("run:training_state:max", WHOLE_RUNS)
    used = recorded("run:training_ranks_running:count", WHOLE_RUNS)
    lost = recorded("run:training_straggler_lost_time:rate2m", WHOLE_RUNS)

    there = recorded("run:training_ranks_present:count", WHOLE_RUNS)
    stepped = recorded("run:training_step:max", WHOLE_RUNS)
    of_rank_0 = metric("training.step", WHOLE_RUNS, RANK_0)

    def by_run(operation: str, expr: str) -> str:
        return having_role(f"{operation} by ({BY_RUN}) ({expr})", IN_RANGE)

    def either(of_training: str, of_any: str) -> str:
        """Without the rules, evaluators beside the training are unknown."""
        return f"max by ({BY_RUN}) ({last(of_training)}) or max by ({BY_RUN}) ({last(of_any)})"

    return panels.listing(
        panels.Text(
            "Runs",
            "One row a run that was there in this time: state, progress, value, cost, "
            "configuration.",
            "Click a run for its own board. Sort or filter by any head: by Best, or by config_lr.",
        ),
        # Without a list of labels: whatever a run says of its configuration becomes a column.
        panels.rows(
            "max without (job, instance, job_type, node, rank, local_rank) "
            f"({having_role(info(IN_RANGE), IN_RANGE)})",
            "info",
        ),
        panels.rows(having_role(either(worst, state), IN_RANGE), "state"),
        panels.rows(by_run("max", _stalled()), "stalled"),
        panels.rows(by_run("max", f"max_over_time({there}{IN_RANGE})"), "ranks"),
        panels.rows(having_role(either(stepped, of_rank_0), IN_RANGE), "step"),
        panels.rows(by_run("avg", last(value)), "last"),
        panels.rows(having_role(_best_of_run(), IN_RANGE), "best"),
        panels.rows(by_run("max", _step_of_best()), "best_step"),
        panels.rows(by_run("min", f"min_over_time({value}[$__range])"), "lowest"),
        panels.rows(by_run("max", f"max_over_time({value}[$__range])"), "highest"),
        panels.rows(by_run("sum", f"sum_over_time({used}[$__range]) {_HOURS}"), "used"),
        panels.rows(by_run("sum", f"sum_over_time({lost}[$__range]) {_HOURS}"), "lost"),
        *lifetime(),
        panels.rows(by_run("max", f"{last(beat)} * 1000"), "seen"),
        columns=[
            # So narrow that what a run has cost is in sight beside a menu.
            panels.Column("group", width=100),
            panels.Column(
                "run",
                width=140,
                links=[
                    of_table_lifetime("Run"),
                    of_table("Run"),
                    of_table_lifetime("Ranks"),
                    of_table("Compare"),
                ],
            ),
            panels.Column("Value #state", "State", words=STATE_WORDS, width=90),
            panels.Column("Value #stalled", "Moves", words=STALLED_WORDS, width=90),
            # Fewer than train together: a strategy, or a script that records rank 0 alone.
            panels.Column("Value #ranks", "Ranks", decimals=0, width=80),
            panels.Column("world_size", "Of", width=60),
            panels.Column("Value #step", "Step", decimals=0, width=85),
            panels.Column("Value #last", "Last", "short", width=80),
            # Sorted by it, a group's runs are a leaderboard.
            panels.Column("Value #best", "Best", "short", width=80),
            panels.Column("Value #best_step", "At step", decimals=0, width=90),
            panels.Column("Value #lowest", "Lowest", "short", width=95),
            panels.Column("Value #highest", "Highest", "short", width=100),
            panels.Column("Value #used", "GPU-hours", HOURS, decimals=1, width=115),
            panels.Column(
                "Value #lost",
                "Lost",
                HOURS,
                decimals=2,
                levels=steps((1, WARN), (24, BAD)),
                width=90,
            ),
            panels.Column("Value #start", "Started", "dateTimeAsIso", width=170),
            panels.Column("Value #seen", "Seen", "dateTimeFromNow", width=140),
            panels.Column("Value #until", "Until", out_of_sight=True),
        ],
        hidden=("Value #info", "otel_scope_name", "otel_scope_version"),
        sort=("Started", True),
        nothing="no runs in this time: is the Pipeline whole?",
        size=(24, 10),
    )


def _best(*selectors: str) -> str:
    return last(metric("training.scalar.best", WHOLE_RUNS, LOGGED, RANK_0, *selectors))


def _best_of_run() -> str:
    """The sum over the nodes of rank 0: each agent knows its own part."""
    lowest = f"min by ({BY_RUN}) ({_best(_FALLS)})"
    return f"({lowest} or max by ({BY_RUN}) ({_best(_GROWS)}))"


def _step_of_best() -> str:
    step = last(metric("training.scalar.best.step", WHOLE_RUNS, LOGGED, RANK_0))
    there = f"({_best()} == on ({BY_RUN}) group_left () {_best_of_run()})"
    return f"{step} and on ({BY_RANK}) {there}"


def _over_time() -> list[panels.Panel]:
    steps_ = metric("training.steps", WHOLE_RUNS, RANK_0)
    stepped = having_role(training_alone(f"rate({steps_}{_RATE})"))
    value = having_role(metric("training.scalar", WHOLE_RUNS, LOGGED, RANK_0))
    of_rank_0 = training_alone(metric("training.state", WHOLE_RUNS, RANK_0))
    # As in the table: of a run that was killed, rank 0 has only failed.
    worst = recorded("run:training_state:max", WHOLE_RUNS)
    state = having_role(f"({worst} or on ({BY_RUN}) {of_rank_0})")
    to_run = of_series("Run", "run")
    return [
        panels.lines(
            panels.Text(
                "Steps per second",
                "Optimizer steps of each run, by its rank 0.",
                "A fall: open the run and see which phase has grown.",
            ),
            panels.over_time(each_run(stepped), RUN_NAME),
            minimum=0,
            link=to_run,
        ),
        panels.lines(
            panels.Text(
                "$name",
                "The chosen value of each run, as its rank 0 logged it.",
                "To see it against steps, open Compare.",
            ),
            panels.over_time(each_run(value, "avg"), RUN_NAME),
            unit="short",
            legend=("lastNotNull", "min"),
            link=to_run,
        ),
        panels.states(
            panels.Text(
                "States",
                "The worst state of any rank of each run; without the rules, that of rank 0.",
                "A hole: no rank reported. Several beginnings: the run was restarted.",
            ),
            panels.over_time(each_run(state), RUN_NAME),
            words=STATE_WORDS,
        ),
    ]
