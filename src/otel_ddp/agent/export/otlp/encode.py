"""Encodes OTLP metrics from attributes that were encoded once; decodes replies of a collector.

The official encoder creates a protobuf object for each attribute of each point: 20 us per point.
The attributes of a series never change, so they are encoded once. A point is then two or three
numbers, followed by these bytes. The field tags are those of metrics.proto in
opentelemetry/proto/metrics/v1. Tests compare them with the official classes, which still encode
the few histograms, spans and log records.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from struct import Struct

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK,
    HistogramDataPoint,
)

from otel_ddp.agent.export.delivery import Outcome
from otel_ddp.agent.export.post import one_line
from otel_ddp.vocabulary.catalog import Kind, Metric

# Size limit of a request. Most gateways refuse requests above 1 MiB (nginx) or 4 MiB (gRPC).
MOST_BYTES = 900 * 1024

AttributeValue = str | bool | int | float
Attributes = Mapping[str, AttributeValue]

# The release of the semantic conventions that our names follow.
SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"
SCOPE = "otel_ddp"

# The field number of `attributes` in each protobuf message.
NUMBER_ATTRIBUTES = 7
HISTOGRAM_ATTRIBUTES = 9
RESOURCE_ATTRIBUTES = 1
LOG_ATTRIBUTES = 6
SPAN_ATTRIBUTES = 9

_DOUBLE = Struct("<d").pack
# Each byte is the tag of the number after it: start (field 2), time (3) and as_double (4).
_TIME_VALUE = Struct("<BQBd").pack
_START_TIME_VALUE = Struct("<BQBQBd").pack
_TIME = Struct("<BQ").pack

# The encoded field `flags` (number 8) of a point that says "no recorded value".
_NO_NUMBER = b"\x40\x01"

_LONGEST_CACHED = 200
_CUMULATIVE = b"\x10\x02"
_MONOTONIC = b"\x18\x01"


# Cached, since most numbers are repeated lengths, and this loop would take as long as encoding the
# rest of a point.
@lru_cache(1024)
def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def element(number: int, content: bytes) -> bytes:
    """A length-delimited field: a string, a message or packed numbers."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _around(number: int, parts: Sequence[bytes]) -> list[bytes]:
    """A length-delimited field, as a list of parts. `request` joins all parts with a single
    copy."""
    return [_varint(number << 3 | 2) + _varint(sum(map(len, parts))), *parts]


def utf8(text: str) -> bytes:
    """Encode any text, even with lone surrogates."""
    # A lone surrogate cannot be encoded in UTF-8. A collector would refuse the whole request.
    return text.encode("utf-8", "replace")


def _any_value(value: AttributeValue) -> bytes:
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return b"\x18" + _varint(value & (2**64 - 1))
    if isinstance(value, float):
        return b"\x21" + _DOUBLE(value)
    # An integer beyond 64 bits is sent as text.
    return element(1, utf8(value if isinstance(value, str) else str(value)))


def attribute_bytes(attributes: Attributes, field: int = NUMBER_ATTRIBUTES) -> bytes:
    """Encode attributes as field number *field*, which depends on the message."""
    return b"".join(
        _text_attribute(field, name, value)
        if type(value) is str and len(value) <= _LONGEST_CACHED
        else _attribute(field, name, value)
        for name, value in attributes.items()
    )


def _attribute(field: int, name: str, value: AttributeValue) -> bytes:
    return element(field, element(1, utf8(name)) + element(2, _any_value(value)))


# Cached: all spans and log records of a rank have the same labels.
_text_attribute = lru_cache(1024)(_attribute)


def number_point(attributes: bytes, time_ns: int, value: float, start_ns: int = 0) -> bytes:
    """One point of a counter, an up-down counter or a gauge."""
    if start_ns:
        body = _START_TIME_VALUE(0x11, start_ns, 0x19, time_ns, 0x21, value) + attributes
    else:
        body = _TIME_VALUE(0x19, time_ns, 0x21, value) + attributes
    return b"\x0a" + _varint(len(body)) + body


