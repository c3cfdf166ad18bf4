"""The board Pipeline: can the other boards be trusted?"""

from __future__ import annotations

from tools.dashboards import panels
from tools.dashboards import variables as v
from tools.dashboards.board import Row, board
from tools.dashboards.looks import ABOVE_0_IS_BAD, ABOVE_0_IS_ODD, BAD, GOOD, WARN, steps
from tools.dashboards.names import metric, recorded
from tools.dashboards.roles import having_role
from tools.dashboards.selectors import (
    AGENTS,
    BY_NODE,
    BY_RANK,
    BY_RUN,
    RANK_0,
    RANKS_OF_RUNS,
    RUNS,
    WHOLE_RUNS,
)

QUESTION = "Can the other boards be trusted?"

_RATE = "[$__rate_interval]"
_IN_RANGE = "[$__range]"


def build() -> str:
    return board(
        "Pipeline",
        QUESTION,
        [
            Row("Now, and in this time", _now()),
            Row("From the agents on", _agents()),
            Row("What is not measured, and why", [_capabilities()]),
            Row("Ranks (as selected; dear for thousands)", [_ranks()], collapsed=True),
        ],
        variables=[
            v.datasource(),
            *v.of_runs(),
            v.nodes_of_agents(),
            *v.places(RUNS)[1:],
            v.numbers("topn", "Nodes drawn", "How many of the worst are drawn.", 10, 5, 25, 50),
        ],
    )


def _agent(name: str, *more: str) -> str:
    return metric(name, AGENTS, *more)


def _now() -> list[panels.Panel]:
    exports = _agent("otel_ddp.exports")
    failed = _agent("otel_ddp.exports", 'outcome!="delivered"')
    lost = metric("otel_ddp.records.lost", RANKS_OF_RUNS)
    refused = metric("otel_ddp.values.refused", RANKS_OF_RUNS)
    hooks = metric("otel_ddp.hook.time", RUNS, RANK_0)
    return [
        panels.stat(
            panels.Text(
                "Agents",
                "Nodes whose agent reports.",
                "Fewer than nodes: `otel-ddp doctor` on the missing one says why.",
            ),
            panels.now(f"count(max by (node) ({_agent('otel_ddp.agent.cpu.time')})) or vector(0)"),
            levels=steps((1, GOOD), base=BAD),
        ),
        panels.stat(
            panels.Text(
                "Reading age",
                "The longest time for which an agent has not got an answer from one of its "
                "sources.",
                "Above 90 s a driver or a disk hangs: the panel below names the node and the "
                "source.",
            ),
            panels.now(f"max({_agent('otel_ddp.source.age')})"),
            unit="s",
            # File systems are read every 30 s.
            levels=steps((45, WARN), (90, BAD)),
            nothing="no agent",
        ),
        panels.stat(
            panels.Text(
                "Undelivered",
                "Share of the attempts to hand over data that did not succeed.",
                "Below one in twenty, and nothing dropped: all came in the end. "
                "Else see whether the collector is up.",
            ),
            panels.over_time(f"sum(rate({failed}{_RATE})) / (sum(rate({exports}{_RATE})) > 0)"),
            unit="percentunit",
            levels=steps((0.05, WARN), (0.5, BAD)),
            nothing="scraped only",
        ),
        panels.stat(
            panels.Text(
                "Dropped",
                "Data points that agents gave up on within this time.",
                "Any at all: the curves have holes there. The panel below says why.",
            ),
            panels.now(
                "sum(max by (node, why) "
                f"(increase({_agent('otel_ddp.points.dropped')}{_IN_RANGE})))"
                " or vector(0)"
            ),
            decimals=0,
            levels=ABOVE_0_IS_BAD,
        ),
        panels.stat(
            panels.Text(
                "On disk",
                "Data that wait on disks of nodes for their receiver to come back.",
                "Grows: the collector or its backend is down. Falls by itself once it is up.",
            ),
            panels.now(f"sum(max by (node) ({_agent('otel_ddp.spool.size')})) or vector(0)"),
            unit="bytes",
            levels=steps((16777216, WARN), (1073741824, BAD)),
        ),
        panels.stat(
            panels.Text(
                "Lost",
                "Records of ranks that were gone before their agent could read them.",
                "The agent gets too little processor time, or the journal is too small.",
            ),
            panels.now(f"sum(max by ({BY_RANK}, why) (increase({lost}{_IN_RANGE}))) or vector(0)"),
            decimals=0,
            levels=ABOVE_0_IS_ODD,
        ),
        panels.stat(
            panels.Text(
                "Refused",
                "Values or names given to log() that were refused.",
                "The training's own output has one warning for each place.",
            ),
            panels.now(
                f"sum(max by ({BY_RANK}, why) (max_over_time({refused}{_IN_RANGE}))) or vector(0)"
            ),
            decimals=0,
            levels=ABOVE_0_IS_ODD,
        ),
        panels.stat(
            panels.Text(
                "Overhead",
                "Share of rank 0's time that watching takes, the most of any run.",
                "Above one in a hundred: steps of a few milliseconds; log more rarely.",
            ),
            panels.over_time(f"max(rate({hooks}{_RATE}))"),
            unit="percentunit",
            levels=steps((0.01, WARN), (0.05, BAD)),
            nothing="no hooks",
        ),
    ]


