"""What most of a run's time goes to."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence

from otel_ddp.diagnosis.alignment import shift_by_clock
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
_MAY_TAKE = {
    "data": 0.20,
    "comm_wait": 0.30,
    "late_in_turn": 0.20,
    "saving": 0.20,
    "other": 0.30,
    "compile": 0.20,
}
# A verdict stands until its share is this much below what it may take.
_STANDS = 0.8
_COMPUTE = ("forward", "backward", "optimizer")

_TOLD = {
    "data": "input-bound: {share} of the step is waiting for batches. More workers of the "
    "loader, prefetching, or faster storage would help.",
    "comm_wait": "communication-bound: {share} of the step is waiting for other ranks, on "
    "every rank of this node at once. Larger batches, gradient accumulation or a faster network "
    "would help{elsewhere}.",
    "late_in_turn": "{share} of the step is waiting for ranks that are late in turn, another one "
    "in each step, as where batches differ from step to step. Sort or bucket them by length.",
    "saving": "{share} of the time goes to checkpoints and evaluation. Do them less often, or "
    "save in the background.",
    "other": "{share} of the step lies between the phases: moving batches, losses, logging{own}",
    "compile": "{share} of the time goes to torch.compile, again and again. Look for shapes "
    "that change.",
    "compute": "compute-bound: {share} of the step is forward, backward and the optimizer.",
}
_DEVICE = (
    ". On a GPU it is also where a loop waits for the device: .item(), .cpu(), print of a tensor."
)
_OWN = ", or waiting for other ranks in collectives of your own."
_ELSEWHERE = "; or a rank on another node is late"
_IN_IT = " It may be waiting for other ranks, too: you have collectives of your own in {words}."


class _Rank:
    """One rank's last steps."""

    def __init__(self) -> None:
        self.seen = 0
        self.steps: deque[StepFacts] = deque(maxlen=_STEPS)

    def shares(self) -> dict[str, float]:
        """Of its time, by what it went to."""
        _, _, took_ns, _, phases_ns, unusual_ns, _, _ = zip(*self.steps, strict=True)
        columns = zip(*phases_ns, strict=True)
        spent_ns = dict(zip(WORK_PHASES, map(sum, columns), strict=True))
        unusual_ns = tuple(filter(None, unusual_ns))
        for word in UNUSUAL_PHASES:
            spent_ns[word] = sum([each.get(word, 0) for each in unusual_ns])
        total_ns = {
            "compute": sum(spent_ns[word] for word in _COMPUTE),
            "saving": spent_ns["checkpoint"] + spent_ns["eval"],
            **{word: spent_ns[word] for word in ("data", "other", "compile")},
        }
        step_ns = sum(took_ns)
        return {word: each_ns / step_ns for word, each_ns in total_ns.items()}


