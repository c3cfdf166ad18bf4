"""Samples the node, and labels each measurement with its rank, run or node."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from otel_ddp import errors
from otel_ddp.agent.kept_thread import KeptThread
from otel_ddp.agent.ledger import Labels, Ledger, Series
from otel_ddp.agent.node.gpu_owners import Ownership, owners, shared_labels
from otel_ddp.agent.node.host import Host
from otel_ddp.agent.node.nvml import DeviceSample, Gpus, identity
from otel_ddp.agent.node.processes import ProcessReader
from otel_ddp.agent.node.source import Measurement, Sampler
from otel_ddp.agent.reading.journals import Rank
from otel_ddp.vocabulary import catalog

_GPU_S, _HOST_S, _PROCESS_S = 5.0, 5.0, 2.0
_STOP_S = 0.5


class Sampling:
    """Samples the node. Each source, e.g. the GPUs, is read in a thread of its own;
    `update_series` waits for none of them."""

    def __init__(self, ledger: Ledger, node: str, sources: Collection[str]) -> None:
        self._ledger = ledger
        self._node = node
        self._ranks: tuple[Rank, ...] = ()
        # The series that the last update wrote into the ledger.
        self._shown: set[Series] = set()
        self._processes = ProcessReader()
        every: tuple[tuple[str, Callable[[], Any], float], ...] = (
            ("gpu", Gpus().read, _GPU_S),
            ("host", Host(pids=self._rank_pids).read, _HOST_S),
            ("process", self._processes.read, _PROCESS_S),
        )
        self._samplers = {
            name: Sampler(name, read, every_s) for name, read, every_s in every if name in sources
        }
        self._ownership = Ownership({}, [])

    def threads(self) -> list[KeptThread]:
        """The thread of each source."""
        return [sampler.thread for sampler in self._samplers.values()]

    def stop(self) -> None:
        """Stop the threads. Does not wait for a thread that hangs."""
        for sampler in self._samplers.values():
            sampler.stop(_STOP_S)

    def _rank_pids(self) -> Collection[int | str]:
        """The processes whose cgroup limit counts as the node's memory: the ranks. Not the agent,
        which may be in the cgroup of a service."""
        return [each.pid for each in self._ranks if each.pid] or ["self"]

    # -- series

    @errors.contained()
    def update_series(self, ranks: Sequence[Rank], pids: Collection[int], now_ns: int) -> None:
        """Write fresh samples into the ledger. The caller holds the ledger's lock.

        *pids*: all training processes.
        """
        self._ranks = self._processes.ranks = tuple(ranks)
        self._processes.pids = pids
        shown: set[Series] = set()
        for labels, measurement, taken_ns in self._labelled():
            series = self._ledger.series(measurement.metric, labels + measurement.attributes)
            series.value, series.time_ns = measurement.value, taken_ns
            series.start_ns = measurement.start_ns
            shown.add(series)
        for series in self._shown - shown:
            self._ledger.forget(series)
        self._shown = shown
        for sampler in self._samplers.values():
            of_source = (("node", self._node), ("source", sampler.name))
            self._ledger.put(catalog.OTEL_DDP_SOURCE_AGE, of_source, sampler.age_s(), now_ns)

    def cores(self) -> dict[Labels, float]:
        """For each rank, the share of the last half minute in which it waited for a core."""
        sample, _ = self._fresh("process")
        uses = sample.uses.items() if sample else ()
        return {labels: use.core_wait for labels, use in uses if use.core_wait is not None}

    def _labelled(self) -> Iterator[tuple[Labels, Measurement, int]]:
        node_labels = shared_labels([rank.labels for rank in self._ranks], self._node)
        measurements, taken_ns = self._fresh("host")
        for measurement in measurements or ():
            yield node_labels, measurement, taken_ns
        sample, taken_ns = self._fresh("process")
        here = {rank.labels for rank in self._ranks}
        for labels, use in sample.uses.items() if sample else ():
            for measurement in use.measurements if labels in here else ():
                yield labels, measurement, taken_ns
        sample, taken_ns = self._fresh("gpu")
        devices = sample.devices if sample else ()
        self._ownership = owners(self._ranks, devices, self._node)
        for each in devices:
            for measurement in each.measurements:
                yield self._ownership.labels[each.device.uuid], measurement, taken_ns
        for used in self._ownership.memory:
            metric = catalog.OTEL_DDP_GPU_PROCESS_MEMORY_USAGE
            measurement = Measurement(metric, float(used.used_bytes), identity(used.device))
            yield used.labels, measurement, taken_ns

    def _fresh(self, name: str) -> tuple[Any, int]:
        """The last sample of a source and its time; (None, 0) if the sample is stale."""
        sampler = self._samplers.get(name)
        return (sampler and sampler.fresh()) or (None, 0)

    # -- for `status`

    def describe(self) -> dict[str, Any]:
        """The node's devices, and the ranks whose processes cannot be read."""
        sample, _ = self._fresh("gpu")
        processes, _ = self._fresh("process")
        remarks: list[str] = []
        gpus = self._samplers.get("gpu")
        if sample:
            remarks = [sample.remark] if sample.remark else []
        elif gpus is not None and gpus.hangs():
            remarks = ["the GPU driver does not answer"]
        return {
            # The ranks whose processes could not be read.
            "unseen": list(processes.missed) if processes else [],
            "gpus": self.gpus(),
            "gpu_remarks": remarks,
            "gpu_driver": sample.version if sample else "",
        }

    def gpus(self) -> list[dict[str, Any]]:
        """The devices in the last sample."""
        sample, _ = self._fresh("gpu")
        return [self._described(each) for each in sample.devices] if sample else []

    def _described(self, each: DeviceSample) -> dict[str, Any]:
        described: dict[str, Any] = {
            "index": each.device.index,
            "name": each.device.name,
            "uuid": each.device.uuid,
            "labels": dict(self._ownership.labels.get(each.device.uuid, ())),
            "processes": len(each.users),
        }
        known = len(identity(each.device))
        for measurement in each.measurements:
            kind = "".join(value for _, value in measurement.attributes[known:])
            if measurement.metric is catalog.OTEL_DDP_GPU_THROTTLE_ACTIVE:
                reasons = described.setdefault("throttled", [])
                if measurement.value:
                    reasons.append(kind)
            elif (key := _SHOWN.get((measurement.metric, kind))) is not None:
                described[key] = measurement.value
        return described


# The keys under which `otel-ddp status --json` has a device's numbers. They are given by metric,
# and by the attribute that distinguishes the device's series.
_SHOWN: dict[tuple[catalog.Metric, str], str] = {
    (catalog.HW_GPU_UTILIZATION, "general"): "busy_ratio",
    (catalog.HW_GPU_MEMORY_USAGE, ""): "used_bytes",
    (catalog.HW_GPU_MEMORY_LIMIT, ""): "limit_bytes",
    (catalog.HW_POWER, ""): "power_w",
    (catalog.OTEL_DDP_GPU_POWER_LIMIT, ""): "power_limit_w",
    (catalog.HW_TEMPERATURE, "core"): "temperature_c",
    (catalog.OTEL_DDP_GPU_CLOCK_FREQUENCY, "core"): "core_clock_hz",
}
