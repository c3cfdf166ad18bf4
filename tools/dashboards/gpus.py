"""The board GPUs & nodes: is it the hardware?"""

from __future__ import annotations

from collections.abc import Sequence

from grafana_foundation_sdk.models.dashboard import Threshold
from tools.dashboards import panels
from tools.dashboards import variables as v
from tools.dashboards.annotations import marks
from tools.dashboards.board import Row, board
from tools.dashboards.looks import ABOVE_0_IS_BAD, ABOVE_0_IS_ODD, BAD, WARN, steps
from tools.dashboards.names import metric
from tools.dashboards.selectors import NODES, RANKS_OF_RUNS, RUNS

QUESTION = "Is it the hardware?"

_RATE = "[$__rate_interval]"
# By UUID, which is unique, also for MIG instances.
_BY = "node, gpu, hw_id, rank"
_WHOSE = "{{node}} · GPU {{gpu}}{{whose}}"
# No GPU has all numbers.
_UNTOLD, _NONE_TOLD = "not told by these GPUs", "none that these GPUs tell"
# Throttle reasons that are faults. `sw_power`, the ordinary limit under load, is shown separately.
_WRONG = 'reason=~"hw_.*|sw_thermal|thermal"'
_OF_RANK = 'rank!=""'
_HOT = steps((80, WARN), (88, BAD))
_FULL = steps((0.9, WARN), (0.97, BAD))


def build() -> str:
    return board(
        "GPUs & nodes",
        QUESTION,
        [
            Row("GPUs: the first four to look at", _first_four()),
            Row("Is something wrong with one?", _wrong()),
            Row("Nodes", _nodes()),
            Row("Power, clocks, PCIe and NVLink of GPUs", _more(), collapsed=True),
            Row("Disks, network and waiting of nodes", _node_more(), collapsed=True),
        ],
        variables=[
            v.datasource(),
            *v.of_runs(),
            v.nodes_of_agents(),
            *v.places(RUNS)[1:],
            v.numbers("shown", "GPUs drawn", "Lines of a picture.", 16, 8, 32, 64),
        ],
        annotations=marks(),
    )


def _gpu(name: str, *more: str) -> str:
    return metric(name, RANKS_OF_RUNS, *more)


def _each(expr: str) -> str:
    return f"max by ({_BY}) ({expr})"


def _with_rank(expr: str) -> str:
    """With a label for its rank, if it has one."""
    return f'label_replace({expr}, "whose", " · rank $1", "rank", "(.+)")'


def _few(series: str, most: str = "topk", share_of: str = "") -> str:
    """The GPUs with the highest or lowest values in this time."""
    chosen = f"{most}($shown, max by (node, hw_id) (avg_over_time({series}[$__range] @ end())))"
    # Selected first: aggregating thousands of series at each point would be expensive.
    parts = (_each(f"{each} and on (node, hw_id) {chosen}") for each in (series, share_of) if each)
    return _with_rank(" / ".join(parts))


def _few_rates(series: str, *by: str) -> str:
    labels = ", ".join((_BY, *by))
    chosen = f"topk($shown, max by (node, hw_id) (rate({series}[$__range] @ end())))"
    return _with_rank(f"max by ({labels}) (rate({series}{_RATE}) and on (node, hw_id) {chosen})")


def _none_of(series: str) -> str:
    """0 if there are such series; nothing if no GPU has them."""
    return f"0 * count({series})"


