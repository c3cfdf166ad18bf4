"""Finds the bottleneck of a run: data, computation, waiting, or the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from otel_ddp.diagnosis.detector import Detector, Observation, RankState
from otel_ddp.diagnosis.medians import lower_median, median
from otel_ddp.diagnosis.say import COLLECT_TOGETHER, percent, rounded
from otel_ddp.diagnosis.step_facts import StepFacts
from otel_ddp.diagnosis.straggler.alignment import shift_by_clock
from otel_ddp.diagnosis.straggler.host_pace import LaunchNeed
from otel_ddp.diagnosis.verdict import Change, Labels, Verdict, run_labels
from otel_ddp.vocabulary.words import COMPUTE_PHASES, GARBAGE, UNUSUAL_PHASES, WORK_PHASES

_STEPS = 100
# Of very many ranks, so many tell where the time of the typical one goes.
_MOST_RANKS = 256
# The first steps allocate, compile, and start workers.
_FIRST_STEPS = 20
_CHECK_EVERY = 50
# So many checks must agree before the first verdict, or before another one.
_CHECKS = 4
# The share of the time above which each of these bounds the run.
_LIMITS = {
    "data": 0.20,
    "comm_wait": 0.30,
    "late_in_turn": 0.20,
    GARBAGE: 0.20,
    "saving": 0.20,
    "other": 0.30,
    "compile": 0.20,
    "launch": 0.40,
}
_DATA = WORK_PHASES.index("data")
_COMPUTE = [WORK_PHASES.index(word) for word in COMPUTE_PHASES]
# A verdict stays until its share is below this part of the limit.
_STAYS = 0.8

_SENTENCES = {
    "data": "input-bound: {share} of the step is waiting for batches. More loader workers, "
    "prefetching, or faster storage would help.",
    "comm_wait": "communication-bound: {share} of the step is waiting for other ranks, on "
    "every rank of {where} at once. Larger batches, gradient accumulation or a faster network "
    "would help.",
    "late_in_turn": "{share} of the step is waiting for ranks that are late in turn: another rank "
    "in each step, as happens where batches differ in length. Sort or bucket them by length.",
    GARBAGE: "in {share} of the step a rank collects Python's garbage, and all wait for it. "
    f"{COLLECT_TOGETHER}",
    "saving": "{share} of the time goes to checkpoints and evaluation. Do them less often, or "
    "save in the background.",
    "other": "{share} of the step lies between the phases: moving batches, losses, logging, "
    "collectives of your own. On a GPU a loop also waits for the device here: .item(), .cpu(), "
    "printing a tensor.",
    "compile": "{share} of the time goes to repeated compilation by torch.compile. Look for shapes "
    "that change.",
    "launch": "launch-bound: in {share} of the step, in forward, backward and the optimizer, the "
    "device has no more to do than the host launches at the moment. Larger batches, torch.compile "
    "or graphs (torch.compile's `reduce-overhead`) would help.",
    "compute": "compute-bound: {share} of the step is forward, backward and the optimizer.",
}


class _Rank:
    """One rank's last steps."""

    def __init__(self) -> None:
        self.state = RankState(())
        self.seen = 0
        self.steps: deque[StepFacts] = deque(maxlen=_STEPS)
        self._launches = LaunchNeed()

    def learn(self, steps: Sequence[StepFacts]) -> None:
        """More steps, the first ones too: what its host needs may show in these alone."""
        self.seen += len(steps)
        if steps and steps[0].paced_ns is not None:
            for each in steps:
                self._launches.follow(each)

    def shares(self) -> dict[str, float]:
        """The share of its time that each use took."""
        _, _, took_ns, _, phases_ns, unusual_ns, _, _, paced_ns, *_ = zip(*self.steps, strict=True)
        columns = zip(*phases_ns, strict=True)
        spent_ns = dict(zip(WORK_PHASES, map(sum, columns), strict=True))
        unusual_ns = tuple(filter(None, unusual_ns))
        for word in UNUSUAL_PHASES:
            spent_ns[word] = sum([each.get(word, 0) for each in unusual_ns])
        total_ns = {
            "compute": sum(spent_ns[word] for word in COMPUTE_PHASES),
            "saving": spent_ns["checkpoint"] + spent_ns["eval"],
            **{word: spent_ns[word] for word in ("data", "other", "compile")},
            "launch": sum([sum(map(each.__getitem__, _COMPUTE)) for each in paced_ns if each]),
        }
        step_ns = sum(took_ns)
        return {word: each_ns / step_ns for word, each_ns in total_ns.items()}

    def data_on_host(self) -> float:
        """The share of its time that the host of a rank with a device waits for batches."""
        spent_ns = [each.host_ns[_DATA] for each in self.steps if each.host_ns]
        return sum(spent_ns) / sum([each.took_ns for each in self.steps])

    def launches_on_host(self) -> float:
        """The share of its time that its host needs to launch; 0 where that is not known."""
        step_ns = sum([each.took_ns for each in self.steps]) / len(self.steps)
        return self._launches.usual_ns(step_ns) / step_ns


