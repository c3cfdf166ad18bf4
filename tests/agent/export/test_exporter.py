"""An exporter that an error kept from its start is started again, and keeps all meanwhile."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from otel_ddp import errors, settings
from otel_ddp.agent.export import Exporter, Marks
from otel_ddp.agent.ledger import Ledger
from otel_ddp.journal.place import Place
from otel_ddp.vocabulary import catalog
from otlp_receiver import Receiver


class Source:
    """Journals of which nothing is read; remembers what the exporter has told them."""

    def __init__(self) -> None:
        self.committed = 0

    def marks(self) -> Marks:
        return {}

    def commit(self, marks: Marks) -> None:
        self.committed += 1

    def submitted(self, marks: Marks) -> None:
        pass


@pytest.mark.parametrize(
    ("signals", "why"),
    [
        ({}, "OTEL_EXPORTER_OTLP_ENDPOINT names no collector: scrape only"),
        (
            {f"OTEL_{each}_EXPORTER": "none" for each in ("METRICS", "TRACES", "LOGS")},
            "switched off by OTEL_*_EXPORTER=none: scrape only",
        ),
    ],
)
def test_an_agent_that_sends_nothing_says_why(
    tmp_path: Path, signals: dict[str, str], why: str
) -> None:
    conf, place = settings.read(signals), Place(tmp_path / "place")
    exporter = Exporter(conf, place, Ledger(), Source(), list, "n", "h", signals)

    exporter.connect()

    assert exporter.describe() == why


def test_an_error_at_the_start_keeps_everything_until_the_next_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "raise_failures", False)
    with Receiver() as receiver:
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.start_http()}
        conf = settings.read(env, spool_directory=str(tmp_path / "spool"))
        ledger, source = Ledger(), Source()
        place = Place(tmp_path / "place")
        exporter = Exporter(conf, place, ledger, source, list, "n", "h", env)
        with monkeypatch.context() as broken:
            broken.setitem(sys.modules, "otel_ddp.agent.export.otlp", None)
            exporter.connect()
        described = exporter.describe()
        failed = exporter.failed_to_start
        exporter.export_at_once()
        series = ledger.series(catalog.TRAINING_SCALAR, (("run", "r"), ("name", "loss")))
        ledger.log(series, 0.5, 10**18)

        exporter.connect()
        exporter.export()

        assert receiver.wait_for(lambda receiver: bool(receiver.points()))
        exporter.stop()
    assert failed
    assert described.startswith("exporting could not start: the agent's log says why")
    assert not exporter.failed_to_start
    assert [each.value for each in receiver.points()] == [0.5]
    assert source.committed == 1


@pytest.fixture(autouse=True)
def forget_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "failures", {})
