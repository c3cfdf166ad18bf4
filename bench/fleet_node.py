"""Records what one node exports: a real training of two ranks, with a real agent.

    python bench/fleet_node.py          writes bench/fleet_node.json

`bench/fleet.py` makes nodes of eight ranks and eight GPUs of it. The GPUs come from the stand-in
for NVIDIA's library that the tests use. What a training tells only where it runs on a GPU, and
ports that this machine has not, are added from the catalogue and marked as such.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from otel_ddp.vocabulary.words import RANK_LABELS

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from fleet import RECORDED, Row  # noqa: E402

from node import Node, until  # noqa: E402
from nvml_boards import GIB, SOURCE, Board, Boards, h100  # noqa: E402
from otel_ddp.vocabulary import catalog  # noqa: E402
from otlp_receiver import Point, Receiver  # noqa: E402

RANKS, GPUS = 2, 8
# What one rank alone tells, by the section of the catalogue.
ONCE = {"Run": "run", "Summary": "best", "Artifacts": "artifact"}
_EXPORT_S = 0.5
_WATCHED_S = 12.0

TRAINING = """
import os, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
import otel_ddp

torch.set_num_threads(1)
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", f"file://{sys.argv[1]}", rank=rank, world_size=2)
layers = nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 1)
model = DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(640, 32)), batch_size=32, num_workers=1)
run = otel_ddp.instrument(model, config={"lr": 0.01})
uuid = f"{rank:08x}-7a5b-4c3d-9e1f-0123456789ab"
run._records.recorder.documents.facts({"boards": [{"index": 0, "uuid": uuid}]})
step = 0
for epoch in range(1000):
    for (batch,) in loader:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        run.log({"loss": loss}, step=step)
        step += 1
        time.sleep(0.02)
    with run.phase("eval"), torch.no_grad():
        model.module(batch)
    with run.phase("checkpoint"):
        time.sleep(0.05)
    if rank == 0 and epoch == 0:
        run.artifact(sys.executable, name="model", type="model")
