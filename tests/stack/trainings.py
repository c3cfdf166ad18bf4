"""Trainings for the real servers: ranks on several nodes, and what each of them knows it logged."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from subprocess import Popen
from typing import NamedTuple

from node import Node, finished, until
from stack.servers import Prometheus

RANKS_PER_NODE = 2

# Steps until the test has seen enough. Beside the journal each rank writes a file of its own: every
# value with its step, and the time before and after the call that logged it.
_TRAIN = """
import json, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import otel_ddp
from training import Stop

folder = sys.argv[1]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world)


def steps():
    stop, step, last = Stop(Path(folder), "run"), 0, False
    while not last:
        step += 1
        last = stop.after(step)
        time.sleep(0.1)
        yield step, torch.ones(4, 4)


model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run = otel_ddp.instrument(model)
with open(f"{folder}/{rank}.jsonl", "w", buffering=1) as known:
    for step, batch in otel_ddp.data(steps()):
        model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        values = {"loss": 1.0 / step + rank, "rate": 0.01}
        before = time.time_ns()
        run.log(values, step=step)
        after = time.time_ns()
        for name, value in values.items():
            print(json.dumps([name, value, step, before, after]), file=known)
run.finish()
dist.destroy_process_group()
"""


class Known(NamedTuple):
    """One value, as the rank that logged it knows it."""

    name: str
    value: float
    step: int
    before_ns: int
    after_ns: int


class Point(NamedTuple):
    """One value, as Prometheus has it."""

    time_ms: int
    value: float


class Training:
    """One run; `labels` are those of its ranks, by rank."""

    def __init__(self, folder: Path, nodes: Mapping[str, Node]) -> None:
        folder.mkdir()
        self._folder, self._nodes = folder, nodes
        self.labels = {
            rank: {
                "group": "g",
                "run": "r",
                "job_type": "train",
                "node": node,
                "rank": str(rank),
                "local_rank": str(rank % RANKS_PER_NODE),
            }
            for rank, node in enumerate(name for name in nodes for _ in range(RANKS_PER_NODE))
        }
        self._processes: list[Popen[str]] = []

    def train(self) -> None:
        """Real ranks, until `end`."""
        script = self._folder / "train.py"
        script.write_text(_TRAIN)
        for rank, labels in self.labels.items():
            env = {
                "RANK": str(rank),
                "LOCAL_RANK": labels["local_rank"],
                "WORLD_SIZE": str(len(self.labels)),
                "LOCAL_WORLD_SIZE": str(RANKS_PER_NODE),
                "GLOO_SOCKET_IFNAME": "lo",
                "OTEL_DDP_GROUP": labels["group"],
                "OTEL_DDP_RUN": labels["run"],
                "PYTHONPATH": str(Path(__file__).parents[1]),
            }
            self._processes.append(
                self._nodes[labels["node"]].warm(str(script), str(self._folder), env=env)
            )

    def known(self, rank: int) -> list[Known]:
        """All that a rank has logged by now."""
        return [Known(*json.loads(line)) for line in self._lines(rank)]

    def _last(self, rank: int) -> Known:
        """Before the first step there is nothing: then step 0 of no time."""
        lines = self._lines(rank)
        return Known(*json.loads(lines[-1])) if lines else Known("", 0.0, 0, 0, 0)

    def _lines(self, rank: int) -> list[str]:
        """The whole lines of a rank's file."""
        path = self._folder / f"{rank}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [line for line in lines if line.endswith("\n")]

    def steps(self) -> int:
        """How many steps the slowest rank has made."""
        for process in self._processes:
            assert process.poll() in (None, 0), process.communicate()[0]
        return min(self._last(rank).step for rank in self.labels)

    def goes_on(self, steps: int) -> None:
        """Wait until all ranks have made so many steps more."""
        wanted = self.steps() + steps
        until(lambda: self.steps() >= wanted, f"step {wanted}")

    def goes_on_for(self, seconds: float) -> None:
        """Wait until what all ranks log reaches so far beyond what they have logged by now."""
        wanted_ns = self._logged_until_ns() + seconds * 1e9
        until(lambda: self._logged_until_ns() >= wanted_ns, "the training to go on")

    def _logged_until_ns(self) -> int:
        return min(self._last(rank).after_ns for rank in self.labels)

    def end(self) -> None:
        """Let it come to its end, and see that it was a good one."""
        (self._folder / "run.enough").touch()
        for process in self._processes:
            finished(process)

    def series(self) -> Iterator[tuple[dict[str, str], list[Known]]]:
        """The labels of each series, with all that was logged."""
        for rank, labels in self.labels.items():
            known = self.known(rank)
            for name in dict.fromkeys(each.name for each in known):
                yield {**labels, "name": name}, [each for each in known if each.name == name]


def selector(metric: str, labels: Mapping[str, str]) -> str:
    return metric + "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"


def points(prometheus: Prometheus, metric: str, labels: Mapping[str, str]) -> list[Point]:
    """What is stored of the one series with these labels, in the order of its times."""
    found = prometheus.raw(f"{selector(metric, labels)}[1h]")
    assert len(found) == 1, (metric, labels, [each.labels for each in found])
    return [Point(round(time_s * 1000), value) for time_s, value in found[0].points]


def wait_for(prometheus: Prometheus, training: Training) -> None:
    """Until Prometheus has as many values as the ranks have logged."""
    series = list(training.series())
    wanted = sum(len(known) for _, known in series)
    assert wanted
    # Without what the hooks log beside the script.
    names = "|".join({labels["name"] for labels, _ in series})
    counted = f'sum(count_over_time(training_scalar_step{{name=~"{names}"}}[1h]))'
    until(
        lambda: sum(each.value for each in prometheus.query(counted)) >= wanted, f"{wanted} values"
    )


def assert_all_there(prometheus: Prometheus, training: Training) -> None:
    """Every value once, with its own step, and with a time within the call that logged it."""
    for labels, known in training.series():
        values = points(prometheus, "training_scalar", labels)
        steps = points(prometheus, "training_scalar_step", labels)

        assert [each.value for each in known] == [each.value for each in values], labels
        assert [each.step for each in known] == [each.value for each in steps], labels
        assert [each.time_ms for each in values] == [each.time_ms for each in steps], labels
        # Prometheus counts in milliseconds.
        late = [
            (each, point)
            for each, point in zip(known, values, strict=True)
            if not each.before_ns // 10**6 <= point.time_ms <= each.after_ns // 10**6
        ]
        assert late == [], labels
