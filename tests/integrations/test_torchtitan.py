"""torchtitan's own trainer on two ranks: what is recorded is what it prints."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from extras import needed
from histories import kept_steps
from integrations import torchtitan_on_cpu
from integrations.launch import snippet
from node import Node, until
from otel_ddp.history.directory import histories
from otel_ddp.history.reader import History

TESTS = str(Path(__file__).parents[1])
STEPS = 12
FIRST = "from integrations import torchtitan_on_cpu\ntorchtitan_on_cpu.prepare()\n"
ARGUMENTS = (
    *("--module", "llama3", "--config", "llama3_debugmodel", "--dump_folder", "out"),
    *("--training.steps", f"{STEPS}", "--training.seq_len", "64"),
    *("--training.local_batch_size", "2", "--training.disable_cuda_graphs"),
)


@pytest.mark.stress
def test_steps_phases_and_values_are_those_of_its_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed("torchtitan", "torchtitan")
    monkeypatch.chdir(tmp_path)
    torchtitan_on_cpu.write_assets(tmp_path)
    (tmp_path / "train.py").write_text(FIRST + snippet("torchtitan"))
    with Node() as node:
        ran = node.start(
            *(sys.executable, "-m", "otel_ddp", "run", "--", sys.executable),
            *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"),
            *ARGUMENTS,
            env={"PYTHONPATH": os.pathsep.join((TESTS, *sys.path))},
        )
        said, _ = ran.communicate(timeout=600)
        assert ran.returncode == 0, said
        [path] = until(lambda: list(histories(Path(node.env["OTEL_DDP_HISTORY_DIR"]))), "a history")
        until(lambda: state(path) == "finished", "the end")

        with History(path) as found:
            steps = {each.key.rank: kept_steps(found, each) for each in found.step_series.values()}
            values = {
                (each.key.name, each.key.rank): {b.first: b.last for b in found.sums(each)}
                for each in found.series("value")
            }

    plain = re.sub(r"\x1b\[[\d;]*m", "", said)
    printed = {int(s): float(v) for s, v in re.findall(r" step: +(\d+)  loss: +([\d.]+)", plain)}
    assert set(printed) == {*range(1, STEPS + 1)}
    for rank in ("0", "1"):
        assert sum(each.steps for each in steps[rank]) == STEPS
        for phase in ("data", "forward", "backward", "optimizer"):
            assert sum(each.phases_ns[phase] for each in steps[rank]) > 0, phase
        assert values["loss", rank] == pytest.approx(printed, abs=1e-4)


def state(path: Path) -> str:
    with History(path) as found:
        return found.state
