"""Reads how the processors of the node or the container spent their time, and the load."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from otel_ddp import catalog
from otel_ddp.agent.node.host.limits import ProcessorShare
from otel_ddp.agent.node.kernel_files import KernelFiles, number
from otel_ddp.agent.node.measurement import Measurement

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# In the order of /proc/stat; `user` and `nice` include the time of guests.
_MODES = ("user", "nice", "system", "idle", "iowait", "interrupt", "interrupt", "steal")
# By the kernel's manual these two may go back a little; the others never do.
_UNSTEADY = ("idle", "iowait")
# Clocks and the kernel's accounting differ by up to this.
_TOLERANCE_S = 0.1
_TOLERANCE = 1.1


class ProcessorTimes(NamedTuple):
    """The contents of /proc/stat."""

    spent_s: dict[str, float] | None
    online: int
    boot_ns: int
    """When the machine was started, in nanoseconds since 1970; 0 if unknown."""


class _Spent(NamedTuple):
    cgroup: str
    at_s: float
    spent_s: dict[str, float]


class Processors:
    """Shares of the time since the last read; the first one returns none."""

    def __init__(
        self,
        files: KernelFiles,
        *,
        proc: Path = Path("/proc"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = files
        self._proc = proc
        self._clock = clock
        self._before: _Spent | None = None

    def read(self, times: ProcessorTimes, share: ProcessorShare | None) -> list[Measurement]:
        measurements = self._load()
        now_s = self._clock()
        cgroup = share.path if share else ""
        spent_s = self._spent_in(share) if share else times.spent_s
        if spent_s is None:
            return measurements
        before, self._before = self._before, _Spent(cgroup, now_s, spent_s)
        if before is None or before.cgroup != cgroup:
            return measurements
        passed_s = {mode: value - before.spent_s[mode] for mode, value in spent_s.items()}
        for mode in _UNSTEADY:
            passed_s[mode] = max(passed_s.get(mode, 0.0), 0.0)
        if min(passed_s.values()) < 0:
            self._files.leave_out(cgroup or f"{self._proc}/stat", "time has gone back")
            return measurements
        if share:
            total_s = self._rest(passed_s, now_s - before.at_s, share.cores, times.online)
        else:
            total_s = sum(passed_s.values())
        if total_s <= 0:
            return measurements
        for mode, value in passed_s.items():
            attributes = (("cpu.mode", mode),)
            measurements.append(
                Measurement(catalog.SYSTEM_CPU_UTILIZATION, value / total_s, attributes)
            )
        return measurements

    def _rest(self, passed_s: dict[str, float], since_s: float, cores: float, online: int) -> float:
        """Add the idle time of a cgroup's cores to *passed_s*; return the total time."""
        if since_s <= 0:
            return 0.0
        used_s = passed_s["user"] + passed_s["system"]
        if used_s > since_s * max(online, cores) * _TOLERANCE + _TOLERANCE_S:
            self._files.leave_out("cgroup", "more processor time than there was")
            return 0.0
        # Quotas come in slices and can be saved up: usage may exceed them for a moment.
        passed_s["idle"] = max(since_s * cores - used_s, 0.0)
        del passed_s["iowait"]
        return used_s + passed_s["idle"]

    def _spent_in(self, share: ProcessorShare) -> dict[str, float] | None:
        if share.version == 1:
            found = self._files.numbers(f"{share.path}/cpuacct.stat", ("user", "system"))
            spent_s = {mode: ticks / _TICKS_PER_S for mode, ticks in found.items()}
        else:
            found = self._files.numbers(f"{share.path}/cpu.stat", ("user_usec", "system_usec"))
            spent_s = {mode.removesuffix("_usec"): us / 1e6 for mode, us in found.items()}
        return spent_s if len(spent_s) == 2 else None

    def _load(self) -> list[Measurement]:
        path = f"{self._proc}/loadavg"
        text = self._files.text(path)
        if text is None:
            return []
        whole, _, part = text.partition(" ")[0].partition(".")
        if number(whole) is None or number(part) is None:
            self._files.leave_out(path, "it does not begin with a number")
            return []
        return [Measurement(catalog.OTEL_DDP_HOST_LOAD_AVERAGE_1M, float(f"{whole}.{part}"))]


def read_processor_times(files: KernelFiles, proc: Path) -> ProcessorTimes:
    """Everything that others need of /proc/stat as well: it is the dearest file to read."""
    path = f"{proc}/stat"
    text = files.text(path)
    if text is None:
        return ProcessorTimes(None, 0, 0)
    lines = text.splitlines()
    spent_s = _spent_s(lines[0]) if lines else None
    if spent_s is None:
        files.leave_out(path, "it does not begin with the times of all processors")
    online = sum(line.startswith("cpu") and line[3:4].isdigit() for line in lines)
    boot_s = next((number(line[6:]) for line in lines if line.startswith("btime ")), None)
    if boot_s is None:
        files.leave_out(path, "it does not say when the machine was started")
    return ProcessorTimes(spent_s, online, (boot_s or 0) * 1_000_000_000)


def _spent_s(line: str) -> dict[str, float] | None:
    name, _, rest = line.partition(" ")
    words = rest.split()
    if name != "cpu" or len(words) < len(_MODES):
        return None
    spent_s = dict.fromkeys(_MODES, 0.0)
    for mode, word in zip(_MODES, words, strict=False):
        ticks = number(word)
        if ticks is None:
            return None
        spent_s[mode] += ticks / _TICKS_PER_S
    return spent_s
