"""Reads the calls to process groups of a step from the words that a journal has of them."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from functools import lru_cache

from otel_ddp.diagnosis.steps import Call, Calls
from otel_ddp.journal import layout
from otel_ddp.journal.parser import Name

# Of a word's eight bytes, the lowest are the time. One has the share that is idle, and two have the
# number of the name.
_IDLE, _LOW = layout.CALL_IDLE_SHIFT // 8, layout.CALL_SHIFT // 8
_HIGH = _LOW + 1
# Most programs repeat one sequence of calls, or a few.
_MOST_SEQUENCES = 64
# The kinds of the fields of a Call, in their order.
_KINDS = [str, str, str, int, str]


class CallNames:
    """What the names of one journal say of calls. One a process."""

    def __init__(self, names: Mapping[int, Name]) -> None:
        self._names = names
        # By the numbers of the names, byte by byte.
        self._sequences: dict[bytes, tuple[Call, ...]] = {}

    def read(self, words: bytes, rest_idle: int, began_ns: int) -> Calls | None:
        """The calls of a step that began then; None: a name is not there.

        *rest_idle*: as in the words, for what came behind the last one.
        """
        # This runs for each measured step of each rank: all words at once.
        whole = bytearray(words)
        low, high = whole[_LOW::8], whole[_HIGH::8]
        each = self._sequences.get(bytes(low + high)) or self._sequence(low, high)
        if each is None:
            return None
        # A word tells what came before it.
        idle = bytes(whole[_IDLE + 8 :: 8]) + bytes([rest_idle] if words else [])
        for at in range(_IDLE, 8):
            whole[at::8] = bytes(len(low))
        times_ns = array("Q", bytes(whole))
        at_ns = [began_ns + (after << layout.CALL_UNIT_SHIFT) for after in times_ns]
        return Calls(each, array("q", at_ns), idle)

    def _sequence(self, low: bytearray, high: bytearray) -> tuple[Call, ...] | None:
        found = [
            _call(self._names.get(number + (more << 8)))
            for number, more in zip(low, high, strict=True)
        ]
        each = tuple(call for call in found if call is not None)
        if len(each) < len(found):
            return None
        if len(self._sequences) >= _MOST_SEQUENCES:
            self._sequences.clear()
        shared = self._sequences[bytes(low + high)] = _shared(each)
        return shared


@lru_cache(1024)
def _shared(each: tuple[Call, ...]) -> tuple[Call, ...]:
    """One object for the ranks that call the same groups."""
    return each


@lru_cache(4096)
def _call(name: Name | None) -> Call | None:
    try:
        content = json.loads(name.text) if name is not None else None
    except ValueError:
        return None
    if not isinstance(content, list) or [type(field) for field in content] != _KINDS:
        return None
    return Call(*content)
