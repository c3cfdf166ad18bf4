"""Exceptions, verdicts and events, as the board Run asks Loki for them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from tools.dashboards.queries import Board, boards
from tools.stack.build import Binaries

from node import Node, finished, until
from otlp_receiver import Receiver, attributes_of
from stack.asked import ALL, as_written
from stack.servers import CONFIGURATIONS, Collector

# Of a line, labels included. Loki refuses a request with a line that has more.
MOST_METADATA = 128
_LABELS = ("service.name", "service.namespace", "service.instance.id")
_LEVELS = ((4, "trace"), (8, "debug"), (12, "info"), (16, "warn"), (20, "error"), (24, "fatal"))
_STREAM = re.compile(r"\s*\{(\w+)(=~?)(\"(?:[^\"\\]|\\.)*\")\}\s*")
_FILTER = re.compile(r"\|\s*(\w+)\s*(=~?)\s*(\"(?:[^\"\\]|\\.)*\")\s*")
_FORMAT = re.compile(r"\|\s*line_format\s+`([^`]*)`\s*")


class Line(NamedTuple):
    """One record."""

    text: str
    labels: dict[str, str]


def received(request: Any) -> Iterator[Line]:
    """The lines of a request of OTLP; raises ValueError where Loki refuses one."""
    for of_resource in request.resource_logs:
        resource = _attributes(of_resource.resource.attributes)
        for of_scope in of_resource.scope_logs:
            for record in of_scope.log_records:
                found = {**resource, **_attributes(record.attributes)}
                found["scope_name"] = of_scope.scope.name
                found["scope_version"] = of_scope.scope.version
                found["severity_text"] = record.severity_text
                found["severity_number"] = str(record.severity_number)
                found["trace_id"], found["span_id"] = record.trace_id.hex(), record.span_id.hex()
                number = record.severity_number
                levels = (word for most, word in _LEVELS if 0 < number <= most)
                found["detected_level"] = next(levels, "unknown")
                # What is empty is not there.
                labels = {name: value for name, value in found.items() if value}
                if len(labels) > MOST_METADATA + len(_LABELS):
                    raise ValueError("structured metadata has too many entries")
                yield Line(record.body.string_value, labels)


def _attributes(pairs: Any) -> dict[str, str]:
    return {
        re.sub(r"\W", "_", name): str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in attributes_of(pairs).items()
    }


def chosen(lines: list[Line], query: str) -> list[Line]:
    """What a query for lines brings; raises ValueError for one that is not understood."""
    stream = _STREAM.match(query)
    if stream is None:
        raise ValueError(f"no stream is chosen: {query}")
    rest = query[stream.end() :]
    found = [line for line in lines if _matches(line, *stream.groups())]
    while rest:
        if (wanted := _FILTER.match(rest)) is not None:
            found = [line for line in found if _matches(line, *wanted.groups())]
        elif (wanted := _FORMAT.match(rest)) is not None:
            shape = wanted[1]
            found = [line._replace(text=_formatted(shape, line)) for line in found]
        else:
            raise ValueError(f"not understood: {rest}")
        rest = rest[wanted.end() :]
    return found


def _matches(line: Line, name: str, how: str, quoted: str) -> bool:
    value, wanted = line.labels.get(name, ""), json.loads(quoted)
    return bool(re.fullmatch(wanted, value)) if how == "=~" else value == wanted


def _formatted(shape: str, line: Line) -> str:
    def maybe(found: re.Match[str]) -> str:
        return found[2] if line.labels.get(found[1]) else ""

    text = re.sub(r"\{\{if \.(\w+)\}\}(.*?)\{\{end\}\}", maybe, shape, flags=re.DOTALL)
    text = re.sub(r"\{\{\.(\w+)\}\}", lambda found: line.labels.get(found[1], ""), text)
    return text.replace("{{__line__}}", line.text)


RUN: Board = next(board for board in boards() if board.title == "Run")

# Rank 0 saves and waits for its order; rank 3 fails.
CODE = """
import os, sys
import otel_ddp
rank = int(os.environ["RANK"])
run = otel_ddp.init(run='"r"', group="g", description="d", tags=["a"])
run.log({"loss": 1.0}, step=7)
if rank == 0:
    with run.phase("checkpoint"):
        pass
    run.event("lr drop", factor=0.1)
    run.alert("loss rises", "it is 3", "warn")
    sys.stdin.readline()
