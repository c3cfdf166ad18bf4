"""The board Ranks: who holds the others back, since when, and who hangs?"""

from __future__ import annotations

from tools.dashboards import panels
from tools.dashboards import variables as v
from tools.dashboards.annotations import marks
from tools.dashboards.board import Row, board
from tools.dashboards.first import WHOSE, first_row
from tools.dashboards.links import of_row, of_series
from tools.dashboards.looks import (
    ABOVE_0_IS_BAD,
    ABOVE_0_IS_ODD,
    BAD,
    HELD_BACK_WORDS,
    HOLDS_UP_WORDS,
    HOURS,
    LATE_WORDS,
    PHASE_WORDS,
    WARN,
    steps,
)
from tools.dashboards.names import attributes, metric, recorded
from tools.dashboards.roles import last, training_alone
from tools.dashboards.selectors import (
    ALIVE_S,
    BY_RANK,
    NODES,
    RANKS_OF_RUN,
    RUN,
    WHOLE_RUN,
)

QUESTION = "Which rank holds the others back, since when, and which one hangs?"

_RATE = "[$__rate_interval]"
# Rows of the tables.
_LISTED = 25
_WORK = recorded("rank:training_work:per_step2m", RANKS_OF_RUN)
_WAIT = recorded("rank:training_wait:per_step2m", RANKS_OF_RUN)
# The same ranks on all panels, selected once for the whole time, so that rows do not come and go.
_SHOWN = f"topk($shown, max by (rank) (avg_over_time({_WORK}[$__range] @ end())))"


def build() -> str:
    return board(
        "Ranks",
        QUESTION,
        [
            first_row(),
            Row("Who is there", _there()),
            Row("Who holds the others back", _late()),
            Row("Who hangs", _hanging()),
            Row("Mesh dimensions and their collectives", _collectives(), True),
            Row("The process of each rank (as selected; dear for thousands)", _process(), True),
        ],
        variables=[
            v.datasource(),
            *v.of_run(),
            v.name(RUN),
            v.split(RUN),
            v.numbers("shown", "Ranks drawn", "Rows of pictures.", 64, 16, 32, 128).hide(v.IN_MENU),
        ],
        annotations=marks(one_run=True),
    )


def _there() -> list[panels.Panel]:
    world = metric("training.world.size", WHOLE_RUN)
    beat = f"time() - {metric('training.heartbeat.timestamp', WHOLE_RUN)} < {ALIVE_S}"
    finished = f"{metric('training.state', WHOLE_RUN)} == 2"
    present = training_alone(f"({beat} or on ({BY_RANK}) {finished})", WHOLE_RUN)
    running = f"{metric('training.state', WHOLE_RUN)} == 1 and on ({BY_RANK}) ({beat})"
    together = f"{world} > 1 and on ({BY_RANK}) ({running})"
    compared = metric("training.compared.ranks", WHOLE_RUN)
    missing = recorded("rank:training_missing:age", WHOLE_RUN)
    return [
        panels.stat(
            panels.Text(
                "Ranks",
                f"How many ranks have reported within {ALIVE_S} s or have finished, and how many "
                "train together. Only ranks that call init and are exported report.",
                "Fewer than there are: a strategy, or a script that calls init on rank 0 alone.",
            ),
            panels.now(f"count(count by (rank) ({present})) or vector(0)", "report"),
            panels.now(f"max({world})", "of"),
            named=panels.WITH_NAME,
            size=(8, 3),
        ),
        panels.stat(
            panels.Text(
                "Ranks not compared",
                "How many of the ranks that train together the agents do not compare step by step: "
                "a late one among them, or a late node, is not named.",
                "`otel-ddp status` on a node says why. If agents do not reach that of rank 0's "
                "node, open ports 20000 to 29999 between the nodes.",
            ),
            panels.now(
                f"clamp_min(max({together}) - (max({compared}) or vector(0)), 0) or vector(0)"
            ),
            levels=ABOVE_0_IS_ODD,
            size=(8, 3),
        ),
        panels.stat(
            panels.Text(
                "Missing",
                f"Ranks that have reported before, but not for {ALIVE_S} s, and have not finished.",
                "What ended ranks is listed on Run; a whole node: see Pipeline.",
            ),
            panels.now(f"count(count by (rank) ({missing})) or vector(0)"),
            levels=ABOVE_0_IS_ODD,
            size=(8, 3),
        ),
    ]


