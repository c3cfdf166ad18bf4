"""The names users write queries against do not change by accident."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tools.tables import metrics_page

from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.catalog import METRICS, Kind, Metric
from otel_ddp.vocabulary.words import HARMLESS_VERDICTS, PHASES, STATES, VERDICTS

DOCS = Path(__file__).parents[1] / "docs"


def test_no_two_metrics_share_a_name_in_opentelemetry_or_in_prometheus() -> None:
    assert len(METRICS) == len({metric.name for metric in METRICS})
    assert len(METRICS) == len({metric.prometheus for metric in METRICS})


def test_no_histogram_series_is_mistaken_for_another_metric() -> None:
    expanded = {
        f"{metric.prometheus}{suffix}"
        for metric in METRICS
        if metric.kind is Kind.HISTOGRAM
        for suffix in ("_bucket", "_sum", "_count")
    }

    assert not expanded & {metric.prometheus for metric in METRICS}


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_metric_is_described_as_all_are(metric: Metric) -> None:
    labels = [catalog.prometheus_label(attribute) for attribute in metric.attributes]
    labels += catalog.LABELS[metric.labels]

    assert getattr(catalog, _constant(metric)) is metric
    # Only a ratio has the unit one.
    assert (metric.unit == "1") == metric.prometheus.endswith("_ratio")
    # One sentence.
    assert metric.description.endswith(".")
    assert not re.search(r"\. |[|\n]|^[a-z]", metric.description)
    # No label hides another one; a histogram's buckets are told apart by the last.
    assert len({*labels, "le"}) == len(labels) + 1
    assert (metric.kind is Kind.HISTOGRAM) == bool(metric.bounds)
    assert list(metric.bounds) == sorted(set(metric.bounds))


# Who speaks of a metric without reporting it: the catalogue, and who only reads what is served.
_READERS = ("vocabulary/", "survey.py", "cli/", "demo/")


def test_all_that_stands_there_is_reported() -> None:
    package = Path(catalog.__file__).parents[1]
    used = {
        name
        for path in package.rglob("*.py")
        if not str(path.relative_to(package)).startswith(_READERS)
        for name in _constants(path.read_text())
    }

    assert {metric.name for metric in METRICS if _constant(metric) not in used} == set()


def _constants(source: str) -> set[str]:
    imported = re.findall(r"from otel_ddp\.vocabulary\.catalog import (\([^)]*\)|.*)", source)
    return {
        *re.findall(r"\bcatalog\.([A-Z][A-Z0-9_]+)", source),
        *re.findall(r"[A-Z][A-Z0-9_]+", " ".join(imported)),
    }


def _constant(metric: Metric) -> str:
    return metric.name.replace(".", "_").upper()


def test_phases_and_states_keep_their_codes() -> None:
    assert PHASES == {
        "other": 0,
        "data": 1,
        "forward": 2,
        "backward": 3,
        "comm_wait": 4,
        "optimizer": 5,
        "checkpoint": 6,
        "eval": 7,
        "compile": 8,
        "unmeasured": 9,
        "graph": 10,
    }
    assert STATES == {
        "starting": 0,
        "running": 1,
        "finished": 2,
        "failed": 3,
        "killed": 4,
    }


@pytest.mark.parametrize(
    ("name", "kind", "unit", "expected"),
    [
        ("a.b", Kind.GAUGE, "", "a_b"),
        ("a__b..c", Kind.GAUGE, "", "a_b_c"),
        ("a.b", Kind.GAUGE, "By/s", "a_b_bytes_per_second"),
        ("a.b", Kind.GAUGE, "{token}/s", "a_b_per_second"),
        ("a.b", Kind.GAUGE, "1", "a_b_ratio"),
        ("a.ratio", Kind.GAUGE, "1", "a_ratio"),
        ("a.b", Kind.COUNTER, "1", "a_b_total"),
        ("a.b", Kind.UPDOWN, "1", "a_b"),
        ("a.seconds", Kind.GAUGE, "s", "a_seconds"),
        ("a.seconds.b", Kind.GAUGE, "s", "a_seconds_b"),
        ("a.seconds_since", Kind.GAUGE, "s", "a_seconds_since"),
        ("a.total.b", Kind.COUNTER, "s", "a_b_seconds_total"),
        ("a.b", Kind.HISTOGRAM, "s", "a_b_seconds"),
    ],
)
def test_a_prometheus_name_follows_the_rules_of_the_collector(
    name: str, kind: Kind, unit: str, expected: str
) -> None:
    assert expected == catalog.prometheus_name(name, kind, unit)


@pytest.mark.parametrize(
    ("attribute", "expected"),
    [
        ("local_rank", "local_rank"),
        ("network.io.direction", "network_io_direction"),
        ("config_lr-max", "config_lr_max"),
        ("config_größe", "config_gr__e"),
        ("a:b", "a_b"),
        ("a__b", "a__b"),
        ("2nd", "key_2nd"),
        (".hidden", "key_hidden"),
        ("__name", "__name"),
        ("", "key_"),
        ("学", "key_"),
    ],
)
def test_a_label_follows_the_rules_of_the_otlp_receiver(attribute: str, expected: str) -> None:
    assert expected == catalog.prometheus_label(attribute)


def test_the_documentation_is_what_the_catalogue_says() -> None:
    written = (DOCS / "metrics.md").read_text(encoding="utf-8")

    assert written == metrics_page(written), "docs/metrics.md is stale: run `make docs`."
    assert [each.name for each in METRICS if f"`{each.name}`" not in written] == []


def test_what_page_report_and_comparison_look_for_is_in_the_catalogue() -> None:
    package = Path(catalog.__file__).parents[1] / "history"
    known = {metric.name for metric in catalog.METRICS}
    known |= {label for metric in catalog.METRICS for label in metric.attributes}
    sources = [*package.rglob("*.py"), *package.rglob("*.js")]
    wanted = {
        word
        for path in sources
        for word in re.findall(r'"((?:hw|system|process)\.[\w.]+)"', path.read_text())
    }

    assert "hw.model" in wanted
    assert wanted - known == set()


def test_the_kinds_of_verdicts_end_with_the_harmless_ones() -> None:
    assert {*VERDICTS[-1:]} == HARMLESS_VERDICTS
