"""Reads the traffic of the network interfaces that lead out of the node."""

from __future__ import annotations

import os
from pathlib import Path

from otel_ddp import catalog
from otel_ddp.agent.node.kernel_files import KernelFiles, number
from otel_ddp.agent.node.measurement import Measurement

_MOST_INTERFACES = 32
# Names of interfaces that never lead out of a node.
_INNER = (
    *("lo", "veth", "docker", "br", "cni", "flannel", "cali", "virbr", "tun", "tap", "ifb"),
    *("dummy", "vnet", "vxlan", "wg", "sit", "ip6", "gre", "erspan", "ip_vti", "podman", "lxc"),
    *("lxdbr", "cilium", "weave", "kube", "nodelocaldns", "ovs", "genev", "azv", "bond", "team"),
)


class Network:
    """Interfaces with hardware behind them; in a container, which has none, its way out."""

    def __init__(
        self, files: KernelFiles, *, proc: Path = Path("/proc"), sys: Path = Path("/sys")
    ) -> None:
        self._files = files
        self._path = f"{proc}/net/dev"
        self._interfaces = f"{sys}/class/net"
        self._seen: tuple[str, ...] = ()
        self._chosen: frozenset[str] = frozenset()

    def read(self, boot_ns: int) -> list[Measurement]:
        rows: dict[str, list[str]] = {}
        for line in (self._files.text(self._path) or "").splitlines():
            name, colon, counts = line.rpartition(":")
            if colon:
                rows[name.strip()] = counts.split()
        names = tuple(rows)
        if names != self._seen:
            self._seen, self._chosen = names, self._choose(names)
        measurements: list[Measurement] = []
        for name, words in rows.items():
            if name in self._chosen:
                measurements += self._of_one(name, words, boot_ns)
        return measurements

    def _of_one(self, name: str, words: list[str], boot_ns: int) -> list[Measurement]:
        measurements = []
        for metric, direction, column in (
            (catalog.SYSTEM_NETWORK_IO, "receive", 0),
            (catalog.SYSTEM_NETWORK_IO, "transmit", 8),
            (catalog.SYSTEM_NETWORK_ERRORS, "receive", 2),
            (catalog.SYSTEM_NETWORK_ERRORS, "transmit", 10),
        ):
            value = number(words[column]) if len(words) > column else None
            if value is None:
                self._files.leave_out(f"{self._path}, {name}", f"{metric.name} is no number")
                continue
            attributes = (("network.interface.name", name), ("network.io.direction", direction))
            measurements.append(Measurement(metric, value, attributes, boot_ns))
        return measurements

    def _choose(self, names: tuple[str, ...]) -> frozenset[str]:
        real = [name for name in names if self._is_real(name)]
        # A container has its own interface, alone or beside devices that were passed to it.
        ways_out = [name for name in names if name not in real and self._is_way_out(name)]
        real += ways_out if not real else [name for name in ways_out if name == "eth0"]
        if len(real) > _MOST_INTERFACES:
            self._files.leave_out(
                self._path, f"only {_MOST_INTERFACES} of {len(real)} interfaces are measured"
            )
        return frozenset(real[:_MOST_INTERFACES])

    def _is_real(self, name: str) -> bool:
        folder = f"{self._interfaces}/{name}"
        if not os.path.exists(f"{folder}/device"):
            return False  # a bond, a bridge or a VLAN: the devices below them are counted
        # Clouds put a second device below one that counts for both (Azure, virtio failover).
        if os.path.exists(f"{folder}/master/device"):
            return False
        # A switch in a network card shows a representor for each of its virtual functions.
        port = self._files.text(f"{folder}/phys_port_name") or ""
        return "vf" not in port and "sf" not in port

    def _is_way_out(self, name: str) -> bool:
        if name.startswith(_INNER) or os.path.exists(f"{self._interfaces}/{name}/device"):
            return False
        # Bridges, bonds, VLANs and tunnels have a DEVTYPE; a container's own interface has none.
        return "DEVTYPE=" not in (self._files.text(f"{self._interfaces}/{name}/uevent") or "")
