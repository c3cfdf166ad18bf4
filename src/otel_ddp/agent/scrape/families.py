"""Shows the ledger as Prometheus families, and reads what is served of them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar as ShownExemplar

from otel_ddp.agent.ledger import Buckets, Exemplar, Labels, Ledger, Series
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.catalog import Kind

_TYPES = {
    Kind.COUNTER: "counter",
    Kind.GAUGE: "gauge",
    Kind.UPDOWN: "gauge",
    Kind.HISTOGRAM: "histogram",
}
# Labels of the ledger -> the same as Prometheus names them.
_LabelCache = dict[Labels, dict[str, str]]


class LedgerCollector(Collector):
    """The ledger as Prometheus families, named as an OpenTelemetry collector names them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._labels: _LabelCache = {}

    def collect(self) -> Iterator[Family]:
        with self._ledger.lock:
            # The series of one logged name share their labels, and each scrape resembles the last.
            # So with 8 ranks and 900 names the ledger is locked for 20 to 60 ms instead of 130.
            before, self._labels = self._labels, {}
            return iter(
                [
                    _family(metric, rows, before, self._labels)
                    for metric, rows in self._ledger.families()
                ]
            )


def _family(
    metric: catalog.Metric, rows: list[Series], before: _LabelCache, cache: _LabelCache
) -> Family:
    name = metric.prometheus
    counter = metric.kind is Kind.COUNTER
    base = name.removesuffix("_total") if counter else name
    family = Family(base, metric.description, _TYPES[metric.kind])
    for series in rows:
        labels = cache.get(series.labels)
        if labels is None:
            labels = before.get(series.labels) or {
                # A half of a character, as in the name of a device, would take all series along.
                catalog.prometheus_label(key): value.encode("utf-8", "replace").decode()
                for key, value in series.labels
            }
            cache[series.labels] = labels
        if isinstance(series.value, Buckets):
            _histogram(family, base, labels, metric.bounds, series.value)
        elif series.value is not None:
            family.add_sample(name, labels, series.value)
    return family


def _histogram(
    family: Family,
    name: str,
    labels: dict[str, str],
    bounds: tuple[float, ...],
    value: Buckets,
) -> None:
    total = 0.0
    edges = (*bounds, float("inf"))
    for bucket, (bound, count) in enumerate(zip(edges, value.counts, strict=True)):
        total += count
        edge = "+Inf" if bound == float("inf") else repr(float(bound))
        exemplar = value.exemplars.get(bucket)
        shown = None if exemplar is None else _exemplar(exemplar)
        # Only a scraper that asks for OpenMetrics gets it.
        family.add_sample(f"{name}_bucket", {**labels, "le": edge}, total, exemplar=shown)
    family.add_sample(f"{name}_count", labels, total)
    family.add_sample(f"{name}_sum", labels, value.total)


def _exemplar(exemplar: Exemplar) -> ShownExemplar:
    ids = {"trace_id": exemplar.trace_id.hex(), "span_id": exemplar.span_id.hex()}
    return ShownExemplar(ids, exemplar.value, exemplar.time_ns / 1e9)


def parse(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """The name, labels and value of every sample in Prometheus' text format."""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, dict(sample.labels), float(sample.value)
