"""Cables on which a packet takes its time, between a switch and some nodes.

    python -S cable.py SECONDS SWITCH NODE NODE ...

SWITCH and NODE are processes in the networks of these. A node's end is its eth0, the switch's ends
are cable0, cable1 and so on. The kernel's own means, netem, is in few kernels of small machines. It
says `ready`, and ends when its input does.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import selectors
import struct
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import namespaces

_TUNSETIFF = 0x400454CA
_TAP, _NO_HEADER = 0x0002, 0x1000
_PACKET_BYTES = 1 << 16


def device(name: str, pid: int) -> int:
    """A new network device of that network; what is read from it was sent there."""
    namespaces.enter(pid)
    opened = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(opened, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP | _NO_HEADER))
    return opened


def main(seconds: float, switch: int, nodes: list[int]) -> None:
    other_end: dict[int, int] = {}
    for number, node in enumerate(nodes):
        ends = device("eth0", node), device(f"cable{number}", switch)
        other_end.update([ends, ends[::-1]])
    selector = selectors.DefaultSelector()
    for each in (0, *other_end):
        selector.register(each, selectors.EVENT_READ)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    # All take the same time, so the first one that came in is the first one that is due.
    under_way: collections.deque[tuple[float, int, bytes]] = collections.deque()
    while True:
        left_s = under_way[0][0] - time.monotonic() if under_way else None
        for key, _ in selector.select(left_s):
            if key.fd == 0:
                return
            packet = os.read(key.fd, _PACKET_BYTES)
            under_way.append((time.monotonic() + seconds, other_end[key.fd], packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, end, packet = under_way.popleft()
            # Its device may be down, or full: a packet may be lost.
            with contextlib.suppress(OSError):
                os.write(end, packet)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), [int(each) for each in sys.argv[3:]])
