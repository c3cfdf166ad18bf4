"""The table of settings: what wins over what, and what is said about a value that means nothing."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

import pytest
from tools.tables import settings_page

import otel_ddp
from conftest import Here
from otel_ddp import ConfigError, settings
from otel_ddp.identity import identity
from otel_ddp.recording import agent_start

PAGE = (Path(__file__).parents[1] / "docs" / "settings.md").read_text()
# Variables that may hold any text.
FREE = {
    *("OTEL_DDP_NODE", "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"),
    *(
        name
        for key in ("group", "run", "job_type", "project", "name", "description", "tags")
        for name in identity.VARIABLES[key]
    ),
    # The exporters say what they cannot use: `otel-ddp status` and `doctor` show it.
    *(name for name in settings.names() if name.endswith(("ENDPOINT", "HEADERS"))),
}
OURS = {name for name in settings.names() if name.startswith("OTEL_DDP_")}
# These are read with the identity.
OF_IDENTITY = {"OTEL_DDP_STRATEGY", "OTEL_DDP_RANK", "OTEL_DDP_LOCAL_RANK", "OTEL_DDP_WORLD_SIZE"}
WRONG = {
    "OTEL_DDP_AGENT": ("maybe", "must be one of auto, offline, external, off"),
    **dict.fromkeys(
        (
            *("OTEL_DDP_DIR", "OTEL_DDP_SPOOL_DIR", "OTEL_DDP_HISTORY_DIR"),
            *(name for name in settings.names() if name.endswith(("CERTIFICATE", "CLIENT_KEY"))),
        ),
        ("here", "must be a path that begins with / or ~"),
    ),
    "OTEL_DDP_LINGER_S": ("nan", "must be a number of seconds, 0 or more"),
    "OTEL_DDP_JOURNAL_BYTES": ("2 apples", "must be a number of bytes, at least 131072"),
    "OTEL_DDP_SPOOL_BYTES": ("inf", "must be a number of bytes"),
    "OTEL_DDP_OVERHEAD": ("0", "must be all, or a share from 0.0001 to 1, as in 0.005"),
    "OTEL_EXPORTER_OTLP_PROTOCOL": ("http/json", "must be one of http/protobuf, grpc"),
    "OTEL_METRIC_EXPORT_INTERVAL": ("0", "must be a number of milliseconds above 0"),
    "OTEL_EXPORTER_OTLP_TIMEOUT": ("-1", "must be a number of milliseconds above 0"),
    "OTEL_EXPORTER_PROMETHEUS_PORT": ("65536", "must be a whole number from 0 to 65535"),
    "OTEL_SDK_DISABLED": ("1", "must be one of true, false"),
    "OTEL_TRACES_EXPORTER": (
        "non",
        "must be one of otlp, none, prometheus, console, logging, zipkin",
    ),
    "TRACEPARENT": (
        f"00-{'0' * 32}-{'1' * 16}-01",
        "must be a span as W3C Trace Context writes it",
    ),
}


@pytest.mark.parametrize("variable", sorted(OURS - FREE - OF_IDENTITY))
def test_a_setting_of_ours_that_means_nothing_is_an_error(variable: str) -> None:
    text, expected = WRONG.get(variable, ("banana", ""))

    with pytest.raises(ConfigError) as raised:
        settings.read({variable: text})

    said = str(raised.value)
    assert said.startswith(variable)
    assert said.endswith("Correct it, or unset it for the default.")
    # What an address for notifications holds may be a secret as a whole.
    assert (f"{expected}" in said and f"got {text!r}" in said) != (variable == "OTEL_DDP_NOTIFY")


@pytest.mark.parametrize("variable", sorted(settings.names() - OURS - FREE))
def test_a_standard_variable_that_means_nothing_counts_as_unset_and_is_told(variable: str) -> None:
    text, expected = WRONG.get(variable, ("banana", "must be"))
    env = {variable: text}

    (said,) = settings.doubts(env)

    assert settings.read(env) == settings.read({})
    assert settings.value(variable, env) is None
    assert said.startswith(f"{variable} {expected}")
    assert said.endswith(f"got {text!r}; it counts as unset")


@pytest.mark.parametrize(
    "env",
    [
        dict.fromkeys(FREE, "banana"),
        {"OTEL_METRICS_EXPORTER": "otlp,prometheus", "OTEL_TRACES_EXPORTER": " None "},
        {"TRACEPARENT": f"00-{'a' * 32}-{'1' * 16}-00-later"},
        {"OTEL_SDK_DISABLED": "False", "OTEL_EXPORTER_OTLP_COMPRESSION": "GZIP"},
    ],
)
def test_what_the_specification_allows_is_not_doubted(env: dict[str, str]) -> None:
    settings.read(env)

    assert list(settings.doubts(env)) == []


@pytest.mark.parametrize("variable", ["OTEL_DDP_DIR", "OTEL_DDP_NOTIFY", *sorted(OF_IDENTITY)])
def test_init_stops_at_what_means_nothing_and_leaves_nothing(variable: str, place: Here) -> None:
    os.environ[variable] = "banana"

    with pytest.raises(ConfigError, match=r"[Cc]orrect (it|the argument)|correct or unset it"):
        otel_ddp.init()

    assert otel_ddp.current() is None
    assert place.journals() == []


def test_one_rank_of_a_node_tells_what_counts_as_unset(
    place: Here, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # An agent is wanted, and none is started or waited for.
    monkeypatch.delenv("OTEL_DDP_AGENT")
    monkeypatch.setattr(agent_start, "ensure_agent", lambda _: None)
    monkeypatch.setattr(agent_start, "wait_for_agent", lambda *_: None)
    os.environ["OTEL_EXPORTER_OTLP_PROTOCOL"] = "http/json"

    otel_ddp.init(local_rank=1).finish()
    assert caplog.messages == []
    for _ in range(2):
        otel_ddp.init(local_rank=0).finish()

    (said,) = caplog.messages
    assert said.endswith("got 'http/json'; it counts as unset; `otel-ddp doctor` checks it.")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("[::1]", "::1"), ("::1", "::1"), ("0.0.0.0", "0.0.0.0"), ("localhost", "127.0.0.1")),
        # Else it is served on loopback.
        *((each, "127.0.0.1") for each in ("http://0.0.0.0", "0.0.0.0:9464", "[::1]:9464", "n1")),
    ],
)
def test_an_address_to_serve_on_may_be_in_brackets(text: str, expected: str) -> None:
    assert expected == settings.read({"OTEL_EXPORTER_PROMETHEUS_HOST": text}).scrape_host


def test_variables_are_read_when_init_is_called_not_at_import(place: Here) -> None:
    os.environ["OTEL_DDP_RUN"] = "of-the-script"

    with otel_ddp.init() as run:
        assert run.run == "of-the-script"


def test_an_argument_wins_over_the_variable_and_an_empty_variable_is_unset() -> None:
    env = {"OTEL_DDP_DIR": "/from/variable", "OTEL_DDP_AGENT": " "}

    assert settings.read(env).directory == "/from/variable"
    assert settings.read(env, directory="/from/argument").directory == "/from/argument"
    assert settings.read(env).agent == "auto"
    assert settings.read({"OTEL_METRIC_EXPORT_INTERVAL": "5"}).interval_s == 0.005
    assert settings.read({"OTEL_DDP_OVERHEAD": "all"}).overhead == math.inf


@pytest.mark.parametrize(
    ("text", "expected"), [("64k", None), ("1M", 2**20), ("0.5GiB", 2**29), ("200000", 200_000)]
)
def test_sizes_are_understood_with_their_units(text: str, expected: int | None) -> None:
    env = {"OTEL_DDP_JOURNAL_BYTES": text}

    if expected is None:
        with pytest.raises(ConfigError):
            settings.read(env)
    else:
        assert expected == settings.read(env).journal_bytes


def test_a_directory_may_be_named_from_home(tmp_path: Path) -> None:
    os.environ["HOME"] = str(tmp_path)
    names = ("OTEL_DDP_DIR", "OTEL_DDP_SPOOL_DIR", "OTEL_DDP_HISTORY_DIR")

    found = settings.read(dict.fromkeys(names, "~/here"))

    told = {found.directory, found.spool_directory, found.history_directory}
    assert told == {f"{tmp_path}/here"}


def test_the_page_of_settings_is_as_generated() -> None:
    assert settings_page(PAGE) == PAGE


def test_the_page_names_every_variable_that_the_source_reads_once() -> None:
    package = Path(settings.__file__).parent
    sources = [path.read_text() for path in package.rglob("*.py")]
    named = {name for text in sources for name in re.findall(r'"(OTEL_DDP_[A-Z_]+[A-Z])"', text)}

    assert {
        name
        for name in settings.names()
        if PAGE.count(f"| `{name}`") + PAGE.count(f", `{name}`") != 1
    } == set()
    # What a process tells its children is nobody's setting.
    assert named - settings.names() == {"OTEL_DDP_INHERITED_RUN"}


def test_disabled_means_no_journal_no_directory_and_no_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    where = tmp_path / "place"
    os.environ.update(OTEL_DDP_DIR=str(where), OTEL_SDK_DISABLED="true")

    with otel_ddp.init(config={"lr": 0.1}) as run:
        run.log({"loss": object()}, step="x")  # type: ignore[arg-type]
        with run.phase("eval"), run.span("inner"):
            run.event("now")
        assert run is otel_ddp.current()
        assert run is otel_ddp.init()

    assert not where.exists()
    assert caplog.records == []


def test_an_unknown_variable_gives_a_warning(place: Here, caplog: pytest.LogCaptureFixture) -> None:
    os.environ["OTEL_DDP_STRATGY"] = "main"

    otel_ddp.init(local_rank=1).finish()
    assert caplog.messages == []
    otel_ddp.init()

    assert caplog.messages == [
        "OTEL_DDP_STRATGY is not known and has no effect: docs/settings.md lists all"
    ]
