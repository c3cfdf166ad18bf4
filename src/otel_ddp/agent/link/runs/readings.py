"""What only a node knows of itself for the history of a run, as JSON: its samples and its cost."""

from __future__ import annotations

import json
import math
from typing import Any

from otel_ddp import plain
from otel_ddp.agent.history.kept_run import Readings, Sample
from otel_ddp.agent.link.runs.known import Senseless, read_json, wall_origin_ns
from otel_ddp.history.tables import SeriesKey

# Of one report. A node has some hundred.
_MOST_SAMPLES = 4000
_MOST_BYTES = 1 << 20
_LONGEST_WORD, _MOST_LABELS = 200, 16
_KINDS = ("node", "counter")
_LAST_NS = 1 << 62


def pack(found: Readings) -> bytes:
    """Serialise for the lead, with times on our monotonic clock."""
    origin_ns = wall_origin_ns()
    rows = [
        [*key[:3], [*map(list, key.labels)], time_ns - origin_ns, value]
        for _, key, time_ns, value in found.samples[:_MOST_SAMPLES]
        # JSON has no such numbers.
        if math.isfinite(value)
    ]
    return json.dumps({"agent_cpu_s": found.agent_cpu_s, "samples": rows}).encode()


def unpack(content: bytes, node: str, ahead_ns: int) -> Readings:
    """Parse what a node sent; raises Senseless. *ahead_ns*: our clock minus the sender's."""
    told = read_json(content, _MOST_BYTES)
    rows = plain.list_of(list, told.get("samples"))[:_MOST_SAMPLES]
    cpu_s = plain.number(told.get("agent_cpu_s"), 0, 1e12)
    return Readings([_sample(row, node, ahead_ns) for row in rows], cpu_s)


def _sample(row: list[Any], node: str, ahead_ns: int) -> Sample:
    try:
        kind, name, rank, labels, time_ns, value = row
        more = tuple((_word(key), _word(word)) for key, word in labels[:_MOST_LABELS])
    except (ValueError, TypeError):
        raise Senseless("a sample") from None
    number, at_ns = plain.number(value), plain.whole(time_ns)
    if kind not in _KINDS or number is None or at_ns is None:
        raise Senseless("a sample")
    if not 0 <= at_ns + ahead_ns < _LAST_NS:
        raise Senseless("the time of a sample")
    # The connection decides whose it is, not the message.
    labelled = tuple({**dict(more), "node": node}.items())
    key = SeriesKey(kind, _word(name), _word(rank), labelled)
    return Sample(None, key, at_ns + ahead_ns, number)


def _word(text: Any) -> str:
    if not isinstance(text, str) or len(text) > _LONGEST_WORD:
        raise Senseless("a word of a sample")
    return text
