"""Encodes OTLP's metrics, from attributes that were encoded once; and reads a collector's reply.

The official encoder builds a protobuf object for every attribute of every point, which takes about
20 us a point. The attributes of a series never change, so they are encoded once. A point is these
bytes with two or three numbers in front. The tags below are those of
opentelemetry/proto/metrics/v1/metrics.proto; a test compares each of them with the official
classes. Histograms, spans and log records are few: the official classes encode them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from struct import Struct, pack

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

# Gateways mostly refuse more than 1 MiB (nginx) or 4 MiB (gRPC) at once.
MOST_BYTES = 900 * 1024

AttributeValue = str | bool | int | float
Attributes = Mapping[str, AttributeValue]

# The release of the semantic conventions that our names are those of.
SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"
SCOPE = "otel_ddp"

# The number of the field `attributes`, which differs from message to message.
NUMBER_ATTRIBUTES = 7
HISTOGRAM_ATTRIBUTES = 9
RESOURCE_ATTRIBUTES = 1
EVENT_ATTRIBUTES = 3
LOG_ATTRIBUTES = 6
SPAN_ATTRIBUTES = 9

_DOUBLE = Struct("<d").pack
# Tag and number, twice or three times: start (field 2), time (3) and as_double (4).
_TIME_VALUE = Struct("<BQBd").pack
_START_TIME_VALUE = Struct("<BQBQBd").pack
_TIME = Struct("<BQ").pack

# The flag "no recorded value" of a number (field 8).
_NO_NUMBER = b"\x40\x01"

_LONGEST_CACHED = 200
_CUMULATIVE = b"\x10\x02"
_MONOTONIC = b"\x18\x01"


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


# Few points are longer than this, and a look-up costs a fifth of the loop above.
_SHORT = tuple(_varint(number) for number in range(1024))


def _length(number: int) -> bytes:
    return _SHORT[number] if number < 1024 else _varint(number)


def element(number: int, content: bytes) -> bytes:
    """Field `number` with a length in front: a string, a message or packed numbers."""
    return _varint(number << 3 | 2) + _length(len(content)) + content


def _around(number: int, parts: Sequence[bytes]) -> list[bytes]:
    """The same around several parts, which are large: only `request` copies them."""
    return [_varint(number << 3 | 2) + _length(sum(map(len, parts))), *parts]


def utf8(text: str) -> bytes:
    """A text as bytes, whatever it holds."""
    # A lone surrogate has no UTF-8: one of them would make the whole request unreadable.
    return text.encode("utf-8", "replace")


def _any_value(value: AttributeValue) -> bytes:
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return b"\x18" + _varint(value & (2**64 - 1))
    if isinstance(value, float):
        return b"\x21" + _DOUBLE(value)
    # An integer that OTLP cannot hold, such as 2**70, is sent as text.
    return element(1, utf8(value if isinstance(value, str) else str(value)))


def attribute_bytes(attributes: Attributes, field: int = NUMBER_ATTRIBUTES) -> bytes:
    """The attributes of a series, encoded; points of histograms need HISTOGRAM_ATTRIBUTES."""
    return b"".join(
        _text_attribute(field, name, value)
        if type(value) is str and len(value) <= _LONGEST_CACHED
        else _attribute(field, name, value)
        for name, value in attributes.items()
    )


def _attribute(field: int, name: str, value: AttributeValue) -> bytes:
    return element(field, element(1, utf8(name)) + element(2, _any_value(value)))


# Cached, because every span and every log record of a rank has the same labels.
_text_attribute = lru_cache(1024)(_attribute)


def number_point(attributes: bytes, time_ns: int, value: float, start_ns: int = 0) -> bytes:
    """One point of a counter, an up-down counter or a gauge."""
    if start_ns:
        body = _START_TIME_VALUE(0x11, start_ns, 0x19, time_ns, 0x21, value) + attributes
    else:
        body = _TIME_VALUE(0x19, time_ns, 0x21, value) + attributes
    size = len(body)
    return b"\x0a" + (_SHORT[size] if size < 1024 else _varint(size)) + body


def number_points(attributes: bytes, times: Sequence[int], values: Sequence[float]) -> bytes:
    """Points of one gauge: all are equally long, so a byte is written into all of them at once."""
    head, count = b"\x0a" + _length(18 + len(attributes)), len(times)
    # Two tags, and two numbers of eight bytes.
    point = head + _TIME_VALUE(0x19, 0, 0x21, 0.0) + attributes
    found = bytearray(point * count)
    for at, numbers in ((1, pack(f"<{count}Q", *times)), (10, pack(f"<{count}d", *values))):
        for byte in range(8):
            found[len(head) + at + byte :: len(point)] = numbers[byte::8]
    return bytes(found)


def most_points(attributes: bytes, most: int) -> int:
    """How many points of these attributes a request may hold: *most*, and one at least."""
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
    """One point of a histogram; there is one more bucket than there are bounds."""
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
    """The end of a series of numbers: from here on it has no value."""
    return element(1, _TIME(0x19, time_ns) + attributes + _NO_NUMBER)


def no_histogram(attributes: bytes, time_ns: int, bounds: Sequence[float]) -> bytes:
    """The end of a histogram. Prometheus has a series for each bucket and one for the sum."""
    zeros = [0] * (len(bounds) + 1)
    flag = DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK
    return histogram_point(attributes, time_ns, 0, 0.0, bounds, zeros, flag)


def metric(described: Metric, points: Sequence[bytes]) -> list[bytes]:
    """One metric with its points, in parts; sums are cumulative."""
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
    """What belongs to one scope: metrics, spans or log records, each as element 2; in parts."""
    scope = element(1, utf8(name)) + element(2, utf8(version))
    return _around(2, [element(1, scope), *contents, _SCHEMA])


def request(resource: bytes, scope: Iterable[bytes]) -> bytes:
    """A whole request of any of the three services: they number these fields alike."""
    return b"".join(_around(1, [resource, *scope, _SCHEMA]))


# What these say is about the bytes of this request. Everything else can be mended elsewhere.
_ABOUT_THE_REQUEST = frozenset({400, 422})
# What these say is about the way, whatever is sent: addresses, tokens, proxies, servers too busy.
ABOUT_THE_WAY = frozenset(
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
    """The outcome of a refused request, by HTTP's status. *detail*: the receiver's reason."""
    is_redirect = 300 <= status < 400
    advice = _REDIRECT if is_redirect else _ADVICE.get(status, "").format(signal)
    said = ": ".join(filter(None, (why, advice or detail)))
    if status in _ABOUT_THE_REQUEST:
        return Outcome("refused", said)
    doubtful = status >= 400 and status not in ABOUT_THE_WAY
    return Outcome("retry", said, retry_after_s=retry_after_s, doubtful=doubtful)


def accepted_with(reply: bytes, where: str) -> Outcome:
    """The outcome of a request that was accepted: the reply says whether all of it was."""
    rejected, message = 0, ""
    # Some backends answer with text; that they accepted it is what counts.
    with contextlib.suppress(DecodeError):
        # The replies of all three services number their fields alike.
        partial = ExportMetricsServiceResponse.FromString(reply).partial_success
        rejected = max(partial.rejected_data_points, 0)
        message = one_line(partial.error_message)
    why = f"{where} accepted the rest" if rejected else f"accepted by {where}"
    return Outcome("delivered", f"{why}: {message}" if message else why, rejected=rejected)
