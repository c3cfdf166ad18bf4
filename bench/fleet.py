"""Plays N nodes of eight ranks into a real collector and Prometheus, for docs/internals/scale.md.

    python bench/fleet.py 4 16 64            measure these sizes, a minute each
    python bench/fleet.py 8 --past-h 1.5     so many hours as fast as the servers take them, for
                                             memory and disk, which grow slowly
    python bench/fleet.py                    count the series, measure nothing

Every node has a ledger of its own, filled with the series that a real node has sent
(bench/fleet_node.json, made by bench/fleet_node.py), and the agent's own renderer and transport.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from tools.exposition import parse  # noqa: E402

from otel_ddp import settings  # noqa: E402
from otel_ddp.agent.export.folder import Request  # noqa: E402
from otel_ddp.agent.export.otlp.render import Renderer, resource_of  # noqa: E402
from otel_ddp.agent.export.otlp.transport import Transport  # noqa: E402
from otel_ddp.agent.ledger import Buckets, Labels, Ledger, Series  # noqa: E402
from otel_ddp.vocabulary import catalog  # noqa: E402
from stack.servers import CONFIGURATIONS, DEPLOY, Collector, Prometheus, binaries  # noqa: E402

RECORDED = Path(__file__).with_name("fleet_node.json")
RANKS = 8
NAMES = ("loss", "grad_norm", "tokens_per_s", "accuracy")
# What rank 0 tells and no other: of the run, of each best value, of each artifact.
ONCE = ("run", "best", "artifact")
# Of eight ranks of a node: exported on that of rank 0, and on any other.
STRATEGIES = {"all": (8.0, 8.0), "node": (1.0, 1.0), "main": (1.0, 0.0)}
_WARM_UP_S = 40.0
_PATIENCE_S = 180.0
# What a dashboard asks: phases by rank, a logged value over all ranks, hot GPUs, step times.
QUERIES = (
    "sum by (rank, phase) (rate(training_phase_time_seconds_total[1m]))",
    'avg(training_scalar{name="loss"})',
    'topk(10, hw_temperature_celsius{hw_sensor_location="core"})',
    "histogram_quantile(0.99, sum by (le) (rate(training_step_duration_seconds_bucket[1m])))",
)


class Row(NamedTuple):
    """One series of the recorded node; of a histogram the numbers are its sum and its counts."""

    metric: str
    of: str
    """`rank`, `name` (of each logged name of a rank), `gpu`, `node`, or one of ONCE."""
    attributes: dict[str, str]
    value: list[float]
    per_s: list[float]
    always: bool
    """Leaves the node also where the strategy keeps its rank's training series at home."""
    source: str
    """`seen` in a real training, or `added` from the catalogue."""


def recorded() -> list[Row]:
    return [Row(**row) for row in json.loads(RECORDED.read_text())]


def stored(numbers: int) -> int:
    """How many series of Prometheus a series is: a histogram's buckets, its sum and its count."""
    return numbers + 1 if numbers > 1 else 1