def _late() -> list[panels.Panel]:
    median = recorded("run:training_work:median2m", WHOLE_RUN)
    step = recorded("run:training_step_time:median2m", WHOLE_RUN)
    named = metric("training.straggler", RANKS_OF_RUN, 'phase!=""')
    cost = last(metric("training.straggler.lost_time", RUN))
    to_hardware = of_series("GPUs & nodes", "rank")
    unequal = metric("training.imbalance", RANKS_OF_RUN)
    recurring = metric("training.recurring_stall", RANKS_OF_RUN)
    node = metric("training.node.straggler", WHOLE_RUN)
    unequal_node = metric("training.node.imbalance", WHOLE_RUN)

    def verdicts(found: str) -> str:
        return (
            f"max by (rank, phase) ({found}) and on (rank, phase)"
            f" topk({_LISTED}, max by (rank, phase) (max_over_time({found}[$__range] @ end())))"
        )

    return [
        panels.rank_heatmap(
            panels.Text(
                "Work per step, against the median rank",
                "1 is the median rank; waiting for others is left out. Rows are ranks; of many, "
                "those "
                "with most work in this time.",
                "One red row is a straggler: look at the same row below. Click it for its GPU.",
            ),
            panels.over_time(
                f"max by (rank) ({_WORK}) / on () group_left () max({median})"
                f" and on (rank) {_SHOWN}",
                "{{rank}}",
            ),
            unit="none",
            lowest=0.8,
            highest=1.5,
            scheme="Spectral",
            link=to_hardware,
        ),
        panels.rank_heatmap(
            panels.Text(
                "Waiting, as a share of the step",
                "How much of a step each of the same ranks waits for the others.",
                "The one green row among purple ones is what they wait for. All purple: "
                "the network, or a rank that is not drawn.",
            ),
            panels.over_time(
                f"max by (rank) ({_WAIT}) / on () group_left () max({step}) and on (rank) {_SHOWN}",
                "{{rank}}",
            ),
            unit="percentunit",
            lowest=0,
            highest=0.4,
            scheme="PRGn",
            link=to_hardware,
        ),
        panels.states(
            panels.Text(
                "Verdicts",
                "When an agent found which rank late, or all ranks of which node, and in which "
                "phase: in most steps, for larger batches, or again and again.",
                "The beginning of a band is when to look for what changed. Larger batches: how "
                "they are divided.",
            ),
            panels.over_time(f"max by (node, phase) ({node})", "{{node}} · {{phase}}"),
            panels.over_time(
                f"max by (node, phase) ({unequal_node})", "{{node}} · {{phase}}, larger batches"
            ),
            panels.over_time(verdicts(named), "rank {{rank}} · {{phase}}"),
            panels.over_time(verdicts(unequal), "rank {{rank}} · {{phase}}, larger batches"),
            panels.over_time(verdicts(recurring), "rank {{rank}} · {{phase}}, again and again"),
            # Without a single band the picture would complain.
            panels.over_time(
                f"absent(max({named} == 1 or {unequal} == 1 or {recurring} == 1)) - 1",
                "nobody",
            ),
            words=LATE_WORDS,
            size=(12, 7),
        ),
        panels.listing(
            panels.Text(
                "GPU-hours lost, by rank",
                "What the others have waited for each rank since it was started, as its agent "
                "finds it.",
                "What it is worth to move the rank to another machine.",
            ),
            panels.rows(f"topk({_LISTED}, max by (node, rank) ({cost}) > 0) / 3600", "lost"),
            columns=[
                panels.Column("rank", links=[of_row("GPUs & nodes", "node", "rank")]),
                panels.Column("node"),
                panels.Column(
                    "Value #lost", "Lost", HOURS, decimals=2, levels=steps((1, WARN), (24, BAD))
                ),
            ],
            sort=("Lost", True),
            size=(12, 7),
        ),
        _worst(),
        _worst_nodes(),
    ]


