"""A node on disk: what the kernel shows of it under /proc, /sys and the trees of cgroups."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import conventions
from otel_ddp.agent.node.host import Host
from otel_ddp.agent.node.source import Measurement
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.catalog import Metric

BOOT_S = 1_700_000_000
_NO_INTERFACE = "Inter-| Receive | Transmit\n face |bytes packets\n"
GIB = 1 << 30


class NodeTree:
    """A bare machine with 64 GiB; tests put in what theirs has besides."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.proc, self.sys = root / "proc", root / "sys"
        self.pids: list[int] = []
        """The ranks that run here."""
        self.processors()
        self.memory()
        self.write("proc/self/cgroup", "")
        self.write("proc/self/mountinfo", "22 27 0:21 / /proc rw - proc proc rw\n")
        self._interfaces: dict[str, str] = {}
        self._write_interfaces()

    def host(self) -> Host:
        return Host(
            self.proc,
            sys=self.sys,
            root=self.root,
            boot_ns=lambda: BOOT_S * 1_000_000_000,
            pids=lambda: self.pids or ["self"],
        )

    def write(self, path: str, content: str) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        return file

    def add(self, path: str, line: str) -> None:
        with (self.root / path).open("a") as file:
            file.write(line)

    # -- processors and memory

    def processors(self, **changed: int) -> None:
        """In ticks since the machine was started."""
        modes = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal", "guest")
        assert not changed.keys() - set(modes)
        ticks = " ".join(str(changed.get(mode, 0)) for mode in modes)
        self.write("proc/stat", f"cpu  {ticks} 0\ncpu0 1 2 3 4 5 6 7 8 9 10\nintr 1 2 3\n")

    def memory(self) -> None:
        """In KiB."""
        lines = {
            "MemTotal": 64 << 20,
            "MemFree": 40 << 20,
            "MemAvailable": 50 << 20,
            "Buffers": 1 << 20,
            "Cached": 12 << 20,
            "Shmem": 3 << 20,
            "SReclaimable": 2 << 20,
        }
        self.write("proc/meminfo", "".join(f"{name}:  {size} kB\n" for name, size in lines.items()))

    # -- cgroups

    def version_2(self, path: str, *, top: str = "/") -> None:
        """One tree for all controllers, of which *top* is mounted."""
        mount = f"31 23 0:28 {top} /sys/fs/cgroup rw - cgroup2 none rw,nsdelegate\n"
        self.add("proc/self/mountinfo", mount)
        self.add("proc/self/cgroup", f"0::{path}\n")

    def group(self, path: str, files: dict[str, str]) -> None:
        """Files of one cgroup, below where cgroups are mounted."""
        for name, content in files.items():
            self.write(f"sys/fs/cgroup{path}/{name}", f"{content}\n")

    # -- devices

    def disks(self, read_kib: int, written_kib: int) -> None:
        self.write("proc/vmstat", f"nr_free_pages 7\npgpgin {read_kib}\npgpgout {written_kib}\n")

    def _write_interfaces(self) -> None:
        self.write("proc/net/dev", _NO_INTERFACE + "".join(self._interfaces.values()))

    def interface(
        self,
        name: str,
        *,
        counts: tuple[int, int] = (0, 0),
        device: bool = False,
        master: str = "",
    ) -> None:
        """Bytes received and sent; the same name again is the same interface later."""
        received, sent = counts
        self._interfaces[name] = f"{name:>6}: {received} 7 7 7 7 7 7 7 {sent} 7 7 7 7 7 7 7\n"
        self._write_interfaces()
        folder = self.sys / "class/net" / name
        folder.mkdir(parents=True, exist_ok=True)
        if device:
            (folder / "device").mkdir(exist_ok=True)
        if master and not (folder / "master").is_symlink():
            (folder / "master").symlink_to(f"../{master}")

    def port(self, card: str, port: int, *, received: str, sent: str) -> None:
        """An InfiniBand port, in the kernel's words of four bytes."""
        counters = f"sys/class/infiniband/{card}/ports/{port}/counters"
        self.write(f"{counters}/port_rcv_data", f"{received}\n")
        self.write(f"{counters}/port_xmit_data", f"{sent}\n")

    # -- processes

    def process(
        self,
        pid: int,
        *,
        parent: int = 1,
        name: str = "python",
        state: str = "S",
        start: int | str = 5000,
        times: tuple[int, int, int, int] = (0, 0, 0, 0),
        pages: int | str = 100,
    ) -> None:
        """Times are in ticks: user and system, then those of children that were waited for."""
        before = " ".join(["7"] * 9)
        counts = " ".join(map(str, times))
        self.write(
            f"proc/{pid}/stat",
            f"{pid} ({name}) {state} {parent} {before} {counts} 20 0 1 0 {start} 7 {pages} 7 7 7\n",
        )

    def ends(self, pid: int) -> None:
        shutil.rmtree(self.proc / str(pid))


def rows(section: str) -> set[str]:
    """The metrics of a section of the catalogue."""
    return {metric.name for metric in catalog.METRICS if metric.section == section}


def shown(measurements: Iterable[Measurement]) -> list[str]:
    """A line each."""
    return sorted(
        " ".join([each.metric.name, *(value for _, value in each.attributes), f"{each.value:.10g}"])
        for each in measurements
    )


def values(measurements: Iterable[Measurement], metric: Metric) -> dict[str, float]:
    """What was read of one metric, by the values of its attributes."""
    found: dict[str, float] = {}
    for measurement in measurements:
        if measurement.metric is metric:
            assert metric.attributes == tuple(name for name, _ in measurement.attributes)
            for name, value in measurement.attributes:
                assert value in conventions.values().get(name, {value})
            key = " ".join(value for _, value in measurement.attributes)
            assert key not in found
            found[key] = measurement.value
    return found