else:
    raise ValueError("of rank 3")
"""


class Standin(NamedTuple):
    """The records as the collector sends them: test_grafana.py asks a real Loki."""

    receiver: Receiver

    def ask(self, query: str) -> list[Line]:
        sent = [each.message for each in self.receiver.requests if each.signal == "logs"]
        return chosen([line for each in sent for line in received(each)], query)


@pytest.fixture(scope="module")
def store(binaries: Binaries, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standin]:
    """Where the story was sent to, whole."""
    with Receiver() as receiver, Node(WORLD_SIZE="4") as node:
        found = Standin(receiver)
        collector = Collector(
            *(binaries, tmp_path_factory.mktemp("collector"), CONFIGURATIONS / "all-in-one.yaml"),
            LOGS_EXPORTER="otlp_http/logs",
            LOGS_URL=f"{receiver.start_http()}/v1/logs",
            # Metrics have nowhere to go here.
            METRICS_URL="http://127.0.0.1:1/nowhere",
        )
        with collector:
            node.export_to(collector.http)
            ranks = [
                node.python(CODE, RANK=rank, LOCAL_RANK=rank, LOCAL_WORLD_SIZE="4")
                for rank in ("0", "3")
            ]
            ranks[1].wait()
            until(
                lambda: asked(found, rank="3", severity="warnings and above"), "rank 3's exception"
            )
            until(lambda: verdicts(found), "the verdict")
            ranks[0].stdin.write("\n")
            finished(ranks[0])
            node.stop_agent()
        yield found


def asked(store: Standin, rank: str = ALL, severity: str = "everything") -> list[Line]:
    """The lines of the panel with these choices put in as Grafana does."""
    query = next(each for each in RUN.log_questions if each.panel_type == "logs").expr
    for variable in RUN.variables:
        if variable.kind == "datasource":
            continue
        wanted = {"run": '\\"r\\"', "rank": rank, "service": variable.query}.get(variable.name, ALL)
        if variable.name == "severity":
            wanted = next(each.value for each in variable.options if each.text == severity)
        value = wanted if variable.name == "run" else as_written(variable, wanted)
        query = query.replace(f"${variable.name}", value)
    return store.ask(query)


def verdicts(store: Standin) -> list[Line]:
    return [line for line in asked(store) if line.labels.get("verdict") == "death"]


def texts(lines: list[Line]) -> list[str]:
    return sorted(line.text.partition("\n")[0] for line in lines)


def test_the_exception_that_ended_rank_3_is_among_the_lines_of_the_run(store: Standin) -> None:
    found = asked(store, rank="3", severity="warnings and above")

    (ended,) = [line for line in found if line.labels.get("exception_type")]
    assert ended.text.splitlines()[0] == "rank 3 step 7 ValueError: of rank 3"
    # The stack trace is in the line, where it is looked for.
    assert ended.text.splitlines()[1] == "Traceback (most recent call last):"
    assert ended.text.endswith("ValueError: of rank 3\n")
    assert ended.labels["detected_level"] == "fatal"
    assert len(ended.labels["trace_id"]) == 32


def test_verdicts_checkpoints_and_events_are_among_them(store: Standin) -> None:
    (death,) = verdicts(store)
    assert "ValueError: of rank 3" in death.text

    assert [text for text in texts(asked(store, rank="0")) if "rank 0 step" in text] == [
        "rank 0 step 7 checkpoint saved in 0.0 s",
        "rank 0 step 7 loss rises: it is 3",
        "rank 0 step 7 lr drop",
    ]


def test_severity_narrows_what_is_shown(store: Standin) -> None:
    errors = asked(store, severity="errors")

    said = [line for line in errors if "verdict" not in line.labels]
    assert texts(said) == ["rank 3 step 7 ValueError: of rank 3"]
    assert [line.labels["verdict"] for line in errors if line not in said] == ["death"]
