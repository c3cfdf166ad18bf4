"""What a rank writes down of an artifact: where it lies, and never what is in it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import otel_ddp
from conftest import Here
from otel_ddp.journal.layout import EVENT
from otel_ddp.journal.parser import Document
from otel_ddp.journal.reader import JournalReader


def told(place: Here) -> list[dict[str, Any]]:
    (path,) = place.directory.glob("*.journal")
    reader = JournalReader(path)
    try:
        records = reader.read()
    finally:
        reader.close()
    return [each.content for each in records if isinstance(each, Document) and each.kind == EVENT]


def test_an_artifact_is_a_record_with_its_place_step_and_span(
    place: Here, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    run = otel_ddp.init()
    run.log({"loss": 1.0}, step=7)
    with run.span("save"):
        run.artifact(
            "out/model é.pt", name="model", type="model", metadata={"loss": 0.5, "api_key": "x"}
        )
    otel_ddp.artifact(Path("data"), direction="input")

    model, data = told(place)
    run.finish()

    uri = f"file://{tmp_path}/out/model%20%C3%A9.pt"
    assert model["attributes"] == {
        "artifact.uri": uri,
        "artifact.name": "model",
        "artifact.type": "model",
        "artifact.direction": "output",
        "artifact.metadata.loss": 0.5,
        "artifact.metadata.api_key": "[hidden]",
    }
    assert model["body"] == f"output model (model): {uri}"
    assert (model["step"], model["trace"]) == (7, "step/7")
    assert len(model["span"]) == 16
    assert data["body"] == f"input data (file): file://{tmp_path}/data"


@pytest.mark.parametrize(
    ("given", "uri", "name"),
    [
        ("s3://me:secret@bucket/data", "s3://bucket/data", "data"),
        ("https://host/data.tar?sig=abc", "https://host/data.tar?sig=[hidden]", "data.tar"),
        ("file:///data/a%20b", "file:///data/a%20b", "a b"),
        (b"/data/\xff", "file:///data/%FF", "\ufffd"),
        (Path("/data/../a"), "file:///a", "a"),
    ],
)
def test_an_address_stays_and_secrets_go(given: Any, uri: str, name: str, place: Here) -> None:
    run = otel_ddp.init()

    run.artifact(given)

    (found,) = told(place)
    run.finish()
    found = found["attributes"]
    assert (found["artifact.uri"], found["artifact.name"]) == (uri, name)


@pytest.mark.parametrize(
    "wrong",
    [
        {"path": None},
        {"path": "a\0b" * 3000},
        {"path": "a", "direction": "up"},
        {"path": "a", "name": object()},
        {"path": "a", "metadata": [1]},
    ],
)
def test_what_is_no_artifact_is_refused_and_never_raises(
    wrong: dict[str, Any], place: Here
) -> None:
    run = otel_ddp.init()

    run.artifact(**wrong)

    assert told(place) == []
    run.finish()


def test_the_file_is_not_looked_at(place: Here, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    run = otel_ddp.init()

    # Opening it would wait for ever.
    run.artifact(tmp_path / "fifo")
    run.artifact("/no/such/file")

    assert len(told(place)) == 2
    run.finish()