class SimulatedNode:
    """Eight ranks and eight GPUs, as their agent exports them."""

    def __init__(
        self,
        number: int,
        rows: Sequence[Row],
        *,
        began_ns: int,
        run: str = "fleet",
        steps_per_s: float = 2.0,
    ) -> None:
        self.name = f"node-{number:04}"
        self.ledger = Ledger()
        self.ledger.keep_history = True
        # As the resource makes a series of its own: target_info.
        self.series = 1
        self._renderer = Renderer(resource_of(self.name, self.name))
        self._random = random.Random(number)
        self._began_ns, self._moved_ns = began_ns, began_ns
        self._step, self._step_ns = 0, int(1e9 / steps_per_s)
        self._standing: list[tuple[Series, list[float], list[float]]] = []
        self._logged: list[tuple[Series, Series]] = []
        of_run: Labels = (("group", "g"), ("run", run))
        node: Labels = (*of_run, ("node", self.name))
        for local_rank in range(RANKS):
            rank = number * RANKS + local_rank
            of_rank = (("rank", str(rank)), ("local_rank", str(local_rank)))
            labels = (*of_run, ("job_type", "train"), ("node", self.name), *of_rank)
            for row in rows:
                if row.of == "rank" or (row.of in ONCE and rank == 0):
                    self._enter(row, (*labels, *row.attributes.items()))
                elif row.of == "gpu":
                    self._enter(row, (*labels, *_of_gpu(row.attributes, number, local_rank)))
            for name in NAMES:
                self._enter_name((*labels, ("name", name), ("split", "train")))
        for row in rows:
            if row.of == "node":
                self._enter(row, (*node, *row.attributes.items()))

    def _enter(self, row: Row, labels: Labels) -> None:
        series = self.ledger.series(catalog.BY_NAME[row.metric], labels, self._began_ns)
        # No two nodes are alike, or too little of them would have to be stored.
        scale = self._random.uniform(0.9, 1.1) if any(row.per_s) else 1.0
        value = [_as_whole_as(each, each * scale) for each in row.value]
        self._standing.append((series, value, row.per_s))
        self.series += stored(len(row.value))

    def _enter_name(self, labels: Labels) -> None:
        value, step = (
            self.ledger.series(metric, labels, self._began_ns)
            for metric in (catalog.TRAINING_SCALAR, catalog.TRAINING_SCALAR_STEP)
        )
        self._logged.append((value, step))
        series = self.ledger.series(catalog.TRAINING_NONFINITE, labels, self._began_ns)
        self._standing.append((series, [0.0], [0.0]))
        self.series += 3

    def move(self, now_ns: int) -> None:
        """Go on to this moment: counters grow, gauges sway, and every step logs its values."""
        seconds, uniform = (now_ns - self._moved_ns) / 1e9, self._random.uniform
        self._moved_ns = now_ns
        for series, numbers, per_s in self._standing:
            metric = series.metric
            series.time_ns = now_ns
            if len(numbers) > 1:
                grown = seconds * uniform(0.8, 1.2)
                for i, each in enumerate(per_s):
                    numbers[i] += each * grown
                series.value = Buckets(tuple(numbers[1:]), numbers[0])
            elif metric.name.endswith(".timestamp") and per_s[0]:
                series.value = now_ns / 1e9
            elif not per_s[0]:
                series.value = numbers[0]
            elif metric.kind is catalog.Kind.COUNTER:
                added = per_s[0] * seconds * uniform(0.8, 1.2)
                numbers[0] += _as_whole_as(numbers[0], added)
                series.value = numbers[0]
            else:
                series.value = _as_whole_as(numbers[0], numbers[0] * uniform(0.97, 1.03))
        while (at_ns := self._began_ns + (self._step + 1) * self._step_ns) <= now_ns:
            self._step += 1
            for series, step in self._logged:
                at = self.ledger.log(series, 2.0 / self._step + uniform(0.9, 1.1), at_ns)
                self.ledger.log(step, float(self._step), at)

    def requests(self) -> list[Request]:
        """What its agent would send now."""
        return [*self._renderer.metrics(self.ledger, self._moved_ns)]


def _as_whole_as(example: float, number: float) -> float:
    return float(round(number)) if float(example).is_integer() else number


def _of_gpu(attributes: dict[str, str], number: int, index: int) -> Labels:
    own = {
        "hw.id": f"GPU-{number:08x}-{index:04x}-4c3d-9e1f-0123456789ab",
        "gpu": str(index),
        "pci": f"0000:{index + 0x1B:02x}:00.0",
    }
    return tuple((key, own.get(key, value)) for key, value in attributes.items())


