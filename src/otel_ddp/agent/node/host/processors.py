"""Reads how the processors of the node or the container spent their time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

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

SpentS = dict[str, float]
"""Seconds by mode."""


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
        self._path = f"{proc}/stat"
        self._clock = clock
        # The cgroup, the moment, and what was spent by then.
        self._before: tuple[str, float, SpentS] | None = None

    def read(self, share: ProcessorShare | None, online: int) -> list[Measurement]:
        now_s, cgroup = self._clock(), share.path if share else ""
        spent_s = self._spent_in(share) if share else self._spent_on_node()
        if not spent_s:
            return []
        before, self._before = self._before, (cgroup, now_s, spent_s)
        if before is None or before[0] != cgroup:
            return []
        passed_s = {mode: value - before[2][mode] for mode, value in spent_s.items()}
        for mode in _UNSTEADY:
            passed_s[mode] = max(passed_s.get(mode, 0.0), 0.0)
        if min(passed_s.values()) < 0:
            self._files.leave_out(cgroup or self._path, "time has gone back")
            return []
        if share:
            self._add_idle(passed_s, now_s - before[1], share.cores, online)
        total_s = sum(passed_s.values())
        metric = catalog.SYSTEM_CPU_UTILIZATION
        return [
            Measurement(metric, value / total_s, (("cpu.mode", mode),))
            for mode, value in passed_s.items()
            if total_s > 0
        ]

    def _add_idle(self, passed_s: SpentS, since_s: float, cores: float, online: int) -> None:
        """Add the idle time of a cgroup's cores; leave nothing if that cannot be."""
        used_s = passed_s["user"] + passed_s["system"]
        if used_s > since_s * max(online, cores) * _TOLERANCE + _TOLERANCE_S:
            self._files.leave_out("cgroup", "more processor time than there was")
            passed_s.clear()
        elif since_s > 0:
            # Quotas come in slices and can be saved up: usage may exceed them for a moment.
            passed_s["idle"] = max(since_s * cores - used_s, 0.0)
            del passed_s["iowait"]
        else:
            passed_s.clear()

    def _spent_in(self, share: ProcessorShare) -> SpentS | None:
        if share.version == 1:
            path, suffix, per_s = f"{share.path}/cpuacct.stat", "", _TICKS_PER_S
        else:
            path, suffix, per_s = f"{share.path}/cpu.stat", "_usec", 1_000_000
        found = self._files.numbers(path, (f"user{suffix}", f"system{suffix}"))
        spent_s = {name.removesuffix(suffix): value / per_s for name, value in found.items()}
        return spent_s if len(spent_s) == 2 else None

    def _spent_on_node(self) -> SpentS | None:
        text = self._files.text(self._path)
        if text is None:
            return None
        name, *words = text.partition("\n")[0].split() or [""]
        ticks = [number(word) for word in words[: len(_MODES)]]
        spent_s = dict.fromkeys(_MODES, 0.0)
        for mode, value in zip(_MODES, ticks, strict=False):
            spent_s[mode] += (value or 0) / _TICKS_PER_S
        if name != "cpu" or len(ticks) < len(_MODES) or None in ticks:
            self._files.leave_out(self._path, "it does not begin with the times of all processors")
            return None
        return spent_s