def _first_four() -> list[panels.Panel]:
    busy = _gpu("hw.gpu.utilization", 'hw_gpu_task="general"')
    core = _gpu("hw.temperature", 'hw_sensor_location="core"')
    used = _gpu("hw.gpu.memory.usage")
    limit = _gpu("hw.gpu.memory.limit")
    return [
        panels.lines(
            panels.Text(
                "GPU utilisation",
                "Share of the time in which the GPU did anything at all; of many, the idlest. "
                "A GPU that waits for others in a collective counts as busy.",
                "One idle among busy ones: what is its rank doing? All low: data, or batches that "
                "are too small. High with little power: it waits.",
            ),
            panels.over_time(_few(busy, "bottomk"), _WHOSE),
            # Where an agent was killed and a rank began, a GPU is there twice: for five minutes
            # also as it was before.
            panels.over_time(f"avg(max by (node, hw_id) ({busy}))", "mean of all"),
            unit="percentunit",
            minimum=0,
            maximum=1,
            legend=("lastNotNull", "mean"),
            sort=("Mean", False),
            nothing=_UNTOLD,
        ),
        panels.lines(
            panels.Text(
                "GPU temperature",
                "At the core; of many GPUs, the hottest.",
                "Above 80 °C it may slow down: see what holds it back, below. One hot among cool "
                "neighbours: its airflow or its cooler.",
            ),
            panels.over_time(_few(core), _WHOSE),
            unit="celsius",
            levels=_HOT,
            sort=("Max", True),
            nothing=_UNTOLD,
        ),
        panels.lines(
            panels.Text(
                "Time spent accessing memory",
                "Share of the time in which the GPU's memory was read or written; the busiest.",
                "High with low MFU: bound by memory. Larger batches or fused kernels help.",
            ),
            panels.over_time(_few(_gpu("otel_ddp.gpu.mem_controller.utilization")), _WHOSE),
            unit="percentunit",
            minimum=0,
            maximum=1,
            legend=("lastNotNull", "mean"),
            sort=("Mean", True),
            nothing=_UNTOLD,
        ),
        panels.lines(
            panels.Text(
                "GPU memory allocated",
                "Share of its memory that is in use, by anyone; of many, the fullest.",
                "Above 97 %: the next longer batch fails. Much less than half: a larger batch "
                "fits.",
            ),
            panels.over_time(_few(used, share_of=limit), _WHOSE),
            unit="percentunit",
            minimum=0,
            maximum=1,
            levels=_FULL,
            sort=("Max", True),
            nothing=_UNTOLD,
        ),
    ]


def _wrong() -> list[panels.Panel]:
    def held(*more: str) -> str:
        share = f"avg_over_time({_gpu('otel_ddp.gpu.throttle.active', _WRONG, *more)}[10m])"
        return f"max by ({_BY}, reason) ({share}) > 0"

    # A GPU has been without a rank as well, before and after: it is shown once.
    for_long = f"({held(_OF_RANK)} or on (node, hw_id, reason) {held()})"
    reasons = _gpu("otel_ddp.gpu.throttle.active", _WRONG)
    faults = _gpu("otel_ddp.gpu.xid.errors")
    memory = _gpu("hw.gpu.memory.limit")
    errors = _gpu("hw.errors", 'error_type="uncorrected"')
    corrected = _gpu("hw.errors", 'error_type="corrected"')
    remapped = _gpu("otel_ddp.gpu.remapped_rows")
    core = _gpu("hw.temperature", 'hw_sensor_location="core"')
    where = [panels.Column("node"), panels.Column("gpu", "GPU"), panels.Column("rank")]
    return [
        panels.stat(
            panels.Text(
                "GPUs", "GPUs of this selection.", "Fewer than there should be: one has dropped."
            ),
            panels.now(f"count(max by (node, hw_id) ({memory})) or vector(0)"),
            size=(4, 4),
        ),
        panels.stat(
            panels.Text(
                "Held back",
                "GPUs that slowed down for heat or a fault within the last 10 minutes of this "
                "time; – where none tells its reasons.",
                "The table names them and says why.",
            ),
            panels.now(f"count(max by (node, hw_id) {for_long}) or {_none_of(reasons)}"),
            levels=ABOVE_0_IS_BAD,
            size=(4, 4),
        ),
        panels.stat(
            panels.Text(
                "Hottest",
                "The hottest core.",
                "Above 88 °C: have the cooling looked at.",
            ),
            panels.now(_with_rank(f"topk(1, {_each(core)})"), _WHOSE),
            unit="celsius",
            levels=_HOT,
            named=panels.WITH_NAME,
            size=(4, 4),
        ),
        panels.stat(
            panels.Text(
                "Xid faults",
                "Faults that NVIDIA's driver has reported since the agents began to look.",
                "The table has the codes; NVIDIA's list says what each asks for.",
            ),
            panels.now(f"sum(max by (node, hw_id, code) ({faults})) or {_none_of(memory)}"),
            levels=ABOVE_0_IS_BAD,
            size=(4, 4),
        ),
        panels.stat(
            panels.Text(
                "Memory errors",
                "Uncorrected ones of GPU memory, which lost data, since the driver was loaded; – "
                "where no board counts them.",
                "Drain the node, reset the GPU; if they come again, have it swapped.",
            ),
            panels.now(f"sum(max by (node, hw_id) ({errors}))"),
            levels=ABOVE_0_IS_BAD,
            size=(4, 4),
        ),
        panels.stat(
            panels.Text(
                "Remapped rows",
                "Rows of GPU memory that were replaced after errors; – where no board counts them.",
                "A few are what spares are for; for uncorrected ones the GPU needs a reset.",
            ),
            panels.now(f"sum(max by (node, hw_id, cause) ({remapped}))"),
            levels=ABOVE_0_IS_ODD,
            size=(4, 4),
        ),
        panels.listing(
            panels.Text(
                "What holds GPUs back",
                "Share of the last 10 minutes of this time in which a GPU ran slower for this "
                "reason.",
                "hw_thermal, sw_thermal: cooling. hw_power_brake: the power supply. "
                "hw_slowdown: either, drain the node.",
            ),
            panels.rows(f"topk($shown, {for_long})", "share"),
            columns=[
                *where,
                panels.Column("reason", "Reason"),
                panels.Column(
                    "Value #share", "Share", "percentunit", levels=steps((0.1, BAD), base=WARN)
                ),
            ],
            hidden=("hw_id",),
            sort=("Share", True),
            nothing=_NONE_TOLD,
            size=(24, 6),
        ),
        panels.listing(
            panels.Text(
                "Faults",
                "Xid faults by code, and memory errors, of the GPUs that have any.",
                "13, 31: mostly the program. 48, 63, 64, 74, 79, 94, 95: the board, drain the "
                "node.",
            ),
            panels.rows(f"topk($shown, max by ({_BY}, code) ({faults}) > 0)", "xid"),
            panels.rows(f"topk($shown, {_each(errors)} > 0)", "lost"),
            panels.rows(f"topk($shown, {_each(corrected)} > 0)", "corrected"),
            panels.rows(f"topk($shown, max by ({_BY}, cause) ({remapped}) > 0)", "rows"),
            columns=[
                *where,
                panels.Column("code", "Xid"),
                panels.Column("Value #xid", "Faults", levels=ABOVE_0_IS_BAD),
                panels.Column("Value #lost", "Uncorrected", levels=ABOVE_0_IS_BAD),
                panels.Column("Value #corrected", "Corrected", levels=ABOVE_0_IS_ODD),
                panels.Column("cause", "Remapped for"),
                panels.Column("Value #rows", "Rows", levels=ABOVE_0_IS_ODD),
            ],
            hidden=("hw_id",),
            sort=("Faults", True),
            nothing=_NONE_TOLD,
            size=(24, 6),
        ),
    ]


