"""Gathers encoded points into OTLP requests of bounded size."""

from __future__ import annotations

from itertools import accumulate

from otel_ddp import __version__
from otel_ddp.agent.export.otlp import encode
from otel_ddp.agent.export.otlp.outcome import Request
from otel_ddp.catalog import Metric

SCOPE = "otel_ddp"
# Gateways mostly refuse more than 1 MiB (nginx) or 4 MiB (gRPC) at once.
MOST_BYTES = 900 * 1024
_MOST_POINTS = 2000
_S = 10**9
_LATEST = 2**63


class RequestBuilder:
    """One for each resource and hour, and for what may be lost or not."""

    def __init__(self, resource_of: bytes, irreplaceable: bool) -> None:
        self._resource = resource_of
        self._irreplaceable = irreplaceable
        self._metrics: dict[str, tuple[Metric, bool, list[bytes]]] = {}
        self._count = 0
        self._size_bytes = 0
        self._oldest_ns = _LATEST
        self._requests: list[Request] = []

    def add(self, metric: Metric, points: list[bytes], oldest_ns: int, delta: bool) -> None:
        while points:
            fitting = self._fitting(points)
            if not fitting:
                self._end_request()
                continue
            self._oldest_ns = min(self._oldest_ns, oldest_ns)
            self._metrics.setdefault(metric.name, (metric, delta, []))[2].extend(fitting)
            self._count += len(fitting)
            self._size_bytes += sum(map(len, fitting))
            points = points[len(fitting) :]

    def _fitting(self, points: list[bytes]) -> list[bytes]:
        """The first of these points for which there is room; one at least in an empty request."""
        some = points[: _MOST_POINTS - self._count]
        room_bytes = MOST_BYTES - self._size_bytes
        if sum(map(len, some)) <= room_bytes:
            return some
        sizes = accumulate(map(len, some))
        fitting = [point for point, size in zip(some, sizes, strict=True) if size <= room_bytes]
        return fitting or (some[:1] if not self._count else [])

    def _end_request(self) -> None:
        if not self._count:
            return
        metrics = [
            encode.metric(
                *(metric.name, metric.description, metric.unit, metric.kind.value, points),
                delta=delta,
            )
            for metric, delta, points in self._metrics.values()
        ]
        body = encode.metrics_request(self._resource, SCOPE, __version__, metrics)
        oldest_s = self._oldest_ns // _S
        self._requests.append(Request("metrics", body, self._count, self._irreplaceable, oldest_s))
        self._metrics, self._oldest_ns = {}, _LATEST
        self._count = self._size_bytes = 0

    def build(self) -> list[Request]:
        """All requests, the last one ended."""
        self._end_request()
        return self._requests
