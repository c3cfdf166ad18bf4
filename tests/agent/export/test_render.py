"""Values, spans and events become OTLP; what OTLP cannot express is left out alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from google.protobuf.json_format import MessageToJson
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from golden import Golden
from otel_ddp import __version__, errors
from otel_ddp.agent.export.otlp.documents import Documents
from otel_ddp.agent.export.render import Renderer
from otel_ddp.agent.ledger import Buckets, Ledger
from otel_ddp.agent.queue.folder import Request
from otel_ddp.journal.layout import EVENT, SPAN
from otel_ddp.journal.parser import Document
from otel_ddp.vocabulary import catalog
from otlp_receiver import contents_in, points_in

LABELS = (("run", "r"), ("rank", "0"))
MS, HOUR_NS = 10**6, 3600 * 10**9
NO_TIMES = [-1, 2**63, float("inf"), float("nan"), "soon", None]


def span(**fields: Any) -> Document:
    content = {"name": "good", "id": "00" * 7 + "01", "start": 1, "end": 2, **fields}
    return Document(SPAN, content, 0)


def sent_of(documents: list[Document]) -> list[str]:
    """The names of the spans that leave."""
    (request,) = Documents({}).render([(LABELS, "", documents)])
    spans = contents_in("traces", request.body)
    assert request.points == len(spans)
    return [each.name for each in spans]


def test_values_of_different_hours_go_into_different_requests() -> None:
    ledger = Ledger()
    ledger.keep_history = True
    series = ledger.series(catalog.TRAINING_SCALAR, (*LABELS, ("name", "loss")))
    logged_ns = [HOUR_NS - 2 * MS, HOUR_NS - MS, HOUR_NS, 5 * HOUR_NS]
    for at_ns in logged_ns:
        ledger.log(series, 1.0, at_ns)

    requests = Renderer({}).metrics(ledger, 5 * HOUR_NS + MS)

    times = [[point.time_ns for point in points_in(each.body)] for each in requests]
    assert times == [logged_ns[:2], logged_ns[2:3], logged_ns[3:]]
    assert [each.oldest_s for each in requests] == [3599, 3600, 5 * 3600]


def points_of(requests: Sequence[Request]) -> list[tuple[str, int, bool]]:
    """The name of each point's metric, its time, and whether it ends its series."""
    points = points_in(*(each.body for each in requests))
    return [(each.metric, each.time_ns, each.value is None) for each in points]


def test_what_leaves_the_ledger_is_ended_once() -> None:
    ledger, renderer = Ledger(), Renderer({})
    ledger.keep_history = True
    board, other = (*LABELS, ("hw.id", "GPU-4")), (("run", "other"), ("rank", "0"))
    buckets = Buckets((1.0,) * (len(catalog.TRAINING_STEP_DURATION.bounds) + 1), 1.0)
    ledger.put(catalog.HW_GPU_UTILIZATION, board, 0.9, 1)
    ledger.put(catalog.TRAINING_STEPS, LABELS, 7.0, 1)
    ledger.put(catalog.TRAINING_STEP_DURATION, LABELS, buckets, 1)
    ledger.log(ledger.series(catalog.TRAINING_SCALAR, LABELS), 0.5, MS)
    ledger.put(catalog.TRAINING_STEPS, other, 7.0, 1)
    renderer.metrics(ledger, 2 * MS)

    ledger.forget(ledger.series(catalog.HW_GPU_UTILIZATION, board))
    ledger.drop(LABELS)
    # Never exported, so nobody knows it.
    ledger.put(catalog.TRAINING_STEPS, (*LABELS, ("new", "")), 1.0, 1)
    ledger.drop(LABELS)

    # What was logged is no state that ends: its last value stays where it is.
    assert sorted(points_of(renderer.metrics(ledger, 3 * MS))) == [
        ("hw.gpu.utilization", 3 * MS, True),
        ("training.step.duration", 3 * MS, True),
        ("training.steps", 3 * MS, False),
        ("training.steps", 3 * MS, True),
    ]
    assert points_of(renderer.metrics(ledger, 4 * MS)) == [("training.steps", 4 * MS, False)]


