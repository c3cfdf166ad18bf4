"""Which variables an agent is started with, and when two processes mean the same agent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from otel_ddp.journal import place


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A process that begins in this directory."""
    monkeypatch.chdir(tmp_path)
    place._initial_directory.cache_clear()
    yield tmp_path
    place._initial_directory.cache_clear()


FILES = [
    *(
        f"OTEL_EXPORTER_OTLP_{signal}{file}"
        for signal in ("", "METRICS_", "TRACES_", "LOGS_")
        for file in ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY")
    ),
]


@pytest.mark.parametrize("variable", FILES)
def test_an_agent_finds_what_was_named_from_another_directory(variable: str, here: Path) -> None:
    assert place.agent_variables({variable: " ./a/b "}) == {variable: f"{here}/a/b"}


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/a/../b"),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", " "),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317"),
        ("WANDB_DIR", "wandb"),
    ],
)
def test_what_is_no_relative_name_of_a_file_stays_as_it_is(variable: str, text: str) -> None:
    assert place.agent_variables({variable: text}) == {variable: text}


def test_the_same_file_by_another_name_is_no_other_setting(here: Path) -> None:
    name = "OTEL_EXPORTER_OTLP_CERTIFICATE"

    relative, absolute = ({name: text} for text in ("tls.crt", str(here / "tls.crt")))

    assert place.agent_digest(relative, offline=False) == place.agent_digest(
        absolute, offline=False
    )
    assert place.agent_digest(relative, offline=False) != place.agent_digest(
        {name: "other.crt"}, offline=False
    )


def test_an_agent_that_sends_is_another_one_than_one_that_does_not() -> None:
    assert place.agent_digest({}, offline=True) != place.agent_digest({}, offline=False)


def test_a_working_directory_that_is_gone_stops_nothing(here: Path) -> None:
    here.rmdir()

    variables = {"OTEL_EXPORTER_OTLP_CERTIFICATE": "tls.crt"}
    assert place.agent_variables(variables) == variables


@pytest.mark.parametrize(
    "variable",
    ["OTEL_DDP_NOTIFY", "OTEL_DDP_SCRAPE_TOKEN_FILE"],
)
def test_another_value_of_what_an_agent_goes_by_calls_for_another_agent(variable: str) -> None:
    without, one, other = (
        place.agent_digest({variable: text} if text else {}, offline=False)
        for text in ("", "https://a.example", "https://b.example")
    )

    assert len({without, one, other}) == 3
