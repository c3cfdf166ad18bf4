"""Parses what a process has answered about its collectives: its flight recorder, packed by torch.

Any program with this user's rights may have written the answer, so nothing in it is trusted.
"""

from __future__ import annotations

import base64
import io
import pickle
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from otel_ddp.diagnosis.arrivals import Arrival, Sample

# The pause where an answer made no sense; and the longest pause that a process may ask for.
NO_ANSWER_PAUSE_S, _LONGEST_PAUSE_S = 60.0, 3600.0
_LARGEST_TRACE = 32 * 1024 * 1024
_BROKEN = (
    *(ValueError, TypeError, KeyError, IndexError, AttributeError, EOFError, OverflowError),
    *(zlib.error, pickle.UnpicklingError, RecursionError, MemoryError),
)


class ArrivalsAnswer(NamedTuple):
    """The answer of a process: when it may be asked again, and its sample, if it has one."""

    in_s: float
    sample: Sample | None = None


class _PlainUnpickler(pickle.Unpickler):
    """Loads numbers, words, lists and dictionaries, as torch packs them, and nothing that runs."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}")


def parse_answer(content: Mapping[str, Any]) -> ArrivalsAnswer:
    """The answer, as far as it makes sense."""
    part = content.get("arrivals")
    if not isinstance(part, dict):
        return ArrivalsAnswer(NO_ANSWER_PAUSE_S)
    in_s = part.get("in_s")
    pause_s = (
        min(float(in_s), _LONGEST_PAUSE_S) if isinstance(in_s, (int, float)) else NO_ANSWER_PAUSE_S
    )
    if "packed" not in part:
        return ArrivalsAnswer(pause_s)
    try:
        packed = base64.b64decode(part["packed"])
        unpacked = zlib.decompressobj().decompress(packed, _LARGEST_TRACE)
        trace = _PlainUnpickler(io.BytesIO(unpacked)).load()
        shift_ns = content["monotonic_ns"] - content["time_ns"]
        arrivals = [
            Arrival(
                str(each["process_group"][0]),
                int(each["collective_seq_id"]),
                str(each["profiling_name"]),
                int(each["time_created_ns"]) + shift_ns,
                None if (took_ms := each.get("duration_ms")) is None else round(took_ms * 1e6),
            )
            for each in trace["entries"]
        ]
        on_device = part.get("recorder") == "nccl"
        sizes = {str(each["name"]): int(each["size"]) for each in content["groups"]}
    except _BROKEN:
        return ArrivalsAnswer(pause_s, Sample((), {}))
    return ArrivalsAnswer(pause_s, Sample(arrivals, sizes, on_device))