class Bounds(Detector):
    """The ranks of one run."""

    def __init__(self) -> None:
        self._ranks: dict[Labels, _Rank] = {}
        self._fed = 0
        self._open: Verdict | None = None
        # The sums of the shares that the checks found since it was opened, and how many these are.
        self._sums: Mapping[str, float] = {}
        self._found = 0
        self._candidate = ""
        self._checks = 0
        self._changes: list[Change] = []

    def feed(self, rank: RankState, seen: Observation) -> None:
        """Unusual steps count too."""
        if rank.is_beside or seen.ended is not None:
            self.forget(rank.labels)
        elif seen.facts and (rank.labels in self._ranks or len(self._ranks) < _MOST_RANKS):
            known = self._ranks.setdefault(rank.labels, _Rank())
            known.state = rank
            self._feed_steps(known, [each for each in seen.facts if each.measured])

    def _feed_steps(self, rank: _Rank, steps: Sequence[StepFacts]) -> None:
        rest = steps[max(_FIRST_STEPS - rank.seen, 0) :]
        rank.learn(steps)
        check_at = _CHECK_EVERY * len(self._ranks)
        while rest:
            some = rest[: max(check_at - self._fed, 0) or len(rest)]
            rank.steps.extend(some)
            self._fed += len(some)
            if self._fed >= check_at and (shares := self._shares()):
                self._fed = 0
                self._judge(some[-1], shares)
            rest = rest[len(some) :]

    def forget(self, labels: Labels) -> None:
        if self._ranks.keys() == {labels}:
            self._close()
        self._ranks.pop(labels, None)

    def poll(self, now_ns: int) -> list[Change]:
        changes, self._changes = self._changes, []
        return changes

    def present(self) -> list[Verdict]:
        """The open verdict, with the shares of the last check that found the same bound."""
        return [self._open] if self._open else []

    def _shares(self) -> Mapping[str, float]:
        """Where the time of the typical rank goes; empty while its steps cannot be compared yet."""
        ranks = self._ranks.values()
        if not ranks or any(len(rank.steps) < _STEPS for rank in ranks):
            return {}
        steps = self._same_steps()
        if len(steps[0]) < _STEPS / 2:
            # These steps of the other ranks have not been read yet.
            return {}
        by_rank = [rank.shares() for rank in ranks]
        # Of two ranks the lower one: a single rank that waits for data is a straggler, not a bound.
        shares = {word: lower_median([each[word] for each in by_rank]) for word in by_rank[0]}
        # Where all loaders are slow, a device whose host happens to be ahead does not run dry.
        # The same is true where all hosts launch slowly.
        for word, on_host in (("data", _Rank.data_on_host), ("launch", _Rank.launches_on_host)):
            by_host = lower_median(list(map(on_host, ranks)))
            shares[word] = max(shares[word], min(by_host, max(each[word] for each in by_rank)))
        for word in {word for rank in ranks for word in rank.state.own_collectives} & shares.keys():
            # A late rank waits least there, and the others wait for it.
            shares[word] = min([each[word] for each in by_rank])
        return {**shares, **_waits(steps), GARBAGE: _garbage(steps)}

    def _same_steps(self) -> list[list[StepFacts]]:
        """For each rank, those of its last steps that all ranks have, in one order."""
        first, *others = [list(rank.steps) for rank in self._ranks.values()]
        by_number = [{each.number: each for each in first}]
        for steps in others:
            numbered = {each.number: each for each in steps}
            if len(numbered.keys() & by_number[0]) < _STEPS / 2:
                shift = shift_by_clock(first, steps) or 0
                numbered = {each.number + shift: each for each in steps}
            by_number.append(numbered)
        common = set.intersection(*map(set, by_number))
        return [[numbered[number] for number in common] for numbered in by_number]

    def _leading(self, shares: Mapping[str, float]) -> str:
        present = self._open.phase if self._open else ""
        over = {
            word: shares[word] / limit
            for word, limit in _LIMITS.items()
            if shares[word] > (_STAYS * limit if word == present else limit)
        }
        if present in over:
            # The present bound stays unless another one is far above its limit.
            over[present] *= 1 / _STAYS
        if over:
            return max(over, key=lambda word: over[word])
        return "compute" if shares["compute"] > 0.5 else ""

    def _judge(self, facts: StepFacts, shares: Mapping[str, float]) -> None:
        """*facts*: the last step."""
        leading = self._leading(shares)
        self._checks = self._checks + 1 if leading == self._candidate else 1
        self._candidate = leading
        if leading == (self._open.phase if self._open else ""):
            if self._open:
                self._add(shares)
                self._open = self._open._replace(**self._figures(leading, shares))
            return
        if self._checks < _CHECKS:
            return
        self._close()
        if not leading:
            return
        self._add(shares)
        self._open = Verdict(
            "bound",
            run_labels(next(iter(self._ranks))),
            leading,
            **self._figures(leading, shares),
            step=facts.number,
            since_ns=facts.ended_ns,
        )
        self._changes.append(Change(self._open, True))

    def _close(self) -> None:
        """It is over, with the shares of its whole time: the last steps may be of another bound."""
        if self._open:
            shares = {word: each / self._found for word, each in self._sums.items()}
            over = self._open._replace(**self._figures(self._open.phase, shares))
            self._changes.append(Change(over, False))
        self._open, self._sums, self._found = None, {}, 0

    def _add(self, shares: Mapping[str, float]) -> None:
        self._sums = {word: self._sums.get(word, 0.0) + share for word, share in shares.items()}
        self._found += 1

    def _figures(self, leading: str, shares: Mapping[str, float]) -> dict[str, Any]:
        """What of a verdict moves with the shares."""
        nodes = {dict(labels).get("node") for labels in self._ranks}
        where = "this node" if len(nodes) == 1 else "the run"
        sentence = _SENTENCES[leading].format(share=percent(shares[leading]), where=where)
        if leading == "comm_wait" and len(nodes) == 1:
            sentence += " If the run has other nodes, a rank there may be late."
        if any(rank.state.waits_known is False for rank in self._ranks.values()):
            sentence += " A phase may hold waits for other ranks, which cannot be told apart here."
        return {"sentence": sentence, "evidence": {"shares": rounded(shares), "steps": _STEPS}}