class Fleet:
    """Nodes that export one after the other, spread evenly over the interval."""

    def __init__(
        self,
        size: int,
        endpoint: str,
        *,
        began_ns: int,
        interval_s: float = 5.0,
        steps_per_s: float = 2.0,
    ) -> None:
        rows = recorded()
        self.interval_s = interval_s
        """Of the exports from now on: a long past may be played in fewer of them."""
        conf = replace(settings.read(env={}), endpoint=endpoint)
        self._nodes = [
            SimulatedNode(number, rows, began_ns=began_ns, steps_per_s=steps_per_s)
            for number in range(size)
        ]
        # A connection a node, as it is with real agents.
        self._transports = [Transport(conf, env={}) for _ in self._nodes]
        self._next_ns, self._turn = began_ns, 0
        self.points = self.bytes = 0
        self.not_taken: Counter[str] = Counter()
        self.late_s = 0.0
        """How far the last export was behind its time: the generator or a server is too slow."""

    @property
    def series(self) -> int:
        """How many series of Prometheus all of it is."""
        return sum(node.series for node in self._nodes)

    def play(self, until_ns: int, *, paced: bool = True) -> None:
        """Every export that is due by then, at its time, or as fast as they are taken."""
        while self._next_ns < until_ns:
            if paced:
                ahead_s = (self._next_ns - time.time_ns()) / 1e9
                time.sleep(max(0.0, ahead_s))
                self.late_s = max(0.0, -ahead_s)
            number = self._turn % len(self._nodes)
            self._nodes[number].move(self._next_ns)
            for request in self._nodes[number].requests():
                self._send(self._transports[number], request)
            self._turn += 1
            self._next_ns += int(self.interval_s * 1e9) // len(self._nodes)

    def _send(self, transport: Transport, request: Request) -> None:
        outcome = transport.send("metrics", request.body)
        while outcome.kind == "retry":
            # As the agent does; values that are sent late keep their time.
            self.not_taken["at once"] += request.points
            time.sleep(0.2)
            outcome = transport.send("metrics", request.body)
        self.points += request.points
        self.bytes += len(request.body)
        refused = request.points if outcome.kind == "refused" else outcome.rejected
        if refused:
            self.not_taken[outcome.why] += refused

    def close(self) -> None:
        for transport in self._transports:
            transport.close()


# -- measuring


class Snapshot(NamedTuple):
    """The counters of both servers and of the generator at one moment."""

    at_s: float
    sent: int
    own_cpu_s: float
    busy_s: float
    """Processor time of all processes on the machine."""
    collector: dict[str, float]
    prometheus: dict[str, float]


def snapshot(fleet: Fleet, collector: Collector, prometheus: Prometheus) -> Snapshot:
    return Snapshot(
        time.monotonic(),
        fleet.points,
        time.process_time(),
        _busy_s(),
        _numbers(collector.telemetry),
        _numbers(f"{prometheus.url}/metrics"),
    )


