"""Steps as real machines make them: they depend on each other, drift, and pause now and then."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

from otel_ddp.history.compare import Side, Value
from otel_ddp.history.whole_run import Cell
from otel_ddp.vocabulary.words import PHASES

# Seconds of a step of 20 ms.
_PHASES_S = {"data": 0.001, "forward": 0.006, "backward": 0.009, "optimizer": 0.002, "other": 5e-4}
_WAIT_S = 0.0015
# Of the time of a phase; four degrees of freedom: once in a hundred steps it is 4.6 times as much.
_JITTER = 0.025
_MEMORY = 0.5
_DRIFT = 0.005
_PAUSES = 0.007
# On a machine that others share, some steps are slower by this, and each phase in its own measure.
# Others come and go every 40 steps or so; how often they are there differs from run to run.
_SHARED, _SHARED_STEPS = 0.1, 40
_FOLLOWS = {"data": 0.5, "forward": 0.8, "optimizer": 3.0, "other": 3.0}


def noisy_side(
    seed: int,
    *,
    steps: int = 300,
    slower: Mapping[str, float] = {},
    loss: float = 1.0,
    jitter: float = _JITTER,
    shared: bool = False,
) -> Side:
    """One run: `slower` are factors by phase, `loss` is one for the logged loss.

    *shared*: other work comes and goes on the machine.
    """
    chance = random.Random(seed)
    others = _others(random.Random(seed + 1), steps) if shared else [0.0] * steps
    whole, loads = _Noise(chance), {phase: _Noise(chance) for phase in (*_PHASES_S, "comm_wait")}
    period, shift = chance.uniform(100, 400), chance.uniform(0, 6.3)
    cells = []
    for step in range(steps):
        pace = 1 + jitter * whole.next() / 2 + _DRIFT * math.sin(step / period * 6.3 + shift)
        phases_s = dict.fromkeys(PHASES, 0.0)
        for phase, mean_s in {**_PHASES_S, "comm_wait": _WAIT_S}.items():
            wild = 5.0 if phase == "comm_wait" else 1.0
            factor = max(pace + wild * jitter * loads[phase].next(), 0.2)
            factor *= 1 + others[step] * _FOLLOWS.get(phase, 1.0)
            # The first steps are slow.
            factor *= 1 + 2 * math.exp(-step / 3)
            phases_s[phase] = mean_s * factor * slower.get(phase, 1.0)
        if chance.random() < _PAUSES:
            phases_s["other"] += chance.uniform(0.02, 0.5)
        saves = step % 100 == 99
        phases_s["checkpoint"] = 0.2 if saves else 0.0
        took_s = sum(phases_s.values())
        cells.append(Cell(1.0, took_s, 64.0, not saves, phases_s))
    losses = [
        loss * (2 * math.exp(-step / 80) + 0.3) * (1 + 0.05 * chance.gauss(0, 1))
        for step in range(steps)
    ]
    value = Value("loss", "train", "min", dict(enumerate(losses)), losses[-1], min(losses))
    return Side(f"run-{seed}", {"ranks": "4"}, {}, cells, [value])


def _others(chance: random.Random, steps: int) -> list[float]:
    """By how much other work slows each step of a run."""
    often, there, found = chance.random(), False, []
    for step in range(steps):
        if step == 0 or chance.random() < 1 / _SHARED_STEPS:
            there = chance.random() < often
        found.append(_SHARED if there else 0.0)
    return found


class _Noise:
    """Heavy-tailed numbers around 0, each of which resembles the one before."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._now = 0.0

    def next(self) -> float:
        new = self._chance.gauss(0, 1) / math.sqrt(self._chance.gammavariate(2, 1) / 2)
        self._now = _MEMORY * self._now + math.sqrt(1 - _MEMORY**2) * new
        return self._now
