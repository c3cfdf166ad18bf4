"""Measures one evaluation of all rules and alerts over many ranks, for docs/internals/scale.md.

    python bench/rules_at_scale.py 1000 10000        these numbers of ranks
    python bench/rules_at_scale.py 10000 --each      the dearest rules as well

A real Prometheus gets every series of a recorded node (bench/fleet_node.json) that a rule or an
alert reads, by remote write and all at once: the past that the rules look at, and the minutes that
they are watched for. So nothing but the rules works while they are measured.
"""

from __future__ import annotations

import argparse
import re
import signal
import struct
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "bench")]

from fleet import RANKS, Row, recorded  # noqa: E402
from tools.exposition import parse  # noqa: E402

from otel_ddp.vocabulary import catalog  # noqa: E402
from stack.servers import DEPLOY, Prometheus, binaries  # noqa: E402

_PAST_S = 150
# Of most groups; what all of them take in it is what is reported.
_INTERVAL_S = 30
# Beside the time that is watched. Prometheus refuses what is written more than 10 minutes ahead.
_FILLED_S, _SETTLED_S = 20, 65
_RANKS_WRITTEN_A_S = 80
_RULES = DEPLOY / "prometheus"
_BODY_BYTES = 4 << 20
# Of the late rank, by phase: what it needs, as a share of what others need.
_LATE = {"backward": 1.2, "comm_wait": 0.5}
# Each rank is a little faster or slower than the others, and logs a loss.
_SPREAD = 0.01
_LOGGED = (
    ("training_scalar", {"name": "loss", "split": "train"}, 2.0),
    ("training_nonfinite_total", {"name": "loss", "split": "train"}, 0.0),
)


def read_by_rules() -> set[str]:
    """The names of our metrics that stand in a rule or an alert."""
    files = [*_RULES.glob("rules/*.yml"), *_RULES.glob("alerts/*.yml")]
    words = set(re.findall(r"[a-zA-Z_:][\w:]*", "\n".join(path.read_text() for path in files)))
    return words & {metric.prometheus for metric in catalog.METRICS}


# -- series, as bytes of a remote write


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _field(tag: int, content: bytes) -> bytes:
    return bytes([tag << 3 | 2]) + _number(len(content)) + content


class Samples:
    """The bytes of one series' samples: the times are the same for all of them."""

    def __init__(self, times_s: np.ndarray[Any, Any]) -> None:
        self.times_s = times_s
        one = [_field(2, b"\x09" + bytes(8) + b"\x10" + _number(int(at * 1000))) for at in times_s]
        # A time of this century is six bytes long, so each sample is as long as the next.
        self._template = np.frombuffer(b"".join(one), np.uint8).reshape(len(one), -1)

    def encode(self, values: np.ndarray[Any, Any]) -> bytes:
        filled = self._template.copy()
        filled[:, 3:11] = values.astype("<f8").view(np.uint8).reshape(-1, 8)
        return filled.tobytes()


def encode(labels: Mapping[str, str], samples: bytes) -> bytes:
    """One series of a request."""
    pairs = b"".join(
        _field(1, _field(1, name.encode()) + _field(2, labels[name].encode()))
        for name in sorted(labels)
    )
    return _field(1, pairs + samples)


def send(prometheus: Prometheus, series: list[bytes]) -> None:
    body = b"".join(series)
    # Snappy, as one literal: Prometheus takes nothing else, and here is nothing to save.
    packed = _number(len(body)) + bytes([63 << 2]) + struct.pack("<I", len(body) - 1) + body
    headers = {"Content-Encoding": "snappy", "Content-Type": "application/x-protobuf"}
    request = urllib.request.Request(prometheus.remote_write, data=packed, headers=headers)
    urllib.request.urlopen(request, timeout=120).close()


# -- nodes