def most_points(attributes: bytes, most: int) -> int:
    """The number of points with these attributes that fit into a request, at most *most*."""
    return max(min(most, MOST_BYTES // (len(attributes) + 24)), 1)


def histogram_point(
    attributes: bytes,
    time_ns: int,
    start_ns: int,
    total: float,
    bounds: Sequence[float],
    bucket_counts: Sequence[int],
    flags: int = 0,
) -> bytes:
    """One point of a histogram. *bucket_counts* has one element more than *bounds*."""
    point = HistogramDataPoint(
        start_time_unix_nano=start_ns,
        time_unix_nano=time_ns,
        count=sum(bucket_counts),
        sum=total,
        bucket_counts=bucket_counts,
        explicit_bounds=bounds,
        flags=flags,
    )
    return element(1, point.SerializeToString() + attributes)


def no_number(attributes: bytes, time_ns: int) -> bytes:
    """A point that ends the series of a counter, an up-down counter or a gauge."""
    return element(1, _TIME(0x19, time_ns) + attributes + _NO_NUMBER)


def no_histogram(attributes: bytes, time_ns: int, bounds: Sequence[float]) -> bytes:
    """A point that ends the series of a histogram. It has all buckets, since some backends store a
    series for each bucket."""
    zeros = [0] * (len(bounds) + 1)
    flag = DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK
    return histogram_point(attributes, time_ns, 0, 0.0, bounds, zeros, flag)


def metric(described: Metric, points: Sequence[bytes]) -> list[bytes]:
    """One metric with its points, as a list of parts. Sums and histograms are cumulative."""
    if described.kind is Kind.GAUGE:
        data = _around(5, points)
    elif described.kind is Kind.HISTOGRAM:
        data = _around(9, [*points, _CUMULATIVE])
    elif described.kind is Kind.COUNTER:
        data = _around(7, [*points, _CUMULATIVE, _MONOTONIC])
    else:
        data = _around(7, [*points, _CUMULATIVE])
    texts = (described.name, described.description, described.unit)
    heads = [element(field, utf8(text)) for field, text in enumerate(texts, start=1)]
    return _around(2, [*heads, *data])


def resource_bytes(attributes: Attributes) -> bytes:
    """The resource, encoded for `request`."""
    return element(1, attribute_bytes(attributes, RESOURCE_ATTRIBUTES))


_SCHEMA = element(3, SCHEMA_URL.encode())


def in_scope(name: str, version: str, contents: Iterable[bytes]) -> list[bytes]:
    """One scope with its metrics, spans or log records, each encoded as field 2. Returns a list of
    parts."""
    scope = element(1, utf8(name)) + element(2, utf8(version))
    return _around(2, [element(1, scope), *contents, _SCHEMA])


def request(resource: bytes, scope: Iterable[bytes]) -> bytes:
    """A request for metrics, traces or logs, which all have the same field numbers."""
    return b"".join(_around(1, [resource, *scope, _SCHEMA]))


# Status codes that mean that the content of the request is wrong.
_ABOUT_THE_REQUEST = frozenset({400, 422})
# Status codes that do not depend on the request's content, but on addresses, tokens, proxies or
# busy servers.
ABOUT_THE_ROUTE = frozenset(
    {401, 402, 403, 404, 405, 407, 408, 410, 415, 421, 425, 426, 429, 451, 502, 503, 504, 511}
)
_ADVICE = {
    401: "token rejected (OTEL_EXPORTER_OTLP_HEADERS)",
    403: "token rejected (OTEL_EXPORTER_OTLP_HEADERS)",
    404: "{} are not taken there",
    413: "requests have up to 900 KiB: raise its limit to 1 MiB",
}
_REDIRECT = "a redirect, which OTLP does not follow (OTEL_EXPORTER_OTLP_ENDPOINT)"


def answered(status: int, why: str, detail: str, signal: str, retry_after_s: float) -> Outcome:
    """The outcome of a refused request by its HTTP status. *detail*: the receiver's reason."""
    is_redirect = 300 <= status < 400
    advice = _REDIRECT if is_redirect else _ADVICE.get(status, "").format(signal)
    said = ": ".join(filter(None, (why, advice or detail)))
    if status in _ABOUT_THE_REQUEST:
        return Outcome("refused", said)
    doubtful = status >= 400 and status not in ABOUT_THE_ROUTE
    return Outcome("retry", said, retry_after_s=retry_after_s, doubtful=doubtful)


def accepted_with(reply: bytes, where: str) -> Outcome:
    """The outcome of an accepted request. The reply may say that some of its data was rejected."""
    rejected, message = 0, ""
    # Some backends reply with text, which is ignored.
    with contextlib.suppress(DecodeError):
        # The replies of all three services have equal field numbers.
        partial = ExportMetricsServiceResponse.FromString(reply).partial_success
        rejected = max(partial.rejected_data_points, 0)
        message = one_line(partial.error_message)
    why = f"{where} accepted the rest" if rejected else f"accepted by {where}"
    return Outcome("delivered", f"{why}: {message}" if message else why, rejected=rejected)