def _busy_s() -> float:
    user, nice, system = (int(each) for each in Path("/proc/stat").read_text().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def _numbers(url: str) -> dict[str, float]:
    """Each name with the sum of its series."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        found: Counter[str] = Counter()
        for name, _, value in parse(answer.read().decode()):
            found[name.removesuffix("_total")] += value
    return dict(found)


LOST = (
    "prometheus_tsdb_out_of_bound_samples",
    "prometheus_tsdb_too_old_samples",
    "prometheus_tsdb_out_of_order_samples",
    "otelcol_exporter_send_failed_metric_points",
    "otelcol_exporter_enqueue_failed_metric_points",
    "otelcol_receiver_refused_metric_points",
    "otelcol_receiver_failed_metric_points",
)


def lost(collector: Collector, prometheus: Prometheus) -> dict[str, float]:
    """What was refused or given up, by the servers' own counters; {} where nothing was."""
    found = _numbers(collector.telemetry) | _numbers(f"{prometheus.url}/metrics")
    return {name: found[name] for name in LOST if found.get(name)}


def measure(size: int, *, seconds: float, interval_s: float, past_s: float, folder: Path) -> None:
    built = binaries()
    config = DEPLOY / "prometheus" / "prometheus.yml"
    prometheus = Prometheus(built, folder / "p", "--web.enable-admin-api", config=config)
    all_in_one = CONFIGURATIONS / "all-in-one.yaml"
    with (
        prometheus,
        Collector(
            built, folder / "c", all_in_one, METRICS_URL=prometheus.otlp_metrics
        ) as collector,
    ):
        began_ns = time.time_ns() - int(past_s * 1e9)
        fleet = Fleet(size, collector.http, began_ns=began_ns, interval_s=interval_s)
        empty = snapshot(fleet, collector, prometheus)
        if past_s:
            before = empty
            fleet.play(began_ns + int(past_s * 1e9), paced=False)
            wait_for_all(fleet, collector)
        else:
            until_s = warm_up(fleet, began_ns)
            before = snapshot(fleet, collector, prometheus)
            fleet.play(began_ns + int((until_s + seconds) * 1e9))
        after = snapshot(fleet, collector, prometheus)
        report(size, fleet, empty, before, after)
        line("lost", lost(collector, prometheus), dict(fleet.not_taken))
        report_queries(prometheus)
        wait_for_all(fleet, collector)
        report_disk(prometheus, folder, snapshot(fleet, collector, prometheus), fleet)
        fleet.close()


def warm_up(fleet: Fleet, began_ns: int) -> float:
    """Until the rules were evaluated, and what it costs to make every series is made up for."""
    until_s = _WARM_UP_S
    fleet.play(began_ns + int(until_s * 1e9))
    while fleet.late_s > 0.5 and until_s < _PATIENCE_S:
        until_s += 5.0
        fleet.play(began_ns + int(until_s * 1e9))
    return until_s


def wait_for_all(fleet: Fleet, collector: Collector) -> None:
    """Until Prometheus has taken all that was sent, or the collector will never be done."""
    deadline = time.monotonic() + _PATIENCE_S
    while _numbers(collector.telemetry)["otelcol_exporter_sent_metric_points"] < fleet.points:
        if time.monotonic() > deadline:
            line(f"NOT DELIVERED after {_PATIENCE_S:g} s more")
            break
        time.sleep(0.5)


def report(size: int, fleet: Fleet, empty: Snapshot, before: Snapshot, after: Snapshot) -> None:
    took_s = after.at_s - before.at_s

    def grown(name: str, of: str) -> float:
        return getattr(after, of).get(name, 0.0) - getattr(before, of).get(name, 0.0)

    appended = grown("prometheus_tsdb_head_samples_appended", "prometheus")
    line(f"{size} nodes, {size * RANKS} ranks and GPUs, measured for {took_s:.0f} s")
    line("cores busy, with whatever else runs here", (after.busy_s - before.busy_s) / took_s)
    line(
        "series claimed / in the head",
        fleet.series,
        after.prometheus["prometheus_tsdb_head_series"],
    )
    line("points/s sent", (after.sent - before.sent) / took_s)
    line(
        "points/s taken by the collector",
        grown("otelcol_receiver_accepted_metric_points", "collector") / took_s,
    )
    line("points/s sent on", grown("otelcol_exporter_sent_metric_points", "collector") / took_s)
    line("samples/s stored", appended / took_s)
    # Some of target_info are always: Prometheus makes it of the times of a request's points.
    late = "prometheus_tsdb_head_out_of_order_samples_appended"
    line("samples behind newer ones of their series", after.prometheus.get(late, 0.0))
    line("bytes a point, bodies", fleet.bytes / fleet.points)
    line("seconds behind at the end", fleet.late_s)
    line("bytes in the collector's queue", after.collector.get("otelcol_exporter_queue_size", 0.0))
    for of, cpu, memory in (
        ("collector", "otelcol_process_cpu_seconds", "otelcol_process_memory_rss"),
        ("prometheus", "process_cpu_seconds", "process_resident_memory_bytes"),
    ):
        line(
            f"{of}: share of a core, MiB",
            grown(cpu, of) / took_s,
            getattr(after, of)[memory] / 2**20,
        )
    own = (after.own_cpu_s - before.own_cpu_s) / took_s
    line("generator: share of a core", own)
    memory = (
        after.prometheus["process_resident_memory_bytes"]
        - empty.prometheus["process_resident_memory_bytes"]
    )
    line("prometheus: RSS bytes a series", memory / fleet.series)
    line(
        "prometheus: heap in use, bytes a series",
        after.prometheus["go_memstats_heap_inuse_bytes"] / fleet.series,
    )
    line(
        "prometheus: CPU-s per million samples",
        grown("process_cpu_seconds", "prometheus") / appended * 1e6,
    )
    line(
        "collector: CPU-s per million points",
        grown("otelcol_process_cpu_seconds", "collector") / max(1, after.sent - before.sent) * 1e6,
    )


def report_queries(prometheus: Prometheus) -> None:
    groups = prometheus.api("rules")["groups"]
    took = {group["name"]: group["evaluationTime"] for group in groups}
    slowest = max(took, key=lambda name: took[name])
    line(
        "one evaluation of all rules and alerts, s",
        sum(took.values()),
        f"slowest {slowest} {took[slowest]:.3f}",
    )
    for query in QUERIES:
        before = time.monotonic()
        found = prometheus.query(query)
        line("query, s", time.monotonic() - before, len(found), query)


def report_disk(prometheus: Prometheus, folder: Path, after: Snapshot, fleet: Fleet) -> None:
    samples = after.prometheus["prometheus_tsdb_head_samples_appended"]
    line("samples stored, of rules included; points sent", samples, fleet.points)
    wal = after.prometheus["prometheus_tsdb_wal_storage_size_bytes"]
    line("write-ahead log, bytes a sample", wal / samples)
    asked = urllib.request.Request(f"{prometheus.url}/api/v1/admin/tsdb/snapshot", method="POST")
    with urllib.request.urlopen(asked, timeout=300) as answer:
        name = json.load(answer)["data"]["name"]
    blocks = list((folder / "p" / "data" / "snapshots" / name).glob("*/meta.json"))
    stats = [json.loads(meta.read_text())["stats"] for meta in blocks]
    kept = sum(each["numSamples"] for each in stats)
    for part in ("chunks/*", "index"):
        size = sum(path.stat().st_size for meta in blocks for path in meta.parent.glob(part))
        line(f"as a block, {part.split('/')[0]}: bytes a sample", size / kept)
    line("as a block, samples a series", kept / sum(each["numSeries"] for each in stats))


def line(what: str, *found: object) -> None:
    words = [f"{each:,.3f}" if isinstance(each, float) else str(each) for each in found]
    print(f"{what}: {' | '.join(words)}" if found else f"\n## {what}", flush=True)


def count() -> None:
    """The series of one rank, GPU and node, and what each strategy leaves of a node's."""
    rows = recorded()
    found: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for row in rows:
        if row.of != "name":
            found[row.always][row.of] += stored(len(row.value))
    sources = Counter(row.source for row in rows)
    line("rows recorded", *(f"{number} {source}" for source, number in sorted(sources.items())))
    for of in ("rank", "gpu", "node", *ONCE):
        line(f"series of a {of}", found[True][of] + found[False][of], f"{found[True][of]} always")
    names = 3 * len(NAMES)
    line(f"series of a rank's {len(NAMES)} logged names", names)
    always = RANKS * (found[True]["rank"] + found[True]["gpu"]) + found[True]["node"] + 1
    for strategy, (first, other) in STRATEGIES.items():
        of_ranks = [ranks * (found[False]["rank"] + names) for ranks in (first, other)]
        once = sum(found[True][of] for of in ONCE)
        node = (always + once + of_ranks[0], always + of_ranks[1])
        line(f"series of a node under {strategy}, that of rank 0 and others", *node)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    asked.add_argument("sizes", nargs="*", type=int, help="nodes")
    asked.add_argument("--seconds", type=float, default=60.0)
    asked.add_argument("--interval", type=float, default=5.0, help="seconds between exports")
    asked.add_argument("--past-h", type=float, default=0.0, help="hours, as fast as can be")
    given = asked.parse_args()
    count()
    for size in given.sizes:
        with tempfile.TemporaryDirectory(prefix="fleet-") as folder:
            measure(
                size,
                seconds=given.seconds,
                interval_s=given.interval,
                past_s=given.past_h * 3600,
                folder=Path(folder),
            )


if __name__ == "__main__":
    main()
