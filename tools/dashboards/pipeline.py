"""The board Pipeline: can the other boards be trusted?"""

from __future__ import annotations

from tools.dashboards import variables as v
from tools.dashboards.board import Row, board
from tools.dashboards.looks import ABOVE_0_IS_BAD, ABOVE_0_IS_ODD, BAD, GOOD, WARN, steps
from tools.dashboards.names import metric, recorded
from tools.dashboards.panels import (
    Column,
    Panel,
    Text,
    lines,
    listing,
    now,
    over_time,
    rows,
    stat,
)
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


def _now() -> list[Panel]:
    exports = _agent("otel_ddp.exports")
    failed = _agent("otel_ddp.exports", 'outcome!="delivered"')
    lost = metric("otel_ddp.records.lost", RANKS_OF_RUNS)
    refused = metric("otel_ddp.values.refused", RANKS_OF_RUNS)
    hooks = metric("otel_ddp.hook.time", RUNS, RANK_0)
    return [
        stat(
            Text(
                "Agents",
                "Nodes of which an agent is heard.",
                "Fewer than nodes: `otel-ddp doctor` on the missing one says why.",
            ),
            now(f"count(max by (node) ({_agent('otel_ddp.agent.cpu.time')})) or vector(0)"),
            levels=steps((1, GOOD), base=BAD),
        ),
        stat(
            Text(
                "Reading age",
                "The longest time for which an agent has not got an answer from one of its "
                "sources.",
                "Above 90 s a driver or a disk hangs: the panel below names the node and the "
                "source.",
            ),
            now(f"max({_agent('otel_ddp.source.age')})"),
            unit="s",
            # File systems are read every 30 s.
            levels=steps((45, WARN), (90, BAD)),
            nothing="no agent",
        ),
        stat(
            Text(
                "Undelivered",
                "Share of the attempts to hand over data that did not succeed.",
                "Below one in twenty, and nothing dropped: all came in the end. "
                "Else see whether the collector is up.",
            ),
            over_time(f"sum(rate({failed}{_RATE})) / (sum(rate({exports}{_RATE})) > 0)"),
            unit="percentunit",
            levels=steps((0.05, WARN), (0.5, BAD)),
            nothing="scraped only",
        ),
        stat(
            Text(
                "Dropped",
                "Data points that agents gave up on within this time.",
                "Any at all: the curves have holes there. The panel below says why.",
            ),
            now(
                "sum(max by (node, why) "
                f"(increase({_agent('otel_ddp.points.dropped')}{_IN_RANGE})))"
                " or vector(0)"
            ),
            decimals=0,
            levels=ABOVE_0_IS_BAD,
        ),
        stat(
            Text(
                "On disk",
                "Data that wait on disks of nodes for their receiver to come back.",
                "Grows: the collector or its backend is down. Falls by itself once it is up.",
            ),
            now(f"sum(max by (node) ({_agent('otel_ddp.spool.size')})) or vector(0)"),
            unit="bytes",
            levels=steps((16777216, WARN), (1073741824, BAD)),
        ),
        stat(
            Text(
                "Lost",
                "Records of ranks that were gone before their agent could read them.",
                "The agent gets too little processor time, or the journal is too small.",
            ),
            now(f"sum(max by ({BY_RANK}, why) (increase({lost}{_IN_RANGE}))) or vector(0)"),
            decimals=0,
            levels=ABOVE_0_IS_ODD,
        ),
        stat(
            Text(
                "Refused",
                "Values or names given to log() that were refused.",
                "The training's own output has one warning for each place.",
            ),
            now(f"sum(max by ({BY_RANK}, why) (max_over_time({refused}{_IN_RANGE}))) or vector(0)"),
            decimals=0,
            levels=ABOVE_0_IS_ODD,
        ),
        stat(
            Text(
                "Overhead",
                "Share of rank 0's time that watching takes, the most of any run.",
                "Above one in a hundred: steps of a few milliseconds; log more rarely.",
            ),
            over_time(f"max(rate({hooks}{_RATE}))"),
            unit="percentunit",
            levels=steps((0.01, WARN), (0.05, BAD)),
            nothing="no hooks",
        ),
    ]


