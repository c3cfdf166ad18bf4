"""Every byte we write by hand against the official classes and the official encoder."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1 import metrics_pb2
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
    attribute_bytes,
    histogram_point,
    in_scope,
    metric,
    no_histogram,
    no_number,
    number_point,
    request,
    resource_bytes,
)
from otel_ddp.vocabulary.catalog import Kind
from otel_ddp.vocabulary.catalog import Metric as Described

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


def plain(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


def parse(request: bytes) -> Any:
    return ExportMetricsServiceRequest.FromString(request)


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
    nothing: Any = None
    histograms = [
        HistogramDataPoint(a, start, time, 10, value, counts, bounds, nothing, nothing)
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
    instrumentation = InstrumentationScope(scope, version, SCHEMA_URL)
    of_scope = ScopeMetrics(instrumentation, metrics, SCHEMA_URL)
    of_resource = ResourceMetrics(Resource(resource, SCHEMA_URL), [of_scope], SCHEMA_URL)
    expected = encode_metrics(MetricsData([of_resource]))

    points = [number_point(attribute_bytes(a), t, v, s) for a, t, v, s in series]
    told = {
        Kind.GAUGE: [number_point(attribute_bytes(a), t, v) for a, t, v, _ in series],
        Kind.COUNTER: points,
        Kind.UPDOWN: points,
        Kind.HISTOGRAM: [
            histogram_point(attribute_bytes(a, HISTOGRAM_ATTRIBUTES), t, s, v, bounds, counts)
            for a, t, v, s in series
        ],
    }
    name, description, unit = words
    ours = [
        part
        for kind, each in told.items()
        if each
        for part in metric(Described(name, kind, unit, description, (), "rank", "", (), name), each)
    ]
    got = parse(request(resource_bytes(resource), in_scope(scope, version, ours)))

    # A set of attributes has no order; the SDK sorts those of a resource in its own way.
    for message in (expected, got):
        message.resource_metrics[0].resource.attributes.sort(key=lambda pair: pair.key)
    assert expected == got


def test_an_integer_that_otlp_cannot_hold_is_sent_as_text() -> None:
    encoded = number_point(attribute_bytes({"seed": 2**70, "edge": -(2**63)}), 1, 1.0)

    (point,) = metrics_pb2.Gauge.FromString(encoded).data_points
    assert plain(point.attributes) == {"seed": str(2**70), "edge": -(2**63)}
