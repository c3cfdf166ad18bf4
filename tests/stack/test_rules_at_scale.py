"""The generator of docs/scale.md for rules: what it writes is what the rules read."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from bench.rules_at_scale import Ranks, Samples, read_by_rules, send
from tools.stack.build import Binaries

from stack.servers import Prometheus

SIZE = 16


def test_every_series_that_it_makes_is_stored(binaries: Binaries, tmp_path: Path) -> None:
    now_s = int(time.time())
    times = Samples(np.arange(now_s - 60, now_s + 1, 15))
    history = Samples(np.arange(now_s - 120, now_s - 60, 30))
    series = list(Ranks(SIZE, times, history).series())

    with Prometheus(binaries, tmp_path) as prometheus:
        send(prometheus, series)
        (stored,) = prometheus.query('count({__name__=~".+"})', at_s=now_s)
        names = prometheus.query(
            'count by (__name__) ({__name__=~".+",__name__!~".*:.*"})', at_s=now_s
        )
        (backward,) = prometheus.query(
            'count(training_phase_step_time_seconds{phase="backward"})', at_s=now_s
        )
        late = prometheus.query(
            'topk(1, training_phase_step_time_seconds{phase="backward"})', at_s=now_s
        )

    assert stored.value == len(series)
    assert {each.name for each in names} <= read_by_rules()
    assert backward.value == SIZE
    assert [each.labels["rank"] for each in late] == ["1"]
