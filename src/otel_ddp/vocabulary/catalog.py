"""Every metric as data: OpenTelemetry name, kind, unit, sentence, attributes, Prometheus name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Literal, NamedTuple

from otel_ddp.vocabulary import words

LabelSet = Literal["rank", "run", "node", "gpu"]

# The widest set a series of that kind may carry; docs/metrics.md says when a label is left out.
LABELS: Mapping[LabelSet, tuple[str, ...]] = {
    "rank": words.RANK_LABELS,
    "run": words.RANK_LABELS,
    "node": words.NODE_LABELS,
    "gpu": words.RANK_LABELS,
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


# What the names of units are in Prometheus; {annotations} have none. The rules below are those of
# github.com/prometheus/otlptranslator with its default strategy, which both the collector and
# Prometheus' own OTLP receiver use.
_UNITS = {
    "": "",
    "1": "",
    "s": "seconds",
    "By": "bytes",
    "W": "watts",
    "J": "joules",
    "Hz": "hertz",
    "Cel": "celsius",
}
_PER_UNITS = {"": "", "s": "per_second"}


def prometheus_name(name: str, kind: Kind, unit: str) -> str:
    """Return the name under which Prometheus knows a metric that arrived over OTLP."""
    tokens = re.split(r"[._]+", name)
    main, _, per = unit.partition("/")
    for suffix in ("" if main.startswith("{") else _UNITS[main], _PER_UNITS[per]):
        # A name that has the word anywhere, not only at its end, does not get it again.
        if suffix and suffix not in tokens:
            tokens.append(suffix)

    if kind is Kind.COUNTER:
        tokens = [token for token in tokens if token != "total"] + ["total"]
    # Up-down counters arrive as gauges too, but the translation gives them no ratio.
    if kind is Kind.GAUGE and unit == "1":
        tokens = [token for token in tokens if token != "ratio"] + ["ratio"]
    return "_".join(tokens)


# What the labels of training.run.info hold of a run's configuration: Prometheus has no limit, but
# stores that speak its language refuse a series with more labels or longer ones than they like.
# 200 characters are 800 bytes at most, below the 1,024 of the strictest.
MOST_CONFIG_LABELS = 100
LONGEST_LABEL = 200
# That of each phase `checkpoint` that ends.
CHECKPOINT_EVENT = "training.checkpoint"
# That of each call of `run.alert`.
ALERT_EVENT = "training.alert"


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


# A row of the catalog is its name, unit and attributes; then comes its sentence.
_Described = Callable[[str], Metric]


class Section(NamedTuple):
    """A heading of docs/metrics.md, and what the metrics below it have in common."""

    title: str
    labels: LabelSet
    attributes: tuple[str, ...] = ()

    def counter(self, name: str, unit: str, *attributes: str, **more: Any) -> _Described:
        return self._metric(Kind.COUNTER, name, unit, attributes, **more)

    def gauge(self, name: str, unit: str, *attributes: str, **more: Any) -> _Described:
        return self._metric(Kind.GAUGE, name, unit, attributes, **more)

    def updown(self, name: str, unit: str, *attributes: str, **more: Any) -> _Described:
        return self._metric(Kind.UPDOWN, name, unit, attributes, **more)

    def histogram(self, name: str, unit: str, *attributes: str, **more: Any) -> _Described:
        return self._metric(Kind.HISTOGRAM, name, unit, attributes, **more)

    def _metric(
        self,
        kind: Kind,
        name: str,
        unit: str,
        attributes: tuple[str, ...],
        labels: LabelSet | None = None,
        bounds: tuple[float, ...] = (),
    ) -> _Described:
        def described(sentence: str) -> Metric:
            metric = Metric(
                *(name, kind, unit, sentence, self.attributes + attributes),
                *(labels or self.labels, self.title, bounds, prometheus_name(name, kind, unit)),
            )
            _declared.append(metric)
            return metric

        return described


def _codes(codes: Mapping[str, int]) -> str:
    return ", ".join(f"{code} {word}" for word, code in codes.items())


_declared: list[Metric] = []

# In seconds: from a toy model's step to a large one's, and from a small file to a slow store.
_STEP_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_CHECKPOINT_BOUNDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 1800)

# --- Run ---------------------------------------------------------------------------------------

_run = Section("Run", "run")

TRAINING_RUN_INFO = _run.gauge(
    "training.run.info",
    "",
    "project",
    "name",
    "description",
    "tags",
    "script",
    "world_size",
    "nodes",
    "backend",
    "precision",
    "model",
    "strategy",
    "torch",
    "device_runtime",
    "git_sha",
)(
    "Always 1; its labels describe the run, with the scalars of its configuration as "
    "`config_<key>`, as far as the limit on their number goes."
)
TRAINING_RUN_SETTING = _run.gauge("training.run.setting", "", "setting", "value")(
    "Always 1, for each setting of the run: what the script says of it, its environment, and "
    "`config.<key>`; as many of these, and as much of each value, as `training.run.info` has."
)
TRAINING_RUN_START_TIMESTAMP = _run.gauge("training.run.start.timestamp", "s")(
    "When the run began, in seconds since 1970."
)
OTEL_DDP_RUN_TIME = _run.counter("otel_ddp.run.time", "s", "cause", labels="node")(
    "What the time of the ranks of this node went to since their run first began, all ranks added "
    f"up: {', '.join(words.TIME_CAUSES)}."
)
OTEL_DDP_RUN_ATTEMPTS = _run.counter("otel_ddp.run.attempts", "{attempt}", labels="node")(
    "How often the run was begun on this node: by its first launch, and after each end."
)
TRAINING_PARAMETERS = _run.gauge("training.parameters", "{parameter}", "trainable")(
    "How many parameters the model has, the trainable and the frozen ones apart."
)

# --- Progress and state ------------------------------------------------------------------------

_progress = Section("Progress and state", "rank")

TRAINING_STATE = _progress.gauge("training.state", "")(
    f"How the rank's process is doing: {_codes(words.STATES)}."
)
TRAINING_WORLD_SIZE = _progress.gauge("training.world.size", "{rank}")(
    "How many ranks train together with this one, itself included, over all nodes."
)
TRAINING_PHASE = _progress.gauge("training.phase", "")(
    f"What the rank is busy with at this moment: {_codes(words.PHASES)}."
)
TRAINING_STEP = _progress.gauge("training.step", "{step}")(
    "The last optimizer step that the rank finished."
)
TRAINING_EPOCH = _progress.gauge("training.epoch", "{epoch}")("The epoch that the rank is in.")
TRAINING_HEARTBEAT_TIMESTAMP = _progress.gauge("training.heartbeat.timestamp", "s")(
    "When the rank's process was last seen alive, in seconds since 1970."
)
TRAINING_PROGRESS_TIMESTAMP = _progress.gauge("training.progress.timestamp", "s")(
    "When the rank last went from one phase to another, in seconds since 1970."
)
TRAINING_STALLED = _progress.gauge("training.stalled", "")(
    "1 while no rank of its run moves, by the verdict on that, otherwise 0."
)
TRAINING_RESTARTS = _progress.counter("training.restarts", "{restart}")(
    "How often the launcher has started this rank again within the run."
)
TRAINING_EXCEPTIONS = _progress.counter("training.exceptions", "{exception}", "error.type")(
    "How many exceptions have ended the rank's training, by their class: none is told of before."
)
TRAINING_DEATHS = _progress.counter("training.deaths", "{death}", "cause")(
    "How often the end of the rank was the first of its run's, by what ended it: none is told of "
    "before."
)
TRAINING_OOMS = _progress.counter("training.ooms", "{error}")(
    "How often the rank has run out of its device's memory."
)
TRAINING_CHECKPOINT_DURATION = _progress.histogram(
    "training.checkpoint.duration", "s", bounds=_CHECKPOINT_BOUNDS
)("How long the rank was held up by saving a checkpoint.")
TRAINING_CHECKPOINT_TIMESTAMP = _progress.gauge("training.checkpoint.timestamp", "s")(
    "When the rank finished its last checkpoint, in seconds since 1970."
)

# --- Speed -------------------------------------------------------------------------------------

_speed = Section("Speed", "rank")

TRAINING_STEPS = _speed.counter("training.steps", "{step}")(
    "How many optimizer steps the rank has finished."
)
TRAINING_SAMPLES = _speed.counter("training.samples", "{sample}")(
    "How many samples the rank has trained on."
)
TRAINING_TOKENS = _speed.counter("training.tokens", "{token}")(
    "How many tokens the rank has trained on."
)
TRAINING_MICRO_BATCHES = _speed.counter("training.micro_batches", "{micro_batch}")(
    "How many forward and backward passes the rank has made, gradient accumulation included."
)
TRAINING_STEPS_SKIPPED = _speed.counter("training.steps.skipped", "{step}", "reason")(
    "How many optimizer steps left the weights as they were, for instance after an overflow."
)
TRAINING_STEP_DURATION = _speed.histogram("training.step.duration", "s", bounds=_STEP_BOUNDS)(
    "How long a step took, from the end of the one before it to its own end."
)
TRAINING_PHASE_TIME = _speed.counter("training.phase.time", "s", "phase", "clock", "sync")(
    "Time spent in each phase of training, by the clock of the host or of the device; `sync` "
    "says of `comm_wait` whether it was for `gradients` or for `buffers`; where not every step is "
    "measured, that of the others is estimated to be divided alike."
)
TRAINING_PHASE_STEP_TIME = _speed.gauge("training.phase.step_time", "s", "phase")(
    "Time per step in each phase over the last two minutes, by the clock of the device where it is "
    "known, else of the host; estimated where not every step is measured."
)
TRAINING_GC_TIME = _speed.counter("training.gc.time", "s")(
    "Time for which Python's garbage collector held up the rank."
)
TRAINING_FLOPS = _speed.counter("training.flops", "{operation}", "method")(
    "Floating-point operations that the model's work amounts to, and how that is known: `6pt` from "
    "parameters and tokens, or `given` by the user."
)
TRAINING_FLOPS_PEAK = _speed.gauge("training.flops.peak", "{operation}/s", "dtype", "device")(
    "Floating-point operations per second that the rank's device could reach at best."
)
TRAINING_DEVICE_MEMORY_ALLOCATED = _speed.updown("training.device.memory.allocated", "By")(
    "Device memory that the rank's tensors occupy."
)
TRAINING_DEVICE_MEMORY_RESERVED = _speed.updown("training.device.memory.reserved", "By")(
    "Device memory that PyTorch's allocator holds for the rank, whether or not tensors use it."
)
TRAINING_DEVICE_MEMORY_LIMIT = _speed.updown("training.device.memory.limit", "By")(
    "Device memory that PyTorch's allocator may hold for the rank: all that the device has, or the "
    "share that the program has set."
)
TRAINING_DEVICE_MEMORY_PEAK = _speed.gauge("training.device.memory.peak", "By")(
    "The most device memory that the rank's tensors have occupied at one time."
)
TRAINING_DEVICE_MEMORY_ALLOC_RETRIES = _speed.counter(
    "training.device.memory.alloc_retries", "{retry}"
)("How often PyTorch's allocator had to empty its cache to serve a request.")

# --- Learning ----------------------------------------------------------------------------------

_learning = Section("Learning", "rank", ("name", "split"))

TRAINING_SCALAR = _learning.gauge("training.scalar", "")(
    "A logged value, such as a loss or a learning rate."
)
TRAINING_SCALAR_STEP = _learning.gauge("training.scalar.step", "{step}")(
    "The step to which the logged value with the same time stamp belongs."
)
TRAINING_SCALAR_EPOCH = _learning.gauge("training.scalar.epoch", "{epoch}")(
    "The epoch to which the logged value with the same time stamp belongs, where one was given."
)
TRAINING_NONFINITE = _learning.counter("training.nonfinite", "{value}")(
    "How many logged values were NaN or infinite, counted from 0 once a name is first logged."
)

# --- Summary -----------------------------------------------------------------------------------

# What a user may say of a name: its lowest or its highest value is the best one, or neither is.
BEST = ("min", "max", "none")

_summary = Section("Summary", "run", ("name", "split", "direction"))

TRAINING_SCALAR_BEST = _summary.gauge("training.scalar.best", "")(
    "The best finite value so far, over all attempts that this node's agent has seen."
)
TRAINING_SCALAR_BEST_STEP = _summary.gauge("training.scalar.best.step", "{step}")(
    "The step to which the best value belongs."
)

# --- Artifacts ---------------------------------------------------------------------------------

# The log record when it is named, and once more when it is read.
ARTIFACT_EVENT = "training.artifact"

_artifacts = Section("Artifacts", "rank", ("name", "type", "direction", "digest", "uri"))

TRAINING_ARTIFACT_TIMESTAMP = _artifacts.gauge("training.artifact.timestamp", "s")(
    "When the script told of it, in seconds since 1970."
)
TRAINING_ARTIFACT_SIZE = _artifacts.gauge("training.artifact.size", "By")(
    "The size of the file, or of all files of the directory."
)
TRAINING_ARTIFACT_STEP = _artifacts.gauge("training.artifact.step", "{step}")(
    "The step at which the script told of it."
)

# --- Diagnosis ---------------------------------------------------------------------------------

_diagnosis = Section("Diagnosis", "rank")

TRAINING_STRAGGLER = _diagnosis.gauge("training.straggler", "", "phase", "side")(
    "1 while this rank keeps the others waiting, with the phase in which it loses the time; where "
    "its device's clock is known, `side` says which side is late: `device`, `host` or `unclear`."
)
TRAINING_STRAGGLER_EXCESS = _diagnosis.gauge("training.straggler.excess", "1", "phase")(
    "How much more work time than the others this rank needs, as a share of the median step."
)
TRAINING_IMBALANCE = _diagnosis.gauge("training.imbalance", "", "phase")(
    "1 while this rank keeps the others waiting because it has more tokens or samples than they "
    "have, with the phase in which that takes longer; shown from the first time on."
)
TRAINING_RECURRING_STALL = _diagnosis.gauge("training.recurring_stall", "", "phase")(
    "1 while this rank stalls again and again, with the phase that it stalls in, or `garbage`; "
    "shown from the first time on."
)
TRAINING_STRAGGLER_LOST_TIME = _diagnosis.counter("training.straggler.lost_time", "s")(
    "Time that the whole job has lost because of this rank."
)
TRAINING_NODE_STRAGGLER = _diagnosis.gauge(
    "training.node.straggler", "", "phase", "side", labels="node"
)(
    "1 while the ranks of this node, late alike, keep those of other nodes waiting, with phase and "
    "side as in `training.straggler`, which each of them has as well; shown from the first time on."
)
TRAINING_NODE_IMBALANCE = _diagnosis.gauge("training.node.imbalance", "", "phase", labels="node")(
    "The same for more tokens or samples than other nodes have, as in `training.imbalance`."
)
TRAINING_COMPARED_RANKS = _diagnosis.gauge("training.compared.ranks", "{rank}", labels="node")(
    "How many ranks of the run are compared step by step where the verdicts on this node's ranks "
    "are made: fewer than `training.world.size` if agents do not reach each other."
)
TRAINING_NODE_WORK_MAX = _diagnosis.gauge("training.node.work.max", "s", labels="node")(
    "Work time per step of the slowest rank on the node, waiting for other ranks left out."
)
TRAINING_NODE_WORK_MEDIAN = _diagnosis.gauge("training.node.work.median", "s", labels="node")(
    "Median work time per step over the ranks on the node, waiting for other ranks left out."
)
TRAINING_OWN_COLLECTIVES = _diagnosis.gauge("training.own_collectives", "", "phase")(
    "1 for a phase in which the program waits for other ranks in collectives of its own, so that "
    "ranks are not compared by it."
)
TRAINING_STALL_CULPRIT = _diagnosis.gauge("training.stall.culprit", "", "cause")(
    "1 while this rank holds up a run that stands still, with the cause as the verdict has it; "
    "shown while that lasts."
)

# --- Process -----------------------------------------------------------------------------------

_process = Section("Process", "rank")

PROCESS_CPU_TIME = _process.counter("process.cpu.time", "s", "cpu.mode")(
    "Processor time that the training process has used."
)
PROCESS_MEMORY_USAGE = _process.updown("process.memory.usage", "By")(
    "Physical memory that the training process occupies."
)
PROCESS_THREAD_COUNT = _process.updown("process.thread.count", "{thread}")(
    "How many threads the training process has."
)

TRAINING_CHILDREN_COUNT = _process.updown("training.children.count", "{process}")(
    "How many processes the training process has started that still live, but for other ranks: "
    "data loader workers, mostly."
)
TRAINING_CHILDREN_CPU_TIME = _process.counter("training.children.cpu.time", "s", "cpu.mode")(
    "Processor time that these processes have used, those that have ended included."
)
TRAINING_CHILDREN_MEMORY_USAGE = _process.updown("training.children.memory.usage", "By")(
    "Physical memory that these processes occupy; what they share is counted for each."
)

# --- GPU ---------------------------------------------------------------------------------------

_gpu = Section("GPU", "gpu", ("hw.id", "hw.type", "hw.model", "gpu"))

HW_GPU_UTILIZATION = _gpu.gauge("hw.gpu.utilization", "1", "hw.gpu.task")(
    "Share of the time in which the GPU did anything at all, or its encoder or decoder did."
)
OTEL_DDP_GPU_MEM_CONTROLLER_UTILIZATION = _gpu.gauge(
    "otel_ddp.gpu.mem_controller.utilization", "1"
)("Share of the time in which the GPU's memory was read or written.")
HW_GPU_MEMORY_USAGE = _gpu.updown("hw.gpu.memory.usage", "By")(
    "Memory of the GPU that is in use, by anyone."
)
HW_GPU_MEMORY_LIMIT = _gpu.updown("hw.gpu.memory.limit", "By")("Memory that the GPU has.")
HW_POWER = _gpu.gauge("hw.power", "W")("Power that the GPU draws.")
OTEL_DDP_GPU_POWER_LIMIT = _gpu.gauge("otel_ddp.gpu.power.limit", "W")(
    "Power that the GPU may draw under the limit in force."
)
HW_ENERGY = _gpu.counter("hw.energy", "J")("Energy that the GPU has used.")
HW_TEMPERATURE = _gpu.gauge("hw.temperature", "Cel", "hw.sensor_location")(
    "Temperature of the GPU, at its core or at its memory."
)
HW_FAN_SPEED_RATIO = _gpu.gauge("hw.fan.speed_ratio", "1", "fan")(
    "Speed of the GPU's fan, as a share of its highest."
)
OTEL_DDP_GPU_CLOCK_FREQUENCY = _gpu.gauge("otel_ddp.gpu.clock.frequency", "Hz", "domain")(
    "Frequency at which the GPU runs its cores or its memory."
)
OTEL_DDP_GPU_THROTTLE_ACTIVE = _gpu.gauge("otel_ddp.gpu.throttle.active", "", "reason")(
    "1 while the GPU holds its clocks back for this reason, otherwise 0."
)
OTEL_DDP_GPU_THROTTLE_DURATION = _gpu.counter("otel_ddp.gpu.throttle.duration", "s", "reason")(
    "Time for which the GPU has held its clocks back for this reason."
)
HW_GPU_IO = _gpu.counter("hw.gpu.io", "By", "pci", "network.io.direction")(
    "Bytes that the GPU has received and sent over PCIe."
)
OTEL_DDP_GPU_PCIE_LINK_GENERATION = _gpu.gauge(
    "otel_ddp.gpu.pcie.link.generation", "", "pci", "link"
)("Generation of PCIe that the GPU's link runs at now, and the highest that it could.")
OTEL_DDP_GPU_PCIE_LINK_WIDTH = _gpu.gauge("otel_ddp.gpu.pcie.link.width", "{lane}", "pci", "link")(
    "Lanes that the GPU's PCIe link uses now, and the most that it could."
)
OTEL_DDP_GPU_NVLINK_IO = _gpu.counter("otel_ddp.gpu.nvlink.io", "By", "network.io.direction")(
    "Bytes that the GPU has received and sent over NVLink."
)
OTEL_DDP_GPU_NVLINK_ERRORS = _gpu.counter("otel_ddp.gpu.nvlink.errors", "{error}")(
    "Errors on the NVLink connections of the GPU."
)
OTEL_DDP_GPU_PCIE_REPLAYS = _gpu.counter("otel_ddp.gpu.pcie.replays", "{replay}", "pci")(
    "How often a PCIe transfer of the GPU had to be repeated."
)
HW_ERRORS = _gpu.counter("hw.errors", "{error}", "error.type")(
    "Memory errors that the GPU has found, corrected or not."
)
OTEL_DDP_GPU_XID_ERRORS = _gpu.counter("otel_ddp.gpu.xid.errors", "{error}", "pci", "code")(
    "Faults of the GPU that NVIDIA's driver reported, by Xid code."
)
OTEL_DDP_GPU_REMAPPED_ROWS = _gpu.counter("otel_ddp.gpu.remapped_rows", "{row}", "cause")(
    "Rows of GPU memory that were replaced by spare ones after errors."
)
OTEL_DDP_GPU_ENGINE_ACTIVE = _gpu.gauge("otel_ddp.gpu.engine.active", "1", "engine")(
    "Share of the time in which this part of the GPU was busy, where the device measures it."
)
OTEL_DDP_GPU_PROCESS_MEMORY_USAGE = _gpu.updown(
    "otel_ddp.gpu.process.memory.usage", "By", labels="rank"
)("Memory of the GPU that the process of this rank occupies.")

# --- Host --------------------------------------------------------------------------------------

_host = Section("Host", "node")

SYSTEM_CPU_UTILIZATION = _host.gauge("system.cpu.utilization", "1", "cpu.mode")(
    "Share of the node's processor time that went into each mode, over all processors."
)
SYSTEM_MEMORY_USAGE = _host.updown("system.memory.usage", "By", "system.memory.state")(
    "Memory of the node, by what it is used for."
)
SYSTEM_MEMORY_LIMIT = _host.updown("system.memory.limit", "By")(
    "Memory that the node, or the container, has."
)
SYSTEM_DISK_IO = _host.counter("system.disk.io", "By", "disk.io.direction")(
    "Bytes that the node's file systems have read from and written to block devices."
)
SYSTEM_NETWORK_IO = _host.counter("system.network.io", "By", "network.io.direction")(
    "Bytes that the node has received and sent, without loopback and RDMA."
)
HW_NETWORK_IO = _host.counter("hw.network.io", "By", "hw.id", "hw.type", "network.io.direction")(
    "Bytes that an InfiniBand port of the node has received and sent, RDMA included."
)
OTEL_DDP_HOST_PRESSURE = _host.counter("otel_ddp.host.pressure", "s", "resource", "stall_type")(
    "Time for which some or all tasks stood still for want of processors, memory or storage."
)

# --- Ourselves ---------------------------------------------------------------------------------

_ourselves = Section("Ourselves", "node")

OTEL_DDP_RECORDS_LOST = _ourselves.counter(
    "otel_ddp.records.lost", "{record}", "why", labels="rank"
)(
    "Records of a rank that were gone before the agent could read them, or held values that came "
    "too fast to be sent."
)
OTEL_DDP_VALUES_REFUSED = _ourselves.counter(
    "otel_ddp.values.refused", "{value}", "why", labels="rank"
)("What a rank refused, shortened or left out: values and names given to `log()`, lines of logs.")
OTEL_DDP_POINTS_DROPPED = _ourselves.counter("otel_ddp.points.dropped", "{point}", "why")(
    "Data points that the agent gave up on before anyone took them."
)
OTEL_DDP_EXPORTS = _ourselves.counter("otel_ddp.exports", "{export}", "outcome")(
    "Attempts of the agent to hand over data, by how they ended."
)
OTEL_DDP_SPOOL_SIZE = _ourselves.gauge("otel_ddp.spool.size", "By")(
    "Data on disk that waits for its receiver to come back."
)
OTEL_DDP_HOOK_TIME = _ourselves.counter("otel_ddp.hook.time", "s", labels="rank")(
    "Time that we have taken of the rank's training: hooks, flushes, readings and `log`, and what "
    "torch takes to call hooks, estimated beside steps without them; OTEL_DDP_OVERHEAD limits it."
)
OTEL_DDP_HOOK_ERRORS = _ourselves.counter("otel_ddp.hook.errors", "{error}", labels="rank")(
    "Errors of our own that were kept out of the rank's training."
)
OTEL_DDP_AGENT_CPU_TIME = _ourselves.counter("otel_ddp.agent.cpu.time", "s")(
    "Processor time that the agent of the node has used."
)
OTEL_DDP_SOURCE_AGE = _ourselves.gauge("otel_ddp.source.age", "s", "source")(
    "How long ago the agent last read this source of its node; it grows while a driver hangs."
)
OTEL_DDP_CAPABILITY = _ourselves.gauge("otel_ddp.capability", "", "what", "reason", labels="rank")(
    "1 for a measurement that this run has, 0 with the reason for one that it has not; see "
    "docs/training.md."
)

METRICS: tuple[Metric, ...] = tuple(_declared)
BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}