def _worst() -> panels.Panel:
    by = "node, rank, local_rank"
    worst = f"topk({_LISTED}, max by ({by}) (last_over_time({_WORK}[$__range])))"

    def of_them(expr: str) -> str:
        return f"max by ({by}) (last_over_time({expr}[$__range])) and on ({by}) {worst}"

    core = metric("hw.temperature", RANKS_OF_RUN, 'hw_sensor_location="core"')
    clock = metric("otel_ddp.gpu.clock.frequency", RANKS_OF_RUN, 'domain="core"')
    held = metric("otel_ddp.gpu.throttle.active", RANKS_OF_RUN, 'reason=~"hw_.*|sw_thermal"')
    data = recorded("rank_phase:training_phase_time:per_step2m", RANKS_OF_RUN, 'phase="data"')
    excess = metric("training.straggler.excess", RANKS_OF_RUN, 'phase="all"')
    own = f"max by ({by}, phase) ({metric('training.own_collectives', RANKS_OF_RUN)})"
    median, step = (
        f"max(last_over_time({recorded(name, WHOLE_RUN)}[$__range]))"
        for name in ("run:training_work:median2m", "run:training_step_time:median2m")
    )
    return panels.listing(
        panels.Text(
            "Ranks with most work",
            "The slowest ranks at the end of this time, with their hardware. Step by step: what "
            "each needs more than the others in the same steps, as the agents find it. Not "
            "compared: so many phases, in which the program waits for others in collectives of "
            "its own.",
            "A low clock or a high temperature: the GPU. Much waiting for data: disk or loader. "
            "Neither: the work itself is unequal.",
        ),
        panels.rows(worst, "work"),
        panels.rows(
            f"({worst} - on () group_left () {median}) / on () group_left () {step}", "excess"
        ),
        panels.rows(of_them(excess), "steps"),
        panels.rows(of_them(_WAIT), "wait"),
        panels.rows(of_them(data), "data"),
        panels.rows(of_them(core), "core"),
        panels.rows(of_them(clock), "clock"),
        panels.rows(of_them(held), "held"),
        panels.rows(f"count by ({by}) ({own} == 1) and on ({by}) {worst}", "own"),
        columns=[
            panels.Column("rank", links=[of_row("GPUs & nodes", "node", "rank")], width=75),
            panels.Column("node"),
            panels.Column("local_rank", width=105),
            panels.Column("Value #work", "Work per step", "s", width=165),
            panels.Column(
                "Value #excess",
                "Above median",
                "percentunit",
                decimals=1,
                levels=steps((0.05, WARN), (0.2, BAD)),
                width=135,
            ),
            panels.Column("Value #steps", "Step by step", "percentunit", decimals=1, width=135),
            panels.Column("Value #wait", "Waiting", "s", width=95),
            panels.Column("Value #data", "Data", "s", width=80),
            panels.Column(
                "Value #core", "GPU core", "celsius", levels=steps((80, WARN), (88, BAD))
            ),
            panels.Column("Value #clock", "GPU clock", "hertz"),
            panels.Column("Value #held", "Held back", words=HELD_BACK_WORDS),
            panels.Column("Value #own", "Not compared", width=135),
        ],
        sort=("Work per step", True),
    )


