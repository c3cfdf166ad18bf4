"""Finds processes whose memory grows steadily towards its limit."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from otel_ddp.diagnosis.detector import Detector, Observation, RankState
from otel_ddp.diagnosis.medians import median
from otel_ddp.diagnosis.say import rank_name
from otel_ddp.diagnosis.verdict import Change, Labels, Verdict

_SPELL_NS = 30 * 10**9
# A judgement takes ten minutes at least, and up to twenty once they are there.
_FEWEST_SPELLS, _MOST_SPELLS = 21, 40
_PARTS = 5
_FULL_WITHIN_S = 24 * 3600.0
_STEADY = 0.4
_GROWN = 0.001


class _Spell(NamedTuple):
    began_ns: int
    least: float


class _Memory:
    """The least that one process held in each half minute: what it gives back does not count."""

    def __init__(self) -> None:
        self.limit = 0.0
        self.spells: deque[_Spell] = deque(maxlen=_MOST_SPELLS)
        self.open: Verdict | None = None


class MemoryCreep(Detector):
    """The memory of each process against its limit."""

    def __init__(self) -> None:
        self._memory: dict[Labels, _Memory] = {}
        self._changes: list[Change] = []

    def feed(self, rank: RankState, seen: Observation) -> None:
        labels, now_ns = rank.labels, seen.now_ns
        if seen.ended is not None:
            self.forget(labels)
        if seen.memory is None:
            return
        memory = self._memory.setdefault(labels, _Memory())
        used, memory.limit = seen.memory
        spells = memory.spells
        if spells and now_ns - spells[-1].began_ns < _SPELL_NS:
            spells[-1] = spells[-1]._replace(least=min(spells[-1].least, used))
            return
        if spells and now_ns - spells[-1].began_ns > 10 * _SPELL_NS:
            # What it held in so long a gap is not known.
            spells.clear()
        if len(spells) >= _FEWEST_SPELLS:
            self._judge(labels, memory)
        spells.append(_Spell(now_ns, used))

    def forget(self, labels: Labels) -> None:
        memory = self._memory.pop(labels, None)
        if memory and memory.open:
            self._changes.append(Change(memory.open, False))

    def poll(self, now_ns: int) -> list[Change]:
        changes, self._changes = self._changes, []
        return changes

    def present(self) -> list[Verdict]:
        return [memory.open for memory in list(self._memory.values()) if memory.open]

    def _judge(self, labels: Labels, memory: _Memory) -> None:
        growth = _growth(memory.spells) if memory.limit else 0.0
        if growth <= 0:
            if memory.open:
                self._changes.append(Change(memory.open, False))
                memory.open = None
            return
        if memory.open:
            memory.open = _verdict(labels, memory, growth, memory.open.since_ns)
            return
        since_ns = memory.spells[0].began_ns
        lasted_s = (memory.spells[-1].began_ns - since_ns) / 1e9
        if (
            _full_in_s(memory, growth) < _FULL_WITHIN_S
            and growth * lasted_s > _GROWN * memory.limit
        ):
            memory.open = _verdict(labels, memory, growth, since_ns)
            self._changes.append(Change(memory.open, True))


def _full_in_s(memory: _Memory, growth: float) -> float:
    """*growth*: bytes a second."""
    return max(memory.limit - memory.spells[-1].least, 0.0) / growth


def _verdict(labels: Labels, memory: _Memory, growth: float, since_ns: int) -> Verdict:
    last = memory.spells[-1]
    lasted_s = (last.began_ns - since_ns) / 1e9
    full_s = _full_in_s(memory, growth)
    mega = 1 << 20
    sentence = (
        f"the memory of {rank_name(labels)} has grown steadily for {lasted_s / 60:.0f} "
        f"minutes, by {growth * 60 / mega:.3g} MiB a minute: it reaches its limit of "
        f"{memory.limit / (mega << 10):.3g} GiB in {_hours(full_s)}. Look for lists of tensors "
        "that only grow, such as losses kept with their graphs."
    )
    evidence = {
        "bytes_per_s": round(growth, 1),
        "used_bytes": round(last.least),
        "limit_bytes": round(memory.limit),
        "full_in_s": round(full_s),
        "over_s": round(lasted_s),
    }
    return Verdict("creep", labels, "", sentence, evidence, None, since_ns)


def _growth(spells: deque[_Spell]) -> float:
    """Bytes a second, if it grows in each part of the time; else 0."""
    size = len(spells) / _PARTS
    every = list(spells)
    parts = [every[round(i * size) : round((i + 1) * size)] for i in range(_PARTS)]
    levels = [median([each.least for each in part]) for part in parts]
    times = [median([each.began_ns for each in part]) / 1e9 for part in parts]
    whole = (levels[-1] - levels[0]) / (times[-1] - times[0])
    slopes = [(levels[i + 1] - levels[i]) / (times[i + 1] - times[i]) for i in range(_PARTS - 1)]
    # A cache that fills grows less and less; one big allocation grows once.
    return whole if min(slopes) > _STEADY * whole > 0 else 0.0


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 7200 else f"{seconds / 60:.0f} minutes"