class Ranks:
    """All series of so many ranks, one late in backward among them."""

    def __init__(self, size: int, times: Samples) -> None:
        self._size, self._times = size, times
        self._random = np.random.default_rng(0)
        names = read_by_rules()
        self._rows = [row for row in recorded() if self._prometheus(row) in names]
        # Not of whole numbers, as what is made like it would be whole too.
        self._since = (times.times_s - times.times_s[0]).astype(float)

    def _prometheus(self, row: Row) -> str:
        return catalog.BY_NAME[row.metric].prometheus

    def series(self) -> Iterator[bytes]:
        for rank in range(self._size):
            node, local_rank = divmod(rank, RANKS)
            of_node = {"group": "g", "run": "fleet", "node": f"node-{node:04}"}
            of_rank = {
                **of_node,
                "job_type": "train",
                "rank": str(rank),
                "local_rank": str(local_rank),
            }
            for row in self._rows:
                if row.of == "rank" or (row.of == "run" and rank == 0):
                    yield self._encode(row, {**of_rank, **row.attributes}, rank)
                elif row.of == "gpu":
                    own = {"hw.id": f"GPU-{node:08x}-{local_rank:04x}", "gpu": str(local_rank)}
                    yield self._encode(row, {**of_rank, **row.attributes, **own}, rank)
                elif row.of == "node" and local_rank == 0:
                    yield self._encode(row, {**of_node, **row.attributes}, rank)
            for name, attributes, value in _LOGGED:
                yield self._put(name, {**of_rank, **attributes}, np.full_like(self._since, value))

    def _encode(self, row: Row, attributes: Mapping[str, str], rank: int) -> bytes:
        metric = catalog.BY_NAME[row.metric]
        value, per_s = row.value[0], row.per_s[0]
        if row.metric == "training.world.size":
            values = np.full_like(self._since, self._size)
        elif row.metric.endswith(".timestamp") and row.metric != "training.run.start.timestamp":
            values = self._times.times_s
        elif row.metric == "training.run.start.timestamp":
            values = np.full_like(self._since, self._times.times_s[0] - 3600)
        elif metric.kind is catalog.Kind.COUNTER:
            values = value + per_s * self._since
        elif row.metric == "otel_ddp.gpu.throttle.active":
            # A healthy fleet: the recorded board was too warm, and would fire an alert a GPU.
            values = np.full_like(self._since, attributes["reason"] == "sw_power")
        elif value.is_integer():
            values = np.full_like(self._since, value)
        else:
            late = _LATE.get(attributes.get("phase", ""), 1.0) if rank == 1 else 1.0
            own = value * self._random.normal(late, _SPREAD)
            values = np.full_like(self._since, own)
        return self._put(metric.prometheus, attributes, values)

    def _put(self, name: str, attributes: Mapping[str, str], values: np.ndarray[Any, Any]) -> bytes:
        labels = {catalog.prometheus_label(key): value for key, value in attributes.items()}
        labels |= {"job": "otel-ddp-agent", "instance": attributes["node"], "__name__": name}
        return encode(labels, self._times.encode(values))


# -- measuring


def measure(size: int, *, interval_s: int, watched_s: int, each: bool, folder: Path) -> None:
    prometheus = Prometheus(binaries(), folder, config=_RULES / "prometheus.yml")
    began_s = int(time.time())
    until_s = began_s + _FILLED_S + size // _RANKS_WRITTEN_A_S + _SETTLED_S + watched_s
    ends_s = until_s + 2 * _INTERVAL_S
    times = Samples(np.arange(began_s - _PAST_S, ends_s, interval_s))
    with prometheus:
        sent = waiting = 0
        body: list[bytes] = []
        for one in Ranks(size, times).series():
            body.append(one)
            sent, waiting = sent + 1, waiting + len(one)
            if waiting >= _BODY_BYTES:
                send(prometheus, body)
                body, waiting = [], 0
        send(prometheus, body)
        filled_s = time.time() - began_s
        # The first evaluations make new series, and some are of a part of the ranks.
        time.sleep(max(0.0, until_s - watched_s - time.time()))
        before, since_s = numbers(prometheus), time.time()
        taken = watch(prometheus, until_s=time.time() + watched_s)
        after, intervals = numbers(prometheus), (time.time() - since_s) / _INTERVAL_S
        at_once_s = all_at_once(prometheus)
        report(size, sent, filled_s, taken, before, after, intervals, at_once_s, each=each)


