"""Finds processes whose memory grows steadily towards its limit."""

from __future__ import annotations

import itertools
from collections import deque
from typing import NamedTuple

from otel_ddp.diagnosis.detector import Detector, Memory, Observation, RankState
from otel_ddp.diagnosis.medians import median
from otel_ddp.diagnosis.say import rank_name
from otel_ddp.diagnosis.verdict import Change, Labels, Verdict

_SECOND_NS = 10**9
# What it held before so long a gap says nothing.
_LONGEST_GAP_NS = 300 * _SECOND_NS
# Each part has grown by so much of the mean; the usual spell is so near to a steady growth, as a
# share of all that it has grown.
_STEADY, _APART = 0.4, 0.04


class _Rule(NamedTuple):
    """How long a memory is watched before it is judged, and what is told of it then."""

    spell_ns: int
    """The least of so long a time counts: what is given back does not."""
    fewest: int
    """A judgement takes so many spells at least,"""
    most: int
    """and up to so many once they are there."""
    parts: int
    """In each part of them it has grown."""
    full_within_s: float
    """Told is what would be full so soon,"""
    grown: float
    """and has grown by this share of its limit."""


_PATIENT = _Rule(30 * _SECOND_NS, 21, 40, parts=5, full_within_s=24 * 3600.0, grown=0.001)
# For what would be full by the time that the patient one has judged it. In a shorter time more
# looks steady by chance: so there are more parts, and it has to have grown by more.
_QUICK = _Rule(5 * _SECOND_NS, 21, 24, parts=7, full_within_s=600.0, grown=0.05)


class _Spell(NamedTuple):
    began_ns: int
    least: float


class _Creep(NamedTuple):
    """Memory that grows steadily."""

    bytes_per_s: float
    since_ns: int
    last: _Spell
    limit: float

    def full_in_s(self) -> float:
        return max(self.limit - self.last.least, 0.0) / self.bytes_per_s

    def lasted_s(self) -> float:
        return (self.last.began_ns - self.since_ns) / 1e9


class _Memory:
    """The least that one process held in each spell, judged by one rule."""

    def __init__(self, whose: str, rule: _Rule) -> None:
        self.whose = whose
        self.creep: _Creep | None = None
        self._rule = rule
        self._spells: deque[_Spell] = deque(maxlen=rule.most)

    def feed(self, memory: Memory, now_ns: int) -> bool:
        """Whether it was judged again."""
        used, limit = memory
        spells = self._spells
        if spells and now_ns - spells[-1].began_ns < self._rule.spell_ns:
            spells[-1] = spells[-1]._replace(least=min(spells[-1].least, used))
            return False
        if spells and now_ns - spells[-1].began_ns > _LONGEST_GAP_NS:
            spells.clear()
        is_due = len(spells) >= self._rule.fewest
        if is_due:
            self._judge(limit)
        spells.append(_Spell(now_ns, used))
        return is_due

    def _judge(self, limit: float) -> None:
        rule, spells = self._rule, self._spells
        growth, apart = _growth(spells, rule.parts) if limit else (0.0, 0.0)
        if growth <= 0:
            self.creep = None
            return
        since_ns = self.creep.since_ns if self.creep else spells[0].began_ns
        found = _Creep(growth, since_ns, spells[-1], limit)
        grown = growth * found.lasted_s()
        is_new = found.full_in_s() < rule.full_within_s and grown > rule.grown * limit
        # Its pace may change. But what varies as much as it has grown in all may have grown by
        # chance.
        if self.creep or (is_new and apart < _APART * grown):
            self.creep = found


def _memories() -> tuple[list[_Memory], list[_Memory]]:
    """Of the host of one process, and of its device.

    The host's also grows while a data set is read into memory: for that the patient rule is right.
    """
    device = "the device of "
    return [_Memory("", _PATIENT)], [_Memory(device, _PATIENT), _Memory(device, _QUICK)]


class MemoryCreep(Detector):
    """The memory of each process against its limit: of its host, and of its device."""

    def __init__(self) -> None:
        self._memories: dict[Labels, tuple[list[_Memory], list[_Memory]]] = {}
        self._open: dict[Labels, Verdict] = {}
        self._changes: list[Change] = []

    def feed(self, rank: RankState, seen: Observation) -> None:
        labels = rank.labels
        if seen.ended is not None:
            self.forget(labels)
        told = seen.memory, seen.device_memory
        if told == (None, None):
            return
        if labels not in self._memories:
            self._memories[labels] = _memories()
        new = zip(self._memories[labels], told, strict=True)
        judged = [each.feed(now, seen.now_ns) for memories, now in new if now for each in memories]
        if not any(judged):
            return
        every = itertools.chain(*self._memories[labels])
        creeps = [(each.creep, each.whose) for each in every if each.creep]
        if not creeps:
            self._close(labels)
            return
        # One verdict a process: what is full first ends it.
        verdict = _verdict(labels, *min(creeps, key=lambda each: each[0].full_in_s()))
        if labels not in self._open:
            self._changes.append(Change(verdict, True))
        self._open[labels] = verdict

    def forget(self, labels: Labels) -> None:
        self._memories.pop(labels, None)
        self._close(labels)

    def _close(self, labels: Labels) -> None:
        if verdict := self._open.pop(labels, None):
            self._changes.append(Change(verdict, False))

    def poll(self, now_ns: int) -> list[Change]:
        changes, self._changes = self._changes, []
        return changes

    def present(self) -> list[Verdict]:
        return list(self._open.values())


def _verdict(labels: Labels, creep: _Creep, whose: str) -> Verdict:
    full_s, lasted_s = creep.full_in_s(), creep.lasted_s()
    mega = 1 << 20
    sentence = (
        f"the memory of {whose}{rank_name(labels)} has grown steadily for {lasted_s / 60:.0f} "
        f"minutes, by {creep.bytes_per_s * 60 / mega:.3g} MiB a minute: it reaches its limit of "
        f"{creep.limit / (mega << 10):.3g} GiB in {_hours(full_s)}. Look for lists of tensors "
        "that only grow, such as losses kept with their graphs."
    )
    evidence = {
        "memory_of": "device" if whose else "host",
        "bytes_per_s": round(creep.bytes_per_s, 1),
        "used_bytes": round(creep.last.least),
        "limit_bytes": round(creep.limit),
        "full_in_s": round(full_s),
        "over_s": round(lasted_s),
    }
    return Verdict("creep", labels, "", sentence, evidence, None, creep.since_ns)


def _growth(spells: deque[_Spell], count: int) -> tuple[float, float]:
    """Bytes a second, if it grows in each of so many parts of the time, else 0.

    And how far from steady growth the usual spell is, in bytes.
    """
    size = len(spells) / count
    every = list(spells)
    parts = [every[round(i * size) : round((i + 1) * size)] for i in range(count)]
    levels = [median([each.least for each in part]) for part in parts]
    times = [median([each.began_ns for each in part]) / 1e9 for part in parts]
    whole = (levels[-1] - levels[0]) / (times[-1] - times[0])
    slopes = [(levels[i + 1] - levels[i]) / (times[i + 1] - times[i]) for i in range(count - 1)]
    line = [levels[0] + whole * (each.began_ns / 1e9 - times[0]) for each in every]
    apart = median([abs(each.least - at) for each, at in zip(every, line, strict=True)])
    # A cache that fills grows less and less; one big allocation grows once.
    return (whole if min(slopes) > _STEADY * whole > 0 else 0.0), apart


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 7200 else f"{seconds / 60:.0f} minutes"
