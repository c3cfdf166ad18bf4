"""What an agent shows of artifacts, and which agent reads what."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_ddp import settings
from otel_ddp.agent.artifacts.artifacts import Artifacts
from otel_ddp.agent.artifacts.work import Artifact
from otel_ddp.agent.ledger import Labels, Ledger
from otel_ddp.agent.reading.journals import Journals
from otel_ddp.journal import layout
from otel_ddp.journal.place import Place
from otel_ddp.journal.writer import JournalWriter
from otel_ddp.recording.recorder import Recorder
from otel_ddp.vocabulary import catalog

IDENTITY = {
    "run": "r",
    "group": "g",
    "job_type": "train",
    "host": "h",
    "global_rank": 0,
    "local_rank": 0,
    "exported": True,
    "settled": True,
}


class Here:
    """One rank, its journal, and an agent whose thread never starts."""

    def __init__(self, folder: Path) -> None:
        self.place = Place(folder / "place")
        self.place.directory.mkdir()
        self.ledger = Ledger()
        self.ledger.keep_history = True
        self.writer = JournalWriter(self.place.directory, layout.SMALLEST_FILE, IDENTITY)
        self.recorder = Recorder(self.writer, settings.read({}))
        self.journals = Journals(self.place, self.ledger, "n")
        self.agent()

    def agent(self, of_platform: bool = False, **env: str) -> None:
        conf = settings.read({"OTEL_DDP_LINGER_S": "0", **env})
        self.artifacts = Artifacts(conf, self.place, self.ledger, "n", of_platform=of_platform)

    def tell(self, uri: str, **more: Any) -> None:
        content = {
            "name": "model",
            "type": "model",
            "direction": "output",
            "uri": uri,
            "time": time.time_ns(),
            "step": 7,
            "span": "",
            "trace": "",
            "metadata": {"lr": 1},
            **more,
        }
        self.recorder.documents.append(layout.ARTIFACT, content)

    def read(self) -> None:
        """All that is told of, and all that waits."""
        self.journals.find()
        self.journals.poll()
        self.artifacts.feed(self.journals.new_artifacts())
        work = self.artifacts._work
        while isinstance(artifact := work.next(), Artifact):
            self.artifacts._worker.work_on(artifact)
        self.show(self.journals.labels())

    def show(self, in_use: set[Labels]) -> None:
        with self.ledger.lock:
            self.artifacts.update_series(time.time_ns(), in_use)

    def series(self, metric: catalog.Metric) -> list[tuple[dict[str, str], Any]]:
        return [
            (dict(series.labels), series.value)
            for each, rows in self.ledger.families()
            if each is metric
            for series in rows
        ]

    def records(self) -> list[dict[str, Any]]:
        made = [each for _, _, found in self.artifacts.flush_documents() for each in found]
        return [each.content["attributes"] for each in made if each.kind == layout.EVENT]

    def close(self) -> None:
        for each in self.journals.feeds():
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
    here.tell(f"file://{saved}")
    here.read()
    saved.write_text("more weights")
    here.tell(f"file://{saved}", step=9)
    here.read()

    ((labels, size),) = here.series(catalog.TRAINING_ARTIFACT_SIZE)
    ((_, step),) = here.series(catalog.TRAINING_ARTIFACT_STEP)
    assert (size, step) == (12.0, 9.0)
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
    assert ({"node": "n", "outcome": "complete"}, 2.0) in here.series(catalog.OTEL_DDP_ARTIFACTS)


def test_the_series_go_with_those_of_the_rank(here: Here, saved: Path) -> None:
    here.tell(f"file://{saved}")
    here.read()

    here.artifacts._linger_s = 3600.0
    here.show(set())
    assert len(here.series(catalog.TRAINING_ARTIFACT_SIZE)) == 1
    here.artifacts._linger_s = 0.0
    here.show(set())

    assert here.series(catalog.TRAINING_ARTIFACT_SIZE) == []


def test_what_lies_elsewhere_is_told_of_once_and_has_neither_size_nor_digest(here: Here) -> None:
    here.tell("s3://bucket/data")
    here.read()

    (record,) = here.records()
    assert record["artifact.state"] == "complete"
    assert "artifact.size" not in record
    assert record["artifact.metadata.lr"] == 1
    assert here.series(catalog.TRAINING_ARTIFACT_SIZE) == []
    assert len(here.series(catalog.TRAINING_ARTIFACT_TIMESTAMP)) == 1


def test_only_an_agent_of_the_platform_asks_for_roots(here: Here, saved: Path) -> None:
    here.agent(of_platform=True)
    here.tell(f"file://{saved}")
    here.read()
    assert "OTEL_DDP_ARTIFACT_ROOTS" in here.records()[-1]["artifact.problem"]

    here.agent(of_platform=True, OTEL_DDP_ARTIFACT_ROOTS=f"/none:{saved.parent}")
    here.tell(f"file://{saved}")
    here.read()
    assert here.records()[-1]["artifact.size"] == 7

    here.agent()
    here.tell(f"file://{saved}")
    here.read()
    assert here.records()[-1]["artifact.size"] == 7


@pytest.mark.parametrize(
    "wrong",
    [
        {"uri": 3},
        {"uri": ""},
        {"name": None},
        {"direction": "up"},
        {"time": -1},
        {"time": 2**63},
        {"step": "7"},
        {"span": {}},
    ],
)
def test_a_record_that_makes_no_sense_is_counted(wrong: dict[str, Any], here: Here) -> None:
    here.tell(**{"uri": "s3://bucket/data", **wrong})
    here.read()

    assert here.records() == []
    assert [each.reader.unreadable for each in here.journals.feeds()] == [1]


def test_an_agent_that_is_offline_stores_in_directories_alone(
    here: Here, saved: Path, tmp_path: Path
) -> None:
    found = []
    for where in (f"{tmp_path}/store", "memory://store"):
        here.agent(OTEL_DDP_AGENT="offline", OTEL_DDP_ARTIFACTS=where)
        here.tell(f"file://{saved}", name=where[:6])
        here.read()
        found.append(here.records()[-1]["artifact.uri"])

    assert found[0].startswith(f"file://{tmp_path}/store/")
    assert found[1] == f"file://{saved}"
