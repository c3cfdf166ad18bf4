"""The endpoint and OTLP export the same names, labels and values of the catalogue."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest
from tools.exposition import parse

from otel_ddp.agent.export.render import Renderer
from otel_ddp.agent.ledger import Buckets, Labels, Ledger, is_logged
from otel_ddp.agent.scrape.endpoint import LedgerRegistry
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.catalog import Kind, Metric
from otlp_receiver import points_in

NOW_NS = 1_700_000_000_000_000_000
MS_NS = 10**6


def labels_of(metric: Metric) -> Labels:
    names = (*catalog.LABELS[metric.labels], *metric.attributes)
    return tuple((name, f"value of {name}") for name in names)


def ledger_with(metric: Metric) -> Ledger:
    ledger = Ledger()
    ledger.keep_history = True
    labels = labels_of(metric)
    if metric.kind is Kind.HISTOGRAM:
        counts = tuple(float(i) for i in range(len(metric.bounds) + 1))
        ledger.put(metric, labels, Buckets(counts, 12.5), NOW_NS, 7)
    elif is_logged(metric):
        ledger.log(ledger.series(metric, labels), 0.25, NOW_NS)
    else:
        ledger.put(metric, labels, 3.0, NOW_NS, 7)
    return ledger


@pytest.mark.parametrize("metric", catalog.METRICS, ids=lambda metric: metric.name)
def test_every_metric_is_the_same_on_the_endpoint_and_over_otlp(metric: Metric) -> None:
    ledger = ledger_with(metric)
    scraped = list(parse(generate_latest(LedgerRegistry(ledger)).decode()))
    (request,) = Renderer({"service.name": "otel-ddp"}).metrics(ledger, NOW_NS)

    (point,) = points_in(request.body)
    assert (point.metric, point.unit, point.kind) == (metric.name, metric.unit, metric.kind.value)
    assert (point.attributes, point.time_ns) == (dict(labels_of(metric)), NOW_NS)

    # The collector's translation of what was sent is what the scrape shows.
    name = catalog.prometheus_name(point.metric, metric.kind, point.unit)
    labels = {catalog.prometheus_label(key): value for key, value in point.attributes.items()}
    if metric.kind is Kind.HISTOGRAM:
        by_name = {each: value for each, found, value in scraped if "le" not in found}
        told = point.value
        assert by_name == {f"{name}_count": told.count, f"{name}_sum": told.sum}
        edges = [(found["le"], value) for each, found, value in scraped if "le" in found]
        running = [sum(told.bucket_counts[: i + 1]) for i in range(len(told.bucket_counts))]
        assert edges == [
            (repr(float(bound)), seen)
            for bound, seen in zip(told.explicit_bounds, running, strict=False)
        ] + [("+Inf", float(told.count))]
    else:
        assert scraped == [(name, labels, point.value)]


def test_requests_are_of_bounded_size_and_lose_nothing() -> None:
    ledger = Ledger()
    ledger.keep_history = True
    series = [
        ledger.series(catalog.TRAINING_SCALAR, (("name", f"m{i}"), ("split", "train")))
        for i in range(3)
    ]
    for at in range(2500):
        for each in series:
            ledger.log(each, float(at), NOW_NS + at * 10_000_000)

    requests = Renderer({}).metrics(ledger, NOW_NS)
    again = Renderer({}).metrics(ledger, NOW_NS)

    assert [request.points for request in requests] == [2000, 2000, 2000, 1500]
    found: dict[str, list[tuple[int, float]]] = {}
    for point in points_in(*(request.body for request in requests)):
        found.setdefault(point.attributes["name"], []).append((point.time_ns, point.value))
    expected = [(NOW_NS + at * 10_000_000, float(at)) for at in range(2500)]
    assert found == {f"m{i}": expected for i in range(3)}
    assert again == []


def test_logged_and_current_values_go_in_requests_of_their_own() -> None:
    ledger = ledger_with(catalog.TRAINING_SCALAR)
    ledger.put(catalog.TRAINING_STATE, (("rank", "0"),), 1.0, NOW_NS)
    ledger.put(catalog.TRAINING_NONFINITE, (("rank", "0"),), 0.0, NOW_NS)

    requests = Renderer({}).metrics(ledger, NOW_NS)

    found = {
        request.irreplaceable: [point.metric for point in points_in(request.body)]
        for request in requests
    }
    assert len(requests) == 2
    assert found == {
        True: ["training.scalar"],
        False: ["training.state", "training.nonfinite"],
    }


def test_times_of_a_series_grow_by_a_millisecond_whatever_the_clock_does() -> None:
    ledger = Ledger()
    ledger.keep_history = True
    series = ledger.series(catalog.TRAINING_SCALAR, (("name", "loss"),))

    for time_ns in (5_000_000, 5_000_000, 1_000_000, 5_500_000, 9_000_000):
        ledger.log(series, 1.0, time_ns)

    assert series.history is not None
    assert series.history[0] == [
        5_000_000,
        6_000_000,
        7_000_000,
        8_000_000,
        9_000_000,
    ]


def test_values_logged_at_one_moment_all_arrive_up_to_a_minute_ahead() -> None:
    ledger = Ledger()
    ledger.keep_history = True
    series = ledger.series(catalog.TRAINING_SCALAR, (("name", "loss"),))

    first = [ledger.log(series, float(number), NOW_NS) for number in range(60_003)]
    last_shown = series.value
    # Values that come faster are thinned to one a millisecond.
    then = [ledger.log(series, 1.0, NOW_NS + each * MS_NS) for each in (1, 1, 2, 2)]
    # A clock that was set back: to times that receivers refuse, then further than they look ahead.
    back = [ledger.log(series, 2.0, NOW_NS - each * MS_NS) for each in (1, 500_000, 600_000)]

    minute_later_ns = NOW_NS + 60_000 * MS_NS
    assert first == [*range(NOW_NS, minute_later_ns + 1, MS_NS), None, None]
    assert last_shown == 60_002.0
    assert then == [minute_later_ns + MS_NS, None, minute_later_ns + 2 * MS_NS, None]
    assert back == [None, None, NOW_NS - 600_000 * MS_NS]
    sent = [at for at in (*first, *then, *back) if at is not None]
    assert series.history is not None
    assert series.history[0] == sent


def test_projects_become_services_of_their_own() -> None:
    ledger = Ledger()
    for project in ("a", "b"):
        ledger.put(catalog.TRAINING_STATE, (("run", project),), 1.0, NOW_NS, project=project)

    requests = Renderer({"service.name": "otel-ddp"}).metrics(ledger, NOW_NS)

    resources = [point.resource for each in requests for point in points_in(each.body)]
    assert resources == [{"service.name": "a"}, {"service.name": "b"}]
