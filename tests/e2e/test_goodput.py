"""A run that is killed and goes on from a checkpoint: its attempts, and what its time went to."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

import documents
import warm
from node import Node, finished, until
from otel_ddp.history.directory import histories
from otel_ddp.history.goodput import Goodput, goodput_of
from otel_ddp.history.reader import History
from otel_ddp.history.whole_run import WholeRun
from otel_ddp.vocabulary.words import TIME_CAUSES

pytestmark = pytest.mark.timed

TIME = "otel_ddp_run_time_seconds_total"

# It saves at 60, loses rank 1 after step 99, and goes on from 60 to the end. By its own clock each
# rank notes when each step was done.
LOOP = """
import json, os, sys, time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import otel_ddp

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
saved = folder / "saved"
first = 60 if saved.exists() else 0
model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
# It counts its steps from 1, and the program logs them from 0.
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
if first:
    optimizer.load_state_dict(torch.load(saved))
done = []
optimizer.register_step_post_hook(lambda *_: done.append(time.time()))
run = otel_ddp.instrument(model, group="g", run="again")
for step in range(first, 200):
    time.sleep(0.02)
    loss = model(torch.ones(8, 64)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        run.log({"loss": float(loss)}, step=step)
    if step == 59 and rank == 0:
        with run.phase("checkpoint"):
            time.sleep(0.5)
            torch.save(optimizer.state_dict(), saved)
    if step == 99 and not first or step == 199:
        (folder / f"{rank}.{first}").write_text(json.dumps(done))
    if step == 99 and not first:
        dist.barrier()
        if rank == 1:
            os._exit(3)
run.finish()
dist.destroy_process_group()
"""


def asked(node: Node, *arguments: str) -> str:
    """What the command says of the newest run."""
    return finished(node.start(sys.executable, "-m", "otel_ddp", "goodput", *arguments))


class Ran(NamedTuple):
    """Two attempts of one run."""

    goodput: Goodput
    loss: list[tuple[int, int]]
    """The steps of the logged loss, and how many values each has."""
    places: list[int]
    """The steps of rank 0."""
    total_s: float
    """From the start of the first launch to the end of the last."""


def launched_twice(node: Node, *command: str) -> Ran:
    """The first launch fails."""
    began = time.monotonic()
    for fails in (True, False):
        process = node.start(*command)
        printed = process.communicate()[0]
        assert bool(process.returncode) == fails, printed
    total_s = time.monotonic() - began

    def told() -> dict[str, float]:
        found = [(labels, v) for name, labels, v in node.scrape() if name == TIME]
        return {labels["cause"]: value for labels, value in found if labels["run"] == "again"}

    def ended() -> Ran | None:
        with WholeRun([History(path) for path in histories(node.root / "history")]) as run:
            found = goodput_of(run)
            if found is None or found.attempts[-1].get("state") != "finished":
                return None
            counts = [(each.start, each.finite) for each in run.values.get(("loss", "train"), ())]
            places = [each.start for each in run.step_buckets["0"][2]]
        # Its endpoint is a second behind.
        by_cause = told()
        every = {**dict.fromkeys(TIME_CAUSES, 0.0), **found.seconds}
        same = by_cause == pytest.approx(every, abs=0.002)
        return Ran(found, counts, places, total_s) if same else None

    found: Ran = until(ended, "the end of the second attempt")
    return found


def test_a_run_that_goes_on_from_a_checkpoint_is_one_run_and_its_time_adds_up(
    tmp_path: Path,
) -> None:
    program = tmp_path / "train.py"
    program.write_text(LOOP)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    with Node() as node, warm.with_imported("torch.distributed.run") as python:
        node.env |= python.env
        ran = launched_twice(node, python.executable, *launcher, str(program), str(tmp_path))
        node.env["OTEL_DDP_GPU_HOUR_PRICE"] = "3600 EUR"
        said, in_words = json.loads(asked(node, "--json")), asked(node)
    documents.check("goodput", said)
    found = ran.goodput
    done = {
        (rank, first): json.loads((tmp_path / f"{rank}.{first}").read_text())
        for rank in (0, 1)
        for first in (0, 60)
    }
    own = {"kept": 0.0, "repeated": 0.0, "start": 0.0}
    for rank in (0, 1):
        before, after = done[rank, 0], done[rank, 60]
        own["kept"] += before[99] - before[0] + after[139] - after[39]
        own["repeated"] += after[39] - after[0]

    kept = {"productive", "data", "checkpoint", "late_rank"} & found.seconds.keys()
    assert sum(found.seconds[each] for each in kept) == pytest.approx(own["kept"], rel=0.02)
    assert found.seconds["repeated"] == pytest.approx(own["repeated"], rel=0.02)
    assert found.seconds["checkpoint"] == pytest.approx(0.5, rel=0.05)
    # Two ranks; the launcher's own time is nobody's before the first attempt and after the last.
    assert found.total_s < 2 * ran.total_s
    first, second = found.attempts
    assert (first["last_step"], second["first_step"], second["last_step"]) == (99, 60, 199)
    assert second["repeated_steps"] == 40
    # Its first new step begins when that before has ended.
    back_s = done[0, 60][39] - first["ended_ns"] / 1e9
    assert second["back_s"] == pytest.approx(back_s, abs=0.1)
    assert "exit code 3" in first["why"]
    # A euro a second.
    assert said["price"]["costs"]["repeated"] == pytest.approx(own["repeated"], abs=0.1)
    assert f"{found.share('productive'):.1%} of" in in_words
    assert "exit code 3" in in_words.splitlines()[-2]
    # The curve has each step once, and so has the picture of the phases.
    assert ran.loss == [(step, 1) for step in range(200)]
    assert ran.places == list(range(1, 201))