"""


def main() -> None:
    points_of, points_under_main = seen("all"), seen("main")
    rows = [*_rows(points_of, set(points_under_main)), *_only_elsewhere()]
    rows.sort(key=lambda row: (row.of, row.metric, sorted(row.attributes.items())))
    text = ",\n".join(json.dumps(row._asdict()) for row in rows)
    RECORDED.write_text(f"[\n{text}\n]\n")
    print(f"{len(rows)} series in {RECORDED.name}")


Key = tuple[str, tuple[tuple[str, str], ...]]


def seen(strategy: str) -> dict[Key, list[Point]]:
    """Everything that the agent of one node sends while two ranks train: each series' points."""
    folder = Path(tempfile.mkdtemp(prefix="fleet-node-"))
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, SOURCE], check=True)
    shown, boards = [h100(index) for index in range(GPUS)], Boards(folder)
    boards.write(shown)
    env = {**boards.environment(library), "OTEL_DDP_RUN": "r", "OTEL_DDP_GROUP": "g"}
    with Receiver() as collector, Node(**env, OTEL_DDP_STRATEGY=strategy) as node:
        node.export_to(collector.start_http())
        node.env["OTEL_METRIC_EXPORT_INTERVAL"] = str(int(_EXPORT_S * 1000))
        for rank in range(RANKS):
            process = node.start(
                *(sys.executable, "-c", TRAINING, str(node.root / "store")),
                env={"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)},
            )
            shown[rank].compute = [(process.pid, 40 * GIB)]
        boards.write(shown)
        until(lambda: _is_whole(collector), "a step, a checkpoint, and the ranks' GPUs", 60.0)
        _work(boards, shown)
        points: dict[Key, list[Point]] = {}
        for point in collector.points():
            attributes = point.attributes
            if "uri" in attributes:
                # Where it lies here is nothing to write down.
                attributes = {**attributes, "uri": "file:///out/model.pt"}
            key = point.metric, tuple(sorted(attributes.items()))
            points.setdefault(key, []).append(point)
    shutil.rmtree(folder)
    # What has another name by now is no series of its own: a node before its run was known.
    last_ns = max(each[-1].time_ns for each in points.values())
    return {
        key: each
        for key, each in points.items()
        if last_ns - each[-1].time_ns < 3 * _EXPORT_S * 1e9
    }


def _work(boards: Boards, shown: list[Board]) -> None:
    """Let the GPUs work for a while: what moves on a real one moves here."""
    for tick in range(int(_WATCHED_S / _EXPORT_S)):
        for board in shown:
            numbers = board.numbers
            numbers.update({"utilization.gpu": 60 + tick, "utilization.memory": 40 + tick})
            numbers.update({"memory.used": (40 * GIB) + tick * 10**8, "temperature": 60 + tick})
            numbers.update({"energy_mj": tick * 250_000, "clock_mhz.1": 1500 + 15 * tick})
            numbers.update(
                {"field.186": f"1 {400_000 + 1000 * tick}", "field.82": f"1 {70 + tick}"}
            )
            numbers.update({f"gpm.{each}": 40.0 + tick for each in (2, 5, 10)})
            for link in ("field.138.all", "field.139.all"):
                numbers[link] = f"3 {1_000_000 + 10_000_000 * tick}"
        boards.write(shown)
        time.sleep(_EXPORT_S)


def _is_whole(collector: Receiver) -> bool:
    names = {point.metric for point in collector.points()[-2000:]}
    wanted = (
        catalog.TRAINING_CHECKPOINT_TIMESTAMP,
        catalog.TRAINING_ARTIFACT_SIZE,
        catalog.OTEL_DDP_GPU_PROCESS_MEMORY_USAGE,
    )
    return {metric.name for metric in wanted} <= names


def _rows(points_of: dict[Key, list[Point]], under_main: set[Key]) -> Iterator[Row]:
    """The rows of rank 1, which is like all others; of rank 0 what it alone tells; of one GPU."""
    for key, points in points_of.items():
        name, attributes = key[0], dict(key[1])
        metric = catalog.BY_NAME[name]
        own = {k: v for k, v in attributes.items() if k not in RANK_LABELS}
        if metric.section == "GPU" and own.get("gpu") != "1":
            continue
        if "rank" in attributes and metric.section != "GPU":
            logged = own.get("name")
            if attributes["rank"] == "1":
                of = "name" if logged else "rank"
            elif metric.section in ONCE:
                of = ONCE[metric.section]
            else:
                continue
        else:
            of = "gpu" if metric.section == "GPU" else "node"
        before = next(each for each in points if points[-1].time_ns - each.time_ns <= 10e9)
        value, earlier = (_numbers(each) for each in (points[-1], before))
        seconds = (points[-1].time_ns - before.time_ns) / 1e9
        per_s = [
            round((now - then) / seconds, 6) if seconds else 0.0
            for now, then in zip(value, earlier, strict=True)
        ]
        # Rank 0 is exported under every strategy, and that is one of the labels of its info.
        always = of in ONCE.values() or key in under_main
        yield Row(name, of, own, value, per_s, always, "seen")


def _numbers(point: Point) -> list[float]:
    """The value; of a histogram its sum and its counts."""
    if point.kind == "histogram":
        return [point.value.sum, *map(float, point.value.bucket_counts)]
    return [float(point.value)]


def _only_elsewhere() -> Iterator[Row]:
    """What this machine cannot show; from the catalogue and what writes it."""

    def row(metric: catalog.Metric, of: str, value: float, per_s: float, **own: str) -> Row:
        named = {key.replace("_", "."): each for key, each in own.items()}
        return Row(metric.name, of, named, [value], [per_s], of != "rank", "added")

    for metric in (
        catalog.TRAINING_DEVICE_MEMORY_ALLOCATED,
        catalog.TRAINING_DEVICE_MEMORY_RESERVED,
        catalog.TRAINING_DEVICE_MEMORY_PEAK,
    ):
        yield row(metric, "rank", 5.0 * 10**10, 0.0)
    yield row(catalog.TRAINING_DEVICE_MEMORY_ALLOC_RETRIES, "rank", 0.0, 0.0)
    yield row(catalog.TRAINING_OOMS, "rank", 0.0, 0.0)
    yield row(
        catalog.TRAINING_FLOPS_PEAK,
        *("rank", 989.4e12, 0.0),
        dtype="bfloat16",
        device="NVIDIA H100 80GB HBM3",
    )
    clock = {"clock": "device"}
    for phase in ("forward", "backward", "optimizer", "data", "other"):
        yield row(catalog.TRAINING_PHASE_TIME, "rank", 40.0, 0.2, phase=phase, **clock)
    for sync in ("gradients", "buffers"):
        own = {"phase": "comm_wait", "sync": sync, **clock}
        yield row(catalog.TRAINING_PHASE_TIME, "rank", 4.0, 0.03, **own)
    # This takes 90 steps.
    yield row(catalog.TRAINING_COMPARED_RANKS, "node", float(RANKS), 0.0)
    for port in range(8):
        for way in ("receive", "transmit"):
            own = {"hw_id": f"mlx5_{port}/1", "hw_type": "network", "network_io_direction": way}
            yield row(catalog.HW_NETWORK_IO, "node", 10.0**12, 4e9 + port, **own)


if __name__ == "__main__":
    main()
