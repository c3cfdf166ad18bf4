"""The examples run as their first lines say, and what they log is there."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest

from node import Node, finished, until

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
PAGES = ["README.md", "docs/coming-from.md"]

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

# Program: how it is started, how many ranks it records, a value that it logs, and what is counted
# on each rank.
EXPECTED = {
    "accumulate_amp_compile.py": (
        TORCHRUN,
        2,
        "loss",
        {"training_steps_total": 96, "training_micro_batches_total": 384},
    ),
    "ddp.py": (TORCHRUN, 2, "loss", {"training_steps_total": 96}),
    "fsdp.py": (
        TORCHRUN,
        2,
        "perplexity",
        {"training_steps_total": 30, "training_tokens_total": 29504},
    ),
    "gan.py": (TORCHRUN, 2, "distance", {"training_steps_total": 100}),
    "quickstart.py": ([], 1, "accuracy", {}),
    "spawn.py": ([], 1, "total", {}),
}


def test_every_example_is_run_here() -> None:
    assert sorted(EXPECTED) == EXAMPLES


def amounts(node: Node, metrics: Iterable[str]) -> list[dict[str, float]]:
    """What was counted, a rank at a time."""
    ranks = sorted(labels["rank"] for labels, _ in node.series("training_state"))
    return [{each: node.value(each, rank=rank) or 0 for each in metrics} for rank in ranks]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_and_is_recorded(name: str) -> None:
    launcher, ranks, value, counted = EXPECTED[name]
    # Two ranks need no two GPUs here.
    with Node(CUDA_VISIBLE_DEVICES="") as node:
        temporary = node.root / "tmp"
        temporary.mkdir()
        node.env["TMPDIR"] = str(temporary)
        # One example is started as users start it, the others in less time.
        start = partial(node.start, sys.executable) if name == "quickstart.py" else node.warm
        finished(start(*launcher, str(ROOT / "examples" / name)))

        until(lambda: len(node.series("training_scalar", name=value)) == ranks, "its values")
        until(lambda: amounts(node, counted) == [counted] * ranks, f"{counted} on each rank")
        assert all(each["state"] == "finished" for each in node.processes())
        assert len({each["run"] for each in node.processes()}) == 1
        # One table, though the ranks of spawn.py have two roles.
        assert len(re.findall("^run ", node.shown(), re.MULTILINE)) == 1
        # torchrun and the compiler leave folders of theirs.
        assert all(each.name.startswith("torch") for each in temporary.iterdir())


def test_the_snippets_of_the_pages_run_as_they_stand_and_log_what_they_say() -> None:
    snippets: dict[str, str] = {}
    for page in PAGES:
        found = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
        assert found, page
        snippets |= {f"{page} {number}": each for number, each in enumerate(found)}
    with Node() as node:
        for name, snippet in snippets.items():
            finished(node.warm("-c", snippet, env={"OTEL_DDP_RUN": name}))

        def with_a_loss() -> set[str]:
            found = node.series("training_scalar_step", name="loss")
            return {labels["run"] for labels, _ in found}

        until(lambda: with_a_loss() == {*snippets}, "the loss of each")
        states = [(each["run"], each["state"]) for each in node.processes()]
        assert sorted(states) == sorted((name, "finished") for name in snippets)


@pytest.mark.timed
def test_the_quickstart_shows_the_verdict_on_the_late_rank_that_its_page_has(
    tmp_path: Path,
) -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "train.py").write_text(program)

    with Node(CUDA_VISIBLE_DEVICES="") as node:
        node.warm(*TORCHRUN, str(tmp_path / "train.py"))
        # torch alone may take half a minute to start on a busy machine.
        until(node.place.agent_file.exists, "the agent")
        late = partial(node.series, "training_straggler", rank="1", phase="data")
        until(late, "the late rank")
        shown = node.shown()

    assert verdict_in(page) == verdict_in(shown)


def verdict_in(text: str) -> str:
    """The sentence on rank 1, whatever its numbers are and wherever it is wrapped."""
    (sentence,) = re.findall(r"! since [\d:]+: (rank 1 .*? storage\.)", " ".join(text.split()))
    return re.sub(r"\(.*?\)|[\d.]*\d", "...", sentence)
