"""Real ranks of tests/training.py, two on each node, started as torchrun would start them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tools.stack.server import free_port

from node import Node, finished, until

RANKS_PER_NODE = 2
PROGRAM = Path(__file__).with_name("training.py")
# Of all ranks, between the order to stop and the last step: each sees it in time.
_NOTICE = 30


def as_launched(rank: int, world: int, on_each_node: int) -> dict[str, str]:
    """What torchrun tells a rank."""
    node, local_rank = divmod(rank, on_each_node)
    found = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "GROUP_RANK": node,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": on_each_node,
        "GROUP_WORLD_SIZE": world // on_each_node,
    }
    return {name: str(value) for name, value in found.items()}


class Training:
    """One run on these nodes, until `end`."""

    def __init__(self, folder: Path, nodes: Sequence[Node]) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.nodes = folder, nodes
        self.world = RANKS_PER_NODE * len(nodes)

    def start(self, *options: str, **env: str) -> None:
        """*env*: further variables of all ranks."""
        port = str(free_port())
        for rank in range(self.world):
            launched = as_launched(rank, self.world, RANKS_PER_NODE)
            said = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **launched, **env}
            program = str(PROGRAM), str(self.folder), *options
            self.nodes[rank // RANKS_PER_NODE].warm(*program, env=said)

    def trouble(self, rank: int, what: str) -> None:
        """From its next step on: "backward 0.02" or "hang"."""
        self._write(f"trouble-{rank}", what)

    def _write(self, name: str, content: str) -> None:
        new = self.folder / f"{name}.new"
        new.write_text(content)
        new.rename(new.with_suffix(""))

    def steps(self) -> dict[int, int]:
        """By rank, how many steps it has made, from the journals that are there."""
        found = [each for node in self.nodes for each in node.processes()]
        return {each["rank"]: each["step"] or 0 for each in found if each["rank"] is not None}

    def until_step(self, step: int) -> None:
        """Until all ranks have made so many."""

        def made() -> bool:
            steps = self.steps()
            return len(steps) == self.world and min(steps.values()) >= step

        until(made, f"step {step} of all ranks")

    def goes_on(self, steps: int) -> None:
        """Until all ranks have made so many more."""
        self.until_step(max(self.steps().values()) + steps)

    def end(self) -> int:
        """Let all ranks end soon, and see that they end well; their last step."""
        last = max(self.steps().values()) + _NOTICE
        self._write("stops_at", str(last))
        for process in [each for node in self.nodes for each in node.started]:
            finished(process)
        return last
