"""Finds processes whose memory grows steadily towards its limit."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from otel_ddp.diagnosis.detector import Detector, Memory, Observation, RankState
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
    """The least that one process held in each half minute: what it gives back does not count."""

    def __init__(self, whose: str) -> None:
        self.whose = whose
        self.spells: deque[_Spell] = deque(maxlen=_MOST_SPELLS)
        self.creep: _Creep | None = None

    def feed(self, memory: Memory, now_ns: int) -> bool:
        """Whether it was judged again."""
        used, limit = memory
        spells = self.spells
        if spells and now_ns - spells[-1].began_ns < _SPELL_NS:
            spells[-1] = spells[-1]._replace(least=min(spells[-1].least, used))
            return False
        if spells and now_ns - spells[-1].began_ns > 10 * _SPELL_NS:
            # What it held in so long a gap is not known.
            spells.clear()
        is_due = len(spells) >= _FEWEST_SPELLS
        if is_due:
            self._judge(limit)
        spells.append(_Spell(now_ns, used))
        return is_due

    def _judge(self, limit: float) -> None:
        growth = _growth(self.spells) if limit else 0.0
        if growth <= 0:
            self.creep = None
            return
        since_ns = self.creep.since_ns if self.creep else self.spells[0].began_ns
        found = _Creep(growth, since_ns, self.spells[-1], limit)
        if self.creep or (
            found.full_in_s() < _FULL_WITHIN_S and growth * found.lasted_s() > _GROWN * limit
        ):
            self.creep = found


class MemoryCreep(Detector):
    """The memory of each process against its limit: of its host, and of its device."""

    def __init__(self) -> None:
        self._memories: dict[Labels, tuple[_Memory, _Memory]] = {}
        self._open: dict[Labels, Verdict] = {}
        self._changes: list[Change] = []

    def feed(self, rank: RankState, seen: Observation) -> None:
        labels = rank.labels
        if seen.ended is not None:
            self.forget(labels)
        told = seen.memory, seen.device_memory
        if told == (None, None):
            return
        memories = self._memories.setdefault(labels, (_Memory(""), _Memory("the device of ")))
        new = zip(memories, told, strict=True)
        judged = [memory.feed(each, seen.now_ns) for memory, each in new if each]
        if not any(judged):
            return
        creeps = [(each.creep, each.whose) for each in memories if each.creep]
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