def _agents() -> list[panels.Panel]:
    age = _agent("otel_ddp.source.age")
    oldest = f"topk($topn, max by (node, source) (max_over_time({age}[$__range] @ end())))"
    beat = recorded("node:training_heartbeat_timestamp:max", WHOLE_RUNS)
    silent = f"bottomk($topn, max by (node) (last_over_time({beat}[$__range] @ end())))"
    there = f"on ({BY_NODE}) {recorded('node:training_state:min', WHOLE_RUNS)} < 2"
    step = having_role(recorded("run:training_step:max", WHOLE_RUNS))
    return [
        panels.lines(
            panels.Text(
                "Exports by outcome",
                "Attempts a second of all agents to hand over data, by how they ended.",
                "failed: nobody took them, they are tried again. refused: the collector does not "
                "want "
                "them, look at its log.",
            ),
            panels.over_time(
                "sum by (outcome) (max by (node, outcome)"
                f" (rate({_agent('otel_ddp.exports')}{_RATE})))",
                "{{outcome}}",
            ),
            unit="short",
            minimum=0,
            size=(8, 7),
        ),
        panels.lines(
            panels.Text(
                "Age of readings",
                "Time since an agent last read each of its sources; the oldest.",
                "A line that climbs: that source hangs. The numbers of it end meanwhile.",
            ),
            panels.over_time(
                f"max by (node, source) ({age}) and on (node, source) {oldest}", _SOURCE
            ),
            unit="s",
            minimum=0,
            levels=steps((45, WARN), (90, BAD)),
            size=(8, 7),
            sort=("Max", True),
        ),
        panels.lines(
            panels.Text(
                "Age of heartbeats",
                "Time since each node's ranks were last seen alive; the nodes longest silent. "
                "Ranks that have ended are left out. Below zero: clocks disagree.",
                "All nodes alike: the way to here. One node: its agent or the node.",
            ),
            panels.over_time(
                # At the moment at which it was recorded.
                f"max by (node) (timestamp({beat}) - {beat} and {there}) and on (node) {silent}",
                "{{node}}",
            ),
            unit="s",
            levels=steps((60, WARN), (120, BAD)),
            size=(8, 7),
            sort=("Last *", True),
            nothing="no ranks",
        ),
        panels.lines(
            panels.Text(
                "Points dropped, by reason",
                "Data points a second that agents gave up on.",
                "rejected: the backend's log says what it does not like. Else more room to wait "
                "in.",
            ),
            panels.over_time(
                "sum by (why) (max by (node, why)"
                f" (rate({_agent('otel_ddp.points.dropped')}{_RATE})))",
                "{{why}}",
            ),
            unit="short",
            minimum=0,
            levels=ABOVE_0_IS_ODD,
            size=(12, 7),
        ),
        panels.stat(
            panels.Text(
                "Recording rules",
                "Runs for which Prometheus has evaluated our rules at the end of this time.",
                "0 while runs run: load deploy/prometheus/rules, or see its page Rules for errors.",
            ),
            panels.now(f"count({step}) or vector(0)"),
            size=(8, 7),
        ),
    ]


_SOURCE = "{{node}} · {{source}}"


def _capabilities() -> panels.Panel:
    of_ranks = f"max by ({BY_RANK}, what, reason) ({metric('otel_ddp.capability', RUNS)})"
    return panels.listing(
        panels.Text(
            "Not measured",
            "What these runs do not measure, with the reason, and on how many ranks.",
            "docs/training.md says for each reason what to do. Panels that need it are empty.",
        ),
        panels.rows(f"count by ({BY_RUN}, what, reason) ({of_ranks} == 0)", "n"),
        columns=[
            panels.Column("group"),
            panels.Column("run"),
            panels.Column("what", "What"),
            panels.Column("reason", "Reason"),
            panels.Column("Value #n", "Ranks"),
        ],
        nothing="nothing is missing now",
        size=(24, 7),
    )


def _ranks() -> panels.Panel:
    def since_start(name: str) -> str:
        # Pushed and scraped, a series comes twice.
        once = f"max by ({BY_RANK}, why) ({metric(name, RANKS_OF_RUNS)})"
        return f"topk($topn, sum by (node, rank) ({once}) > 0)"

    return panels.listing(
        panels.Text(
            "Lost, refused, failed",
            "Records that the agent came too late for, values that log() refused, and "
            "errors of ours that were kept out of training, of the ranks with most.",
            "Lost: give the agent a processor, or log less. Refused: fewer names, numbers only. "
            "Errors: report them, with the training's own output.",
        ),
        panels.rows(since_start("otel_ddp.records.lost"), "lost"),
        panels.rows(since_start("otel_ddp.values.refused"), "refused"),
        panels.rows(since_start("otel_ddp.hook.errors"), "errors"),
        columns=[
            panels.Column("rank"),
            panels.Column("node"),
            panels.Column("Value #lost", "Records lost", levels=ABOVE_0_IS_ODD),
            panels.Column("Value #refused", "Values refused", levels=ABOVE_0_IS_ODD),
            panels.Column("Value #errors", "Errors of hooks", levels=ABOVE_0_IS_BAD),
        ],
        sort=("Records lost", True),
    )
