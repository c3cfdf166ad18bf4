"""The table of nodes on the board Ranks: which of them is late as a whole, and why?"""

from __future__ import annotations

from tools.dashboards.links import of_row
from tools.dashboards.looks import ABOVE_0_IS_BAD, BAD, HELD_BACK_WORDS, WARN, steps
from tools.dashboards.names import metric, recorded
from tools.dashboards.panels import Column, Panel, Text, listing, rows
from tools.dashboards.selectors import NODES, WHOLE_RUN


def worst_nodes() -> Panel:
    """Those whose ranks work longest, with what slows down a whole node."""
    here = f'{WHOLE_RUN},node=~"$node"'
    work = recorded("node:training_work:median2m", here)
    worst = f"topk($topn, max by (node) (last_over_time({work}[$__range])))"
    of_others, step = (
        f"max(last_over_time({recorded(name, WHOLE_RUN)}[$__range]))"
        for name in ("run:training_work:median2m", "run:training_step_time:median2m")
    )
    fastest = f"min by (node) ({recorded('rank:training_work:per_step2m', here)})"
    slowest = f"max by (node) ({recorded('node:training_work:max2m', here)})"
    waits = f"max by (node) ({recorded('node:training_wait:min2m', here)})"
    core = metric("hw.temperature", here, 'hw_sensor_location="core"')
    clock = metric("otel_ddp.gpu.clock.frequency", here, 'domain="core"')
    held = metric("otel_ddp.gpu.throttle.active", here, 'reason=~"hw_.*|sw_thermal"')
    pressure = metric("otel_ddp.host.pressure", NODES, 'resource=~"cpu|io"', 'stall_type="some"')
    late_by = recorded("rank:training_straggler:ratio", here, 'rank=""')

    def of_them(expr: str) -> str:
        return f"{expr} and on (node) {worst}"

    return listing(
        Text(
            "Nodes with most work",
            "The nodes whose median rank needs most for a step, in the mean over 2 minutes, beside "
            "the median rank of all. Late: as the agents find it, all ranks alike.",
            "A low clock, heat, or a board held back: cooling or power. Tasks that wait for a core "
            "or for storage: what else runs there. None: its network, or its place in the job.",
        ),
        rows(worst, "work"),
        rows(f"({worst} - on () group_left () {of_others}) / on () group_left () {step}", "excess"),
        rows(of_them(f"max by (node) ({late_by})"), "late"),
        rows(of_them(fastest), "fastest"),
        rows(of_them(slowest), "slowest"),
        rows(of_them(waits), "wait"),
        rows(of_them(f"min by (node) ({clock})"), "clock"),
        rows(of_them(f"max by (node) ({core})"), "core"),
        rows(of_them(f"max by (node) ({held})"), "held"),
        rows(of_them(f"max by (node) (rate({pressure}[$__rate_interval]))"), "pressure"),
        columns=[
            Column("node", links=[of_row("GPUs & nodes", "node")]),
            Column("Value #work", "Work per step", "s", width=165),
            Column(
                "Value #excess",
                "Above median",
                "percentunit",
                decimals=1,
                levels=steps((0.05, WARN), (0.2, BAD)),
                width=135,
            ),
            Column("Value #late", "Late by", "percentunit", decimals=1, levels=ABOVE_0_IS_BAD),
            Column("Value #fastest", "Fastest rank", "s", width=130),
            Column("Value #slowest", "Slowest rank", "s", width=130),
            Column("Value #wait", "Least waiting", "s", width=135),
            Column("Value #clock", "Lowest GPU clock", "hertz", width=165),
            Column("Value #core", "GPU core", "celsius", levels=steps((80, WARN), (88, BAD))),
            Column("Value #held", "Held back", words=HELD_BACK_WORDS),
            Column("Value #pressure", "Waits for core or disk", "percentunit", width=195),
        ],
        sort=("Work per step", True),
    )