def _gpu_lines(
    title: str,
    expr: str,
    unit: str,
    meaning: str,
    action: str,
    legend: str = _WHOSE,
    levels: Sequence[Threshold] = (),
    nothing: str = _UNTOLD,
) -> panels.Panel:
    return panels.lines(
        panels.Text(title, meaning, action),
        panels.over_time(expr, legend),
        unit=unit,
        minimum=0,
        size=(8, 7),
        levels=levels,
        # Of many, those that are shown are those with most, or with least.
        sort=("Last *", "bottomk(" not in expr),
        nothing=nothing,
    )


def _more() -> list[panels.Panel]:
    clock = _gpu("otel_ddp.gpu.clock.frequency", 'domain="core"')
    nvlink_errors = _gpu("otel_ddp.gpu.nvlink.errors")
    replays = _gpu("otel_ddp.gpu.pcie.replays")
    way = "network_io_direction"
    return [
        _gpu_lines(
            "Power",
            _few(_gpu("hw.power"), "bottomk"),
            "watt",
            "What each GPU draws; of many, those that draw least.",
            "Little power at full utilisation: it waits in a kernel, for another rank mostly.",
        ),
        _gpu_lines(
            "Clock of the cores",
            _few(clock, "bottomk"),
            "hertz",
            "Of many GPUs, the slowest.",
            "One below its neighbours is a straggler in the making: see what holds it back.",
        ),
        _gpu_lines(
            "Held back, by reason",
            # Counted between two moments, shown at two others: a little more than all of it.
            f"clamp_max({_few_rates(_gpu('otel_ddp.gpu.throttle.duration'), 'reason')}, 1)",
            "percentunit",
            "Share of the time in which each GPU ran slower, for any reason, the power limit "
            "included.",
            "sw_power under load is usual. Heat and slowdown are not.",
            _WHOSE + " · {{reason}}",
        ),
        _gpu_lines(
            "Parts of the GPU",
            f"avg by (engine) ({_gpu('otel_ddp.gpu.engine.active')})",
            "percentunit",
            "Share of the time in which each part was busy, in the mean over these GPUs. "
            "NVIDIA's alone, Hopper and newer.",
            "Tensor cores low: shapes or types that they do not take, or waiting.",
            "{{engine}}",
        ),
        _gpu_lines(
            "Memory of each rank",
            _few(_gpu("otel_ddp.gpu.process.memory.usage")),
            "bytes",
            "GPU memory that the process of a rank occupies.",
            "Far less than what is in use on the GPU: somebody else has a part of it.",
            nothing="not measured",
        ),
        _gpu_lines(
            "PCIe",
            _few_rates(_gpu("hw.gpu.io"), way),
            "Bps",
            "Bytes received and sent.",
            "Near the link's limit (26 GB/s for generation 4 with 16 lanes): copies are in the "
            "way.",
            _WHOSE + " · {{" + way + "}}",
        ),
        _gpu_lines(
            "NVLink",
            _few_rates(_gpu("otel_ddp.gpu.nvlink.io"), way),
            "Bps",
            "Bytes received and sent.",
            "None between ranks of one node: NCCL goes another way; NCCL_DEBUG=INFO says why.",
            _WHOSE + " · {{" + way + "}}",
        ),
        _gpu_lines(
            "Errors on the way",
            f"{_few_rates(nvlink_errors)} or {_few_rates(replays)}",
            "short",
            "Errors of NVLink, and transfers over PCIe that were repeated.",
            "A steady rate: the cable, the socket, or the board.",
            levels=ABOVE_0_IS_ODD,
        ),
    ]


