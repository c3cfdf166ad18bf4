"""The board Fleet: which machine costs the others most, over weeks, and which one is it again?"""

from __future__ import annotations

from tools.dashboards import variables as v
from tools.dashboards.board import Row, board
from tools.dashboards.links import of_fields
from tools.dashboards.looks import ABOVE_0_IS_BAD, BAD, HOURS, WARN, steps
from tools.dashboards.names import recorded
from tools.dashboards.panels import Column, Panel, Text, lines, listing, now, over_time, rows, stat
from tools.dashboards.roles import IN_RANGE, IN_STEP, SHORTEST_STEP, last
from tools.dashboards.selectors import GROUPS, RULES_EVERY_S, SEEN_EVERY_S

QUESTION = "Which machine costs the others most, and which one is it again?"

_MACHINES = 'node=~"$node"'
_NODES = f"{GROUPS},{_MACHINES}"
_HOURS = f"* {RULES_EVERY_S} / 3600"
_LATE, _HANG = 'cause="late"', 'cause="hang"'


def build() -> str:
    return board(
        "Fleet",
        QUESTION,
        [
            Row("In this time", _now()),
            Row("Machines", [_nodes()]),
            Row("Over time", [_over_time()]),
            Row("Where they were late", [_late_runs(), _gpus()]),
        ],
        variables=[
            v.datasource(),
            *v.of_machines(),
            v.numbers("topn", "Nodes drawn", "How many of the worst are drawn.", 10, 5, 25, 50),
        ],
        since="now-30d",
    )


def _lost(*selectors: str) -> str:
    return recorded("node_cause:training_lost_gpus:rate2m", _NODES, *selectors)


def _late() -> str:
    # Recorded every 5 minutes, over 30 days.
    return last(recorded("node:training_late:share30d", _NODES), "[10m]")


def _hours(expr: str, within: str = IN_RANGE) -> str:
    return f"sum_over_time({expr}{within}) {_HOURS}"


def _hours_held(held: str, by_gpu: str) -> str:
    # Several reasons may apply at a time. Each is a sum over all runs.
    return f"max by ({by_gpu}) (sum by ({by_gpu}, reason) ({_hours(held)}))"


def _now() -> list[Panel]:
    def of_all(expr: str) -> str:
        return f"sum(sum_over_time({expr}{IN_RANGE}))"

    firing = f'ALERTS{{alertname="NodeLateAgain",alertstate="firing",{_MACHINES}}}'
    seen = recorded("node:training_seen:timestamp", _NODES)
    together = recorded("run:training_ranks_together:count", GROUPS)
    return [
        stat(
            Text(
                "Late again",
                "Machines that were late in three or more of their last ten runs, in more than one "
                "group.",
                "Drain them, and test them: the alert's runbook says how.",
            ),
            now(f"count(group by (node) ({firing})) or vector(0)"),
            levels=ABOVE_0_IS_BAD,
        ),
        stat(
            Text(
                "Machines",
                "Those on which a rank was seen in this time.",
                "Fewer than you have: the others were not used, or their agents are silent.",
            ),
            now(f"count(group by (node) (last_over_time({seen}{IN_RANGE})))"),
        ),
        stat(
            Text(
                "Lost hours",
                "GPU-hours that ranks waited for late ones, or hung for a machine.",
                "The table says for which machine.",
            ),
            now(f"sum({_hours(_lost())})"),
            unit=HOURS,
            decimals=1,
            levels=steps((1, WARN), (24, BAD)),
            nothing="none",
        ),
        stat(
            Text(
                "Share of all hours",
                "The same as a share of the hours of all ranks that trained.",
                "Times what the cluster costs: what a good machine more is worth.",
            ),
            now(f"{of_all(_lost())} / {of_all(together)}"),
            unit="percentunit",
            decimals=2,
            nothing="none",
        ),
    ]