def test_a_series_that_another_has_replaced_or_another_agent_has_is_not_ended() -> None:
    ledger, renderer = Ledger(), Renderer({})
    ledger.put(catalog.TRAINING_STEPS, LABELS, 7.0, 1)
    renderer.metrics(ledger, MS)

    ledger.drop(LABELS)
    ledger.put(catalog.TRAINING_STEPS, LABELS, 1.0, 1)
    replaced = points_of(renderer.metrics(ledger, 2 * MS))
    ledger.drop(LABELS)
    ledger.put(catalog.TRAINING_STEPS, LABELS, 1.0, 1, project="other")
    of_another_project = points_of(renderer.metrics(ledger, 3 * MS))
    ledger.tells_ends = False
    ledger.drop(LABELS)

    assert replaced == [("training.steps", 2 * MS, False)]
    # In Prometheus a project is a job: these are two series.
    assert sorted(of_another_project) == [
        ("training.steps", 3 * MS, False),
        ("training.steps", 3 * MS, True),
    ]
    assert points_of(renderer.metrics(ledger, 4 * MS)) == []


def test_a_request_of_long_events_is_bounded_in_bytes() -> None:
    events = [
        Document(EVENT, {"name": "e", "time": at, "body": "x" * 100_000}, 0) for at in range(25)
    ]

    requests = Documents({}).render([(LABELS, "", events)])

    records = contents_in("logs", *(each.body for each in requests))
    assert [each.time_unix_nano for each in records] == list(range(25))
    assert max(len(each.body) for each in requests) < 1024 * 1024


def test_only_the_series_that_otlp_cannot_express_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(errors, "raise_failures", False)
    ledger = Ledger()
    ledger.keep_history = True

    for name in ("loss", "accuracy"):
        series = ledger.series(catalog.TRAINING_SCALAR, (*LABELS, ("name", name)))
        ledger.log(series, 1.0, 5 * MS)
    ledger.put(catalog.TRAINING_STEPS, LABELS, 1.0, 5, start_ns=-5)
    ledger.put(catalog.TRAINING_STEPS, (*LABELS, ("after", "it")), 7.0, 5, start_ns=5)

    requests = Renderer({}).metrics(ledger, HOUR_NS)

    sent = points_in(*(each.body for each in requests))
    assert [(each.metric, each.value) for each in sent] == [
        *[(catalog.TRAINING_SCALAR.name, 1.0)] * 2,
        (catalog.TRAINING_STEPS.name, 7.0),
    ]
    assert errors.failures == {"Renderer._points": 1}


@pytest.mark.parametrize(
    "odd",
    [{which: time} for which in ("start", "end") for time in NO_TIMES],
)
def test_only_the_span_that_cannot_be_told_is_left_out(odd: dict[str, Any]) -> None:
    assert sent_of([span(name="bad", **odd), span()]) == ["good"]


def shown(*messages: Any) -> list[str]:
    """A line each, but for the version and random ids."""
    lines = [MessageToJson(each, indent=None).replace(__version__, "VERSION") for each in messages]
    return [re.sub(r'("traceId": )".{24}"', r'\1"of 16 bytes"', each) for each in lines]


def test_a_span_has_all_that_is_known_of_it(golden: Golden) -> None:
    failed = span(
        name="save",
        trace="t",
        parent="00" * 7 + "02",
        start=10,
        end=30,
        step=7,
        attributes={"epoch": 3, "rank": "a user's", "none": None},
        error="OSError: disk\udfff full",
        exception=["OSError", "builtins.OSError"],
        link=["u", "00" * 7 + "03"],
    )

    (request,) = Documents({"service.name": "x"}).render([(LABELS, "", [failed, span()])])

    (of_resource,) = ExportTraceServiceRequest.FromString(request.body).resource_spans
    (of_scope,) = of_resource.scope_spans
    golden.check(*shown(of_resource.resource, of_scope.scope, *of_scope.spans))


def test_an_event_is_a_log_record_with_its_severity(golden: Golden) -> None:
    event = {"name": "exception", "time": 7, "body": "rank 0\ud800", "trace": "t"}
    events = [
        {**event, "severity": each, "span": "00" * 7 + "01"}
        for each in ("INFO", "WARN", "ERROR", "FATAL", "NOTICE")
    ]
    events.append({"name": "run.started", "time": 8})

    (request,) = Documents({}).render([(LABELS, "", [Document(EVENT, each, 0) for each in events])])

    (of_resource,) = ExportLogsServiceRequest.FromString(request.body).resource_logs
    (of_scope,) = of_resource.scope_logs
    golden.check(*shown(of_scope.scope, *of_scope.log_records))