class Bounds:
    """The ranks of one run on this node."""

    def __init__(self) -> None:
        self._ranks: dict[Who, _Rank] = {}
        self._waits_unknown: set[Who] = set()
        self._own_of: dict[Who, Collection[str]] = {}
        self._world_size = 0
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

    def own_collectives(self, who: Who, phases: Collection[str]) -> None:
        """In which phases the rank has collectives of the user's own: where one has, all have."""
        self._own_of[who] = phases
        if self._open:
            share = self._open.evidence["shares"][self._open.phase]
            sentence = self._sentence(self._open.phase, share)
            if sentence != self._open.sentence:
                self._open = self._open._replace(sentence=sentence)
                self._changes.append(Change(self._open, True))

    def _own(self) -> set[str]:
        return set().union(*self._own_of.values())

    def world_size(self, ranks: int) -> None:
        """How many ranks the whole job has, on all its nodes."""
        self._world_size = ranks

    def feed(self, who: Who, steps: Sequence[StepFacts]) -> None:
        """More steps of a rank, ordinary or not."""
        rank = self._ranks.get(who)
        if rank is None:
            rank = self._ranks[who] = _Rank()
        rest = steps[max(_LEFT_OUT - rank.seen, 0) :]
        rank.seen += len(steps)
        look_at = _LOOK_STEPS * len(self._ranks)
        while rest:
            some = rest[: max(look_at - self._fed, 0) or len(rest)]
            rank.steps.extend(some)
            self._fed += len(some)
            if self._fed >= look_at and self._judge(who, some[-1]):
                self._fed = 0
            rest = rest[len(some) :]

    def forget(self, who: Who) -> None:
        """The process is gone."""
        self._ranks.pop(who, None)
        self._waits_unknown.discard(who)
        self._own_of.pop(who, None)
        if not self._ranks and self._open:
            self._changes.append(Change(self._open, False))
            self._open = None

    def poll(self) -> list[Change]:
        """What has changed since the last look."""
        changes, self._changes = self._changes, []
        return changes

    def shares(self) -> Mapping[str, float]:
        """What the time of the run's typical rank goes to; empty while there are too few steps."""
        ranks = self._ranks.values()
        if not ranks or any(len(rank.steps) < _STEPS for rank in ranks):
            return {}
        beside = self._same_steps()
        if len(beside[0]) < _STEPS / 2:
            # Of the others these steps have not been read yet.
            return {}
        told = [rank.shares() for rank in ranks]
        # Of two ranks the lower one: where only one waits for data, it is a straggler, no bound.
        shares = {word: _lower_middle([each[word] for each in told]) for word in told[0]}
        for word in self._own() & shares.keys():
            # Who is late waits least there, and the others for it.
            shares[word] = min([each[word] for each in told])
        return {**shares, **_waits(beside)}

    def _same_steps(self) -> list[list[StepFacts]]:
        """Of each rank those of its last steps that all have, one beside the other."""
        first, *others = [list(rank.steps) for rank in self._ranks.values()]
        by_number = [{each.number: each for each in first}]
        for steps in others:
            told = {each.number: each for each in steps}
            if len(told.keys() & by_number[0]) < _STEPS / 2:
                shift = shift_by_clock(first, steps) or 0
                told = {each.number + shift: each for each in steps}
            by_number.append(told)
        common = set.intersection(*map(set, by_number))
        return [[told[number] for number in common] for told in by_number]

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

    def _judge(self, who: Who, facts: StepFacts) -> bool:
        """False: the ranks' steps cannot be compared yet."""
        shares = self.shares()
        if shares:
            self._weigh(who, facts, shares)
        return bool(shares)

    def _weigh(self, who: Who, facts: StepFacts, shares: Mapping[str, float]) -> None:
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
        sentence = self._sentence(leading, shares[leading])
        evidence = {"shares": ratios(shares), "steps": _STEPS}
        self._open = Verdict(
            "bound", run_of(who), leading, sentence, evidence, facts.number, facts.ended_ns
        )
        self._changes.append(Change(self._open, True))

    def _sentence(self, leading: str, share: float) -> str:
        own = self._own()
        sentence = _TOLD[leading].format(
            share=percent(share),
            own=_OWN if "other" in own else _DEVICE,
            elsewhere="" if 0 < self._world_size <= len(self._ranks) else _ELSEWHERE,
        )
        inside = own.intersection(_COMPUTE if leading == "compute" else (leading,)) - {"other"}
        if inside:
            sentence += _IN_IT.format(words=", ".join(sorted(inside)))
        if self._waits_unknown:
            sentence += " Waiting for other ranks is in these phases, and not seen by itself."
        return sentence


def _waits(columns: Sequence[Sequence[StepFacts]]) -> dict[str, float]:
    """Shares of waiting for other ranks, by whom it is for."""
    took_ns = sum([each.took_ns for steps in columns for each in steps]) / len(columns)
    waits_ns = [[each.wait_ns for each in steps] for steps in columns]
    summed_ns = list(map(sum, waits_ns))
    # The rank that waits least in a step has nobody on this node to wait for. Where that is always
    # the same one, it is late; where it is another one each time, they are late in turn.
    for_all_ns = sum(map(min, zip(*waits_ns, strict=True)))
    return {
        "comm_wait": for_all_ns / took_ns,
        "late_in_turn": (min(summed_ns) - for_all_ns) / took_ns,
        "late_ranks": max(middle(summed_ns) - min(summed_ns), 0.0) / took_ns,
    }


def _lower_middle(values: list[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]