def _nodes() -> Panel:
    seen = recorded("node:training_seen:timestamp", _NODES)
    runs = f"count by (node) (group by (node, group, run) (last_over_time({seen}{IN_RANGE})))"
    deaths = recorded("node_cause:training_deaths:sum", _NODES)
    # A fault belongs to no run.
    faults = recorded("gpu_code:otel_ddp_gpu_xid_errors:last", _MACHINES)
    held = recorded("gpu_reason:otel_ddp_gpu_throttle_active:last", _NODES)
    lost_memory = recorded("gpu:hw_errors_uncorrected:last", _MACHINES)
    return listing(
        Text(
            "Machines",
            "What each has cost the other ranks of its runs, and what happened on it. Late in: of "
            "its last ten runs within 30 days. Deaths are those that were the first of their run.",
            "One machine far above the others, in runs of several groups: drain it and test it.",
        ),
        rows(f"sum by (node) ({_hours(_lost())})", "lost"),
        rows(f"sum by (node) ({_hours(_lost(_LATE))})", "late"),
        rows(f"sum by (node) ({_hours(_lost(_HANG))})", "hang"),
        rows(f"count by (node) ({_late()})", "times"),
        rows(f"count by (node) (group by (node, group) ({_late()}))", "groups"),
        rows(runs, "runs"),
        rows(f"sum by (node) (max_over_time({deaths}{IN_RANGE}))", "deaths"),
        rows(f"count by (node) (last_over_time({faults}{IN_RANGE}))", "xids"),
        rows(f"sum by (node) (increase({lost_memory}{IN_RANGE})) > 0", "memory"),
        rows(f"sum by (node) ({_hours_held(held, 'node, hw_id')})", "held"),
        columns=[
            Column("node", links=[of_fields("GPUs & nodes", "node")]),
            Column(
                "Value #lost",
                "Lost",
                HOURS,
                decimals=2,
                levels=steps((1, WARN), (24, BAD)),
            ),
            Column("Value #late", "To lateness", HOURS, decimals=2),
            Column("Value #hang", "To hangs", HOURS, decimals=2),
            Column("Value #times", "Late in", width=95, levels=steps((2, WARN), (3, BAD))),
            Column("Value #groups", "Groups", width=95),
            Column("Value #runs", "Runs", decimals=0, width=80),
            Column("Value #deaths", "Deaths", decimals=0, width=95),
            Column("Value #xids", "Xid codes", decimals=0),
            Column("Value #memory", "Memory errors", decimals=0, levels=ABOVE_0_IS_BAD, width=150),
            Column("Value #held", "Held back", HOURS, decimals=1),
        ],
        sort=("Lost", True),
        nothing="no machine was seen: are the rules loaded?",
        size=(24, 12),
    )


def _over_time() -> Panel:
    hours = _hours(_lost(), IN_STEP)
    worst = f"topk($topn, sum by (node) (sum_over_time({_lost()}{IN_RANGE} @ end())))"
    return lines(
        Text(
            "Who is waited for",
            "GPU-hours that go to waiting for each of the worst machines, until each bar.",
            "Bars that come back with each run are a machine to test; one that ended was "
            "mended, or is no longer used.",
        ),
        over_time(f"sum by (node) ({hours}) and on (node) {worst}", "{{node}}"),
        unit=HOURS,
        size=(24, 8),
        legend=("sum",),
        sort=("Total", True),
        minimum=0,
        stacked=True,
        max_points=200,
        shortest_step=SHORTEST_STEP,
        in_bars=True,
    )


def _late_runs() -> Panel:
    by = "node, group, run"
    seen = recorded("node:training_seen:timestamp", _NODES)

    def of_late(seen_s: str) -> str:
        return f"({seen_s}) * 1000 and on ({by}) {_late()}"

    return listing(
        Text(
            "Runs in which a machine was late",
            "Of the last ten runs of each: what share of all time of the run was lost to it.",
            "One group alone: it may be what its programs do on that rank. Several: the machine.",
        ),
        rows(f"max by ({by}) ({_late()})", "share"),
        rows(of_late(f"min by ({by}) (min_over_time({seen}{IN_RANGE})) - {SEEN_EVERY_S}"), "start"),
        rows(of_late(f"max by ({by}) (max_over_time({seen}{IN_RANGE})) + {SEEN_EVERY_S}"), "until"),
        columns=[
            Column("node", links=[of_fields("GPUs & nodes", "node")]),
            Column("group", width=95),
            Column("run", links=[of_fields("Ranks", "group", "run", lifetime=True)]),
            Column("Value #share", "Lost to it", "percentunit", decimals=1, width=115),
            Column("Value #start", "Started", "dateTimeAsIso", width=170),
            Column("Value #until", "Until", out_of_sight=True),
        ],
        sort=("Lost to it", True),
        size=(12, 9),
    )


def _gpus() -> Panel:
    lost = recorded("gpu:training_straggler_lost_time:rate2m", _NODES)
    held = recorded("gpu_reason:otel_ddp_gpu_throttle_active:last", _NODES)
    by_gpu = "node, gpu, hw_id"
    hours = f"sum by ({by_gpu}) ({_hours(lost)})"
    return listing(
        Text(
            "GPUs that were late",
            "Hours of other ranks that were lost to the rank on each GPU, by its id.",
            "One GPU with all of it: that board. All of a machine alike: its cooling, its power, "
            "or what else runs there.",
        ),
        rows(hours, "by_gpu"),
        rows(
            f"{_hours_held(held, by_gpu)} and on ({by_gpu}) {hours}",
            "held_gpu",
        ),
        columns=[
            Column("node", links=[of_fields("GPUs & nodes", "node")]),
            Column("gpu", "GPU"),
            Column("hw_id", "Id"),
            Column("Value #by_gpu", "Lost", HOURS, decimals=2, levels=steps((1, WARN), (24, BAD))),
            Column("Value #held_gpu", "Held back", HOURS, decimals=1),
        ],
        sort=("Lost", True),
        size=(12, 9),
    )