def _worst_nodes() -> panels.Panel:
    """The nodes whose ranks work longest, with possible causes."""
    here = f'{WHOLE_RUN},node=~"$node"'
    work = recorded("node:training_work:median2m", here)
    worst = f"topk({_LISTED}, max by (node) (last_over_time({work}[$__range])))"
    of_others, step = (
        f"max(last_over_time({recorded(name, WHOLE_RUN)}[$__range]))"
        for name in ("run:training_work:median2m", "run:training_step_time:median2m")
    )
    slowest = f"max by (node) ({recorded('node:training_work:max2m', here)})"
    waits = f"max by (node) ({recorded('node:training_wait:min2m', here)})"
    core = metric("hw.temperature", here, 'hw_sensor_location="core"')
    clock = metric("otel_ddp.gpu.clock.frequency", here, 'domain="core"')
    held = metric("otel_ddp.gpu.throttle.active", here, 'reason=~"hw_.*|sw_thermal"')
    pressure = metric("otel_ddp.host.pressure", NODES, 'resource=~"cpu|io"', 'stall_type="some"')
    late_by = recorded("rank:training_straggler:ratio", here, 'rank=""')

    def of_them(expr: str) -> str:
        return f"{expr} and on (node) {worst}"

    return panels.listing(
        panels.Text(
            "Nodes with most work",
            "The nodes whose median rank needs most for a step, in the mean over 2 minutes, beside "
            "the median rank of all. Late: as the agents find it, all ranks alike.",
            "A low clock, heat, or a board held back: cooling or power. Tasks that wait for a core "
            "or for storage: what else runs there. None: its network, or its place in the job.",
        ),
        panels.rows(worst, "work"),
        panels.rows(
            f"({worst} - on () group_left () {of_others}) / on () group_left () {step}", "excess"
        ),
        panels.rows(of_them(f"max by (node) ({late_by})"), "late"),
        panels.rows(of_them(slowest), "slowest"),
        panels.rows(of_them(waits), "wait"),
        panels.rows(of_them(f"min by (node) ({clock})"), "clock"),
        panels.rows(of_them(f"max by (node) ({core})"), "core"),
        panels.rows(of_them(f"max by (node) ({held})"), "held"),
        panels.rows(of_them(f"max by (node) (rate({pressure}[$__rate_interval]))"), "pressure"),
        columns=[
            panels.Column("node", links=[of_row("GPUs & nodes", "node")]),
            panels.Column("Value #work", "Work per step", "s", width=165),
            panels.Column(
                "Value #excess",
                "Above median",
                "percentunit",
                decimals=1,
                levels=steps((0.05, WARN), (0.2, BAD)),
                width=135,
            ),
            panels.Column(
                "Value #late", "Late by", "percentunit", decimals=1, levels=ABOVE_0_IS_BAD
            ),
            panels.Column("Value #slowest", "Slowest rank", "s", width=130),
            panels.Column("Value #wait", "Least waiting", "s", width=135),
            panels.Column("Value #clock", "Lowest GPU clock", "hertz", width=165),
            panels.Column(
                "Value #core", "GPU core", "celsius", levels=steps((80, WARN), (88, BAD))
            ),
            panels.Column("Value #held", "Held back", words=HELD_BACK_WORDS),
            panels.Column("Value #pressure", "Waits for core or disk", "percentunit", width=195),
        ],
        sort=("Work per step", True),
    )


def _hanging() -> list[panels.Panel]:
    by = "node, rank"
    progress = metric("training.progress.timestamp", RANKS_OF_RUN)
    phase = metric("training.phase", RANKS_OF_RUN)
    beat = metric("training.heartbeat.timestamp", RANKS_OF_RUN)
    holding = recorded("rank:training_holds_up:last", RANKS_OF_RUN)
    # With thousands of ranks, the culprit may not be among those that have stalled longest.
    named = f"topk({_LISTED}, max by ({by}) ({holding}))"
    there = f"max by ({by}) ({metric('training.state', RANKS_OF_RUN)}) < 2"
    longest = f"({named} or bottomk({_LISTED}, max by ({by}) ({progress}) and on ({by}) ({there})))"
    held_up = f"max by (rank) (max_over_time({holding}[$__range] @ end()))"
    last = f"max by (rank) (last_over_time({progress}[$__range] @ end()))"
    stood = f"(topk({_LISTED}, {held_up}) or bottomk($shown, {last}))"
    seen = (
        f"max by (rank) ({phase}) and on (rank) (time() - max by (rank) ({beat}) < {ALIVE_S})"
        f" and on (rank) {stood}"
    )
    return [
        panels.states(
            panels.Text(
                "Phase of each rank",
                "What each rank is busy with; grey waits for the others. Of many ranks, those "
                "that have stood longest. A silent rank has no band.",
                "In a hang all bands turn grey but one: that rank is what they wait for.",
            ),
            panels.over_time(_in_order(seen), "{{shown}}"),
            words=PHASE_WORDS,
            size=(24, 9),
        ),
        panels.listing(
            panels.Text(
                "Longest without progress",
                "Ranks by the time since their last change of phase, and whether they hold up the "
                "others. Empty where no rank is there any more.",
                "A rank that holds up the others is the cause; one that waits is a victim.",
            ),
            panels.rows(f"time() - max by ({by}) ({progress}) and on ({by}) {longest}", "age"),
            panels.rows(f"max by ({by}) ({phase}) and on ({by}) {longest}", "phase"),
            panels.rows(f"{named} * 0 + 1", "holding"),
            columns=[
                panels.Column("rank", links=[of_row("GPUs & nodes", "node", "rank")], width=75),
                panels.Column("node"),
                panels.Column(
                    "Value #age",
                    "Since progress",
                    "s",
                    levels=steps((60, WARN), (300, BAD)),
                    width=165,
                ),
                panels.Column("Value #phase", "Phase", words=PHASE_WORDS),
                panels.Column("Value #holding", "Holds up", words=HOLDS_UP_WORDS),
            ],
            sort=("Since progress", True),
        ),
    ]