def _node(name: str, *more: str) -> str:
    return metric(name, NODES, *more)


def _few_nodes(expr: str, series: str, function: str = "avg_over_time") -> str:
    chosen = f"topk($shown, max by (node) ({function}({series}[$__range] @ end())))"
    return f"{expr} and on (node) {chosen}"


def _node_lines(
    title: str,
    expr: str,
    unit: str,
    meaning: str,
    action: str,
    legend: str = "{{node}}",
    levels: Sequence[Threshold] = (),
    maximum: float | None = None,
    nothing: str = "",
) -> panels.Panel:
    return panels.lines(
        panels.Text(title, meaning, action),
        panels.over_time(expr, legend),
        unit=unit,
        minimum=0,
        maximum=maximum,
        size=(8, 7),
        levels=levels,
        sort=("Last *", True),
        nothing=nothing,
    )


def _node_rates(name: str, *by: str) -> str:
    series = _node(name)
    labels = ", ".join(("node", *by))
    whole = f"max by ({labels}) (rate({series}{_RATE}))"
    return _few_nodes(whole, series, "rate")


def _nodes() -> list[panels.Panel]:
    idle = _node("system.cpu.utilization", 'cpu_mode="idle"')
    used = _node("system.memory.usage", 'system_memory_state="used"')
    limit = _node("system.memory.limit")
    return [
        _node_lines(
            "Processors of nodes",
            f"1 - (max by (node) ({idle}) and on (node)"
            f" bottomk($shown, max by (node) (avg_over_time({idle}[$__range] @ end()))))",
            "percentunit",
            "Share of the processors' time that is used; of many nodes, the busiest.",
            "Near 1: loader workers take them from the ranks. See Ranks, the process of each.",
            maximum=1,
        ),
        _node_lines(
            "Memory of nodes",
            _few_nodes(f"max by (node) ({used}) / max by (node) ({limit})", used),
            "percentunit",
            "Share of the node's (or container's) memory that is used; the fullest.",
            "Above 95 % the kernel begins to kill, loader workers first.",
            levels=steps((0.85, WARN), (0.95, BAD)),
            maximum=1,
        ),
        _node_lines(
            "Standing still for want of",
            f"clamp_max({_node_rates('otel_ddp.host.pressure', 'resource', 'stall_type')}, 1)",
            "percentunit",
            "Share of the time in which some or all tasks waited for processor, memory or storage.",
            "Memory above a tenth: about to fail. Storage: the disk is the limit.",
            "{{node}} · {{resource}} · {{stall_type}}",
            nothing="not told by this kernel",
        ),
    ]


def _node_more() -> list[panels.Panel]:
    way = "{{network_io_direction}}"
    return [
        _node_lines(
            "Disks",
            _node_rates("system.disk.io", "disk_io_direction"),
            "Bps",
            "Bytes read and written; of many nodes, the busiest.",
            "At the disk's limit while data are waited for: cache them, or shard them.",
            "{{node}} · {{disk_io_direction}}",
        ),
        _node_lines(
            "Network",
            _node_rates("system.network.io", "network_io_direction"),
            "Bps",
            "Bytes received and sent, RDMA left out.",
            "Busy while there is InfiniBand: the collectives do not use it.",
            "{{node}} · " + way,
        ),
        _node_lines(
            "InfiniBand and RoCE",
            _node_rates("hw.network.io", "hw_id", "network_io_direction"),
            "Bps",
            "Bytes received and sent by each port, RDMA included.",
            "One port without traffic among busy ones: its cable, or NCCL_IB_HCA.",
            "{{node}} · {{hw_id}} · " + way,
            nothing="no such ports",
        ),
    ]
