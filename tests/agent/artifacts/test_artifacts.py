"""What an agent does with the artifacts that runs name: who reads them, and what it shows."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fed import IDENTITY
from node import PATIENCE_S
from otel_ddp import settings
from otel_ddp.agent import artifacts
from otel_ddp.agent.artifacts import MOST_SHOWN, Artifacts
from otel_ddp.agent.ledger import Ledger
from otel_ddp.agent.reading.journals import Journals
from otel_ddp.journal import layout
from otel_ddp.journal.place import Place
from otel_ddp.journal.writer import JournalWriter
from otel_ddp.recording.recorder import Recorder
from otel_ddp.recording.spans import record_artifact, record_event
from otel_ddp.vocabulary import catalog


class Here:
    """One rank, its journal, and an agent."""

    def __init__(self, folder: Path) -> None:
        self.place = Place(folder / "place")
        self.place.directory.mkdir()
        self.ledger = Ledger()
        self.ledger.keep_history = True
        self.writer = JournalWriter(self.place.directory, layout.SMALLEST_FILE, IDENTITY)
        self.recorder = Recorder(self.writer)
        self.journals = Journals(self.place, self.ledger, "n")
        self.agent()

    def agent(self, of_platform: bool = False, **env: str) -> None:
        conf = settings.read({"OTEL_DDP_LINGER_S": "0", **env})
        self.artifacts = Artifacts(conf, of_platform=of_platform)

    def name(self, path: Any, name: str = "model", direction: str = "output") -> None:
        record_artifact(self.recorder, path, name, "model", direction, {"lr": 1})

    def feed(self) -> None:
        """Take what is named; a reader begins with the first."""
        self.journals.find()
        self.journals.poll()
        self.artifacts.feed(self.journals.exports())

    def read(self) -> None:
        """All that is named, to the end."""
        self.feed()
        while (reader := self.artifacts._reader) is not None:
            reader.process.wait(60)
            self.feed()
        self.journals.update_series(time.time_ns())

    def series(self, metric: catalog.Metric) -> list[tuple[dict[str, str], Any]]:
        rows = dict(self.ledger.families()).get(metric, [])
        return [(dict(series.labels), series.value) for series in rows]

    def records(self) -> list[dict[str, Any]]:
        """Of the agent, about what it has read."""
        made = [each for _, _, found in self.journals.flush_documents() for each in found]
        found = [each.content["attributes"] for each in made if "body" in each.content]
        return [each for each in found if {"artifact.digest", "artifact.problem"} & each.keys()]

    def problems(self) -> list[Any]:
        return [each.get("artifact.problem") for each in self.records()]

    def close(self) -> None:
        self.artifacts.stop()
        for each in self.journals.exports():
            each.reader.close()
        self.recorder.close()


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Here]:
    made = Here(tmp_path)
    yield made
    made.close()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt"
    path.write_text("weights")
    return path


def test_the_newest_of_a_name_has_series_with_the_labels_of_its_rank(
    here: Here, saved: Path
) -> None:
    here.name(saved)
    here.read()
    saved.write_text("more weights")
    here.name(saved)
    here.read()

    ((labels, size),) = here.series(catalog.TRAINING_ARTIFACT_SIZE)
    assert size == 12.0
    assert len(labels.pop("digest")) == 64
    assert (
        labels.items()
        >= {
            "run": "r",
            "rank": "0",
            "node": "n",
            "name": "model",
            "type": "model",
            "direction": "output",
            "uri": f"file://{saved}",
        }.items()
    )
    assert len(here.series(catalog.TRAINING_ARTIFACT_TIMESTAMP)) == 1


def test_only_so_many_of_a_rank_are_shown(here: Here) -> None:
    for n in range(MOST_SHOWN + 1):
        here.name("s3://bucket/data", name=f"data {n}")
    here.read()

    shown = here.series(catalog.TRAINING_ARTIFACT_TIMESTAMP)
    assert len(shown) == MOST_SHOWN
    # What lies elsewhere is shown as it is named: the event of the run says all of it.
    assert here.records() == here.series(catalog.TRAINING_ARTIFACT_SIZE) == []
    assert {(labels["uri"], labels["digest"]) for labels, _ in shown} == {("s3://bucket/data", "")}
    assert "data 0" not in {labels["name"] for labels, _ in shown}


def test_an_agent_of_the_platform_reads_no_file(here: Here, saved: Path) -> None:
    here.agent(of_platform=True)
    here.name(saved)
    here.read()

    assert here.problems() == []
    assert here.series(catalog.TRAINING_ARTIFACT_SIZE) == []
    ((labels, _),) = here.series(catalog.TRAINING_ARTIFACT_TIMESTAMP)
    assert (labels["uri"], labels["digest"]) == (f"file://{saved}", "")


@pytest.mark.parametrize(
    ("agent", "where", "direction", "is_stored"),
    [
        ("auto", "{}/store", "output", True),
        ("auto", "{}/store", "input", False),
        ("offline", "file://{}/store", "output", True),
        ("offline", "memory://store", "output", False),
    ],
)
def test_outputs_are_stored_and_offline_in_directories_alone(
    agent: str, where: str, direction: str, is_stored: bool, here: Here, saved: Path
) -> None:
    where = where.format(saved.parent)
    here.agent(OTEL_DDP_AGENT=agent, OTEL_DDP_ARTIFACTS=where)
    here.name(saved, direction=direction)
    here.read()

    (record,) = here.records()
    stored = record["artifact.uri"].startswith(f"file://{saved.parent}/store/r/model/")
    assert (stored, "artifact.problem" in record) == (is_stored, False)


def test_the_next_file_under_the_same_path_is_read_in_place_of_the_one_before(
    here: Here, saved: Path
) -> None:
    os.mkfifo(saved.parent / "other")
    for path in (saved, saved, saved.parent / "other"):
        here.name(path)
        # The first one is being read when the second is named.
        here.feed()
    here.read()

    first, second, other = here.records()
    assert first["artifact.problem"] == "it was recorded again before the agent read it"
    assert (second["artifact.size"], "artifact.problem" in second) == (7, False)
    assert other["artifact.problem"] == "it is neither a file nor a directory"


def test_only_so_many_wait(here: Here, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "MOST_WAITING", 1)
    here.name(saved)
    here.name(saved.parent)
    here.feed()

    assert here.problems() == ["1 others waited"]


def test_a_journal_stays_until_its_artifacts_are_read(here: Here, saved: Path) -> None:
    here.name(saved)
    here.feed()
    here.recorder.close()
    here.journals.poll()
    here.records()
    here.journals.commit(here.journals.marks())
    assert here.journals.done() == []

    here.read()
    assert here.journals.done() == []
    here.records()

    assert len(here.journals.done()) == 1


def test_what_hangs_is_given_up_with_all_that_waits_and_so_is_the_rest_at_the_agents_end(
    here: Here, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As a file server that does not answer.
    monkeypatch.setattr(artifacts, "_CODE", "import signal; signal.pause()")
    monkeypatch.setattr(artifacts, "LONGEST_S", 0.0)
    here.name(saved)
    here.name(saved.parent)
    here.feed()
    hanging = here.artifacts._reader
    here.feed()

    assert hanging is not None
    assert hanging.process.wait(60) == -9
    assert here.problems() == ["a file server or a store did not answer within 0 s"] * 2
    here.name(saved)
    here.feed()
    here.artifacts.stop()
    assert here.problems() == ["the agent ended before it was read"]


def test_a_reader_that_breaks_is_said(
    here: Here, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for code, python in (("exit(3)", None), ("", "/no/python")):
        monkeypatch.setattr(artifacts, "_CODE", code)
        if python is not None:
            monkeypatch.setattr(artifacts.sys, "executable", python)
        here.name(saved)
        here.read()

    assert here.problems() == [
        "its reader ended with 3",
        "the agent cannot start a reader: No such file or directory",
    ]


def test_the_reader_has_the_lowest_priority_and_keeps_secrets_out_of_its_arguments(
    here: Here, saved: Path
) -> None:
    here.agent(OTEL_DDP_ARTIFACTS="memory://me:secret@store")
    # It waits for the 200 MiB.
    with saved.open("wb") as file:
        file.truncate(200 << 20)
    here.name(saved)
    here.feed()
    reader = here.artifacts._reader
    assert reader is not None
    pid = reader.process.pid
    while reader.answer() is None and os.getpriority(os.PRIO_PROCESS, pid) != 19:
        pass

    assert reader.answer() is None
    assert b"secret" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    here.artifacts.stop()
    # On a busy machine what has the lowest priority takes a while to end.
    assert reader.process.wait(PATIENCE_S) == -9


@pytest.mark.parametrize(
    "wrong",
    [
        {"attributes": None},
        {"name": "other"},
        {"attributes": {"artifact.uri": 3}},
    ],
)
def test_an_event_that_names_no_artifact_is_none(wrong: dict[str, Any], here: Here) -> None:
    record_event(here.recorder, catalog.ARTIFACT_EVENT, {})
    attributes = {f"artifact.{each}": "s3://x" for each in ("name", "type", "direction", "uri")}
    content = {"name": catalog.ARTIFACT_EVENT, "time": 1, "step": 7, "attributes": attributes}
    here.recorder.documents.append(layout.EVENT, {**content, **wrong})
    here.read()

    assert here.series(catalog.TRAINING_ARTIFACT_TIMESTAMP) == []
