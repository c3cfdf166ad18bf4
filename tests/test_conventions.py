"""What the conventions of OpenTelemetry name is named as they have it; all else is in our own."""

from __future__ import annotations

from pathlib import Path

import opentelemetry.environment_variables
import opentelemetry.sdk.environment_variables
import pytest

import conventions
from otel_ddp.vocabulary.catalog import LABELS, METRICS, Metric

DOCS = Path(__file__).parents[1] / "docs"

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


def test_the_page_has_every_variable_of_the_specification_that_python_knows() -> None:
    modules = (opentelemetry.environment_variables, opentelemetry.sdk.environment_variables)
    known = {
        value
        for module in modules
        for name, value in vars(module).items()
        if name.startswith("OTEL_") and isinstance(value, str)
    }
    text = (DOCS / "opentelemetry.md").read_text(encoding="utf-8")

    def named(variable: str) -> bool:
        general = variable
        for signal in ("METRICS", "TRACES", "LOGS"):
            general = general.replace(f"OTEL_EXPORTER_OTLP_{signal}_", "OTEL_EXPORTER_OTLP_")
        ending = general.removeprefix("OTEL_EXPORTER_OTLP")
        return f"`{variable}`" in text or f"`{general}`" in text or f"`{ending}`" in text

    assert sorted(variable for variable in known if not named(variable)) == []