def _in_order(ranks: str) -> str:
    """Pad ranks with zeros: Prometheus sorts labels as text."""
    padded = f'label_replace({ranks}, "shown", "$1", "rank", "(.*)")'
    for zeros, digits in (("000", r"\\d"), ("00", r"\\d\\d"), ("0", r"\\d\\d\\d")):
        padded = f'label_replace({padded}, "shown", "{zeros}$1", "rank", "({digits})")'
    return padded


def _collectives() -> list[panels.Panel]:
    step = recorded("run:training_step_time:median2m", WHOLE_RUN)
    wait = metric("training.collective.step_wait", RANKS_OF_RUN)
    # Pushed and scraped, a series comes twice.
    waits = f"sum by (dimension, rank) (max by (dimension, operation, rank) ({wait}))"
    share = f"{waits} / on () group_left () max({step})"

    def of_step(name: str) -> str:
        return f"max by (dimension, operation) ({metric(name, RANKS_OF_RUN)})"

    return [
        panels.bars(
            panels.Text(
                "Waiting in each mesh dimension",
                "What share of a step ranks wait in their groups of each dimension: the three that "
                "wait most, and the one that waits least.",
                "In the dimension with the longest bars, the others wait for the rank that waits "
                "least. In a pipeline's dimension it is the bubble.",
            ),
            panels.now(f"topk by (dimension) (3, {share})", "{{dimension}} · rank {{rank}}"),
            panels.now(
                f"bottomk by (dimension) (1, {share})", "{{dimension}} · least, rank {{rank}}"
            ),
            unit="percentunit",
            colours={},
            nothing="known on hosts of one node, from PyTorch 2.15 on",
            size=(12, 9),
        ),
        panels.listing(
            panels.Text(
                "Collectives of a step",
                "How often a rank calls each collective, with how many bytes, and how long it "
                "waits there, of the rank with most.",
                "Many calls of few bytes: larger buckets. Many bytes: what is exchanged, or "
                "how often.",
            ),
            panels.rows(of_step("training.collective.step_calls"), "calls"),
            panels.rows(of_step("training.collective.step_size"), "size"),
            panels.rows(of_step("training.collective.step_wait"), "wait"),
            columns=[
                panels.Column("dimension"),
                panels.Column("operation"),
                panels.Column("Value #calls", "Calls", decimals=1),
                panels.Column("Value #size", "Bytes", "bytes"),
                panels.Column("Value #wait", "Longest wait", "s"),
            ],
            sort=("Bytes", True),
            nothing="known from PyTorch 2.15 on",
            size=(12, 9),
        ),
    ]


def _process() -> list[panels.Panel]:
    def each(title: str, expr: str, unit: str, meaning: str, action: str) -> panels.Panel:
        panel = panels.Text(title, meaning, action)
        asked = panels.over_time(expr, WHOSE)
        return panels.lines(panel, asked, unit=unit, minimum=0, size=(8, 7), sort=("Max", True))

    def last(name: str) -> str:
        return f"max by (node, rank) ({metric(name, RANKS_OF_RUN)})"

    def rate(name: str) -> str:
        # Pushed and scraped, a series comes twice.
        once = f"max by ({', '.join((BY_RANK, *attributes(name)))})"
        return f"sum by (node, rank) ({once} (rate({metric(name, RANKS_OF_RUN)}{_RATE})))"

    return [
        each(
            "Processors",
            rate("process.cpu.time"),
            "none",
            "How many processors the training process keeps busy.",
            "One and no more on a slow rank: Python itself is the limit there.",
        ),
        each(
            "Processors of loader workers",
            rate("training.children.cpu.time"),
            "none",
            "How many processors its child processes keep busy: data loader workers, mostly.",
            "All of them busy and data waited for: more workers, or less work a sample.",
        ),
        each(
            "Memory",
            last("process.memory.usage"),
            "bytes",
            "Physical memory of the training process.",
            "Grows without end: something is kept at every step.",
        ),
    ]
