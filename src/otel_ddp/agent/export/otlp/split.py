"""Splits an OTLP request in two, and names the content of one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from otel_ddp.agent.export.otlp.outcome import Signal, one_line
from otel_ddp.agent.export.otlp.services import SERVICES

_NAMED_AT_MOST = 3


class Piece(NamedTuple):
    """A request, or a part of one that was split."""

    body: bytes
    points: int


def halves(signal: Signal, body: bytes) -> list[Piece]:
    """Two requests with the same content; none if there is only one point, span or record."""
    try:
        count = sum(map(len, _contents(signal, SERVICES[signal].request.FromString(body))))
    except DecodeError:
        return []
    if count < 2:
        return []
    middle = count // 2
    parts = (range(middle), range(middle, count))
    return [Piece(_only(signal, body, part), len(part)) for part in parts]


def describe(signal: Signal, body: bytes) -> str:
    """The names in a request and whose they are, for people; empty if it cannot be read."""
    try:
        message = SERVICES[signal].request.FromString(body)
    except DecodeError:
        return ""
    names: dict[str, None] = {}
    for name, point in _named(signal, message):
        rank = _rank(point)
        names[f"{name} of rank {rank}" if rank else name] = None
    shown = ", ".join(list(names)[:_NAMED_AT_MOST])
    more = len(names) - _NAMED_AT_MOST
    return one_line(f"{shown} and {more} more" if more > 0 else shown)


def _contents(signal: Signal, message: Any) -> Iterator[Any]:
    """The lists of points, spans or records of a request."""
    if signal == "metrics":
        for of_resource in message.resource_metrics:
            for of_scope in of_resource.scope_metrics:
                for metric in of_scope.metrics:
                    if shape := metric.WhichOneof("data"):
                        yield getattr(metric, shape).data_points
    elif signal == "traces":
        for of_resource in message.resource_spans:
            for of_scope in of_resource.scope_spans:
                yield of_scope.spans
    else:
        for of_resource in message.resource_logs:
            for of_scope in of_resource.scope_logs:
                yield of_scope.log_records


def _named(signal: Signal, message: Any) -> Iterator[tuple[str, Any]]:
    if signal == "metrics":
        for of_resource in message.resource_metrics:
            for of_scope in of_resource.scope_metrics:
                for metric in of_scope.metrics:
                    if shape := metric.WhichOneof("data"):
                        for point in getattr(metric, shape).data_points:
                            yield metric.name, point
        return
    for content in _contents(signal, message):
        for each in content:
            yield each.name if signal == "traces" else each.event_name, each


def _rank(point: Any) -> str:
    for attribute in point.attributes:
        if attribute.key == "rank":
            value = attribute.value
            return str(getattr(value, value.WhichOneof("value") or "string_value"))
    return ""


def _only(signal: Signal, body: bytes, kept: range) -> bytes:
    """The request with these points alone, counted through all of it."""
    message = SERVICES[signal].request.FromString(body)
    number = 0
    for content in _contents(signal, message):
        leave_out = [at for at in range(len(content)) if number + at not in kept]
        number += len(content)
        for at in reversed(leave_out):
            del content[at]
    if signal == "metrics":
        for of_resource in message.resource_metrics:
            for of_scope in of_resource.scope_metrics:
                _drop_empty(of_scope.metrics)
    return bytes(message.SerializeToString())


def _drop_empty(metrics: Any) -> None:
    for at in reversed(range(len(metrics))):
        shape = metrics[at].WhichOneof("data")
        if shape is None or not getattr(metrics[at], shape).data_points:
            del metrics[at]
