"""Memory of a process that grows steadily until there is none left."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from otel_ddp.diagnosis.facts import called, middle
from otel_ddp.diagnosis.verdict import Change, Verdict, Who

_SPELL_NS = 30 * 10**9
# Ten minutes are judged, and up to twenty once there are.
_FEWEST_SPELLS, _MOST_SPELLS = 21, 40
_PARTS = 5
_FULL_WITHIN_S = 24 * 3600.0
_STEADY = 0.4
_GROWN = 0.001


class _Spell(NamedTuple):
    began_ns: int
    least: float


class _Memory:
    """What one process holds, as the least of each half minute: what it always gives back."""

    def __init__(self) -> None:
        self.limit = 0.0
        self.spells: deque[_Spell] = deque(maxlen=_MOST_SPELLS)
        self.open: Verdict | None = None


class Creep:
    """Memory of each process against what it may have."""

    def __init__(self) -> None:
        self._memory: dict[Who, _Memory] = {}
        self._changes: list[Change] = []

    def limit(self, who: Who, limit: float) -> None:
        """How many bytes there are for it."""
        self._memory.setdefault(who, _Memory()).limit = limit

    def feed(self, who: Who, used: float, now_ns: int) -> None:
        """How many bytes it holds now."""
        memory = self._memory.setdefault(who, _Memory())
        spells = memory.spells
        if spells and now_ns - spells[-1].began_ns < _SPELL_NS:
            spells[-1] = spells[-1]._replace(least=min(spells[-1].least, used))
            return
        if spells and now_ns - spells[-1].began_ns > 10 * _SPELL_NS:
            # Nothing is known of so long a time.
            spells.clear()
        if len(spells) >= _FEWEST_SPELLS:
            self._judge(who, memory)
        spells.append(_Spell(now_ns, used))

    def forget(self, who: Who) -> None:
        """The process is gone."""
        memory = self._memory.pop(who, None)
        if memory and memory.open:
            self._changes.append(Change(memory.open, False))

    def poll(self) -> list[Change]:
        """What has changed since the last look."""
        changes, self._changes = self._changes, []
        return changes

    def _judge(self, who: Who, memory: _Memory) -> None:
        growth = _growth(memory.spells) if memory.limit else 0.0
        left = memory.limit - memory.spells[-1].least
        full_s = max(left, 0.0) / growth if growth > 0 else float("inf")
        lasted_s = (memory.spells[-1].began_ns - memory.spells[0].began_ns) / 1e9
        creeps = full_s < _FULL_WITHIN_S and growth * lasted_s > _GROWN * memory.limit
        if not creeps:
            if memory.open and growth <= 0:
                self._changes.append(Change(memory.open, False))
                memory.open = None
            return
        if memory.open:
            return
        mega = 1 << 20
        sentence = (
            f"the memory of {called(who)} grows by {growth * 60 / mega:.3g} MiB a minute, steadily "
            f"for {lasted_s / 60:.0f} minutes: its limit of {memory.limit / (mega << 10):.3g} GiB "
            f"is reached in {_hours(full_s)}. Look for lists of tensors that only grow, such as "
            "losses kept with their graphs."
        )
        evidence = {
            "bytes_per_s": round(growth, 1),
            "used_bytes": round(memory.spells[-1].least),
            "limit_bytes": round(memory.limit),
            "full_in_s": round(full_s),
            "over_s": round(lasted_s),
        }
        memory.open = Verdict("creep", who, "", sentence, evidence, None, memory.spells[0].began_ns)
        self._changes.append(Change(memory.open, True))


def _growth(spells: deque[_Spell]) -> float:
    """Bytes a second, where it grows in each part of the time; else 0."""
    size = len(spells) / _PARTS
    told = list(spells)
    parts = [told[round(i * size) : round((i + 1) * size)] for i in range(_PARTS)]
    levels = [middle([each.least for each in part]) for part in parts]
    times = [middle([each.began_ns for each in part]) / 1e9 for part in parts]
    whole = (levels[-1] - levels[0]) / (times[-1] - times[0])
    slopes = [(levels[i + 1] - levels[i]) / (times[i + 1] - times[i]) for i in range(_PARTS - 1)]
    # A cache that fills grows less and less; one big allocation grows once.
    return whole if min(slopes) > _STEADY * whole > 0 else 0.0


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 7200 else f"{seconds / 60:.0f} minutes"
