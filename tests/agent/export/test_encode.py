"""Every byte we write by hand against the official classes and the official encoder."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.logs.v1 import logs_pb2
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from otel_ddp.agent.export.otlp.encode import (
    HISTOGRAM_ATTRIBUTES,
    SCHEMA_URL,
    SEVERITIES,
    LogRecord,
    Span,
    SpanEvent,
    attribute_bytes,
    histogram_point,
    logs_request,
    metric,
    metrics_request,
    no_histogram,
    no_number,
    number_point,
    resource_bytes,
    spans_request,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
INT64 = st.integers(-(2**63), 2**63 - 1)
FINITE = st.floats(allow_nan=False)
ATTRIBUTES = st.dictionaries(TEXT, st.one_of(TEXT, st.booleans(), INT64, FINITE), max_size=6)
# The SDK leaves out a resource attribute without a name.
RESOURCE = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9),
    st.one_of(TEXT, st.booleans(), INT64, FINITE),
    max_size=4,
)
TIME_NS = st.integers(0, 2**64 - 1)
UINT64 = st.integers(0, 2**64 - 1)


def plain(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


def parse(request: bytes) -> Any:
    return ExportMetricsServiceRequest.FromString(request)


@given(ATTRIBUTES, TIME_NS, FINITE, TIME_NS)
def test_a_number_point_reads_back_as_it_was_written(
    attributes: dict[str, Any], time_ns: int, value: float, start_ns: int
) -> None:
    encoded = number_point(attribute_bytes(attributes), time_ns, value, start_ns)

    (point,) = metrics_pb2.Gauge.FromString(encoded).data_points
    assert attributes == plain(point.attributes)
    assert [type(v) for v in attributes.values()] == [
        type(v) for v in plain(point.attributes).values()
    ]
    assert (time_ns, start_ns) == (point.time_unix_nano, point.start_time_unix_nano)
    assert point.WhichOneof("value") == "as_double"
    assert value == point.as_double


@given(
    ATTRIBUTES,
    TIME_NS,
    TIME_NS,
    UINT64,
    FINITE,
    st.lists(FINITE, max_size=20),
    st.lists(UINT64, max_size=20),
)
def test_a_histogram_point_reads_back_as_it_was_written(
    attributes: dict[str, Any],
    time_ns: int,
    start_ns: int,
    count: int,
    total: float,
    bounds: list[float],
    bucket_counts: list[int],
) -> None:
    encoded = histogram_point(
        attribute_bytes(attributes, HISTOGRAM_ATTRIBUTES),
        time_ns,
        start_ns,
        count,
        total,
        bounds,
        bucket_counts,
    )

    (point,) = metrics_pb2.Histogram.FromString(encoded).data_points
    assert attributes == plain(point.attributes)
    assert (time_ns, start_ns) == (point.time_unix_nano, point.start_time_unix_nano)
    assert (count, total) == (point.count, point.sum)
    assert bounds == list(point.explicit_bounds)
    assert bucket_counts == list(point.bucket_counts)


@given(ATTRIBUTES, TIME_NS, st.lists(FINITE, max_size=20))
def test_the_end_of_a_series_has_its_attributes_and_no_value(
    attributes: dict[str, Any], time_ns: int, bounds: list[float]
) -> None:
    of_number = no_number(attribute_bytes(attributes), time_ns)
    of_histogram = no_histogram(attribute_bytes(attributes, HISTOGRAM_ATTRIBUTES), time_ns, bounds)

    (number,) = metrics_pb2.Gauge.FromString(of_number).data_points
    (histogram,) = metrics_pb2.Histogram.FromString(of_histogram).data_points
    for point in (number, histogram):
        assert attributes == plain(point.attributes)
        assert time_ns == point.time_unix_nano
        assert point.flags == metrics_pb2.DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK
    assert number.WhichOneof("value") is None
    assert histogram.HasField("sum")
    assert bounds == list(histogram.explicit_bounds)
    assert [0] * (len(bounds) + 1) == list(histogram.bucket_counts)


@given(
    resource=RESOURCE,
    scope=TEXT,
    version=TEXT,
    words=st.tuples(TEXT, TEXT, TEXT),
    series=st.lists(st.tuples(ATTRIBUTES, TIME_NS, FINITE, TIME_NS), max_size=5),
)
def test_the_official_encoder_writes_the_same_request(
    resource: dict[str, Any],
    scope: str,
    version: str,
    words: tuple[str, str, str],
    series: list[tuple[dict[str, Any], int, float, int]],
) -> None:
    cumulative = AggregationTemporality.CUMULATIVE
    numbers = [NumberDataPoint(a, start, time, value) for a, time, value, start in series]
    gauges = [NumberDataPoint(a, 0, time, value) for a, time, value, _ in series]
    bounds, counts = [0.1, 1.0, 10.0], [1, 2, 3, 4]
    histograms = [
        HistogramDataPoint(
            a,
            start,
            time,
            count=10,
            sum=value,
            bucket_counts=counts,
            explicit_bounds=bounds,
            min=None,  # type: ignore[arg-type]
            max=None,  # type: ignore[arg-type]
        )
        for a, time, value, start in series
    ]
    # An empty sum is one the official encoder never writes down as a sum.
    metrics = [Metric(*words, data=Gauge(gauges))] if series else []
    if series:
        metrics += [
            Metric(*words, data=Sum(numbers, cumulative, True)),
            Metric(*words, data=Sum(numbers, cumulative, False)),
            Metric(*words, data=Histogram(histograms, cumulative)),
        ]
    official = encode_metrics(
        MetricsData(
            [
                ResourceMetrics(
                    Resource(resource, SCHEMA_URL),
                    [
                        ScopeMetrics(
                            InstrumentationScope(scope, version, SCHEMA_URL), metrics, SCHEMA_URL
                        )
                    ],
                    SCHEMA_URL,
                )
            ]
        )
    )

    points = [number_point(attribute_bytes(a), t, v, s) for a, t, v, s in series]
    ours = metrics_request(
        resource_bytes(resource),
        scope,
        version,
        [
            metric(
                *words, "gauge", [number_point(attribute_bytes(a), t, v) for a, t, v, _ in series]
            ),
            metric(*words, "counter", points),
            metric(*words, "updown", points),
            metric(
                *words,
                "histogram",
                [
                    histogram_point(
                        attribute_bytes(a, HISTOGRAM_ATTRIBUTES), t, s, 10, v, bounds, counts
                    )
                    for a, t, v, s in series
                ],
            ),
        ]
        if series
        else [],
    )

    # A set of attributes has no order; the SDK sorts those of a resource in its own way.
    expected, got = official, parse(ours)
    for message in (expected, got):
        message.resource_metrics[0].resource.attributes.sort(key=lambda pair: pair.key)
    assert expected == got


def test_a_lone_surrogate_is_replaced_and_the_rest_of_the_request_survives() -> None:
    broken = "loss\ud800"
    point = number_point(attribute_bytes({broken: broken}), 1, 2.0)

    request = parse(
        metrics_request(
            resource_bytes({"service.name": broken}),
            broken,
            broken,
            [metric(broken, broken, broken, "gauge", [point])],
        )
    )

    of_scope = request.resource_metrics[0].scope_metrics[0]
    assert of_scope.scope.name == "loss?"
    assert of_scope.metrics[0].name == "loss?"
    assert plain(of_scope.metrics[0].gauge.data_points[0].attributes) == {"loss?": "loss?"}


def test_an_integer_that_otlp_cannot_hold_is_sent_as_text() -> None:
    encoded = number_point(attribute_bytes({"seed": 2**70, "edge": -(2**63)}), 1, 1.0)

    (point,) = metrics_pb2.Gauge.FromString(encoded).data_points
    assert plain(point.attributes) == {"seed": str(2**70), "edge": -(2**63)}


def test_points_longer_than_a_kilobyte_are_framed_correctly() -> None:
    long = attribute_bytes({"name": "x" * 20_000})

    data = metrics_pb2.Gauge.FromString(number_point(long, 1, 1.0) + number_point(long, 2, 2.0))

    assert [point.time_unix_nano for point in data.data_points] == [1, 2]


@given(ATTRIBUTES, st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3))
def test_spans_read_back_as_they_were_written(
    attributes: dict[str, Any], event_attributes: dict[str, Any]
) -> None:
    span = Span(
        name="checkpoint.save",
        trace_id=b"t" * 16,
        span_id=b"s" * 8,
        parent_span_id=b"p" * 8,
        start_ns=10,
        end_ns=30,
        attributes=attributes,
        error="disk\udfff full",
        events=[SpanEvent("retry", 20, event_attributes)],
    )
    calm = Span("step", b"t" * 16, b"u" * 8, b"", 1, 2)

    request = ExportTraceServiceRequest.FromString(
        spans_request({"service.name": "training"}, [span, calm], scope_version="1.2")
    )

    (of_resource,) = request.resource_spans
    (of_scope,) = of_resource.scope_spans
    first, second = of_scope.spans
    assert plain(of_resource.resource.attributes) == {"service.name": "training"}
    assert (of_scope.scope.name, of_scope.scope.version) == ("otel_ddp", "1.2")
    assert (first.name, first.trace_id, first.span_id, first.parent_span_id) == (
        "checkpoint.save",
        b"t" * 16,
        b"s" * 8,
        b"p" * 8,
    )
    assert (first.start_time_unix_nano, first.end_time_unix_nano) == (10, 30)
    assert attributes == plain(first.attributes)
    assert first.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    assert first.status.message == "disk? full"
    assert [(e.name, e.time_unix_nano) for e in first.events] == [("retry", 20)]
    assert second.status.code == trace_pb2.Status.STATUS_CODE_UNSET
    assert second.kind == trace_pb2.Span.SPAN_KIND_INTERNAL


def test_severities_have_the_numbers_of_the_specification() -> None:
    numbers = {word: int(number) for word, number in SEVERITIES.items()}

    assert numbers == {"TRACE": 1, "DEBUG": 5, "INFO": 9, "WARN": 13, "ERROR": 17, "FATAL": 21}


def test_log_records_read_back_as_they_were_written() -> None:
    record = LogRecord(
        time_ns=7,
        event_name="otel_ddp.rank.died",
        body="rank 3 was killed\ud800",
        attributes={"rank": 3, "alive": False},
        severity="ERROR",
        trace_id=b"t" * 16,
        span_id=b"s" * 8,
    )

    request = ExportLogsServiceRequest.FromString(logs_request({"service.name": "x"}, [record]))

    (message,) = request.resource_logs[0].scope_logs[0].log_records
    assert (message.time_unix_nano, message.event_name) == (7, "otel_ddp.rank.died")
    assert message.body.string_value == "rank 3 was killed?"
    assert plain(message.attributes) == {"rank": 3, "alive": False}
    assert message.severity_number == logs_pb2.SEVERITY_NUMBER_ERROR
    assert message.severity_text == "ERROR"
    assert (message.trace_id, message.span_id) == (b"t" * 16, b"s" * 8)
