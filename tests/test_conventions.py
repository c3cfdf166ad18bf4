"""What the conventions of OpenTelemetry name is named as they have it; all else is in our own."""

from __future__ import annotations

import pytest

import conventions
from otel_ddp.vocabulary.catalog import LABELS, METRICS, Metric

# What a training does and learns, and everything else.
OURS = {"training", "otel_ddp"}
# With which attributes of our log records begin.
OF_RECORDS = {"config", "evidence", "verdict"}

every_metric = pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)


@every_metric
def test_a_metric_is_that_of_the_conventions_or_has_a_name_of_our_own(metric: Metric) -> None:
    theirs = conventions.metrics().get(metric.name)

    if theirs is None:
        assert metric.name.partition(".")[0] in OURS
    else:
        assert (metric.kind, metric.unit) == theirs


@every_metric
def test_an_attribute_is_that_of_the_conventions_or_a_word_without_a_namespace(
    metric: Metric,
) -> None:
    own = {*metric.attributes, *LABELS[metric.labels]} - conventions.attributes()

    assert [name for name in own if "." in name] == []


def test_nothing_of_opentelemetrys_begins_like_a_name_of_ours() -> None:
    assert not (OURS | OF_RECORDS) & conventions.namespaces()
