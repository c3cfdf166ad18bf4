"""An exporter that an error kept from its start, what it describes, and its resource."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from opentelemetry.semconv.schemas import Schemas

import conventions
from node import until
from otel_ddp import settings
from otel_ddp.agent.export.exporter import Exporter, Marks
from otel_ddp.agent.export.otlp.encode import SCHEMA_URL
from otel_ddp.agent.export.otlp.render import resource_of, with_project
from otel_ddp.agent.ledger import Ledger
from otel_ddp.journal.place import Place
from otel_ddp.vocabulary import catalog
from otlp_receiver import Receiver

# What of a journal has been read.
READ: Marks = {Path("journal"): (1, 2, 3)}


@pytest.fixture
def committed() -> Marks:
    """What the exporter has said that it has delivered or written."""
    return {}


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger()
    ledger.keep_history = True
    series = ledger.series(catalog.TRAINING_SCALAR, (("run", "r"), ("name", "loss")))
    ledger.log(series, 0.5, 10**18)
    return ledger


def exporter_of(env: Mapping[str, str], spool: Path, ledger: Ledger, committed: Marks) -> Exporter:
    conf, place = settings.read(env, spool_directory=str(spool)), Place(spool / "place")
    return Exporter(conf, place, ledger, lambda: READ, committed.update, list, "n", "h", env)


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
    exporter = exporter_of(signals, tmp_path, Ledger(), {})

    exporter.connect()

    assert exporter.describe() == why


def connected(receiver: Receiver, spool: Path, ledger: Ledger, committed: Marks) -> Exporter:
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.start_http()}
    exporter = exporter_of(env, spool, ledger, committed)
    exporter.connect()
    return exporter


def test_what_goes_on_is_described(tmp_path: Path, ledger: Ledger) -> None:
    with Receiver() as receiver:
        exporter = connected(receiver, tmp_path, ledger, {})
        before = exporter.describe()
        exporter.export()
        until(lambda: exporter.describe() != before, "the first answer")
        well = exporter.describe()
        receiver.set_mode(503)
        series = ledger.series(catalog.TRAINING_SCALAR, (("run", "r"), ("name", "loss")))
        ledger.log(series, 0.25, 2 * 10**18)
        exporter.export()
        exporter.stop()
        ill = exporter.describe()
    endpoint = well.partition("delivering to ")[2]
    assert before == f"nothing sent yet to {endpoint}"
    assert ill.startswith(f"metrics: 503 from {endpoint}/v1/metrics since ")
    assert ill.endswith(" kB wait on disk")
    counts = {(each.name, *labels): count for each, count, labels in exporter.counts()}
    assert counts["otel_ddp.spool.size",] == 4096
    assert counts["otel_ddp.exports", ("outcome", "delivered")] == 1
    assert counts["otel_ddp.exports", ("outcome", "failed")] >= 1
    whys = {label[1] for name, *labels in counts for label in labels if "dropped" in name}
    assert whys == {"rejected", "history_full"}


def test_positions_wait_for_what_memory_alone_has_and_it_for_the_next_export(
    tmp_path: Path, ledger: Ledger, committed: Marks
) -> None:
    with Receiver() as receiver:
        receiver.set_mode("hang")
        exporter = connected(receiver, tmp_path, ledger, committed)
        exporter.export()
        assert receiver.wait_for(lambda receiver: receiver.hanging == 1)
        exporter.commit()
        before = dict(committed)

        exporter.export()

        assert before == {}
        assert committed == READ
        assert len([*tmp_path.glob("spool-*/*.z")]) == 1
    exporter.stop()


def test_what_neither_collector_nor_disk_takes_keeps_the_agent_and_holds_up_no_journal(
    tmp_path: Path, ledger: Ledger, committed: Marks
) -> None:
    in_the_way = tmp_path / "spool"
    in_the_way.write_text("")
    with Receiver() as receiver:
        receiver.set_mode(503)
        exporter = connected(receiver, in_the_way, ledger, committed)

        exporter.export_at_once()

        assert committed == READ
        assert exporter.busy()
        assert "wait in memory, the disk does not take it" in exporter.describe()
        receiver.set_mode("ok")
        assert receiver.wait_for(lambda receiver: bool(receiver.points()))
        exporter.stop()
    assert [each.value for each in receiver.points()] == [0.5]
    assert not exporter.busy()


def test_the_users_variables_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.namespace=own,team=vision%20lab")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "trainer")

    found = resource_of("n1", "host")

    assert found["team"] == "vision lab"
    of_project = with_project(found, "p")
    assert (of_project["service.name"], of_project["service.namespace"]) == ("trainer", "own")


def test_every_attribute_is_one_of_the_conventions() -> None:
    found = resource_of("n1", "host")

    assert found.keys() <= conventions.attributes()
    assert found["telemetry.sdk.language"] in conventions.values()["telemetry.sdk.language"]
    assert found["telemetry.sdk.name"] == "otel_ddp"


def test_the_schema_is_that_of_the_conventions_that_we_test_against() -> None:
    assert [*Schemas][-1].value == SCHEMA_URL
