"""Expressions about steps and phases that several boards share."""

from __future__ import annotations

from tools.dashboards.names import metric, recorded
from tools.dashboards.panels import NAME_ALONE, Panel, Text, now, stat
from tools.dashboards.roles import training_alone
from tools.dashboards.selectors import RANK_0, RUN, WHOLE_RUN

_HOST, _DEVICE = 'clock="host"', 'clock="device"'
_WORK = 'phase=~"data|forward|backward|optimizer|other"'
_RATE = "[$__rate_interval]"


def seconds_per_step() -> str:
    """By phase: over all ranks where that is recorded, of rank 0 where it is not."""
    all_ranks = recorded("run_phase:training_phase_time:avg2m", WHOLE_RUN)
    of_rank_0 = training_alone(metric("training.phase.step_time", RUN, RANK_0), WHOLE_RUN)
    return f"max by (phase) ({all_ranks}) or max by (phase) ({of_rank_0})"


def clock() -> Panel:
    """Which clock the times of the phases are by."""
    host, device = (
        f"max by (clock) (last_over_time({metric('training.phase.time', RUN, each)}[$__range]))"
        for each in (_HOST, _DEVICE)
    )
    return stat(
        Text(
            "Clock",
            "By which clock work and phases are: the device's where it is known, else the host's.",
            "host, though there are GPUs: Pipeline says why, under what is not measured.",
        ),
        now(f"({device} > 0) or ({host} unless on () ({device} > 0))", "{{clock}}"),
        named=NAME_ALONE,
        size=(3, 8),
    )


def step_time() -> str:
    """Of rank 0; all others take as long, as they wait for each other."""

    def rate(part: str) -> str:
        series = metric("training.step.duration", RUN, RANK_0, part=part)
        return f"sum({training_alone(f'rate({series}{_RATE})', WHOLE_RUN)})"

    # Not one by the rate of steps: where they end, that goes to infinity.
    return f"{rate('sum')} / ({rate('count')} > 0)"


def per_step(selector: str, *, waiting: bool) -> str:
    """Work or waiting of each rank, as its agent tells it."""
    phases = 'phase="comm_wait"' if waiting else _WORK
    time = metric("training.phase.step_time", selector, phases)
    return f"sum by (node, rank) (max by (node, rank, phase) ({time}))"


LATE = "{{who}}{{node}} · {{phase}}"


def late(selector: str) -> str:
    """Who holds the others back, in which phase, by what share of the step: ranks and nodes.

    *selector*: of ranks.
    """
    ranks = recorded("rank:training_straggler:ratio", selector)
    nodes = recorded("rank:training_straggler:ratio", WHOLE_RUN, 'rank=""')
    return (
        f'(label_replace(max by (node, rank, phase) ({ranks}), "who", "rank $1 · ", "rank", "(.+)")'
        f" or max by (node, phase) ({nodes}))"
    )
