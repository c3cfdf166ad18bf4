"""A run of two ranks on one node, with the agent beside it."""

from __future__ import annotations

import os
from pathlib import Path

from node import Node, until
from trainings import PROGRAM


def listened_on(pid: int) -> list[str]:
    """The local ends on which a process listens, as the kernel writes them."""
    inodes = {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()}
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]


def test_the_agent_of_a_run_on_one_node_opens_no_port_for_others_and_loads_nothing_for_it(
    tmp_path: Path,
) -> None:
    with Node() as node:
        node.torchrun(2, str(PROGRAM), str(tmp_path))
        pid = int(node.agent()["pid"])
        until(lambda: len(node.series("training_scalar", name="samples")) == 2, "both ranks")

        ends = listened_on(pid)
        loaded = Path(f"/proc/{pid}/maps").read_text()

    # Its endpoint, on 127.0.0.1.
    assert [end.partition(":")[0] for end in ends] == ["0100007F"]
    assert "cygrpc" not in loaded
    assert "cryptography" not in loaded