def _garbage(columns: Sequence[Sequence[StepFacts]]) -> float:
    """The share of the time in which some rank collects garbage, if the typical rank does."""
    took_ns = sum([each.took_ns for steps in columns for each in steps]) / len(columns)
    collected_ns = [[each.garbage_ns for each in steps] for steps in columns]
    in_turn_ns = sum(map(max, zip(*collected_ns, strict=True)))
    typical_ns = lower_median(list(map(sum, collected_ns)))
    return float(min(in_turn_ns, len(columns) * typical_ns) / took_ns)


def _waits(columns: Sequence[Sequence[StepFacts]]) -> dict[str, float]:
    """Shares of the time that ranks wait for each other, by what the wait is for."""
    took_ns = sum([each.took_ns for steps in columns for each in steps]) / len(columns)
    waits_ns = [[each.wait_ns for each in steps] for steps in columns]
    summed_ns = list(map(sum, waits_ns))
    # The rank that waits least in a step waits for no rank of this node. If that is always the same
    # rank, it is late; if it is another one each time, they are late in turn.
    for_all_ns = sum(map(min, zip(*waits_ns, strict=True)))
    return {
        "comm_wait": for_all_ns / took_ns,
        "late_in_turn": (min(summed_ns) - for_all_ns) / took_ns,
        "late_ranks": max(median(summed_ns) - min(summed_ns), 0.0) / took_ns,
    }
