"""Expressions about steps and phases that several boards share."""

from __future__ import annotations

from tools.dashboards.names import metric, recorded
from tools.dashboards.roles import training_alone
from tools.dashboards.selectors import RANK_0, RUN, WHOLE_RUN

_HOST = 'clock="host"'
_WORK = 'phase=~"data|forward|backward|optimizer|other"'
_RATE = "[$__rate_interval]"


def seconds_per_step() -> str:
    """By phase: over all ranks where that is recorded, of rank 0 where it is not."""
    all_ranks = recorded("run_phase:training_phase_time:avg2m", WHOLE_RUN)
    time = f"rate({metric('training.phase.time', RUN, RANK_0, _HOST)}{_RATE})"
    count = f"rate({metric('training.steps', RUN, RANK_0)}{_RATE})"
    steps = f"(sum({training_alone(count, WHOLE_RUN)}) > 0)"
    of_rank_0 = f"sum by (phase) ({training_alone(time, WHOLE_RUN)}) / on () group_left () {steps}"
    return f"max by (phase) ({all_ranks}) or {of_rank_0}"


def step_time() -> str:
    """Of rank 0; all others take as long, as they wait for each other."""

    def rate(part: str) -> str:
        series = metric("training.step.duration", RUN, RANK_0, part=part)
        return f"sum({training_alone(f'rate({series}{_RATE})', WHOLE_RUN)})"

    # Not one by the rate of steps: where they end, that goes to infinity.
    return f"{rate('sum')} / ({rate('count')} > 0)"


def per_step(selector: str, *, waiting: bool) -> str:
    """Work or waiting of each rank, from the counters themselves."""
    phases = 'phase="comm_wait"' if waiting else _WORK
    time = metric("training.phase.time", selector, _HOST, phases)
    count = metric("training.steps", selector)
    return (
        f"sum by (node, rank) (rate({time}{_RATE}))"
        f" / on (node, rank) (sum by (node, rank) (rate({count}{_RATE})) > 0)"
    )


def late_rank(selector: str) -> str:
    """Who holds the others back, in which phase, by what share of the step."""
    named = metric("training.straggler", selector, 'phase!=""')
    excess = metric("training.straggler.excess", selector, 'phase="all"')
    over_nodes = recorded("rank:training_straggler:ratio", selector)
    by_agents = (
        f"max by (node, rank, phase) ({named} == 1)"
        f" * on (node, rank) group_left () max by (node, rank) ({excess})"
    )
    # A late rank that is alone on its node is seen by the rules only.
    return f"({by_agents} or on (node, rank) max by (node, rank, phase) ({over_nodes}))"
