"""What most of a run's time goes to."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from otel_ddp.diagnosis.facts import (
    UNUSUAL_PHASES,
    WORK_PHASES,
    StepFacts,
    middle,
    percent,
    ratios,
    run_of,
)
from otel_ddp.diagnosis.verdict import Change, Verdict, Who

_STEPS = 100
# The first ones allocate, compile, and start workers.
_LEFT_OUT = 20
_LOOK_STEPS = 50
# So many looks must agree before the first verdict, or before another one.
_LOOKS = 4
# What may take this much of the time before it is what bounds the run.
_MAY_TAKE = {"data": 0.20, "comm_wait": 0.30, "saving": 0.20, "other": 0.30, "compile": 0.20}
# A verdict stands until its share is this much below what it may take.
_STANDS = 0.8
_COMPUTE = ("forward", "backward", "optimizer")

_TOLD = {
    "data": "input-bound: {share} of the step is waiting for batches. More workers of the "
    "loader, prefetching, or faster storage would help.",
    "comm_wait": "communication-bound: {share} of the step is waiting for other ranks, on "
    "every rank of this node. Larger batches, gradient accumulation or a faster network would "
    "help; or a rank on another node is late.",
    "saving": "{share} of the time goes to checkpoints and evaluation. Do them less often, or "
    "save in the background.",
    "other": "{share} of the step lies between the phases: moving batches, losses, logging. "
    "On a GPU it is also where a loop waits for the device: .item(), .cpu(), print of a tensor.",
    "compile": "{share} of the time goes to torch.compile, again and again. Look for shapes "
    "that change.",
    "compute": "compute-bound: {share} of the step is forward, backward and the optimizer.",
}


class _Rank:
    """One rank's last steps."""

    def __init__(self) -> None:
        self.seen = 0
        self.steps: deque[StepFacts] = deque(maxlen=_STEPS)

    def shares(self) -> dict[str, float]:
        """Of its time, by what it went to."""
        _, _, took_ns, wait_ns, phases_ns, unusual_ns, _, _ = zip(*self.steps, strict=True)
        columns = zip(*phases_ns, strict=True)
        spent_ns = dict(zip(WORK_PHASES, map(sum, columns), strict=True))
        unusual_ns = tuple(filter(None, unusual_ns))
        for word in UNUSUAL_PHASES:
            spent_ns[word] = sum([each.get(word, 0) for each in unusual_ns])
        total_ns = {
            "compute": sum(spent_ns[word] for word in _COMPUTE),
            "saving": spent_ns["checkpoint"] + spent_ns["eval"],
            "comm_wait": sum(wait_ns),
            **{word: spent_ns[word] for word in ("data", "other", "compile")},
        }
        step_ns = sum(took_ns)
        return {word: each_ns / step_ns for word, each_ns in total_ns.items()}


class Bounds:
    """The ranks of one run on this node."""

    def __init__(self) -> None:
        self._ranks: dict[Who, _Rank] = {}
        self._waits_unknown: set[Who] = set()
        self._fed = 0
        self._open: Verdict | None = None
        self._candidate = ""
        self._looks = 0
        self._changes: list[Change] = []

    def waits_known(self, who: Who, known: bool) -> None:
        """Whether the rank's waiting for others is told apart from its work."""
        if known:
            self._waits_unknown.discard(who)
        else:
            self._waits_unknown.add(who)

    def feed(self, who: Who, steps: Sequence[StepFacts]) -> None:
        """More steps of a rank, ordinary or not."""
        rank = self._ranks.get(who)
        if rank is None:
            rank = self._ranks[who] = _Rank()
        rest = steps[max(_LEFT_OUT - rank.seen, 0) :]
        rank.seen += len(steps)
        look_at = _LOOK_STEPS * len(self._ranks)
        while rest:
            some = max(look_at - self._fed, 1)
            rank.steps.extend(rest[:some])
            self._fed += len(rest[:some])
            if self._fed >= look_at:
                self._fed = 0
                self._judge(who, rest[:some][-1])
            rest = rest[some:]

    def forget(self, who: Who) -> None:
        """The process is gone."""
        self._ranks.pop(who, None)
        self._waits_unknown.discard(who)
        if not self._ranks and self._open:
            self._changes.append(Change(self._open, False))
            self._open = None

    def look(self) -> list[Change]:
        """What has changed since the last look."""
        changes, self._changes = self._changes, []
        return changes

    def shares(self) -> Mapping[str, float]:
        """What the time of the run's typical rank goes to; empty while there are too few steps."""
        told = [rank.shares() for rank in self._ranks.values() if len(rank.steps) == _STEPS]
        if not told or len(told) < len(self._ranks):
            return {}
        # Of two ranks the lower one: where only one waits for data, it is a straggler, no bound.
        shares = {word: _lower_middle([each[word] for each in told]) for word in told[0]}
        # The rank that waits least has nobody on this node to wait for: the rest is lateness.
        shares["comm_wait"] = min(each["comm_wait"] for each in told)
        waits = middle([each["comm_wait"] for each in told])
        shares["late_ranks"] = max(waits - shares["comm_wait"], 0.0)
        return shares

    def _leading(self, shares: Mapping[str, float]) -> str:
        present = self._open.phase if self._open else ""
        over = {
            word: shares[word] / limit
            for word, limit in _MAY_TAKE.items()
            if shares[word] > (_STANDS * limit if word == present else limit)
        }
        if present in over:
            # It stays what it is unless something else is far more.
            over[present] *= 1 / _STANDS
        if over:
            return max(over, key=lambda word: over[word])
        return "compute" if shares["compute"] > 0.5 else ""

    def _judge(self, who: Who, facts: StepFacts) -> None:
        shares = self.shares()
        if not shares:
            return
        leading = self._leading(shares)
        self._looks = self._looks + 1 if leading == self._candidate else 1
        self._candidate = leading
        if self._looks < _LOOKS or leading == (self._open.phase if self._open else ""):
            return
        if not leading:
            if self._open:
                self._changes.append(Change(self._open, False))
            self._open = None
            return
        sentence = _TOLD[leading].format(share=percent(shares[leading]))
        if self._waits_unknown:
            sentence += " Waiting for other ranks is in these phases, and not seen by itself."
        evidence = {"shares": ratios(shares), "steps": _STEPS}
        self._open = Verdict(
            "bound", run_of(who), leading, sentence, evidence, facts.number, facts.ended_ns
        )
        self._changes.append(Change(self._open, True))


def _lower_middle(values: list[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]
