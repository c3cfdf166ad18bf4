"""otel-ddp profile: traces of a suspect and of a healthy rank, from trainings that go on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from make import process_of
from node import Node, until
from otel_ddp.cli import main
from otel_ddp.journal.layout import ASK_SUFFIX, PROFILE_SUFFIX
from otel_ddp.journal.survey import Survey
from shortages import locked_elsewhere
from trainings import PROGRAM

LATE = {"who": {"group": "g", "run": "a run", "rank": "1"}, "sentence": "rank 1 is late"}


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """Two ranks that train; and in the same place a rank 0 of another run, and an agent."""
    with Node(OTEL_DDP_AGENT="off") as found:
        found.env |= {"OTEL_DDP_GROUP": "g", "OTEL_DDP_RUN": "a run"}
        found.torchrun(2, str(PROGRAM), str(found.root))
        place = found.place.directory
        until(lambda: len([*place.glob("*.ask")]) == 2, "the ranks")
        env = {"OTEL_DDP_DIR": str(place), "OTEL_DDP_AGENT": "off", "OTEL_DDP_SAY": "nothing"}
        code = f"import os; os.environ.update({env}); import otel_ddp; otel_ddp.init(run='other')"
        with locked_elsewhere(found.place.agent_lock, code):
            known = [process_of(path) for path in found.place.journals()]
            told = Survey(agents=[{}], processes=known, verdicts=[LATE])
            found.place.agent_file.write_text(json.dumps(told.to_json()))
            yield found


def profile(node: Node, *arguments: str) -> int:
    out = str(node.root / "profiles")
    return main(["profile", "--dir", str(node.place.directory), "--out", out, *arguments])


def folders(node: Node) -> list[Path]:
    return sorted((node.root / "profiles").glob("*"))


def test_the_rank_of_a_verdict_and_a_healthy_one_are_traced(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    before = folders(node)

    assert profile(node, "--steps", "3") == 0

    printed = capsys.readouterr().out.splitlines()
    (folder,) = set(folders(node)) - set(before)
    assert printed[0].startswith("profile of run a run: rank 1 is named by a verdict; rank ")
    assert f"{folder}" in printed
    assert printed[-1].startswith("Open them side by side in https://ui.perfetto.dev")
    # For this user alone, and nothing beside it.
    traces = {rank: folder / f"rank-{rank}.json" for rank in (0, 1)}
    assert {*folder.iterdir()} == {*traces.values()}
    assert not [each for each in (folder, *traces.values()) if each.stat().st_mode & 0o077]
    for rank, path in traces.items():
        trace = json.loads(path.read_bytes())
        names = [str(event.get("name")) for event in trace["traceEvents"]]
        assert sum(name.startswith("ProfilerStep#") for name in names) >= 3
        assert trace["distributedInfo"]["rank"] == rank


def test_while_a_rank_is_profiled_a_second_profile_is_refused(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    (journal,) = set(node.place.journals()) - {
        each.with_suffix(".journal") for each in node.place.directory.glob("*.ask")
    }
    os.mkfifo(fifo := journal.with_suffix(ASK_SUFFIX), 0o600)
    journal.with_suffix(PROFILE_SUFFIX).write_text('{"number": 1, "state": "recording"}')
    with open(os.open(fifo, os.O_RDWR | os.O_NONBLOCK), "rb"):
        assert profile(node, "--run", "other", "--rank", "0") == 1
    fifo.unlink()

    assert "not profiled: another profile of this rank is under way" in capsys.readouterr().out


def test_what_cannot_be_profiled_is_said_with_what_to_do(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    known = "on this node; choose one by --rank: 0 of a run, 0 of other, 1 of a run.\n"
    assert profile(node, "--rank", "7") == 2
    assert f"The rank does not run {known}" in capsys.readouterr().err
    assert profile(node, "--run", "third") == 2
    assert "No rank of run third runs on this node.\n" in capsys.readouterr().err
    assert profile(node, "--run", "other") == 2
    assert "No open verdict names a rank" in capsys.readouterr().err
    before = folders(node)
    assert profile(node, "--run", "other", "--rank", "0") == 1
    assert "it takes no questions: it has not called" in capsys.readouterr().out
    assert folders(node) == before
    with pytest.raises(SystemExit):
        profile(node, "--steps", "51")
    assert "must be 1 to 50" in capsys.readouterr().err
