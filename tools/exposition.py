"""Reads what an endpoint serves to Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families


def parse(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """The name, labels and value of every sample in Prometheus' text format."""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, dict(sample.labels), float(sample.value)
