"""Values, spans and events as OTLP, the same as on the endpoint; what OTLP lacks is left out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest
from google.protobuf.json_format import MessageToJson
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client import generate_latest
from tools.exposition import parse

from golden import Golden
from otel_ddp import __version__
from otel_ddp.agent.export.folder import Request
from otel_ddp.agent.export.otlp.render import Renderer
from otel_ddp.agent.ledger import Buckets, Labels, Ledger, is_logged
from otel_ddp.agent.serve.endpoint import LedgerRegistry
from otel_ddp.journal.layout import EVENT, SPAN
from otel_ddp.journal.parser import Document
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.catalog import Kind, Metric
from otlp_receiver import contents_in, points_in

LABELS = (("run", "r"), ("rank", "0"))
MS, HOUR_NS = 10**6, 3600 * 10**9


@pytest.fixture
def ledger() -> Ledger:
    made = Ledger()
    made.keep_history = True
    return made


def span(**fields: Any) -> Document:
    content = {"name": "good", "id": "00" * 7 + "01", "start": 1, "end": 2, **fields}
    return Document(SPAN, content, 0)


def test_values_of_different_hours_go_into_different_requests(ledger: Ledger) -> None:
    series = ledger.series(catalog.TRAINING_SCALAR, (*LABELS, ("name", "loss")))
    logged_ns = [HOUR_NS - 2 * MS, HOUR_NS - MS, HOUR_NS, 5 * HOUR_NS]
    for at_ns in logged_ns:
        ledger.log(series, 1.0, at_ns)

    requests = [*Renderer({}).metrics(ledger, 5 * HOUR_NS + MS)]

    times = [[point.time_ns for point in points_in(each.body)] for each in requests]
    assert times == [logged_ns[:2], logged_ns[2:3], logged_ns[3:]]
    assert [each.oldest_s for each in requests] == [3599, 3600, 5 * 3600]


def points_of(requests: Iterable[Request]) -> list[tuple[str, int, bool]]:
    """The name of each point's metric, its time, and whether it ends its series."""
    points = points_in(*(each.body for each in requests))
    return [(each.metric, each.time_ns, each.value is None) for each in points]


def test_what_leaves_the_ledger_is_ended_once(ledger: Ledger) -> None:
    renderer = Renderer({})
    board, other = (*LABELS, ("hw.id", "GPU-4")), (("run", "other"), ("rank", "0"))
    buckets = Buckets((1.0,) * (len(catalog.TRAINING_STEP_DURATION.bounds) + 1), 1.0)
    ledger.put(catalog.HW_GPU_UTILIZATION, board, 0.9, 1)
    ledger.put(catalog.TRAINING_STEPS, LABELS, 7.0, 1)
    ledger.put(catalog.TRAINING_STEP_DURATION, LABELS, buckets, 1)
    ledger.log(ledger.series(catalog.TRAINING_SCALAR, LABELS), 0.5, MS)
    ledger.put(catalog.TRAINING_STEPS, other, 7.0, 1)
    points_of(renderer.metrics(ledger, 2 * MS))

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


def test_a_series_that_another_one_has_replaced_is_not_ended(ledger: Ledger) -> None:
    renderer = Renderer({})
    ledger.put(catalog.TRAINING_STEPS, LABELS, 7.0, 1)
    points_of(renderer.metrics(ledger, MS))

    ledger.drop(LABELS)
    ledger.put(catalog.TRAINING_STEPS, LABELS, 1.0, 1)

    assert points_of(renderer.metrics(ledger, 2 * MS)) == [("training.steps", 2 * MS, False)]


def test_a_request_of_long_events_is_bounded_in_bytes() -> None:
    events = [
        Document(EVENT, {"name": "e", "time": at, "body": "x" * 100_000}, 0) for at in range(25)
    ]

    requests = [*Renderer({}).documents([(LABELS, "", events)])]

    records = contents_in("logs", *(each.body for each in requests))
    assert [each.time_unix_nano for each in records] == list(range(25))
    assert max(len(each.body) for each in requests) < 1024 * 1024


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

    (request,) = Renderer({"service.name": "x"}).documents([(LABELS, "", [failed, span()])])

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

    (request,) = Renderer({}).documents(
        [(LABELS, "", [Document(EVENT, each, 0) for each in events])]
    )

    (of_resource,) = ExportLogsServiceRequest.FromString(request.body).resource_logs
    (of_scope,) = of_resource.scope_logs
    golden.check(*shown(of_scope.scope, *of_scope.log_records))


NOW_NS = 1_700_000_000_000_000_000
MS_NS = 10**6


def labels_of(metric: Metric) -> Labels:
    names = (*catalog.LABELS[metric.labels], *metric.attributes)
    return tuple((name, f"value of {name}") for name in names)


def fill(ledger: Ledger, metric: Metric) -> None:
    labels = labels_of(metric)
    if metric.kind is Kind.HISTOGRAM:
        counts = tuple(float(i) for i in range(len(metric.bounds) + 1))
        ledger.put(metric, labels, Buckets(counts, 12.5), NOW_NS, 7)
    elif is_logged(metric):
        ledger.log(ledger.series(metric, labels), 0.25, NOW_NS)
    else:
        ledger.put(metric, labels, 3.0, NOW_NS, 7)