def watch(prometheus: Prometheus, until_s: float) -> dict[tuple[str, str], list[float]]:
    """What each rule took at each evaluation; its group and its name."""
    taken: dict[tuple[str, str], dict[str, float]] = {}
    while time.time() < until_s:
        for group in prometheus.api("rules")["groups"]:
            for number, rule in enumerate(group["rules"]):
                at = (group["name"], f"{number}:{rule['name']}")
                taken.setdefault(at, {})[rule["lastEvaluation"]] = rule["evaluationTime"]
        time.sleep(5.0)
    return {at: list(found.values()) for at, found in taken.items()}


def numbers(prometheus: Prometheus) -> dict[str, float]:
    with urllib.request.urlopen(f"{prometheus.url}/metrics", timeout=60) as answer:
        found: dict[str, float] = {}
        for name, _, value in parse(answer.read().decode()):
            found[name] = found.get(name, 0.0) + value
    return found


def all_at_once(prometheus: Prometheus) -> float:
    """From the moment in which all groups are due until each has been evaluated.

    Prometheus spreads them over their interval. What it could not do while it was held, it does as
    soon as it goes on.
    """
    prometheus.send_signal(signal.SIGSTOP)
    time.sleep(_INTERVAL_S + 1)
    due_s = time.time()
    prometheus.send_signal(signal.SIGCONT)
    ends_s: dict[str, float] = {}
    groups = {""}
    while groups - ends_s.keys():
        time.sleep(0.5)
        found = prometheus.api("rules")["groups"]
        groups = {group["name"] for group in found}
        for group in found:
            began_s = _seconds(group["lastEvaluation"])
            if began_s >= due_s:
                ends_s.setdefault(group["name"], began_s + group["evaluationTime"])
    return max(ends_s.values()) - due_s


def _seconds(time_of_go: str) -> float:
    """Its nanoseconds are more digits than Python reads."""
    return datetime.fromisoformat(re.sub(r"(\.\d{6})\d*", r"\1", time_of_go)).timestamp()


def report(
    size: int,
    sent: int,
    filled_s: float,
    taken: Mapping[tuple[str, str], list[float]],
    before: Mapping[str, float],
    after: Mapping[str, float],
    intervals: float,
    at_once_s: float,
    *,
    each: bool,
) -> None:
    middle = {at: sorted(found)[len(found) // 2] for at, found in taken.items()}

    def grown(name: str) -> float:
        return after[name] - before[name]

    cpu_s = grown("process_cpu_seconds_total") / intervals
    print(f"\n## {size} ranks, {size // RANKS} nodes")
    print(f"series read: {sent}, written in {filled_s:.0f} s")
    print(f"series in Prometheus: {after['prometheus_tsdb_head_series']:.0f}")
    print(f"memory of Prometheus: {after['process_resident_memory_bytes'] / 2**20:.0f} MiB")
    print(f"one evaluation of all rules and alerts: {sum(middle.values()):.2f} s")
    samples = grown("prometheus_engine_query_samples_total") / intervals
    print(f"samples read in {_INTERVAL_S} s: {samples:.0f}")
    print(f"processor time of Prometheus in {_INTERVAL_S} s: {cpu_s:.2f} s")
    by_group: dict[str, float] = {}
    for (group, _), took_s in middle.items():
        by_group[group] = by_group.get(group, 0.0) + took_s
    print(f"all groups at once: {at_once_s:.2f} s")
    for group, took_s in sorted(by_group.items(), key=lambda pair: -pair[1]):
        print(f"  {group}: {took_s:.2f} s")
    if each:
        for (group, rule), took_s in sorted(middle.items(), key=lambda pair: -pair[1])[:45]:
            print(f"    {took_s:.3f} s  {group} {rule}")


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    asked.add_argument("sizes", nargs="+", type=int, help="ranks")
    asked.add_argument("--interval", type=int, default=15, help="seconds between exports")
    asked.add_argument("--watched", type=int, default=100, help="seconds")
    asked.add_argument("--each", action="store_true", help="print the dearest rules")
    given = asked.parse_args()
    for size in given.sizes:
        with tempfile.TemporaryDirectory(prefix="rules-") as folder:
            measure(
                size,
                interval_s=given.interval,
                watched_s=given.watched,
                each=given.each,
                folder=Path(folder),
            )


if __name__ == "__main__":
    main()
