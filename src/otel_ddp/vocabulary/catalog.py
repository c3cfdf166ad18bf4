"""The catalogue of all metrics: names in OpenTelemetry and Prometheus, kind, unit, attributes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Literal, NamedTuple

from otel_ddp.vocabulary import words

LabelSet = Literal["rank", "run", "node", "gpu"]

# The labels that a series may have, by what it is about: a rank, a run, a node or a GPU.
# docs/metrics.md says when a label is absent.
LABELS: Mapping[LabelSet, tuple[str, ...]] = {
    "rank": words.RANK_LABELS,
    "run": words.RANK_LABELS,
    "node": words.NODE_LABELS,
    "gpu": words.RANK_LABELS,
}


class Kind(str, Enum):
    """The kind of a metric, as in OpenTelemetry."""

    COUNTER = "counter"
    GAUGE = "gauge"
    UPDOWN = "updown"
    HISTOGRAM = "histogram"


class Metric(NamedTuple):
    """One metric, with all that exporters and the documentation need to know about it."""

    name: str
    kind: Kind
    unit: str
    description: str
    attributes: tuple[str, ...]
    labels: LabelSet
    section: str
    bounds: tuple[float, ...]
    prometheus: str


# The word that a unit adds to a metric's name in Prometheus; a unit in braces, like `{step}`, adds
# none. These rules are the default of github.com/prometheus/otlptranslator, which the OpenTelemetry
# collector and Prometheus' OTLP receiver use.
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
        # Don't add a word that the name contains already.
        if suffix and suffix not in tokens:
            tokens.append(suffix)

    if kind is Kind.COUNTER:
        tokens = [token for token in tokens if token != "total"] + ["total"]
    # Up-down counters get no `ratio`, although Prometheus shows them as gauges.
    if kind is Kind.GAUGE and unit == "1":
        tokens = [token for token in tokens if token != "ratio"] + ["ratio"]
    return "_".join(tokens)


# Limits for the run's configuration, which is exported as labels of training.run.info. Prometheus
# limits neither their number nor their length, but compatible stores do. The lowest such limit is
# 1,024 bytes for a label; 200 characters are at most 800 bytes.
MOST_CONFIG_LABELS = 100
LONGEST_LABEL = 200
# The name of the event that is recorded at the end of each `checkpoint` phase.
CHECKPOINT_EVENT = "training.checkpoint"
# The name of the event that each call of `run.alert` records.
ALERT_EVENT = "training.alert"


def prometheus_label(attribute: str) -> str:
    """Return the label name under which Prometheus knows an OpenTelemetry attribute."""
    # Keep consecutive underscores, as Prometheus' OTLP receiver does in labels, but not in names of
    # metrics.
    label = re.sub(r"[^A-Za-z0-9_]", "_", attribute)
    if not label.strip("_"):
        # Prometheus' OTLP receiver rejects a point with such an attribute. But the answer to a
        # scrape needs a valid name, so use this one.
        return "key_"
    if label[0].isdigit():
        return f"key_{label}"
    if label[0] == "_" and not label.startswith("__"):
        return f"key{label}"
    return label


# A metric without its description. Calling it with the description adds it to the catalogue.
_Described = Callable[[str], Metric]


class Section(NamedTuple):
    """A heading of docs/metrics.md, with the labels and attributes that its metrics share."""

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

# Histogram bounds in seconds. They suit steps of toy models and of large ones, and checkpoints to a
# local file and to a slow store.
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
    "Always 1; labels describe the run, and up to 100 settings of its configuration as "
    "`config_<key>`."
)
TRAINING_RUN_SETTING = _run.gauge("training.run.setting", "", "setting", "value")(
    "Always 1, one series for each description, environment fact and `config.<key>` of the run."
)
TRAINING_RUN_START_TIMESTAMP = _run.gauge("training.run.start.timestamp", "s")(
    "When the run began."
)
OTEL_DDP_RUN_TIME = _run.counter("otel_ddp.run.time", "s", "cause", labels="node")(
    "Time of the node's ranks over all attempts, summed, by cause (docs/goodput.md)."
)
OTEL_DDP_RUN_ATTEMPTS = _run.counter("otel_ddp.run.attempts", "{attempt}", labels="node")(
    "Attempts of the run on this node: its first launch and each restart."
)

# --- Progress and state ------------------------------------------------------------------------

_progress = Section("Progress and state", "rank")

TRAINING_STATE = _progress.gauge("training.state", "")(
    f"State of the rank's process: {_codes(words.STATES)}."
)
TRAINING_WORLD_SIZE = _progress.gauge("training.world.size", "{rank}")(
    "Ranks that train together, over all nodes."
)
TRAINING_PHASE = _progress.gauge("training.phase", "")(
    f"What the rank is doing now: {_codes(words.PHASES)}."
)
TRAINING_STEP = _progress.gauge("training.step", "{step}")(
    "Last optimizer step that the rank finished."
)
TRAINING_HEARTBEAT_TIMESTAMP = _progress.gauge("training.heartbeat.timestamp", "s")(
    "When the process was last seen alive."
)
TRAINING_PROGRESS_TIMESTAMP = _progress.gauge("training.progress.timestamp", "s")(
    "When the rank last changed its phase."
)
TRAINING_STALLED = _progress.gauge("training.stalled", "")(
    "1 while the run has a stall verdict, otherwise 0."
)
TRAINING_RESTARTS = _progress.counter("training.restarts", "{restart}")(
    "How often the launcher has restarted this rank."
)
TRAINING_EXCEPTIONS = _progress.counter("training.exceptions", "{exception}", "error.type")(
    "Exceptions that ended the rank's training, by class; absent before the first."
)
TRAINING_DEATHS = _progress.counter("training.deaths", "{death}", "cause")(
    "How often this rank was the first of its run to end, by cause; absent before the first."
)
TRAINING_OOMS = _progress.counter("training.ooms", "{error}")(
    "How often the rank ran out of device memory."
)
TRAINING_CHECKPOINT_DURATION = _progress.histogram(
    "training.checkpoint.duration", "s", bounds=_CHECKPOINT_BOUNDS
)("How long saving a checkpoint held up the rank.")
TRAINING_CHECKPOINT_TIMESTAMP = _progress.gauge("training.checkpoint.timestamp", "s")(
    "When the rank finished its last checkpoint."
)

# --- Speed -------------------------------------------------------------------------------------

_speed = Section("Speed", "rank")

TRAINING_STEPS = _speed.counter("training.steps", "{step}")(
    "Optimizer steps that the rank finished."
)
TRAINING_SAMPLES = _speed.counter("training.samples", "{sample}")(
    "Samples that the rank trained on."
)
TRAINING_TOKENS = _speed.counter("training.tokens", "{token}")("Tokens that the rank trained on.")
TRAINING_MICRO_BATCHES = _speed.counter("training.micro_batches", "{micro_batch}")(
    "Forward and backward passes, gradient accumulation included."
)
TRAINING_STEPS_SKIPPED = _speed.counter("training.steps.skipped", "{step}", "reason")(
    "Optimizer steps that left the weights unchanged, for instance after an overflow."
)
TRAINING_STEP_DURATION = _speed.histogram("training.step.duration", "s", bounds=_STEP_BOUNDS)(
    "Time from the end of one step to the end of the next."
)
TRAINING_PHASE_TIME = _speed.counter("training.phase.time", "s", "phase", "clock", "sync")(
    "Time in each phase, by the clock of host or device; `sync` splits `comm_wait` into "
    "`gradients` and `buffers`."
)
TRAINING_PHASE_STEP_TIME = _speed.gauge("training.phase.step_time", "s", "phase")(
    "Time per step in each phase over two minutes, by the device's clock if known."
)
TRAINING_FLOPS = _speed.counter("training.flops", "{operation}", "method")(
    "Floating-point operations of the model: `6pt` from parameters and tokens, or `given` by "
    "the user."
)
TRAINING_FLOPS_PEAK = _speed.gauge("training.flops.peak", "{operation}/s", "dtype", "device")(
    "Peak floating-point operations per second of the rank's device."
)
TRAINING_DEVICE_MEMORY_ALLOCATED = _speed.updown("training.device.memory.allocated", "By")(
    "Device memory of the rank's tensors."
)
TRAINING_DEVICE_MEMORY_RESERVED = _speed.updown("training.device.memory.reserved", "By")(
    "Device memory that PyTorch's allocator holds."
)
TRAINING_DEVICE_MEMORY_LIMIT = _speed.updown("training.device.memory.limit", "By")(
    "Device memory that PyTorch's allocator may hold."
)
TRAINING_DEVICE_MEMORY_PEAK = _speed.gauge("training.device.memory.peak", "By")(
    "Peak device memory of the rank's tensors."
)
TRAINING_DEVICE_MEMORY_ALLOC_RETRIES = _speed.counter(
    "training.device.memory.alloc_retries", "{retry}"
)("How often PyTorch's allocator emptied its cache.")

# --- Collectives -------------------------------------------------------------------------------

COLLECTIVE = ("dimension", "operation")

_collectives = Section("Collectives", "rank", COLLECTIVE)

TRAINING_COLLECTIVE_STEP_CALLS = _collectives.gauge("training.collective.step_calls", "{call}")(
    "Calls per step."
)
TRAINING_COLLECTIVE_STEP_SIZE = _collectives.gauge("training.collective.step_size", "By")(
    "Bytes per step: the larger of inputs and outputs."
)
TRAINING_COLLECTIVE_STEP_WAIT = _collectives.gauge("training.collective.step_wait", "s")(
    "Time per step waiting for other members, if known."
)

# --- Learning ----------------------------------------------------------------------------------

_learning = Section("Learning", "rank", ("name", "split"))

TRAINING_SCALAR = _learning.gauge("training.scalar", "")(
    "A logged value, such as a loss or a learning rate."
)
TRAINING_SCALAR_STEP = _learning.gauge("training.scalar.step", "{step}")(
    "Step of the logged value with the same time stamp."
)
TRAINING_SCALAR_EPOCH = _learning.gauge("training.scalar.epoch", "{epoch}")(
    "Epoch of the logged value with the same time stamp, if given."
)
TRAINING_NONFINITE = _learning.counter("training.nonfinite", "{value}")(
    "Logged values that were NaN or infinite."
)

# --- Summary -----------------------------------------------------------------------------------

# What a user may set for a logged value: the lowest is the best, the highest is the best, or none.
BEST = ("min", "max", "none")

_summary = Section("Summary", "run", ("name", "split", "direction"))

TRAINING_SCALAR_BEST = _summary.gauge("training.scalar.best", "")(
    "Best finite value of all attempts that this agent has seen."
)
TRAINING_SCALAR_BEST_STEP = _summary.gauge("training.scalar.best.step", "{step}")(
    "Step of the best value."
)

# --- Artifacts ---------------------------------------------------------------------------------

# The name of the event that each call of `run.artifact` records. After the agent has read the file,
# it reports a second event of this name.
ARTIFACT_EVENT = "training.artifact"

_artifacts = Section("Artifacts", "rank", ("name", "type", "direction", "digest", "uri"))

TRAINING_ARTIFACT_TIMESTAMP = _artifacts.gauge("training.artifact.timestamp", "s")(
    "When the script recorded the artifact."
)
TRAINING_ARTIFACT_SIZE = _artifacts.gauge("training.artifact.size", "By")(
    "Size of the artifact, a file or a directory."
)
TRAINING_ARTIFACT_STEP = _artifacts.gauge("training.artifact.step", "{step}")(
    "Step at which the script recorded the artifact."
)

# --- Diagnosis ---------------------------------------------------------------------------------

_diagnosis = Section("Diagnosis", "rank")

TRAINING_STRAGGLER = _diagnosis.gauge("training.straggler", "", "phase", "side")(
    "1 while this rank keeps the others waiting; `phase` is the phase in which it is late, `side` "
    "is what is late: `device` or `host`."
)
TRAINING_STRAGGLER_EXCESS = _diagnosis.gauge("training.straggler.excess", "1", "phase")(
    "Work time above that of the other ranks, as a share of the median step."
)
TRAINING_IMBALANCE = _diagnosis.gauge("training.imbalance", "", "phase")(
    "1 while this rank is late because it has more tokens or samples."
)
TRAINING_RECURRING_STALL = _diagnosis.gauge("training.recurring_stall", "", "phase")(
    "1 while this rank stalls repeatedly, in this phase or `garbage`."
)
TRAINING_STRAGGLER_LOST_TIME = _diagnosis.counter("training.straggler.lost_time", "s")(
    "Time that the job has lost because of this rank."
)
TRAINING_NODE_STRAGGLER = _diagnosis.gauge(
    "training.node.straggler", "", "phase", "side", labels="node"
)("1 while all ranks of this node are late and keep other nodes waiting.")
TRAINING_NODE_IMBALANCE = _diagnosis.gauge("training.node.imbalance", "", "phase", labels="node")(
    "1 while all ranks of this node are late because of more tokens or samples."
)
TRAINING_COMPARED_RANKS = _diagnosis.gauge("training.compared.ranks", "{rank}", labels="node")(
    "Ranks that are compared; fewer than `training.world.size` if agents do not reach each other."
)
TRAINING_OWN_COLLECTIVES = _diagnosis.gauge("training.own_collectives", "", "phase")(
    "1 for a phase that is not compared: the program waits in its own collectives there."
)
TRAINING_STALL_CULPRIT = _diagnosis.gauge("training.stall.culprit", "", "cause")(
    "1 while this rank holds up a stalled run; absent otherwise."
)

# --- Process -----------------------------------------------------------------------------------

_process = Section("Process", "rank")

PROCESS_CPU_TIME = _process.counter("process.cpu.time", "s", "cpu.mode")(
    "Processor time of the training process."
)
PROCESS_MEMORY_USAGE = _process.updown("process.memory.usage", "By")(
    "Physical memory of the training process."
)
TRAINING_CHILDREN_COUNT = _process.updown("training.children.count", "{process}")(
    "Living child processes, such as loader workers; other ranks are not counted."
)
TRAINING_CHILDREN_CPU_TIME = _process.counter("training.children.cpu.time", "s", "cpu.mode")(
    "Processor time of child processes, ended ones included."
)
TRAINING_CHILDREN_MEMORY_USAGE = _process.updown("training.children.memory.usage", "By")(
    "Physical memory of child processes; shared memory counts for each."
)

# --- GPU ---------------------------------------------------------------------------------------

_gpu = Section("GPU", "gpu", ("hw.id", "hw.type", "hw.model", "gpu"))

HW_GPU_UTILIZATION = _gpu.gauge("hw.gpu.utilization", "1", "hw.gpu.task")(
    "Share of time in which the GPU, its encoder or its decoder was busy."
)
OTEL_DDP_GPU_MEM_CONTROLLER_UTILIZATION = _gpu.gauge(
    "otel_ddp.gpu.mem_controller.utilization", "1"
)("Share of time in which the GPU's memory was read or written.")
HW_GPU_MEMORY_USAGE = _gpu.updown("hw.gpu.memory.usage", "By")("Memory of the GPU that is in use.")
HW_GPU_MEMORY_LIMIT = _gpu.updown("hw.gpu.memory.limit", "By")("Memory of the GPU.")
HW_POWER = _gpu.gauge("hw.power", "W")("Power that the GPU draws.")
OTEL_DDP_GPU_POWER_LIMIT = _gpu.gauge("otel_ddp.gpu.power.limit", "W")("Power limit of the GPU.")
HW_ENERGY = _gpu.counter("hw.energy", "J")("Energy that the GPU has used.")
HW_TEMPERATURE = _gpu.gauge("hw.temperature", "Cel", "hw.sensor_location")(
    "Temperature of the GPU's core or memory."
)
OTEL_DDP_GPU_CLOCK_FREQUENCY = _gpu.gauge("otel_ddp.gpu.clock.frequency", "Hz", "domain")(
    "Clock of the GPU's cores or memory."
)
OTEL_DDP_GPU_THROTTLE_ACTIVE = _gpu.gauge("otel_ddp.gpu.throttle.active", "", "reason")(
    "1 while the GPU throttles for this reason, otherwise 0."
)
OTEL_DDP_GPU_THROTTLE_DURATION = _gpu.counter("otel_ddp.gpu.throttle.duration", "s", "reason")(
    "Time that the GPU has throttled for this reason."
)
HW_GPU_IO = _gpu.counter("hw.gpu.io", "By", "pci", "network.io.direction")(
    "Bytes received and sent over PCIe."
)
OTEL_DDP_GPU_PCIE_LINK_WIDTH = _gpu.gauge("otel_ddp.gpu.pcie.link.width", "{lane}", "pci", "link")(
    "PCIe lanes of the link, current and highest."
)
OTEL_DDP_GPU_NVLINK_IO = _gpu.counter("otel_ddp.gpu.nvlink.io", "By", "network.io.direction")(
    "Bytes received and sent over NVLink."
)
OTEL_DDP_GPU_NVLINK_ERRORS = _gpu.counter("otel_ddp.gpu.nvlink.errors", "{error}")(
    "Errors of the GPU's NVLink connections."
)
OTEL_DDP_GPU_PCIE_REPLAYS = _gpu.counter("otel_ddp.gpu.pcie.replays", "{replay}", "pci")(
    "Repeated PCIe transfers of the GPU."
)
HW_ERRORS = _gpu.counter("hw.errors", "{error}", "error.type")(
    "Memory errors of the GPU, corrected and uncorrected."
)
OTEL_DDP_GPU_XID_ERRORS = _gpu.counter("otel_ddp.gpu.xid.errors", "{error}", "pci", "code")(
    "Faults that NVIDIA's driver reported, by Xid code."
)
OTEL_DDP_GPU_REMAPPED_ROWS = _gpu.counter("otel_ddp.gpu.remapped_rows", "{row}", "cause")(
    "Rows of GPU memory replaced by spare ones after errors."
)
OTEL_DDP_GPU_ENGINE_ACTIVE = _gpu.gauge("otel_ddp.gpu.engine.active", "1", "engine")(
    "Share of time in which this part of the GPU was busy."
)
OTEL_DDP_GPU_PROCESS_MEMORY_USAGE = _gpu.updown(
    "otel_ddp.gpu.process.memory.usage", "By", labels="rank"
)("GPU memory of this rank's process.")

# --- Host --------------------------------------------------------------------------------------

_host = Section("Host", "node")

SYSTEM_CPU_UTILIZATION = _host.gauge("system.cpu.utilization", "1", "cpu.mode")(
    "Share of the node's processor time in each mode."
)
SYSTEM_MEMORY_USAGE = _host.updown("system.memory.usage", "By", "system.memory.state")(
    "Memory of the node, by use."
)
SYSTEM_MEMORY_LIMIT = _host.updown("system.memory.limit", "By")("Memory of the node or cgroup.")
SYSTEM_DISK_IO = _host.counter("system.disk.io", "By", "disk.io.direction")(
    "Bytes that the node's file systems read from and wrote to block devices."
)
SYSTEM_NETWORK_IO = _host.counter("system.network.io", "By", "network.io.direction")(
    "Bytes that the node received and sent, without loopback and RDMA."
)
HW_NETWORK_IO = _host.counter("hw.network.io", "By", "hw.id", "hw.type", "network.io.direction")(
    "Bytes that an InfiniBand port received and sent, RDMA included."
)
OTEL_DDP_HOST_PRESSURE = _host.counter("otel_ddp.host.pressure", "s", "resource", "stall_type")(
    "Time in which some or all tasks waited for processors, memory or storage."
)

# --- Ourselves ---------------------------------------------------------------------------------

_ourselves = Section("Ourselves", "node")

OTEL_DDP_RECORDS_LOST = _ourselves.counter(
    "otel_ddp.records.lost", "{record}", "why", labels="rank"
)("Records that the agent could not read in time, and values logged too fast to send.")
OTEL_DDP_VALUES_REFUSED = _ourselves.counter(
    "otel_ddp.values.refused", "{value}", "why", labels="rank"
)("Values and names refused; absent before the first.")
OTEL_DDP_POINTS_DROPPED = _ourselves.counter("otel_ddp.points.dropped", "{point}", "why")(
    "Data points that the agent dropped before delivery."
)
OTEL_DDP_EXPORTS = _ourselves.counter("otel_ddp.exports", "{export}", "outcome")(
    "Export attempts of the agent, by outcome."
)
OTEL_DDP_SPOOL_SIZE = _ourselves.gauge("otel_ddp.spool.size", "By")(
    "Data on disk that waits for its receiver."
)
OTEL_DDP_HOOK_TIME = _ourselves.counter("otel_ddp.hook.time", "s", labels="rank")(
    "Time that otel_ddp took of the rank's training; OTEL_DDP_OVERHEAD limits it."
)
OTEL_DDP_HOOK_ERRORS = _ourselves.counter("otel_ddp.hook.errors", "{error}", labels="rank")(
    "Errors of otel_ddp that were kept out of the training."
)
OTEL_DDP_AGENT_CPU_TIME = _ourselves.counter("otel_ddp.agent.cpu.time", "s")(
    "Processor time of the node's agent."
)
OTEL_DDP_SOURCE_AGE = _ourselves.gauge("otel_ddp.source.age", "s", "source")(
    "Time since the agent last read this source; it grows while a driver hangs."
)
OTEL_DDP_CAPABILITY = _ourselves.gauge("otel_ddp.capability", "", "what", "reason", labels="rank")(
    "1 for a measurement that this run has, 0 for one that it lacks, with the reason "
    "(docs/training.md)."
)

METRICS: tuple[Metric, ...] = tuple(_declared)
BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}