@pytest.mark.parametrize("metric", catalog.METRICS, ids=lambda metric: metric.name)
def test_every_metric_is_the_same_on_the_endpoint_and_over_otlp(
    metric: Metric, ledger: Ledger
) -> None:
    fill(ledger, metric)
    scraped = list(parse(generate_latest(LedgerRegistry(ledger)).decode()))
    (request,) = Renderer({"service.name": "otel-ddp"}).metrics(ledger, NOW_NS)

    (point,) = points_in(request.body)
    assert (point.metric, point.unit, point.kind) == (metric.name, metric.unit, metric.kind.value)
    assert (point.attributes, point.time_ns) == (dict(labels_of(metric)), NOW_NS)

    # The collector's translation of what was sent is what the scrape shows.
    name = catalog.prometheus_name(point.metric, metric.kind, point.unit)
    labels = {catalog.prometheus_label(key): value for key, value in point.attributes.items()}
    if metric.kind is Kind.HISTOGRAM:
        by_name = {each: value for each, found, value in scraped if "le" not in found}
        told = point.value
        assert by_name == {f"{name}_count": told.count, f"{name}_sum": told.sum}
        edges = [(found["le"], value) for each, found, value in scraped if "le" in found]
        running = [sum(told.bucket_counts[: i + 1]) for i in range(len(told.bucket_counts))]
        assert edges == [
            (repr(float(bound)), seen)
            for bound, seen in zip(told.explicit_bounds, running, strict=False)
        ] + [("+Inf", float(told.count))]
    else:
        assert scraped == [(name, labels, point.value)]


def test_requests_are_of_bounded_size_and_lose_nothing(ledger: Ledger) -> None:
    series = [
        ledger.series(catalog.TRAINING_SCALAR, (("name", f"m{i}"), ("split", "train")))
        for i in range(3)
    ]
    for at in range(2500):
        for each in series:
            ledger.log(each, float(at), NOW_NS + at * 10_000_000)

    requests = [*Renderer({}).metrics(ledger, NOW_NS)]
    again = [*Renderer({}).metrics(ledger, NOW_NS)]

    assert [request.points for request in requests] == [2000, 2000, 2000, 1500]
    found: dict[str, list[tuple[int, float]]] = {}
    for point in points_in(*(request.body for request in requests)):
        found.setdefault(point.attributes["name"], []).append((point.time_ns, point.value))
    expected = [(NOW_NS + at * 10_000_000, float(at)) for at in range(2500)]
    assert found == {f"m{i}": expected for i in range(3)}
    assert again == []


def test_logged_and_current_values_go_in_requests_of_their_own(ledger: Ledger) -> None:
    fill(ledger, catalog.TRAINING_SCALAR)
    ledger.put(catalog.TRAINING_STATE, (("rank", "0"),), 1.0, NOW_NS)
    ledger.put(catalog.TRAINING_NONFINITE, (("rank", "0"),), 0.0, NOW_NS)

    requests = [*Renderer({}).metrics(ledger, NOW_NS)]

    found = {
        request.irreplaceable: [point.metric for point in points_in(request.body)]
        for request in requests
    }
    assert len(requests) == 2
    assert found == {
        True: ["training.scalar"],
        False: ["training.state", "training.nonfinite"],
    }


def test_values_logged_at_one_moment_all_arrive_up_to_a_minute_ahead(ledger: Ledger) -> None:
    series = ledger.series(catalog.TRAINING_SCALAR, (("name", "loss"),))

    first = [ledger.log(series, float(number), NOW_NS) for number in range(60_003)]
    last_shown = series.value
    # Values that come faster are thinned to one a millisecond.
    then = [ledger.log(series, 1.0, NOW_NS + each * MS_NS) for each in (1, 1, 2, 2)]
    # A clock that was set back: to times that receivers refuse, then further than they look ahead.
    back = [ledger.log(series, 2.0, NOW_NS - each * MS_NS) for each in (1, 500_000, 600_000)]

    minute_later_ns = NOW_NS + 60_000 * MS_NS
    assert first == [*range(NOW_NS, minute_later_ns + 1, MS_NS), None, None]
    assert last_shown == 60_002.0
    assert then == [minute_later_ns + MS_NS, None, minute_later_ns + 2 * MS_NS, None]
    assert back == [None, None, NOW_NS - 600_000 * MS_NS]
    sent = [at for at in (*first, *then, *back) if at is not None]
    assert series.history is not None
    assert series.history[0] == sent


def test_projects_become_services_of_their_own(ledger: Ledger) -> None:
    for project in ("a", "b", ""):
        ledger.put(catalog.TRAINING_STATE, (("run", project),), 1.0, NOW_NS, project=project)

    requests = Renderer({"service.name": "otel-ddp"}).metrics(ledger, NOW_NS)

    resources = [point.resource for each in requests for point in points_in(each.body)]
    assert [each["service.name"] for each in resources] == ["a", "b", "otel-ddp"]
