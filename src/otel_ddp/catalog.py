"""Every metric as data: OpenTelemetry name, kind, unit, sentence, attributes, Prometheus name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Literal, NamedTuple

from otel_ddp.words import NODE_LABELS, PHASES, RANK_LABELS, STALL_REASONS, STATES

LabelSet = Literal["rank", "run", "node", "gpu"]

# The widest set a series of that kind may carry; docs/metrics.md says when a label is left out.
LABELS: Mapping[LabelSet, tuple[str, ...]] = {
    "rank": RANK_LABELS,
    "run": RANK_LABELS,
    "node": NODE_LABELS,
    "gpu": RANK_LABELS,
}


class Kind(str, Enum):
    """How the values of a series relate to each other."""

    COUNTER = "counter"
    GAUGE = "gauge"
    UPDOWN = "updown"
    HISTOGRAM = "histogram"


class Metric(NamedTuple):
    """One metric, as users, exporters and the documentation see it."""

    name: str
    kind: Kind
    unit: str
    description: str
    attributes: tuple[str, ...]
    labels: LabelSet
    section: str
    bounds: tuple[float, ...]
    prometheus: str


# The rules below are those of github.com/prometheus/otlptranslator with its default strategy, which
# both the collector and Prometheus' own OTLP receiver use, for the units that metrics here have.
_UNITS = {
    "s": "seconds",
    "By": "bytes",
    "J": "joules",
    "W": "watts",
    "Cel": "celsius",
    "Hz": "hertz",
    "1": "",
}
_PER_UNITS = {"s": "second"}


def prometheus_name(name: str, kind: Kind, unit: str) -> str:
    """Return the name under which Prometheus knows a metric that arrived over OTLP."""
    tokens = [token for token in re.split(r"[^A-Za-z0-9:]+", name) if token]
    main, _, per = unit.partition("/")
    per_word = _unit_word(per, _PER_UNITS)
    for suffix in (_unit_word(main, _UNITS), f"per_{per_word}" if per_word else ""):
        # A name that has the word anywhere, not only at its end, does not get it again.
        if suffix and suffix not in tokens:
            tokens.append(suffix)

    if kind is Kind.COUNTER:
        tokens = [token for token in tokens if token != "total"] + ["total"]
    # Up-down counters arrive as gauges too, but the translation gives them no ratio.
    if kind is Kind.GAUGE and unit == "1":
        tokens = [token for token in tokens if token != "ratio"] + ["ratio"]

    joined = "_".join(tokens)
    return f"_{joined}" if joined[:1].isdigit() else joined


def _unit_word(unit: str, words: Mapping[str, str]) -> str:
    unit = unit.strip()
    if "{" in unit or "}" in unit:
        return ""
    return re.sub(r"[^A-Za-z0-9:]+", "_", words.get(unit, unit)).strip("_")


# What the labels of training.run.info hold of a run's configuration: Prometheus has no limit, but
# stores that speak its language refuse a series with more labels or longer ones than they like.
# 200 characters are 800 bytes at most, below the 1,024 of the strictest.
MOST_CONFIG_LABELS = 100
LONGEST_LABEL = 200
# The log record of a run with all of it.
RUN_CONFIG_EVENT = "otel_ddp.run.config"


def prometheus_label(attribute: str) -> str:
    """Return the label name under which Prometheus knows an OpenTelemetry attribute."""
    # Prometheus' OTLP receiver keeps runs of underscores by default, unlike in metric names.
    label = re.sub(r"[^A-Za-z0-9_]", "_", attribute)
    if not label.strip("_"):
        # The translation refuses such a name, and with it the point; a scrape must say something.
        return "key_"
    if label[0].isdigit():
        return f"key_{label}"
    if label[0] == "_" and not label.startswith("__"):
        return f"key{label}"
    return label


class Section(NamedTuple):
    """A heading of docs/metrics.md, and what the metrics below it have in common."""

    title: str
    labels: LabelSet
    attributes: tuple[str, ...] = ()

    def metric(
        self,
        name: str,
        kind: Kind,
        unit: str,
        description: str,
        *attributes: str,
        labels: LabelSet | None = None,
        bounds: tuple[float, ...] = (),
    ) -> Metric:
        metric = Metric(
            name=name,
            kind=kind,
            unit=unit,
            description=description,
            attributes=self.attributes + attributes,
            labels=labels or self.labels,
            section=self.title,
            bounds=bounds,
            prometheus=prometheus_name(name, kind, unit),
        )
        _declared.append(metric)
        return metric


def _codes(codes: Mapping[str, int]) -> str:
    return ", ".join(f"{code} {word}" for word, code in codes.items())


_declared: list[Metric] = []

# In seconds: from a toy model's step to a large one's, and from a small file to a slow store.
_STEP_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_CHECKPOINT_BOUNDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 1800)

_C, _G, _U, _H = Kind.COUNTER, Kind.GAUGE, Kind.UPDOWN, Kind.HISTOGRAM

# --- Run ---------------------------------------------------------------------------------------

_run = Section("Run", "run")

TRAINING_RUN_INFO = _run.metric(
    "training.run.info",
    _G,
    "",
    "Always 1; its labels describe the run, with the scalars of its configuration as "
    "`config_<key>`, as far as the limit on their number goes.",
    *("project", "name", "description", "tags", "script", "world_size", "nodes", "backend"),
    *("precision", "model", "strategy", "torch", "cuda", "git_sha", "baseline"),
)
TRAINING_RUN_SETTING = _run.metric(
    "training.run.setting",
    _G,
    "",
    "Always 1, for each setting of the run: what the script says of it, its environment, and "
    "`config.<key>`; as many of these, and as much of each value, as `training.run.info` has.",
    "setting",
    "value",
)
TRAINING_RUN_START_TIMESTAMP = _run.metric(
    "training.run.start.timestamp", _G, "s", "When the run began, in seconds since 1970."
)
TRAINING_PARAMETERS = _run.metric(
    "training.parameters",
    _G,
    "{parameter}",
    "How many parameters the model has, the trainable and the frozen ones apart.",
    "trainable",
)

# The log record of a `run.early_stop()` that says yes.
EARLY_STOP_EVENT = "training.early_stop"

# --- Progress and state ------------------------------------------------------------------------

_progress = Section("Progress and state", "rank")

TRAINING_STATE = _progress.metric(
    "training.state", _G, "", f"How the rank's process is doing: {_codes(STATES)}."
)
TRAINING_WORLD_SIZE = _progress.metric(
    "training.world.size",
    _G,
    "{rank}",
    "How many ranks train together with this one, itself included, over all nodes.",
)
TRAINING_PHASE = _progress.metric(
    "training.phase", _G, "", f"What the rank is busy with at this moment: {_codes(PHASES)}."
)
TRAINING_STEP = _progress.metric(
    "training.step", _G, "{step}", "The last optimizer step that the rank finished."
)
TRAINING_EPOCH = _progress.metric("training.epoch", _G, "{epoch}", "The epoch that the rank is in.")
TRAINING_HEARTBEAT_TIMESTAMP = _progress.metric(
    "training.heartbeat.timestamp",
    _G,
    "s",
    "When the rank's process was last seen alive, in seconds since 1970.",
)
TRAINING_PROGRESS_TIMESTAMP = _progress.metric(
    "training.progress.timestamp",
    _G,
    "s",
    "When the rank last went from one phase to another, in seconds since 1970.",
)
TRAINING_STALL_TIMEOUT = _progress.metric(
    "training.stall.timeout",
    _G,
    "s",
    "How long this rank may go without progress before it counts as stalled, as in force now.",
)
TRAINING_STALLED = _progress.metric(
    "training.stalled",
    _G,
    "",
    "1 while the rank has made no progress for longer than its stall timeout, otherwise 0.",
)
TRAINING_EARLY_STOP_STEP = _progress.metric(
    "training.early_stop.step",
    _G,
    "{step}",
    "The step at which `run.early_stop()` first told this rank to stop; `monitor` is what had not "
    "improved.",
    "monitor",
)
TRAINING_RESTARTS = _progress.metric(
    "training.restarts",
    _C,
    "{restart}",
    "How often the launcher has started this rank again within the run.",
)
TRAINING_EXCEPTIONS = _progress.metric(
    "training.exceptions",
    _C,
    "{exception}",
    "How many exceptions have ended the rank's training, by their class: none is told of before.",
    "error.type",
)
TRAINING_OOMS = _progress.metric(
    "training.ooms", _C, "{error}", "How often the rank has run out of GPU memory."
)
TRAINING_CHECKPOINT_DURATION = _progress.metric(
    "training.checkpoint.duration",
    _H,
    "s",
    "How long the rank was held up by saving a checkpoint.",
    bounds=_CHECKPOINT_BOUNDS,
)
TRAINING_CHECKPOINT_TIMESTAMP = _progress.metric(
    "training.checkpoint.timestamp",
    _G,
    "s",
    "When the rank finished its last checkpoint, in seconds since 1970.",
)

# --- Speed -------------------------------------------------------------------------------------

_speed = Section("Speed", "rank")

TRAINING_STEPS = _speed.metric(
    "training.steps", _C, "{step}", "How many optimizer steps the rank has finished."
)
TRAINING_SAMPLES = _speed.metric(
    "training.samples", _C, "{sample}", "How many samples the rank has trained on."
)
TRAINING_TOKENS = _speed.metric(
    "training.tokens", _C, "{token}", "How many tokens the rank has trained on."
)
TRAINING_MICRO_BATCHES = _speed.metric(
    "training.micro_batches",
    _C,
    "{micro_batch}",
    "How many forward and backward passes the rank has made, gradient accumulation included.",
)
TRAINING_STEPS_SKIPPED = _speed.metric(
    "training.steps.skipped",
    _C,
    "{step}",
    "How many optimizer steps left the weights as they were, for instance after an overflow.",
    "reason",
)
TRAINING_SET_SIZE = _speed.metric(
    "training.set.size",
    _G,
    "{sample}",
    "How many samples a data set has, by torch's loader; `split` is `train`, or `eval` where a "
    "loader was used without a step.",
    "split",
)
TRAINING_SET_BATCHES = _speed.metric(
    "training.set.batches",
    _G,
    "{batch}",
    "How many batches the rank takes of it in an epoch.",
    "split",
)
TRAINING_SET_RANK_SAMPLES = _speed.metric(
    "training.set.rank_samples",
    _G,
    "{sample}",
    "How many samples the rank takes of it in an epoch.",
    "split",
)
TRAINING_EPOCH_SAMPLES = _speed.metric(
    "training.epoch.samples",
    _G,
    "{sample}",
    "How many samples the rank has trained on in the last epoch whose loader came to its end.",
)
TRAINING_STEP_DURATION = _speed.metric(
    "training.step.duration",
    _H,
    "s",
    "How long a step took, from the end of the one before it to its own end.",
    bounds=_STEP_BOUNDS,
)
TRAINING_PHASE_TIME = _speed.metric(
    "training.phase.time",
    _C,
    "s",
    "Time spent in each phase of training, by the clock of the host or of the device; `sync` "
    "says of `comm_wait` whether it was for `gradients` or for `buffers`.",
    "phase",
    "clock",
    "sync",
)
TRAINING_PHASE_STEP_TIME = _speed.metric(
    "training.phase.step_time",
    _G,
    "s",
    "Time per step in each phase over the last two minutes, by the clock of the device where it is "
    "known, else of the host.",
    "phase",
)
TRAINING_GC_TIME = _speed.metric(
    "training.gc.time", _C, "s", "Time for which Python's garbage collector held up the rank."
)
TRAINING_FLOPS = _speed.metric(
    "training.flops",
    _C,
    "{operation}",
    "Floating-point operations that the model's work amounts to, and how that is known: `counted` "
    "in one forward, `6pt` from parameters and tokens, or `given` by the user.",
    "method",
)
TRAINING_FLOPS_PEAK = _speed.metric(
    "training.flops.peak",
    _G,
    "{operation}/s",
    "Floating-point operations per second that the rank's device could reach at best.",
    "dtype",
    "device",
)
TRAINING_CUDA_MEMORY_ALLOCATED = _speed.metric(
    "training.cuda.memory.allocated", _U, "By", "GPU memory that the rank's tensors occupy."
)
TRAINING_CUDA_MEMORY_RESERVED = _speed.metric(
    "training.cuda.memory.reserved",
    _U,
    "By",
    "GPU memory that PyTorch's allocator holds for the rank, whether or not tensors use it.",
)
TRAINING_CUDA_MEMORY_PEAK = _speed.metric(
    "training.cuda.memory.peak",
    _G,
    "By",
    "The most GPU memory that the rank's tensors have occupied at one time.",
)
TRAINING_CUDA_ALLOC_RETRIES = _speed.metric(
    "training.cuda.alloc_retries",
    _C,
    "{retry}",
    "How often PyTorch's allocator had to empty its cache to serve a request.",
)

# --- Learning ----------------------------------------------------------------------------------

_learning = Section("Learning", "rank", ("name", "split"))

TRAINING_SCALAR = _learning.metric(
    "training.scalar", _G, "", "A logged value, such as a loss or a learning rate."
)
TRAINING_SCALAR_STEP = _learning.metric(
    "training.scalar.step",
    _G,
    "{step}",
    "The step to which the logged value with the same time stamp belongs.",
)
TRAINING_SCALAR_EPOCH = _learning.metric(
    "training.scalar.epoch",
    _G,
    "{epoch}",
    "The epoch to which the logged value with the same time stamp belongs, where one was given.",
)
TRAINING_NONFINITE = _learning.metric(
    "training.nonfinite",
    _C,
    "{value}",
    "How many logged values were NaN or infinite, counted from 0 once a name is first logged.",
)

# --- Summary -----------------------------------------------------------------------------------

# What a user may say of a name: its lowest or its highest value is the best one, or neither is.
BEST = ("min", "max", "none")

_summary = Section("Summary", "run", ("name", "split", "direction"))

TRAINING_SCALAR_BEST = _summary.metric(
    "training.scalar.best",
    _G,
    "",
    "The best finite value so far, over all attempts that this node's agent has seen.",
)
TRAINING_SCALAR_BEST_STEP = _summary.metric(
    "training.scalar.best.step", _G, "{step}", "The step to which the best value belongs."
)

# --- Artifacts ---------------------------------------------------------------------------------

# The log record of each.
ARTIFACT_EVENT = "training.artifact"

_artifacts = Section("Artifacts", "rank", ("name", "type", "direction", "digest", "uri"))

TRAINING_ARTIFACT_TIMESTAMP = _artifacts.metric(
    "training.artifact.timestamp",
    _G,
    "s",
    "When the script told of it, in seconds since 1970.",
)
TRAINING_ARTIFACT_SIZE = _artifacts.metric(
    "training.artifact.size", _G, "By", "The size of the file, or of all files of the directory."
)
TRAINING_ARTIFACT_STEP = _artifacts.metric(
    "training.artifact.step", _G, "{step}", "The step at which the script told of it."
)

# --- Diagnosis ---------------------------------------------------------------------------------

_diagnosis = Section("Diagnosis", "rank")

TRAINING_STRAGGLER = _diagnosis.metric(
    "training.straggler",
    _G,
    "",
    "1 while this rank keeps the others waiting, with the phase in which it loses the time; where "
    "its device's clock is known, `side` says which side is late: `device`, `host` or `unclear`.",
    "phase",
    "side",
)
TRAINING_STRAGGLER_EXCESS = _diagnosis.metric(
    "training.straggler.excess",
    _G,
    "1",
    "How much more work time than the others this rank needs, as a share of the median step.",
    "phase",
)
TRAINING_IMBALANCE = _diagnosis.metric(
    "training.imbalance",
    _G,
    "",
    "1 while this rank keeps the others waiting because it has more tokens or samples than they "
    "have, with the phase in which that takes longer; shown from the first time on.",
    "phase",
)
TRAINING_RECURRING_STALL = _diagnosis.metric(
    "training.recurring_stall",
    _G,
    "",
    "1 while this rank stalls again and again, each so many steps, with the phase that it stalls "
    "in; shown from the first time on.",
    "phase",
)
TRAINING_STRAGGLER_LOST_TIME = _diagnosis.metric(
    "training.straggler.lost_time",
    _C,
    "s",
    "Time that the whole job has lost because of this rank.",
)
TRAINING_NODE_WORK_MAX = _diagnosis.metric(
    "training.node.work.max",
    _G,
    "s",
    "Work time per step of the slowest rank on the node, waiting for other ranks left out.",
    labels="node",
)
TRAINING_NODE_WORK_MEDIAN = _diagnosis.metric(
    "training.node.work.median",
    _G,
    "s",
    "Median work time per step over the ranks on the node, waiting for other ranks left out.",
    labels="node",
)
TRAINING_OWN_COLLECTIVES = _diagnosis.metric(
    "training.own_collectives",
    _G,
    "",
    "1 for a phase in which the program waits for other ranks in collectives of its own, so that "
    "ranks are not compared by it.",
    "phase",
)
TRAINING_STALL_REASON = _diagnosis.metric(
    "training.stall.reason",
    _G,
    "",
    "Why the rank does not move, shown while its node's agent suspects a stall: "
    f"{_codes(STALL_REASONS)}.",
)
TRAINING_COLLECTIVE_ENQUEUED = _diagnosis.metric(
    "training.collective.enqueued",
    _G,
    "{operation}",
    "Number of the last collective operation that the rank has put in line.",
    "process_group",
)
TRAINING_COLLECTIVE_COMPLETED = _diagnosis.metric(
    "training.collective.completed",
    _G,
    "{operation}",
    "Number of the last collective operation that the rank has completed, under NCCL.",
    "process_group",
)

# --- Process -----------------------------------------------------------------------------------

_process = Section("Process", "rank")

PROCESS_CPU_TIME = _process.metric(
    "process.cpu.time", _C, "s", "Processor time that the training process has used.", "cpu.mode"
)
PROCESS_MEMORY_USAGE = _process.metric(
    "process.memory.usage", _U, "By", "Physical memory that the training process occupies."
)
PROCESS_MEMORY_VIRTUAL = _process.metric(
    "process.memory.virtual", _U, "By", "Address space that the training process has reserved."
)
PROCESS_THREAD_COUNT = _process.metric(
    "process.thread.count", _U, "{thread}", "How many threads the training process has."
)
PROCESS_UNIX_FILE_DESCRIPTOR_COUNT = _process.metric(
    "process.unix.file_descriptor.count",
    _U,
    "{file_descriptor}",
    "How many files, sockets and pipes the training process has open.",
)
PROCESS_DISK_IO = _process.metric(
    "process.disk.io",
    _C,
    "By",
    "Bytes that the training process has read from and written to storage.",
    "disk.io.direction",
)
PROCESS_CONTEXT_SWITCHES = _process.metric(
    "process.context_switches",
    _C,
    "{context_switch}",
    "How often the main thread of the training process gave up its processor, or had it taken "
    "away.",
    "process.context_switch.type",
)
PROCESS_UPTIME = _process.metric(
    "process.uptime", _G, "s", "How long ago the training process was started."
)

TRAINING_CHILDREN_COUNT = _process.metric(
    "training.children.count",
    _U,
    "{process}",
    "How many processes the training process has started that still live, but for other ranks: "
    "data loader workers, mostly.",
)
TRAINING_CHILDREN_CPU_TIME = _process.metric(
    "training.children.cpu.time",
    _C,
    "s",
    "Processor time that these processes have used, those that have ended included.",
    "cpu.mode",
)
TRAINING_CHILDREN_MEMORY_USAGE = _process.metric(
    "training.children.memory.usage",
    _U,
    "By",
    "Physical memory that these processes occupy; what they share is counted for each.",
)
TRAINING_CHILDREN_DISK_IO = _process.metric(
    "training.children.disk.io",
    _C,
    "By",
    "Bytes that these processes have read from and written to storage, those that have ended "
    "included as far as they were seen.",
    "disk.io.direction",
)

# --- GPU ---------------------------------------------------------------------------------------

_gpu = Section("GPU", "gpu", ("hw.id", "hw.type", "hw.model", "gpu"))

HW_GPU_UTILIZATION = _gpu.metric(
    "hw.gpu.utilization",
    _G,
    "1",
    "Share of the time in which the GPU did anything at all, or its encoder or decoder did.",
    "hw.gpu.task",
)
OTEL_DDP_GPU_MEM_CONTROLLER_UTILIZATION = _gpu.metric(
    "otel_ddp.gpu.mem_controller.utilization",
    _G,
    "1",
    "Share of the time in which the GPU's memory was read or written.",
)
HW_GPU_MEMORY_USAGE = _gpu.metric(
    "hw.gpu.memory.usage", _U, "By", "Memory of the GPU that is in use, by anyone."
)
HW_GPU_MEMORY_LIMIT = _gpu.metric("hw.gpu.memory.limit", _U, "By", "Memory that the GPU has.")
HW_POWER = _gpu.metric("hw.power", _G, "W", "Power that the GPU draws.")
OTEL_DDP_GPU_POWER_LIMIT = _gpu.metric(
    "otel_ddp.gpu.power.limit", _G, "W", "Power that the GPU may draw under the limit in force."
)
HW_ENERGY = _gpu.metric("hw.energy", _C, "J", "Energy that the GPU has used.")
HW_TEMPERATURE = _gpu.metric(
    "hw.temperature",
    _G,
    "Cel",
    "Temperature of the GPU, at its core or at its memory.",
    "hw.sensor_location",
)
HW_FAN_SPEED_RATIO = _gpu.metric(
    "hw.fan.speed_ratio", _G, "1", "Speed of the GPU's fan, as a share of its highest.", "fan"
)
OTEL_DDP_GPU_CLOCK_FREQUENCY = _gpu.metric(
    "otel_ddp.gpu.clock.frequency",
    _G,
    "Hz",
    "Frequency at which the GPU runs its multiprocessors or its memory.",
    "domain",
)
OTEL_DDP_GPU_THROTTLE_ACTIVE = _gpu.metric(
    "otel_ddp.gpu.throttle.active",
    _G,
    "",
    "1 while the GPU holds its clocks back for this reason, otherwise 0.",
    "reason",
)
OTEL_DDP_GPU_THROTTLE_DURATION = _gpu.metric(
    "otel_ddp.gpu.throttle.duration",
    _C,
    "s",
    "Time for which the GPU has held its clocks back for this reason.",
    "reason",
)
HW_GPU_IO = _gpu.metric(
    "hw.gpu.io",
    _C,
    "By",
    "Bytes that the GPU has received and sent over PCIe.",
    "pci",
    "network.io.direction",
)
OTEL_DDP_GPU_PCIE_LINK_GENERATION = _gpu.metric(
    "otel_ddp.gpu.pcie.link.generation",
    _G,
    "",
    "Generation of PCIe that the GPU's link runs at now, and the highest that it could.",
    "pci",
    "link",
)
OTEL_DDP_GPU_PCIE_LINK_WIDTH = _gpu.metric(
    "otel_ddp.gpu.pcie.link.width",
    _G,
    "{lane}",
    "Lanes that the GPU's PCIe link uses now, and the most that it could.",
    "pci",
    "link",
)
OTEL_DDP_GPU_NVLINK_IO = _gpu.metric(
    "otel_ddp.gpu.nvlink.io",
    _C,
    "By",
    "Bytes that the GPU has received and sent over NVLink.",
    "network.io.direction",
)
OTEL_DDP_GPU_NVLINK_ERRORS = _gpu.metric(
    "otel_ddp.gpu.nvlink.errors", _C, "{error}", "Errors on the NVLink connections of the GPU."
)
OTEL_DDP_GPU_PCIE_REPLAYS = _gpu.metric(
    "otel_ddp.gpu.pcie.replays",
    _C,
    "{replay}",
    "How often a PCIe transfer of the GPU had to be repeated.",
    "pci",
)
HW_ERRORS = _gpu.metric(
    "hw.errors",
    _C,
    "{error}",
    "Memory errors that the GPU has found, corrected or not.",
    "error.type",
)
OTEL_DDP_GPU_XID_ERRORS = _gpu.metric(
    "otel_ddp.gpu.xid.errors",
    _C,
    "{error}",
    "Faults of the GPU that the driver reported, by Xid code.",
    "pci",
    "code",
)
OTEL_DDP_GPU_REMAPPED_ROWS = _gpu.metric(
    "otel_ddp.gpu.remapped_rows",
    _C,
    "{row}",
    "Rows of GPU memory that were replaced by spare ones after errors.",
    "cause",
)
OTEL_DDP_GPU_ENGINE_ACTIVE = _gpu.metric(
    "otel_ddp.gpu.engine.active",
    _G,
    "1",
    "Share of the time in which this part of the GPU was busy, where the device measures it.",
    "engine",
)
OTEL_DDP_GPU_PROCESS_MEMORY_USAGE = _gpu.metric(
    "otel_ddp.gpu.process.memory.usage",
    _U,
    "By",
    "Memory of the GPU that the process of this rank occupies.",
    labels="rank",
)

# --- Host --------------------------------------------------------------------------------------

_host = Section("Host", "node")

SYSTEM_CPU_UTILIZATION = _host.metric(
    "system.cpu.utilization",
    _G,
    "1",
    "Share of the node's processor time that went into each mode, over all processors.",
    "cpu.mode",
)
OTEL_DDP_HOST_LOAD_AVERAGE_1M = _host.metric(
    "otel_ddp.host.load_average.1m",
    _G,
    "{thread}",
    "Threads that ran or wanted to run, averaged over the last minute.",
)
SYSTEM_MEMORY_USAGE = _host.metric(
    "system.memory.usage",
    _U,
    "By",
    "Memory of the node, by what it is used for.",
    "system.memory.state",
)
SYSTEM_MEMORY_LIMIT = _host.metric(
    "system.memory.limit", _U, "By", "Memory that the node, or the container, has."
)
SYSTEM_PAGING_USAGE = _host.metric(
    "system.paging.usage", _U, "By", "Swap space of the node, used and free.", "system.paging.state"
)
SYSTEM_DISK_IO = _host.metric(
    "system.disk.io",
    _C,
    "By",
    "Bytes that were read from and written to a disk of the node.",
    "system.device",
    "disk.io.direction",
)
SYSTEM_FILESYSTEM_USAGE = _host.metric(
    "system.filesystem.usage",
    _U,
    "By",
    "Space of a file system of the node, used and free.",
    "system.filesystem.mountpoint",
    "system.filesystem.state",
)
SYSTEM_NETWORK_IO = _host.metric(
    "system.network.io",
    _C,
    "By",
    "Bytes that a network interface of the node has received and sent, RDMA left out.",
    "network.interface.name",
    "network.io.direction",
)
SYSTEM_NETWORK_ERRORS = _host.metric(
    "system.network.errors",
    _C,
    "{error}",
    "Packets that a network interface of the node failed to receive or to send.",
    "network.interface.name",
    "network.io.direction",
)
HW_NETWORK_IO = _host.metric(
    "hw.network.io",
    _C,
    "By",
    "Bytes that an InfiniBand port of the node has received and sent, RDMA included.",
    "hw.id",
    "hw.type",
    "network.io.direction",
)
OTEL_DDP_HOST_PRESSURE = _host.metric(
    "otel_ddp.host.pressure",
    _C,
    "s",
    "Time for which some or all tasks stood still for want of processors, memory or storage.",
    "resource",
    "stall_type",
)

# --- Ourselves ---------------------------------------------------------------------------------

_ourselves = Section("Ourselves", "node")

OTEL_DDP_RECORDS_LOST = _ourselves.metric(
    "otel_ddp.records.lost",
    _C,
    "{record}",
    "Records of a rank that were gone before the agent could read them, or held values that came "
    "too fast to be sent.",
    "why",
    labels="rank",
)
OTEL_DDP_VALUES_REFUSED = _ourselves.metric(
    "otel_ddp.values.refused",
    _C,
    "{value}",
    "What a rank refused, shortened or left out: values and names given to `log()`, lines of logs.",
    "why",
    labels="rank",
)
OTEL_DDP_POINTS_DROPPED = _ourselves.metric(
    "otel_ddp.points.dropped",
    _C,
    "{point}",
    "Data points that the agent gave up on before anyone took them.",
    "why",
)
OTEL_DDP_EXPORTS = _ourselves.metric(
    "otel_ddp.exports",
    _C,
    "{export}",
    "Attempts of the agent to hand over data, by how they ended.",
    "outcome",
)
OTEL_DDP_SPOOL_SIZE = _ourselves.metric(
    "otel_ddp.spool.size", _G, "By", "Data on disk that waits for its receiver to come back."
)
OTEL_DDP_ARTIFACTS = _ourselves.metric(
    "otel_ddp.artifacts",
    _C,
    "{artifact}",
    "Artifacts that the agent is done with: `complete`; `incomplete`, as it could not read or "
    "store them; `left_out`, as too many waited.",
    "outcome",
)
OTEL_DDP_ARTIFACTS_WAITING = _ourselves.metric(
    "otel_ddp.artifacts.waiting",
    _G,
    "{artifact}",
    "Artifacts that wait to be read, or to be stored.",
)
OTEL_DDP_HOOK_TIME = _ourselves.metric(
    "otel_ddp.hook.time",
    _C,
    "s",
    "Time that our hooks have taken from the rank's training, by their own clock: those of every "
    "hundredth step (OTEL_DDP_SAMPLE_STEPS) stand for those of all.",
    labels="rank",
)
OTEL_DDP_HOOK_ERRORS = _ourselves.metric(
    "otel_ddp.hook.errors",
    _C,
    "{error}",
    "Errors of our own that were kept out of the rank's training.",
    labels="rank",
)
OTEL_DDP_AGENT_CPU_TIME = _ourselves.metric(
    "otel_ddp.agent.cpu.time", _C, "s", "Processor time that the agent of the node has used."
)
OTEL_DDP_SOURCE_AGE = _ourselves.metric(
    "otel_ddp.source.age",
    _G,
    "s",
    "How long ago the agent last read this source of its node; it grows while a driver hangs.",
    "source",
)
OTEL_DDP_SOURCE_ERRORS = _ourselves.metric(
    "otel_ddp.source.errors",
    _C,
    "{error}",
    "Numbers of this source that could not be read, or were impossible, and are left out.",
    "source",
)
OTEL_DDP_CAPABILITY = _ourselves.metric(
    "otel_ddp.capability",
    _G,
    "",
    "1 for a measurement that this run has, 0 with the reason for one that it has not; see "
    "docs/training.md.",
    "what",
    "reason",
    labels="rank",
)

METRICS: tuple[Metric, ...] = tuple(_declared)
BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}
