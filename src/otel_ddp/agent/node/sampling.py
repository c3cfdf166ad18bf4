"""Samples the node, and tells each number under the labels of the rank, the run or the node."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from otel_ddp import catalog, containment
from otel_ddp.agent.ledger import Labels, Ledger, Series
from otel_ddp.agent.node.gpu.driver import Driver
from otel_ddp.agent.node.gpu.gpu import DeviceSample, Gpus, GpuSample, identity
from otel_ddp.agent.node.gpu_owners import Claim, Ownership, owners
from otel_ddp.agent.node.host.file_systems import FileSystems
from otel_ddp.agent.node.host.host import Host
from otel_ddp.agent.node.kernel_files import KernelFiles
from otel_ddp.agent.node.process.process import ProcessReader
from otel_ddp.agent.node.process.process_stat import read_process_stat
from otel_ddp.agent.node.reading import Reading
from otel_ddp.agent.node.sampler import Sampler
from otel_ddp.agent.reading.rank import Rank

_GPU_S, _HOST_S, _PROCESS_S, _FILE_SYSTEMS_S = 1.0, 5.0, 2.0, 30.0
# What is older than so many periods is told no longer: absent, rather than of another time.
_FRESH_PERIODS = 3
_STOP_S = 0.5


class _Taken(NamedTuple):
    """What one source has found, and how much it had to leave out so far."""

    readings: list[Reading]
    errors: int


class _Looked(NamedTuple):
    """The processes at one moment, by pid and start."""

    readings: dict[tuple[int, int], list[Reading]]
    missed: list[str]
    """Ranks that could not be read."""
    errors: int


class Sampling:
    """One a node. Each source has a thread of its own; `stand` waits for none of them."""

    def __init__(
        self,
        ledger: Ledger,
        node: str,
        sources: Collection[str],
        driver: Callable[[], Driver],
        proc: Path = Path("/proc"),
    ) -> None:
        self._ledger = ledger
        self._node = node
        self._proc = proc
        self._ranks: tuple[Rank, ...] = ()
        self._pids: Collection[int] = ()
        self._started_ns = time.time_ns()
        # What is told now.
        self._told: set[Series] = set()
        self._driver = driver() if "gpu" in sources else None
        self._gpus: Sampler[GpuSample] | None = None
        self._host: Sampler[_Taken] | None = None
        self._file_systems: Sampler[_Taken] | None = None
        self._processes: Sampler[_Looked] | None = None
        if self._driver is not None:
            gpus = Gpus(self._driver)
            self._gpus = Sampler("gpu", lambda: gpus.read(time.monotonic_ns()), _GPU_S)
        if "host" in sources:
            host = Host(proc, whose=self._whose_limits)
            self._host = Sampler("host", _reader(host), _HOST_S)
            # By itself: a file server that does not answer takes the other file systems along, and
            # nothing else.
            self._files = KernelFiles()
            reader = _reader(FileSystems(self._directories))
            self._file_systems = Sampler("file_systems", reader, _FILE_SYSTEMS_S)
        if "process" in sources:
            self._processes = Sampler("process", self._process_reader(), _PROCESS_S)
        self._owned = Ownership({}, [], [])

    def _samplers(self) -> list[tuple[Sampler[Any], float]]:
        every = (
            (self._gpus, _GPU_S),
            (self._host, _HOST_S),
            (self._file_systems, _FILE_SYSTEMS_S),
            (self._processes, _PROCESS_S),
        )
        return [(sampler, period_s) for sampler, period_s in every if sampler is not None]

    def start(self) -> None:
        """Begin to read all of them."""
        for sampler, _ in self._samplers():
            sampler.start()

    def stop(self) -> None:
        """Ask all to end; one that hangs is left behind."""
        for sampler, _ in self._samplers():
            sampler.stop(_STOP_S)

    # -- what the threads read

    def _process_reader(self) -> Callable[[], _Looked]:
        reader = ProcessReader(self._proc)

        def read() -> _Looked:
            ranks = self._ranks
            if ranks:
                reader.begin_round()
            found, missed = {}, []
            for rank in ranks:
                others = set(self._pids) - {rank.pid}
                readings = reader.read(rank.pid, rank.start_ticks, others) if rank.pid else None
                if readings is not None:
                    found[rank.pid, rank.start_ticks] = readings
                else:
                    missed.append(dict(rank.labels).get("rank", ""))
            return _Looked(found, missed, reader.errors)

        return read

    def _whose_limits(self) -> Collection[int | str]:
        """The processes whose cgroups are what the node is for us: ours may be a service's."""
        return [each.pid for each in self._ranks if each.pid] or ["self"]

    def _directories(self) -> Iterator[Path]:
        """Where the ranks work."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                stat = read_process_stat(self._files, str(self._proc), rank.pid)
                # The number may be another process's by now.
                if stat is not None and stat.start == rank.start_ticks:
                    yield Path(os.readlink(self._proc / str(rank.pid) / "cwd"))

    # -- standing

    @containment.contained()
    def stand(self, ranks: Sequence[Rank], pids: Collection[int], now_ns: int) -> None:
        """Bring the series up to date. The caller holds the ledger's lock.

        *pids*: of all training processes, which are nobody's workers.
        """
        self._ranks, self._pids = tuple(ranks), pids
        told: set[Series] = set()
        for labels, reading, taken_ns in self._all():
            series = self._ledger.series(reading.metric, labels + reading.attributes)
            series.value, series.time_ns = reading.value, taken_ns
            series.start_ns = reading.start_ns
            told.add(series)
        for series in self._told - told:
            self._ledger.forget(series)
        self._told = told
        for sampler, _ in self._samplers():
            self._put_about(sampler, now_ns)

    def _put_about(self, sampler: Sampler[Any], now_ns: int) -> None:
        labels = (("node", self._node), ("source", sampler.name))
        latest = sampler.latest()
        errors = sampler.failures + (0 if latest is None else latest.value.errors)
        self._ledger.put(catalog.OTEL_DDP_SOURCE_AGE, labels, sampler.age_s(), now_ns)
        metric, began_ns = catalog.OTEL_DDP_SOURCE_ERRORS, self._started_ns
        self._ledger.put(metric, labels, float(errors), now_ns, began_ns)

    def _all(self) -> Iterator[tuple[Labels, Reading, int]]:
        around = self._around()
        for sampler in (self._host, self._file_systems):
            found, taken_ns = _fresh(sampler, _HOST_S if sampler is self._host else _FILE_SYSTEMS_S)
            for reading in () if found is None else found.readings:
                yield around, reading, taken_ns
        looked, taken_ns = _fresh(self._processes, _PROCESS_S)
        if looked is not None:
            for rank in self._newest():
                for reading in looked.readings.get((rank.pid, rank.start_ticks), ()):
                    yield rank.labels, reading, taken_ns
        yield from self._of_gpus()

    def _of_gpus(self) -> Iterator[tuple[Labels, Reading, int]]:
        sample, taken_ns = _fresh(self._gpus, _GPU_S)
        if sample is None or self._driver is None:
            self._owned = Ownership({}, [], [])
            return
        claims = [self._claim(rank) for rank in self._ranks]
        self._owned = owners(claims, sample.devices, self._driver.visible, self._node)
        for each in sample.devices:
            for reading in each.readings:
                yield self._owned.labels[each.device.uuid], reading, taken_ns
        for held in self._owned.memory:
            metric = catalog.GPU_PROCESS_MEMORY_USAGE
            reading = Reading(metric, float(held.used_bytes), identity(held.device))
            yield held.labels, reading, taken_ns

    def _newest(self) -> Iterable[Rank]:
        """Of two processes with one name the one that was started last."""
        by_labels: dict[Labels, Rank] = {}
        for rank in sorted(self._ranks, key=lambda each: each.start_ticks):
            by_labels[rank.labels] = rank
        return by_labels.values()

    def _around(self) -> Labels:
        """The labels of what belongs to the whole node: those of the run that has it alone."""
        runs = {
            tuple(pair for pair in rank.labels if pair[0] in catalog.NODE_LABELS)
            for rank in self._ranks
        }
        return runs.pop() if len(runs) == 1 else (("node", self._node),)

    def _claim(self, rank: Rank) -> Claim:
        said = rank.facts.get("boards")
        boards = said if isinstance(said, list) else []
        boards = [each for each in boards if isinstance(each, dict)]
        uuids = tuple(uuid for each in boards if isinstance(uuid := each.get("uuid"), str) and uuid)
        visible = rank.facts.get("visible")
        index = boards[0].get("index") if len(boards) == 1 else None
        return Claim(
            rank.labels,
            rank.pid,
            uuids,
            visible if isinstance(visible, dict) else None,
            index if isinstance(index, int) else None,
        )

    # -- what is said of it

    def describe(self) -> dict[str, Any]:
        """What `otel-ddp status` shows of the node's devices."""
        sample, _ = _fresh(self._gpus, _GPU_S)
        if sample is None:
            hung = self._gpus is not None and self._gpus.age_s() > _FRESH_PERIODS * _GPU_S
            said = "the GPU driver does not answer" if hung else ""
            remarks = [said] if said else []
            return {"gpus": [], "gpu_remarks": remarks, "gpu_driver": "", "unseen": self._unseen()}
        return {
            "unseen": self._unseen(),
            "gpus": self.gpus(),
            "gpu_remarks": [*filter(None, [sample.remark]), *self._owned.remarks],
            "gpu_driver": sample.version,
        }

    def _unseen(self) -> list[str]:
        """Ranks whose processes we cannot read, as of the last time that we tried."""
        looked, _ = _fresh(self._processes, _PROCESS_S)
        return [] if looked is None else list(looked.missed)

    def gpus(self) -> list[dict[str, Any]]:
        """The devices as they are known now."""
        sample, _ = _fresh(self._gpus, _GPU_S)
        return [] if sample is None else [self._described(each) for each in sample.devices]

    def _described(self, each: DeviceSample) -> dict[str, Any]:
        said: dict[str, Any] = {
            "index": each.device.index,
            "name": each.device.name,
            "uuid": each.device.uuid,
            "parent": each.device.parent,
            "labels": dict(self._owned.labels.get(each.device.uuid, ())),
            "processes": len(each.users),
            "throttled": [],
        }
        known = len(identity(each.device))
        for reading in each.readings:
            kind = "".join(value for _, value in reading.attributes[known:])
            if reading.metric is catalog.GPU_THROTTLE_ACTIVE:
                if reading.value:
                    said["throttled"].append(kind)
            elif (key := _SHOWN.get((reading.metric, kind))) is not None:
                said[key] = reading.value
        return said


# By metric, and by what tells its series of one device apart.
_SHOWN: dict[tuple[catalog.Metric, str], str] = {
    (catalog.HW_GPU_UTILIZATION, "general"): "busy_ratio",
    (catalog.HW_GPU_MEMORY_USAGE, ""): "used_bytes",
    (catalog.HW_GPU_MEMORY_LIMIT, ""): "limit_bytes",
    (catalog.HW_POWER, ""): "power_w",
    (catalog.GPU_POWER_LIMIT, ""): "power_limit_w",
    (catalog.HW_TEMPERATURE, "core"): "temperature_c",
    (catalog.GPU_CLOCK_FREQUENCY, "sm"): "sm_clock_hz",
}


def _reader(source: Host | FileSystems) -> Callable[[], _Taken]:
    return lambda: _Taken(source.read(), source.errors)


def _fresh(sampler: Sampler[Any] | None, period_s: float) -> tuple[Any, int]:
    latest = None if sampler is None else sampler.latest()
    if latest is None or latest.age_s > _FRESH_PERIODS * period_s:
        return None, 0
    return latest.value, latest.taken_ns
