"""Finds out when a run is slower than it was, on all ranks together."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from otel_ddp.diagnosis.medians import median
from otel_ddp.diagnosis.say import duration, percent, rounded
from otel_ddp.diagnosis.step_facts import StepFacts
from otel_ddp.diagnosis.verdict import Change, Labels, Verdict
from otel_ddp.vocabulary.words import COMPUTE_PHASES, WORK_PHASES

# Steps are compared in blocks, by the medians of each block.
_BLOCK = 50
# The phases of a block are taken from every fifth step, which says the same.
_THINNED = 5
# The run is compared with its first settled blocks, and then with a mean that follows slowly.
_FIRST_BLOCKS = 10
_FOLLOWS_S = 3600.0
_SLOWER = 0.15
_SLOWER_STILL = 0.08
# It must last for so many blocks and so long: shorter slowness comes from the machine.
_BLOCKS = 6
_LONG_NS = 300 * 10**9
_MOST_OF = 0.7


class _Block(NamedTuple):
    ended_ns: int
    parts: Mapping[str, float]
    """Medians: seconds of `step`, `comm_wait` and each work phase; `amount` of work."""


class Regression:
    """One run: what was usual, and whether it is slower now."""

    def __init__(self, labels: Labels) -> None:
        self._who = labels
        # Of the block that is not full yet: how long steps took, what there was to do in each, and
        # the medians of waits and phases in every _THINNED one.
        self._steps_ns: list[float] = []
        self._amounts: list[int] = []
        self._medians_ns: list[list[float]] = []
        self._first: list[_Block] = []
        self._usual: dict[str, float] = {}
        self._last_ns = 0
        # The last blocks in a row that were slow, and when the first of them ended.
        self._slow: deque[_Block] = deque(maxlen=_BLOCKS)
        self._since_ns = 0
        self._recovered = 0
        self._open: Verdict | None = None

    def feed(
        self, ranks: Sequence[StepFacts], steps_ns: Sequence[float], explained: bool
    ) -> list[Change]:
        """One ordinary step of all ranks; `explained` while a verdict on one rank says why.

        *steps_ns*: how long it took, and those before it that were not measured.
        """
        if explained:
            self._begin_block()
            self._slow.clear()
            return []
        if len(self._amounts) % _THINNED == 0:
            columns = zip(*[(each.wait_ns, *each.phases_ns) for each in ranks], strict=True)
            self._medians_ns.append(list(map(median, columns)))
        self._amounts.append(sum([each.work for each in ranks]))
        self._steps_ns.extend(steps_ns)
        if len(self._amounts) < _BLOCK:
            return []
        block = self._block(max([each.ended_ns for each in ranks]))
        self._begin_block()
        if self._usual:
            return self._judge(block)
        self._first.append(block)
        if len(self._first) == _FIRST_BLOCKS:
            self._usual = {
                word: median([each.parts[word] for each in self._first]) for word in block.parts
            }
            self._last_ns = block.ended_ns
        return []

    def _begin_block(self) -> None:
        self._steps_ns.clear()
        self._amounts.clear()
        self._medians_ns.clear()

    def _block(self, ended_ns: int) -> _Block:
        typical_s = [median(each) / 1e9 for each in zip(*self._medians_ns, strict=True)]
        parts = dict(zip(("comm_wait", *WORK_PHASES), typical_s, strict=True))
        amount, step_s = median(self._amounts), median(self._steps_ns) / 1e9
        return _Block(ended_ns, {"step": step_s, "amount": amount, **parts})

    def _judge(self, block: _Block) -> list[Change]:
        usual = self._usual
        # A run whose batches grew is not slow.
        grown = block.parts["amount"] / usual["amount"] - 1 if usual["amount"] else 0.0
        slower = block.parts["step"] / usual["step"] - 1 - max(grown, 0.0)
        if self._open is not None:
            if slower >= _SLOWER_STILL:
                self._recovered = 0
                self._slow.append(block)
                # With the present figures.
                self._open = self._verdict()._replace(since_ns=self._open.since_ns)
                return []
            self._recovered += 1
            if self._recovered < _BLOCKS:
                return []
            self._slow.clear()
            self._last_ns = block.ended_ns
            return self.close()
        if slower <= _SLOWER:
            self._slow.clear()
            self._follow(block)
            return []
        if not self._slow:
            self._since_ns = block.ended_ns
        self._slow.append(block)
        if len(self._slow) < _BLOCKS or block.ended_ns - self._since_ns < _LONG_NS:
            return []
        self._open = self._verdict()
        return [Change(self._open, True)]

    def _follow(self, block: _Block) -> None:
        share = min(max(block.ended_ns - self._last_ns, 0) / 1e9 / _FOLLOWS_S, 1.0)
        self._last_ns = block.ended_ns
        for word, value in block.parts.items():
            self._usual[word] += share * (value - self._usual[word])

    def _phase(self, now_s: float, more: Mapping[str, float]) -> str:
        """*more*: what each phase takes more than usual."""
        most = _MOST_OF * (now_s - self._usual["step"])
        phase = max(more, key=lambda word: more[word])
        if more[phase] >= most:
            return phase
        return "compute" if sum(more[word] for word in COMPUTE_PHASES) >= most else "mixed"

    def _verdict(self) -> Verdict:
        usual_s = self._usual["step"]
        now = {word: median([each.parts[word] for each in self._slow]) for word in self._usual}
        more = {word: now[word] - self._usual[word] for word in (*WORK_PHASES, "comm_wait")}
        now_s = now["step"]
        phase = self._phase(now_s, more)
        where = {
            "mixed": "Several phases take longer.",
            "compute": "Forward, backward and the optimizer are all slower: look at clocks, heat "
            "and power of the devices.",
            "comm_wait": "Ranks wait longer for each other: look at the network, and at the ranks "
            "on other nodes.",
            "data": "Ranks wait longer for batches: look at the storage and the loader's workers.",
        }.get(phase, f"The phase {phase} takes longer.")
        sentence = (
            f"all ranks are slower than they were: a step takes {duration(now_s)}, "
            f"{percent(now_s / usual_s - 1)} more than the usual {duration(usual_s)}. {where}"
        )
        evidence = {
            "step_s": round(now_s, 6),
            "usual_step_s": round(usual_s, 6),
            "slower": round(now_s / usual_s - 1, 4),
            "more_s": rounded(more),
        }
        return Verdict("regression", self._who, phase, sentence, evidence, None, self._since_ns)

    def present(self) -> list[Verdict]:
        """The open verdict, with the figures of the last steps that were slow."""
        return [self._open] if self._open else []

    def close(self) -> list[Change]:
        """The run has no ranks on this node any more."""
        verdict, self._open, self._recovered = self._open, None, 0
        return [Change(verdict, False)] if verdict else []
