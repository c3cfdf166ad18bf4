"""Reads the traffic of the node's InfiniBand ports, including RDMA."""

from __future__ import annotations

from pathlib import Path

from otel_ddp import catalog
from otel_ddp.agent.node.kernel_files import KernelFiles, number
from otel_ddp.agent.node.measurement import Measurement

_MOST_PORTS = 32
_WORD_BYTES = 4
# Old cards count in 32 bits and stop there: such a counter is useless from then on.
_STUCK = 0xFFFFFFFF


class Infiniband:
    """Also ports on Ethernet (RoCE): a network interface does not count RDMA traffic."""

    def __init__(self, files: KernelFiles, *, sys: Path = Path("/sys")) -> None:
        self._files = files
        self._folder = f"{sys}/class/infiniband"
        self._seen: list[str] = []
        self._ports: list[tuple[str, str]] = []

    def read(self, boot_ns: int) -> list[Measurement]:
        cards = sorted(self._files.names(self._folder))
        if cards != self._seen:
            self._seen, self._ports = cards, self._choose(cards)
        measurements = []
        for identity, folder in self._ports:
            for direction, name in (("receive", "port_rcv_data"), ("transmit", "port_xmit_data")):
                words = self._count(f"{folder}/{name}")
                if words is not None:
                    attributes = (
                        *(("hw.id", identity), ("hw.type", "network")),
                        ("network.io.direction", direction),
                    )
                    moved_bytes = words * _WORD_BYTES
                    measurements.append(
                        Measurement(catalog.HW_NETWORK_IO, moved_bytes, attributes, boot_ns)
                    )
        return measurements

    def _choose(self, cards: list[str]) -> list[tuple[str, str]]:
        ports = [
            (f"{card}:{port}", f"{self._folder}/{card}/ports/{port}/counters")
            for card in cards
            for port in sorted(self._files.names(f"{self._folder}/{card}/ports"))
        ]
        if len(ports) > _MOST_PORTS:
            self._files.leave_out(
                self._folder, f"only {_MOST_PORTS} of {len(ports)} ports are measured"
            )
        return ports[:_MOST_PORTS]

    def _count(self, path: str) -> int | None:
        text = self._files.text(path)
        if text is None:
            return None
        words = number(text.strip())
        if words is None or words == _STUCK:
            self._files.leave_out(path, f"{text.strip()[:50]!r} is no count")
            return None
        return words
