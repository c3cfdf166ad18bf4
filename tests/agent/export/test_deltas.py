"""Delta temporality: each export has what was added since the last one, and nothing twice."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.proto.metrics.v1 import metrics_pb2

from otel_ddp.agent.export.render import Deltas, Preference, Renderer
from otel_ddp.agent.ledger import Buckets, Ledger
from otel_ddp.vocabulary import catalog
from otlp_receiver import contents_in

LABELS = (("run", "r"), ("rank", "0"))
S = 10**9
AGENT_NS = 1_000 * S
DELTA = metrics_pb2.AGGREGATION_TEMPORALITY_DELTA
CUMULATIVE = metrics_pb2.AGGREGATION_TEMPORALITY_CUMULATIVE
STEPS, DURATION = catalog.TRAINING_STEPS, catalog.TRAINING_STEP_DURATION


class Bench:
    """A ledger that is exported as somebody prefers."""

    def __init__(self, preference: Preference) -> None:
        self.ledger = Ledger()
        self._renderer = Renderer({}, Deltas(preference, AGENT_NS))

    def sent(self, second: int) -> dict[str, Any]:
        """The metrics of one export, by name."""
        requests = self._renderer.metrics(self.ledger, AGENT_NS + second * S)
        return {
            metric.name: getattr(metric, metric.WhichOneof("data"))
            for metric in contents_in("metrics", *(each.body for each in requests))
        }

    def steps(self, total: float, start_ns: int = AGENT_NS) -> None:
        self.ledger.put(STEPS, LABELS, total, 0, start_ns)

    def durations(self, *counts: float) -> None:
        rest = (0.0,) * (len(DURATION.bounds) + 1 - len(counts))
        self.ledger.put(DURATION, LABELS, Buckets((*counts, *rest), sum(counts)), 0, AGENT_NS)


def numbers(sent: Any) -> tuple[float, int, int]:
    """The value of the only point, and its beginning and end in seconds of the agent."""
    (point,) = sent.data_points
    return (
        point.as_double,
        (point.start_time_unix_nano - AGENT_NS) // S,
        (point.time_unix_nano - AGENT_NS) // S,
    )


def test_a_counter_is_what_was_added_between_two_exports() -> None:
    bench = Bench("delta")

    found = []
    for second, total in ((5, 3.0), (10, 10.0), (15, 10.0)):
        bench.steps(total)
        sent = bench.sent(second)[STEPS.name]
        found.append(numbers(sent))
        assert (sent.aggregation_temporality, sent.is_monotonic) == (DELTA, True)

    assert found == [(3.0, 0, 5), (7.0, 5, 10), (0.0, 10, 15)]


@pytest.mark.parametrize(
    ("total", "start_s", "expected"), [(4.0, 7, (4.0, 7, 10)), (2.0, 0, (2.0, 5, 10))]
)
def test_a_total_that_begins_anew_adds_all_of_itself(
    total: float, start_s: int, expected: tuple[float, int, int]
) -> None:
    bench = Bench("delta")
    bench.steps(10.0)
    bench.sent(5)

    bench.steps(total, AGENT_NS + start_s * S)

    assert numbers(bench.sent(10)[STEPS.name]) == expected


def test_what_an_earlier_agent_may_have_told_is_not_told_again() -> None:
    bench = Bench("delta")
    bench.steps(1000.0, AGENT_NS - 3600 * S)
    assert bench.sent(5) == {}

    bench.steps(1007.0, AGENT_NS - 3600 * S)

    assert numbers(bench.sent(10)[STEPS.name]) == (7.0, 5, 10)


@pytest.mark.parametrize(
    ("preference", "counters", "histograms"),
    [
        ("cumulative", CUMULATIVE, CUMULATIVE),
        ("lowmemory", CUMULATIVE, DELTA),
        ("delta", DELTA, DELTA),
    ],
)
def test_a_preference_is_about_kinds_and_never_about_sums_that_may_fall(
    preference: Preference, counters: int, histograms: int
) -> None:
    bench = Bench(preference)
    bench.steps(1.0)
    bench.durations(1)
    bench.ledger.put(catalog.PROCESS_MEMORY_USAGE, LABELS, 5.0, 0, AGENT_NS)

    sent = bench.sent(5)

    assert sent[STEPS.name].aggregation_temporality == counters
    assert sent[DURATION.name].aggregation_temporality == histograms
    memory = sent[catalog.PROCESS_MEMORY_USAGE.name]
    assert (memory.aggregation_temporality, memory.is_monotonic) == (CUMULATIVE, False)


def test_a_histogram_is_what_was_added_between_two_exports() -> None:
    bench = Bench("delta")
    bench.durations(1, 2)
    bench.sent(5)

    bench.durations(1, 5)
    sent = bench.sent(10)[DURATION.name]

    (point,) = sent.data_points
    assert sent.aggregation_temporality == DELTA
    assert (point.count, point.sum, list(point.bucket_counts)[:3]) == (3, 3.0, [0, 3, 0])