def _agents() -> list[Panel]:
    age = _agent("otel_ddp.source.age")
    oldest = f"topk($topn, max by (node, source) (max_over_time({age}[$__range] @ end())))"
    beat = recorded("node:training_heartbeat_timestamp:max", WHOLE_RUNS)
    silent = f"bottomk($topn, max by (node) (last_over_time({beat}[$__range] @ end())))"
    there = f"on ({BY_NODE}) {recorded('node:training_state:min', WHOLE_RUNS)} < 2"
    step = having_role(recorded("run:training_step:max", WHOLE_RUNS))
    return [
        lines(
            Text(
                "Exports by outcome",
                "Attempts a second of all agents to hand over data, by how they ended.",
                "failed: nobody took them, they are tried again. refused: the collector does not "
                "want "
                "them, look at its log.",
            ),
            over_time(
                "sum by (outcome) (max by (node, outcome)"
                f" (rate({_agent('otel_ddp.exports')}{_RATE})))",
                "{{outcome}}",
            ),
            unit="short",
            minimum=0,
            size=(8, 7),
        ),
        lines(
            Text(
                "Age of readings",
                "Time since an agent last read each of its sources; the oldest.",
                "A line that climbs: that source hangs. The numbers of it end meanwhile.",
            ),
            over_time(f"max by (node, source) ({age}) and on (node, source) {oldest}", _SOURCE),
            unit="s",
            minimum=0,
            levels=steps((45, WARN), (90, BAD)),
            size=(8, 7),
            sort=("Max", True),
        ),
        lines(
            Text(
                "Age of heartbeats",
                "Time since each node's ranks were last seen alive; the nodes longest silent. "
                "Ranks that have ended are left out. Below zero: clocks disagree.",
                "All nodes alike: the way to here. One node: its agent or the node.",
            ),
            over_time(
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
        lines(
            Text(
                "Points dropped, by reason",
                "Data points a second that agents gave up on.",
                "rejected: the backend's log says what it does not like. Else more room to wait "
                "in.",
            ),
            over_time(
                "sum by (why) (max by (node, why)"
                f" (rate({_agent('otel_ddp.points.dropped')}{_RATE})))",
                "{{why}}",
            ),
            unit="short",
            minimum=0,
            levels=ABOVE_0_IS_ODD,
            size=(12, 7),
        ),
        stat(
            Text(
                "Recording rules",
                "Runs for which Prometheus has evaluated our rules at the end of this time.",
                "0 while runs run: load deploy/prometheus/rules, or see its page Rules for errors.",
            ),
            now(f"count({step}) or vector(0)"),
            size=(8, 7),
        ),
    ]


_SOURCE = "{{node}} · {{source}}"


def _capabilities() -> Panel:
    of_ranks = f"max by ({BY_RANK}, what, reason) ({metric('otel_ddp.capability', RUNS)})"
    return listing(
        Text(
            "Not measured",
            "What these runs do not measure, with the reason, and on how many ranks.",
            "docs/training.md says for each reason what to do. Panels that need it are empty.",
        ),
        rows(f"count by ({BY_RUN}, what, reason) ({of_ranks} == 0)", "n"),
        columns=[
            Column("group"),
            Column("run"),
            Column("what", "What"),
            Column("reason", "Reason"),
            Column("Value #n", "Ranks"),
        ],
        nothing="nothing is missing now",
        size=(24, 7),
    )


def _ranks() -> Panel:
    def since_start(name: str) -> str:
        # Pushed and scraped, a series comes twice.
        once = f"max by ({BY_RANK}, why) ({metric(name, RANKS_OF_RUNS)})"
        return f"topk($topn, sum by (node, rank) ({once}) > 0)"

    return listing(
        Text(
            "Lost, refused, failed",
            "Records that the agent came too late for, values that log() refused, and "
            "errors of ours that were kept out of training, of the ranks with most.",
            "Lost: give the agent a processor, or log less. Refused: fewer names, numbers only. "
            "Errors: report them, with the training's own output.",
        ),
        rows(since_start("otel_ddp.records.lost"), "lost"),
        rows(since_start("otel_ddp.values.refused"), "refused"),
        rows(since_start("otel_ddp.hook.errors"), "errors"),
        columns=[
            Column("rank"),
            Column("node"),
            Column("Value #lost", "Records lost", levels=ABOVE_0_IS_ODD),
            Column("Value #refused", "Values refused", levels=ABOVE_0_IS_ODD),
            Column("Value #errors", "Errors of hooks", levels=ABOVE_0_IS_BAD),
        ],
        sort=("Records lost", True),
    )
