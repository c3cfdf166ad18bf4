"""Series of whole runs, selected by the role of their ranks."""

from __future__ import annotations

from tools.dashboards.names import metric, recorded
from tools.dashboards.selectors import BY_RANK, BY_RUN, RANK_0, RULES_EVERY_S, RUNS, WHOLE_RUNS

AT_ONCE, IN_RANGE = "", "[$__range]"
# Between two points of a panel: an hour for thirty days.
IN_STEP, SHORTEST_STEP = "[$__interval]", "1m"


def last(expr: str, within: str = IN_RANGE) -> str:
    """The last value. An instant query only looks back five minutes, without ended runs."""
    return f"last_over_time({expr}{within})" if within else expr


def average(recorded_: str) -> str:
    """The mean of a recorded series over each step of a panel; absent values count as 0.

    Instant values would miss what is shorter than a step. A step must not be shorter than the
    interval of the rules: `lines(..., shortest_step=SHORTEST_STEP)`.
    """
    return f"sum_over_time({recorded_}{IN_STEP}) * {1000 * RULES_EVERY_S} / $__interval_ms"


def having_role(expr: str, within: str = AT_ONCE, ranks: str = RUNS) -> str:
    """Of runs that have a rank of the selected role. *ranks*: the selection."""
    roles = last(recorded("run_role:training_ranks:count", ranks), within)
    # Without the rules, only the role of rank 0 is known.
    of_rank_0 = last(metric("training.run.info", ranks), within)
    return f"({expr}) and on ({BY_RUN}) ({roles} or {of_rank_0})"


RUN_NAME = GROUP_NAME = "{{shown}}"


def each_run(expr: str, operation: str = "max") -> str:
    """A line for each run, by RUN_NAME: runs of two groups may have the same name."""
    of_runs = f"{operation} by ({BY_RUN}) ({expr})"
    both = f'label_join({of_runs}, "shown", " · ", "group", "run")'
    # Only the name if a run has no group.
    return f'label_replace({both}, "shown", "$1", "shown", " · (.*)")'


def each_group(of_groups: str) -> str:
    """A line for each group, by GROUP_NAME. Grafana calls a line without a name "Value"."""
    named = f'label_replace({of_groups}, "shown", "$1", "group", "(.*)")'
    return f'label_replace({named}, "shown", "(no group)", "shown", "")'


def training_alone(expr: str, runs: str = WHOLE_RUNS, within: str = AT_ONCE) -> str:
    """Without evaluators and actors beside the training."""
    apart = last(recorded("rank:training_apart:last", runs), within)
    return f"({expr} unless on ({BY_RANK}) {apart})"


def info(within: str) -> str:
    """The description of each run: by rank 0 of the training, not of an evaluator."""
    reported = f"last_over_time({metric('training.run.info', WHOLE_RUNS)}{within})"
    size = f"last_over_time({metric('training.world.size', WHOLE_RUNS, RANK_0)}{within})"
    by_size = f"{reported} * on ({BY_RANK}) group_left () max by ({BY_RANK}) ({size})"
    # Any one if the size is unknown.
    return f"(topk by ({BY_RUN}) (1, {by_size} or {reported}) ^ 0)"
