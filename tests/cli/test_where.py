"""What the command says of itself, and of directories that it reads or cannot read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from conftest import Here
from otel_ddp.cli import main
from otel_ddp.journal.process_state import ProcessState
from otel_ddp.journal.survey import Survey


def test_what_is_not_there_or_no_directory_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()

    assert main(["status", "--dir", f"{tmp_path}/typo"]) == 2
    os.environ["OTEL_DDP_DIR"] = f"{tmp_path}/file"
    assert main(["stacks"]) == 2

    missing = f"otel-ddp status: {tmp_path}/typo does not exist.\n"
    why = "cannot be read (is no directory (a link is not followed)).\n"
    wrong = f"otel-ddp stacks: {tmp_path}/file {why}"
    assert capsys.readouterr() == ("", missing + wrong)


def test_the_directory_of_a_training_that_has_not_begun_is_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.environ["OTEL_DDP_DIR"] = f"{tmp_path}/later"
    why = f"{tmp_path}/later (OTEL_DDP_DIR) does not exist yet: nothing has recorded there"

    assert main(["status"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [f"note      {why}", "no runs"]

    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unreadable"] == [why]

    assert main(["stacks"]) == 1
    assert capsys.readouterr().out == f"no rank runs on this node: {why}\n"


def runs(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [each["run"] for each in json.loads(capsys.readouterr().out)["processes"]]


def test_a_typed_directory_may_begin_with_a_tilde_or_be_relative(
    place: Here, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Survey(processes=[ProcessState(run="mine", state="finished")])
    place.agent_file.write_text(json.dumps(told.to_json()))
    name, above = place.directory.name, place.directory.parent
    os.environ.update(HOME=str(above), OTEL_DDP_DIR="/nowhere")
    monkeypatch.chdir(above)

    assert main(["status", "--json", f"--dir=~/{name}"]) == 0
    assert runs(capsys) == ["mine"]

    assert main(["status", "--json", "--dir", name]) == 0
    assert runs(capsys) == ["mine"]


def test_the_name_alone_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])

    # A script that lost its arguments must see that it failed.
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert all(f"\n    {name} " in said for name in ("status", "run", "doctor", "demo"))
