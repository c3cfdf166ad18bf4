"""Whether a run is slower than it was, on all ranks together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from otel_ddp.diagnosis.facts import WORK_PHASES, StepFacts, middle, percent, ratios, span
from otel_ddp.diagnosis.verdict import Change, Verdict, Who

# Steps are looked at in blocks, by their medians.
_BLOCK = 50
# Where in a block the time goes is seen as well in every fifth step.
_THINNED = 5
# What the run is compared with begins as its first settled steps, and follows it slowly.
_FIRST_BLOCKS = 10
_FOLLOWS_S = 3600.0
_SLOWER = 0.15
_SLOWER_STILL = 0.08
# For so many blocks, and for so long, or it is a mood of the machine.
_BLOCKS = 6
_LONG_NS = 300 * 10**9
_MOST_OF = 0.7


class _Block(NamedTuple):
    ended_ns: int
    parts: Mapping[str, float]
    """Medians: seconds of `step`, `comm_wait` and the phases of work; `amount` of what it did."""


class Regression:
    """The past of one run on this node, and whether its present is worse."""

    def __init__(self, who: Who) -> None:
        self._who = who
        self._steps: list[Sequence[StepFacts]] = []
        self._took_ns: list[float] = []
        self._first: list[_Block] = []
        self._usual: dict[str, float] = {}
        self._last_ns = 0
        self._slow: list[_Block] = []
        self._well = 0
        self._open: Verdict | None = None

    def feed(self, ranks: Sequence[StepFacts], step_ns: float, explained: bool) -> list[Change]:
        """One ordinary step of all ranks; `explained` while a verdict on one rank says why."""
        if explained:
            self._steps.clear()
            self._took_ns.clear()
            self._slow.clear()
            return []
        self._steps.append(ranks)
        self._took_ns.append(step_ns)
        if len(self._steps) < _BLOCK:
            return []
        block = _block(self._steps, middle(self._took_ns))
        self._steps.clear()
        self._took_ns.clear()
        if len(self._first) < _FIRST_BLOCKS:
            self._first.append(block)
            if len(self._first) == _FIRST_BLOCKS:
                self._usual = {
                    word: middle([each.parts[word] for each in self._first]) for word in block.parts
                }
                self._last_ns = block.ended_ns
            return []
        return self._judge(block)

    def _judge(self, block: _Block) -> list[Change]:
        usual, step = self._usual, block.parts["step"]
        # A batch that grew is no reason to call the run slow.
        grown = block.parts["amount"] / usual["amount"] - 1 if usual["amount"] else 0.0
        slower = step / usual["step"] - 1 - max(grown, 0.0)
        if self._open:
            self._well = self._well + 1 if slower < _SLOWER_STILL else 0
            if self._well < _BLOCKS:
                return []
            verdict, self._open, self._well = self._open, None, 0
            self._slow.clear()
            self._last_ns = block.ended_ns
            return [Change(verdict, False)]
        if slower <= _SLOWER:
            self._slow.clear()
            self._follow(block)
            return []
        self._slow.append(block)
        long_enough = block.ended_ns - self._slow[0].ended_ns >= _LONG_NS
        if len(self._slow) < _BLOCKS or not long_enough:
            if len(self._slow) > 2 * _BLOCKS:
                # The first one tells since when, the last ones how slow it is.
                del self._slow[1]
            return []
        self._open = self._verdict()
        return [Change(self._open, True)]

    def _follow(self, block: _Block) -> None:
        share = min(max(block.ended_ns - self._last_ns, 0) / 1e9 / _FOLLOWS_S, 1.0)
        self._last_ns = block.ended_ns
        for word, value in block.parts.items():
            self._usual[word] += share * (value - self._usual[word])

    def _verdict(self) -> Verdict:
        recent = self._slow[-_BLOCKS:]
        now = {word: middle([each.parts[word] for each in recent]) for word in self._usual}
        usual_s, now_s = self._usual["step"], now["step"]
        more = {word: now[word] - self._usual[word] for word in (*WORK_PHASES, "comm_wait")}
        phase = max(more, key=lambda word: more[word])
        if more[phase] < _MOST_OF * (now_s - usual_s):
            together = more["forward"] + more["backward"] + more["optimizer"]
            phase = "compute" if together >= _MOST_OF * (now_s - usual_s) else "mixed"
        where = {
            "mixed": "It is in several phases.",
            "compute": "Forward, backward and the optimizer are all slower: look at clocks, heat "
            "and power of the devices.",
            "comm_wait": "It is the waiting for other ranks: look at the network, and at the ranks "
            "on other nodes.",
            "data": "It is the waiting for batches: look at the storage and the loader's workers.",
        }.get(phase, f"It is in {phase}.")
        sentence = (
            f"all ranks are slower than they were: a step takes {span(now_s)}, "
            f"{percent(now_s / usual_s - 1)} more than the usual {span(usual_s)}. {where}"
        )
        evidence = {
            "step_s": round(now_s, 6),
            "usual_step_s": round(usual_s, 6),
            "slower": round(now_s / usual_s - 1, 4),
            "more_s": ratios(more),
        }
        since_ns = self._slow[0].ended_ns
        return Verdict("regression", self._who, phase, sentence, evidence, None, since_ns)

    def close(self) -> list[Change]:
        """Nobody is left that it could be about."""
        verdict, self._open = self._open, None
        return [Change(verdict, False)] if verdict else []


def _block(steps: Sequence[Sequence[StepFacts]], step_ns: float) -> _Block:
    some = steps[::_THINNED]
    waits_ns = [middle([each.wait_ns for each in ranks]) for ranks in some]
    phases_ns = [
        map(middle, zip(*[each.phases_ns for each in ranks], strict=True)) for ranks in some
    ]
    parts = {
        "step": step_ns / 1e9,
        "comm_wait": middle(waits_ns) / 1e9,
        "amount": middle([sum([each.work for each in ranks]) for ranks in steps]),
    }
    for word, column in zip(WORK_PHASES, zip(*phases_ns, strict=True), strict=True):
        parts[word] = middle(column) / 1e9
    return _Block(max(each.ended_ns for each in steps[-1]), parts)
